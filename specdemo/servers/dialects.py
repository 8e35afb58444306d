"""The kinds of servers: how they are recognised, and what all of them can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import ValidationError

from ..errors import BadInput
from ..models.tables import table_as
from ..settings import Settings
from .address import Address
from .client import Client, at
from .llamacpp import LlamaCpp
from .sglang import SGLang
from .steps import Counters, Prompt, ServerReport, Step
from .vllm import VLLM


class Dialect(Protocol):
    """One kind of server. `facts` are its engine, version and model, as it reports them."""

    client: Client
    facts: dict[str, str]

    def prompt_of(self, text: str, raw: bool) -> Prompt:
        """A text as the server's model reads it: as it is, or in the server's own chat template."""

    def steps(self, prompt: Prompt, settings: Settings, report: ServerReport) -> Iterator[Step]:
        """One text, greedy or sampled. Fills in `report`, which is complete after the last step."""

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""

    def logprobs(self, prompt: Prompt, ids: Sequence[int]) -> dict[int, float]:
        """The log-probabilities of the likeliest tokens after a prompt and some tokens of its answer; none if the
        server does not say. Their differences are those of the logits.
        """

    def counters(self) -> Counters | None:
        """The server's counters; None if it does not show them."""


@dataclass(frozen=True, slots=True)
class _Model:
    """The first in a list of models."""

    id: Annotated[str, at("data", 0, "id")]
    owner: Annotated[str, at("data", 0, "owned_by")]


@contextmanager
def connected(address: Address, key: str | None = None) -> Iterator[Dialect]:
    """The server at an address. An empty `key` counts as none."""
    with Client(address, key or None) as client:
        yield find_dialect(client)


def find_dialect(client: Client) -> Dialect:
    """Recognise the kind of a server by what it says of its models."""
    answer = client.get("/v1/models")
    with suppress(ValidationError):
        model = table_as(_Model, answer)
        if model.owner == "llamacpp":
            return LlamaCpp(client)
        if model.owner in ("vllm", "sglang"):
            return (VLLM if model.owner == "vllm" else SGLang)(client, model.id)
    raise BadInput(f"What answers at {client.address} is neither llama.cpp's server nor vLLM nor SGLang.")

"""llama.cpp: its server on the same GGUF file.

It gets the same token ids as our methods. Its own timings are used, which contain neither HTTP nor the detokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from specdemo.errors import BadInput
from specdemo.models.loaded import Loaded
from specdemo.models.source import Source
from specdemo.models.store import Progress
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.llamacpp import LlamaCpp, body_of
from specdemo.servers.llamacpp_process import started
from specdemo.settings import Settings
from specdemo.studies.greedy import check_tokens

from .cases import DRAFTING, LLAMA, NGRAM, Case
from .rows import Row, run_of

ANSWER_SECONDS = 3600


class Server:
    """A running server that writes texts."""

    def __init__(self, address: str, version: str) -> None:
        self.client = Client(Address.read(address), silent_seconds=ANSWER_SECONDS)  # a whole text comes at once
        try:
            self.dialect = LlamaCpp(self.client)
        except BadInput:
            self.client.close()
            raise
        self.facts = {"version": version, "model": self.dialect.facts["model"]}

    def generate(self, prompt_ids: Sequence[int], settings: Settings) -> Row:
        """One text. It is not streamed, so that nothing but the server works."""
        return answered(self.client.post("/completion", **body_of(prompt_ids, settings), return_tokens=True))


def answered(answer: Mapping[str, Any]) -> Row:
    """A run from an answer of `/completion`.

    The time of the first token is part of the prompt's. A round emits the tokens that passed and one more, which is how
    rounds can be counted; the server does not report how many guesses were tested.
    """
    try:
        timings = answer["timings"]
        tokens = int(timings["predicted_n"])
        prompt, after = (float(timings[name]) / 1000 for name in ("prompt_ms", "predicted_ms"))
        drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
        token_ids = [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput("The server's answer holds no timings: it is no llama.cpp server, or too old a one.") from error
    rounds = max(tokens - 1 - accepted, 1) if tokens > 1 else 0
    return run_of(token_ids, prompt + after, prompt, tokens, accepted=accepted, drafted=drafted, rounds=rounds)


@contextmanager
def servers(loaded: Loaded, asked: Sequence[Case], context: int, progress: Progress) -> Iterator[dict[Case, Server]]:
    """A server for each of the cases that are llama.cpp's, each in a process of its own, ended at the end.

    Args:
        context: the most tokens that a server must hold. Each keeps a cache of this size.

    Raises:
        LoadError: the GGUF file cannot be had.
    """
    ours = [case for case in asked if case.method in (LLAMA, NGRAM, DRAFTING)]
    with ExitStack() as running:
        found: dict[Case, Server] = {}
        for case in ours:
            found[case] = Server(*running.enter_context(started(_asked(loaded, case, context, progress))))
            running.callback(found[case].client.close)
            check_tokens(loaded, found[case].dialect, loaded.encode("The same tokens?"))
        yield found


def _asked(loaded: Loaded, case: Case, context: int, progress: Progress) -> dict[str, Any]:
    """What `started` is to serve for a case."""

    def gguf(source: Source | None) -> str:
        assert source is not None
        return str(source.found(progress).gguf_path(progress))

    return {
        "gguf": gguf(loaded.preset.target),
        "draft_gguf": gguf(loaded.preset.draft_model) if case.method == DRAFTING else None,
        "ngram": int(str(case.drafter).split()[-1]) if case.method == NGRAM else None,
        "k": case.k,
        "threads": torch.get_num_threads(),
        "context": context,
    }

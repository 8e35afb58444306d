"""What quantized weights cost in quality: the perplexity of texts, beside that of the same model in float32.

Weights as a GGUF file stores them are also compared with llama.cpp on that file, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, inf
from typing import TYPE_CHECKING, Any

from ..servers.address import Address
from ..servers.client import Client
from ..servers.llamacpp import LlamaCpp
from ..servers.llamacpp_process import can_start, started
from ..system.imports import Later
from ..types import BadInput
from .prompts import readable
from .statistics import Spread, pooled_rate
from .study import some_of_each

if TYPE_CHECKING:
    import torch

    from ..models import loaded as models
    from ..models import store
    from ..models.loaded import Loaded
    from ..models.presets import Preset
    from ..system import hardware
    from . import greedy
else:
    torch = Later("torch")
    models = Later("specdemo.models.loaded")
    store = Later("specdemo.models.store")
    hardware = Later("specdemo.system.hardware")
    greedy = Later("specdemo.studies.greedy")

TEXTS = 24  # that people wrote to a chat model
REFERENCE = "float32"
LLAMACPP = "llama.cpp, the same file"
COMPARING = "Comparing perplexity with float32 weights"
COMPARING_LLAMACPP = "Comparing perplexity with llama.cpp"
COLUMNS = (
    *(("weights", "weights", ""), ("texts", "texts", "d"), ("tokens", "tokens", ",")),
    *(("perplexity", "perplexity", ".2f"), ("ratio", "to float32", ".3f")),
)

Loss = tuple[float, int]
"""Of a text: minus the sum of the logarithms of the probabilities of its tokens but the first, and their number."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(mean loss of a token) over all texts, and its ratio to that in float32; the intervals are over texts."""

    weights: str
    texts: int
    tokens: int
    perplexity: Spread | None
    ratio: Spread | None = None

    @classmethod
    def of(cls, weights: str, losses: Sequence[Loss], reference: Sequence[Loss] | None = None) -> Perplexity:
        """
        Args:
            losses: of texts of two tokens or more.
            reference: those of the same texts in float32; None if these are they.
        """
        loss = pooled_rate(losses)
        ratio = None
        if reference is not None:
            both = zip(losses, reference, strict=True)
            ratio = _exp(pooled_rate([(one - other, count) for (one, count), (other, _) in both], least=-inf))
        return cls(weights, len(losses), sum(count for _, count in losses), _exp(loss), ratio)

    def as_row(self) -> dict[str, Any]:
        """Its figures by their names; those that have an interval as `Spread`."""
        return {name: getattr(self, name) for name in self.__slots__}


def _exp(spread: Spread | None) -> Spread | None:
    if spread is None:
        return None
    low, high = (None if end is None else exp(end) for end in (spread.low, spread.high))
    return Spread(exp(spread.mean), low, high, spread.count)


def is_quantized(loaded: Loaded) -> bool:
    return loaded.weights_dtype in hardware.QUANTIZED.values()


def losses_of(loaded: Loaded, texts: Sequence[Sequence[int]]) -> Iterator[Loss]:
    """The loss of each text, of token ids, by the target.

    Raises:
        MemoryError: there is none left.
    """
    for ids in texts:
        with torch.inference_mode():
            runner = loaded.target_runner(len(ids))
            first = runner.prefill(ids[:1])
            logits = torch.cat([first, runner.forward(ids[1:-1])]) if len(ids) > 2 else first
            following = torch.tensor(ids[1:], device=logits.device)
            loss = torch.nn.functional.cross_entropy(logits.float(), following, reduction="sum")
        yield float(loss), len(ids) - 1


def compared(loaded: Loaded, found: list[Perplexity], notes: list[str]) -> Iterator[str]:
    """Put the perplexity of the target into `found`, as it is loaded, then in float32 and of llama.cpp, step by step.

    Args:
        notes: gets a sentence if llama.cpp is installed and fails.
    Raises:
        BadInput, LoadError: float32 weights cannot be loaded beside those that are, or the model reads none of the
            texts.
    """
    prompts, _ = readable(loaded, some_of_each("written", TEXTS))
    texts = [ids for one in prompts if len(ids := loaded.encode(one.prompt, raw=True)[: loaded.context]) > 1]
    losses: list[Loss] = []
    for loss in losses_of(loaded, texts):
        losses.append(loss)
        yield COMPARING
    with loaded_as(replace(loaded.preset, draft_model=None, heads={}), REFERENCE, str(loaded.device)) as exact:
        reference: list[Loss] = []
        for loss in losses_of(exact, texts):
            reference.append(loss)
            yield COMPARING
    weights = hardware.dtype_name(loaded.weights_dtype)
    found += [Perplexity.of(weights, losses, reference), Perplexity.of(REFERENCE, reference)]
    if loaded.weights_dtype == hardware.AS_STORED and loaded.preset.target.has_gguf and can_start():
        theirs: list[Loss] = []
        try:
            for loss in losses_of_llamacpp(loaded, texts):
                theirs.append(loss)
                yield COMPARING_LLAMACPP
        except (BadInput, store.LoadError) as error:
            notes.append(f"The perplexity was not compared with llama.cpp: {error}")
        else:
            found.append(Perplexity.of(LLAMACPP, theirs, reference))


def losses_of_llamacpp(loaded: Loaded, texts: Sequence[Sequence[int]]) -> Iterator[Loss]:
    """The loss of each text by llama.cpp's server on the GGUF file of the target, with as many threads.

    Raises:
        BadInput, LoadError: the server or its file cannot be had.
    """
    gguf = str(loaded.preset.target.found(store.ignore).gguf_path(store.ignore))
    asked = {"gguf": gguf, "threads": torch.get_num_threads(), "context": max(map(len, texts)) + 1}
    with started(asked) as (address, _), Client(Address.read(address)) as client:
        server = LlamaCpp(client)
        greedy.check_tokens(loaded, server, texts[0])
        for ids in texts:
            yield server.loss(ids), len(ids) - 1


@contextmanager
def loaded_as(preset: Preset, dtype: str, device: str) -> Iterator[Loaded]:
    """A preset with weights of another type than those that are loaded, beside them.

    Raises:
        BadInput, LoadError: see `loaded.load`.
    """
    other = models.load(preset, dtype, device)
    try:
        yield other
    finally:
        other.release()

"""What quantized weights cost in quality: the perplexity of texts, beside that of the same model in float32.

Weights as a GGUF file stores them are also compared with llama.cpp on that file, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import exp, inf, sqrt
from typing import TYPE_CHECKING

from ..errors import BadInput
from ..servers.address import Address
from ..servers.client import Client
from ..servers.llamacpp import LlamaCpp
from ..servers.llamacpp_process import can_start, started
from ..system.imports import LazyModule
from .prompts import readable
from .statistics import Spread
from .study import some_of_each
from .summaries import Figure, Figures, Row, Runs, rate, share, summarise, total

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..engines import eager
    from ..engines.choose import MakeRunner
    from ..models import loaded as models
    from ..models import store
    from ..models.loaded import Loaded
    from ..models.presets import Preset
    from ..system import hardware
    from . import greedy
else:
    torch = LazyModule("torch")
    eager = LazyModule("specdemo.engines.eager")
    models = LazyModule("specdemo.models.loaded")
    store = LazyModule("specdemo.models.store")
    hardware = LazyModule("specdemo.system.hardware")
    greedy = LazyModule("specdemo.studies.greedy")

TEXTS = 24  # that people wrote to a chat model
PIECE = 512  # tokens of a longer text that are read at a time
REFERENCE = "float32"
LLAMACPP = "llama.cpp, the same file"
COMPARING = "Comparing perplexity with float32 weights"
COMPARING_LLAMACPP = "Comparing perplexity with llama.cpp"
COLUMNS = (
    ("weights", "weights", ""),
    ("texts", "texts", "d"),
    ("tokens", "tokens", ","),
    ("perplexity", "perplexity", ".2f"),
    ("ratio", "to float32", ".3f"),
    ("rms", "logits differ by (rms)", ".4f"),
    ("changed", "another likeliest token", ".2%"),
)


def _exp(figure: Figure) -> Figure:
    """Of a rate of logarithms."""

    def found(runs: Runs) -> Spread | None:
        if (spread := figure(runs)) is None:
            return None
        low, high = (None if end is None else exp(end) for end in (spread.low, spread.high))
        return Spread(exp(spread.mean), low, high, spread.count)

    return found


FIGURES: Figures = {
    "texts": len,
    "tokens": total("tokens"),
    "perplexity": _exp(rate("loss", "tokens")),
    "ratio": _exp(rate("more", "tokens", least=-inf)),
    "rms": lambda runs: None if (square := share("squares", "logits")(runs)) is None else sqrt(square),
    "changed": rate("changed", "places", 1.0),
}


def rows_of(runs: Runs) -> list[Row]:
    """A row for each kind of weights; intervals are over texts.

    `perplexity` is exp(mean loss of a token), and `ratio` its ratio to that in float32. `rms` is the root mean square
    of how much logits differ from those in float32, and `changed` the share of places where another token is the
    likeliest; of llama.cpp they are not known.
    """
    return summarise(runs, ("weights",), FIGURES, ("text",))


def difference(logits: Tensor, exact: Tensor) -> Row:
    """How the logits [T, V] of a text differ from those in float32."""
    squares = float((logits.float() - exact.float()).square().sum(dtype=torch.float64))
    changed = int((logits.argmax(-1) != exact.argmax(-1)).sum())
    return {"squares": squares, "logits": logits.numel(), "changed": changed, "places": len(logits)}


def is_quantized(loaded: Loaded) -> bool:
    return loaded.weights_dtype in hardware.QUANTIZED.values()


def logits_of(make_runner: MakeRunner, ids: Sequence[int]) -> Tensor:
    """The logits after each of T token ids but the last, [T - 1, V].

    Raises:
        MemoryError: there is none left.
    """
    with torch.inference_mode():
        runner = make_runner(len(ids))
        first = runner.prefill(ids[:1])
        return torch.cat([first, runner.forward(ids[1:-1])]) if len(ids) > 2 else first


def loss_of(logits: Tensor, ids: Sequence[int]) -> Row:
    """The loss of a text by its `logits_of`: minus the sum of the logarithms of the probabilities of its token ids but
    the first, and the number of these `tokens`."""
    following = torch.tensor(ids[1:], device=logits.device)
    loss = float(torch.nn.functional.cross_entropy(logits.float(), following, reduction="sum"))
    return {"loss": loss, "tokens": len(following)}


def compare_weights(loaded: Loaded, found: list[Row], notes: list[str], text: str = "") -> Iterator[str]:
    """Put the `rows_of` the target into `found`, as it is loaded, then in float32 and of llama.cpp, step by step.

    Args:
        notes: gets a sentence if llama.cpp is installed and fails.
        text: is read in pieces of `PIECE` tokens, not by llama.cpp; if there is none, `TEXTS` short texts are.
    Raises:
        LoadError: float32 weights cannot be loaded beside those that are, or the model reads none of the
            texts.
    """
    texts = _texts(loaded, text)
    ours, reference = list[Row](), list[Row]()
    weights = hardware.dtype_name(loaded.weights_dtype)
    with in_float32(loaded) as make_exact:
        for place, ids in enumerate(texts):
            logits, exact = (logits_of(make, ids) for make in (loaded.target_runner, make_exact))
            reference.append({"weights": REFERENCE, "text": place, **loss_of(exact, ids)})
            ours.append(
                _with_reference({"weights": weights, **loss_of(logits, ids), **difference(logits, exact)}, reference)
            )
            yield COMPARING
    found += rows_of([*ours, *reference])
    # llama.cpp's server is asked for each token by itself, which takes too long with long texts.
    if not text and loaded.weights_dtype in hardware.STORED and can_start():
        theirs = list[Row]()
        try:
            for beside, loss in zip(reference, losses_of_llamacpp(loaded, texts), strict=True):
                theirs.append(_with_reference({"weights": LLAMACPP, **loss}, [beside]))
                yield COMPARING_LLAMACPP
        except (BadInput, store.LoadError) as error:
            notes.append(f"The perplexity was not compared with llama.cpp: {error}")
        else:
            found += rows_of(theirs)


def _with_reference(run: Row, reference: Runs) -> Row:
    """With how much `more` its loss is than that of the last text in float32."""
    exact = reference[-1]
    return {**run, "text": exact["text"], "more": run["loss"] - exact["loss"]}


def _texts(loaded: Loaded, text: str) -> list[list[int]]:
    """Texts of two tokens or more."""
    if text:
        ids, size = loaded.encode(text, raw=True), min(PIECE, loaded.context)
        texts = [ids[start : start + size] for start in range(0, len(ids), size)]
    else:
        prompts, _ = readable(loaded, some_of_each("written", TEXTS))
        texts = [loaded.encode(one.prompt, raw=True)[: loaded.context] for one in prompts]
    return [ids for ids in texts if len(ids) > 1]


@contextmanager
def in_float32(loaded: Loaded) -> Iterator[MakeRunner]:
    """Makes runners of the target in float32, with the numbers that a GGUF file stores or those of the checkpoint.

    Raises:
        LoadError: see `loaded.load`.
    """
    if loaded.weights_dtype in hardware.STORED:  # other copies of a file may be rounded to bfloat16
        yield partial(eager.EagerRunner, loaded.model)
        return
    with loaded_as(replace(loaded.preset, draft_model=None, heads={}), REFERENCE, str(loaded.device)) as exact:
        yield exact.target_runner


def losses_of_llamacpp(loaded: Loaded, texts: Sequence[Sequence[int]]) -> Iterator[Row]:
    """The loss of each text by llama.cpp's server on the GGUF file of the target, with as many threads.

    Raises:
        LoadError: the server or its file cannot be had.
    """
    gguf = str(loaded.preset.target.found(store.ignore).gguf_path(store.ignore))
    chosen = {"gguf": gguf, "threads": torch.get_num_threads(), "context": max(map(len, texts)) + 1}
    with started(chosen) as (address, _), Client(Address.read(address)) as client:
        server = LlamaCpp(client)
        greedy.check_tokens(loaded, server, texts[0])
        for ids in texts:
            yield {"loss": server.loss(ids), "tokens": len(ids) - 1}


@contextmanager
def loaded_as(preset: Preset, dtype: str, device: str) -> Iterator[Loaded]:
    """A preset with weights of another type than those that are loaded, beside them.

    Raises:
        LoadError: see `loaded.load`.
    """
    other = models.load(preset, dtype, device)
    try:
        yield other
    finally:
        other.release()

"""Races on ZeroGPU, the Spaces that lend a GPU for the time of one call.

The package `spaces` runs a decorated function in a fork of this process, which alone has the GPU and which ends when
nobody has called it for a while. So this process keeps the preset on the CPU, for its tokenizer, for the Lab and for
all that is known of it. The fork loads the preset once more, on the GPU, and keeps it for the next race. Nothing that a
fork loses is handed over: neither threads nor CUDA's state, nor the events of a run that goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from ..models.one_loaded import Kept, load_kept
from ..models.presets import Preset
from ..racing.outcome import Outcome
from ..racing.request import Request
from ..racing.trace import Entry
from ..system.imports import import_quickly
from .budgets import Budgets
from .engine import Backend, EngineTrouble, LoadedRace

SLOWEST = 40.0  # tokens per second of a lane: less would be a preset that is too large
LOADING_SECONDS = 30.0  # at most, in a fork that has yet to load the preset
_kept: Kept = {}  # of the fork: the preset of its last race, on the GPU


def is_zero(environment: Mapping[str, str]) -> bool:
    """Whether this is a Space with ZeroGPU."""
    return environment.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def prepare() -> None:
    """Import the package `spaces`, which has to come before anything that uses CUDA."""
    if is_zero(os.environ):
        import spaces  # noqa: F401


def expected_seconds(request: Request, budgets: Budgets) -> float:
    """How long the GPU is asked for. A race that takes longer is ended by ZeroGPU, one that takes less gives it back.

    The visitor's quota pays for what was used, but a race waits until so much of it is left.
    """
    tokens = len(request.lanes) * request.settings.max_new_tokens
    return LOADING_SECONDS + min(tokens / SLOWEST, budgets.race_seconds)


class ZeroBackend(Backend):
    """The real models, with each race as a whole on the GPU that ZeroGPU lends for it."""

    def __init__(self, dtype: str | None, budgets: Budgets) -> None:
        import spaces

        super().__init__(dtype)

        def duration(preset: Preset, request: Request) -> float:
            return expected_seconds(request, budgets)

        @spaces.GPU(duration=duration)
        def raced(preset: Preset, request: Request) -> Iterator[dict[str, Any] | Entry | Outcome]:
            yield from race_in_fork(preset, dtype, request)

        self._raced = raced

    def load(self, preset: Preset, progress: Callable[[float | None, str], None], instead_of: Any) -> Any:
        opened = import_quickly("specdemo.models.loaded")
        dtype = self.dtype
        if dtype in (None, "auto"):  # else a fork would fetch and convert another copy of a GGUF file in its own time
            dtype = preset.dtype or "bfloat16"
        return opened.load(preset, dtype, "cpu", progress=progress, instead_of=instead_of)

    def race(self, loaded: Any, request: Request) -> LoadedRace:
        items = self._raced(loaded.preset, request)
        with sentences():
            header: dict[str, Any] = next(items)
        return RaceInFork(RemoteLoaded(loaded, header["environment"]), request, header, items)


@dataclass
class RaceInFork(LoadedRace):
    """The rest of a race that goes on in a fork."""

    items: Generator[Entry | Outcome]
    ended: Outcome | None = None

    def entries(self) -> Iterator[Entry]:
        with closing(self.items), sentences():
            for item in self.items:
                if isinstance(item, Outcome):
                    self.ended = item
                else:
                    yield item

    def outcome(self, entries: Sequence[Entry]) -> Outcome:
        return self.ended or super().outcome(entries)  # it was stopped


@contextmanager
def sentences() -> Iterator[None]:
    """What ZeroGPU says, for example of a quota that is used up, and what the fork says, is for a person."""
    import gradio as gr

    try:
        yield
    except gr.Error as error:
        raise EngineTrouble(str(error.message)) from error


OF_MEMORY = {"placement", "bytes_per_pass", "experts"}  # the bytes of weights in an environment


class RemoteLoaded:
    """A preset that is loaded here, in whose stead another process computed in `environment`."""

    def __init__(self, loaded: Any, environment: Mapping[str, Any]) -> None:
        self._loaded, self._environment = loaded, environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def environment(self) -> dict[str, Any]:
        """Without the bytes of weights: the speed of that memory cannot be measured from here."""
        return {name: fact for name, fact in self._environment.items() if name not in OF_MEMORY}


def race_in_fork(preset: Preset, dtype: str | None, request: Request) -> Iterator[dict[str, Any] | Entry | Outcome]:
    """A whole race: the header of its trace, its entries, and what came of it."""
    import gradio as gr
    import torch

    from ..models.errors import explain
    from ..racing import batch, summary

    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    try:
        loaded = load_kept(_kept, preset, dtype)
        yield summary.trace_header(loaded, request)
        entries = []
        for entry in batch.race_request(loaded, request):
            entries.append(entry)
            yield entry
        yield summary.outcome_of(loaded, request, entries)
    except Exception as error:
        if sentence := explain(error):  # of other errors ZeroGPU hands over the name alone
            raise gr.Error(sentence, print_exception=False) from error
        raise

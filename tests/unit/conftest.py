"""What several unit tests share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdemo.drafters.captured_trees import CapturedTrees, Growth
from specdemo.engines.cpu.library import library_for
from specdemo.models import loaded as models
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, Preset, find_preset
from specdemo.models.sources import Wheel
from specdemo.models.store import ignore
from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.dialects import Dialect, find_dialect
from specdemo.servers.llamacpp_process import started
from specdemo.system import cpu_level
from specdemo.system.hardware import INSTRUCTIONS, UNQUANTIZED, cpu_has
from tests.harness.classes import Loaded
from tests.harness.doubles import PROMPT, random_table
from tests.harness.files import full_preset, make_tokenizer
from tests.harness.growth import grown
from tests.harness.toys import random_mtp


@pytest.fixture(autouse=True)
def libraries() -> None:
    """A test with a cache folder of its own would build the C libraries again there, which takes seconds."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        library_for(dtype)
    library_for(UNQUANTIZED, quantized=True)


@pytest.fixture(autouse=True)
def trees_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured work grows trees on the CPU too, where the kernel does not run."""
    monkeypatch.setattr(Growth, "grown", grown)
    monkeypatch.setattr(CapturedTrees, "possible", lambda: True)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with a cache folder of its own would try the C library again, in a process that takes seconds to begin."""
    monkeypatch.setattr("specdemo.models.trial.tried", lambda *_: {})


@pytest.fixture(autouse=True)
def brief_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of tiny models are measured often enough in a tenth of the time."""
    monkeypatch.setattr("specdemo.decoding.measuring.CALIBRATION_SECONDS", 0.06)


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Runs the rest of a test as on an older CPU (`cpu_level`), but for what torch has chosen already. Skips the test
    where this CPU is older, or has no C library."""

    def run_as(level: str) -> None:
        if not all(map(cpu_has, INSTRUCTIONS[level])):
            pytest.skip("this CPU lacks more")
        monkeypatch.setenv(cpu_level.SWITCH, level)
        library_for.cache_clear()
        if library_for(torch.bfloat16) is None:
            pytest.skip("no C compiler")

    yield run_as
    library_for.cache_clear()


@pytest.fixture(
    params=[
        *(("", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *((level, torch.bfloat16) for level in cpu_level.LEVELS),
    ],
    ids=lambda kind: " ".join(map(str, filter(None, kind))),
)
def weights_dtype(request: pytest.FixtureRequest, run_as: Callable[[str], None]) -> torch.dtype:
    """Each type of weights of the C library; bfloat16 also as it is widened on older CPUs."""
    level, dtype = request.param
    if level:
        run_as(level)
    return dtype


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A tiny preset that every drafter can be used with."""
    loaded = load(full_preset(tmp_path_factory.mktemp("full")), "float32", "cpu")
    assert loaded.parts.embeddings is not None
    embedding, output = loaded.parts.embeddings
    assert isinstance(embedding, torch.Tensor)
    assert isinstance(output, torch.Tensor)
    loaded.parts = replace(loaded.parts, open_mtp=partial(random_mtp, embedding, output, loaded.parts.layers))
    yield loaded
    loaded.release()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def opened_once() -> Iterator[dict[str, Loaded]]:
    """The models that commands share, by what was asked for."""
    opened: dict[str, Loaded] = {}
    yield opened
    for loaded in opened.values():
        loaded.release()


@pytest.fixture(scope="module")
def loads_once(opened_once: dict[str, Loaded]) -> Iterator[None]:
    """Commands that ask for the same models share them: to open them takes longest.

    What a command finds out or lets go of is its own.
    """

    def load_once(preset: Preset, *asked: Any, **named: Any) -> Loaded:
        values = (*asked, *sorted(named.items()))
        key = repr((preset, *(value for value in values if not callable(value))))  # whoever is told of the progress
        if key not in opened_once:
            opened_once[key] = load(preset, *asked, **named)
        loaded = copy(opened_once[key])
        loaded.parts, loaded.costs = replace(loaded.parts, ready_heads=dict(loaded.parts.ready_heads)), {}
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", load_once)
        yield


@pytest.fixture(scope="module")
def real() -> Iterator[dict[str, Dialect]]:
    """llama.cpp's server on the default model, alone and with its look-up of n-grams; one thread, since tests share."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("there is no xllamacpp")
    target = find_preset(DEFAULT_PRESET).target
    assert isinstance(target, Wheel)
    asked = {"gguf": str(target.gguf_path(ignore)), "draft_gguf": None, "k": 5, "threads": 1, "context": 1024}
    with ExitStack() as running:
        found: dict[str, Dialect] = {}
        for lane, ngram in ((PLAIN, None), (SPECULATIVE, 2)):
            where, _ = running.enter_context(started({**asked, "ngram": ngram}))
            found[lane] = find_dialect(running.enter_context(Client(Address.read(where))))
        yield found


@pytest.fixture(scope="module")
def table() -> Tensor:
    """A target that can be enumerated."""
    table = random_table(1, support=3)
    table[PROMPT[-2], PROMPT[-1]] = torch.tensor([0, 0, 1.0, 0])  # which keeps the number of runs small
    return table

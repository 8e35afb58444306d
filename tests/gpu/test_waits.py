"""How often a round makes the host wait for the device: once, for the outcome of verification."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from specdemo.decoding.batch import decode
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Event, Round
from specdemo.decoding.loop import Decoding
from specdemo.drafters import draft_model
from specdemo.drafters.heads import eagle
from specdemo.engines.gpu.capture import capture_for
from specdemo.engines.runner import Runner
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_NODES, REJECTION, Settings
from tests.harness.classes import GraphRunner, HeadDrafter
from tools.bench.models import WITH_HEADS, Pair, random_head

from .helpers import Copying, pair_of, tiny

REAL_VOCAB = 151_936


def test_a_round_waits_once(device: torch.device) -> None:
    """With each drafter, greedy, sampled and by rejection. A CPU waits for nothing: there reads of numbers off the
    device count."""
    pair = pair_of(tiny("qwen3", device, REAL_VOCAB if device.type == "cuda" else 300))
    greedy, found = Settings(k=5, max_new_tokens=64), dict[str, int]()
    for settings in every_way(greedy):
        for name, make in drafters(pair, settings).items():
            runner = GraphRunner(pair.graphs, 80)
            events = decode(Decoding(runner, make(runner), [1, 2, 3] * 5, rule_for(settings)))
            found[f"{name} at T = {settings.temperature:.0f}, {settings.rule}"] = waits_of_a_round(device, events)
    assert found == dict.fromkeys(found, 1)


def test_a_round_with_a_tree_waits_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tree, of as many tokens as a call has depths, and for the outcome. A call of a draft model has fewer."""
    monkeypatch.setattr(draft_model, "DEPTHS", eagle.DEPTHS)
    pair = pair_of(tiny("qwen3", device, REAL_VOCAB if device.type == "cuda" else 300))
    greedy, found = Settings(k=eagle.DEPTHS, max_new_tokens=64, tree=True), dict[str, int]()
    for settings in every_way(greedy):
        for name, make in drafters(pair, settings).items():
            if name != "prompt-lookup":  # it drafts on the host
                runner = GraphRunner(pair.graphs, 80 + MAX_NODES)
                events = decode(Decoding(runner, make(runner), [1, 2, 3] * 5, rule_for(settings)))
                found[f"{name} at T = {settings.temperature:.0f}, {settings.rule}"] = waits_of_a_round(device, events)
    assert found == dict.fromkeys(found, 2)


def test_a_tree_is_read_and_a_path_kept_without_a_wait(device: torch.device) -> None:
    """What comes before and after the wait for the outcome."""
    runner = GraphRunner(pair_of(tiny("qwen3", device)).graphs, 120)
    runner.capture_hidden_states([1])
    runner.prefill([1, 2, 3] * 5)
    for _ in range(2):  # the first time sets memory up
        with (waits if device.type == "cuda" else reads)() as seen:
            runner.forward([4, 5, 6, 7], [-1, 0, 0, 2])
            runner.keep([0, 2, 3])
    assert seen == []


def every_way(greedy: Settings) -> list[Settings]:
    drawn = replace(greedy, temperature=1.0, top_k=50, top_p=0.9)
    return [greedy, drawn, replace(drawn, rule=REJECTION)]


def drafters(pair: Pair, settings: Settings) -> dict[str, Callable[[Runner], Drafter]]:
    """By name, what makes a drafter for one run of the target."""

    def head(kind: type[HeadDrafter], runner: Runner) -> Drafter:
        return kind(random_head(kind, pair.target, capture_for(runner.device)), runner, rule_for(settings))

    return {
        "draft-model": lambda runner: pair.drafter(runner.context, rule_for(settings)),
        "prompt-lookup": lambda _: Copying(),
        **{name: partial(head, kind) for name, kind in WITH_HEADS.items()},
    }


def waits_of_a_round(device: torch.device, events: Iterator[Event]) -> int:
    """How often the third round of a run waits. In the first a draft model reads the prompt."""
    with closing(events):  # type: ignore[type-var]
        list(islice(events, 3))  # the prompt and two rounds
        with (waits if device.type == "cuda" else reads)() as seen:
            event = next(events)
    assert isinstance(event, Round), "the text ended too soon"
    assert event.drafted, "nothing was drafted, and so nothing tested"
    return len(seen)


@contextmanager
def waits() -> Iterator[list[Any]]:
    """Collects torch's warning for each operation that makes the host wait for the GPU."""
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [warning for warning in seen if "called a synchronizing" in str(warning.message)]


@contextmanager
def reads() -> Iterator[list[Any]]:
    """Collects the tensors whose numbers are read."""
    seen, read = list[Any](), torch.Tensor.tolist

    def seen_read(tensor: torch.Tensor) -> Any:
        seen.append(tensor)
        return read(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", seen_read)
        yield seen

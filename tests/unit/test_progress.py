"""Work that can be stopped: a prefill between two of its parts, and what it says meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specdemo.drafters.none import NoDrafter
from specdemo.engines import native
from specdemo.settings import Settings
from specdemo.system.progress import Stopped, attended, check_stopped, tell
from tests.harness.engines import ENGINES, makes_runners, tiny_model
from tests.harness.texts import decode, plain_text

PROMPT = [place % 60 for place in range(100)]


class Asked:
    """A Stop button: when it is looked at for the `pressed`-th time, it is pressed."""

    def __init__(self, pressed: int) -> None:
        self.looks, self.pressed = 0, pressed

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks >= self.pressed


@pytest.mark.parametrize("name", ENGINES)
def test_a_prefill_is_stopped_between_two_parts_and_the_next_run_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's runner by a fake capture."""
    monkeypatch.setattr(native, "MOST_AT_ONCE", 16)
    runner, settings = makes_runners(name, tiny_model("llama"))(128), Settings(k=0, max_new_tokens=8)
    whole = plain_text(runner, PROMPT, settings)
    with attended(lambda: False):
        assert plain_text(runner, PROMPT, settings) == whole
    never = Asked(10**9)
    with attended(never):
        next(decode(runner, NoDrafter(), PROMPT, settings))
    assert never.looks >= 2
    for pressed in (1, 2, never.looks):
        stop = Asked(pressed)
        with attended(stop), pytest.raises(Stopped):
            next(decode(runner, NoDrafter(), PROMPT, settings))
        assert stop.looks == pressed  # it ended there
        assert runner.length == 0
    assert plain_text(runner, PROMPT, settings) == whole


@pytest.mark.parametrize("name", ENGINES)
def test_what_may_be_stopped_gives_the_same_bits(name: str) -> None:
    plain, stoppable = (makes_runners(name, tiny_model("llama"))(128) for _ in range(2))
    with attended(lambda: False):
        logits = stoppable.prefill(PROMPT)
    assert torch.equal(plain.prefill(PROMPT), logits)


def test_where_nobody_waits_any_more_nothing_is_told_or_stopped() -> None:
    messages: list[str] = []
    stop = Asked(1)
    with attended(stop, messages.append):
        tell("before")
    tell("after")
    check_stopped()
    assert (messages, stop.looks) == (["before"], 0)


def test_either_of_two_can_stop_the_work_and_words_go_to_the_one_who_listens() -> None:
    messages: list[str] = []
    outer, inner = threading.Event(), threading.Event()
    with attended(outer.is_set, messages.append):
        with attended(inner.is_set):
            tell("measuring")
            check_stopped()
            for event in (outer, inner):
                event.set()
                with pytest.raises(Stopped):
                    check_stopped()
                event.clear()
        inner.set()
        check_stopped()  # it is over
    assert messages == ["measuring"]


def test_another_thread_is_not_stopped() -> None:
    def work() -> str:
        check_stopped()
        return "done"

    with attended(lambda: True), ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result() == "done"

"""Trees that a walk may stumble over, on every engine that branches: the text is that of the target alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdemo.decoding.events import emitted_tokens
from specdemo.settings import MAX_NODES, Settings
from tests.harness.classes import LaneFigures
from tests.harness.doubles import MODEL_VOCAB, PROMPT, Planting, Shape, full, ids_of
from tests.harness.engines import ENGINES, makes_runners, tiny_model
from tests.harness.texts import decode, plain_text


def twice(right: list[int], eos: int, second: int) -> Shape:
    """Every right token twice or three times, with what follows after the `second`-th of them."""
    ids, parents, last = [], [], -1
    for token in right[:6]:
        ids += [token] * 3
        parents += [last] * 3
        last = len(ids) - 3 + second
    return ids, parents


def with_eos(right: list[int], eos: int) -> Shape:
    """The end of the text beside and after every right token, with more after that."""
    ids, parents, last = [], [], -1
    for token in right[:5]:
        ids += [eos, token, eos, token]
        parents += [last, last, len(ids) - 4, len(ids) - 2]
        last = len(ids) - 3
    return ids, parents


def to_the_end(right: list[int], eos: int) -> Shape:
    """A path that goes on after the end of the text, with stumps."""
    path = [*right, *[1] * 30][:30]
    ids = [token for right in path for token in (right, (right + 1) % MODEL_VOCAB)]
    return ids, [-1, -1, *(2 * (place // 2) for place in range(len(ids) - 2))]


ADVERSARIES: dict[str, Callable[[list[int], int], Shape]] = {
    "the first of three is a dead end": lambda right, eos: twice(right, eos, 1),
    "the first of three goes on": lambda right, eos: twice(right, eos, 0),
    "a child that ends the text": with_eos,
    "deeper than the text": to_the_end,
    "one node": lambda right, eos: (right[:1] or [eos], [-1]),
    "63 nodes": lambda right, eos: full(MODEL_VOCAB, MAX_NODES),
    "63 siblings, all the same": lambda right, eos: ((right[:1] or [eos]) * MAX_NODES, [-1] * MAX_NODES),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("engine", ENGINES)
def test_adversarial_trees_leave_the_text_alone_on_every_engine_that_branches(engine: str, temperature: float) -> None:
    model = tiny_model("llama")
    make = makes_runners(engine, model)
    for limit in (1, 2, 40):
        settings = Settings(k=MAX_NODES, temperature=temperature, max_new_tokens=limit, seed=1, tree=True)
        alone = plain_text(make(256), PROMPT, settings)
        for eos in (alone[-1], -1):
            known = plain_text(make(256), PROMPT, settings, frozenset({eos}))
            for name, shape in ADVERSARIES.items():

                def script(context: list[int], nodes: int) -> Shape:
                    return shape(alone[len(context) - len(PROMPT) :], max(eos, 0))  # noqa: B023

                events = list(decode(make(256), Planting(script), PROMPT, settings, frozenset({eos})))
                assert ids_of(events) == known, name
                assert all(token.margin is not None for event in events for token in emitted_tokens(event)), name
                longest = (LaneFigures.of(events).tokens_per_round or 0) if limit > 2 else 0
                if name in ("the first of three goes on", "deeper than the text") and limit > 2:
                    assert longest > 4

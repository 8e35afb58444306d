"""Every possible run of `decode` on a table model, each with its exact probability.

All randomness of a run is uniform draws, used in two places: drafters call `sample`, the loop calls
`verify`. Here both ask a `Walk` instead. A drafter's `sample` returns each possible token in turn, weighted
by its probability. `verify` is called with draws placed just inside the borders where its answer has to
change: a test at min(1, p/q), the last draw at the borders of the cumulative residual. If a border of the
rule under test lies anywhere else, some run gets the weight of another outcome and the law comes out wrong.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specdemo import decode as loop
from specdemo.costs import Costs
from specdemo.events import Event
from specdemo.types import Draft, Settings, Verdict
from specdemo.verify import verify
from tests.unit.toys import TableRunner, ids_of

Option = TypeVar("Option")
Rule = Callable[[Tensor, Draft, Tensor], Verdict]
INSIDE = 1e-7  # how far from a border a draw is placed, as a share of the interval; far above float64's rounding


class Walk:
    """Depth-first through all choices: every run takes the next path not taken yet."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._widths: list[int] = []
        self.weight = 1.0

    def runs(self) -> Iterator[None]:
        while True:
            self._widths, self.weight = [], 1.0
            yield
            while self._widths and self._path[-1] == self._widths[-1] - 1:
                self._path.pop()
                self._widths.pop()
            if not self._widths:
                return
            self._path[-1] += 1

    def choose(self, options: Sequence[tuple[Option, float]]) -> Option:
        """One of the (option, probability) pairs that have a probability."""
        options = [option for option in options if option[1] > 0]
        depth = len(self._widths)
        if depth == len(self._path):
            self._path.append(0)
        self._widths.append(len(options))
        option, probability = options[self._path[depth]]
        self.weight *= probability
        return option


def choose_draws(walk: Walk, target_probs: Tensor, draft: Draft) -> Tensor:
    """Draws for one verification, with the probability of what they have to lead to."""
    p_rows, k = target_probs.tolist(), len(draft.token_ids)
    vocab = len(p_rows[0])
    q_rows = [[float(x == token) for x in range(vocab)] for token in draft.token_ids]
    if draft.probs is not None:
        q_rows = draft.probs.tolist()

    draws = [0.5] * k
    for place, token in enumerate(draft.token_ids):
        chance = min(1.0, p_rows[place][token] / q_rows[place][token])
        passing, failing = chance * (1 - INSIDE), chance + (1 - chance) * INSIDE
        draws[place] = walk.choose([(passing, chance), (failing, 1 - chance)])
        if draws[place] == failing:
            left = [max(0.0, p - q) for p, q in zip(p_rows[place], q_rows[place], strict=True)]
            break
    else:
        left = p_rows[k]
    return torch.tensor([*draws, walk.choose(border_draws(left))], dtype=torch.float64)


def border_draws(weights: Sequence[float]) -> list[tuple[float, float]]:
    """A draw on either side of every border of the cumulative distribution, with the share it stands for."""
    total, begin = sum(weights), 0.0
    intervals = []
    for weight in weights:
        if weight > 0:
            intervals.append((begin, begin + weight / total))
            begin += weight / total
    points = []
    for number, (low, high) in enumerate(intervals):
        inside = INSIDE * (high - low)
        ends = [low + inside] * (number > 0) + [high - inside] * (number < len(intervals) - 1) or [0.5]
        points += [(end, (high - low) / len(ends)) for end in ends]
    return points


@contextmanager
def scripted_by(walk: Walk, rule: Rule) -> Iterator[None]:
    """Inside, the loop and all drafters take their randomness from `walk`, and the loop verifies by `rule`."""

    def sample(probs: Tensor, draw: Tensor) -> Tensor:
        assert draw.dtype == torch.float64
        assert 0 <= float(draw) < 1
        weights = probs[0].tolist()
        token = walk.choose([(x, weight / sum(weights)) for x, weight in enumerate(weights)])
        return torch.tensor([token])

    def verified(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
        assert draws.dtype == torch.float64
        assert len(draws) == len(target_probs) == len(draft.token_ids) + 1
        return rule(target_probs, draft, choose_draws(walk, target_probs, draft))

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("specdemo.drafters.") and hasattr(module, "sample"):
                patch.setattr(module, "sample", sample)
        patch.setattr(loop, "verify", verified)
        yield


def emitted_law(
    start: Callable[[], tuple[TableRunner, Any]],
    prompt: Sequence[int],
    settings: Settings,
    *,
    rule: Rule = verify,
    eos_ids: frozenset[int] = frozenset(),
    seen: Callable[[list[Event]], None] = lambda events: None,
    costs: Callable[[], Costs | None] = lambda: None,
) -> dict[tuple[int, ...], float]:
    """The probability of every text that `decode` can emit; `start` and `costs` make what it runs on afresh."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    walk = Walk()
    with scripted_by(walk, rule):
        for _ in walk.runs():
            runner, drafter = start()
            events = list(loop.decode(runner, drafter, prompt, settings, eos_ids, costs=costs()))
            law[tuple(ids_of(events))] += walk.weight
            seen(events)
    return dict(law)


def distance(law: dict, other: dict) -> float:
    """The largest difference in the probability of any text."""
    return max(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in law.keys() | other.keys())

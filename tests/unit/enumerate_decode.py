"""Every possible run of `decode` on a table model, each with its exact probability.

All randomness of a run comes from its rule, in two places: drafters draw tokens, the loop has drafts tested. Here both
ask a `Walk` instead. A drafter is given each possible token in turn, weighted by its probability. `verify` is called
with draws placed just inside the borders where its answer has to change: a test at min(1, p/q), the last draw at the
borders of the cumulative residual. If a border of the rule under test lies anywhere else, some run gets the weight of
another outcome and the distribution comes out wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdemo.decoding import batch
from specdemo.decoding.batch import Failed
from specdemo.decoding.costs import CostModel
from specdemo.decoding.events import Event
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rejection import Rejection, verify
from specdemo.decoding.rule import Rule
from specdemo.decoding.sampling import probabilities
from specdemo.types import Draft, Settings, Verdict
from tests.harness.doubles import TableRunner, ids_of

Option = TypeVar("Option")
VerifyFn = Callable[[Tensor, Draft, Tensor], Verdict]
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


class Scripted(Rejection):
    """Rejection sampling whose random numbers come from a walk, and whose test is `rule`."""

    def __init__(self, settings: Settings, walk: Walk, rule: VerifyFn) -> None:
        super().__init__(settings)
        self.walk, self.rule = walk, rule

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        weights = probs[0].tolist()
        return torch.tensor([self.walk.choose([(x, weight / sum(weights)) for x, weight in enumerate(weights)])])

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        assert len(logits) == len(draft.token_ids) + 1
        target_probs = probabilities(logits, self.settings)
        return self.rule(target_probs, draft, choose_draws(self.walk, target_probs, draft))


def emitted_distribution(
    start: Callable[[Rule], tuple[TableRunner, Any]],
    prompt: Sequence[int],
    settings: Settings,
    *,
    rule: VerifyFn = verify,
    eos_ids: frozenset[int] = frozenset(),
    seen: Callable[[list[Event]], None] = lambda events: None,
    costs: Callable[[], CostModel | None] = lambda: None,
    beside: Callable[[], Sequence[Decoding]] = lambda: (),
) -> dict[tuple[int, ...], float]:
    """The probability of every text that `decode` can emit by rejection sampling; `start` and `costs` make what it runs
    on afresh, and `beside` what is decoded in the same batch."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    walk = Walk()
    for _ in walk.runs():
        scripted = Scripted(settings, walk, rule)
        runner, drafter = start(scripted)
        together = [*beside(), Decoding(runner, drafter, prompt, scripted, eos_ids, costs=costs())]
        decoded = batch.decode_batch(together, len(together))
        events = [event for index, event in decoded if index == len(together) - 1 and not isinstance(event, Failed)]
        texts[tuple(ids_of(events))] += walk.weight
        seen(events)
    return dict(texts)


def distance(texts: dict, other: dict) -> float:
    """The largest difference in the probability of any text."""
    return max(abs(texts.get(text, 0.0) - other.get(text, 0.0)) for text in texts.keys() | other.keys())

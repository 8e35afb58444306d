"""Every possible run of a decoding on a table model, each with its exact probability.

All randomness of a run comes from its rule, in two places: drafters draw tokens, the loop has drafts tested. Here both
ask a `Walk` instead. A drafter is given each possible token in turn, weighted by its probability. `verify` is called
with draws placed just inside the borders where its answer has to change: a test at min(1, p/q), the last draw at the
borders of the cumulative residual, the draw of a row of a tree at those of its distribution. If a border of the rule
under test lies anywhere else, some run gets the weight of another outcome and the distribution comes out wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specdemo.decoding import rule
from specdemo.decoding.acceptance import Answer
from specdemo.decoding.batch import Failed, decode_batch
from specdemo.decoding.events import Event
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rejection import verify
from specdemo.decoding.rule import Rule
from specdemo.decoding.warping import probabilities
from specdemo.settings import REJECTION, Settings
from specdemo.tokens import Draft
from tests.harness.classes import Match, Rejection

from .doubles import ids_of

Option = TypeVar("Option")
VerifyFn = Callable[[Tensor, Draft, Tensor], Answer]
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


def chain_draws(walk: Walk, target_probs: Tensor, draft: Draft) -> Tensor:
    """Draws for one verification of a chain, with the probability of what they have to lead to."""
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


def drawn_along(walk: Walk, rows: Tensor, draft: Draft) -> dict[int, tuple[int, float]]:
    """The token that the target draws after each row of one way down a draft, and a number in [0, 1) that gives it."""
    chosen, row, parents = {}, 0, draft.parents
    while True:
        draw = walk.choose(border_draws(rows[row].tolist()))
        token = int((rows[row].cumsum(0) <= draw).sum())
        chosen[row] = token, draw
        taken = [node for node, parent in enumerate(parents) if parent == row - 1 and draft.token_ids[node] == token]
        if not taken:
            return chosen
        row = taken[0] + 1


class EnumeratedRejection(Rejection):
    """Rejection sampling whose random numbers come from a walk, and whose test is `test`."""

    def __init__(self, settings: Settings, walk: Walk, test: VerifyFn) -> None:
        super().__init__(settings)
        self.walk, self.test = walk, test

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        weights = probs[0].tolist()
        return torch.tensor([self.walk.choose([(x, weight / sum(weights)) for x, weight in enumerate(weights)])])

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Any = None) -> Answer:
        assert len(logits) == len(draft.token_ids) + 1
        target_probs = probabilities(logits, self.settings)
        if not draft.tree:
            return self.test(target_probs, draft, chain_draws(self.walk, target_probs, draft))
        draws = torch.full((len(logits),), 0.5, dtype=torch.float64)
        for row, (_, draw) in drawn_along(self.walk, target_probs, draft).items():
            draws[row] = draw
        return self.test(target_probs, draft, draws)


class EnumeratedMatch(Match):
    """The match rule whose draws from the target come from a walk; for drafts that are chosen, not drawn."""

    def __init__(self, settings: Settings, walk: Walk) -> None:
        super().__init__(settings)
        self.walk, self.draft = walk, Draft()

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Any = None) -> Answer:
        self.draft = draft
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rule.noise, "draw", self.drawn)
            return super().verify(logits, draft, position)

    def drawn(self, probs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """In place of `noise.draw`."""
        assert len(keys) == len(probs)
        drawn = torch.full((len(probs),), probs.shape[-1] - 1)
        for row, (token, _) in drawn_along(self.walk, probs, self.draft).items():
            drawn[row] = token
        return drawn, torch.zeros(len(probs), dtype=torch.float64)


def emitted_distribution(
    make: Callable[[Rule], Decoding],
    settings: Settings,
    *,
    test: VerifyFn = verify,
    seen: Callable[[list[Event]], None] = lambda events: None,
    beside: Callable[[], Sequence[Decoding]] = lambda: (),
) -> dict[tuple[int, ...], float]:
    """The probability of every text that a decoding can emit by the rule of the settings, at temperature 0 too; `make`
    makes it afresh, and `beside` what is decoded in the same batch. Of rejection sampling `test` may be another one."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    walk = Walk()
    for _ in walk.runs():
        rejection = settings.rule == REJECTION
        rule: Any = EnumeratedRejection(settings, walk, test) if rejection else EnumeratedMatch(settings, walk)
        together = [*beside(), make(rule)]
        decoded = decode_batch(together, len(together))
        events = [event for index, event in decoded if index == len(together) - 1 and not isinstance(event, Failed)]
        texts[tuple(ids_of(events))] += walk.weight
        seen(events)
    return dict(texts)


def distance(texts: dict, other: dict) -> float:
    """The largest difference in the probability of any text."""
    return max(abs(texts.get(text, 0.0) - other.get(text, 0.0)) for text in texts.keys() | other.keys())

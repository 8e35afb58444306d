"""What speculation should gain, from three numbers: how often a guess passes, what it costs, and what checking costs.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192,
sections 3.1 to 3.4. Their gamma is K here. All costs are in target passes: the time of a pass over one token is 1.
Their model has every guess pass with the same probability alpha, whether the others pass or not.

>>> costs = Costs(draft=0.1)  # a guess takes a tenth of a target pass
>>> round(speed_up(0.8, 4, costs), 2), best_k(0.8, costs)
(2.4, 6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import BadInput
from ..racing.figures import alpha_for, expected_tokens, speeds_by_k
from ..settings import MAX_K
from . import tables

SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # the values of K of a table


@dataclass(frozen=True, slots=True)
class Costs:
    """What drafting and checking cost, in target passes.

    `draft` is c, the cost of one drafted token; or with `parallel`, for drafters that draft all tokens at once, of a
    draft. `passes[T - 1]` is v(T), the measured cost of a target pass over T tokens; empty means that checking is free
    (v = 1), the usual assumption.
    """

    draft: float
    passes: Sequence[float] = ()
    parallel: bool = False

    def __post_init__(self) -> None:
        if not all(math.isfinite(cost) and cost >= 0 for cost in (self.draft, *self.passes)) or 0 in self.passes:
            raise BadInput("A draft costs 0 target passes or more, and a pass more than 0.")

    def round(self, k: int) -> float:
        """K c + v(K + 1): K drafted tokens, then one pass over them and the pending token. c + v(K + 1) if parallel."""
        return (min(k, 1) if self.parallel else k) * self.draft + self.verify(k)

    def verify(self, k: int) -> float:
        """v(K + 1), in target passes: of the pass that checks K drafted tokens."""
        return self.passes[k] if self.passes else 1.0

    @property
    def largest_k(self) -> int:
        """The largest K whose costs are known."""
        return len(self.passes) - 1 if self.passes else MAX_K


def speed_up(alpha: float, k: int, costs: Costs) -> float:
    """Tokens per second over those of the target alone: their theorem 3.8, with v(K + 1) for the pass that checks.

    Both leave out the prompt, as `stats.speed_up` measures them.
    """
    return speeds_by_k((alpha**i for i in range(1, k + 1)), map(costs.round, range(k + 1)))[k]


def break_even(k: int, costs: Costs) -> float | None:
    """The alpha at which drafting K tokens is as fast as not drafting; None if not even alpha = 1 is enough."""
    return alpha_for(costs.round(k), k)


def best_k(alpha: float, costs: Costs) -> int:
    """The K from 0 (do not speculate) up with the largest speed-up; all are tried, the smallest wins a tie."""
    return max(range(costs.largest_k + 1), key=lambda k: speed_up(alpha, k, costs) if k else 1.0)


def table(costs: Costs, alpha: float | None = None, ks: Sequence[int] = SHOWN) -> list[dict[str, float | int | None]]:
    """A row for each K: `k`, `ideal_speedup` (every guess passes, checking is free), `verify_cost`,
    `break_even_alpha` and, for a given alpha, `expected_tokens` and `speedup`.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise BadInput(f"alpha is a probability, from 0 to 1, not {alpha!r}.")
    rows: list[dict[str, float | int | None]] = []
    for k in (k for k in ks if k <= costs.largest_k):
        row: dict[str, float | int | None] = {
            "k": k,
            "ideal_speedup": speed_up(1.0, k, replace(costs, passes=())),
            "verify_cost": costs.verify(k),
            "break_even_alpha": break_even(k, costs),
        }
        if alpha is not None:
            row |= {"expected_tokens": expected_tokens(alpha, k), "speedup": speed_up(alpha, k, costs)}
        rows.append(row)
    return rows


def for_each_k(costs: Costs, alpha: float | None = None) -> tables.Table:
    """The table in words."""
    columns = [
        ("k", "K", ",.0f"),
        ("ideal_speedup", "speed-up if all pass and checking is free", "times3"),
        ("verify_cost", "a checking pass takes", "times"),
        ("break_even_alpha", "break-even alpha", ".3f"),
    ]
    columns += [("expected_tokens", "tokens per round", ".2f"), ("speedup", "speed-up", "times3")] * (alpha is not None)
    return tables.table("For each K", columns, table(costs, alpha))


def share_in_words(least: float) -> str:
    """How many guesses must be accepted; what would be rounded to 0% is hardly any."""
    return "hardly any" if least < 0.005 else f"at least {least:.0%}"


def in_words(costs: Costs, alpha: float | None = None) -> list[str]:
    """The table in sentences, for someone who has not read the paper."""
    drafting = "A draft, however long, takes" if costs.parallel else "Drafting one token takes"
    lines = [f"{drafting} {costs.draft:.1%} of the time of a target pass."]
    needed = [(alpha_k, k) for k in range(1, costs.largest_k + 1) if (alpha_k := break_even(k, costs)) is not None]
    if needed:
        least, k = min(needed)
        lines.append(f"To be any faster, {share_in_words(least)} of the tested guesses must be accepted (K = {k}).")
    else:
        lines.append("With these costs it cannot be faster, even if every guess were accepted.")
    if alpha is not None:
        k = best_k(alpha, costs)
        if k == 0:
            lines.append(f"If {alpha:.0%} are accepted, do not speculate: no K is faster than the target alone.")
        else:
            lines.append(
                f"If {alpha:.0%} are accepted, K = {k} is best: {speed_up(alpha, k, costs):.2f}× the target alone."
            )
    return lines

"""What figures are worth: means with intervals, which differences are real, and what a test can see.

A prompt is the unit everywhere: the rounds of a text, and the texts of a prompt, are alike, so only other prompts show
how far a figure holds. Speeds and ratios of speeds are averaged as logarithms: their mean does not depend on which
of two methods is called the first, and a mean of ratios is the ratio of the means.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ..system.imports import LazyModule

if TYPE_CHECKING:
    import numpy as np
    from scipy import special
else:
    np = LazyModule("numpy")
    special = LazyModule("scipy.special")

Name = TypeVar("Name", bound=Hashable)
Array: TypeAlias = "np.ndarray"

CONFIDENCE = 0.95
RESAMPLES = 4000
FEWEST = 6  # prompts that are worth resampling
POWER = 0.95  # how often a difference is caught that a test is said to catch
LEAST_EXPECTED = 5  # counts that a cell of the chi-square test must be expected to hold (Cochran 1954)


# Means and their intervals ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over `count` units and its 95% confidence interval; None of a single unit, and of units all alike."""

    mean: float
    low: float | None
    high: float | None
    count: int


def geometric_mean(by_prompt: Mapping[str, Sequence[float]], of_many: int = 1) -> Spread | None:
    """The geometric mean of positive figures, such as speeds or speed-ups, over prompts.

    Args:
        by_prompt: the figures of each prompt; those of one prompt are averaged first.
        of_many: of how many such means this one was picked for being the best. The interval is then so wide that all of
            them would hold at once in 95% of all cases (Bonferroni).
    """
    if not (logs := log_means(by_prompt)):
        return None
    center, low, high = _interval(np.array([*logs.values()]), np.ones(len(logs)), 1 - (1 - CONFIDENCE) / of_many)
    ends = (None if end is None else float(np.exp(end)) for end in (low, high))
    return Spread(float(np.exp(center)), next(ends), next(ends), len(logs))


def log_means(by_prompt: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean logarithm of each prompt's figures; a prompt without figures is left out."""
    return {prompt: fmean(np.log(values)) for prompt, values in by_prompt.items() if len(values)}


def pooled_rate(parts: Sequence[tuple[float, float]], most: float = inf, least: float = 0.0) -> Spread | None:
    """A rate from `least` to `most` over all prompts together, sum / sum, from the (part, whole) of each.

    None where there is no whole.
    """
    parts = [(part, whole) for part, whole in parts if whole]
    if not parts:
        return None
    part, whole = np.array(parts, float).T
    center, low, high = _interval(part, whole, CONFIDENCE)
    ends = (None if end is None else min(max(least, end), most) for end in (low, high))
    return Spread(center, next(ends), next(ends), len(parts))


def _interval(parts: Array, wholes: Array, confidence: float) -> tuple[float, float | None, float | None]:
    """sum(parts) / sum(wholes) and its interval: a bootstrap over the units, [n] both, studentised.

    The plain percentile bootstrap is too narrow for as few prompts as a bench has: with 9 log-normal ratios its 95%
    interval holds the truth in 88 of 100 cases. So each resample is divided by its own standard error (Efron and
    Tibshirani 1993, chapter 12.5), and with fewer than `FEWEST` units, which repeat themselves too often in resamples,
    Student's t replaces those quotients.
    """
    center, count = float(parts.sum() / wholes.sum()), len(parts)
    error, quotients = _studentised(parts, wholes)
    if not error:
        return center, None, None
    tail = (1 - confidence) / 2
    if quotients is None:
        below = above = float(special.stdtrit(count - 1, 1 - tail))
    else:
        above, below = -np.quantile(quotients, tail), np.quantile(quotients, 1 - tail)
    return center, center - float(below) * error, center + float(above) * error


def _studentised(parts: Array, wholes: Array) -> tuple[float, Array | None]:
    """The standard error of sum(parts) / sum(wholes), and studentised bootstrap deviations, None of too few units.

    The error is 0 of a single unit, and of units that are all alike: nothing then shows how others vary.
    """
    count, center = len(parts), parts.sum() / wholes.sum()

    def errors(part: Array, whole: Array) -> Array:
        rate = part.sum(-1, keepdims=True) / whole.sum(-1, keepdims=True)
        return (part - rate * whole).std(-1, ddof=1) / whole.mean(-1) / sqrt(count)  # of a ratio, linearised

    error = float(errors(parts, wholes)) if count > 1 else 0.0
    if error <= 1e-12 * abs(center):
        return 0.0, None
    if count < FEWEST:
        return error, None
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))  # the same for the same figures
    part, whole = parts[drawn], wholes[drawn]
    own = errors(part, whole)
    usable = own > 1e-9 * error  # a resample of one unit alone has no error of its own
    return error, (part.sum(1) / whole.sum(1) - center)[usable] / own[usable]


# Which differences are real --------------------------------------------------------------------------------


def p_value(differences: Sequence[float]) -> float:
    """How often differences of mean 0 would lie at least as far from 0 on average as these, of one prompt each."""
    values = np.array(differences, float)
    if len(values) < 2 or not values.any():
        return 1.0
    error, quotients = _studentised(values, np.ones(len(values)))
    if not error:
        return 0.0
    distance = abs(values.mean()) / error
    if quotients is None:
        return float(2 * special.stdtr(len(values) - 1, -distance))
    return float((1 + (np.abs(quotients) >= distance).sum()) / (1 + len(quotients)))


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """The p-values of several tests, so that all that are below 5% hold at once in 95% of all cases (Holm 1979)."""
    adjusted: dict[Name, float] = {}
    highest = 0.0
    for rank, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, value * (len(p_values) - rank)))
        adjusted[name] = highest
    return adjusted


def best_of(logs: Mapping[Name, Mapping[str, float]]) -> tuple[Name, list[Name]]:
    """The name of the largest mean, and those that these prompts cannot tell from it.

    Args:
        logs: a figure's logarithm for each name and prompt. Two names are compared prompt by prompt, where both have
            a figure; the test of each pair is corrected for all of them by `holm`.
    """
    best = max(logs, key=lambda name: fmean(logs[name].values()))
    tests = {
        name: p_value([logs[best][prompt] - value for prompt, value in mine.items() if prompt in logs[best]])
        for name, mine in logs.items()
        if name != best
    }
    return best, [name for name, value in holm(tests).items() if value >= 1 - CONFIDENCE]


Parts = Mapping[str, tuple[float, float]]
"""The (part, whole) of each text, as in `pooled_rate`."""


def rates_differ(one: Parts, other: Parts, of_many: int) -> bool:
    """Whether two pooled rates differ by more than chance, where they are the highest and the lowest of `of_many`.

    A text may stand in both, and is then one unit. The test is corrected for all pairs that could have been picked.
    """
    texts = [*dict.fromkeys([*one, *other])]
    share, rates = np.zeros(len(texts)), []
    for sign, group in ((1, one), (-1, other)):
        parts = np.array([group.get(text, (0, 0)) for text in texts], float)
        part, whole = parts.sum(0)
        rates.append(part / whole)
        share += sign * (parts[:, 0] - rates[-1] * parts[:, 1]) / whole
    count = len(texts)
    error = sqrt(count / (count - 1) * float((share**2).sum())) if count > 2 else 0.0
    if not error:
        return False
    pairs = of_many * (of_many - 1) / 2
    return bool(2 * special.stdtr(count - 2, -abs(rates[0] - rates[1]) / error) * pairs < 1 - CONFIDENCE)


# Samples against a distribution ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distances:
    """How far the frequencies of a sample lie from a distribution; divergences in nats."""

    total_variation: float
    kl: float | None
    jensen_shannon: float

    @classmethod
    def between(cls, counts: Array, probs: Array) -> Distances:
        """Of counts [cells] and the probabilities of the cells; KL is None where the sample holds the impossible."""
        found = counts / counts.sum()
        middle = (found + probs) / 2
        js = float(special.rel_entr(found, middle).sum() + special.rel_entr(probs, middle).sum()) / 2
        kl = None if found[probs == 0].any() else float(special.rel_entr(found, probs).sum())
        return cls(float(np.abs(found - probs).sum() / 2), kl, js)


def chi_square(counts: Array, probs: Array) -> float | None:
    """Pearson's p-value: how often a fair sample lies at least as far from the distribution as this one.

    Cells expected to hold fewer than `LEAST_EXPECTED` are pooled. A count where the probability is 0 makes it 0.
    None if there is only one cell left, and so nothing to test.
    """
    if counts[probs == 0].any():
        return 0.0
    found, expected = _pooled(counts, probs)
    if len(found) == 1:
        return None
    return float(special.chdtrc(len(found) - 1, ((found - expected) ** 2 / expected).sum()))


def smallest_caught(counts: Array, probs: Array, level: float) -> float | None:
    """The smallest total variation at which `chi_square` would be below `level` in 19 of 20 samples of this size.

    It is that of the distribution that is hardest to catch at its distance, so every other is caught more often. The
    pooled cells count as one: what is shifted among them is not seen. None where there is nothing to test; at most 1.
    """
    found, _ = _pooled(counts, probs)
    if len(found) == 1:
        return None
    degrees = len(found) - 1
    # Samples times the chi-square divergence, which is at least (2 total variation)^2.
    needed = float(special.chndtrinc(special.chdtri(degrees, level), degrees, 1 - POWER))
    return min(1.0, sqrt(needed / counts.sum()) / 2)


def _pooled(counts: Array, probs: Array) -> tuple[Array, Array]:
    """Counts and expected counts with the small cells made one."""
    expected = probs * counts.sum()
    order = expected.argsort()
    small = max(int((expected < LEAST_EXPECTED).sum()), 1)
    while small < len(order) and expected[order[:small]].sum() < LEAST_EXPECTED:
        small += 1
    alone, pooled = order[small:], order[:small]
    return tuple(np.append(row[alone], row[pooled].sum()) for row in (counts, expected))  # type: ignore[return-value]

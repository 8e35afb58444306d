"""What figures are worth, by hand; and a sweep over a simulated drafter whose best K and speed-ups are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdemo.decoding.events import Event, Prefilled, Round
from specdemo.decoding.parts import DrafterParts
from specdemo.settings import Settings
from specdemo.studies.grid import WARM_UP
from specdemo.studies.prompts import Prompt
from specdemo.studies.statistics import (
    FEWEST,
    Spread,
    best_of,
    geometric_mean,
    holm,
    p_value,
    pooled_rate,
    rates_differ,
)
from specdemo.studies.summaries import Row
from specdemo.studies.sweep import Sweep, best_k
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind

# By hand ---------------------------------------------------------------------------------------------------


def test_a_geometric_mean_by_hand() -> None:
    found = geometric_mean({"a": [1.0, 4.0], "b": [8.0], "c": []})
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(4), 2)  # of 2 and 8: the texts of a prompt are one unit
    # Two logarithms log 4 apart: standard error log 2; Student's t for one degree of freedom is 12.706.
    assert found.high == pytest.approx(4 * 2**12.706, rel=1e-3)
    assert found.low == pytest.approx(4 / 2**12.706, rel=1e-3)
    assert geometric_mean({"a": [1.0]}) == Spread(1.0, None, None, 1)
    assert geometric_mean({"a": []}) is None


def test_a_ratio_of_means_is_the_mean_of_ratios() -> None:
    one, other = ({str(n): [speed] for n, speed in enumerate(speeds)} for speeds in ([10.0, 90.0], [20.0, 30.0]))
    means = [geometric_mean(speeds) for speeds in (one, other, {n: [one[n][0] / other[n][0]] for n in one})]
    first, second, ratio = (found.mean if found else 0.0 for found in means)
    assert first / second == pytest.approx(ratio)


def test_the_interval_of_the_best_of_many_is_wider() -> None:
    values = {str(n): [1 + n / 10] for n in range(9)}
    alone, picked = geometric_mean(values), geometric_mean(values, of_many=5)
    assert alone is not None
    assert picked is not None
    ends = [picked.low, alone.low, alone.mean, alone.high, picked.high]
    assert ends == sorted(end for end in ends if end)
    assert len({*ends}) == 5


def test_a_pooled_rate_by_hand() -> None:
    assert pooled_rate([(3, 4), (1, 4), (0, 0)], 1.0) == Spread(0.5, 0.0, 1.0, 2)
    found = pooled_rate([(30, 40), (25, 50), (28, 40), (10, 20), (33, 50), (20, 40)])
    assert found is not None
    assert found.mean == 146 / 240
    assert found.low is not None
    assert found.low < found.mean
    assert pooled_rate([(0, 0)]) is None
    assert pooled_rate([(1, 2)]) == Spread(0.5, None, None, 1)


def test_intervals_of_the_same_figures_are_the_same() -> None:
    values = {str(n): [1 + (n * n % 7) / 10] for n in range(12)}
    assert geometric_mean(values) == geometric_mean(values)


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


@pytest.mark.parametrize("count", [FEWEST - 1, FEWEST + 4])
def test_p_values_of_nothing_are_even(count: int) -> None:
    noise = np.random.default_rng(count)
    values = np.array([p_value([*noise.normal(size=count)]) for _ in range(500)])
    assert [np.mean(values < level) for level in (0.05, 0.3, 0.7)] == pytest.approx([0.05, 0.3, 0.7], abs=0.06)
    assert p_value([1.0]) == p_value([0.0, 0.0]) == 1.0
    assert p_value([0.1] * count) == 0.0


def test_the_best_and_those_that_cannot_be_told_from_it() -> None:
    prompts = [str(n) for n in range(8)]
    base = {prompt: 0.1 * n for n, prompt in enumerate(prompts)}
    near = {prompt: value - 0.02 * (-1) ** n for n, (prompt, value) in enumerate(base.items())}
    far = {prompt: value - 0.1 - 0.001 * n for n, (prompt, value) in enumerate(base.items())}
    assert best_of({"far": far, "base": {**base, "0": 0.01}, "near": near}) == ("base", ["near"])
    assert best_of({"one": {"a": 0.0}, "other": {"a": 1.0}}) == ("other", ["one"])  # a single prompt tells nothing


def test_rates_that_differ_by_chance() -> None:
    high = {str(n): (30 + n, 40) for n in range(4)}
    low = {str(n): (5 + n, 40) for n in range(4, 8)}
    assert rates_differ(high, low, of_many=2)
    assert not rates_differ(high, {"4": (36, 40), "5": (12, 40), "6": (30, 40), "7": (20, 40)}, of_many=8)
    assert not rates_differ({"0": (30, 40)}, {"1": (5, 40)}, of_many=2)
    noise, wrong = np.random.default_rng(1), 0
    for _ in range(200):  # eight groups of four texts, all alike: the best against the worst of them
        rates = noise.uniform(0.3, 0.7, (8, 4))
        groups = [{f"{g} {n}": (float(noise.binomial(40, rates[g, n])), 40.0) for n in range(4)} for g in range(8)]
        ordered = sorted(groups, key=lambda group: sum(part for part, _ in group.values()))
        wrong += rates_differ(ordered[-1], ordered[0], of_many=8)
    assert wrong <= 20


# A simulated drafter ---------------------------------------------------------------------------------------


SPEED_UPS = {1: 1.2, 2: 1.42, 4: 1.45, 8: 1.3, 16: 0.85}  # K = 4 is the best, and 2 hardly worse
TOKEN_SECONDS, TOKENS_A_ROUND, ROUNDS = 0.02, 3, 8


class Simulation:
    """A `start` whose lanes tell known speed-ups, on a machine whose speed drifts while they run.

    How much a prompt gains varies by 20%, how much of that with each K by 4%, and every round by 10%.
    """

    def __init__(self, seed: int, prompts: Sequence[Prompt]) -> None:
        self.noise = np.random.default_rng(seed)
        self.drift = 0.0
        easy = self.noise.normal(0, 0.2, len(prompts))
        self.gains = {
            (place, k): np.log(speed_up) + easy[place] + self.noise.normal(0, 0.04)
            for place in range(len(prompts))
            for k, speed_up in SPEED_UPS.items()
        }
        self.begun: list[tuple[str, int]] = []

    def loaded(self) -> Any:
        return SimpleNamespace(encode=lambda prompt: [int(prompt)], context=4096, parts=DrafterParts())

    def start(self, loaded: Any, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> Iterator[Event]:
        assert isinstance(settings.k, int)
        self.begun.append((drafter, settings.k))
        gain = 0.0 if drafter == "none" else self.gains[prompt_ids[0], settings.k]
        seconds = TOKEN_SECONDS * TOKENS_A_ROUND * np.exp(-gain)
        token = Token(1, TokenKind.TARGET, 0.5)
        drafted = () if drafter == "none" else (DraftedToken(1, DraftOutcome.ACCEPTED, 0.5, 0.5, 0.5),) * settings.k
        yield Prefilled(5, token, 0.3)
        for index in range(ROUNDS if settings.max_new_tokens > WARM_UP else 1):
            self.drift = 0.98 * self.drift + self.noise.normal(0, 0.1)
            spent = float(seconds * np.exp(self.drift + self.noise.normal(0, 0.1)))
            yield Round(index, drafted, (token,) * TOKENS_A_ROUND, 0.0, spent, spent)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    prompts = [Prompt(str(n), "any", str(n)) for n in range(10)]
    asked = {"prompts": prompts, "drafters": ["ngram"], "ks": (0, *SPEED_UPS), "temperatures": (0.0,)}
    asked |= {"seeds": 1, "max_new_tokens": 64}
    monkeypatch.setattr("specdemo.racing.race.check_drafter", lambda loaded, drafter: None)

    def swept(seed: int) -> tuple[list[Row], Simulation]:
        simulation = Simulation(seed, prompts)
        monkeypatch.setattr("specdemo.racing.race.start", simulation.start)
        study = Sweep(simulation.loaded(), asked)
        for _ in study.run():
            pass
        return study.runs, simulation

    return swept


def test_the_order_of_the_cases_rotates_and_each_has_a_baseline_of_its_own(simulated: Any) -> None:
    runs, simulation = simulated(0)
    begun = simulation.begun[2 * len(SPEED_UPS) :]
    assert simulation.begun[: 2 * len(SPEED_UPS) : 2] == [("none", k) for k in SPEED_UPS]  # each is warmed up
    pairs = list(zip(begun[::2], begun[1::2], strict=True))
    assert len(pairs) == len(runs) == 10 * len(SPEED_UPS)
    assert all({drafter for drafter, _ in pair} == {"none", "ngram"} for pair in pairs)
    assert Counter(pair[0][0] for pair in pairs) == {"none": 25, "ngram": 25}
    firsts = Counter(pairs[text * len(SPEED_UPS)][0][1] for text in range(10))
    assert firsts == dict.fromkeys(SPEED_UPS, 2)


@pytest.mark.slow
def test_intervals_hold_the_truth_and_the_best_k_is_right_or_tied(simulated: Any) -> None:
    """In 92 to 98 per cent of 300 sweeps over a drafter whose speed-ups are known."""
    held: Counter[int] = Counter()
    right = picked = 0
    sweeps = 300
    for seed in range(sweeps):
        runs, _ = simulated(seed)
        for row in Sweep.rows_of(runs):
            if row["k"]:
                held[row["k"]] += row["speedup"].low <= SPEED_UPS[row["k"]] <= row["speedup"].high
        (best,) = best_k(runs)
        right += 4 in (best["k"], *best["tied"])
        picked += best["speedup"].low <= SPEED_UPS[best["k"]] <= best["speedup"].high
    assert {k: count / sweeps for k, count in held.items()} == pytest.approx(dict.fromkeys(SPEED_UPS, 0.95), abs=0.03)
    assert right / sweeps >= 0.93
    assert picked / sweeps >= 0.93


def test_a_drafter_that_gains_nothing_is_not_recommended(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.test_statistics.SPEED_UPS", dict.fromkeys(SPEED_UPS, 1.0))
    sure = sum(best_k(simulated(seed)[0])[0]["sure"] for seed in range(40))
    assert sure <= 4  # 5% of the time that is said of some K

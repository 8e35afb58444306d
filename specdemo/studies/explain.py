"""What to expect: a measured race compared with the theory, and the gap between the two by its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, permutations
from math import factorial
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..decoding.acceptance import branches
from ..decoding.events import Event, Round
from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..formats import significant
from ..racing.figures import LaneFigures, counts_by_place, speed_up
from ..racing.trace import PLAIN, SPECULATIVE, Entry
from ..settings import Field, Settings
from ..system.imports import LazyModule
from . import theory
from .plots import ALONE, DRAFT_LENGTH, IN_DRAFT, TIMES, Axis, Plot, Section
from .profile import TARGET, Profile
from .profile import costs as costs_of
from .study import DRAFTER, PROMPT, Study, k_field

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import race
else:
    race = LazyModule("specdemo.racing.race")


@dataclass(frozen=True, slots=True)
class GapPart:
    """One simplification of the theory replaced by what was measured.

    `change` is what that does to the speed-up, as the mean over all orders in which the simplifications can be
    replaced, and `speedup` the prediction plus the changes so far.
    """

    name: str
    words: str
    speedup: float
    change: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A race in the terms of the theory.

    `one_pass` are the seconds of a mean target pass over one token, `k` is the longest draft, `alpha` the acceptance
    rate, `draft_cost` c and `verify_cost` the mean verification pass, both in target passes, `by_position` the
    acceptance rate at each position of the draft, None where nothing was tested. `predicted` is what the formula says
    and `measured` the speed-up after the prompt: the changes of the `parts` add up to the gap exactly.
    """

    one_pass: float
    k: int
    alpha: float
    draft_cost: float
    parallel: bool
    verify_cost: float
    by_position: tuple[float | None, ...]
    predicted: float
    measured: float
    parts: tuple[GapPart, ...]

    def in_words(self) -> list[str]:
        what = "a draft" if self.parallel else "a guess"
        lines = [
            f"{self.alpha:.0%} of the tested guesses were accepted, {what} cost {self.draft_cost:.0%} of a target "
            f"pass, and drafts were up to {self.k} long: the formula says {self.predicted:.2f}×. "
            f"Measured: {self.measured:.2f}×."
        ]
        return lines + [f"{part.change:+.2f}×  {part.words}" for part in self.parts]


def explain(plain: Sequence[Event], speculative: Sequence[Event], parallel: bool = False) -> Explanation:
    """Replace the formula's simplifications by what was measured, and say what each of them is worth.

    The value of one depends on which others are still there, so each gets its mean over all orders: the
    Shapley value. Every figure is a mean over rounds, so that with all of them replaced the prediction is the
    measurement itself and nothing is left over.

    Args:
        parallel: the drafter drafts all tokens at once, see `theory.Costs`.
    """
    alone = [event for event in plain if isinstance(event, Round)]
    rounds = [event for event in speculative if isinstance(event, Round)]
    stats = LaneFigures.of(speculative)
    measured = speed_up(LaneFigures.of(plain), stats)
    if not alone or stats.acceptance_rate is None or stats.tokens_per_round is None or measured is None:
        raise BadInput("There is nothing to explain: a race of both lanes is needed in which guesses were tested.")

    if any(branches(event.drafted) for event in rounds):
        raise BadInput("The theory covers chains, and this race drafted trees.")
    one_pass = fmean(event.verify_seconds for event in alone)
    lengths = [len(event.drafted) for event in rounds]
    k, alpha, tau = max(lengths), stats.acceptance_rate, stats.tokens_per_round
    reading = stats.prompt_seconds - stats.ttft_seconds  # by the first draft: part of the prompt, not of the rounds
    draft = (stats.draft_seconds - reading) / len(rounds) / one_pass  # of a mean round
    verify = stats.verify_seconds / len(rounds) / one_pass
    seconds = (stats.seconds - stats.prompt_seconds) / len(rounds) / one_pass
    drafts = fmean(length > 0 for length in lengths) if parallel else fmean(lengths)
    costs = theory.Costs(draft / drafts, parallel=parallel)
    by_position = [accepted / tested if tested else None for tested, accepted in counts_by_place(rounds)]
    passing = [rate or 0.0 for rate in by_position]
    reached = [0.0, *accumulate(accumulate(passing, mul))]  # tokens accepted of a draft of 0, 1, 2, ... tokens
    by_round = tau / (1 + fmean(reached[n] for n in lengths))

    @cache
    def predict(replaced: frozenset[str]) -> float:
        """The speed-up with some of the simplifications replaced."""
        drafted = lengths if "drafts" in replaced else [k]
        if "positions" in replaced:
            tokens = fmean(1 + reached[n] for n in drafted)
        else:
            tokens = fmean(theory.expected_tokens(alpha, n) for n in drafted)
        tokens *= by_round if "rounds" in replaced else 1.0
        spent = fmean(costs.round(n) - 1 for n in drafted) + (verify if "checking" in replaced else 1.0)
        if "overhead" not in replaced:
            return tokens / spent
        per_token = fmean(event.seconds for event in alone) / one_pass
        return tokens * per_token / (spent + seconds - draft - verify)

    words = {
        "drafts": "drafts were shorter",
        "positions": "acceptance varies by position in the draft",
        "rounds": "acceptance varies from round to round, and the end of the text cuts drafts off",
        "checking": f"a pass that checks guesses takes {verify:.2f} times as long as one over a single token",
        "overhead": "sampling and bookkeeping",
    }
    predicted = before = predict(frozenset())
    parts = []
    for name, change in _shapley(predict, list(words)).items():
        before += change
        parts.append(GapPart(name, words[name], before, change))
    return Explanation(
        one_pass, k, alpha, costs.draft, parallel, verify, tuple(by_position), predicted, measured, tuple(parts)
    )


def explain_race(entries: Sequence[Entry], drafter: str) -> Explanation:
    """`explain` for the two lanes of a race."""
    plain, speculative = ([entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE))
    return explain(plain, speculative, drafter in DRAFTERS and DRAFTERS[drafter].parallel_drafting)


def _shapley(value: Callable[[frozenset[str]], float], names: Sequence[str]) -> dict[str, float]:
    """What each name adds to `value` of a set of names, as the mean over all orders in which they can be added."""
    found = dict.fromkeys(names, 0.0)
    for order in permutations(names):
        there: frozenset[str] = frozenset()
        for name in order:
            found[name] += (value(there | {name}) - value(there)) / factorial(len(names))
            there |= {name}
    return found


REPEATS = 2  # of the profile that gives the costs
TRY, MEASURE = "Numbers to try", "Or measure them here"
RATE = Axis("acceptance rate", ".0%", end=1)
over_k = partial(Plot, at="k", x=DRAFT_LENGTH)
SPEEDS = over_k(
    "Speed-up for each K",
    "If the tested tokens pass equally often at every position.",
    {"speedup": ""},
    TIMES,
    by="name",
    rule=ALONE,
)
BREAK_EVEN = over_k(
    "Acceptance rate that pays off",
    "Below the curve, drafting is slower than the target alone. Above it, drafting is faster.",
    {"break_even_alpha": "break-even"},
    RATE,
    rule=("alpha", "alpha"),
)
GAP = Plot(
    "From predicted to measured speed-up",
    "The formula leaves things out. Each bar between the first and the last puts one of them back: an outlined one to "
    "the left costs, a filled one to the right helps. Its length is its mean over all orders of the bars (its Shapley "
    "value).",
    {"speedup": ""},
    TIMES,
    "words",
    rule=ALONE,
)
BY_POSITION = Plot(
    "Acceptance rate by position in the draft",
    "The formula assumes the same rate at every position.",
    {"rate": "measured"},
    RATE,
    "position",
    IN_DRAFT,
    rule=("alpha", "alpha, all together"),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a measurement or a race adds to the three numbers of the theory: the costs of passes, and the real run.

    The costs of passes hold for the `numbers` they were measured with.
    """

    numbers: Mapping[str, float]
    passes: Sequence[float] = ()
    parallel: bool = False
    race: Explanation | None = None


class Theory(Study):
    """How much faster can it be? Three numbers decide: how long a guess takes, how long a pass of the target
    takes, and how often a guess is accepted (alpha). Change them to see what the theory predicts for each K. Then
    measure, to see how far a real run is from the prediction, and why.
    """

    name = "theory"
    title = "What to expect"
    fields = (
        Field("draft_ms", "Time for one guess, ms", "number", 1.0, 0, 10_000, group=TRY),
        Field("target_ms", "Time for one pass of the target, ms", "number", 30.0, 0.001, 10_000, group=TRY),
        Field("alpha", "Acceptance rate, alpha", "number", 0.6, 0, 1, group=TRY),
        replace(DRAFTER, group=MEASURE),
        k_field(4, MEASURE),
        replace(PROMPT, value="Write a Python function that reverses a string.", group=MEASURE),
    )
    button = "Measure"
    plots = ((SPEEDS, BREAK_EVEN), (GAP, BY_POSITION))

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        measured = {"drafters": [chosen["drafter"]], "k": chosen["k"], "repeats": REPEATS, "prompt": chosen["prompt"]}
        self.profile = Profile(loaded, measured)
        self.entries: list[Entry] = []
        self.costs: theory.Costs | None = None
        self.explained: Explanation | None = None
        self.nothing = ""  # why there is nothing to show
        self.steps = self.profile.steps + 1

    def run(self) -> Iterator[str]:
        ids, drafter, k = self.loaded.encode(self.chosen["prompt"]), self.chosen["drafter"], self.chosen["k"]
        for words in self.profile.run():
            self.done += 1
            yield words
        with closing(race.race(self.loaded, drafter, ids, Settings(k=k, max_new_tokens=96))) as entries:  # type: ignore[type-var]
            for entry in entries:
                self.entries.append(entry)
                yield "Racing"
        self.done += 1
        with suppress(BadInput):  # nothing was tested
            self.explained = explain_race(self.entries, drafter)
            self.costs = costs_of(self.profile.result(), drafter)
        if self.costs is None:
            self.nothing = (
                f"The drafter {drafter} drafted too little in this text to time it and to see what passes. Choose "
                "another prompt, or another drafter."
            )
        yield "Comparing"

    def sections(self) -> list[Section | None]:
        if self.costs and self.explained:
            return expected(self.costs, self.explained.alpha, self.explained)
        return [Section(self.nothing)] if self.nothing else []

    def rows(self) -> list[dict[str, Any]]:
        if self.costs and self.explained:
            return [dict(row) for row in theory.table(self.costs, self.explained.alpha)]
        return []

    def result(self) -> dict[str, Any]:
        found = {"passes": self.costs.passes, "parallel": self.costs.parallel} if self.costs else {}
        return {**super().result(), **self.values(), **found, "race": self.explained}

    def values(self) -> dict[str, Any]:
        if not (self.costs and self.explained):
            return {}
        passes = self.profile.result()["passes"]
        one = next(row["p50_ms"] for row in passes if (row["model"], row["tokens"]) == (TARGET, 1))
        return numbers_of(self.costs.draft, one, self.explained.alpha)

    def measured(self) -> Measurement | None:
        if not self.costs:
            return None
        return Measurement(self.values(), self.costs.passes, self.costs.parallel, self.explained)


def numbers_of(draft_cost: float, target_ms: float, alpha: float) -> dict[str, float]:
    """The three numbers of the form, as a person would write them."""
    numbers = {"draft_ms": draft_cost * target_ms, "target_ms": target_ms, "alpha": alpha}
    return {name: significant(value) for name, value in numbers.items()}


def expected(costs: theory.Costs, alpha: float, found: Explanation | None = None) -> list[Section | None]:
    """What the theory says, and beside it what was measured."""
    ks = range(costs.largest_k + 1)
    curves = {"if checking is free": replace(costs, passes=())}
    if costs.passes:
        curves["with what checking takes here"] = costs
    rows: list[dict[str, Any]] = [
        {"name": name, "alpha": alpha, **row}
        for name, curve in curves.items()
        for row in theory.table(curve, alpha, ks)
    ]
    measured = [{"name": "measured", "k": found.k, "speedup": found.measured}] if found else []
    *words, verdict = theory.in_words(costs, alpha)
    plots = [(SPEEDS, [*rows, *measured]), (BREAK_EVEN, rows[-len(ks) + 1 :])]
    sections = [Section(verdict, words, plots, [theory.for_each_k(costs, alpha)])]
    return [*sections, _of_explanation(found)] if found else [*sections]


def _of_explanation(found: Explanation) -> Section:
    """Each part of the gap is a bar from what the formula says without it."""
    bars: list[dict[str, Any]] = [{"words": "what the formula says", "speedup": found.predicted}]
    bars += [{**asdict(part), "start": part.speedup - part.change} for part in found.parts]
    bars += [{"words": "what was measured", "speedup": found.measured}]
    positions = [{"position": n, "rate": rate, "alpha": found.alpha} for n, rate in enumerate(found.by_position, 1)]
    plots = [(GAP, bars), (BY_POSITION, positions)]
    return Section(found.in_words()[0], [], plots, title="The measured race")


def tried(values: Mapping[str, Any], measured: Measurement | None = None) -> list[Section | None]:
    """`expected` of numbers that someone tries; what was measured stays as far as it holds for them."""
    read = {field.name: field.read(values.get(field.name)) for field in Theory.fields[:3]}
    costs = theory.Costs(read["draft_ms"] / read["target_ms"])
    if measured and all(read[name] == measured.numbers[name] for name in ("draft_ms", "target_ms")):
        costs = replace(costs, passes=measured.passes, parallel=measured.parallel)
    return expected(costs, read["alpha"], measured.race if measured else None)


def of_race(entries: Sequence[Entry], drafter: str) -> Measurement:
    """What a race says of the numbers of the form."""
    if not entries or drafter not in DRAFTERS:  # a server's race has no costs
        raise BadInput("There is no race to take numbers from: run one in the Race tab first.")
    found = explain_race(entries, drafter)
    return Measurement(numbers_of(found.draft_cost, 1000 * found.one_pass, found.alpha), (), found.parallel, found)

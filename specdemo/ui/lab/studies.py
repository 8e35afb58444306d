"""The measurements behind the Lab's views: each runs step by step, and at any time can show what it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...drafters.names import DRAFTERS
from ...models.presets import PRESETS
from ...racing.race import race
from ...racing.trace import Entry
from ...servers.address import Address
from ...servers.dialects import connected
from ...studies import domains, greedy, lossless, profile, sweep, theory
from ...studies.diagnosis import Diagnosis
from ...studies.doctor import AT_ONCE, CONTEXTS, Doctor, Plan, settings_of
from ...studies.explain import Explained, explain_race
from ...studies.prompts import Prompt, read_prompts, readable
from ...studies.report import html_report
from ...studies.writers import PresetWriter, ServerWriter, Writer
from ...types import BadInput, Settings
from ..race.run import Run
from . import pictures
from .diagnosis import of_diagnosis
from .plots import Picture, Section
from .views import K_SWEEP, VIEWS

if TYPE_CHECKING:
    from ...models.loaded import Loaded

REPEATS = 2  # of the profile behind the theory


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement or a race adds to the three numbers of the theory: the costs of passes, and the real run.

    The costs of passes hold for the `numbers` they were measured with.
    """

    numbers: Mapping[str, float]
    passes: Sequence[float] = ()
    parallel: bool = False
    race: Explained | None = None


class Study:
    """One measurement on a loaded preset. `done` of `steps` steps are behind it."""

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        self.loaded, self.asked = loaded, asked
        self.done, self.steps = 0, 1

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. What there is when it is closed can be shown.

        Raises:
            BadInput: the preset cannot do it.
        """
        raise NotImplementedError

    def picture(self) -> Picture:
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """The table of the CSV file."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {"rows": self.rows()}

    def values(self) -> dict[str, Any]:
        """What was measured for fields of the form."""
        return {}

    def measured(self) -> Measured | None:
        """What was measured beside them."""
        return None

    def page(self) -> str:
        """Everything as a page of HTML; empty where there is none."""
        return ""


class Profile(Study):
    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[profile.Timing] = []
        self.steps = profile.steps(loaded, asked["drafters"], asked["repeats"])

    def run(self) -> Iterator[str]:
        ids, (drafters, k, repeats) = self.loaded.encode(self.asked["prompt"]), _of(self.asked, "drafters k repeats")
        for timings in profile.profile(self.loaded, ids, drafters, k, repeats=repeats):
            self.timings += timings
            self.done += 1
            yield _timing(timings)

    def picture(self) -> Picture:
        return pictures.of_profile(profile.summarise(self.timings), self.asked["k"]) if self.timings else []

    def rows(self) -> list[dict[str, Any]]:
        return [{"part": part, **row} for part, rows in self.result().items() for row in rows]

    def result(self) -> dict[str, Any]:
        return dict(profile.summarise(self.timings))


class Theory(Study):
    """Costs by a short profile, then a race; both beside the formula."""

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[profile.Timing] = []
        self.entries: list[Entry] = []
        self.costs: theory.Costs | None = None
        self.explained: Explained | None = None
        self.nothing = ""  # why there is nothing to show
        self.steps = profile.steps(loaded, [asked["drafter"]], REPEATS) + 1

    def run(self) -> Iterator[str]:
        ids, (drafter, k) = self.loaded.encode(self.asked["prompt"]), _of(self.asked, "drafter k")
        for timings in profile.profile(self.loaded, ids, [drafter], k, repeats=REPEATS):
            self.timings += timings
            self.done += 1
            yield _timing(timings)
        with closing(race(self.loaded, drafter, ids, Settings(k=k, max_new_tokens=96))) as entries:  # type: ignore[type-var]
            for entry in entries:
                self.entries.append(entry)
                yield "Racing"
        self.done += 1
        with suppress(BadInput):  # nothing was tested
            self.explained = explain_race(self.entries, drafter)
            self.costs = profile.costs(profile.summarise(self.timings), drafter)
        if self.costs is None:
            self.nothing = (
                f"The drafter {drafter} drafted too little in this text to time it and to see what passes. Choose "
                "another prompt, or another drafter."
            )
        yield "Comparing"

    def picture(self) -> Picture:
        if self.costs and self.explained:
            return pictures.of_theory(self.costs, self.explained.alpha, self.explained)
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
        passes = profile.summarise(self.timings)["passes"]
        one = next(row["p50_ms"] for row in passes if (row["model"], row["tokens"]) == (profile.TARGET, 1))
        return _numbers(self.costs.draft, one, self.explained.alpha)

    def measured(self) -> Measured | None:
        if not self.costs:
            return None
        return Measured(self.values(), self.costs.passes, self.costs.parallel, self.explained)


class Sweep(Study):
    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.runs: list[sweep.Run] = []
        over_k = asked["vary"] == K_SWEEP
        self.plan = sweep.Plan(
            some_of_each("easy-hard", asked["prompts"]),
            asked["drafters"],
            sweep.KS if over_k else (0, asked["k"]),
            (asked["temperature"],) if over_k else sweep.TEMPERATURES,
            range(asked["seeds"]),
            asked["max_new_tokens"],
        )
        self.steps = self.plan.steps

    def run(self) -> Iterator[str]:
        for run in sweep.sweep(self.loaded, self.plan):
            self.runs.append(run)
            self.done += 1
            yield "Writing texts"

    def picture(self) -> Picture:
        return pictures.of_sweep(self.plan, self.runs, self.asked["vary"]) if self.runs else []

    def rows(self) -> list[dict[str, Any]]:
        return sweep.summarise(self.runs)

    def result(self) -> dict[str, Any]:
        return {"runs": self.runs, "summary": self.rows(), "best": sweep.best_k(self.runs)}


class Domains(Study):
    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.counts = domains.Counts()
        self.prompts, self.left_out = readable(loaded, some_of_each("domains", asked["prompts"]))
        self.steps = len(self.prompts)

    def run(self) -> Iterator[str]:
        k, temperature, tokens = _of(self.asked, "k temperature max_new_tokens")
        settings = Settings(k=k, temperature=temperature, max_new_tokens=tokens)
        for prompt, entries in domains.domains(self.loaded, self.asked["drafter"], self.prompts, settings):
            self.counts.add(prompt.category, entries)
            self.done += 1
            yield "Writing texts"

    def picture(self) -> Picture:
        return pictures.of_domains(self.counts, [prompt.id for prompt in self.left_out])

    def rows(self) -> list[dict[str, Any]]:
        return self.counts.rows()


class Lossless(Study):
    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.checks: list[greedy.GreedyCheck] = []
        self.places: list[lossless.DraftOnPaper] = []
        self.history: list[lossless.Sampled] = []
        self.no_samples = ""  # why none could be rolled
        self.prompts = readable(loaded, some_of_each("domains", 3))[0][: asked["prompts"]]
        batches = -(-asked["rounds"] // lossless.BATCH)
        self.steps = greedy.steps(self.prompts, [asked["drafter"]]) + 1 + (batches + 1 if batches else 0)

    def run(self) -> Iterator[str]:
        drafter, k, temperature, rounds, rule, broken = _of(self.asked, "drafter k temperature rounds rule broken")
        for check in greedy.greedy(self.loaded, self.prompts, [drafter], Settings(k=k, max_new_tokens=48)):
            self.checks.append(check)
            self.done += 1
            yield "Comparing texts at temperature 0"
        ids, settings = self.loaded.encode(self.asked["prompt"]), Settings(k, temperature, max_new_tokens=64, rule=rule)
        for places in lossless.exact(self.loaded, drafter, ids, settings, broken):
            self.places.append(places)
            yield "Working out the distribution"
        self.done += 1
        if not rounds:
            return
        try:
            context = lossless.telling_context(self.loaded, drafter, ids, settings)
        except BadInput as error:  # what was found so far stands
            self.no_samples = str(error)
            return
        self.done += 1
        yield "Found a telling place in the text"
        for sampled in lossless.sampling(self.loaded, drafter, context, settings, rounds, broken):
            self.history.append(sampled)
            self.done += 1
            yield "Sampling"

    def picture(self) -> Picture:
        sampled = Section("", [self.no_samples], title="Nothing was sampled") if self.no_samples else None
        if self.history:
            decode = self.loaded.tokenizer.decode
            sampled = pictures.of_sampling(self.history, lambda token: str(decode([token])))
        compared = pictures.of_greedy(self.checks) if self.checks else None
        exact = pictures.of_exact(self.places, self.asked["broken"]) if self.places else None
        return [compared, exact, sampled]

    def rows(self) -> list[dict[str, Any]]:
        sampled = [
            {"part": "sampling", "rounds": sampled.rounds, "rule": sampled.rule, **asdict(test)}
            for sampled in self.history
            for test in sampled.tests
        ]
        sampled = [{**row, "floor": {str(n): sample for n, sample in enumerate(row["floor"], 1)}} for row in sampled]
        return [{"part": "greedy", **asdict(check)} for check in self.checks] + sampled

    def result(self) -> dict[str, Any]:
        return {"greedy": self.checks, "exact": self.places, "sampling": self.history}


class Examination(Study):
    """The doctor, on the servers whose addresses were given, else on the preset."""

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.doctor: Doctor | None = None
        self.plan = Plan(
            asked["prompts"],
            settings_of(0.0, asked["max_new_tokens"], bool(asked.get("server"))),
            [count for count in AT_ONCE if count <= asked["at_once"]],
            [tokens for tokens in CONTEXTS if tokens <= asked["context"]],
        )

    def run(self) -> Iterator[str]:
        with ExitStack() as opened:
            doctor = self.doctor = Doctor(*self._sides(opened), self.plan)
            self.steps = doctor.steps
            for words in doctor.run():
                self.done = doctor.done
                yield words

    def _sides(self, opened: ExitStack) -> tuple[Writer, Writer | None]:
        names = ("server", "server_key"), ("baseline", "baseline_key")
        pairs = [(self.asked.get(address), self.asked.get(key)) for address, key in names]
        server, baseline = (
            ServerWriter(opened.enter_context(connected(Address.read(address), key))) if address else None
            for address, key in pairs
        )
        if server is not None:
            return server, baseline
        if baseline is not None:
            raise BadInput("Give the address of the server, too: a preset is its own baseline.")
        return PresetWriter(self.loaded, *_of(self.asked, "drafter k")), PresetWriter(self.loaded, "none", 0)

    def picture(self) -> Picture:
        return of_diagnosis(Diagnosis.of(self.doctor)) if self.doctor and self.doctor.samples else []

    def rows(self) -> list[dict[str, Any]]:
        return Diagnosis.of(self.doctor).rows() if self.doctor else []

    def result(self) -> dict[str, Any]:
        return Diagnosis.of(self.doctor).as_dict() if self.doctor else {}

    def page(self) -> str:
        return html_report(Diagnosis.of(self.doctor)) if self.doctor else ""


STUDIES: dict[str, type[Study]] = dict(
    zip(VIEWS, (Profile, Theory, Sweep, Domains, Lossless, Examination), strict=True)
)


def theory_of(values: Mapping[str, Any], measured: Measured | None = None) -> Picture:
    """The theory for numbers that someone tries, and beside it what was measured.

    Raises:
        BadInput: a number is out of range.
    """
    read = {field.name: field.read(values.get(field.name)) for field in VIEWS["theory"].fields[:3]}
    costs = theory.Costs(read["draft_ms"] / read["target_ms"])
    if measured and all(read[name] == measured.numbers[name] for name in ("draft_ms", "target_ms")):
        costs = replace(costs, passes=measured.passes, parallel=measured.parallel)
    return pictures.of_theory(costs, read["alpha"], measured.race if measured else None)


def race_numbers(run: Run | None) -> tuple[dict[str, float], Measured]:
    """The numbers of a race for the form, and what the theory says to it.

    Raises:
        BadInput: there is no race, or nothing was drafted in it.
    """
    if run is None or not run.entries or run.request.drafter not in DRAFTERS:  # a server's race tells no costs
        raise BadInput("There is no race to take numbers from, or no longer: run one in the Race tab first.")
    found = explain_race(run.entries, run.request.drafter)
    target_ms = 1000 * found.one_pass
    numbers = _numbers(found.draft_cost, target_ms, found.alpha)
    return numbers, Measured(numbers, (), found.parallel, found)


def _numbers(draft_cost: float, target_ms: float, alpha: float) -> dict[str, float]:
    """The three numbers of the form, as a person would write them."""
    numbers = {"draft_ms": draft_cost * target_ms, "target_ms": target_ms, "alpha": alpha}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


def some_of_each(file: str, count: int) -> list[Prompt]:
    """The first prompts of each category of a prompt file, the categories in turn."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(PRESETS / "prompts" / f"{file}.jsonl"):
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[place] for place in range(count) for group in groups.values() if place < len(group)]


def _timing(timings: list[profile.Timing]) -> str:
    return "Timing passes and drafts" if timings else "Warming up"


def _of(asked: Mapping[str, Any], names: str) -> list[Any]:
    return [asked[name] for name in names.split()]

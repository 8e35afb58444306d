"""The measurements behind the Lab's views: each runs step by step, and at any time can show what it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..events import Entry
from ..lab import domains, greedy, lossless, profile, sweep, theory
from ..lab.bench import Prompt, read_prompts, readable
from ..lab.explain import Explained, explain
from ..presets import PRESETS
from ..race import PLAIN, SPECULATIVE, race
from ..types import BadInput, Settings
from . import lab_pictures as pictures
from .lab_plots import Picture
from .lab_views import K_SWEEP, VIEWS
from .runs import Job, Run

if TYPE_CHECKING:
    from ..models import Loaded

MAX_PASSES = 64
REPEATS = 2  # of the profile behind the theory


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
            self.explained = _explained(self.entries)
        if not self.values():
            self.nothing = (
                f"The drafter {drafter} guessed too little in this text to time it and to see what passes. Choose "
                "another prompt, or another drafter."
            )
        yield "Comparing"

    def picture(self) -> Picture:
        if self.nothing:
            return [pictures.section(self.nothing, [])]
        values = self.values()
        return pictures.of_theory(_costs(values), values["alpha"], self.explained) if values else []

    def rows(self) -> list[dict[str, Any]]:
        values = self.values()
        return [dict(row) for row in theory.table(_costs(values), values["alpha"])] if values else []

    def result(self) -> dict[str, Any]:
        return {**super().result(), **self.values(), "race": self.explained}

    def values(self) -> dict[str, Any]:
        summary = profile.summarise(self.timings)
        costs = profile.costs(summary, self.asked["drafter"])
        if costs is None or self.explained is None:
            return {}
        one = next(row["p50_ms"] for row in summary["passes"] if (row["model"], row["tokens"]) == (profile.TARGET, 1))
        measured = {"draft_ms": costs.draft * one, "target_ms": one, "alpha": self.explained.alpha}
        return {**measured, "passes": list(costs.passes)}


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
        rows = self.rows()
        return {"runs": self.runs, "summary": rows, "best": sweep.best_k(rows)}


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
        self.places: list[lossless.PlaceLaw] = []
        self.history: list[lossless.Sampled] = []
        self.no_dice = ""  # why none could be rolled
        self.prompts = readable(loaded, some_of_each("domains", 3))[0][: asked["prompts"]]
        batches = -(-asked["rounds"] // lossless.BATCH)
        self.steps = greedy.steps(self.prompts, [asked["drafter"]]) + 1 + (batches + 1 if batches else 0)

    def run(self) -> Iterator[str]:
        drafter, k, temperature, rounds, rule = _of(self.asked, "drafter k temperature rounds rule")
        for check in greedy.greedy(self.loaded, self.prompts, [drafter], k, 48):
            self.checks.append(check)
            self.done += 1
            yield "Comparing texts at temperature 0"
        ids, settings = self.loaded.encode(self.asked["prompt"]), Settings(k, temperature, max_new_tokens=64)
        for places in lossless.exact(self.loaded, drafter, ids, settings):
            self.places += places
            yield "Working out the law"
        self.done += 1
        if not rounds:
            return
        try:
            context = lossless.telling_context(self.loaded, drafter, ids, settings)
        except BadInput as error:  # what was found so far stands
            self.no_dice = str(error)
            return
        self.done += 1
        yield "Found a telling place in the text"
        for sampled in lossless.sampling(self.loaded, drafter, context, settings, rounds, rule):
            self.history.append(sampled)
            self.done += 1
            yield "Rolling the dice"

    def picture(self) -> Picture:
        sections = [pictures.of_greedy(self.checks)] if self.checks else []
        if self.places:
            sections.append(pictures.of_exact(self.places))
        if self.history:
            decode = self.loaded.tokenizer.decode
            sections.append(pictures.of_sampling(self.history, lambda token: str(decode([token]))))
        if self.no_dice:
            sections.append(pictures.section("", [self.no_dice], title="No dice were rolled"))
        return sections

    def rows(self) -> list[dict[str, Any]]:
        dice = [
            {"part": "sampling", "rounds": sampled.rounds, "rule": sampled.rule, **asdict(test)}
            for sampled in self.history
            for test in sampled.tests
        ]
        dice = [{**row, "floor": {str(n): sample for n, sample in enumerate(row["floor"], 1)}} for row in dice]
        return [{"part": "greedy", **asdict(check)} for check in self.checks] + dice

    def result(self) -> dict[str, Any]:
        return {"greedy": self.checks, "exact": self.places, "sampling": self.history}


STUDIES: dict[str, type[Study]] = dict(zip(VIEWS, (Profile, Theory, Sweep, Domains, Lossless), strict=True))


def theory_of(values: Mapping[str, Any], job: Job | None) -> Picture:
    """The theory for numbers that someone tries, and beside it the race of a job, if it has one.

    Raises:
        BadInput: a number is out of range.
    """
    read = {field.name: field.read(values.get(field.name)) for field in VIEWS["theory"].fields[:3]}
    passes = values.get("passes") or []
    if not isinstance(passes, list) or len(passes) > MAX_PASSES or not all(isinstance(x, (int, float)) for x in passes):
        raise BadInput("The costs of passes must be a list of numbers.")
    return pictures.of_theory(_costs({**read, "passes": passes}), read["alpha"], explained_of(job))


def _costs(values: Mapping[str, Any]) -> theory.Costs:
    return theory.Costs(values["draft_ms"] / values["target_ms"], values["passes"])


def explained_of(job: Job | None) -> Explained | None:
    """What the theory says to the race of a job; None without one."""
    if isinstance(job, Run):
        return _explained(job.entries)
    study = getattr(job, "study", None)
    return study.explained if isinstance(study, Theory) else None


def numbers_of(job: Job | None) -> dict[str, Any]:
    """The numbers of a race for the form.

    Raises:
        BadInput: there is no race, or nothing was drafted in it.
    """
    found = explained_of(job)
    if found is None:
        raise BadInput("There is no race to take numbers from, or no longer: run one in the Race tab first.")
    target_ms = 1000 * found.one_pass
    return {"draft_ms": found.draft_cost * target_ms, "target_ms": target_ms, "alpha": found.alpha}


def some_of_each(file: str, count: int) -> list[Prompt]:
    """The first prompts of each category of a prompt file, the categories in turn."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(PRESETS / "prompts" / f"{file}.jsonl"):
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[place] for place in range(count) for group in groups.values() if place < len(group)]


def _explained(entries: Sequence[Entry]) -> Explained:
    return explain(*([entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)))


def _timing(timings: list[profile.Timing]) -> str:
    return "Timing passes and guesses" if timings else "Warming up"


def _of(asked: Mapping[str, Any], names: str) -> list[Any]:
    return [asked[name] for name in names.split()]

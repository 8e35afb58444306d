"""Drafting ahead: what it brings on this machine, and what a second device would bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..decoding.events import Round
from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..formats import formatted
from ..settings import COMMAND, FORM, MAX_AHEAD, MAX_K, Field
from ..system.imports import LazyModule
from .grid import ALONE as NONE
from .grid import Grid
from .study import NEW_TOKENS, PROMPT_FILE, PROMPT_FILES, form_and_command, k_field, temperature_field
from .summaries import Figures, Row, Runs, average, mean, rate, summarise, with_speedups

if TYPE_CHECKING:
    from ..decoding import batch
    from ..models.loaded import Loaded
    from ..racing import race
else:
    batch, race = LazyModule("specdemo.decoding.batch"), LazyModule("specdemo.racing.race")

MUCH_LONGER = 1.1  # what takes less than this many times as long is not worth a sentence
SEVERAL_KS = "Tokens drafted in one round; several, separated by commas, are compared."
ABLE = {name: name for name, entry in DRAFTERS.items() if entry.drafts_ahead}
ALONE, PLAIN, TOGETHER, SIMULATED = "target alone", "speculation", "ahead, same cores", "ahead, simulated"
SIMULATION = (
    "Simulated from measured times: drafter and target run one after the other here, and the simulation lets them run "
    "side by side, as on two devices of this speed."
)


class DraftsAhead(Grid):
    """While the target reads a draft, the drafter can prepare the next one for the likeliest outcomes. If one of them
    comes true, the next draft is there at once. This view measures how often that is, what it brings on this machine,
    where both share the cores, and what a second device would bring.
    """

    name = "ahead"
    title = "Drafting ahead"
    summary = "Measure drafting while the target reads the draft, and simulate it on a second device."
    fields = (
        Field("drafter", "Drafter", "choice", "draft-model", choices=ABLE, help="A drafter that can draft ahead."),
        replace(k_field(4), shown_in=FORM),
        Field("ks", "Values of K", "text", "4", help=SEVERAL_KS, shown_in=COMMAND),
        temperature_field(0.0),
        Field("repeats", "Prompts", "whole", 4, 1, 20, help="How many prompts are decoded."),
        *form_and_command(NEW_TOKENS, 48, 64),
        Field(
            "fan_outs",
            "Outcomes for each position",
            "text",
            "1,2,4,8",
            help="How many outcomes to prepare for at each position of the draft, separated by commas.",
            shown_in=COMMAND,
        ),
        replace(PROMPT_FILE, value=PROMPT_FILES / "domains.jsonl"),
    )
    axes = ("method", "k", "fan_out")
    figures: ClassVar[Figures] = {
        "tokens_per_second": mean("tokens_per_second"),
        "speedup": mean("speedup"),
        "hits": rate("hits", "drafts", 1.0),
        **{name: average(name) for name in ("prepared", "pass_ms", "draft_ms", "prepare_ms")},
    }
    heading = "All figures, and their 95% intervals over prompts"
    columns = (
        ("method", "method", ""),
        ("k", "K", ",.0f"),
        ("fan_out", "outcomes for each position", ",.0f"),
        ("tokens_per_second", "tokens/s", ".1f"),
        ("speedup", "times speculation", "times"),
        ("hits", "drafts that were ready", ".0%"),
        ("prepared", "outcomes prepared", ".1f"),
        ("pass_ms", "a pass, ms", "ms"),
        ("draft_ms", "a draft, ms", "ms"),
        ("prepare_ms", "preparing, ms", "ms"),
    )

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        fan_outs, ks = chosen.get("fan_outs", (1, 2, 4, 8)), chosen.get("ks") or (chosen["k"],)
        if not all(1 <= each <= MAX_AHEAD for each in fan_outs):
            raise BadInput(f"There can be 1 to {MAX_AHEAD} outcomes for each position.")
        if not all(1 <= k <= MAX_K for k in ks):
            raise BadInput(f"K is 1 to {MAX_K} here.")
        ahead = [
            {"method": method, "ahead": each, "fan_out": each} for each in fan_outs for method in (TOGETHER, SIMULATED)
        ]
        cases = [{**method, "k": k} for k in ks for method in ({"method": PLAIN}, *ahead)]
        prompts = self.readable(self.prompts("domains"))[: chosen["repeats"]]
        self.plan(self.texts_of(prompts), [{"method": ALONE, "drafter": NONE}, *cases])
        self.shared = shared_by_both(loaded.environment())

    def write(self, names: Row) -> Iterator[Row]:
        (ids,), rule = self.ids_of(names), race.rule_for(self.settings_of(names))
        decoding = race.decoding_of(self.loaded, self.drafter_of(names), ids, rule, None)
        in_turn = names["method"] == SIMULATED
        if in_turn:
            decoding.drafter.in_turn = True  # type: ignore[attr-defined]
        with closing(batch.decode(decoding)) as events:  # type: ignore[type-var]
            rounds = [event for event in events if isinstance(event, Round)]
        times = times_of(rounds, in_turn)
        seconds = seconds_side_by_side(times) if in_turn else sum(event.seconds for event in rounds)
        reports = [event.ahead for event in rounds if event.ahead]
        if seconds:
            yield {
                "tokens_per_second": sum(len(event.emitted) for event in rounds) / seconds,
                "hits": sum(each.hit for each in reports),
                "drafts": len(reports),
                "prepared": fmean(each.prepared for each in reports) if reports else None,
                "pass_ms": _milliseconds(one.passing for one in times),
                "draft_ms": _milliseconds(one.drafting for one in times if not one.hit),
                "prepare_ms": _milliseconds(one.preparing for one in times),
            }

    def at(self, names: Row) -> str:
        return str(names["method"])

    def words(self) -> list[str]:
        return in_words(self.rows(), self.shared)

    @classmethod
    def with_comparison(cls, runs: Runs) -> Runs:
        """With speculation with its fastest K, by prompt."""
        speeds = {"speed": mean("tokens_per_second")}
        plain = summarise([run for run in runs if run["method"] == PLAIN], ("k",), speeds)
        fastest = max(plain, key=lambda row: row["speed"].mean)["k"] if plain else None
        return with_speedups(runs, lambda run: (run["method"], run.get("k")) == (PLAIN, fastest), "prompt_id")


class Times(NamedTuple):
    """The times of a round: of its draft, its pass and preparing for its outcomes; and whether its draft was ready."""

    drafting: float
    passing: float
    preparing: float
    hit: bool


def times_of(rounds: Sequence[Round], in_turn: bool) -> list[Times]:
    """A round tells what preparing its own draft took, which was done in the round before."""
    following = [*(event.ahead.seconds if event.ahead else 0.0 for event in rounds[1:]), 0.0]
    return [
        Times(
            max(event.draft_seconds - (preparing if in_turn else 0.0), 0.0),
            event.seconds - event.draft_seconds,
            preparing,
            bool(event.ahead and event.ahead.hit),
        )
        for event, preparing in zip(rounds, following, strict=True)
    ]


def seconds_side_by_side(times: Sequence[Times]) -> float:
    """The seconds that the rounds take where target and drafter run side by side.

    After a hit the next pass begins when this one and the preparation have ended. On a miss the drafter gives up what
    it prepares, and drafts.
    """
    hits = [*(one.hit for one in times[1:]), False]
    return sum(one.drafting + max(one.passing, one.preparing * hit) for one, hit in zip(times, hits, strict=True))


def _milliseconds(seconds: Iterable[float]) -> float | None:
    """Of their mean; None where nothing was timed."""
    return 1000 * fmean([*seconds] or [0.0]) or None


def in_words(rows: Sequence[Mapping[str, Any]], shared: str = "") -> list[str]:
    """What drafting ahead brings here, what it would bring on two devices, with the best K and number of outcomes, and
    why it does not pay where it does not.

    Args:
        shared: see `shared_by_both`.
    """
    words = []
    plain = {row["k"]: row for row in rows if row["method"] == PLAIN}
    whole = {(row["k"], row["fan_out"]): row for row in rows if row["method"] == SIMULATED}  # no pass ends these
    several = ", at its best K," if len(plain) > 1 else ""
    for method, where, both, remark in (
        (TOGETHER, "on this machine", shared, ""),
        (SIMULATED, "with a second device for the drafter", "", f" {SIMULATION}"),
    ):
        found = [row for row in rows if row["method"] == method and row["speedup"]]
        if found:
            best = max(found, key=lambda row: row["speedup"].mean)
            preparing = whole.get((best["k"], best["fan_out"]), best)
            why = _why(best, preparing, plain.get(best["k"]), both) if best["speedup"].mean < 1 else ""
            k = f"K = {best['k']} and " * bool(several)
            words.append(
                f"Drafting ahead is {formatted(best['speedup'], '.2f')} times as fast as drafting in turn{several} "
                f"{where}, with "
                f"{k}{outcomes(best['fan_out'])}; {best['hits'].mean:.0%} of the drafts were ready.{why}{remark}"
            )
    measured, simulation = (
        next((row for row in rows if row["method"] == method and row["speedup"]), None)
        for method in (TOGETHER, SIMULATED)
    )
    if measured and simulation and measured["pass_ms"] and simulation["pass_ms"]:
        longer = measured["pass_ms"] / simulation["pass_ms"]
        words.append(
            f"On shared cores a pass takes {longer:.2f} times as long as alone, which the simulation leaves out."
        )
    return words


def _why(row: Mapping[str, Any], preparing: Mapping[str, Any], plain: Mapping[str, Any] | None, shared: str) -> str:
    """Why a method is slower than drafting in turn, as a sentence; empty if the figures do not say."""
    one = plain["pass_ms"] if plain else None
    if not one or not row["pass_ms"] or not preparing["prepare_ms"]:
        return ""
    longer, times = row["pass_ms"] / one, preparing["prepare_ms"] / one
    words = []
    if shared and longer >= MUCH_LONGER:
        words.append(f"a pass takes {longer:.2f} times as long while the drafter prepares ({shared})")
    if times >= MUCH_LONGER:
        words.append(f"preparing for {preparing['prepared']:.1f} outcomes takes {times:.1f} times as long as a pass")
    return f" That is because {' and '.join(words)}." if words else ""


def shared_by_both(environment: Mapping[str, Any]) -> str:
    """What drafter and target share, in words; "" if each has a device, or that is unknown."""
    device, devices = str(environment.get("device", "")), environment.get("devices")
    if device == "cpu":  # then all models are in main memory
        cores = environment.get("threads")
        return "one core does both" if cores == 1 else f"{cores or 'the'} cores read one memory for both"
    if device.startswith("cuda") and isinstance(devices, list) and len(devices) == 1:
        return "the drafter's passes wait in the same queue"
    return ""


def outcomes(each: int) -> str:
    """How many outcomes are prepared for at each position, in words."""
    return f"{each} outcome{'s' * (each > 1)} for each position"

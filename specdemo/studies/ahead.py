"""Drafting ahead: what it brings on this machine, and what a second device would bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ..decoding.events import Round
from ..drafters.names import DRAFTERS
from ..racing.ahead import shared_by_both, why_slower
from ..system.imports import Later
from ..types import COMMAND, MAX_AHEAD, BadInput, Field
from .statistics import Spread, geometric_mean, pooled_rate
from .study import NEW_TOKENS, PROMPT_FILE, PROMPT_FILES, Study, k_field, settings_in, temperature_field

if TYPE_CHECKING:
    from ..decoding import batch
    from ..models.loaded import Loaded
    from ..racing import race
else:
    batch, race = Later("specdemo.decoding.batch"), Later("specdemo.racing.race")

ABLE = {name: name for name, entry in DRAFTERS.items() if entry.drafts_ahead}
ALONE, PLAIN, TOGETHER, SIMULATED = "target alone", "speculation", "ahead, same cores", "ahead, simulated"
TIMELINE_ROUNDS = 8
SIMULATION = (
    "Simulated from measured times: drafter and target run one after the other here, and the simulation lets them run "
    "side by side, as on two devices of this speed."
)


class DraftsAhead(Study):
    """While the target verifies a draft, the drafter could prepare the next one, for the likeliest outcomes. If one of
    them comes true, the next draft is there at once. This view measures how often that is, what it brings on this
    machine, where both share the cores, and what a second device would bring.
    """

    name = "ahead"
    title = "Drafting ahead"
    summary = "Measure drafting while the target verifies, and simulate it on a second device."
    fields = (
        Field("drafter", "Drafter", "list", "draft-model", choices=ABLE, help="A drafter that can draft ahead."),
        k_field(4),
        temperature_field(0.0),
        Field("repeats", "Prompts", "whole", 4, 1, 20, help="How many prompts are decoded."),
        replace(NEW_TOKENS, value=48, typed=64),
        Field(
            *("fan_outs", "Outcomes for each place", "wholes", "1,2,4,8"),
            help="How many outcomes to prepare for at each place of the draft, separated by commas.",
            only=COMMAND,
        ),
        replace(PROMPT_FILE, value=PROMPT_FILES / "domains.jsonl"),
    )
    heading = "All figures, and their 95% intervals over prompts"
    columns = (
        ("method", "method", ""),
        ("fan_out", "outcomes for each place", ",.0f"),
        ("tokens_per_second", "tokens/s", ".1f"),
        ("speedup", "times speculation", "times"),
        ("hits", "drafts that were ready", ".0%"),
        ("prepared", "outcomes prepared", ".1f"),
        ("pass_ms", "a pass, ms", "ms"),
        ("draft_ms", "a draft, ms", "ms"),
        ("prepare_ms", "preparing, ms", "ms"),
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.fan_outs = asked.get("fan_outs", (1, 2, 4, 8))
        if not all(1 <= each <= MAX_AHEAD for each in self.fan_outs):
            raise BadInput(f"The outcomes for each place are 1 to {MAX_AHEAD}.")
        self.settings = settings_in(asked)
        race.check_drafter(loaded, asked["drafter"])
        race.check_rule(asked["drafter"], replace(self.settings, ahead=1))
        self.prompts_read = self.readable(self.prompts("domains"))[: asked["repeats"]]
        self.texts: list[Text] = []
        self.shared = shared_by_both(loaded.environment())
        self.steps = len(self.prompts_read) * (2 + 2 * len(self.fan_outs))

    def run(self) -> Iterator[str]:
        for prompt in self.prompts_read:
            ids = self.loaded.encode(prompt.prompt)
            for method, each in self.methods():
                self.texts.append(self._write(prompt.id, ids, method, each))
                self.done += 1
                yield f"{method}, {outcomes(each)}" if each else method

    def _write(self, prompt: str, prompt_ids: Sequence[int], method: str, fan_out: int) -> Text:
        """Write a text by a method.

        Raises:
            BadInput: as `race.start` does.
        """
        drafter, k = ("none", 0) if method == ALONE else (self.asked["drafter"], self.settings.k)
        settings = replace(self.settings, ahead=fan_out, k=k)
        race.check_fits(self.loaded, len(prompt_ids), settings, drafter)
        decoding = race.decoding_of(self.loaded, drafter, prompt_ids, race.rule_for(settings), None)
        if method == SIMULATED:
            decoding.drafter.in_turn = True  # type: ignore[attr-defined]
        with closing(batch.decode(decoding)) as events:  # type: ignore[type-var]
            rounds = [event for event in events if isinstance(event, Round)]
        parts = parts_of(rounds, in_turn=method == SIMULATED)
        timeline = simulated(parts) if method == SIMULATED else ()
        seconds = timeline[-1].ends if timeline else sum(event.seconds for event in rounds)
        told = [event.ahead for event in rounds if event.ahead]
        return Text(
            *(method, fan_out, prompt, sum(len(event.emitted) for event in rounds), seconds),
            *(sum(each.hit for each in told), len(told), fmean([each.prepared for each in told] or [0])),
            fmean([part.passing for part in parts] or [0]),
            fmean([part.drafting for part in parts if not part.hit] or [0]),
            fmean([part.preparing for part in parts] or [0]),
            tuple(timeline[: 3 * TIMELINE_ROUNDS]),
        )

    def methods(self) -> list[tuple[str, int]]:
        ahead = [(method, each) for each in self.fan_outs for method in (TOGETHER, SIMULATED)]
        return [(ALONE, 0), (PLAIN, 0), *ahead]

    def words(self) -> list[str]:
        return in_words(self.rows(), self.shared)

    def rows(self) -> list[dict[str, Any]]:
        return summarise(self.texts, self.methods())


class Span(NamedTuple):
    """Something that target or drafter did, in seconds from the first round on."""

    who: str
    what: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Text:
    """One text after its prompt. `seconds` are simulated where the method is; the other times are those of a round."""

    method: str
    fan_out: int
    prompt: str
    tokens: int
    seconds: float
    hits: int
    drafts: int
    prepared: float
    passing: float
    drafting: float
    preparing: float
    timeline: tuple[Span, ...] = ()


class Part(NamedTuple):
    """The times of a round: of its draft, its pass and preparing for its outcomes; and whether its draft was ready."""

    drafting: float
    passing: float
    preparing: float
    hit: bool


def parts_of(rounds: Sequence[Round], in_turn: bool) -> list[Part]:
    """A round tells what preparing its own draft took, which was done in the round before."""
    following = [*(event.ahead.seconds if event.ahead else 0.0 for event in rounds[1:]), 0.0]
    return [
        Part(
            max(event.draft_seconds - (preparing if in_turn else 0.0), 0.0),
            event.seconds - event.draft_seconds,
            preparing,
            bool(event.ahead and event.ahead.hit),
        )
        for event, preparing in zip(rounds, following, strict=True)
    ]


def simulated(parts: Sequence[Part]) -> list[Span]:
    """What target and drafter do when they run side by side.

    After a hit the next pass begins when this one and the preparation have ended. On a miss the drafter gives up what
    it prepares, and drafts.
    """
    spans, now = list[Span](), 0.0
    for part, following in pairwise([*parts, Part(0.0, 0.0, 0.0, False)]):
        if part.drafting:
            spans.append(Span("drafter", "uses what is ready" if part.hit else "drafts", now, now + part.drafting))
            now += part.drafting
        spans.append(Span("target", "verifies", now, now + part.passing))
        prepared = part.preparing if following.hit else min(part.preparing, part.passing)
        if prepared:
            what = "prepares, used" if following.hit else "prepares, unused"
            spans.append(Span("drafter", what, now, now + prepared))
        now += max(part.passing, prepared)
    return spans


def summarise(texts: Sequence[Text], methods: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """A row for each method; `speedup` is over speculation without it, by prompt, and None for that itself."""
    rows = []
    plain = {text.prompt: text.tokens / text.seconds for text in texts if text.method == PLAIN and text.seconds}
    for method, fan_out in methods:
        mine = [text for text in texts if (text.method, text.fan_out) == (method, fan_out) and text.seconds]
        if not mine:
            continue
        rates = {text.prompt: [text.tokens / text.seconds] for text in mine}
        pairs = {name: [rate / plain[name]] for name, (rate,) in rates.items() if name in plain}
        row: dict[str, Any] = {"method": method, "fan_out": fan_out or None, "tokens_per_second": geometric_mean(rates)}
        row["speedup"] = None if method == PLAIN else geometric_mean(pairs)
        ahead = [(text.hits, text.drafts) for text in mine if text.drafts]
        row["hits"] = pooled_rate(ahead, 1.0) if ahead else None
        row["prepared"] = fmean(text.prepared for text in mine) if ahead else None
        for key, name in (("pass_ms", "passing"), ("draft_ms", "drafting"), ("prepare_ms", "preparing")):
            row[key] = 1000 * fmean(getattr(text, name) for text in mine) or None
        rows.append(row)
    return rows


def in_words(rows: Sequence[Mapping[str, Any]], shared: str = "") -> list[str]:
    """What drafting ahead brings here, what it would bring on two devices, and why it does not pay where it does not.

    Args:
        shared: see `shared_by_both`.
    """
    words = []
    plain = next((row for row in rows if row["method"] == PLAIN), None)
    whole = {row["fan_out"]: row for row in rows if row["method"] == SIMULATED}  # no pass ends what these prepare
    for method, where, both, told in (
        (TOGETHER, "on this machine", shared, ""),
        (SIMULATED, "with a second device for the drafter", "", f" {SIMULATION}"),
    ):
        found = [row for row in rows if row["method"] == method and row["speedup"]]
        if found:
            best = max(found, key=lambda row: row["speedup"].mean)
            preparing = whole.get(best["fan_out"], best)
            why = _why(best, preparing, plain, both) if best["speedup"].mean < 1 else ""
            words.append(
                f"Drafting ahead is {_told(best['speedup'])} as fast as drafting in turn {where}, with "
                f"{outcomes(best['fan_out'])}; {best['hits'].mean:.0%} of the drafts were ready.{why}{told}"
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
    why = why_slower(row["pass_ms"] / one, preparing["prepare_ms"] / one, preparing["prepared"], shared)
    return f" That is because {why}." if why else ""


def outcomes(each: int) -> str:
    """How many outcomes are prepared for at each place, in words."""
    return f"{each} outcome{'s' * (each > 1)} for each place"


def _told(spread: Spread) -> str:
    interval = "" if spread.low is None else f" ({spread.low:.2f} to {spread.high:.2f})"
    return f"{spread.mean:.2f} times{interval}"

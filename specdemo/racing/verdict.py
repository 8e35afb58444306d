"""What a race showed and why, in a sentence or two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .advice import MUCH, action, costs, notes, numbers, reason
from .asked import DraftedLane
from .compare import Comparison, exact_rows
from .figures import EVEN, Figures, memory_rate_of, weight_bytes
from .stats import Pace, Stats, speed_up

FEW_TOKENS = 16  # a shorter text gives no reliable figure
NOWHERE: Mapping[str, Any] = {}  # the environment of a lane of which none is known
CONSIDERABLE = 0.1  # share of a lane's time that is worth a sentence, and of a ratio that is


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """What is said of a drafted lane: its speed-up, if it has one, a sentence with what to do, and what lies behind.

    `notes` are further sentences, `numbers` the rows of a table, name and value. A text that is too short has neither.
    """

    speed_up: float | None
    sentence: str
    notes: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    figures: Figures | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; `slower` is whether it is beyond the noise."""
        told = {name: getattr(self, name) for name in ("speed_up", "sentence", "notes", "numbers")}
        return {**told, "slower": self.figures is not None and self.figures.side < 0}


def judge_lane(
    plain: Stats,
    lane: Stats,
    asked: DraftedLane | None = None,
    comparison: Comparison | None = None,
    environment: Mapping[str, Any] = NOWHERE,
) -> LaneVerdict:
    """The verdict on a lane against the target alone.

    Args:
        asked: who drafted, and with which K; None if that is not known.
        comparison: of the two texts; None if they are not to be compared.
        environment: of the loaded preset, or as a trace tells it; `memory_rate` in it is that of `memory_rate`.
    """
    found, sentence = Figures.of(plain, lane, asked), race_verdict(plain, lane, asked)
    if found is None or min(plain.tokens, lane.tokens) < FEW_TOKENS:
        return LaneVerdict(speed_up(plain, lane), sentence)
    rows = exact_rows(environment)
    told = notes(found, comparison.identical if comparison else None, rows)
    table = numbers(found, weight_bytes(environment), memory_rate_of(environment))
    return LaneVerdict(found.speed_up, sentence, told, table, found)


def lanes_verdict(verdicts: Mapping[str, LaneVerdict]) -> str:
    """What a race of one or more drafted lanes showed: the verdict on the fastest of them, with its name.

    Lanes of which nothing can be said yet come last. Lanes that are as fast within the noise are tied.
    """
    name = max(verdicts, key=lambda lane: verdicts[lane].speed_up or 0.0)
    best = verdicts[name]
    if len(verdicts) == 1:
        return best.sentence
    found = {lane: verdict.figures for lane, verdict in verdicts.items() if verdict.figures}
    others = [lane for lane in found if lane != name] if name in found else []
    slower = [lane for lane in others if found[name].speed_up > (1 + found[name].noise) * found[lane].speed_up]
    tied = " and ".join(lane for lane in others if lane not in slower)
    words = f"The fastest lane is {name}{f', tied with {tied}' if tied else ''}. {best.sentence}"
    rates = {lane: found[lane].lane.acceptance_rate or 0.0 for lane in [name, *slower] if lane in found}
    apt = max(rates, key=rates.__getitem__, default=name)
    if apt != name and rates[apt] > rates[name] + MUCH / 2:
        words += f" In {apt} more guesses pass, {rates[apt]:.0%} of the tested ones, but a token takes longer."
    return words


def race_verdict(plain: Stats, speculative: Stats, asked: DraftedLane | None = None) -> str:
    """What the race of a drafted lane against the target alone showed, why, and what to do.

    The ratio is `Pace.to`: the speeds of both lanes after the prompt. `asked` is that of `Figures.of`. For example:

        2.22× as fast as the target alone: 3.0 tokens per target pass; a draft costs 5% of a pass, and checking it makes
        a pass 30% longer.
        Slower, 0.92×, because a draft costs 117% of a pass: a round needs 2.60 tokens to break even and has 2.40. Try
        K = 2 (1.12× by these rounds), or a nearly free drafter such as prompt-lookup or ngram.
    """
    alone, drafting = plain.pace, speculative.pace
    ratio, shorter = drafting.to(alone), min(plain.tokens, speculative.tokens)
    ended = plain.finish_reason and speculative.finish_reason
    if shorter < 2 and ended:
        return "A lane wrote a single token: too little to compare."
    if shorter < 2 or ratio is None:
        return "Nothing to compare yet."
    found = Figures.of(plain, speculative, asked)
    if found is None:
        chance = f"{abs(ratio - 1):.0%}"
        words = "Nothing was drafted, so both lanes did the same work"
        return f"{words}." if chance == "0%" else f"{words}; the {chance} between them is timing noise."
    per_pass = f"{_tokens(found.tokens)} tokens per target pass"
    verdict = {
        -1: f"Slower, {ratio:.2f}× as fast as the target alone",
        0: f"Tied with the target alone ({ratio:.2f}×, within timing noise of {found.noise:.0%})",
        1: f"{ratio:.2f}× as fast as the target alone",
    }[found.side]
    reading = _reading(alone, drafting, ratio)
    if shorter < FEW_TOKENS:
        return f"{verdict}: {per_pass}.{reading} A short text says little."
    if found.side < 0:
        why = reason(found)
        needs = f"a round needs {found.needed:.2f} tokens to break even and has {found.tokens:.2f}"
        words = f"Slower, {ratio:.2f}×, because {why}: {needs}" if why else f"{verdict}: {needs}"
    else:
        words = "; ".join(part for part in (per_pass, costs(found), _remainder(found)) if part)
        words = f"{verdict}: {words}"
    return f"{words}. {action(found)}".rstrip() + reading


def _remainder(found: Figures) -> str:
    """What the costs of drafts and passes leave out."""
    if found.speed_up > found.tokens * EVEN[1]:
        return f"anything above {_tokens(found.tokens)}× is timing noise"
    rest = found.parts.get("rest", 0.0)
    return f"{rest / found.needed:.0%} of a round is neither drafting nor a pass" if rest >= MUCH else ""


def _reading(alone: Pace, drafting: Pace, ratio: float) -> str:
    """How reading the prompt changes the ratio; empty if it changes little."""
    longest, whole = max(alone.tokens, drafting.tokens), drafting.with_prompt_to(alone)
    shares = sorted(lane.prompt_seconds / (lane.seconds_for(longest) or 1.0) for lane in (alone, drafting))
    if whole is None:
        return ""
    close = CONSIDERABLE if _side(whole) == _side(ratio) else EVEN[1] - 1
    if shares[-1] < CONSIDERABLE and abs(whole / ratio - 1) <= close:
        return ""
    least, most = (f"{share:.0%}" for share in shares)
    share = most if least == most else f"{least} to {most}"
    words = f", which drafting does not speed up, took {share} of the time"
    low, high = sorted((ratio, 1.0))  # where it would lie if both lanes read the prompt at the same speed
    if not low * EVEN[0] <= whole <= high * EVEN[1]:
        words = f" took {'longer' if whole < ratio else 'less time'} with the drafter, {share} of the time"
    return f" Reading the prompt{words}: {whole:.2f}× overall."


def _side(ratio: float) -> int:
    """1 is faster, -1 slower, 0 neither."""
    return (ratio > EVEN[1]) - (ratio < EVEN[0])


def _tokens(count: float) -> str:
    return f"{count:.2f}" if count < 2 else f"{count:.1f}"

"""What a race showed and why, in a sentence or two.

For a lane: why it is slower, one thing to do, and what else its figures show, as far as one race can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..formats import byte_size, formatted
from .asked import DraftedLane
from .compare import Comparison, exact_rows
from .figures import EVEN, MUCH, NOWHERE, Figures, bytes_of, experts_counted, memory_rate_of, memory_share, weight_bytes
from .notes import notes
from .stats import Pace, Stats, speed_up

FEW_TOKENS = 16  # a shorter text gives no reliable figure
NOTHING = "Nothing to compare yet."
CONSIDERABLE = 0.1  # the share of a lane's time, or of a ratio, that is worth a sentence
BETTER = 1.05  # another K is advised if the figures say that it is this many times as fast
ALONE, DRAFTED = "alone", "with the drafter"
NEARLY_FREE = "prompt-lookup", "ngram", "lookup-ngram"  # drafters without a model


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """The verdict on a drafted lane: its speed-up, if it has one, a sentence with what to do, and its figures.

    `notes` are further sentences, `numbers` the rows of a table, name and value. A text that is too short has neither.
    """

    speed_up: float | None
    sentence: str
    notes: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    figures: Figures | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; `slower` is whether it is beyond the noise."""
        values = {name: getattr(self, name) for name in ("speed_up", "sentence", "notes", "numbers")}
        return {**values, "slower": self.figures is not None and self.figures.side < 0}


def judge_lane(
    plain: Stats,
    lane: Stats,
    asked: DraftedLane | None = None,
    comparison: Comparison | None = None,
    environment: Mapping[str, Any] = NOWHERE,
) -> LaneVerdict:
    """The verdict on a lane against the target alone.

    Args:
        asked: the drafter and its K; None if unknown.
        comparison: of the two texts; None if they need not be the same.
        environment: of the loaded preset, or from a trace; with the `memory_rate` measured after the race.
    """
    found, sentence = Figures.of(plain, lane, asked), race_verdict(plain, lane, asked)
    if found is None or min(plain.tokens, lane.tokens) < FEW_TOKENS:
        return LaneVerdict(speed_up(plain, lane), sentence)
    rows = exact_rows(environment, tree=asked is not None and asked.tree)
    sentences = notes(found, comparison.identical if comparison else None, rows)
    rate, of_lane = memory_rate_of(environment), bytes_of(lane, environment)
    table = numbers(found, weight_bytes(environment), rate, of_lane, experts_counted(lane, environment) is not None)
    return LaneVerdict(found.speed_up, sentence, sentences, table, found)


def judge_readers(plain: Stats, lane: Stats, asked: DraftedLane | None = None) -> LaneVerdict:
    """The verdict on readers that are decoded at once, by `Stats.at_once` without a drafter and with it.

    An example: With 8 readers at once eagle makes all of them 0.87× as fast: do not speculate here. A round reads 40
    rows instead of 8 and takes 2.4 times as long (12% of it drafting), but writes 2.1 tokens for each reader.
    """
    found, readers = Figures.of(plain, lane, asked), f"With {lane.readers} readers at once"
    if found is None:
        if (ratio := lane.pace.to(plain.pace)) is None:
            return LaneVerdict(None, NOTHING)
        chance = f" The {abs(ratio - 1):.0%} between them is timing noise, and what a drafter does besides."
        return LaneVerdict(None, f"{readers} nothing was drafted.{'' if round(ratio, 2) == 1 else chance}")
    who = asked.drafter if asked else "the drafter"
    words = {
        -1: f"{readers} {who} makes all of them {found.speed_up:.2f}× as fast: do not speculate here",
        0: f"{readers} {who} changes little ({found.speed_up:.2f}×, within timing noise of {found.noise:.0%})",
        1: f"{readers} {who} makes all of them {found.speed_up:.2f}× as fast",
    }[found.side]
    drafting = found.parts["drafting"] / found.needed
    share = f" ({drafting:.0%} of it drafting)" if drafting >= CONSIDERABLE else ""
    rows = f"{round(_rows_of_all(lane), 1):g}"
    words += (
        f". A round reads {rows} rows instead of {lane.readers} and takes {found.needed:.1f} times "
        f"as long{share}, but writes {formatted(found.tokens, 'tokens')} tokens for each reader."
    )
    if min(plain.tokens, lane.tokens) < FEW_TOKENS * lane.readers:
        return LaneVerdict(found.speed_up, f"{words} That is of the few rounds before the first text ended.")
    return LaneVerdict(found.speed_up, words, [], numbers(found), found)


def _rows_of_all(lane: Stats) -> float:
    """How many rows a mean round of all readers has: for each the pending token and the draft."""
    return lane.readers * (1 + lane.drafted / lane.rounds)


def fastest(verdicts: Mapping[str, LaneVerdict]) -> str:
    """The name of the fastest drafted lane. Lanes without a speed-up come last."""
    return max(verdicts, key=lambda lane: verdicts[lane].speed_up or 0.0)


def in_short(verdicts: Mapping[str, LaneVerdict]) -> dict[str, Any]:
    """The verdict on the fastest lane in a few words, ready for JSON: a `headline`, the `advice` that its sentence ends
    with, and as `chips` its three figures, each with a `name`, a `value` and a `sentence`. Where that lane has no
    figures there is only a headline, or nothing if its sentence is as short."""
    name = fastest(verdicts) if verdicts else ""
    found = verdicts[name].figures if verdicts else None
    if found is None:
        short, _, details = lanes_verdict(verdicts).partition(": ") if verdicts else ("", "", "")
        return {"headline": f"{short}." if details else "", "advice": "", "chips": []}
    words = {
        -1: f"Slower: {found.speed_up:.2f} times as fast as alone.",
        0: "No faster and no slower, within timing noise.",
        1: f"{found.speed_up:.2f} times as fast.",
    }[found.side]
    headline = f"{name}: {words}" if len(verdicts) > 1 else words
    return {"headline": headline, "advice": "" if found.lane.readers > 1 else action(found), "chips": _chips(found)}


def _chips(found: Figures) -> list[dict[str, str]]:
    whose = " for each reader" if found.lane.readers > 1 else ""
    tokens = f"{formatted(found.tokens, 'tokens')} tokens{whose} with the drafter, 1 without it"
    even = f"From {formatted(found.needed, 'tokens')} on that saves time."
    chips = [("tokens per pass", formatted(found.tokens, "tokens"), f"A pass of the target gives {tokens}. {even}")]
    if found.draft_cost is not None and found.check_cost is not None:
        draft, longer = found.draft_cost, max(found.check_cost - 1, 0.0)
        rows = f": it reads {found.rows:.1f} tokens for each one written" if found.rows else ""
        chips += [
            (
                "of a pass to draft",
                formatted(draft, "more"),
                f"A draft takes {draft:.0%} of the time of a pass of the target alone.",
            ),
            (
                "of a pass to check",
                formatted(longer, "more"),
                f"Checking a draft makes a pass {longer:.0%} longer{rows}.",
            ),
        ]
    return [dict(zip(("name", "value", "sentence"), one, strict=True)) for one in chips]


def lanes_verdict(verdicts: Mapping[str, LaneVerdict]) -> str:
    """What a race of one or more drafted lanes showed: the verdict on the fastest of them, with its name.

    Lanes that are equally fast within the noise are tied.
    """
    name = fastest(verdicts)
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

    The ratio is `Pace.to`, of the speeds of both lanes after the prompt. The arguments are those of `Figures.of`.
    Examples:

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
        return NOTHING
    found = Figures.of(plain, speculative, asked)
    if found is None:
        chance = f"{abs(ratio - 1):.0%}"
        words = "Nothing was drafted, so both lanes did the same work"
        return f"{words}." if chance == "0%" else f"{words}; the {chance} between them is timing noise."
    per_pass = f"{formatted(found.tokens, 'tokens')} tokens per target pass"
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
        return f"anything above {formatted(found.tokens, 'tokens')}× is timing noise"
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
    low, high = sorted((ratio, 1.0))  # the range if both lanes read the prompt at the same speed
    if not low * EVEN[0] <= whole <= high * EVEN[1]:
        words = f" took {'longer' if whole < ratio else 'less time'} with the drafter, {share} of the time"
    return f" Reading the prompt{words}: {whole:.2f}× overall."


def _side(ratio: float) -> int:
    """1 is faster, -1 slower, 0 neither."""
    return (ratio > EVEN[1]) - (ratio < EVEN[0])


# Why, and what to do ----------------------------------------------------------------------------------------


def reason(found: Figures) -> str:
    """Why a lane is slower: the largest extra cost of a round, or too few accepted tokens; "" if unknown."""
    part = max(found.parts, key=found.parts.__getitem__, default="")
    rate, least = found.lane.acceptance_rate, found.needed_acceptance
    if part and found.parts[part] < MUCH and rate is not None and least is not None and least > rate:
        return f"too few guesses pass, {rate:.0%} of those tested where {least:.0%} would do"
    if not part or found.parts[part] < MUCH:
        return ""
    rest = f"{found.parts['rest'] / found.needed:.0%} of a round is neither drafting nor a pass"
    return rest if part == "rest" else costs(found, part)


def costs(found: Figures, which: str = "both") -> str:
    """What a draft costs, and by how much checking it makes a pass longer, in passes; "" if unknown."""
    made, rounds = found.lane.drafts, found.lane.rounds
    often = f"made in {made} of {rounds} rounds" if made < 0.9 * rounds and found.lane.drafted is not None else ""
    if found.draft_cost is None or found.check_cost is None:
        return f"a draft was {often}" if often and which == "both" else ""
    a_draft = f"a draft, {often}," if often else "a draft"
    longer = f"makes a pass {found.check_cost - 1:.0%} longer"
    if which == "checking":
        return f"checking {a_draft} {longer} ({found.rows:.1f} tokens read for each one written)"
    drafting = f"{a_draft} costs {'under 1%' if found.draft_cost < 0.01 else f'{found.draft_cost:.0%}'} of a pass"
    return f"{drafting}, and checking it {longer}" if which == "both" and found.check_cost > EVEN[1] else drafting


def action(found: Figures) -> str:
    """One thing to do; "" if nothing is clearly better than what ran.

    Another K is advised if by the figures it is faster, beyond the noise, than what ran and than the target alone.
    """
    (best, speed), enough, free = found.best, max(BETTER, 1 + found.noise), ""
    nearly_free = found.asked is None or found.asked.drafter in NEARLY_FREE
    drafting = 0.0 if nearly_free else found.parts.get("drafting", 0.0)
    if found.side < 0 and drafting >= MUCH and found.needed - drafting < found.tokens:  # without it, it would be faster
        free = f"a nearly free drafter such as {NEARLY_FREE[0]} or {NEARLY_FREE[1]}"
    if found.k and best != found.k and speed > enough * max(found.speed_up, 1.0):
        if best > found.k:
            share = sum(draft.accepted >= found.k for draft in found.lane.drafts_tested) / found.lane.drafts
            return f"Try K = {best}: {share:.0%} of the drafts passed up to their last token."
        return f"Try K = {best} ({speed:.2f}× by these rounds){f', or {free}' if free else ''}."
    if found.side >= 0:
        return ""
    return f"Try {free}." if free else "For a text like this one, use the target alone."


def numbers(
    found: Figures,
    pass_bytes: int | None = None,
    memory_rate: float | None = None,
    lane_bytes: int | None = None,
    counted: bool = False,
) -> list[tuple[str, str]]:
    """The figures as a table of names and values.

    Args:
        pass_bytes: how many bytes of weights a pass of the target over one row reads; None if unknown.
        memory_rate: bytes per second that the memory streams; None if it was not measured.
        lane_bytes: what a mean pass of the drafted lane reads; None if that is the same. It is more with experts.
        counted: whether the experts that it reads were counted, not estimated.
    """
    plain, lane = found.plain, found.lane
    both = (plain, pass_bytes), (lane, lane_bytes or pass_bytes)
    token_ms = 1000 / (plain.tokens_per_second or 1.0)
    drafts = lane.drafts_tested
    places = [
        (sum(draft.tested > place for draft in drafts), sum(draft.accepted > place for draft in drafts))
        for place in range(0 if lane.trees else max((draft.drafted for draft in drafts), default=0))
    ]
    one_pass = fmean(plain.verify_times) if plain.verify_times else 0.0
    reached = pass_bytes / one_pass if pass_bytes and one_pass else 0.0
    rate = f", {reached / 1e9:.1f} GB/s" if reached else ""
    shares = [memory_share(one, size, memory_rate) for one, size in both]
    used = [f"{share:.0%} {which}" for share, which in zip(shares, (ALONE, DRAFTED), strict=True) if share is not None]
    read = [byte_size((one.rounds + 1) * size) for one, size in both if size]
    more = lane_bytes if lane_bytes and lane_bytes != pass_bytes else None
    how = "by the experts that such passes read" if counted else "estimated: as if rows chose their experts at random"
    rows = {
        "speed-up": f"{found.speed_up:.2f}×, give or take {found.noise:.0%}",
        "tokens per round": f"{found.tokens:.2f}",
        "tokens per round to break even": f"{found.needed:.2f}",
        "time per token, target alone": f"{token_ms:.1f} ms",
        "time per round": f"{found.needed * token_ms:.1f} ms",
        "extra time per round": ", ".join(
            f"{part} {round(cost * token_ms, 1) + 0.0} ms" for part, cost in found.parts.items()
        ),
        "weights read per pass, target alone": f"{pass_bytes / 1e9:.3f} GB{rate}" if pass_bytes else "",
        "weights read per pass, with the drafter": f"{more / 1e9:.3f} GB, {how}" if more else "",
        "weights read for the whole text": f"{read[0]} {ALONE}, {read[1]} {DRAFTED}" if read else "",
        "share of the memory's speed": ", ".join(used),
        "longest round": f"{1000 * max(lane.round_times):.1f} ms",
        "rows of a round of all readers": f"{_rows_of_all(lane):.1f}" if lane.readers > 1 else "",
        "tokens read per token written": formatted(found.rows, ".2f", ""),
        "acceptance rate (of tested)": formatted(lane.acceptance_rate, ".0%", ""),
        "acceptance rate to break even, if equal at every position": formatted(found.needed_acceptance, ".0%", ""),
        "draft efficiency (of drafted)": formatted(lane.draft_efficiency, ".0%", ""),
        "accepted at each position, of those tested there": ", ".join(f"{p / t:.0%}" for t, p in places if t),
        "accepted at each position, of all drafts": ", ".join(f"{p / len(drafts):.0%}" for _, p in places),
        "expected speed-up for each K": ", ".join(f"K {k} {speed:.2f}×" for k, speed in enumerate(found.by_k, 1)),
    }
    return [(name, value) for name, value in rows.items() if value]

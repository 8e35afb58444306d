"""What a drafted lane showed, why, and what to do: the slots of `words` whose facts are a `LaneVerdict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .bandwidth import experts_counted
from .figures import EVEN, MUCH

Words = str | Callable[[Any], str]
Row = Words | tuple[Callable[[Any], Any], Words]
"""When a sentence is said, and the sentence; a sentence alone is always said."""

LONG_CONTEXT = 1000  # tokens: only a longer one makes passes longer

VERDICT: Mapping[str, Mapping[str, Row]] = {
    "verdict": {
        "busy": (lambda v: v.pace.busy, "{busy}"),
        "a token": (lambda v: v.shorter < 2 and v.has_ended, "A lane wrote a single token: too little to compare."),
        "nothing": (lambda v: v.ratio is None, "Nothing to compare yet."),
        "readers, no draft": (
            lambda v: v.readers > 1 and v.speed_up is None,
            "With {readers} readers at once nothing was drafted. {chance of readers}",
        ),
        "readers, short": (
            lambda v: v.readers > 1 and not v.is_long,
            "{of readers} Only the few rounds before the first text ended count.",
        ),
        "readers": (lambda v: v.readers > 1, "{of readers}"),
        "no draft": (lambda v: v.speed_up is None, "Nothing was drafted, so both lanes did the same work{chance}."),
        "short": (
            lambda v: not v.is_long,
            "{speed}: {tokens:tokens} tokens per target pass. {prompt} A short text says little.",
        ),
        "slower, why": (
            lambda v: v.side < 0 and v.reason,
            "Slower ({speeds}) because {why}: {needs}. {advice} {prompt}",
        ),
        "slower": (lambda v: v.side < 0, "{speed}: {needs}. {advice} {prompt}"),
        "": "{speed}: {tokens:tokens} tokens per target pass{and costs}{and rest}. {advice} {prompt}",
    },
    "busy": {
        "slow": (lambda v: v.pace.is_slow, "This machine is busy: a pass takes {pace.busy:.1f} times its best time."),
        "": (
            lambda v: v.pace.busy,
            "This machine is busy: passes take from {pace.quartiles[0]:.1f} to {pace.quartiles[1]:.1f} ms.",
        ),
    },
    "chance": {
        "": (
            lambda v: abs(v.ratio - 1) > 0.005,
            lambda v: f"; the {abs(v.ratio - 1):.0%} between them is timing noise",
        ),
    },
    "speeds": {"": "{speed_up:times} writing, {in_all:times} in all"},  # the same words on the page, see `speeds` there
    "speed": {
        "slower": (lambda v: v.side < 0, "Slower than the target alone, {speeds}"),
        "tied": (lambda v: v.side == 0, "Tied with the target alone ({speeds}, within timing noise of {noise:.0%})"),
        "": "{speeds}",
    },
    "needs": {"": "a round needs {needed:.2f} tokens to break even and has {tokens:.2f}"},
    # Of several readers
    "chance of readers": {
        "": (
            lambda v: round(v.ratio, 2) != 1,
            lambda v: f"The {abs(v.ratio - 1):.0%} between them is timing noise and the cost of having a drafter.",
        ),
    },
    "of readers": {
        "slower": (lambda v: v.side < 0, "{readers get} {speeds}: do not speculate here. {a round}"),
        "tied": (
            lambda v: v.side == 0,
            "With {readers} readers at once {drafter} changes little ({speeds}, within timing noise of {noise:.0%}). "
            "{a round}",
        ),
        "": "{readers get} {speeds}. {a round}",
    },
    "readers get": {"": "With {readers} readers at once {drafter} gives"},
    "drafter": {"": (lambda v: v.request, "{request.drafter}"), "unknown": "the drafter"},
    "a round": {
        "": "A round reads {rows_of_all:g} tokens instead of {readers} and takes {needed:.1f} times as long "
        "{of it drafting}, but writes {tokens:tokens} tokens for each reader.",
    },
    "of it drafting": {
        "": (
            lambda v: v.parts["drafting"] / v.needed >= MUCH,
            lambda v: f"({v.parts['drafting'] / v.needed:.0%} of it drafting)",
        ),
    },
    # Why
    "why": {
        "acceptance": (
            lambda v: v.reason == "acceptance",
            "only {lane.acceptance_rate:.0%} of the tested guesses are accepted and {needed_acceptance:.0%} are needed",
        ),
        "rest": (lambda v: v.reason == "rest", "{rest}"),
        "drafting": (lambda v: v.reason == "drafting", "{drafting}"),
        "": "checking {a draft} {longer} ({rows:.1f} tokens read for each one written)",
    },
    "rest": {"": lambda v: f"{v.parts['rest'] / v.needed:.0%} of a round is neither drafting nor a pass"},
    "and costs": {
        "seldom": (lambda v: v.draft_cost is None and v.is_seldom, "; a draft was {often}"),
        "unknown": (lambda v: v.draft_cost is None, ""),
        "checking": (lambda v: v.check_cost > EVEN[1], "; {drafting}, and checking it {longer}"),
        "": "; {drafting}",
    },
    "and rest": {
        "above": (lambda v: v.speed_up > v.tokens * EVEN[1], "; anything above {tokens:tokens}× is timing noise"),
        "": (lambda v: v.parts.get("rest", 0.0) >= MUCH, "; {rest}"),
    },
    "drafting": {
        "free": (lambda v: v.draft_cost < 0.01, "{a draft} costs under 1% of a pass"),
        "": "{a draft} costs {draft_cost:.0%} of a pass",
    },
    "a draft": {"seldom": (lambda v: v.is_seldom, "a draft, {often},"), "": "a draft"},
    "often": {"": "made in {lane.drafts} of {lane.rounds} rounds"},
    "longer": {"": lambda v: f"makes a pass {v.check_cost - 1:.0%} longer"},
    # One thing to do, if anything is clearly better than what ran
    "advice": {
        "longer": (
            lambda v: v.has_better_k and v.best[0] > v.k,
            "Try K = {best[0]}: {passed_to_the_end:.0%} of the drafts were accepted in full.",
        ),
        "shorter": (lambda v: v.has_better_k, "Try K = {best[0]} ({best[1]:times} by these rounds){or free}."),
        "free": (lambda v: v.would_pay_if_free, "Try {free}."),
        "alone": (lambda v: v.side < 0, "For a text like this one, use the target alone."),
    },
    "or free": {"": (lambda v: v.would_pay_if_free, ", or {free}")},
    "free": {"": "a nearly free drafter such as prompt-lookup or ngram"},
    # How reading the prompt changes the speed-up
    "prompt": {
        "little": (lambda v: not v.prompt_matters, ""),
        "alike": (
            lambda v: v.reads_alike,
            "Reading the prompt, which drafting does not speed up, took {of the time}.",
        ),
        "": "Reading the prompt took {more or less} with the drafter, {of the time}.",
    },
    "more or less": {"more": (lambda v: v.in_all < v.speed_up, "longer"), "": "less time"},
    "of the time": {
        "one": (
            lambda v: len({f"{one:.0%}" for one in v.prompt_shares}) == 1,
            "{prompt_shares[0]:.0%} of the time",
        ),
        "": "{prompt_shares[0]:.0%} to {prompt_shares[1]:.0%} of the time",
    },
    "notes": {
        "acceptance": (
            lambda v: v.lane.falling_rates,
            "Acceptance falls along the text: {lane.falling_rates[0]:.0%} of the tested guesses in its first half, "
            "{lane.falling_rates[1]:.0%} later.",
        ),
        "passes": (
            lambda v: v.plain.slowdown and v.plain.context >= LONG_CONTEXT,
            "A pass of the target alone takes {plain.slowdown:.0%} longer in the last quarter of the text than in the "
            "first: the context has grown to {plain.context:,} tokens.",
        ),
        "exactness": (
            lambda v: v.is_rounded_apart,
            "The texts differ: on this engine a pass over {lane.longest_pass} rows is not exact to the bit{but exact}.",
        ),
    },
    "but exact": {"": (lambda v: v.exact_rows > 1, lambda v: f"; passes for K up to {v.exact_rows - 1} are")},
    "numbers": {
        "speed-up": "{speeds}, give or take {noise:.0%}",
        "tokens per round": "{tokens:.2f}",
        "tokens per round to break even": "{needed:.2f}",
        "time per token, target alone": "{token_ms:.1f} ms",
        "time per round": lambda v: f"{v.needed * v.token_ms:.1f} ms",
        "extra time per round": lambda v: ", ".join(
            f"{part} {round(cost * v.token_ms, 1) + 0.0} ms" for part, cost in v.parts.items()
        ),
        "weights read per pass, target alone": (lambda v: v.gigabytes[0], "{gigabytes[0]:.3f} GB{at what speed}"),
        "weights read per pass, with the drafter": (
            lambda v: v.gigabytes[0] != v.gigabytes[1],
            "{gigabytes[1]:.3f} GB, {how counted}",
        ),
        "weights read for the whole text": (
            lambda v: v.gigabytes[0],
            "{text_bytes[0]:bytes} alone, {text_bytes[1]:bytes} with the drafter",
        ),
        "share of the memory's speed": (
            lambda v: v.memory_shares[0] is not None,
            "{memory_shares[0]:.0%} alone{and drafted}",
        ),
        "longest round": lambda v: f"{1000 * max(v.lane.round_times):.1f} ms",
        "rows of a round of all readers": (lambda v: v.readers > 1, "{rows_of_all:.1f}"),
        "tokens read per token written": "{rows:.2f}",
        "acceptance rate (of tested)": "{lane.acceptance_rate:.0%}",
        "acceptance rate to break even, if equal at every position": "{needed_acceptance:.0%}",
        "draft efficiency (of drafted)": "{lane.draft_efficiency:.0%}",
        "accepted at each position, of those tested there": lambda v: ", ".join(
            f"{passed / tested:.0%}" for tested, passed in v.lane.places if tested
        ),
        "accepted at each position, of all drafts": lambda v: ", ".join(
            f"{passed / v.lane.drafts:.0%}" for _, passed in v.lane.places
        ),
        "expected speed-up for each K": lambda v: ", ".join(f"K {k} {speed:.2f}×" for k, speed in enumerate(v.by_k, 1)),
    },
    "at what speed": {"": (lambda v: v.memory_speed, ", {memory_speed:.1f} GB/s")},
    "how counted": {
        "counted": (
            lambda v: experts_counted(v.lane, v.environment) is not None,
            "by the experts that such passes read",
        ),
        "": "estimated: as if rows chose their experts at random",
    },
    "and drafted": {"": (lambda v: v.memory_shares[1] is not None, ", {memory_shares[1]:.0%} with the drafter")},
    # In short
    "headline": {
        "tied": (lambda v: v.side == 0, "No faster and no slower, within timing noise."),
        "slower": (lambda v: v.side < 0, "Slower: a pass {gives and takes}."),
        "": "A pass {gives and takes}.",
    },
    "gives and takes": {
        "": "gives {tokens:tokens} tokens {for each} and, with its draft, takes {needed:.2f} times as long"
    },
    "chips": {
        "tokens per pass": "{tokens:tokens}",
        "of a pass to draft": "{draft_cost:more}",
        "of a pass to check": "{longer_pass:more}",
    },
    "meanings": {
        "tokens per pass": "A pass of the target gives {tokens:tokens} tokens {for each} with the drafter, 1 without "
        "it. From {needed:tokens} on that saves time.",
        "of a pass to draft": "A draft takes {draft_cost:.0%} of the time of a pass of the target alone.",
        "of a pass to check": "Checking a draft makes a pass {longer_pass:.0%} longer{and rows}.",
    },
    "for each": {"": (lambda v: v.readers > 1, "for each reader")},
    "and rows": {"": (lambda v: v.rows, ": it reads {rows:.1f} tokens for each one written")},
}

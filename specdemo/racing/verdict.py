"""What a race showed and why, in a sentence or two."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from .stats import Pace, Stats, speed_up

EVEN = 0.98, 1.02  # a ratio between these is neither faster nor slower
FEW_TOKENS = 16  # a shorter text gives no reliable figure
ENOUGH = 5  # the fewest passes to take a median of
CONSIDERABLE = 0.1  # share of a lane's time that is worth a sentence; and see `_agree`
MOST_ROUNDS = 0.9  # share of rounds with a draft from which on the others are not mentioned


def race_verdict(plain: Stats, speculative: Stats) -> str:
    """What the race showed and why, in a sentence or two.

    The ratio is `Pace.to`: the speeds of both lanes after the prompt. The reasons explain it, or the sentence says what
    else contributes: timing noise, or a short text. What rests on fewer than `ENOUGH` passes is left out. For example:

        2.22x as fast as the target alone: 3.0 tokens per target pass; a draft costs 5% of a pass, and checking it makes
        a pass 30% longer.
        Slower, 0.50x as fast as the target alone: 1.00 tokens per target pass; a draft costs 100% of a pass, so one
        round takes the time the target needs for 2.00 tokens.
    """
    alone, drafting = plain.pace, speculative.pace
    ratio, shorter = drafting.to(alone), min(plain.tokens, speculative.tokens)
    ended = plain.finish_reason and speculative.finish_reason
    if shorter < 2 and ended:
        return "A lane wrote a single token: too little to compare."
    if shorter < 2 or ratio is None:
        return "Nothing to compare yet."
    if speculative.drafted == 0:
        chance = f"{abs(ratio - 1):.0%}"
        words = "Nothing was drafted, so both lanes did the same work"
        return f"{words}." if chance == "0%" else f"{words}; the {chance} between them is timing noise."
    verdict = {
        -1: f"Slower, {ratio:.2f}x as fast as the target alone",
        0: "As fast as the target alone",
        1: f"{ratio:.2f}x as fast as the target alone",
    }[_side(ratio)]
    reading = _reading(alone, drafting, ratio)
    if shorter < FEW_TOKENS:
        return f"{verdict}: {_per_pass(speculative)}.{reading} A short text says little."
    return f"{verdict}: {_reasons(plain, speculative, ratio)}.{reading}"


def lanes_verdict(plain: Stats, drafting: Mapping[str, Stats]) -> str:
    """What a race of one or more drafted lanes showed: the verdict on the fastest of them, with its name.

    Lanes of which nothing can be said yet come last.
    """
    name = max(drafting, key=lambda lane: speed_up(plain, drafting[lane]) or 0.0)
    verdict = race_verdict(plain, drafting[name])
    return verdict if len(drafting) == 1 else f"The fastest lane is {name}. {verdict}"


def _reasons(plain: Stats, speculative: Stats, ratio: float) -> str:
    """Why drafting is `ratio` times as fast.

    With n tokens per round, a share d of the rounds with a draft, a check that takes c plain passes and a draft that
    takes q of such a check, the typical costs explain the ratio

        n / (d c (1 + q) + 1 - d)

    The measured ratio can differ: some rounds take longer than typical ones, and sampling takes time as well. Then the
    sentence gives the average time of a round instead.
    """
    tokens, drafts = speculative.tokens_per_round or 0.0, speculative.drafts
    often, made = drafts / speculative.rounds, f"made in {drafts} of {speculative.rounds} rounds"
    if often >= MOST_ROUNDS or speculative.drafted is None:
        often, made = 1.0, ""
    costs, explained = "", tokens  # explained: the ratio by the formula above
    longer = _verification_cost(plain, speculative)
    if longer is not None:
        costs = f"; a draft{f', {made},' if made else ''} costs {_share(speculative)} of a pass"
        if longer > EVEN[1]:
            costs += f", and checking it makes a pass {longer - 1:.0%} longer"
        explained /= often * max(longer, 1.0) * (1 + (speculative.draft_cost or 0.0)) + 1 - often
    elif made:
        costs = f"; a draft was {made}"
    words = f"{_per_pass(speculative)}{costs}"
    if ratio > tokens * EVEN[1]:
        return f"{words}; anything above {_tokens(tokens)}x is timing noise"
    exact = f"{tokens:.2f} tokens per target pass"  # with fewer digits it could look the same as the time of a round
    average = f"one round takes the time the target needs for {tokens / ratio:.2f} tokens"
    if not _agree(explained, ratio):
        return f"{exact}; on average {average}"
    return f"{exact}{costs}, so {average}" if ratio < EVEN[0] else words


def _reading(alone: Pace, drafting: Pace, ratio: float) -> str:
    """How reading the prompt changes the ratio; empty if it changes little."""
    longest, whole = max(alone.tokens, drafting.tokens), drafting.with_prompt_to(alone)
    shares = sorted(lane.prompt_seconds / (lane.seconds_for(longest) or 1.0) for lane in (alone, drafting))
    if whole is None or (shares[-1] < CONSIDERABLE and _agree(whole, ratio)):
        return ""
    least, most = (f"{share:.0%}" for share in shares)
    share = most if least == most else f"{least} to {most}"
    words = f", which drafting does not speed up, took {share} of the time"
    low, high = sorted((ratio, 1.0))  # where it would lie if both lanes read the prompt at the same speed
    if not low * EVEN[0] <= whole <= high * EVEN[1]:
        words = f" took {'longer' if whole < ratio else 'less time'} with the drafter, {share} of the time"
    return f" Reading the prompt{words}: {whole:.2f}x overall."


def _side(ratio: float) -> int:
    """1 is faster, -1 slower, 0 neither."""
    return (ratio > EVEN[1]) - (ratio < EVEN[0])


def _agree(one: float, other: float) -> bool:
    """Whether two ratios agree: within 10% if they have the same verdict, else within 2%."""
    apart = abs(one / other - 1)
    return apart <= (CONSIDERABLE if _side(one) == _side(other) else EVEN[1] - 1)


def _per_pass(stats: Stats) -> str:
    return f"{_tokens(stats.tokens_per_round or 0.0)} tokens per target pass"


def _tokens(count: float) -> str:
    return f"{count:.2f}" if count < 2 else f"{count:.1f}"


def _share(stats: Stats) -> str:
    cost = stats.draft_cost or 0.0
    return "under 1%" if cost < 0.01 else f"{cost:.0%}"


def _verification_cost(plain: Stats, speculative: Stats) -> float | None:
    """A typical pass that checks a draft over a typical pass of the plain lane; None with too few of either."""
    if min(len(plain.verify_times), len(speculative.checks)) < ENOUGH:
        return None
    plain_pass = median(plain.verify_times)
    return median(speculative.checks) / plain_pass if plain_pass else None

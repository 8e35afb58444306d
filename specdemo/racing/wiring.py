"""Whether a published head seems to be wired wrongly: then nearly all of its first guesses fail.

Those who publish heads report that 0.65 to 0.85 of the first guesses pass (EAGLE-3 for Llama-3.1-8B: 0.75 to 0.80;
DFlash for Qwen3-8B: 0.82 on mathematics; Medusa for Vicuna-7B: about 0.6), and even heads after a short training reach
0.4.
"""

from __future__ import annotations

from collections.abc import Mapping

from .stats import Stats

USUAL = {"eagle": "65% to 85%", "block": "65% to 85%", "medusa": "50% to 65%"}  # of a kind of head
LEAST = 0.2  # share of first guesses below which something is wrong
ENOUGH = 30  # drafts that tell: of a head that is right 40% of the time, one text in 200 shows less than `LEAST`
CAUSES = (
    "it reads other layers of the target",
    "its rope_theta is not the one in its configuration",
    "the prompt is in another chat template than it was trained on",
    "the target thinks before it answers, or does not, and it was trained on the other",
    "the target is quantized",
)


def head_doubt(formats: Mapping[str, str], drafter: str, stats: Stats) -> str | None:
    """A sentence if far fewer first guesses of a published head pass than of such heads usually do.

    Args:
        formats: the names of the formats of published heads, by their drafters, see `Loaded.head_formats`.
        drafter: whose lane it was.
        stats: of that lane.
    """
    drafts = stats.drafts
    if drafter not in formats or drafts < ENOUGH:
        return None
    first = 1 - stats.accepted_lengths.get(0, 0) / drafts
    if first >= LEAST:
        return None
    causes = "; ".join(f"{number}. {cause}" for number, cause in enumerate(CAUSES, start=1))
    return (
        f"Only {first:.0%} of the first guesses of this {formats[drafter]} head pass, where {USUAL[drafter]} are usual:"
        f" it may be used in another way than it was trained. Likely causes, the likeliest first: {causes}."
    )

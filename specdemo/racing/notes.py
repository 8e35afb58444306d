"""What else the figures of a drafted lane show, besides the verdict: a sentence each."""

from __future__ import annotations

from math import sqrt
from statistics import median

from .figures import MUCH, Figures
from .stats import Stats

SURE = 3.0  # standard errors between two rates that differ by more than chance
MANY_PASSES, LONGER, LONG_CONTEXT = 32, 1.2, 1000  # passes, their growth and the tokens for a note on the context


def notes(found: Figures, same: bool | None = None, exact_rows: int | None = None) -> list[str]:
    """What else a lane shows, a sentence each.

    Args:
        same: whether its text is that of the target alone; None if the two need not be the same.
        exact_rows: `Runner.exact_rows` of the target; None if unknown.
    """
    sentences = [
        _decay(found.lane),
        _context(found.plain),
        _exactness(found, same, exact_rows),
    ]
    return [sentence for sentence in sentences if sentence]


def _decay(lane: Stats) -> str:
    """Fewer guesses pass as the text grows."""
    drafts = lane.drafts_tested
    half = len(drafts) // 2
    (early, passed), (late, later) = (
        (sum(draft.tested for draft in part), sum(draft.accepted for draft in part))
        for part in (drafts[:half], drafts[half:])
    )
    if not early or not late:
        return ""
    before, after, mean = passed / early, later / late, (passed + later) / (early + late)
    if before - after < max(MUCH, SURE * sqrt(mean * (1 - mean) * (1 / early + 1 / late))):
        return ""
    return f"Acceptance falls along the text: {before:.0%} of the tested guesses in its first half, {after:.0%} later."


def _context(plain: Stats) -> str:
    """The target's own passes take longer at the end: the context has grown, or the machine was slower."""
    times, quarter = plain.verify_times, len(plain.verify_times) // 4
    if len(times) < MANY_PASSES or not (first := median(times[:quarter])) or median(times[-quarter:]) < LONGER * first:
        return ""
    context = plain.prompt_tokens + plain.tokens
    why = f"the context has grown to {context:,} tokens"
    if context < LONG_CONTEXT:
        why = f"{context:,} tokens of context do not explain that, so the machine became slower; run the race again"
    return (
        f"A pass of the target alone takes {median(times[-quarter:]) / first - 1:.0%} longer in the last quarter of "
        f"the text than in the first: {why}."
    )


def _exactness(found: Figures, same: bool | None, exact_rows: int | None) -> str:
    """The text differs, and rounding can explain it."""
    rows = 1 + max((draft.drafted for draft in found.lane.drafts_tested), default=0)
    ended = found.plain.finish_reason and found.lane.finish_reason  # else one is only shorter
    if same is not False or not ended or exact_rows is None or exact_rows >= rows:
        return ""
    where = f"; passes for K up to {exact_rows - 1} are" if exact_rows > 1 else ""
    return f"The texts differ: on this engine a pass over {rows} rows is not exact to the bit{where}."

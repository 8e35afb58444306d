"""The badge of a race: whether the text with a drafter is the one that the target alone writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...decoding.events import Finished
from ...racing.asked import PLAIN, Request
from ...racing.compare import OWN_DRAFTER, is_exact, is_near_tie, other_draws
from ...racing.trace import Entry

MARKS = "differs", "", "chance", "same"  # what matters most first; "" where there is nothing to compare yet


def is_whole(entries: Iterable[Entry], lanes: int = 2) -> bool:
    """Whether all lanes of a race came to their end, and none was stopped."""
    ended: dict[str, bool] = {}
    for entry in entries:
        ended[entry.lane] = isinstance(entry.event, Finished)
    return len(ended) >= lanes and all(ended.values())


def exactness(
    summary: dict[str, Any], request: Request, environment: Mapping[str, Any], stopped: bool
) -> dict[str, str]:
    """The badge: its `mark` (same, differs or chance), a `title` and a sentence that explains it.

    Of several drafted lanes it is that of the first that differs, if one does.
    """
    drafted, plain = request.drafted, summary[PLAIN]["token_ids"]
    badges = {}
    for name, lane in drafted.items():
        comparison = (summary if len(drafted) == 1 else summary["verdicts"][name])["comparison"]
        exact = is_exact(environment, lane.k, lane.tree)
        badges[name] = _badge(plain, summary[name]["token_ids"], comparison, request, environment, exact, stopped)
    return worst(badges)


def worst(badges: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """Of the badges of drafted lanes by name: the one that matters most."""
    name = min(badges, key=lambda lane: MARKS.index(badges[lane]["mark"]))
    badge = badges[name]
    return {**badge, "words": f"{name}: {badge['words']}"} if len(badges) > 1 and badge["mark"] == "differs" else badge


def _badge(
    plain: Sequence[int],
    speculative: Sequence[int],
    comparison: Mapping[str, Any] | None,
    request: Request,
    environment: Mapping[str, Any],
    exact: bool,
    stopped: bool,
) -> dict[str, str]:
    """The badge of one lane; `exact` says whether the engine's rows are exact to the bit in it."""
    settings, dtype = request.settings, str(environment.get("dtype", ""))
    both = min(len(plain), len(speculative))
    if not both:  # stopped before the second lane had begun
        return {"mark": "", "title": "", "words": "There is nothing to compare yet."}
    if comparison is None:
        same = plain[:both] == speculative[:both] if stopped else plain == speculative
        if request.drafter == OWN_DRAFTER:
            return {"mark": "chance", "title": f"{'Same' if same else 'Different'} text", "words": other_draws(same)}
        return {
            "mark": "chance",
            "title": f"{'Same' if same else 'Different'} text, same distribution",
            "words": "Rejection sampling draws fresh random numbers in each lane, from the same distribution, so the "
            f"texts {'could differ, though these do not' if same else 'differ by chance'}.",
        }
    place, margin = comparison["first_difference"], comparison["margin"]
    if comparison["identical"] or (stopped and place >= both):
        title = "Identical so far" if stopped else "Identical to the target alone"
        words = f"{'The first' if stopped else 'All'} {both} tokens are exactly those that the target alone wrote."
        if both == 1:
            words = "The one token is exactly that of the target alone."
        if settings.temperature > 0:
            words += " Both lanes use the same random draws, so the text is the same above temperature 0 too."
        return {"mark": "same", "title": title, "words": words}
    words = "Both lanes use the same random draws. " if settings.temperature > 0 else ""
    words += f"The texts are the same for {place} token{'' if place == 1 else 's'}."
    if margin is not None:
        words += f" There the two candidate tokens were {margin:.2g} apart for the target"
        if not exact and is_near_tie(margin, dtype, settings.temperature):
            words += (
                f": a near-tie. This engine is not exact to the bit. In {dtype} the last digits of a logit depend on "
                "how many tokens a pass reads, so either token can win."
            )
        else:
            words += ", which is more than rounding explains. Please report this."
    elif request.drafter == OWN_DRAFTER:
        words += " The servers do not tell how close the two candidate tokens were there."
    elif exact:
        words += " This engine is exact to the bit, so rounding does not explain that. Please report this."
    return {"mark": "differs", "title": f"First difference at token {place + 1}", "words": words}

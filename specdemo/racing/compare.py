"""Compares two texts: are they the same, and if not, where do they differ and by how much? The badge says it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..decoding.events import emitted_tokens
from ..formats import formatted
from ..settings import AUTO, MATCH, MAX_K, MAX_NODES, Settings
from ..tokens import Token
from .asked import DraftedLane
from .trace import Entry

NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How close two logits must be for rounding to decide between them, if the passes are not exact to the bit."""
OWN_DRAFTER = "the server's own"  # the drafter in the trace of a server, which does not say what drafts
OLD_FUSED_ROWS = 9  # `exact_rows` of the fused engine in traces that do not record it
MARKS = "differs", "", "chance", "same"  # of badges, the most important first; "" if there is nothing to compare yet
NOTHING_YET = {"mark": "", "title": "", "words": "There is nothing to compare yet."}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two texts are the same, token for token.

    `first_difference` is the place of the first token that differs, None if there is none. `margin` is then how close
    the two tokens were for the target (`noise.draw`; at temperature 0 the gap of their logits), None if unknown. A
    small margin is a near-tie, which passes of different lengths may round differently, above all in bfloat16: see
    `is_near_tie`.
    """

    identical: bool
    first_difference: int | None = None
    margin: float | None = None


def is_comparable(settings: Settings) -> bool:
    """Whether all lanes should write the same text. Above temperature 0 rejection sampling draws fresh numbers."""
    return settings.temperature == 0 or settings.rule == MATCH


def other_draws(same: bool) -> str:
    """Why the texts of two servers are not compared above temperature 0."""
    return (
        "Each server draws random numbers of its own, so above temperature 0 the texts "
        f"{'could differ, though these do not' if same else 'differ by chance'}. Whether both draw from the same "
        "distribution cannot be seen in one text."
    )


def compare(plain: Sequence[Token], other: Sequence[Token]) -> Comparison:
    """Compare the emitted tokens of two lanes that should have written the same text."""
    place = first_difference([token.id for token in plain], [token.id for token in other])
    if place is None:
        return Comparison(identical=True)
    margins = [text[place].margin for text in (plain, other) if place < len(text)]
    known = [margin for margin in margins if margin is not None]
    both = len(margins) == 2  # else one was stopped, and there is no other token to compare with
    return Comparison(identical=False, first_difference=place, margin=min(known) if both and known else None)


def compared(plain: Sequence[Token], other: Sequence[Token], settings: Settings) -> Comparison | None:
    """`compare` for any two lanes; None if their texts need not be the same."""
    return compare(plain, other) if is_comparable(settings) else None


def first_to_part(comparisons: Iterable[Comparison]) -> Comparison:
    """Of comparisons with the same text, the one that differs first."""
    return min(comparisons, key=lambda found: math.inf if found.first_difference is None else found.first_difference)


def exact_rows(environment: Mapping[str, Any], tree: bool = False) -> int:
    """`Runner.exact_rows` of the target; 0 if it is not known that a row is exact.

    Args:
        environment: of the loaded preset, or from a trace. An older trace lacks the number, but names the engine and
            says whether it ran Triton's kernels.
        tree: whether the drafts are trees. Then the number is `Runner.exact_tree_rows`. In older traces, which lack it,
            trees were exact in the native engine, and on a GPU except in 16 bits.
    """
    engine, rows = environment.get("engine"), environment.get("exact_tree_rows" if tree else "exact_rows")
    if type(rows) is int:
        return rows
    if tree:
        return MAX_NODES + 1 if engine == "native" and exact_rows(environment) else 0
    if engine == "native" or (engine == "graph" and environment.get("triton") is True):
        return MAX_K + 1
    return OLD_FUSED_ROWS if engine == "fused" and environment.get("dtype") == "bfloat16" else 0


def is_exact(environment: Mapping[str, Any], k: int | str, tree: bool = False) -> bool:
    """Whether the text with a drafter is the target's own to the last bit, so that rounding explains no difference."""
    rows = 1 if k == AUTO else int(k) + 1  # auto stays within what is exact
    return rows <= exact_rows(environment, tree)


def is_near_tie(margin: float, dtype: str, temperature: float = 0.0) -> bool:
    """Whether rounding can explain a difference, unless passes are exact (`is_exact`). An unknown dtype counts as the
    coarsest. Above temperature 0 a margin is a difference of logits divided by the temperature.
    """
    return margin * (temperature or 1.0) <= NEAR_TIE.get(dtype, NEAR_TIE["bfloat16"])


def tokens_of(entries: Iterable[Entry]) -> list[Token]:
    """The emitted tokens of one lane by id; by text if a server did not tell the id."""
    return [
        replace(token, id=token.text) if token.id is None else token
        for entry in entries
        for token in emitted_tokens(entry.event)
    ]


def first_difference(plain: Sequence[int | str], speculative: Sequence[int | str]) -> int | None:
    """The place of the first token that differs or that only one text has; None if there is none."""
    longest = max(len(plain), len(speculative))
    return next((i for i in range(longest) if plain[i : i + 1] != speculative[i : i + 1]), None)


def badge(
    plain: Sequence[Token],
    other: Sequence[Token],
    comparison: Comparison | None,
    asked: DraftedLane | None,
    settings: Settings,
    environment: Mapping[str, Any],
    stopped: bool,
) -> dict[str, str]:
    """The badge of a drafted lane, which says whether its text is that of the target alone: a `mark` (same, differs or
    chance), a `title`, and `words` that explain it.

    Args:
        comparison: of the two texts; None if they need not be the same.
        asked: the drafter and its K; None if unknown.
        stopped: whether one of the texts may only be shorter.
    """
    both = min(len(plain), len(other))
    if not both:  # stopped before the second lane had begun
        return {**NOTHING_YET}
    own = asked is not None and asked.drafter == OWN_DRAFTER
    if comparison is None:
        ids = [[token.id for token in (text[:both] if stopped else text)] for text in (plain, other)]
        same = ids[0] == ids[1]
        title = f"{'Same' if same else 'Different'} text"
        if own:
            return {"mark": "chance", "title": title, "words": other_draws(same)}
        return {
            "mark": "chance",
            "title": f"{title}, same distribution",
            "words": "Rejection sampling draws fresh random numbers in each lane, from the same distribution, so the "
            f"texts {'could differ, though these do not' if same else 'differ by chance'}.",
        }
    place, margin, sampled = comparison.first_difference, comparison.margin, settings.temperature > 0
    if place is None or (stopped and place >= both):
        title = "Same text so far" if stopped else "Same text, word for word"
        words = f"{'The first' if stopped else 'All'} {both} tokens are exactly those that the target alone wrote."
        if both == 1:
            words = "The one token is exactly that of the target alone."
        if sampled:
            words += " Both lanes use the same random draws, so the text is the same above temperature 0 too."
        return {"mark": "same", "title": title, "words": words}
    words = "Both lanes use the same random draws. " if sampled else ""
    words += f"The texts are the same for {place} token{'' if place == 1 else 's'}."
    exact = asked is not None and is_exact(environment, asked.k, asked.tree)
    dtype = str(environment.get("dtype", ""))
    if margin is not None:
        words += f" There the two candidate tokens were {formatted(margin, 'gap')} apart for the target"
        if not exact and is_near_tie(margin, dtype, settings.temperature):
            words += (
                f": a near-tie. This engine is not exact to the bit. In {dtype} the last digits of a logit depend on "
                "how many tokens a pass reads, so either token can win."
            )
        else:
            words += ", which is more than rounding explains. Please report this."
    elif own:
        words += " The servers do not tell how close the two candidate tokens were there."
    elif exact:
        words += " This engine is exact to the bit, so rounding does not explain that. Please report this."
    return {"mark": "differs", "title": f"First difference at token {place + 1}", "words": words}


def of_readers(badge: dict[str, str], readers: int, stopped: bool) -> dict[str, str]:
    """The badge of several readers from the worst of theirs."""
    who = "both readers" if readers == 2 else f"all {readers} readers"
    begins = f"so far {who}" if stopped else who
    same = {"words": f"{begins[0].upper()}{begins[1:]} get exactly the text that they get without the drafter."}
    return {**badge, **same} if badge["mark"] == "same" else badge


def worst(badges: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """The most important of the badges of drafted lanes, by name; of those that differ the first."""
    name = min(badges, key=lambda lane: MARKS.index(badges[lane]["mark"]))
    found = badges[name]
    return {**found, "words": f"{name}: {found['words']}"} if len(badges) > 1 and found["mark"] == "differs" else found

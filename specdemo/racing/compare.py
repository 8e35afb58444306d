"""Are two texts the same, and if not, where do they part and by how much?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..decoding.events import emitted_tokens
from ..types import AUTO, MATCH, MAX_K, Settings, Token
from .trace import Entry

NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How close two logits must be for rounding to decide between them, where that is not exact to the bit."""
OWN_DRAFTER = "the server's own"  # what the trace of a server calls it: a server does not say what drafts
OLD_FUSED_ROWS = 9  # `exact_rows` of the fused engine when traces did not record it


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two texts are the same, token for token.

    `first_difference` is the place of the first token that differs, None if there is none; `margin` is then how close
    two tokens were there for the target (`noise.draw`; at temperature 0 the gap of their logits), None where that is
    not known. A small margin is a near-tie, which passes of different lengths may round differently, above all in
    bfloat16: see `is_near_tie`.
    """

    identical: bool
    first_difference: int | None = None
    margin: float | None = None


def is_comparable(settings: Settings) -> bool:
    """Whether all lanes are to write the same text: above temperature 0 rejection sampling draws fresh numbers."""
    return settings.temperature == 0 or settings.rule == MATCH


def other_draws(same: bool) -> str:
    """Why the texts of two servers are not compared above temperature 0."""
    return (
        "Each server draws random numbers of its own, so above temperature 0 the texts "
        f"{'could differ, though these do not' if same else 'differ by chance'}. Whether both draw from the same "
        "distribution cannot be seen in one text."
    )


def compare(plain: Sequence[Token], other: Sequence[Token]) -> Comparison:
    """Compare the emitted tokens of two lanes that were to write the same text."""
    place = first_difference([token.id for token in plain], [token.id for token in other])
    if place is None:
        return Comparison(identical=True)
    margins = [text[place].margin for text in (plain, other) if place < len(text)]
    known = [margin for margin in margins if margin is not None]
    both = len(margins) == 2  # or one was stopped, and there is no other token to compare with
    return Comparison(identical=False, first_difference=place, margin=min(known) if both and known else None)


def first_to_part(comparisons: Iterable[Comparison]) -> Comparison:
    """Of several texts compared with the same one, the comparison of that which differs first."""
    return min(comparisons, key=lambda found: math.inf if found.first_difference is None else found.first_difference)


def exact_rows(environment: Mapping[str, Any]) -> int:
    """`Runner.exact_rows` of the target: 0 where nothing says that a row is exact.

    Args:
        environment: of the loaded preset, or as a trace tells it. A trace without the number is older: it tells of
            the engine, and whether that ran Triton's kernels.
    """
    engine, rows = environment.get("engine"), environment.get("exact_rows")
    if type(rows) is int:
        return rows
    if engine == "native" or (engine == "graph" and environment.get("triton") is True):
        return MAX_K + 1
    return OLD_FUSED_ROWS if engine == "fused" and environment.get("dtype") == "bfloat16" else 0


def is_exact(environment: Mapping[str, Any], k: int | str, tree: bool = False) -> bool:
    """Whether the text with a drafter is the target's own to the last bit, so that rounding explains no difference."""
    if tree:  # only there are rows that branch those of their chains, see `Runner.exact_tree_rows`
        return environment.get("engine") in ("native", "graph") and exact_rows(environment) > 0
    return (1 if k == AUTO else int(k) + 1) <= exact_rows(environment)  # auto keeps to what is exact


def is_near_tie(margin: float, dtype: str, temperature: float = 0.0) -> bool:
    """Whether rounding explains a difference, where it may (`is_exact`). An unknown dtype is taken for the coarsest.

    Above temperature 0 a margin is a difference of logits over the temperature.
    """
    return margin * (temperature or 1.0) <= NEAR_TIE.get(dtype, NEAR_TIE["bfloat16"])


def tokens_of(entries: Iterable[Entry]) -> list[Token]:
    """The emitted tokens of one lane; where a server did not tell an id, the text of the token stands for it."""
    return [
        replace(token, id=text) if token.id is None else token
        for entry in entries
        for token, text in zip(emitted_tokens(entry.event), entry.spans.emitted, strict=False)
    ]


def first_difference(plain: Sequence[int | str], speculative: Sequence[int | str]) -> int | None:
    """The place of the first token that differs or that only one of them has; None if there is none."""
    longest = max(len(plain), len(speculative))
    return next((i for i in range(longest) if plain[i : i + 1] != speculative[i : i + 1]), None)

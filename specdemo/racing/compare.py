"""Compares two texts: are they the same, and if not, where do they differ and by how much?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..decoding.events import Event, emitted_tokens
from ..settings import AUTO, MATCH, MAX_K, MAX_NODES, Settings
from ..tokens import Token
from .request import DraftedLane
from .words import sentence

NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How close two logits must be for rounding to decide between them, if the passes are not exact to the bit."""
OWN_DRAFTER = "the server's own"  # the drafter in the trace of a server, which does not say what drafts
OLD_FUSED_ROWS = 9  # `exact_rows` of the fused engine in traces that do not record it
MAX_SENTENCE = 1_000  # characters of what a trace says of its machine
MARKS = "differs", "", "chance", "same"  # of badges, the most important first; "" if there is nothing to compare yet


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


def first_to_part(comparisons: Iterable[Comparison | None]) -> Comparison | None:
    """Of comparisons with the same text, the one that differs first; None if there are none."""
    known = (found for found in comparisons if found)
    place = lambda found: math.inf if found.first_difference is None else found.first_difference  # noqa: E731
    return min(known, key=place, default=None)


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


def tokens_of(events: Iterable[Event]) -> list[Token]:
    """The emitted tokens of one lane by id; by text if a server did not tell the id."""
    tokens = (token for event in events for token in emitted_tokens(event))
    return [replace(token, id=token.text) if token.id is None else token for token in tokens]


def first_difference(plain: Sequence[int | str], speculative: Sequence[int | str]) -> int | None:
    """The place of the first token that differs or that only one text has; None if there is none."""
    longest = max(len(plain), len(speculative))
    return next((i for i in range(longest) if plain[i : i + 1] != speculative[i : i + 1]), None)


@dataclass(frozen=True)
class Texts:
    """The text of a drafted lane and that of the target alone: the facts that the badge tells.

    Attributes:
        request: the drafter and its K; None if unknown.
        stopped: whether one of the texts may only be shorter.
    """

    plain: Sequence[Token]
    other: Sequence[Token]
    settings: Settings
    request: DraftedLane | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False

    @property
    def badge(self) -> dict[str, Any]:
        """Whether the texts are the same: a `mark`, a `title`, `words` that explain it, and the `place` where they part
        with its `margin` in words."""
        words = {name: sentence(f"badge {name}", self) for name in ("title", "words", "margin")}
        return {"mark": self.mark, "place": self.place, **words}

    @cached_property
    def comparison(self) -> Comparison | None:
        """None if the texts need not be the same."""
        return compared(self.plain, self.other, self.settings)

    @property
    def both(self) -> int:
        """How many tokens both texts have."""
        return min(len(self.plain), len(self.other))

    @property
    def place(self) -> int:
        """Where the texts differ; at the end of the shorter one if they do not."""
        place = self.comparison.first_difference if self.comparison else None
        return self.both if place is None else place

    @property
    def number(self) -> int:
        """The number of the first token that differs, from 1."""
        return self.place + 1

    @property
    def mark(self) -> str:
        if not self.both:  # stopped before the second lane had begun
            return ""
        if self.comparison is None:
            return "chance"
        return "same" if self.comparison.identical or (self.stopped and self.place >= self.both) else "differs"

    @property
    def is_same(self) -> bool:
        """Whether the texts are the same, though they need not be."""
        end = self.both if self.stopped else None
        return [token.id for token in self.plain[:end]] == [token.id for token in self.other[:end]]

    @property
    def is_of_servers(self) -> bool:
        return self.request is not None and self.request.drafter == OWN_DRAFTER

    @property
    def dtype(self) -> str:
        return str(self.environment.get("dtype", ""))

    @property
    def is_exact(self) -> bool:
        """Whether rounding explains no difference."""
        return self.request is not None and is_exact(self.environment, self.request.k, self.request.tree)

    @property
    def tested_rows(self) -> int:
        """Up to how many rows of a pass a test on the machine that ran this found it exact; 0 if there was none."""
        rows = self._self_test.get("tree_rows" if self.request and self.request.tree else "rows")
        return rows if self.is_exact and type(rows) is int and 0 < rows <= MAX_K + 1 else 0

    @property
    def replaced(self) -> str:
        """The sentences on what did not run right there."""
        sentences = self._self_test.get("replaced")
        known = sentences if isinstance(sentences, list) else []
        return " ".join(words[:MAX_SENTENCE] for words in known if isinstance(words, str))[:MAX_SENTENCE]

    @property
    def _self_test(self) -> dict[str, Any]:
        found = self.environment.get("self_test")  # in a trace it may be anything
        return found if isinstance(found, dict) else {}

    @property
    def is_near_tie(self) -> bool:
        margin = self.comparison.margin if self.comparison else None
        return margin is not None and not self.is_exact and is_near_tie(margin, self.dtype, self.settings.temperature)


def worst(badges: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The most important of the badges of drafted lanes, by name; of those that differ the first."""
    if not badges:
        return Texts((), (), Settings()).badge
    name = min(badges, key=lambda lane: MARKS.index(badges[lane]["mark"]))
    found = badges[name]
    return {**found, "words": f"{name}: {found['words']}"} if len(badges) > 1 and found["mark"] == "differs" else found

"""One round of a race in words and numbers: what was drafted, what became of it, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..decoding.acceptance import branches, parents_of
from ..decoding.events import Round, text_of
from ..errors import BadInput
from ..formats import significant
from ..settings import Settings
from ..tokens import DraftedToken, DraftOutcome, TokenKind
from .request import PLAIN, Request
from .trace import Entry
from .words import sentence

BEFORE = 120  # characters of the text before the round
NAMES = {TokenKind.RESAMPLED: "corrected"}  # as the page says it


class Guess(NamedTuple):
    """A drafted token: the facts of why it passed, failed or was not tested."""

    token: DraftedToken
    settings: Settings

    @property
    def has_passed(self) -> bool:
        return self.token.outcome is DraftOutcome.ACCEPTED

    @property
    def least(self) -> float | None:
        """Below this a number passes that rejection sampling draws; None if unknown."""
        p, q = self.token.p, self.token.q
        return None if self.token.draw is None or p is None or not q else min(1.0, p / q)


class RoundFacts(NamedTuple):
    """What a round gave, as a whole."""

    event: Round

    @property
    def drafted(self) -> int:
        return len(self.event.drafted)

    @property
    def written(self) -> int:
        return len(self.event.emitted)

    @property
    def last(self) -> TokenKind:
        return self.event.emitted[-1].kind if self.event.emitted else TokenKind.UNKNOWN


def explained(request: Request, entries: Sequence[Entry], index: int, lane: str | None = None) -> dict[str, Any]:
    """A round, ready for JSON. Probabilities are those after temperature, top-k and top-p; for `margin` see `Token`.

    Args:
        lane: by default the first lane with a drafter.
    """
    lane = lane or next((entry.lane for entry in entries if entry.lane != PLAIN), PLAIN)
    own = [entry for entry in entries if entry.lane == lane]
    rounds = [entry for entry in own if isinstance(entry.event, Round)]
    if not 0 <= index < len(rounds):
        raise BadInput(f"The race has the rounds 0 to {len(rounds) - 1}, not {index}.")
    entry = rounds[index]
    event = entry.event
    assert isinstance(event, Round)
    before = "".join(text_of(earlier.event) for earlier in own[: own.index(entry)])
    tree = branches(event.drafted)
    parents = parents_of(event.drafted) if tree else ()
    return {
        "round": index,
        "rounds": len(rounds),
        "temperature": request.settings.temperature,
        "rule": request.settings.rule,
        "prompt": request.prompt[:BEFORE],
        "text_before": before[-BEFORE:],
        "drafted": [
            {
                "text": token.text,
                "outcome": token.outcome.value,
                "target_probability": significant(token.p),
                "drafter_probability": significant(token.q),
                **({"follows": parents[at] if parents[at] >= 0 else None} if tree else {}),
                "why": sentence("guess", Guess(token, request.settings)),
            }
            for at, token in enumerate(event.drafted)
        ],
        "written": [
            {
                "text": token.text,
                "kind": NAMES.get(token.kind, token.kind.value),
                "target_probability": significant(token.p),
                **({} if token.margin is None else {"margin": significant(token.margin)}),
                "why": sentence("origin", token),
            }
            for token in event.emitted
        ],
        "draft_seconds": significant(event.draft_seconds),
        "pass_seconds": significant(event.verify_seconds),
        "why": sentence("round", RoundFacts(event)),
    }

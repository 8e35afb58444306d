"""One round of a race in words and numbers: what was drafted, what became of it, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decoding.acceptance import branches, parents_of
from ..decoding.events import Round, text_of
from ..errors import BadInput
from ..formats import significant
from ..settings import MATCH, Settings
from ..tokens import DraftedToken, DraftOutcome, Token, TokenKind
from .asked import PLAIN, Request
from .trace import Entry

BEFORE = 120  # characters of the text before the round
NAMES = {TokenKind.RESAMPLED: "corrected"}  # as the page says it
WRITTEN = {
    TokenKind.ACCEPTED: "A guess that passed its test.",
    TokenKind.RESAMPLED: "The target's own token, in place of the guess that failed.",
    TokenKind.BONUS: "All guesses passed. The same pass also told what comes after them, so this token is free.",
    TokenKind.TARGET: "Nothing was guessed here: the target wrote this token alone.",
    TokenKind.UNKNOWN: "The server does not say where this token came from.",
}


def explained(asked: Request, entries: Sequence[Entry], index: int, lane: str | None = None) -> dict[str, Any]:
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
        "temperature": asked.settings.temperature,
        "rule": asked.settings.rule,
        "prompt": asked.prompt[:BEFORE],
        "text_before": before[-BEFORE:],
        "drafted": [
            {
                "text": token.text,
                "outcome": token.outcome.value,
                "target_probability": significant(token.p),
                "drafter_probability": significant(token.q),
                **({"follows": parents[at] if parents[at] >= 0 else None} if tree else {}),
                "why": _why(token, asked.settings),
            }
            for at, token in enumerate(event.drafted)
        ],
        "written": [
            {
                "text": token.text,
                "kind": NAMES.get(token.kind, token.kind.value),
                "target_probability": significant(token.p),
                **({} if token.margin is None else {"margin": significant(token.margin)}),
                "why": WRITTEN[token.kind],
            }
            for token in event.emitted
        ],
        "draft_seconds": significant(event.draft_seconds),
        "pass_seconds": significant(event.verify_seconds),
        "why": _sentence(event.drafted, event.emitted),
    }


def _why(token: DraftedToken, settings: Settings) -> str:
    """Why a guess passed, failed or was not tested."""
    if token.outcome is DraftOutcome.UNTESTED:
        return "Not tested: it comes after a guess that failed, or is on another branch."
    passed = token.outcome is DraftOutcome.ACCEPTED
    if settings.temperature == 0:
        return f"It is {'' if passed else 'not '}the target's likeliest token here."
    if settings.rule == MATCH:
        return f"The target drew {'this' if passed else 'another'} token here, by the random numbers of this place."
    if token.draw is None or token.p is None or not token.q:
        return f"It {'passed' if passed else 'failed'} the test of rejection sampling."
    least = min(1.0, token.p / token.q)
    return f"The number drawn, {token.draw:.3f}, is {'' if passed else 'not '}below min(1, p / q) = {least:.3f}."


def _sentence(drafted: Sequence[DraftedToken], emitted: Sequence[Token]) -> str:
    """What the round gave, as a whole."""
    accepted = sum(token.outcome is DraftOutcome.ACCEPTED for token in drafted)
    gave = f"One pass of the target wrote {len(emitted)} token{'' if len(emitted) == 1 else 's'}"
    last = emitted[-1].kind if emitted else TokenKind.UNKNOWN
    if not drafted and last is TokenKind.UNKNOWN:
        return "The server does not say how many passes wrote these tokens, nor what was guessed."
    if not drafted:
        return f"{gave}: nothing was guessed."
    more = {TokenKind.RESAMPLED: " and corrected the next one", TokenKind.BONUS: " and added a bonus"}.get(last, "")
    return f"{gave}: it accepted {accepted} of {len(drafted)} guesses{more}."

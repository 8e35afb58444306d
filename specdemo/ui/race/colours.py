"""An event as the page draws it: a row of tokens, each with the code of its colour."""

from __future__ import annotations

from typing import Any

from ...decoding.acceptance import path_of
from ...decoding.events import Finished, Prefilled
from ...racing.trace import Entry
from ...tokens import DraftOutcome, Token, TokenKind

CODES = {
    TokenKind.ACCEPTED: "a",
    TokenKind.RESAMPLED: "r",
    TokenKind.BONUS: "b",
    TokenKind.TARGET: "t",
    TokenKind.UNKNOWN: "",
    DraftOutcome.ACCEPTED: "a",
    DraftOutcome.REJECTED: "x",
    DraftOutcome.UNTESTED: "u",
}
PREFILL = -1  # the round number of the token that prefill emits
REST = ""  # the code of text that belongs to no single token: bytes that never became a character


def row_of(entry: Entry) -> list[Any] | None:
    """An event as the page draws it: [round, k, tokens], in reading order; None if there is nothing to draw."""
    event = entry.event
    if isinstance(event, Finished):
        return [PREFILL, 0, [[event.text, REST, 0]]] if event.text else None
    if isinstance(event, Prefilled):
        return [PREFILL, 0, [_emitted(event.token)]]
    path, tokens = path_of(event.drafted)[1:], list[list[Any]]()
    texts = {node: token.text for node, token in zip(path, event.emitted, strict=False)}  # what was written
    for node, token in enumerate(event.drafted):
        chances = token.p, token.q, token.draw
        tokens.append([texts.get(node, token.text), CODES[token.outcome], *chances, node + 1])
        if token.parent is not None:
            tokens[-1].append(token.parent + 1)
    tokens += map(_emitted, event.emitted[len(path) :])
    return [event.index, len(event.drafted), tokens]


def _emitted(token: Token) -> list[Any]:
    return [token.text, CODES[token.kind], token.p]

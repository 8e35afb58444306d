"""A round in words."""

from __future__ import annotations

from typing import Any

import pytest

from specdemo.decoding.events import Prefilled, Round
from specdemo.errors import BadInput
from specdemo.racing.explained import explained
from specdemo.racing.request import PLAIN, SPECULATIVE, Request
from specdemo.racing.trace import Entry
from specdemo.settings import Settings
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.texts import with_text

from ..sentences import gist, refuses, tells

ACCEPTED, REJECTED, UNTESTED = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED
DRAFTED = (
    DraftedToken(1, ACCEPTED, 0.9, 0.6, 0.25),
    DraftedToken(2, REJECTED, 0.1, 0.5, 0.75),
    DraftedToken(3, UNTESTED, 0.3, 0.5),
)
EMITTED = Token(1, TokenKind.ACCEPTED, 0.9, 1.25), Token(4, TokenKind.RESAMPLED, 0.51234)


def found(drafted: Any = DRAFTED, emitted: Any = EMITTED, index: int = 0, **settings: Any) -> dict[str, Any]:
    names = "abcdefgh"
    first = Entry(SPECULATIVE, with_text(Prefilled(2, Token(0, TokenKind.TARGET), 0.1), ("x",)))
    texts = [names[token.id] for token in emitted], [names[token.id] for token in drafted]
    entries = [Entry(PLAIN, first.event), first]
    entries.append(Entry(SPECULATIVE, with_text(Round(0, drafted, emitted, 0.01, 0.02, 0.03), *texts)))
    return explained(Request("hello", "p", "ngram", Settings(**settings)), entries, index)


def test_it_tells_what_was_drafted_and_written() -> None:
    answer = found()
    assert (answer["prompt"], answer["text_before"], answer["rounds"]) == ("hello", "x", 1)
    assert [(guess["text"], guess["outcome"]) for guess in answer["drafted"]] == [
        ("b", "accepted"),
        ("c", "rejected"),
        ("d", "untested"),
    ]
    assert [(token["text"], token["kind"], token["target_probability"]) for token in answer["written"]] == [
        ("b", "accepted", 0.9),
        ("e", "corrected", 0.5123),
    ]
    assert [token.get("margin") for token in answer["written"]] == [1.25, None]
    assert (answer["temperature"], answer["rule"]) == (0.0, "match")
    assert gist(answer["why"]) == "One 2 it 1 3"


@pytest.mark.parametrize(
    ("settings", "accepted", "rejected"),
    [
        ({}, "likeliest", "not likeliest"),
        ({"temperature": 1.0}, "drew this", "drew another"),
        (
            {"temperature": 1.0, "rule": "rejection"},
            "0.250, below 1.000.",
            "0.750, not 0.200.",
        ),
    ],
)
def test_the_reason_is_that_of_the_rule(settings: dict[str, Any], accepted: str, rejected: str) -> None:
    reasons = [guess["why"] for guess in found(**settings)["drafted"]]
    assert tells(reasons[0], accepted)
    assert not tells(reasons[0], "not")
    assert tells(reasons[1], rejected)
    assert tells(reasons[2], "Not tested")


def test_a_tree_says_what_each_guess_follows() -> None:
    tree = DraftedToken(1, ACCEPTED, 0.9, 0.6, parent=-1), DraftedToken(2, REJECTED, 0.1, 0.2, parent=0)
    assert [guess["follows"] for guess in found(tree, k=20, tree=True)["drafted"]] == [None, 0]


def test_a_round_without_a_draft_is_the_targets_own() -> None:
    answer = found((), (Token(5, TokenKind.TARGET),))
    assert gist(answer["why"]) == "One 1 nothing"


@pytest.mark.parametrize("index", [-1, 1])
def test_a_round_that_is_not_there_is_refused(index: int) -> None:
    with refuses(BadInput, f"0 {index}"):
        found(index=index)

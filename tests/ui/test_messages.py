"""What the page gets, without a browser: messages, the badge, the form's values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specdemo import ui
from specdemo.decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from specdemo.errors import BadInput
from specdemo.racing.request import read_request
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, Request
from specdemo.settings import Settings
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from specdemo.ui.race.colours import row_of
from specdemo.ui.race.messages import Lanes
from specdemo.ui.values import to_json
from tests.harness.texts import with_text

from ..sentences import refuses

ACCEPTED, REJECTED, UNTESTED = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED


def test_a_round_is_told_in_reading_order() -> None:
    drafted = (
        DraftedToken(1, ACCEPTED, 0.123456, 0.5, 0.1),
        DraftedToken(2, REJECTED, 0.25, 1.0, 0.99999),
        DraftedToken(3, UNTESTED, 0.0, 0.5, 0.3),
    )
    emitted = Token(1, TokenKind.ACCEPTED, 0.123456), Token(9, TokenKind.RESAMPLED, 0.75)
    row = row_of(Entry(SPECULATIVE, with_text(Round(3, drafted, emitted, 0.1, 0.2, 0.3), ("A", "R"), ("a", "x", "u"))))
    tokens = [
        ["A", "a", 0.123456, 0.5, 0.1, 1],
        ["x", "x", 0.25, 1.0, 0.99999, 2],
        ["u", "u", 0.0, 0.5, 0.3, 3],
        ["R", "r", 0.75],
    ]
    assert row == [3, 3, tokens]


def test_an_accepted_token_that_ends_the_text_is_not_followed_by_another() -> None:
    drafted = DraftedToken(1, ACCEPTED, 1.0, 1.0, 0.5), DraftedToken(2, UNTESTED, 1.0, 1.0, 0.5)
    event = Round(0, drafted, (Token(1, TokenKind.ACCEPTED, 1.0),), 0.1, 0.1, 0.2)
    row = row_of(Entry(SPECULATIVE, with_text(event, ("A",), ("a", "u"))))
    assert row is not None
    assert [token[:2] for token in row[2]] == [["A", "a"], ["u", "u"]]


def test_bytes_left_at_the_end_are_shown_as_no_token() -> None:
    assert row_of(Entry(PLAIN, with_text(Finished(FinishReason.LENGTH), ("\ufffd",)))) == [-1, 0, [["\ufffd", "", 0]]]
    assert row_of(Entry(PLAIN, Finished(FinishReason.LENGTH))) is None


def test_only_the_reader_of_messages_takes_a_row_apart() -> None:
    """Everything else names the fields of a token, of a place and of an event, see events.js."""
    row = re.compile(
        r"\b(token|own|last|wrong|guess|candidate|pending|event|place|row)(\?\.)?\[[\w.]*\d"
        r"|\[\w*, code|const \[text\b|\{ row\b[^=]*\) => \w|(event|round|rounds\[\w+\])\.row\b"
    )
    scripts = [path for path in Path(ui.__file__).parent.rglob("*.js") if path.name != "events.js"]
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in scripts}
    assert len(scripts) > 20
    assert [(name, line) for name in lines for line in lines[name] if row.search(line)] == []


def test_news_are_told_once() -> None:
    lanes = Lanes({})
    lanes.add(Entry(PLAIN, with_text(Prefilled(3, Token(1, TokenKind.TARGET, 0.5), 0.25), ("a",))))
    (first,) = lanes.news()[PLAIN]
    assert (first["at"], first["row"]) == (0.25, [-1, 0, [["a", "t", 0.5]]])
    assert first["figures"]["seconds"] == 0.25
    assert lanes.news() == {}
    lanes.add(Entry(PLAIN, with_text(Round(0, (), (Token(2, TokenKind.TARGET, 0.5),), 0.0, 0.125, 0.25), ("b",))))
    lanes.add(Entry(PLAIN, Finished(FinishReason.EOS)))
    first, last = lanes.news()[PLAIN]
    assert (first["at"], first["seconds"], "figures" in first) == (0.5, [0.0, 0.125, 0.25], False)
    assert (last["at"], last["row"], last["figures"]["finish_reason"]) == (0.5, None, "eos")


def test_of_many_news_every_tenth_has_the_figures_so_far() -> None:
    lanes = Lanes({})
    for index in range(25):
        lanes.add(
            Entry(PLAIN, with_text(Round(index, (), (Token(2, TokenKind.TARGET, 0.5),), 0.0, 0.125, 0.25), ("b",)))
        )
    events = enumerate(lanes.news()[PLAIN])
    counts = {place: event["figures"]["tokens"] for place, event in events if "figures" in event}
    assert counts == {9: 10, 19: 20, 24: 25}


def test_of_several_readers_the_figures_of_all_are_told_now_and_then() -> None:
    """Of those with a drafter and of those without it, while all of either are decoded."""
    pairs = {"eagle 1": "alone 1", "eagle 2": "alone 2"}
    lanes, token = Lanes(pairs), Token(2, TokenKind.TARGET, 0.5)
    drafted = DraftedToken(1, ACCEPTED, 0.5, 0.5, 0.1), DraftedToken(1, REJECTED, 0.5, 0.5, 0.1)

    def add(lane: str, event: Event) -> None:
        lanes.add(Entry(lane, with_text(event, tuple("a" * len(emitted_tokens(event))), ("a", "x"))))

    def of_all() -> list[list[dict[str, Any]]]:
        news = lanes.news()
        groups = ([event for lane in group for event in news.get(lane, ())] for group in (pairs.values(), pairs))
        return [[event["of_all"] for event in sorted(group, key=rounds) if "of_all" in event] for group in groups]

    def rounds(event: dict[str, Any]) -> Any:
        return event["row"][0]

    for lane in (*pairs.values(), *pairs):
        add(lane, Prefilled(3, token, 0.25))
    assert not any(of_all())
    for index in range(26):  # the first round may have begun before all prompts were read
        for lane in pairs.values():
            add(lane, Round(index, (), (token,), 0.0, 0.125, 0.25))
        for lane in pairs:
            add(lane, Round(index, drafted if index < 9 else (), (token,) * 2, 0.0, 0.125, 0.25))
    alone, together = of_all()
    assert [figures["tokens_per_round"] for figures in alone] == [1] * 3, "after 20 and 40 rounds, and the last"
    assert [figures["tokens_per_round"] for figures in together] == [2] * 3
    assert [figures["accepted_lengths"] for figures in together] == [{"1": 17}] * 3
    assert together[0]["acceptance_rate"] == together[0]["draft_efficiency"] == 0.5
    lanes.add(Entry("eagle 1", with_text(Finished(FinishReason.EOS), ("a",))))
    add("eagle 2", Round(30, drafted, (token,), 0.0, 0.125, 0.25))
    assert not any(of_all()), "one text has ended"


@given(st.dictionaries(st.text(), st.text()))
def test_no_tag_can_begin_in_a_message(message: dict[str, str]) -> None:
    text = to_json(message)
    assert "<" not in text
    assert json.loads(text) == message


def ask(**values: Any) -> Request:
    usual = {"prompt": "a", "preset": "scripted", "drafter": "none"}
    return read_request(**{**usual, **values})


def test_form_values_become_a_request() -> None:
    request = ask(k=4.0, temperature=1, top_p=0.5, stop="one\n\ntwo \\n\n", raw=True)
    assert request.settings == Settings(k=4, temperature=1, top_p=0.5, stop=("one", "two \n"))
    assert (request.raw, request.isolated) == (True, False)
    assert ask(stop=["x\ny"]).settings.stop == ("x\ny",)
    assert ask(stop=None).settings.stop == ()
    with refuses(BadInput, "half"):
        ask(stop="smile \ud83d")

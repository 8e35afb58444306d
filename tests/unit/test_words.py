"""Every row of the table of sentences is said of some facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdemo.decoding.events import Round
from specdemo.racing import busy, words
from specdemo.racing.busy import Pace
from specdemo.racing.compare import OWN_DRAFTER, Comparison, Texts
from specdemo.racing.explained import Guess, RoundFacts
from specdemo.racing.figures import LaneFigures, ReaderFigures
from specdemo.racing.outcome import Outcome
from specdemo.racing.request import DraftedLane
from specdemo.racing.summary import Ending, FirstGuesses
from specdemo.racing.verdict import LaneVerdict
from specdemo.racing.words import TABLE, sentence, sentences
from specdemo.settings import REJECTION, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind

from .test_advice import EAGLE, FALLS, SLOWING, alone, round_, run

MODEL, FREE = DraftedLane("draft-model", 2), DraftedLane("ngram", 4)
SLOW_DRAFTS = [round_(2, 1, draft=0.022)] * 40
MEMORY = {"bytes_per_pass": 10**9, "placement": {"cpu": 10**9}, "memory_rate": 2e11}
EXPERTS = {"count": 8, "used": 2, "bytes": 10**8}
PARTED = Comparison(False, 3)


def judged(rounds: list[Round], request: DraftedLane | None = EAGLE, plain: Any = None, **fields: Any) -> LaneVerdict:
    return LaneVerdict(plain or alone(), run(rounds), request, **fields)


def untimed(rounds: list[Round]) -> list[Round]:
    return [replace(each, draft_seconds=None, verify_seconds=None) for each in rounds]


def readers(seconds: float, k: int = 0, accepted: int = 0, draft: float = 0.0, rounds: int = 99) -> ReaderFigures:
    found = ReaderFigures(tokens=1, readers=4)
    for _ in range(rounds):
        found.add(round_(k, accepted, draft, seconds - draft))
    return found


def verdicts() -> Iterator[LaneVerdict]:
    yield from (judged([], plain=run([])), LaneVerdict(LaneFigures(), LaneFigures()), judged([round_(4, 2)] * 3))
    yield from (judged([round_(0, 0)] * 99), judged([round_(0, 0, verify=0.008)] * 99))
    for row in (
        round_(4, 0, 0.005, 0.011),
        round_(4, 0, 0.0, 0.018),
        round_(4, 0, 0.0, other=0.0055),
        round_(4, 0, 5e-4),
    ):
        yield judged([row] * 40)
    yield judged(untimed([round_(4, 1, 0.02)] * 50), plain=run(untimed([round_(0, 0)] * 50)))
    yield judged([round_(4, 3, 0.001, 0.012)] * 40, environment={**MEMORY, "experts": EXPERTS})
    read = {str(rows): 2.0 + rows / 10 for rows in (1, 5)}
    yield judged([round_(4, 3, 0.0, 0.0101)] * 40, environment={**MEMORY, "experts": {**EXPERTS, "read": read}})
    yield judged([round_(4, 3, 0.001)] * 40, environment=MEMORY, plain=alone(4))
    yield judged([round_(16, 15)] * 2, environment=MEMORY)
    yield judged([round_(0, 0)] * 12 + [round_(2, 1, 0.001)] * 4)
    yield judged([round_(0, 0)] * 12 + [round_(2, 1, 0.001)] * 9)
    yield judged([round_(1, 1, 0.001, 0.0189)] * 40, FREE)
    yield judged([round_(1, 0, 0.001, 0.005)] * 40)
    yield judged([round_(4, 3, 0.001, other=0.005)] * 40)
    yield judged([round_(2, 2, 0.001)] * 40, DraftedLane("ngram", 2))
    for rounds, request in (
        (SLOW_DRAFTS, MODEL),
        ([round_(4, 1, 0.02)] * 40, EAGLE),
        ([round_(4, 1, 0.01)] * 40, FREE),
    ):
        yield judged(rounds, request)
    for read_first, other in ((0.5, 0.5), (0.5, 3.0), (3.0, 0.1), (1.0, 0.275)):
        lanes = [alone(40), run([round_(4, 3, 0.001)] * 40)]
        for lane, seconds in zip(lanes, (read_first, other), strict=True):
            lane.ttft_seconds, lane.seconds = seconds, lane.seconds + seconds
        yield LaneVerdict(lanes[0], lanes[1])
    yield from (judged(FALLS), judged([round_(4, 3)] * 40, plain=run(SLOWING)))
    yield judged([round_(4, 3)] * 40, plain=run(SLOWING, prompt_tokens=1000))
    for times in ([0.01] * 32, [0.01, 0.05] * 16):
        yield judged([round_(4, 3)] * 40, pace=Pace(times, best=0.004 if len({*times}) == 1 else None))
    for rows in (0, 3):
        yield judged([round_(4, 3)] * 40, comparison=PARTED, environment={"exact_rows": rows})
    for group in (
        readers(0.4, 4, 1, 0.06),
        readers(0.15, 4, 2, 0.01),
        readers(0.2, 4, 1),
        readers(0.1),
        readers(0.125),
    ):
        yield LaneVerdict(readers(0.1), group, EAGLE)
    yield from (LaneVerdict(readers(0.1), readers(0.1, 4, 4, rounds=1)), LaneVerdict(readers(0.1), readers(0.2, 4, 1)))


def texts() -> Iterator[Texts]:
    def tokens(*ids: int, margin: float | None = None) -> list[Token]:
        return [Token(one, TokenKind.TARGET, 1.0, margin) for one in ids]

    own, greedy = DraftedLane(OWN_DRAFTER, 0), Settings()
    for lane in (own, EAGLE):
        for other in (tokens(1, 2), tokens(1, 3)):
            yield Texts(tokens(1, 2), other, Settings(temperature=1.0, rule=REJECTION), lane)
            for temperature in (0.0, 1.0):
                yield Texts(tokens(1, 2), other, Settings(temperature=temperature), lane, {"engine": "native"})
    yield from (
        Texts((), (), greedy),
        Texts(tokens(1), tokens(1), greedy),
        Texts(tokens(1, 2), tokens(1, 2, 3), greedy),
    )
    hostile: list[Any] = [{"rows": "many", "replaced": 3}, {"rows": -5}, {"rows": 10**50}, "well"]
    for found in ({"rows": 17, "tree_rows": 16}, {"replaced": ["The C engine fails.", 3]}, *hostile):
        yield Texts(tokens(1, 2), tokens(1, 2), greedy, EAGLE, {"engine": "native", "self_test": found})
    yield Texts(tokens(1, 2, 3), tokens(1, 2), greedy, stopped=True)
    yield Texts(tokens(1, 2, 3), tokens(1, 2, 4), greedy)
    for margin in (1e-6, 9.0):
        yield Texts(tokens(1, 2, margin=margin), tokens(1, 3, margin=margin), greedy, EAGLE)


def outcomes() -> Iterator[Outcome]:
    rows = {"a": round_(4, 3, 0.01), "b": round_(4, 2, 0.0052), "c": round_(1, 1, 0.006)}
    lanes = {name: judged([row] * 40) for name, row in rows.items()}
    yield from (Outcome({}, lanes), Outcome({}, {"a": lanes["a"]}), Outcome({}, {"a": judged([round_(4, 2)] * 3)}))
    yield Outcome({}, {"a": judged([round_(4, 3)] * 40, pace=Pace([0.01] * 32, best=0.004))})
    for count, stopped in ((2, True), (4, True), (2, False), (4, False)):
        yield Outcome({}, {"a": LaneVerdict(LaneFigures(), LaneFigures(readers=count))}, stopped=stopped)


def guesses() -> Iterator[Guess]:
    for outcome in DraftOutcome:
        for settings in (Settings(), Settings(temperature=1.0), Settings(temperature=1.0, rule=REJECTION)):
            yield from (Guess(DraftedToken(1, outcome, 0.5, 0.5, draw), settings) for draw in (0.25, None))


def rounds() -> Iterator[RoundFacts]:
    for kind in TokenKind:
        yield from (RoundFacts(replace(round_(k, 1), emitted=(Token(1, kind),) * (k + 1))) for k in (0, 2))


CASES: dict[str, Any] = {
    **dict.fromkeys(("verdict", "headline", "notes", "numbers", "chips", "meanings"), verdicts),
    **dict.fromkeys(("race", "race headline", "badge of readers"), outcomes),
    **dict.fromkeys(("badge title", "badge words", "badge margin"), texts),
    "first guesses": lambda: [FirstGuesses("eagle", "EAGLE-3", 50, 2)],
    "ending": lambda: [Ending(False, "length", 3), Ending(False, "stop", 3)],
    "guess": guesses,
    "round": rounds,
    "origin": lambda: [Token(1, kind) for kind in TokenKind],
}
SHORT = "headline", "notes", "numbers", "chips", "meanings"  # of texts that are long enough
ALL = "notes", "numbers", "chips", "meanings"


def test_every_row_is_said_of_some_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    said, filled = set[int](), words._filled

    def noted(row: words.Row, facts: Any) -> str:
        said.add(id(row))
        return filled(row, facts)

    monkeypatch.setattr(words, "_filled", noted)
    monkeypatch.setattr(busy, "FEW_PASSES", 16)
    for slot, cases in CASES.items():
        for facts in cases():
            if slot not in SHORT or facts.is_long:
                found = [*sentences(slot, facts).values()] if slot in ALL else [sentence(slot, facts)]
                for each in found:
                    assert not set("{}") & set(each)
                    assert "  " not in each
                    assert " ." not in each
    rows = {(slot, name): row for slot, rows in TABLE.items() for name, row in rows.items()}
    assert {name for name, row in rows.items() if id(row) not in said} == set()

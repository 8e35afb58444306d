"""Writers whose texts are known, and what is found of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.settings import Settings
from specdemo.studies.diagnosis import Diagnosis
from specdemo.studies.examination import Examination, Plan
from specdemo.studies.writers import Text, Writer, _of_events
from specdemo.system.progress import check_stopped
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind

SCRIPT = "<script>alert('é')</script>"
Rounds = Sequence[tuple[int, int]]  # of each round how many tokens were drafted, and how many of them passed


def events_of(rounds: Rounds, seconds: float, prompt_seconds: float = 0.5) -> Iterator[Event]:
    """A text of which every round takes as long; its tokens count up from 0."""
    yield Prefilled(7, Token(0, TokenKind.TARGET), prompt_seconds)
    at = 1
    for index, (drafted, accepted) in enumerate(rounds):
        outcomes = [DraftOutcome.ACCEPTED] * accepted + [DraftOutcome.REJECTED] * (drafted > accepted)
        outcomes += [DraftOutcome.UNTESTED] * (drafted - len(outcomes))
        last = TokenKind.TARGET if not drafted else TokenKind.BONUS if drafted == accepted else TokenKind.RESAMPLED
        kinds = [TokenKind.ACCEPTED] * accepted + [last]
        emitted = tuple(Token(at + place, kind, margin=0.25) for place, kind in enumerate(kinds))
        at += len(emitted)
        guesses = tuple(DraftedToken(None, outcome) for outcome in outcomes)
        yield Round(index, guesses, emitted, None, None, seconds)
    yield Finished(FinishReason.LENGTH)


def written(rounds: Rounds, seconds: float) -> Text:
    return _of_events([*events_of(rounds, seconds)])


class Scripted(Writer):
    """A `Writer` whose texts are all alike; `before` is called with the number of each text, from 0."""

    def __init__(self, rounds: Rounds, seconds: float, before: Callable[[int], None] = lambda _: None) -> None:
        self.facts: dict[str, Any] = {"engine": "llama.cpp", "version": "b1", "model": SCRIPT}
        self.text, self.before, self.asked = written(rounds, seconds), before, list[tuple[str, bool]]()

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Text:
        self.asked.append((prompt, alone))
        self.before(len(self.asked) - 1)
        check_stopped()
        return self.text

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        return None


DRAFTED: Rounds = [(4, 4), (4, 1), (4, 0), (0, 0), (4, 2)]
ALONE: Rounds = [(0, 0)] * 12


SMALL = Plan(1, Settings(max_new_tokens=12), (1, 2), (300,))


def examined(mine: Scripted, alone: Scripted | None, plan: Plan = SMALL) -> tuple[Examination, Diagnosis]:
    study = Examination(mine, alone, plan)
    for _ in study.run():
        pass
    return study, Diagnosis(study)

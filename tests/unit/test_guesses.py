"""People draft: what they type as tokens, votes as a tree, and the game."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specdemo.decoding import loop
from specdemo.decoding.batch import decode
from specdemo.decoding.drafter import CHAIN, DraftOptions
from specdemo.decoding.events import Round, emitted_tokens
from specdemo.decoding.loop import Decoding
from specdemo.drafters import you
from specdemo.drafters.forced import ForcedFirst
from specdemo.drafters.you import You, votes_tree
from specdemo.models.presets import Defaults
from specdemo.racing import again, batch, summary
from specdemo.racing.game import LONGEST_GUESS, MOST_GUESSES, MOST_ROUNDS, game, read_guesses
from specdemo.racing.guesses import guessed_by
from specdemo.racing.race import race, rule_for, start
from specdemo.racing.request import PLAIN, DraftedLane, fitted, read_request
from specdemo.racing.trace import Entry, read_trace, write_trace
from specdemo.settings import AUTO, MATCH, REJECTION, RULES, Settings
from specdemo.system import device
from specdemo.tokens import DraftOutcome
from specdemo.ui.replay.playable import playable_json
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.grammar import GRAMMAR, constraint_of
from tests.harness.toys import TableToy

from ..sentences import refuses, tells

PROMPT = "the cat sat on the mat and the dog sat"


# The draft ---------------------------------------------------------------------------------------------------


def test_votes_are_a_tree_with_the_largest_groups_first() -> None:
    draft = votes_tree([[1], [5, 6], [7, 8, 9], [5, 8], [5, 6]], k=4, depth=2)
    assert draft.tree
    assert (draft.token_ids, draft.parents) == ([5, 6, 1, 7], [-1, 0, -1, -1])
    assert draft.q is not None
    assert draft.q.tolist() == pytest.approx([3 / 5, 2 / 3, 1 / 5, 1 / 5])


def test_a_chain_is_the_guess_of_most_people_and_no_longer_than_k() -> None:
    assert [*You(lambda context: [[], [4, 5, 6], [7]]).propose([1], 2).token_ids] == [4, 5]
    assert [*You(lambda context: [[7], [4, 5, 6], [4, 5, 6], [8]]).propose([1], 5).token_ids] == [4, 5, 6]
    assert not You(lambda context: []).propose([1], 2, CHAIN).token_ids
    assert not You(lambda context: [[]]).propose([1], 2, DraftOptions(depth=2)).token_ids


def test_the_time_in_which_people_type_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()

    def typed(context: Any) -> list[list[int]]:
        clock.now += 100.0
        return [[1, 2]]

    for module in (you, loop, device):
        monkeypatch.setattr(module, "time", clock)
    toy, settings = TableToy(), Settings(k=4, max_new_tokens=12)
    for drafter in (You(typed), ForcedFirst(constraint_of(GRAMMAR), You(typed))):
        decoding = Decoding(toy.target_runner(64), drafter, [0, 1, 2, 0, 1], rule_for(settings))
        rounds = [event for event in decode(decoding) if isinstance(event, Round)]
        assert drafter.waited == 100.0 * len([each for each in rounds if each.k]) > 0
        assert {(event.seconds, event.draft_seconds, event.verify_seconds) for event in rounds} == {(0.0, 0.0, 0.0)}


# As any drafter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [False, True])
def test_typed_guesses_leave_the_text_as_it_is(loaded: Loaded, rule: str, temperature: float, tree: bool) -> None:
    prompt_ids = loaded.encode(PROMPT)
    settings = Settings(k=6, tree=tree, temperature=temperature, rule=rule, max_new_tokens=24)
    asked = guessed_by(loaded, lambda text: [" on the mat", " on the", text[-4:]])
    texts = [ids_of(start(asked, name, prompt_ids, settings)) for name in ("you", "none")]
    if rule == MATCH or temperature == 0:
        assert texts[0] == texts[1]
    assert len(texts[0]) == 24


def test_auto_reads_all_that_is_typed_and_measures_nothing(loaded: Loaded) -> None:
    asked = guessed_by(loaded, lambda text: [" on the mat and the dog sat"])
    rounds = [
        event
        for event in start(asked, "you", loaded.encode(PROMPT), Settings(k=AUTO, max_new_tokens=40))
        if isinstance(event, Round)
    ]
    typed = len(asked.parts.guesses(loaded.encode(PROMPT))[0])  # type: ignore[misc]
    drafted = {len(event.drafted) for event in rounds[:-typed]}
    assert drafted - {0} == {typed}  # none where the text ends within a character
    assert not asked.costs


def test_what_is_asked_is_the_text_so_far(loaded: Loaded) -> None:
    texts: list[str] = []
    asked = guessed_by(loaded, lambda text: texts.append(text) or ())  # type: ignore[func-returns-value]
    prompt_ids = loaded.encode(PROMPT)
    written = ids_of(start(asked, "you", prompt_ids, Settings(k=4, max_new_tokens=6)))
    assert texts == [
        loaded.tokenizer.decode([*prompt_ids, *written[: n + 1]]) for n in range(4)
    ]  # the last has no room


def test_people_guess_for_one_prompt(loaded: Loaded) -> None:
    asked = guessed_by(loaded, lambda text: ())
    with refuses(ValueError, "readers"):
        list(batch.batch(asked, "you", [[1], [2]], Settings(k=2), 2))
    with refuses(ValueError, "preset"):
        list(start(loaded, "you", [1], Settings(k=2)))


def test_a_lane_of_people_needs_no_k() -> None:
    assert DraftedLane.read("you") == DraftedLane("you", AUTO) == DraftedLane.read("you:auto")
    assert DraftedLane.read("you:3").k == 3
    with refuses(ValueError, "eagle"):
        DraftedLane.read("eagle")


# A game ------------------------------------------------------------------------------------------------------


def request_of(loaded: Loaded, guesses: Any, **settings: Any) -> Any:
    request = read_request(prompt=PROMPT, preset=loaded.preset.name, drafter="ngram", max_new_tokens=30, **settings)
    return game(request, guesses, Defaults(drafter="lookup-ngram", k=AUTO))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("votes", [(" on the mat",), (" on the mat", " on the bed", " on the bed")])
def test_a_game_goes_as_far_as_people_guess(loaded: Loaded, temperature: float, votes: tuple[str, ...]) -> None:
    guesses = ((), (), votes, (" and",), ())
    request = request_of(loaded, guesses, temperature=temperature, rule=REJECTION)
    first, *rivals = request.drafted
    assert [first.split(":")[0], *rivals] == ["you", "ngram:4", "prompt-lookup:4"]
    entries = list(batch.race_request(loaded, request))
    lanes = {name: [entry.event for entry in entries if entry.lane == name] for name in request.lanes}
    assert len(lanes[first]) == 1 + len(guesses)
    typed = [event.drafted for event in lanes[first] if isinstance(event, Round)]
    assert [bool(each) for each in typed] == [bool(each) for each in guesses]
    written = {
        name: [token.id for event in events for token in emitted_tokens(event)] for name, events in lanes.items()
    }
    shortest = len(written[first])
    alone = ids_of(start(loaded, "none", loaded.encode(PROMPT), replace(request.settings, tree=False)))
    for name, events in lanes.items():
        assert written[name] == alone[: len(written[name])]
        assert len(written[name]) >= shortest > len(written[name]) - len(emitted_tokens(events[-1]))


def test_a_game_is_over_with_the_text(loaded: Loaded) -> None:
    request = request_of(loaded, ((),) * 4)  # the last of which writes the fifth token
    request = replace(request, settings=replace(request.settings, max_new_tokens=5))
    entries = list(batch.race_request(loaded, request))
    tokens = {name: sum(len(emitted_tokens(e.event)) for e in entries if e.lane == name) for name in request.lanes}
    assert set(tokens.values()) == {5}
    assert not summary.outcome_of(loaded, request, entries).stopped


@pytest.mark.parametrize("votes", [(" on the mat",), (" on the mat", " on the bed")])
def test_the_trace_of_a_game_holds_the_guesses_and_runs_again(loaded: Loaded, votes: tuple[str, ...]) -> None:
    request = request_of(loaded, ((), votes, (), (" the dog",)), temperature=0.8)
    entries: list[Entry] = list(batch.race_request(loaded, request))
    lines = [*write_trace(summary.trace_header(loaded, request), entries)]
    header, read = read_trace(lines)
    titles = [lane["title"] for lane in json.loads(playable_json("file", lambda: lines))["lanes"].values()]
    assert titles == ["Target alone", "The room" if len(votes) > 1 else "You", "ngram:4", "prompt-lookup:4"]
    once_more = list(again.again(loaded, header, read))
    assert again.differences(read, once_more) == dict.fromkeys(request.lanes)
    outcomes = [  # a tree may name its branches in another order
        sorted(
            (e.lane, guess.id, guess.outcome) for e in each if isinstance(e.event, Round) for guess in e.event.drafted
        )
        for each in (read, once_more)
    ]
    assert outcomes[0] == outcomes[1]
    assert any(outcome is DraftOutcome.REJECTED for *_, outcome in outcomes[0])


def test_a_game_is_one_that_the_preset_can_play(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = game(replace(request_of(loaded, ()), settings=Settings(grammar=GRAMMAR)), ((" a", " b"),), Defaults("mtp"))
    assert (asked.settings.grammar, asked.settings.tree, [lane.drafter for lane in asked.more]) == (
        "",
        True,
        ["mtp", "prompt-lookup"],
    )
    loaded.parts = replace(loaded.parts, open_mtp="none here")
    assert [lane.drafter for lane in fitted(asked, loaded)[0].more] == ["prompt-lookup"]
    monkeypatch.setattr(type(loaded), "cannot_branch", lambda *_: "it says so")
    changed, note = fitted(asked, loaded)
    assert not changed.settings.tree
    assert tells(note, "chains")


def test_the_guesses_of_a_page_are_read_and_bounded() -> None:
    assert read_guesses("[]") == ()
    assert read_guesses('[[], [" a", "b"]]') == ((), (" a", "b"))
    most = [[" " * LONGEST_GUESS] * MOST_GUESSES] * MOST_ROUNDS
    assert read_guesses(json.dumps(most)) == tuple(map(tuple, most))
    wrong: list[Any] = [
        [*most, []],
        [[*most[0], "a"]],
        [[""]],
        [["x" * (LONGEST_GUESS + 1)]],
        [[1]],
        [1],
        {"a": 1},
        3,
        "ab",
    ]
    for each in [*map(json.dumps, wrong), "[", "[" * 100_000, 5]:
        with refuses(ValueError, f"{MOST_ROUNDS} {MOST_GUESSES} {LONGEST_GUESS}"):
            read_guesses(each)


def test_a_race_of_people_ends_like_any_other(loaded: Loaded) -> None:
    lines = iter([" on the", " nothing of it"])
    asked = guessed_by(loaded, lambda text: [line] if (line := next(lines, "")) else [])
    entries = list(race(asked, "you", loaded.encode(PROMPT), Settings(k=AUTO, max_new_tokens=12)))
    tokens = {
        name: [t.id for e in entries if e.lane == name for t in emitted_tokens(e.event)]
        for name in (PLAIN, "speculative")
    }
    assert tokens[PLAIN] == tokens["speculative"]
    assert len(tokens[PLAIN]) == 12

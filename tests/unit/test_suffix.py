"""Suffix decoding: the automaton counts like a plain search, and what followed the longest end of a text is drafted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.drafters import suffix
from specdemo.drafters.suffix import FACTOR, LEAST, ROOT, Suffix, SuffixAutomaton
from specdemo.settings import Settings
from tests.harness.classes import LaneFigures
from tests.harness.doubles import PROMPT, TableRunner, ids_of, proposed, random_table
from tests.harness.texts import decode, plain_text

texts = st.lists(st.integers(0, 2), max_size=24)


@pytest.fixture(params=[suffix.LONGEST, 3, 1])
def longest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(suffix, "LONGEST", request.param)
    most: int = request.param
    return most


def occurrences(text: list[int], stretch: list[int]) -> int:
    return sum(text[at : at + len(stretch)] == stretch for at in range(len(text) - len(stretch) + 1))


def state_of(automaton: SuffixAutomaton, stretch: list[int]) -> int:
    state = ROOT
    for token in stretch:
        state = automaton.following[state][token]
    return state


# The automaton -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("longest")
@given(text=texts, cut=st.integers(0, 24))
def test_every_stretch_is_counted_at_every_length_of_the_text(text: list[int], cut: int) -> None:
    automaton = SuffixAutomaton(text[:cut])
    for length in range(min(cut, len(text)), len(text) + 1):
        automaton.extend(text[len(automaton) : length])
        read = text[:length]
        assert len(automaton) == length
        for begin in range(length):
            for end in range(begin + 1, min(length, begin + suffix.LONGEST) + 1):
                stretch = read[begin:end]
                assert automaton.counts[state_of(automaton, stretch)] == occurrences(read, stretch)
    assert len(automaton.counts) <= max(2 * len(text), 2)


@pytest.mark.usefixtures("longest")
@given(text=texts)
def test_the_longest_end_that_occurred_before_is_found(text: list[int]) -> None:
    lengths = range(min(len(text), suffix.LONGEST), 0, -1)
    expected = next((n for n in lengths if occurrences(text, text[-n:]) > 1), 0)
    automaton = SuffixAutomaton(text)
    state, length = automaton.repeated()
    assert length == expected
    assert state == state_of(automaton, text[len(text) - length :])


@pytest.mark.usefixtures("longest")
@given(text=texts, other=texts)
def test_the_longest_end_of_another_text_is_found(text: list[int], other: list[int]) -> None:
    automaton, found = SuffixAutomaton(text), (ROOT, 0)
    for end, token in enumerate(other, start=1):
        found = automaton.step(*found, token)
        lengths = range(min(end, suffix.LONGEST), 0, -1)
        expected = next((n for n in lengths if occurrences(text, other[end - n : end])), 0)
        assert found == (state_of(automaton, other[end - expected : end]), expected)


# Drafts ------------------------------------------------------------------------------------------------------


def followers(texts: list[list[int]], context: list[int]) -> tuple[int, set[int]]:
    """The length of the longest end that any of the texts goes on from, and what mostly followed it, by a search."""
    for n in range(len(context), 0, -1):
        end = context[-n:]
        after = [text[at + n] for text in texts for at in range(len(text) - n) if text[at : at + n] == end]
        if after:
            return n, {token for token in after if after.count(token) == max(map(after.count, after))}
    return 0, set()


@given(context=texts.filter(bool))
def test_a_draft_begins_with_what_mostly_followed_in_the_text(context: list[int]) -> None:
    draft = proposed(Suffix(), context, 1)
    found, tokens = followers([context], context)
    assert {*draft.token_ids} <= tokens
    assert bool(draft.token_ids) == bool(found)


@given(remembered=st.lists(texts, max_size=3), context=texts.filter(bool), k=st.integers(1, 9))
def test_a_draft_begins_with_what_mostly_followed_the_longest_match(
    remembered: list[list[int]], context: list[int], k: int
) -> None:
    draft = proposed(Suffix(remembered), context, k)
    here, earlier = followers([context], context), followers(remembered, context)
    assert len(draft.token_ids) <= k
    assert all(token >= 0 for token in draft.token_ids)
    if here[0] > 0 or earlier[0] > 0:
        assert draft.token_ids
        if here[0] > 0 and here[0] >= longest_in(remembered, context):
            assert draft.token_ids[0] in here[1]
        elif earlier[0] == longest_in(remembered, context) > here[0]:
            assert draft.token_ids[0] in earlier[1]
    else:
        assert not draft.token_ids


def longest_in(texts: list[list[int]], context: list[int]) -> int:
    """The length of the longest end that occurs in any of the texts, also where it ends one."""
    return max((n for text in texts for n in range(1, len(context) + 1) if occurrences(text, context[-n:])), default=0)


@pytest.mark.usefixtures("longest")
@given(remembered=st.lists(texts, max_size=3), context=texts.filter(bool), nodes=st.integers(1, 16))
def test_a_tree_has_different_siblings_and_values_that_fall(
    remembered: list[list[int]], context: list[int], nodes: int
) -> None:
    drafter = Suffix(remembered)
    draft = proposed(drafter, context, nodes, depth=5)
    parents = list(draft.parents or ())
    assert len(draft.token_ids) == len(parents) <= nodes
    assert len({*zip(parents, draft.token_ids, strict=True)}) == len(parents)
    values, depths = {-1: 1.0}, {-1: 0}
    for node, parent in enumerate(parents):
        assert draft.q is not None
        assert 0 < float(draft.q[node]) <= 1
        values[node], depths[node] = values[parent] * float(draft.q[node]), depths[parent] + 1
    ranked = [values[node] for node in range(len(parents))]
    assert ranked == sorted(ranked, reverse=True)
    assert max(depths.values()) <= 5
    assert parents or not proposed(drafter, context, 1).token_ids  # most answers may have ended here


def test_a_text_that_repeats_itself_is_repeated() -> None:
    assert proposed(Suffix(), [7, 8, 7, 8], 5).token_ids == [7, 8, 7, 8, 7]
    looping = [1, 2, 3] * 60  # longer than what is counted
    assert proposed(Suffix(), looping, 16).token_ids == ([1, 2, 3] * 6)[:16]
    assert proposed(Suffix(), looping, 16, depth=16).token_ids == ([1, 2, 3] * 6)[:16]


def test_a_short_match_drafts_little() -> None:
    text = [9, *range(20, 40), 1, 9]
    assert proposed(Suffix(), text, 16).token_ids == [*range(20, 20 + FACTOR)]
    assert len(proposed(Suffix(), [8, *text[:-1], 8, 9], 16).token_ids) == 2 * FACTOR


def test_a_draft_ends_where_the_counts_are_unsure() -> None:
    branching = [token for last in (5, 6, 7, 8) for token in (1, 2, 3, last)]
    assert LEAST > 1 / 4
    assert proposed(Suffix([branching]), [1, 2], 8).token_ids == [3]
    sure = Suffix([[1, 2, 3, 5] * 4])
    assert proposed(sure, [1, 2], 8).token_ids[:2] == [3, 5]
    assert proposed(sure, [1, 2], 8, stop_below=1.1).token_ids == [3]  # of K = auto, where more does not pay


def test_nothing_is_drafted_across_two_remembered_answers() -> None:
    drafter = Suffix([[1, 2, 3], [4, 5, 6]])
    assert proposed(drafter, [1, 2], 8).token_ids == [3]
    assert not proposed(drafter, [9, 9, 3], 8).token_ids


def test_a_round_stays_cheap_however_long_and_repetitive_the_text_is() -> None:
    """A text of one token has the longest chains of links; without their bound a token here takes 20 times as long."""

    def seconds(length: int) -> float:
        automaton = SuffixAutomaton([1] * length)
        began = time.perf_counter()
        automaton.extend([1] * 300)
        return time.perf_counter() - began

    assert min(seconds(5000) for _ in range(3)) < 6 * min(seconds(300) for _ in range(3))


# Texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [False, True])
def test_an_answer_that_is_remembered_is_copied_and_stays_the_targets_own(temperature: float, tree: bool) -> None:
    settings = Settings(k=6, temperature=temperature, max_new_tokens=40, tree=tree)
    table = random_table(1, support=3)
    plain = plain_text(TableRunner(table), PROMPT, settings)
    lost = [(token + 1) % table.shape[-1] for token in plain]
    rounds = []
    for remembered in ([], [lost], [[*PROMPT, *plain]]):
        events = list(decode(TableRunner(table, capacity=200), Suffix(remembered), PROMPT, settings))
        assert ids_of(events) == plain
        rounds.append(LaneFigures.of(events).rounds)
    assert rounds[2] < min(rounds[:2]) <= 39
    assert rounds[2] <= 15

"""Lookahead: the window is a tree, what the target draws after it becomes n-grams, and the text stays the target's."""

from __future__ import annotations

from specdemo.decoding.acceptance import Answer
from specdemo.drafters.lookahead import KEPT, WIDEST, Lookahead
from specdemo.settings import Settings
from specdemo.tokens import Draft, Token, TokenKind
from tests.harness.classes import LaneFigures
from tests.harness.doubles import PROMPT, TableRunner, answering, counting_table, ids_of, proposed
from tests.harness.texts import decode, plain_text


def answer(draft: Draft, accepted: int, target_ids: list[int]) -> Answer:
    return answering(draft, accepted, Token(0, TokenKind.RESAMPLED), target_ids)


def test_the_window_moves_with_the_text() -> None:
    drafter = Lookahead()
    first = proposed(drafter, range(100), 6, depth=20)
    # Level 0 is the trunk 0, 1, 2; level 1 begins with 31, 32, 33.
    assert first == Draft([0, 31, 1, 32, 2, 33], parents=[-1, 0, 0, 2, 2, 4], tree=True)
    drafter.observe(answer(first, 0, [200, 201, 202, 203, 204, 205, 206]))  # after 99, 0, 31, 1, 32, 2 and 33
    # 31 and 202 followed 0, which the window says as well: its levels have become the ones below.
    second = proposed(drafter, [0], 8, depth=20)
    assert second == Draft([31, 202, 32, 204, 33, 206], parents=[-1, 0, 0, 2, 2, 4], tree=True)
    drafter.observe(answer(second, 2, [300, 301, 302, 303, 304, 305, 306]))  # two accepted tokens and another
    assert proposed(drafter, [7], 2, depth=20) == Draft([206, 306], parents=[-1, 0], tree=True)
    assert proposed(drafter, [31], 4, depth=20).token_ids[:2] == [202, 302]


def test_a_window_is_no_deeper_and_no_larger_than_asked() -> None:
    for nodes in (1, 2, 3, 8, 63):
        for depth in (1, 2, 3, 40):
            drafter = Lookahead()
            draft = proposed(drafter, [*range(100), 5], nodes, depth=depth)
            assert 1 <= len(draft.token_ids) <= nodes
            depths: list[int] = []
            for parent in draft.parents or ():
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            assert max(depths) <= depth
    assert len(proposed(Lookahead(), [5], 63, depth=63).token_ids) <= 63
    assert len(proposed(Lookahead(), [5], 63).token_ids) == WIDEST


def test_the_oldest_phrases_are_forgotten() -> None:
    drafter = Lookahead()
    for token in range(KEPT + 3):
        drafter._collect([1, token, token])
    drafter._collect([1, 5, 5])  # again
    assert [gram[0] for gram in drafter._grams[1]] == [3, 4, *range(6, KEPT + 3), 5]


def test_a_text_that_repeats_itself_is_looked_ahead() -> None:
    """Jacobi's iteration finds the count at once, and its phrases are accepted."""
    settings = Settings(k=12, max_new_tokens=60, tree=True)
    table = counting_table(4)
    events = list(decode(TableRunner(table, capacity=200), Lookahead(), PROMPT, settings))
    assert ids_of(events) == plain_text(TableRunner(table), PROMPT, settings)
    assert (LaneFigures.of(events).tokens_per_round or 0) > 2.5


def test_a_chain_is_jacobi_decoding() -> None:
    """Guesses that were right make one more of them right: a text that they begin with is found again."""
    drafter = Lookahead()
    assert proposed(drafter, [1, 2, 3, 9], 4) == Draft([1, 2, 3, 1])
    drafter.observe(answering(Draft([1, 2, 3, 1]), 1, Token(8, TokenKind.RESAMPLED), [1, 8, 4, 5, 6]))
    assert [*proposed(drafter, [8], 3).token_ids] == [4, 5, 6]
    drafter.observe(
        answering(Draft([4, 5]), 0, Token(7, TokenKind.RESAMPLED))
    )  # a rule that draws nothing after drafted tokens
    assert [*proposed(drafter, [7], 2).token_ids] == [5, 6]

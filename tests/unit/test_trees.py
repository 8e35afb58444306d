"""Drafts that branch: how trees grow and are walked, who follows them, and what reads rounds reads trees.

That whatever a tree holds the text is the target's is tested in `test_texts` and `test_distribution`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.decoding import batch
from specdemo.decoding.acceptance import Answer, places_tested, walk
from specdemo.decoding.drafter import CHAIN, Drafter, DraftOptions
from specdemo.decoding.events import Round
from specdemo.decoding.rule import row_depths
from specdemo.drafters.names import DRAFTERS
from specdemo.drafters.tree import grow, merged
from specdemo.errors import BadInput
from specdemo.racing.figures import counts_by_place
from specdemo.racing.probabilities import probabilities_of
from specdemo.racing.race import check_rule, decoding_of, rule_for
from specdemo.racing.trace import Entry, read_trace, write_trace
from specdemo.settings import AUTO, MAX_NODES, RULES, Settings
from specdemo.studies.domains import counts_of
from specdemo.studies.explain import explain
from specdemo.tokens import Draft, DraftOutcome, TokenKind
from tests.harness.classes import LaneFigures
from tests.harness.doubles import (
    HOSTILE_TREES,
    PROMPT,
    VOCAB,
    Planting,
    Scripted,
    Shape,
    TableRunner,
    accepting,
    counting_table,
    ids_of,
    proposed,
    random_table,
)
from tests.harness.texts import decode, with_text
from tests.harness.toys import TableToy, drafter_for

from ..sentences import refuses

TREE_OF_TWO = HOSTILE_TREES["every text of two"]


TOY = TableToy()


def drafter(name: str) -> Any:
    """One that copies, which needs no model."""
    return drafter_for(TOY, name, Settings(tree=True))


# Who follows a tree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_a_head_follows_the_path_through_a_tree(own: bool) -> None:
    """Its drafts after rounds with trees, its own or others', are those of one that reads the text afresh."""
    toy = TableToy()
    settings = Settings(k=3, temperature=0, max_new_tokens=40)
    checked = 0

    class Both(Planting):
        """A tree in every other round, and the head's chain in the others."""

        def __init__(self, head: Drafter) -> None:
            super().__init__(TREE_OF_TWO)
            self.head, self.turn = head, 0

        def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
            nonlocal checked
            self.turn += 1
            if self.turn % 2:
                return proposed(self.head, context, 20, depth=k) if own else super().propose(context, k)
            draft, other = proposed(self.head, context, k), toy.target_runner(256)
            afresh = toy.drafter("eagle", other, settings)
            other.prefill(context[:-1])
            afresh.observe(accepting(0))
            assert [*draft.token_ids] == [*proposed(afresh, context, k).token_ids]
            checked += 1
            return draft

        def observe(self, answer: Answer) -> None:
            self.head.observe(answer)

    runner = toy.target_runner(256)
    list(decode(runner, Both(toy.drafter("eagle", runner, settings)), PROMPT, settings))
    assert checked > 3


# What reads a round ----------------------------------------------------------------------------------------------


def test_the_outcomes_of_a_tree_written_out() -> None:
    """The target counts 0, 1, 2, ...; the tree holds 3 and 2 after 1, then 3 and 0 after 2, then 1 after 3."""
    shape: Shape = ([3, 2, 3, 0, 1], [-1, -1, 1, 1, 2])
    settings = Settings(k=5, max_new_tokens=8, tree=True)
    prefilled, first, second, *_ = decode(
        TableRunner(counting_table(VOCAB)), Planting(lambda *_: shape), PROMPT, settings
    )
    assert isinstance(first, Round)
    rejected, accepted, untested = DraftOutcome.REJECTED, DraftOutcome.ACCEPTED, DraftOutcome.UNTESTED
    # The first token after the prompt (0, 1, 2, 0, 1) is 2, so 3 comes next.
    assert [token.outcome for token in first.drafted] == [accepted, rejected, untested, untested, untested]
    assert [(token.id, token.kind) for token in first.emitted] == [(3, TokenKind.ACCEPTED), (0, TokenKind.BONUS)]
    assert isinstance(second, Round)
    assert [token.outcome for token in second.drafted] == [rejected, rejected, untested, untested, untested]
    assert [(token.id, token.kind) for token in second.emitted] == [(1, TokenKind.RESAMPLED)]
    assert [token.parent for token in second.drafted] == [-1, -1, 1, 1, 2]
    assert [token.p for token in first.drafted] == [1, 0, 1, 0, 0]

    stats = LaneFigures.of([prefilled, first, second])
    assert (stats.drafted, stats.tested, stats.accepted, stats.tokens_per_round) == (10, 2, 1, 1.5)
    assert counts_by_place([first, second]) == [(2, 1)]
    assert [token.id for token in places_tested(second.drafted)] == [3]


def test_what_counts_by_position_refuses_trees(table: Tensor) -> None:
    settings = Settings(k=6, max_new_tokens=12, tree=True)
    events = list(decode(TableRunner(table), Planting(HOSTILE_TREES["any"]), PROMPT, settings))
    plain = list(decode(TableRunner(table), Scripted(lambda *_: []), PROMPT, Settings(k=0, max_new_tokens=12)))
    with refuses(BadInput, "trees"):
        explain(plain, events)
    with refuses(BadInput, "trees"):
        [*counts_of(events)]


@pytest.mark.parametrize("rule", RULES)
def test_a_trace_of_trees_is_read_as_it_was_written(table: Tensor, rule: str) -> None:
    settings = Settings(k=12, temperature=1, max_new_tokens=30, rule=rule, tree=True)
    entries = []
    for event in decode(TableRunner(table), Planting(HOSTILE_TREES["any"]), PROMPT, settings, distributions=True):
        places = probabilities_of(event, str) if isinstance(event, Round) else ()
        if isinstance(event, Round):
            assert len(places) == len(event.emitted)
            for token, place in zip(event.emitted, places, strict=True):
                found = next(candidate for candidate in place.candidates if candidate.id == token.id)
                assert found.p == pytest.approx(token.p, abs=1e-5)
        kept = replace(event, distributions=None) if isinstance(event, Round) else event
        emitted = ["x"] * len(ids_of([event]))
        entries.append(Entry("one", with_text(kept, emitted, ["y"] * len(getattr(event, "drafted", ()))), places))
    _, read = read_trace("".join(write_trace({"lanes": [{"name": "one"}]}, entries)).split("\n"))
    assert [entry.event for entry in read] == [entry.event for entry in entries]


def shape(draft: Draft) -> tuple[Any, Any]:
    return draft.token_ids, draft.parents


# Who branches ----------------------------------------------------------------------------------------------------


class Straight(TableRunner):
    cannot_branch = "it is straight"


def test_trees_are_refused_in_words_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "ngram", DRAFTERS["ngram"]._replace(branches=False))
    with refuses(BadInput, "0 63, 64"):
        Settings(k=64, tree=True)
    for k in (4, AUTO):
        with refuses(BadInput, "ngram chains prompt-lookup"):
            check_rule("ngram", Settings(k=k, tree=True))
    toy: Any = TableToy()
    toy.target_runner = lambda capacity: Straight(toy.target, capacity)
    with refuses(BadInput, Straight.cannot_branch):
        decoding_of(toy, "prompt-lookup", PROMPT, rule_for(Settings(k=4, tree=True)), None)
    toy = TableToy()
    toy.draft_runner = lambda capacity: Straight(toy.draft_model, capacity)
    with refuses(BadInput, f"draft tree: {Straight.cannot_branch} chain."):
        decoding_of(toy, "draft-model", PROMPT, rule_for(Settings(k=4, tree=True)), None)
    decoding_of(toy, "draft-model", PROMPT, rule_for(Settings(k=4)), None)


def test_rows_depths_and_walks_of_a_tree() -> None:
    draft = Draft([5, 6, 7, 6], parents=[-1, 0, 0, 2], tree=True)
    assert draft.row_parents == [-1, 0, 1, 1, 3]
    assert row_depths(draft) == [0, 1, 2, 2, 3]
    path, outcomes = walk([-1, 0, 0, 2], [True, False, True, True])
    assert (path, [outcome.value for outcome in outcomes]) == (
        [0, 2, 3],
        ["accepted", "rejected", "accepted", "accepted"],
    )
    path, outcomes = walk([-1, 0, 0, 2], [True, False, True, True], 2)  # the text ends with the second token
    assert (path, [outcome.value for outcome in outcomes]) == ([0, 2], ["accepted", "rejected", "accepted", "untested"])
    assert walk([-1, 0, 0, 2], [False, False, True, True])[0] == []
    assert walk([-1, -1], [True, True])[0] == [0]
    assert walk(range(-1, MAX_NODES - 1), [True] * MAX_NODES)[0] == list(range(MAX_NODES))


def test_a_tree_grows_where_its_values_are_largest() -> None:
    shares = {(): [(1, 0.6), (2, 0.3)], (1,): [(3, 0.4), (4, 0.2)], (2,): [(5, 0.9)], (1, 3): [(6, 0.99)]}

    def children(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        return [(token, share, (*path, token)) for token, share in shares.get(path, [])]

    start: tuple[int, ...] = ()
    draft = grow(start, children, 4, 9)
    assert shape(draft) == ([1, 2, 5, 3], [-1, -1, 1, 0])
    assert draft.q is not None
    assert draft.q.tolist() == pytest.approx([0.6, 0.3, 0.9, 0.4])
    assert grow(start, children, 63, 9).token_ids == [1, 2, 5, 3, 6, 4]
    assert shape(grow(start, children, 63, 1)) == ([1, 2], [-1, -1])
    assert shape(grow(start, children, 1, 9)) == ([1], [-1])
    assert grow((), lambda path: [], 8, 8) == Draft()


def test_of_equal_values_the_one_that_was_named_first_comes_first() -> None:
    shares = {0: [(1, 0.5), (2, 0.25), (3, 0.25)], 1: [(4, 0.5), (5, 0.5)], 2: [(6, 1.0)], 4: [(7, 1.0)]}
    draft = grow(0, lambda last: [(token, share, token) for token, share in shares.get(last, [])], 7, 9)
    assert shape(draft) == ([1, 2, 3, 4, 5, 6, 7], [-1, -1, -1, 0, 0, 1, 3])


def test_two_trees_become_one_where_they_agree() -> None:
    one = Draft([5, 6, 7], q=torch.tensor([0.5, 0.25, 0.75]), parents=[-1, 0, 0], tree=True)
    other = Draft([8, 5, 7, 9, 7], parents=[-1, -1, 1, 2, 0], tree=True)
    both = merged(one, other)
    assert shape(both) == ([5, 8, 6, 7, 9, 7], [-1, -1, 0, 0, 3, 1])
    assert both.q is not None
    assert both.q.tolist() == [0.5, 1, 0.25, 0.75, 1, 1]
    assert shape(merged(Draft(), other)) == shape(other)
    assert merged(Draft(), Draft()) == Draft()


def test_prompt_lookup_merges_what_followed_the_same_words() -> None:
    lookup = drafter("prompt-lookup")
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    draft = proposed(lookup, text, 4, depth=3)
    assert (draft.token_ids, draft.parents) == ([3, 4, 8, 9], [-1, -1, 0, 0])  # 3 came twice, 8 lately
    assert set(proposed(lookup, text, 63, depth=2).token_ids) == {3, 4, 7, 8, 9}
    assert proposed(lookup, [*text, 5, 6], 4, depth=3) == Draft()
    assert shape(proposed(lookup, [*text, 5, 6, 5, 6], 3, depth=3)) == ([5, 6, 5], [-1, 0, 1])  # it goes on
    assert proposed(drafter("prompt-lookup"), [1, 2], 4, depth=3) == Draft()


def test_the_tree_of_prompt_lookup_holds_the_copy_that_it_would_draft() -> None:
    choose = random.Random(0)
    found = 0
    for _ in range(60):
        text = [choose.randrange(6) for _ in range(30)]
        chain = proposed(drafter("prompt-lookup"), text, 3).token_ids
        tree = proposed(drafter("prompt-lookup"), text, MAX_NODES, depth=3)
        last = -1
        for token in chain:
            at = [node for node, parent in enumerate(tree.parents or ()) if parent == last]
            last = next(node for node in at if tree.token_ids[node] == token)
            found += 1
    assert found > 60


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_that_knows_the_target_is_right_in_every_round(temperature: float) -> None:
    """Under the match rule it draws with the target's noise, so its first child is the target's token."""
    target = random_table(1, support=3)
    toy: Any = TableToy(target=target, draft_model=target)
    settings = Settings(k=8, temperature=temperature, max_new_tokens=60, tree=True)
    events = list(batch.decode(decoding_of(toy, "draft-model", PROMPT, rule_for(settings), None)))
    rounds = [event for event in events if isinstance(event, Round) and event.drafted]
    assert all(event.drafted[0].outcome is DraftOutcome.ACCEPTED for event in rounds)
    assert (LaneFigures.of(events).tokens_per_round or 0) >= 2.5
    for runner in toy.draft_runners:
        assert runner.released

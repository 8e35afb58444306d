"""Drafts that branch: whatever a tree holds, the text is the target's, and what reads rounds reads trees."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.decoding import batch, match
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Round, places_tested
from specdemo.decoding.loop import Decoding, rule_for
from specdemo.decoding.match import Match
from specdemo.decoding.rejection import Rejection, verify
from specdemo.decoding.rule import Rule
from specdemo.decoding.sampling import probabilities
from specdemo.decoding.walk import row_depths, row_parents, walk
from specdemo.drafters.heads.eagle import Eagle
from specdemo.drafters.lookahead import Lookahead
from specdemo.drafters.names import DRAFTERS
from specdemo.drafters.none import NoDrafter
from specdemo.drafters.prompt_lookup import PromptLookup
from specdemo.drafters.suffix import Suffix
from specdemo.drafters.tree import grow, merged
from specdemo.engines.runner import CannotBranch
from specdemo.racing.probabilities import probabilities_of
from specdemo.racing.race import check_rule, decoding_of
from specdemo.racing.stats import Stats, counts_by_place
from specdemo.racing.trace import Entry, Spans, read_trace, write_trace
from specdemo.studies.domains import Counts
from specdemo.studies.explain import explain
from specdemo.types import (
    AUTO,
    MATCH,
    MAX_NODES,
    REJECTION,
    RULES,
    BadInput,
    Draft,
    DraftOutcome,
    Settings,
    TokenKind,
    Verdict,
)
from tests.unit.enumerate_decode import Walk, border_draws, distance
from tests.unit.toys import (
    PROMPT,
    VOCAB,
    Scripted,
    TableRunner,
    TableToy,
    decode,
    ids_of,
    letters_tokenizer,
    plain_text,
    random_table,
    true_texts,
)

Shape = tuple[list[int], list[int]]  # the tokens of a tree and their parents


class Planting(Scripted):
    """Proposes the tree that a function of (context, nodes) says."""

    branches = True

    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        token_ids, parents = self.script(list(context), nodes)
        return Draft(token_ids, parents=parents)


def random_tree(context: Sequence[int], nodes: int, vocab: int = VOCAB) -> Shape:
    """Another tree for every text; siblings may be the same token, and parents are near the root and far from it."""
    choose = random.Random(str((list(context), nodes)))
    parents = [choose.randrange(-1, node) if choose.random() < 0.5 else node - 1 for node in range(nodes)]
    return [choose.randrange(vocab) for _ in range(nodes)], parents


def full(vocab: int, rows: int) -> Shape:
    """Every token after every token, as far as there is room."""
    return [node % vocab for node in range(rows)], [node // vocab - 1 for node in range(rows)]


TREES: dict[str, Callable[[list[int], int], Shape]] = {
    "one token": lambda context, nodes: ([context[-1]], [-1]),
    "two of the same": lambda context, nodes: ([1, 1, 2, 3, 2], [-1, -1, 0, 1, 1]),
    "all first tokens": lambda context, nodes: ([*range(VOCAB)], [-1] * VOCAB),
    "a chain": lambda context, nodes: ([0, 1, 2, 0, 1], [-1, 0, 1, 2, 3]),
    "a chain with stumps": lambda context, nodes: ([3, 0, 2, 1, 1, 2], [-1, -1, 1, 1, 3, 3]),
    "every text of two": lambda context, nodes: full(VOCAB, VOCAB + VOCAB**2),
    "the most": lambda context, nodes: full(VOCAB, MAX_NODES),
    "any": random_tree,
}


# The distribution of the text, by enumeration --------------------------------------------------------------------


def choose_path(runs: Walk, rows: Tensor, draft: Draft) -> dict[int, tuple[int, float]]:
    """The token that the target draws after each row of one way down a tree, and a number in [0, 1) that gives it."""
    chosen, row = {}, 0
    while True:
        draw = runs.choose(border_draws(rows[row].tolist()))
        token = int((rows[row].cumsum(0) <= draw).sum())
        chosen[row] = token, draw
        children = [node for node, parent in enumerate(draft.parents or ()) if parent == row - 1]
        taken = [node for node in children if draft.token_ids[node] == token]
        if not taken:
            return chosen
        row = taken[0] + 1


class EnumeratedRejection(Rejection):
    """Rejection sampling whose draws from the target come from a walk through all of them."""

    def __init__(self, settings: Settings, runs: Walk) -> None:
        super().__init__(settings)
        self.runs = runs

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        if draft.parents is None:  # as before the first token
            draft = replace(draft, parents=())
        rows = probabilities(logits, self.settings)
        draws = torch.full((len(rows),), 0.5, dtype=torch.float64)
        for row, (_, draw) in choose_path(self.runs, rows, draft).items():
            draws[row] = draw
        return verify(rows, draft, draws)


class EnumeratedMatch(Match):
    """The match rule whose draws from the target come from a walk through all of them."""

    def __init__(self, settings: Settings, runs: Walk) -> None:
        super().__init__(settings)
        self.runs, self.draft = runs, Draft()

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        self.draft = draft
        return super().verify(logits, draft, position)

    def drawn(self, probs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """In place of `noise.draw`."""
        assert len(keys) == len(probs)
        drawn = torch.full((len(probs),), VOCAB - 1)
        for row, (token, _) in choose_path(self.runs, probs, self.draft).items():
            drawn[row] = token
        return drawn, torch.zeros(len(probs), dtype=torch.float64)


def texts_with(
    make_drafter: Callable[[], Drafter],
    settings: Settings,
    table: Tensor,
    eos: int = -1,
    rejection: type[EnumeratedRejection] = EnumeratedRejection,
) -> dict:
    """The probability of every text that a run can write."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    runs = Walk()
    for _ in runs.runs():
        with pytest.MonkeyPatch.context() as patch:
            if settings.rule == REJECTION:
                rule: Rule = rejection(settings, runs)
            else:
                rule = chosen = EnumeratedMatch(settings, runs)
                patch.setattr(match.noise, "draw", chosen.drawn)
            events = list(batch.decode(Decoding(TableRunner(table), make_drafter(), PROMPT, rule, frozenset({eos}))))
        emitted[tuple(ids_of(events))] += runs.weight
    return dict(emitted)


ENUMERATED = [
    Settings(temperature=1, k=6, max_new_tokens=4, tree=True),
    Settings(temperature=0.7, k=6, max_new_tokens=3, tree=True),
    Settings(temperature=1.5, k=6, max_new_tokens=4, top_k=2, tree=True),
    Settings(temperature=0, k=6, max_new_tokens=6, tree=True),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "settings", "eos"),
    [
        *((name, settings, -1) for name in TREES for settings in ENUMERATED),
        ("any", ENUMERATED[0], 1),  # a drafted child ends the text
        ("prompt-lookup", ENUMERATED[0], -1),
        ("suffix", ENUMERATED[0], -1),
        ("suffix with memory", ENUMERATED[0], -1),
        ("lookahead", ENUMERATED[0], -1),
        ("lookahead", ENUMERATED[3], -1),
    ],
)
def test_the_text_follows_the_targets_distribution(
    table: Tensor, name: str, settings: Settings, eos: int, rule: str
) -> None:
    settings = replace(settings, rule=rule)
    drafters: dict[str, Callable[[], Drafter]] = {
        "prompt-lookup": PromptLookup,
        "suffix": Suffix,
        "suffix with memory": lambda: Suffix([[*PROMPT, 0, 1, 2, 3], [*PROMPT, 1, 1]]),
        "lookahead": Lookahead,
    }
    emitted = texts_with(drafters.get(name, lambda: Planting(TREES[name])), settings, table, eos)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert distance(emitted, true_texts(table, PROMPT, settings.max_new_tokens, settings, eos)) < 1e-12


def test_the_enumeration_catches_the_likeliest_children_tested_by_a_ratio(table: Tensor) -> None:
    """The classic mistake: top-k children are not drawn from q, so min(1, p / q) is no test of them."""

    class ByRatio(EnumeratedRejection):
        def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
            if draft.parents is None:
                return super().verify(logits, draft, position)
            p, q, kind = probabilities(logits, self.settings)[0].tolist(), [0.4, 0.3, 0.2, 0.1], TokenKind.ACCEPTED
            for token in draft.token_ids:
                chance = min(1.0, p[token] / q[token])
                if self.runs.choose([(True, chance), (False, 1 - chance)]):
                    break
                left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
                p, q[token] = [a / sum(left) for a in left], 0.0
                q = [b / sum(q) for b in q]
            else:
                token, kind = self.runs.choose([((x, TokenKind.RESAMPLED), a) for x, a in enumerate(p)])
            return Verdict((), token, kind, 1.0, [0.0, 0.0], [1.0, 1.0], [0, 1], parents=draft.parents)

    settings = replace(ENUMERATED[0], rule=REJECTION)
    emitted = texts_with(lambda: Planting(lambda *_: ([0, 1], [-1, -1])), settings, table, rejection=ByRatio)
    assert distance(emitted, true_texts(table, PROMPT, settings.max_new_tokens, settings)) > 1e-3


# The text itself, under the match rule ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_text_ends_at_an_eos_on_a_branch_and_at_its_limit(table: Tensor, rule: str) -> None:
    for limit in (1, 2, 3, 17):
        settings = Settings(k=20, temperature=1, max_new_tokens=limit, rule=rule, tree=True)
        runner = TableRunner(table, capacity=len(PROMPT) + limit + MAX_NODES)
        events = list(decode(runner, Planting(TREES["every text of two"]), PROMPT, settings))
        assert len(ids_of(events)) == limit
        ended = list(decode(TableRunner(table), Planting(TREES["every text of two"]), PROMPT, settings, frozenset({1})))
        assert 1 not in ids_of(ended)[:-1]
        if rule == MATCH:
            assert ids_of(ended) == plain_text(TableRunner(table), PROMPT, settings, frozenset({1}))


@pytest.mark.parametrize("own", [False, True])
def test_a_head_follows_the_path_through_a_tree(own: bool) -> None:
    """Its drafts after rounds with trees, its own or others', are those of one that reads the text afresh."""
    toy = TableToy()
    settings = Settings(k=3, temperature=0, max_new_tokens=40)
    checked = 0

    class Both(Planting):
        """A tree in every other round, and the head's chain in the others."""

        def __init__(self, head: Eagle) -> None:
            super().__init__(TREES["every text of two"])
            self.head, self.turn = head, 0

        def reset(self, prompt_ids: Sequence[int]) -> None:
            self.head.reset(prompt_ids)

        def propose(self, context: Sequence[int], k: int) -> Draft:
            nonlocal checked
            self.turn += 1
            if self.turn % 2:
                return self.head.propose_tree(context, 20, k) if own else self.propose_tree(context, k, k)
            draft, other = self.head.propose(context, k), toy.target_runner(256)
            afresh = toy.drafter("eagle", other, settings)
            other.prefill(context[:-1])
            afresh.reset(context[:-1])
            assert [*draft.token_ids] == [*afresh.propose(context, k).token_ids]
            checked += 1
            return draft

        def observe(self, verdict: Verdict) -> None:
            self.head.observe(verdict)

    runner = toy.target_runner(256)
    head = toy.drafter("eagle", runner, settings)
    assert isinstance(head, Eagle)
    list(decode(runner, Both(head), PROMPT, settings))
    assert checked > 3


# What reads a round ----------------------------------------------------------------------------------------------


def test_the_outcomes_of_a_tree_written_out() -> None:
    """The target counts 0, 1, 2, ...; the tree holds 3 and 2 after 1, then 3 and 0 after 2, then 1 after 3."""
    from tests.unit.toys import counting_table

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

    stats = Stats.of([prefilled, first, second])
    assert (stats.drafted, stats.tested, stats.accepted, stats.tokens_per_round) == (10, 2, 1, 1.5)
    assert counts_by_place([first, second]) == [(2, 1)]
    assert [token.id for token in places_tested(second.drafted)] == [3]


def test_what_counts_by_position_refuses_trees(table: Tensor) -> None:
    settings = Settings(k=6, max_new_tokens=12, tree=True)
    events = list(decode(TableRunner(table), Planting(TREES["any"]), PROMPT, settings))
    plain = list(decode(TableRunner(table), NoDrafter(), PROMPT, Settings(k=0, max_new_tokens=12)))
    with pytest.raises(BadInput, match="trees"):
        explain(plain, events)
    entries = [Entry("one", event, Spans((), ["y"] * len(getattr(event, "drafted", ())))) for event in events]
    with pytest.raises(BadInput, match="trees"):
        Counts().add("a", entries)


@pytest.mark.parametrize("rule", RULES)
def test_a_trace_of_trees_is_read_as_it_was_written(table: Tensor, rule: str) -> None:
    settings = Settings(k=12, temperature=1, max_new_tokens=30, rule=rule, tree=True)
    chosen = rule_for(settings)
    entries = []
    for event in decode(TableRunner(table), Planting(TREES["any"]), PROMPT, settings, rule=chosen):
        places = probabilities_of(event, chosen, str)
        if isinstance(event, Round):
            assert len(places) == len(event.emitted)
            for token, place in zip(event.emitted, places, strict=True):
                found = next(candidate for candidate in place.candidates if candidate.id == token.id)
                assert found.p == pytest.approx(token.p, abs=1e-5)
        emitted = ["x"] * len(ids_of([event]))
        entries.append(Entry("one", event, Spans(emitted, ["y"] * len(getattr(event, "drafted", ()))), places))
    _, read = read_trace("".join(write_trace({"lanes": [{"name": "one"}]}, entries)).split("\n"))
    assert [entry.event for entry in read] == [entry.event for entry in entries]


def shape(draft: Draft) -> tuple[Any, Any]:
    return draft.token_ids, draft.parents


# Who branches ----------------------------------------------------------------------------------------------------


class Straight(TableRunner):
    cannot_branch = "it is straight"


def test_trees_are_refused_in_words_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "ngram", DRAFTERS["ngram"]._replace(branches=False))
    with pytest.raises(BadInput, match="K = auto needs the match rule"):
        check_rule("eagle", Settings(k=AUTO, temperature=1, rule=REJECTION, tree=True))
    with pytest.raises(BadInput, match="from 0 to 63, not 64"):
        Settings(k=64, tree=True)
    for k in (4, AUTO):
        with pytest.raises(BadInput, match=r"The drafter ngram drafts chains only.* prompt-lookup"):
            check_rule("ngram", Settings(k=k, tree=True))
    toy: Any = TableToy(tokenizer=letters_tokenizer())
    toy.target_runner = lambda capacity: Straight(toy.target, capacity)
    with pytest.raises(CannotBranch, match="it is straight"):
        decoding_of(toy, "prompt-lookup", PROMPT, rule_for(Settings(k=4, tree=True)), None)
    toy = TableToy(tokenizer=letters_tokenizer())
    toy.draft_runner = lambda capacity: Straight(toy.draft_model, capacity)
    with pytest.raises(BadInput, match=r"The draft model cannot draft a tree: it is straight.* Draft a chain\."):
        decoding_of(toy, "draft-model", PROMPT, rule_for(Settings(k=4, tree=True)), None)
    decoding_of(toy, "draft-model", PROMPT, rule_for(Settings(k=4)), None)


def test_rows_depths_and_walks_of_a_tree() -> None:
    draft = Draft([5, 6, 7, 6], parents=[-1, 0, 0, 2])
    assert row_parents(draft) == [-1, 0, 1, 1, 3]
    assert row_depths(draft) == [0, 1, 2, 2, 3]
    assert walk([-1, 0, 0, 2], [True, False, True, True]) == [0, 2, 3]
    assert walk([-1, 0, 0, 2], [False, False, True, True]) == []
    assert walk([-1, -1], [True, True]) == [0]
    assert walk(range(-1, MAX_NODES - 1), [True] * MAX_NODES) == list(range(MAX_NODES))


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


def test_two_trees_become_one_where_they_agree() -> None:
    one = Draft([5, 6, 7], q=torch.tensor([0.5, 0.25, 0.75]), parents=[-1, 0, 0])
    other = Draft([8, 5, 7, 9, 7], parents=[-1, -1, 1, 2, 0])
    both = merged(one, other)
    assert shape(both) == ([5, 8, 6, 7, 9, 7], [-1, -1, 0, 0, 3, 1])
    assert both.q is not None
    assert both.q.tolist() == [0.5, 1, 0.25, 0.75, 1, 1]
    assert shape(merged(Draft(), other)) == shape(other)
    assert merged(Draft(), Draft()) == Draft()


def test_prompt_lookup_merges_what_followed_the_same_words() -> None:
    lookup = PromptLookup()
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    draft = lookup.propose_tree(text, 4, 3)
    assert (draft.token_ids, draft.parents) == ([3, 4, 8, 9], [-1, -1, 0, 0])  # 3 came twice, 8 lately
    assert set(lookup.propose_tree(text, 63, 2).token_ids) == {3, 4, 7, 8, 9}
    assert lookup.propose_tree([*text, 5, 6], 4, 3) == Draft()
    assert shape(lookup.propose_tree([*text, 5, 6, 5, 6], 3, 3)) == ([5, 6, 5], [-1, 0, 1])  # it goes on
    lookup.reset(())
    assert lookup.propose_tree([1, 2], 4, 3) == Draft()


def test_the_tree_of_prompt_lookup_holds_the_copy_that_it_would_draft() -> None:
    choose = random.Random(0)
    found = 0
    for _ in range(60):
        text = [choose.randrange(6) for _ in range(30)]
        chain = PromptLookup().propose(text, 3).token_ids
        tree = PromptLookup().propose_tree(text, MAX_NODES, 3)
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
    toy: Any = TableToy(target=target, draft_model=target, tokenizer=letters_tokenizer())
    settings = Settings(k=8, temperature=temperature, max_new_tokens=60, tree=True)
    events = list(batch.decode(decoding_of(toy, "draft-model", PROMPT, rule_for(settings), None)))
    rounds = [event for event in events if isinstance(event, Round) and event.drafted]
    assert all(event.drafted[0].outcome is DraftOutcome.ACCEPTED for event in rounds)
    assert (Stats.of(events).tokens_per_round or 0) >= 2.5
    for runner in toy.draft_runners:
        assert runner.released

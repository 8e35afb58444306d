"""Drafts of captured calls: trees are those of the host, with a wait for each call, and texts are the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.decoding.drafter import Drafter, DraftOptions
from specdemo.decoding.events import Event, Round
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rule import Rule
from specdemo.drafters import draft_model
from specdemo.drafters.captured_trees import CapturedTrees
from specdemo.drafters.chain import captured_chain
from specdemo.drafters.heads import eagle
from specdemo.drafters.heads.drafter import DEEPEST
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.capture import CapturedFunctions
from specdemo.engines.rows import MOST_ROWS, TREES, WIDTH
from specdemo.engines.runner import is_beginning
from specdemo.errors import NotFinite
from specdemo.models.trial import TableReader
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_K, MAX_NODES, REJECTION, RULES, Settings
from specdemo.tokens import Draft, DraftOutcome
from tests.gpu.helpers import tree_of_host
from tests.harness.doubles import MODEL_VOCAB, PROMPT, TableRunner, paths_of, proposed, random_table
from tests.harness.engines import capture_heads, recorded, tiny_model
from tests.harness.enumeration import distance, emitted_distribution
from tests.harness.texts import true_texts
from tests.harness.toys import ModelToy, head_after
from tests.unit import test_graph
from tests.unit.test_graph import captured_apart, graph_toy, run

from ..sentences import refuses

TEXT = torch.randint(0, MODEL_VOCAB, (23,), generator=torch.Generator().manual_seed(3)).tolist()
SETTINGS = [
    Settings(tree=True),
    Settings(temperature=0.8, seed=3, tree=True),
    Settings(temperature=1, top_k=5, top_p=0.9, tree=True),
    Settings(temperature=1, rule=REJECTION, tree=True),
]
CAPTURED = ["eagle", "block", "medusa", "p-eagle"]
HEADS = [*CAPTURED, "dspark", "dflash2"]
CHAIN = Settings(temperature=1, k=2, max_new_tokens=4, rule=REJECTION)
ENUMERATED = [
    Settings(temperature=1, k=6, max_new_tokens=4, tree=True),
    Settings(temperature=0.7, k=6, max_new_tokens=3, tree=True),
    Settings(temperature=1.5, k=6, max_new_tokens=4, top_k=2, tree=True),
    Settings(temperature=0, k=6, max_new_tokens=6, tree=True),
]
MOST_LAUNCHES, MORE_TO_MOVE = 20, 6

ANY = DraftOptions()


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ROOM", 128)


def same(one: Draft, other: Draft) -> bool:
    """Whether two trees have the same tokens in the same order, and nearly the same shares."""
    assert one.q is not None
    assert other.q is not None
    shapes = [([*map(int, tree.token_ids)], tree.parents) for tree in (one, other)]
    return shapes[0] == shapes[1] and torch.allclose(one.q.double(), other.q.double(), rtol=1e-4)


# The tree --------------------------------------------------------------------------------------------------------


def by_table(table: Tensor, depths: int = DEEPEST, width: int = WIDTH, most_rows: int = MOST_ROWS) -> CapturedTrees:
    return CapturedTrees(partial(TableReader, table), CapturedFunctions(recorded), None, depths, width, most_rows)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("spread", "digits"), [(3.0, 9), (3.0, 0), (30.0, 9)], ids=["random", "ties", "deep"])
@pytest.mark.parametrize("nodes", [1, 2, 9, MAX_NODES])
def test_a_tree_is_that_of_the_host(settings: Settings, nodes: int, spread: float, digits: int) -> None:
    """Whatever a call does of it, and where the host has no rows left."""
    table = spread * torch.randn(40, 40, generator=torch.Generator().manual_seed(nodes))
    table = (table * 10**digits).round() / 10**digits
    rule, sizes = rule_for(settings), set()
    for depths in (2, DEEPEST):
        trees = by_table(table, depths)
        for depth in (1, 3, MAX_NODES):
            for stop in (0.0, 0.05):
                host = tree_of_host(table, table[:1], nodes, depth, rule, 9, stop)
                tree = trees.draw([table[:1]], nodes, depth, rule, 9, stop)
                assert same(tree, host)
                sizes.add((len(tree.token_ids), max(map(len, paths_of(tree)))))
    if nodes == MAX_NODES:
        assert len(sizes) >= 4, "the trees say too little"
        assert spread < 9 or max(deep for _, deep in sizes) > DEEPEST


@pytest.mark.parametrize("nodes", [3, 12, MAX_NODES])
def test_a_wide_tree_is_that_of_the_host(nodes: int) -> None:
    """Of a drafter that reads no tokens, whose depths are as wide as the tree."""
    table, rule = torch.randn(40, 40, generator=torch.Generator().manual_seed(nodes)), rule_for(Settings(tree=True))
    limits = MAX_NODES + 1, 9 * MAX_NODES
    host = tree_of_host(table, table[:1], nodes, DEEPEST, rule, 9, 0.0, *limits)
    tree = by_table(table, DEEPEST, *limits).draw([table[:1]], nodes, DEEPEST, rule, 9)
    assert same(tree, host)
    assert len(tree.token_ids) == nodes


def test_logits_that_are_no_numbers_are_refused_wherever_they_are_read() -> None:
    table, rule = 9 * torch.randn(40, 40, generator=torch.Generator().manual_seed(1)), rule_for(Settings(tree=True))
    read = by_table(table, 4).draw([table[:1]], 9, 4, rule, 9)
    parents = [int(read.token_ids[parent]) for parent in read.parents or () if parent >= 0]
    for token in (0, parents[-1]):
        broken = table.clone()
        broken[token, 7] = torch.nan
        with refuses(NotFinite, "drafter logits"):
            by_table(broken, 4).draw([broken[:1]], 9, 4, rule, 9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_a_captured_head_grows_the_tree_that_it_grows_uncaptured(name: str, settings: Settings) -> None:
    whole, captured = (ModelToy(model=tiny_model("llama")) for _ in range(2))
    capture_heads(captured, name)
    for nodes, depth in ((20, 4), (MAX_NODES, 40), (1, 1)):
        trees = [proposed(head_after(toy, name, TEXT, settings), TEXT, nodes, depth=depth) for toy in (whole, captured)]
        assert same(*trees)


@pytest.mark.parametrize("name", [*HEADS, "draft-model"])
def test_without_a_kernel_the_host_grows_trees_between_captured_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, drafted = replace(SETTINGS[1], k=12, max_new_tokens=30), []
    for possible in (True, False):
        monkeypatch.setattr(CapturedTrees, "possible", lambda possible=possible: possible)
        toy = graph_toy()
        capture_heads(toy, *{*HEADS} - {*CAPTURED})
        drafted.append([[(token.id, token.parent) for token in each.drafted] for each in rounds(toy, name, settings)])
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
def test_a_captured_draft_model_grows_the_trees_that_it_grows_on_other_passes(settings: Settings) -> None:
    others = ModelToy(model=tiny_model("llama"), draft_model=tiny_model("llama", 1))
    settings = replace(settings, k=12, max_new_tokens=40)
    ours, theirs = ([*rounds(toy, "draft-model", settings)] for toy in (graph_toy(), others))
    assert [[(token.id, token.parent) for token in each.drafted] for each in ours] == [
        [(token.id, token.parent) for token in each.drafted] for each in theirs
    ]
    assert len({token.parent for each in ours for token in each.drafted}) > 6


def rounds(toy: ModelToy, name: str, settings: Settings) -> list[Round]:
    return [event for event in run(toy, name, settings) if isinstance(event, Round)]


# What a GPU would be asked for -----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("name", "depths"),
    [*((name, eagle.DEPTHS) for name in CAPTURED), ("draft-model", 2), ("draft-model", eagle.DEPTHS)],
)
def test_a_tree_is_drafted_with_a_wait_for_each_call(
    name: str, depths: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for the outcome. Nothing in a call reads a number."""
    monkeypatch.setattr(draft_model, "DEPTHS", depths)
    lists, to_list = 0, Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return to_list(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    events, found = run(graph_toy(), name, replace(settings, k=eagle.DEPTHS, max_new_tokens=60)), set()
    for place in range(6):
        lists = 0
        with test_graph.CountedWaits() as waits:
            event = next(events)
        if place > 1 and isinstance(event, Round) and event.drafted:  # before, the prompt is read
            found.add(lists + waits.count)
    assert found <= set(range(2, 2 + eagle.DEPTHS // depths))
    assert found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", [*CAPTURED, "draft-model"])
def test_a_tree_launches_a_few_operations_outside_its_captured_work(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a round: half of them are copies into fixed buffers. More move the keys, values and states of a path between
    whose rows others lie."""
    monkeypatch.setattr(test_graph, "recorded", captured_apart)
    monkeypatch.setattr(draft_model, "DEPTHS", eagle.DEPTHS)
    events, launched = run(graph_toy(), name, replace(settings, k=eagle.DEPTHS, max_new_tokens=80)), list[int]()
    for place in range(12):
        with test_graph.Launches() as seen:
            event = next(events)
        if place > 5 and isinstance(event, Round) and event.drafted:  # before, some are captured
            path = [row for row, token in enumerate(event.drafted) if token.outcome is DraftOutcome.ACCEPTED]
            launched.append(seen.count - (0 if is_beginning(path) else MORE_TO_MOVE))
    assert 0 < min(launched) <= max(launched) <= MOST_LAUNCHES


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_captured_test_of_a_tree_is_that_of_its_own_rows(settings: Settings) -> None:
    """Though it is filled up to one of a few sizes with a token that may be the target's own; after chains of all
    lengths, which are captured too."""
    plain, captured, vocab, longest = rule_for(settings), rule_for(settings), 4, 0
    functions = CapturedFunctions(recorded)
    random = torch.Generator().manual_seed(5)
    trees = [
        [int(torch.randint(-1, place, (1,), generator=random)) for place in range(nodes)]
        for nodes in range(1, MAX_NODES + 1)
    ]
    for nodes, parents in [*((k, None) for k in range(MAX_K + 1)), *((len(tree), tree) for tree in trees)]:
        token_ids = torch.randint(vocab, (nodes,), generator=random).tolist()
        logits = 2 * torch.randn(nodes + 1, vocab, generator=random)
        for q in (None, torch.rand(nodes, generator=random, dtype=torch.float64)):
            draft = Draft(token_ids, q=q, parents=parents or (), tree=parents is not None)
            found, expected = captured.verify(logits, draft, 9, functions), plain.verify(logits, draft, 9)
            assert found[:3] == expected[:3]
            longest = max(longest, found.accepted if parents else 0)
            if found.target_probs is not None and expected.target_probs is not None:
                assert found.target_probs[: nodes + 1].equal(expected.target_probs)
    assert longest > 2
    rows = [*range(1, MAX_K + 2), *TREES]
    shapes = 2 * len(rows if settings.temperature else {*rows})  # a greedy test does not read which row follows which
    assert len(functions(captured.kind, captured._test)._calls) == shapes


def test_a_call_is_the_same_operations_on_the_same_memory_whatever_tree_it_grows() -> None:
    toy = ModelToy(model=tiny_model("llama"))
    ready, watched = toy.heads["eagle"], []
    passes = eagle.EaglePasses(ready, 128, captured=True)
    trees = CapturedTrees(partial(eagle.EagleTree, passes), CapturedFunctions(recorded), ready.token_ids, DEEPEST)
    given, limits = torch.zeros(1, len(ready.token_ids)), torch.zeros(2, dtype=torch.float64)
    keys = torch.zeros(6, dtype=torch.long)
    call = trees._call_by(rule_for(SETTINGS[1]))
    for length, nodes, spread in ((0, 2, 0.1), (3, 20, 9.0), (60, 63, 1.0)):
        passes.seek(length)
        given.copy_(spread * torch.randn(given.shape, generator=torch.Generator().manual_seed(nodes)))
        limits[0], limits[1] = nodes, 1 / nodes**3
        with torch.inference_mode(), test_graph.OperationRecorder() as watch:
            call(6, 8, 8, 0, limits, keys, given)
        watched.append((watch.seen, watch.outside))
    assert watched[0] == watched[1] == watched[2]
    memory = {test_graph._memory(one) for one in (given, limits, keys, passes.output, passes.backend.entries)}  # type: ignore[union-attr]
    assert memory <= watched[0][1]


# The text --------------------------------------------------------------------------------------------------------


class ByPairs(Drafter):
    """Trees by a table of its own, [V, V], grown in captured calls."""

    name = "pairs"

    def __init__(self, table: Tensor, rule: Rule) -> None:
        self.table, self.rule, self.trees = table, rule_for(rule.settings), by_table(table, 2)

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = ANY) -> Draft:
        return self.trees.draw([self.table[context[-1:]]], k, options.depth or k, self.rule, len(context))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", ENUMERATED, ids=str)
def test_the_text_follows_the_targets_distribution(table: Tensor, settings: Settings, rule: str) -> None:
    settings, own = replace(settings, rule=rule), random_table(7)[0].log().float()
    emitted = emitted_distribution(partial(decoding, table, partial(ByPairs, own)), settings)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert distance(emitted, true_texts(table, PROMPT, settings.max_new_tokens, settings)) < 1e-12


def decoding(table: Tensor, make: Callable[[Rule], Drafter], rule: Rule) -> Decoding:
    return Decoding(TableRunner(table), make(rule), PROMPT, rule)


class ChainByPairs(Drafter):
    """Chains by a table of its own, [V, V'], drawn in captured calls; V' tokens of the vocabulary can be drawn."""

    name = "pairs"

    def __init__(self, table: Tensor, token_ids: Tensor | None, rule: Rule) -> None:
        self.rule, self.table, self.token_ids = rule, table, token_ids
        self.functions = CapturedFunctions(recorded)  # of one run: a capture draws, too

    def following(self, logits: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda tokens: self.table[tokens[-1]] if tokens else logits

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = ANY) -> Draft:
        given, size = [self.table[context[-1:]]], len(self.table)
        return captured_chain(self.following, self.functions, given, k, self.rule, len(context), self.token_ids, size)


@pytest.mark.parametrize(
    ("settings", "few"),
    [
        (CHAIN, True),
        (replace(CHAIN, temperature=1.5, top_k=2), False),
        (replace(CHAIN, temperature=0.7, top_p=0.9), True),
        pytest.param(CHAIN, False, marks=pytest.mark.slow),
    ],
)
def test_a_text_with_captured_chains_follows_the_targets_distribution(
    table: Tensor, settings: Settings, few: bool
) -> None:
    own, token_ids = random_table(7)[0].log().float(), torch.tensor([0, 2]) if few else None
    own = own if token_ids is None else own[:, token_ids]
    longest = 0

    def seen(events: Sequence[Event]) -> None:
        nonlocal longest
        longest = max(longest, *(len(event.emitted) for event in events if isinstance(event, Round)))

    made = partial(decoding, table, partial(ChainByPairs, own, token_ids))
    emitted = emitted_distribution(made, settings, seen=seen)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-6)
    assert distance(emitted, true_texts(table, PROMPT, settings.max_new_tokens, settings)) < 1e-6
    assert longest == 3, "both tokens passed in some run"

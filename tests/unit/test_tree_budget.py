"""K = auto with trees: a budget of nodes, a chain or no draft, whichever pays most; and never another text."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from specdemo.decoding.acceptance import branches, walk
from specdemo.decoding.costs import DraftStats
from specdemo.decoding.drafter import CHAIN, Drafter, DraftOptions
from specdemo.decoding.either import source_of
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Chooser, Form, Given
from specdemo.drafters.ngram import load_table
from specdemo.drafters.tree import Tree, grow
from specdemo.racing.again import again, differences
from specdemo.racing.race import race
from specdemo.racing.trace import read_trace, write_trace
from specdemo.settings import AUTO, MATCH, MAX_K, Settings
from specdemo.tokens import Draft, DraftedToken, DraftOutcome
from tests.harness.classes import DraftLengthController
from tests.harness.doubles import PROMPT, VOCAB, costs_with, ids_of, proposed
from tests.harness.toys import TableToy, alike_toy, drafter_for, ngram_file
from tests.unit.test_control import FLAT, RISING

ACCEPTED, REJECTED, UNTESTED = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED


# The choice ------------------------------------------------------------------------------------------------------


class Guesser(Drafter):
    """Its guesses are right with the chance of their rank: at each place the best one, the second and so on."""

    name = "guesser"

    def __init__(self, chances: Iterable[float]) -> None:
        self.chances = list(chances)

    def propose(self, context: Any, k: int, options: DraftOptions = CHAIN) -> Draft:
        ranked = [(i, chance, 0) for i, chance in enumerate(self.chances)]
        return grow(0, lambda _: ranked, k, options.depth or k, options.stop_below)


def best_first(guesser: Guesser, nodes: int, stop_below: float = 0.0) -> tuple[list[int], list[int]]:
    """The guesses of a tree, by their ranks, and their parents."""
    draft = proposed(guesser, (), nodes, depth=nodes, stop_below=stop_below)
    return [int(rank) for rank in draft.token_ids], list(draft.parents or ())


def speed(
    k: int | str,
    tree: bool,
    passes: dict[int, float],
    drafting: dict[bool, float],
    chances: list[float],
    seed: int = 0,
    tokens: int = 700,
) -> tuple[float, list[tuple[int, bool]]]:
    """Tokens per second of a run, and the drafts of its second half: how many tokens, and whether it was a tree.

    Args:
        drafting: the seconds of a drafted token, in a chain (False) and in a tree (True).
        chances: see `Guesser`.
    """
    guesser, costs = Guesser(chances), costs_with(passes)
    for branching, each in drafting.items():
        for count in (1, 4) * 2:
            costs.drafts[guesser.name, branching].learn_cost(count, each * count)
    true_passes = np.interp(range(64), list(passes), list(passes.values()))
    luck = random.Random(seed)
    control: Chooser = DraftLengthController(costs, tree) if k == AUTO else Given(repeat(Form(int(k), tree)))
    written, seconds, last = 0, 0.0, None
    drafts: list[tuple[int, bool]] = []
    while written < tokens:
        asked, branching, _ = control.choose(tokens - written - 1, last, guesser, (), 1)
        branching = bool(asked) and branching
        ids, parents = best_first(guesser, asked) if branching else ([0] * asked, list(range(-1, asked - 1)))
        drawn = luck.choices(range(len(chances) + 1), [*chances, 1 - sum(chances)], k=len(ids) + 1)
        path, _ = walk(parents, [drawn[parent + 1] == rank for rank, parent in zip(ids, parents, strict=True)])
        followed = {-1, *path}
        outcomes = [
            ACCEPTED if node in path else REJECTED if parent in followed else UNTESTED
            for node, parent in enumerate(parents)
        ]
        drafted = tuple(
            DraftedToken(0, outcome, 0.5, 0.5, parent=parent if branching else None)
            for outcome, parent in zip(outcomes, parents, strict=True)
        )
        took = drafting[branching] * len(ids), true_passes[len(ids) + 1] * luck.gauss(1, 0.02)
        last = Round(0, drafted, (), took[0], took[1], sum(took), asked)
        written, seconds = written + len(path) + 1, seconds + sum(took)
        if written > tokens / 2:
            drafts.append((len(ids), branching))
    return written / seconds, drafts


SURE, TORN, HOPELESS = [0.85, 0.08], [0.42, 0.16, 0.1, 0.07, 0.05], [0.03, 0.02, 0.02]
FREE = {False: 0.0, True: 0.0}
CHEAP, DEAR_TREES = {False: 0.02, True: 0.02}, {False: 0.02, True: 0.3}
WORLDS = {
    "rows cost nothing and guesses are torn": (FLAT, FREE, TORN),
    "as on this CPU, torn": (RISING, CHEAP, TORN),
    "as on this CPU, sure": (RISING, CHEAP, SURE),
    "as on this CPU, trees are dear to draft": (RISING, DEAR_TREES, TORN),
    "as on this CPU, guesses never pass": (RISING, DEAR_TREES, HOPELESS),
    "every row costs a pass": ({1: 1.0, MAX_K + 1: MAX_K + 1.0}, CHEAP, TORN),
}


def mean_speed(k: int | str, tree: bool, world: Any) -> float:
    return fmean(speed(k, tree, world[0], world[1], world[2], seed)[0] for seed in range(2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WORLDS)
def test_auto_is_near_the_best_chain_and_the_best_tree_and_never_slow(name: str) -> None:
    world = WORLDS[name]
    auto, alone = mean_speed(AUTO, True, world), mean_speed(0, False, world)
    fixed = [mean_speed(k, tree, world) for k in (1, 3, 5, 8, 12) for tree in (False, True)]
    assert auto >= 0.97 * alone
    assert auto >= 0.95 * max(fixed)


def share_of(name: str, wanted: Any) -> float:
    drafts = speed(AUTO, True, *WORLDS[name])[1]
    return fmean(wanted(k, tree) for k, tree in drafts)


def test_the_form_and_the_size_follow_from_the_costs() -> None:
    assert share_of("rows cost nothing and guesses are torn", lambda k, tree: tree and k > 12) > 0.9
    assert share_of("as on this CPU, torn", lambda k, tree: 1 <= k <= 9) > 0.9
    assert share_of("as on this CPU, torn", lambda k, tree: tree) > 0.1  # a chain of one is nearly as good
    assert share_of("as on this CPU, trees are dear to draft", lambda k, tree: k and not tree) > 0.8
    assert share_of("as on this CPU, guesses never pass", lambda k, tree: not k) > 0.4  # a try loses 1% of a pass
    assert share_of("every row costs a pass", lambda k, tree: not k) > 0.6


def test_the_positions_of_a_tree_are_ranks_and_all_of_them_count() -> None:
    stats = DraftStats()
    for _ in range(200):
        stats.learn([REJECTED, ACCEPTED, UNTESTED, ACCEPTED], 6, tree=True)
    assert stats.chances()[:4] == pytest.approx([0, 1, 0, 1], abs=0.2)
    assert stats.chances()[5] < 0.05  # asked for and not made: what is not there does not pass
    stats.learn([ACCEPTED] * 63, 63, tree=True)  # a tree of a fixed size, larger than auto takes


def test_a_tree_leaves_out_what_is_not_worth_its_row() -> None:
    guesser = Guesser([0.5, 0.3])
    assert best_first(guesser, 5) == ([0, 1, 0, 1, 0], [-1, -1, 0, 0, 1])
    assert best_first(guesser, 5, 0.2) == ([0, 1, 0], [-1, -1, 0])
    assert best_first(guesser, 5, 0.6) == ([0], [-1])  # there is always one
    tree = Tree(8, stop_below=0.2)
    for parent, token, share in ((-1, 4, 0.6), (-1, 5, 0.3), (0, 6, 0.4), (0, 7, 0.2)):
        tree.add(parent, token, share)
    tree.rank()
    assert (tree.draft().token_ids, tree.draft().parents) == ([4, 5, 6], [-1, -1, 0])


def test_the_table_ends_a_chain_where_it_is_unsure_and_not_before(tmp_path: Path) -> None:
    """Its estimates at temperature 0 are its probabilities."""
    path = ngram_file(tmp_path, VOCAB)
    likeliest = float(load_table(path).next_token_probs([*PROMPT]).max())
    for temperature in (0.0, 1.0):
        table = drafter_for(TableToy(ngram_table=path), "ngram", Settings(temperature=temperature))
        first = proposed(table, PROMPT, 4, stop_below=0.9 * likeliest)
        if temperature == 0:
            assert len(first.token_ids) > 1
        assert len(proposed(table, PROMPT, 4, stop_below=1.1 * likeliest).token_ids) == 1


# The text --------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    return alike_toy(tmp_path)


def test_where_no_pass_of_three_tokens_is_taken_drafts_are_chains() -> None:
    costs, guesser = costs_with({1: 1.0, 2: 1.0}), Guesser([0.9])
    for branching in (False, True):
        for _ in range(2):
            costs.drafts[guesser.name, branching].learn_cost(1, 0.1)
    assert DraftLengthController(costs, tree=True).choose(100, None, guesser, ())[:2] == (1, False)


def test_many_readers_draft_chains_where_no_pass_of_three_tokens_each_is_measured() -> None:
    costs, guesser = costs_with({1: 1.0, 22: 1.0, 44: 1.0}), Guesser([0.9])
    for branching in (False, True):
        for _ in range(2):
            costs.drafts[guesser.name, branching].learn_cost(1, 0.001)
    assert DraftLengthController(costs, tree=True).choose(100, None, guesser, (), 22)[:2] == (1, False)


@pytest.mark.parametrize(
    ("name", "k"), [("lookup-ngram", AUTO), ("draft-model", AUTO), ("prompt-lookup", AUTO), ("prompt-lookup", 9)]
)
def test_a_race_with_trees_is_run_again(toy: Any, name: str, k: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With K = auto after its drafts were tried out, and as another choice of their form says."""
    settings = Settings(k=k, temperature=0.8, max_new_tokens=40, tree=True)
    choices = random.Random(5)

    def pick(self: Any, most: int, drafter: Drafter, ids: Any) -> tuple[Drafter, Form]:
        tree = choices.random() < 0.5
        return source_of(drafter, ids), Form(min(choices.randrange(6), most), tree)

    monkeypatch.setattr(DraftLengthController, "_pick", pick)
    entries = list(race(toy, name, PROMPT, settings))
    if k == AUTO:
        (costs,) = toy.costs.values()
        assert costs.tried == {(name, True)}
        assert {name for name, branching in costs.drafts if branching}
    plain, drafted = ([e.event for e in entries if e.lane == lane] for lane in ("plain", "speculative"))
    assert ids_of(plain) == ids_of(drafted)
    rounds = [event for event in drafted if isinstance(event, Round) and event.drafted]
    assert {branches(event.drafted) for event in rounds} == ({True, False} if k == AUTO else {True})

    lanes = [{"name": "plain", "drafter": "none", "k": 0, "noise": 1}]
    lanes += [{"name": "speculative", "drafter": name, "k": k, "noise": 1}]
    chosen = {"k": k, "temperature": 0.8, "max_new_tokens": 40, "rule": MATCH, "tree": True}
    header = {"lanes": lanes, "prompt": "p", "preset": "toy", "drafter": name, "settings": chosen}
    header, recorded = read_trace("".join(write_trace(header, entries)).split("\n"))
    monkeypatch.setattr(TableToy, "weights", None, raising=False)
    monkeypatch.setattr(TableToy, "encode", lambda self, prompt, raw: list(PROMPT), raising=False)
    repeated = list(again(toy, header, recorded))
    assert differences(recorded, repeated) == {"plain": None, "speculative": None}
    forms = [
        [[token.parent for token in e.event.drafted] for e in entries if isinstance(e.event, Round) and e.event.drafted]
        for entries in (recorded, repeated)
    ]
    assert forms[0] == forms[1]

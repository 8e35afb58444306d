"""Races of more than one drafted lane: what is asked for, whose turn it is, what they take, what they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specdemo.cli.main import table
from specdemo.decoding.acceptance import branches
from specdemo.decoding.events import Event, Finished, Round, emitted_tokens
from specdemo.errors import BadInput
from specdemo.models import sizes
from specdemo.models.sizes import check_caches
from specdemo.racing.again import again, differences, recorded_lanes
from specdemo.racing.race import race
from specdemo.racing.request import PLAIN, SPECULATIVE, DraftedLane, Request, read_lanes
from specdemo.racing.summary import summary, trace_header
from specdemo.racing.trace import Entry, read_trace, write_trace
from specdemo.settings import AUTO, REJECTION, Settings
from tests.harness.classes import Loaded
from tests.harness.doubles import PROMPT, VOCAB, ids_of
from tests.harness.toys import alike_toy
from tests.unit.test_race import clocked

from ..sentences import gist, refuses, tells

SETTINGS = Settings(temperature=1, k=4, max_new_tokens=24, seed=3)
MORE = (DraftedLane("draft-model", 2), DraftedLane("ngram", AUTO))
NAMES = ["draft-model:4", "draft-model:2", "ngram:auto"]
ASKED = dict(zip(NAMES, (DraftedLane("draft-model", 4), *MORE), strict=True))
WORDS = "the cat sat on the mat and the dog sat"


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    return alike_toy(tmp_path)


def events_of(entries: list[Entry], lane: str) -> list[Event]:
    return [entry.event for entry in entries if entry.lane == lane]


# What is asked for ------------------------------------------------------------------------------------------


def test_lanes_are_read_as_a_person_writes_them() -> None:
    lanes = [DraftedLane("eagle", 4), DraftedLane("ngram", AUTO), DraftedLane("eagle", 63, tree=True)]
    assert read_lanes(["eagle:4", " ngram:auto ", "eagle:tree-63"]) == lanes
    assert [lane.name for lane in lanes] == ["eagle:4", "ngram:auto", "eagle:tree-63"]


SHAPE = "1 16 auto, eagle:4 ngram:auto, 63, eagle:tree-8, :ahead, "


@pytest.mark.parametrize(
    ("lanes", "values"),
    [
        (["eagle"], f"{SHAPE}'eagle'."),
        (["eagle:0"], f"{SHAPE}'eagle:0'."),
        (["eagle:17"], f"{SHAPE}'eagle:17'."),
        (["eagle:-1"], f"{SHAPE}'eagle:-1'."),
        (["eagle:tree-64"], f"{SHAPE}'eagle:tree-64'."),
        (["eagle:tree-0"], f"{SHAPE}'eagle:tree-0'."),
        (["eagle:four"], f"{SHAPE}'eagle:four'."),
        (["eagle:4:4"], f"{SHAPE}'eagle:4:4'."),
        ([4], f"{SHAPE}4."),
        (["none:4"], "none:4."),
        (["eagel:4"], "'eagel'. none, prompt-lookup,"),
        (["eagle:4", "eagle:4"], "eagle:4 twice."),
        (["eagle:04", "eagle:4"], "eagle:4 twice."),
        (["eagle:1", "eagle:2", "eagle:3", "eagle:4"], "3 4."),
        ([], "list []."),
        ("eagle:4", "list 'eagle:4'."),
    ],
)
def test_wrong_lanes_are_refused_in_one_sentence(lanes: Any, values: str) -> None:
    with refuses(BadInput, values):
        read_lanes(lanes)


def test_one_drafted_lane_keeps_its_old_name_and_several_say_drafter_and_k() -> None:
    asked = Request("a", "b", "draft-model", SETTINGS)
    assert asked.drafted == {SPECULATIVE: DraftedLane("draft-model", 4)}
    assert list(replace(asked, more=MORE).drafted) == NAMES


# The race ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), (MORE[0], DraftedLane("ngram", 1))], ids=["two lanes", "four lanes"])
@pytest.mark.parametrize("pass_seconds", [lambda n: 1.0, float, lambda n: 0.3 if n == 1 else 7.0])
def test_the_lane_behind_on_its_clock_goes_next(
    toy: Any, monkeypatch: pytest.MonkeyPatch, pass_seconds: Callable[[int], float], more: tuple[DraftedLane, ...]
) -> None:
    clocked(toy, monkeypatch, pass_seconds)
    clocks = dict.fromkeys([PLAIN, *Request("a", "b", "draft-model", SETTINGS, more=more).drafted], 0.0)
    running, order = {*clocks}, []
    for entry in race(toy, "draft-model", PROMPT, SETTINGS, more=more):
        assert clocks[entry.lane] <= min(clocks[lane] for lane in running)
        clocks[entry.lane] += entry.event.seconds
        order.append(entry.lane)
        if isinstance(entry.event, Finished):
            running.discard(entry.lane)
    assert not running
    assert len({*clocks.values()}) > 1
    assert sum(one != other for one, other in pairwise(order)) > 4  # they did take turns


@pytest.mark.parametrize(("temperature", "isolated"), [(0.0, False), (0.7, False), (1.0, True)])
def test_under_the_match_rule_all_four_lanes_write_the_same_text(toy: Any, temperature: float, isolated: bool) -> None:
    settings = replace(SETTINGS, temperature=temperature)
    entries = list(race(toy, "draft-model", PROMPT, settings, isolated, MORE))
    texts = {name: ids_of(events_of(entries, name)) for name in (PLAIN, *NAMES)}
    assert len(texts[PLAIN]) == 24
    assert all(text == texts[PLAIN] for text in texts.values())
    drafted = {name: max(len(getattr(e, "drafted", ())) for e in events_of(entries, name)) for name in texts}
    assert (drafted[PLAIN], drafted["draft-model:4"], drafted["draft-model:2"]) == (0, 4, 2)


def test_every_drafted_lane_tells_its_probabilities_above_temperature_0(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    assert {entry.lane for entry in entries if entry.probabilities} == {*NAMES}


def test_what_one_lane_cannot_do_is_refused_before_any_takes_memory(toy: Any) -> None:
    toy.ngram_table = None
    with refuses(BadInput, "ngram"):
        list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    with refuses(BadInput, "auto match"):
        list(race(toy, "draft-model", PROMPT, replace(SETTINGS, rule=REJECTION), more=[DraftedLane("eagle", AUTO)]))
    assert not toy.runners


def test_four_caches_that_memory_does_not_hold_are_refused_before_any_is_made(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "free_memory", lambda: 10**9)
    tokens = len(PROMPT) + SETTINGS.max_new_tokens
    own, drafts = 8_000_000, 1_000_000
    toy.token_bytes = {"target": own, "draft-model": drafts}
    needed = tokens * (4 * own + 2 * drafts)  # the draft model has a cache in two of the lanes
    assert needed <= 10**9
    list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    monkeypatch.setattr(sizes, "free_memory", lambda: needed - 1)
    made = len(toy.runners)
    with pytest.raises(BadInput) as refusal:
        list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    assert len(toy.runners) == made
    assert gist(str(refusal.value)) == "The 4 29 1.0 GB 1.0 GB race"
    list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE[:1]))  # three lanes fit


def test_the_bytes_that_are_checked_are_those_that_caches_take(loaded: Loaded) -> None:
    makers = {"target": loaded.target_runner, "draft-model": loaded.draft_runner}
    makers["layer-skip"] = makers["mtp"] = partial(loaded.target_runner(1).first_layers, 1)  # one layer each
    for name, make in makers.items():
        runner: Any = make(64)
        runner.prefill([1])
        tensors = [value for value in vars(runner._cache).values() if isinstance(value, torch.Tensor)]
        runner.release()
        keys = min(part.numel() * part.element_size() for part in tensors if part.ndim > 3)  # values may be padded
        assert 2 * keys == 64 * loaded.token_bytes[name] > 0
    assert makers.keys() == loaded.token_bytes.keys()
    free = sizes.free_memory()
    check_caches([free // 2000] * 3, 500, loaded.device)
    with refuses(BadInput, "3 1,000"):
        check_caches([free // 2000] * 3, 1000, loaded.device)


def test_a_tree_and_a_chain_race_with_the_same_drafter(toy: Any) -> None:
    tree = DraftedLane("draft-model", 6, tree=True)
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS, more=[tree]))
    for name in (NAMES[0], tree.name):
        drafts = [event.drafted for event in events_of(entries, name) if isinstance(event, Round)]
        assert any(map(branches, drafts)) is (name == tree.name)
    assert ids_of(events_of(entries, tree.name)) == ids_of(events_of(entries, PLAIN))


# Its trace and its summary ----------------------------------------------------------------------------------


def traced(loaded: Loaded, settings: Settings) -> tuple[Any, list[Entry]]:
    header = trace_header(loaded, Request(WORDS, loaded.preset.name, "draft-model", settings, raw=True, more=MORE))
    return read_trace(write_trace(header, race(loaded, "draft-model", loaded.encode(WORDS, True), settings, more=MORE)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_race_of_four_lanes_is_run_again_from_its_trace(loaded: Loaded, temperature: float) -> None:
    settings = replace(SETTINGS, temperature=temperature)
    header, recorded = traced(loaded, settings)
    assert [lane["name"] for lane in header["lanes"]] == [PLAIN, *NAMES]
    assert [(lane["drafter"], lane["k"]) for lane in header["lanes"][1:]] == [
        ("draft-model", 4),
        ("draft-model", 2),
        ("ngram", "auto"),
    ]
    entries = list(again(loaded, header, recorded))
    assert differences(recorded, entries) == dict.fromkeys([PLAIN, *NAMES])
    for name in (PLAIN, *NAMES):  # and round by round
        then, now = ([len(getattr(e, "drafted", ())) for e in events_of(race, name)] for race in (recorded, entries))
        assert then == now


@pytest.mark.parametrize(("field", "value"), [("drafter", 5), ("k", 99), ("k", None), ("tree", 8)])
def test_a_lane_of_a_trace_that_says_no_drafter_or_k_is_not_run(loaded: Loaded, field: str, value: Any) -> None:
    header, recorded = traced(loaded, replace(SETTINGS, max_new_tokens=3))
    header["lanes"][2][field] = value
    with pytest.raises(BadInput):
        list(again(loaded, header, recorded))


def test_a_trace_says_which_lanes_drafted_trees(loaded: Loaded) -> None:
    tree = DraftedLane("draft-model", 6, tree=True)
    header = trace_header(loaded, Request(WORDS, "", "draft-model", SETTINGS, raw=True, more=(tree,)))
    assert [lane for lane in recorded_lanes(header).values() if lane.tree] == [tree]


def test_the_lanes_of_an_older_trace_are_those_of_its_whole_race(loaded: Loaded) -> None:
    header = trace_header(loaded, Request(WORDS, "", "ngram", SETTINGS, raw=True))
    header["lanes"] = [{"name": PLAIN}, {"name": SPECULATIVE}]
    assert recorded_lanes(header) == {PLAIN: DraftedLane("none", 4), SPECULATIVE: DraftedLane("ngram", 4)}


def test_the_summary_and_the_table_hold_every_lane(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    found = summary(toy, PROMPT, SETTINGS, entries, ASKED)
    for name in (PLAIN, *NAMES):
        assert found[name]["token_ids"] == [t.id for e in events_of(entries, name) for t in emitted_tokens(e)]
    assert list(found["verdicts"]) == NAMES
    ratios = {name: verdict["speed_up"] for name, verdict in found["verdicts"].items()}
    fastest = max(ratios, key=lambda name: ratios[name] or 0)
    assert found["speed_up"] == ratios[fastest]
    assert tells(found["sentence"].split(",")[0].split(". ")[0], fastest)
    assert found["comparison"] == {"identical": True, "first_difference": None, "margin": None}
    lines = table(found, "draft-model").split("\n")
    assert lines[0].split() == ["target", "alone", *NAMES]
    assert len({len(line) for line in lines[:11]}) == 1
    for which, words in (("speed_up", "speed-up, writing"), ("speed_up_in_all", "speed-up, in all")):
        speeds = next(line for line in lines if line.startswith(words)).removeprefix(words).split()
        found_here = [verdict[which] for verdict in found["verdicts"].values()]
        assert speeds == ["-" if ratio is None else f"{ratio:.2f}×" for ratio in found_here]
    assert tells(lines, "target alone")
    for name, verdict in found["verdicts"].items():
        assert (f"{name}: {verdict['sentence']}" in lines) == (verdict["sentence"] not in found["sentence"])
    behind = table(found, "draft-model", why=True).split("\n")
    assert behind[: len(lines)] == lines
    figures = [line for line in behind[len(lines) :] if line.startswith("  tokens per round  ")]
    assert [float(line.split()[-1]) for line in figures] == pytest.approx(
        [found[name]["stats"]["tokens_per_round"] for name in NAMES if found["verdicts"][name]["numbers"]], abs=0.006
    )


def test_the_table_names_the_lane_whose_text_parts(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS, more=MORE))
    at = next(i for i, entry in enumerate(entries) if entry.lane == NAMES[1])
    first: Any = entries[at].event
    entries[at] = replace(
        entries[at], event=replace(first, token=replace(first.token, id=(first.token.id + 1) % VOCAB))
    )
    found = summary(toy, PROMPT, SETTINGS, entries, ASKED)
    assert found["comparison"]["first_difference"] == 0
    shown = table(found, "draft-model")
    assert tells(shown, "draft-model:2 1")
    assert shown.count("differs") == 1

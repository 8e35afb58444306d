"""Several prompts at once: what they share, and that one which fails or rests leaves the others alone.

That each text is the one that its prompt gets alone is tested in `test_texts`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.decoding import batch
from specdemo.decoding.batch import Failed, decode_batch
from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.decoding.loop import PIECE, Decoding
from specdemo.engines.passes import PendingPass
from specdemo.engines.runner import Pass
from specdemo.errors import BadInput, NotFinite
from specdemo.models import sizes
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, PRESETS, find_preset
from specdemo.racing.batch import batch as batch_of
from specdemo.racing.race import drafters_of, rule_for
from specdemo.settings import AUTO, MAX_SEED, REJECTION, Settings
from specdemo.studies.prompts import read_prompts
from specdemo.system.progress import Stopped, attended
from tests.harness.classes import DraftLengthController, Loaded
from tests.harness.doubles import (
    MODEL_VOCAB,
    PROMPT,
    Clock,
    Doubtful,
    Scripted,
    TableRunner,
    Together,
    costs_with,
    ids_of,
    random_table,
    set_clock,
)
from tests.harness.engines import EngineToy, tiny_model
from tests.harness.texts import plain_text
from tests.harness.toys import ngram_file

from ..sentences import refuses


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ngram_file(tmp_path_factory.mktemp("ngram"), MODEL_VOCAB)


@pytest.fixture(scope="module", params=["native"])
def toy(request: pytest.FixtureRequest, ngrams: Path) -> EngineToy:
    """On the C library, unless a test asks for other engines."""
    models = {"model": tiny_model("llama"), "draft_model": tiny_model("llama", seed=1)}
    return EngineToy(**models, ngram_table=ngrams, engine=request.param)


ENGINES = ["native", "fused", "graph"]


def prompts(count: int) -> list[list[int]]:
    """Of different lengths, each with a part that comes again."""
    generator = torch.Generator().manual_seed(count)
    texts = [
        torch.randint(0, MODEL_VOCAB, (3 + 5 * index % 17,), generator=generator).tolist() for index in range(count)
    ]
    return [[*text, *text[:3]] for text in texts]


def decodings(toy: Any, name: str, settings: Sequence[Settings], texts: Sequence[Sequence[int]]) -> Iterator[Decoding]:
    for each, prompt in zip(settings, texts, strict=True):
        runner = toy.target_runner(len(prompt) + each.max_new_tokens + 64)
        drafter = toy.drafter(name, runner, each)
        yield Decoding(runner, drafter, prompt, drafter.shared_rule)


def texts_of(events: Iterator[tuple[int, Event | Failed]]) -> dict[int, list[int]]:
    by_index: defaultdict[int, list[Event]] = defaultdict(list)
    for index, event in events:
        assert not isinstance(event, Failed)
        by_index[index].append(event)
    assert all(isinstance(each[-1], Finished) for each in by_index.values())
    return {index: ids_of(each) for index, each in by_index.items()}


@pytest.mark.parametrize("name", ["lookup-eagle", "draft-model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_readers_who_rest_write_the_same_texts(
    toy: EngineToy, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K = auto, by a clock of chance. They rest now and then, so each drafts after tokens that it has not read."""
    texts, luck, costs = prompts(4), random.Random(1), costs_with({1: 1.0, 16: 1.5, 32: 3.0})
    settings = [Settings(k=AUTO, temperature=temperature, max_new_tokens=50, seed=seed) for seed in range(4)]
    plain = zip(texts, settings, strict=True)
    alone = {index: plain_text(toy.target_runner(99), *each) for index, each in enumerate(plain)}
    set_clock(monkeypatch, lambda: Clock(3))
    plain_runs = decodings(toy, name, settings, texts)
    made = [replace(each, costs=costs, chooser=DraftLengthController(costs)) for each in plain_runs]
    as_it_is = DraftLengthController._let_rest

    def let_rest(self: Any, *drafted: Any) -> None:
        as_it_is(self, *drafted)
        if luck.random() < 0.3:
            for stats in costs.drafts.values():
                stats.rest = 20

    monkeypatch.setattr(DraftLengthController, "_let_rest", let_rest)
    events = list(decode_batch(made, 4))
    assert texts_of(iter(events)) == alone
    ks = [event.k for _, event in events if isinstance(event, Round)]
    assert min(ks.count(0), len(ks) - ks.count(0)) > 20


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[int]]]:
    """The passes that several share: what reads them together, and the rows of each."""
    read, passes_read = batch.read_together, list[tuple[Any, list[int]]]()

    def watched(passes: Sequence[PendingPass]) -> list[Tensor]:
        if len(passes) > 1:
            passes_read.append((passes[0].together, [each.rows for each in passes]))
        return read(passes)

    monkeypatch.setattr(batch, "read_together", watched)
    return passes_read


@pytest.mark.parametrize("toy", ENGINES, indirect=True)
def test_a_pass_reads_the_rows_of_all_and_one_that_ends_makes_room(
    toy: EngineToy, shared: list[tuple[Any, list[int]]]
) -> None:
    settings = [Settings(k=2, max_new_tokens=length, seed=length) for length in (12, 5, 9, 12, 3)]
    running: set[int] = set()
    for index, event in decode_batch(decodings(toy, "ngram", settings, prompts(5)), 3):
        running = running - {index} if isinstance(event, Finished) else running | {index}
        assert len(running) <= 3
    sizes = [rows for _, rows in shared]
    assert [3, 3, 3] in sizes, "three prompts with two drafted tokens each"
    assert max(map(len, sizes)) == 3
    assert all(not runner.length for runner in toy.runners), "their caches are free again"


@pytest.mark.parametrize("name", ["draft-model", "lookup-eagle", "block", "layer-skip", "none"])
def test_a_long_prompt_is_read_beside_the_rounds_of_others(
    toy: EngineToy, name: str, shared: list[tuple[Any, list[int]]]
) -> None:
    """Piece by piece; the drafts, which depend on the states that a head reads, are those of a prompt read alone."""
    texts = [text * length for text, length in zip(prompts(3), (1, 14, 40), strict=True)]
    settings = [Settings(k=2, temperature=0.8, max_new_tokens=30, seed=seed) for seed in range(3)]
    rounds = [
        [(index, event.drafted, event.emitted) for index, event in decoded if isinstance(event, Round)]
        for decoded in (decode_batch(decodings(toy, name, settings, texts), at_once) for at_once in (1, 3))
    ]
    assert sorted(rounds[0], key=lambda each: each[0]) == sorted(rounds[1], key=lambda each: each[0])
    assert any(PIECE in rows and len(rows) > 1 for _, rows in shared)


@pytest.mark.parametrize(("exact_rows", "read"), [(0, [32, 32, 8]), (9, [72]), (32, [32, 32, 8])])
def test_pieces_are_not_longer_than_what_an_engine_is_exact_for(
    exact_rows: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableRunner, "exact_rows", exact_rows)
    runner = TableRunner(random_table(1))
    runner.together = Together()
    decoding = Decoding(runner, Scripted(lambda *_: []), [0, 1, 2] * 24, rule_for(Settings(k=0, max_new_tokens=2)))
    texts_of(decode_batch([decoding], 2))
    assert [len(ids) for _, ids in runner.passes if len(ids) > 1] == read


@pytest.mark.parametrize("toy", ENGINES, indirect=True)
def test_a_draft_model_reads_for_all_of_them_at_once(toy: EngineToy, shared: list[tuple[Any, list[int]]]) -> None:
    settings = [Settings(k=3, max_new_tokens=12, seed=seed) for seed in range(4)]
    list(decode_batch(decodings(toy, "draft-model", settings, prompts(4)), 4))
    models = [(model, len(rows)) for model, rows in shared]
    assert (toy.draft_runner(8).together, 4) in models
    assert (toy.target_runner(8).together, 4) in models


@pytest.mark.parametrize("name", ["eagle", "block"])
def test_a_head_reads_for_all_of_them_at_once(toy: EngineToy, name: str, shared: list[tuple[Any, list[int]]]) -> None:
    """And drafts for each what it drafts alone, chains of several lengths and trees."""
    settings = [
        Settings(k=1 + seed % 3, temperature=0.8 * (seed % 2), max_new_tokens=20, seed=seed, tree=seed == 3)
        for seed in range(5)
    ]
    rounds = [
        sorted(
            (index, event.index, event.drafted, event.emitted) for index, event in decoded if isinstance(event, Round)
        )
        for decoded in (decode_batch(decodings(toy, name, settings, prompts(5)), at_once) for at_once in (1, 5))
    ]
    assert rounds[0] == rounds[1]
    ready = toy.heads[name]
    assert max(len(rows) for together, rows in shared if together is ready) == 5


@pytest.mark.parametrize("toy", ENGINES, indirect=True)
def test_one_that_fails_leaves_the_others_alone(toy: EngineToy) -> None:
    """A drafter whose probability is no number, and a prompt that has no room."""
    texts, settings = prompts(4), [Settings(k=2, max_new_tokens=9, temperature=0.8, seed=seed) for seed in range(4)]
    alone = texts_of(decode_batch(decodings(toy, "none", settings, texts), 1))
    together = list(decodings(toy, "ngram", settings, texts))
    together[1].drafter = Doubtful(lambda context, k: [1] * k)
    together[2].prompt_ids = range(300)
    failures, events = {}, list[tuple[int, Event | Failed]]()
    for index, event in decode_batch(together, 4):
        if isinstance(event, Failed):
            failures[index] = type(event.error)
        elif index not in (1, 2):
            events.append((index, event))
    assert failures == {1: NotFinite, 2: BadInput}
    assert texts_of(iter(events)) == {index: alone[index] for index in (0, 3)}
    assert all(not runner.length for runner in toy.runners)


class Broken(Exception):
    """What no part of the program raises."""


@dataclass(frozen=True)
class BrokenPass(PendingPass):
    """A pass of a drafter or of the target that fails, read together with others or by itself, when it is done."""

    wanted: PendingPass
    late: bool  # whether the others' rows were read before

    @property
    def rows(self) -> int:
        return self.wanted.rows

    @property
    def together(self) -> Any:
        together: Any = self.wanted.together
        return together and Breaking.of(together)

    @property
    def place(self) -> int:
        return self.wanted.place

    def go_back(self, place: int) -> None:
        self.wanted.go_back(place)

    def read(self) -> Tensor:
        if self.late:
            self.wanted.read()
        raise Broken


@dataclass(frozen=True)
class SoundPass(BrokenPass):
    """A pass that is read with such ones."""

    def read(self) -> Tensor:
        return self.wanted.read()


@dataclass(frozen=True)
class Breaking:
    """Reads passes of another `together`, and fails if one of them is broken."""

    other: Any

    @staticmethod
    @cache
    def of(other: Any) -> Breaking:
        return Breaking(other)

    def read(self, passes: Sequence[BrokenPass]) -> list[Tensor]:
        broken = [each for each in passes if not isinstance(each, SoundPass)]
        if broken and not broken[0].late:
            raise Broken
        logits: list[Tensor] = self.other.read([each.wanted for each in passes])
        if broken:
            raise Broken
        return logits


class BreakingSteps(Decoding):
    """A decoding one of whose passes fails: that of the target, or of its drafter, in a round."""

    fails: tuple[str, int, bool] | None = None  # whose, in which round, and whether the others' rows are read before

    def steps(self) -> Any:
        steps, rounds, sent = super().steps(), 0, None
        try:
            step = next(steps)
            while True:
                rounds += isinstance(step, Round)
                if isinstance(step, PendingPass) and not (isinstance(step, Pass) and step.prompt):
                    of = "target" if isinstance(step, Pass) and step.runner is self.runner else "drafter"
                    broken = self.fails and self.fails[:2] == (of, rounds)
                    step = BrokenPass(step, self.fails[2]) if self.fails and broken else SoundPass(step, late=False)
                try:
                    sent = yield step
                except Exception as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(sent)
        except StopIteration:
            pass
        finally:
            steps.close()


DAILY_FAILURES = [("draft-model", whose, 2, True, True) for whose in ("drafter", "target")]
FAILURES = [
    each
    for each in product(("draft-model", "eagle", "block"), ("drafter", "target"), (0, 2), (False, True), (True, False))
    if each not in DAILY_FAILURES
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("toy", "name", "whose", "round_", "late", "together"),
    [
        pytest.param(engine, *each, marks=() if engine == "native" or each in DAILY_FAILURES else pytest.mark.slow)
        for engine in ENGINES
        for each in (*DAILY_FAILURES, *FAILURES)
        if engine != "graph" or each[:2] not in product(("eagle", "block"), ["drafter"])  # captured drafts have none
    ],
    indirect=["toy"],
)
def test_a_pass_that_fails_ends_its_own_text_only(
    toy: EngineToy, name: str, whose: str, round_: int, late: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails in the first round or later, before or after the rows of the others were read."""
    texts = prompts(4)
    settings = [Settings(k=3, max_new_tokens=14, temperature=0.8 * (seed % 2), seed=seed) for seed in range(4)]
    alone = rounds_of(decode_batch(decodings(toy, name, settings, texts), 1))
    if not together:
        monkeypatch.setattr(BrokenPass, "together", None)
    made = []
    for each in decodings(toy, name, settings, texts):
        made.append(BreakingSteps(each.runner, each.drafter, each.prompt_ids, each.rule))
    made[2].fails = whose, round_, late
    events = list(decode_batch(made, 4))
    failures = [(index, type(event.error)) for index, event in events if isinstance(event, Failed)]
    assert failures == [(2, Broken)]
    found = rounds_of(iter([each for each in events if not isinstance(each[1], Failed)]))
    assert len(found[2]) == round_, "it failed in the round that was meant"
    assert found == {**alone, 2: alone[2][:round_]}
    assert all(not runner.length for runner in (*toy.runners, *toy.draft_runners))


def rounds_of(events: Iterator[tuple[int, Event | Failed]]) -> dict[int, list[Any]]:
    """The tokens that were drafted and emitted in the rounds of each."""
    by_index: defaultdict[int, list[Any]] = defaultdict(list)
    for index, event in events:
        if isinstance(event, Round):
            by_index[index].append([[token.id for token in tokens] for tokens in (event.drafted, event.emitted)])
        else:
            assert isinstance(event, Prefilled | Finished)
            assert by_index[index] is not None
    return dict(by_index)


@pytest.mark.parametrize("round_", [0, 3])
def test_a_drafter_that_fails_ends_its_own_text_only(toy: EngineToy, round_: int) -> None:
    """By an error that is not one of ours, in a round of its own; alone it is the same error."""
    texts, settings = prompts(4), [Settings(k=2, max_new_tokens=9, temperature=0.8, seed=seed) for seed in range(4)]
    alone = texts_of(decode_batch(decodings(toy, "none", settings, texts), 1))

    def made() -> list[Decoding]:
        calls = iter(range(99))

        def propose(context: Sequence[int], k: int) -> list[int]:
            if next(calls) == round_:
                raise Broken
            return [1] * k

        every = list(decodings(toy, "ngram", settings, texts))
        every[1].drafter = Scripted(propose)
        return every

    events = list(decode_batch(made(), 4))
    assert [(index, type(event.error)) for index, event in events if isinstance(event, Failed)] == [(1, Broken)]
    assert sum(index == 1 and isinstance(event, Round) for index, event in events) == round_
    others = texts_of(iter([each for each in events if each[0] != 1]))
    assert others == {index: alone[index] for index in (0, 2, 3)}
    assert all(not runner.length for runner in toy.runners)
    with pytest.raises(Broken):
        list(batch.decode(made()[1]))


def test_what_stops_the_work_stops_all_of_it(toy: EngineToy) -> None:
    def propose(context: Sequence[int], k: int) -> list[int]:
        raise Stopped

    made = list(decodings(toy, "none", [Settings(k=2, max_new_tokens=9)] * 3, prompts(3)))
    made[1].drafter = Scripted(propose)
    with pytest.raises(Stopped):
        list(decode_batch(made, 3))
    assert all(not runner.length for runner in toy.runners)


def test_a_stop_comes_before_the_next_pass(toy: EngineToy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the events: nobody has to look between two of them."""
    passes, read = list[int](), batch.read_together
    monkeypatch.setattr(batch, "read_together", lambda wanted: passes.append(len(wanted)) or read(wanted))  # type: ignore[func-returns-value]
    made = list(decodings(toy, "none", [Settings(k=2, max_new_tokens=9)] * 3, prompts(3)))
    with attended(lambda: len(passes) == 4), pytest.raises(Stopped):
        list(decode_batch(made, 3))
    assert len(passes) == 4
    assert all(not runner.length for runner in toy.runners)


@pytest.mark.parametrize("toy", ENGINES, indirect=True)
def test_closing_it_frees_every_cache(toy: EngineToy) -> None:
    going = decode_batch(decodings(toy, "draft-model", [Settings(max_new_tokens=30)] * 3, prompts(3)), 3)
    for _ in range(12):
        next(going)
    assert any(runner.length for runner in toy.runners)
    going.close()
    assert not any(runner.length for runner in (*toy.runners, *toy.draft_runners))


# Where an engine reads one sequence, the passes follow each other. -----------------------------------------------


def test_runners_that_read_alone_take_turns() -> None:
    table = random_table(1)
    texts = [[*PROMPT, last] for last in range(3)]
    settings = [Settings(k=2, max_new_tokens=8, seed=seed) for seed in range(3)]
    made = [
        Decoding(TableRunner(table), Scripted(lambda _, k: [0] * k), text, rule_for(each))
        for text, each in zip(texts, settings, strict=True)
    ]
    alone = {
        index: plain_text(TableRunner(table), text, each)
        for index, (text, each) in enumerate(zip(texts, settings, strict=True))
    }
    assert texts_of(decode_batch(made, 3)) == alone


def test_the_seconds_of_all_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only passes and drafts move: a pass of 10 seconds is shared by rows."""
    now, counting = 0.0, Together()

    class Slow(Together):
        def read(self, passes: Sequence[Pass]) -> list[Tensor]:
            nonlocal now
            now += 10
            return counting.read(passes)

    def propose(context: Sequence[int], k: int) -> list[int]:
        nonlocal now
        now += 3
        return [0] * k

    set_clock(monkeypatch, lambda: SimpleNamespace(perf_counter=lambda: now))
    runners = [TableRunner(random_table(1)) for _ in range(3)]
    slow = Slow()
    for runner in runners:
        runner.together = slow
    asked = [Settings(k=k, max_new_tokens=9) for k in (1, 1, 3)]
    made = [
        Decoding(runner, Scripted(propose), PROMPT, rule_for(each)) for runner, each in zip(runners, asked, strict=True)
    ]
    seconds, first = 0.0, dict[int, Round]()
    for index, event in decode_batch(made, 3):
        assert not isinstance(event, Failed)
        now += 1000  # what is shown is not counted
        seconds += 0 if isinstance(event, Finished) else event.seconds
        if isinstance(event, Round):
            first.setdefault(index, event)
    assert [first[index].draft_seconds for index in range(3)] == [3, 3, 3]
    assert [first[index].verify_seconds for index in range(3)] == [10 * rows / 8 for rows in (2, 2, 4)]
    assert seconds == pytest.approx(now % 1000)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_the_default_preset_are_those_of_the_target_alone(temperature: float) -> None:
    """Eight prompts at once, with every drafter of the preset, at a fixed K and with K = auto."""
    loaded = load(find_preset(DEFAULT_PRESET))
    try:
        asked = read_prompts(PRESETS / "prompts" / "domains.jsonl")[:8]
        texts = [loaded.encode(prompt.prompt) for prompt in asked]
        settings = Settings(k=3, temperature=temperature, max_new_tokens=48, seed=11)
        alone = texts_of(batch_of(loaded, "none", texts, settings, 1))
        assert len(alone) == 8
        for drafter in drafters_of(loaded, ""):
            for k in (3, AUTO):
                assert texts_of(batch_of(loaded, drafter, texts, replace(settings, k=k), 8)) == alone, (drafter, k)
    finally:
        loaded.release()


def test_prompts_of_a_batch_have_seeds_that_follow_each_other(loaded: Loaded) -> None:
    texts, settings = (
        [loaded.encode("the cat sat")] * 3,
        Settings(k=2, temperature=1.0, max_new_tokens=9, seed=MAX_SEED - 1),
    )
    seeds = [event.seed for _, event in batch_of(loaded, "ngram", texts, settings, 3) if isinstance(event, Prefilled)]
    assert sorted(seeds, key=lambda seed: seed or 0) == [0, MAX_SEED - 1, MAX_SEED]
    with refuses(BadInput, "drafter 'magic'."):
        list(batch_of(loaded, "magic", texts, settings, 3))
    with refuses(BadInput, "auto match"):
        list(batch_of(loaded, "ngram", texts, replace(settings, k=AUTO, rule=REJECTION), 3))


def test_memory_without_room_for_all_readers_is_refused(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [loaded.encode("the cat sat")] * 16
    needed = loaded.token_bytes["target"] * (len(texts[0]) + 8)
    monkeypatch.setattr(sizes, "free_memory", lambda: 15 * needed)
    with refuses(BadInput, f"keys 16 {len(texts[0]) + 8}"):
        list(batch_of(loaded, "none", texts, Settings(k=0, max_new_tokens=8), 16))
    assert texts_of(batch_of(loaded, "none", texts, Settings(k=0, max_new_tokens=8), 15))

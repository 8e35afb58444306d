"""The captured decode path, with a stand-in for the capture: what is replayed must be a function of its buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from specdemo.decoding import batch
from specdemo.decoding.batch import read_together
from specdemo.decoding.events import Event, Finished, Round
from specdemo.decoding.loop import Decoding
from specdemo.drafters.heads.backends import TorchBackend
from specdemo.drafters.heads.block import Block
from specdemo.drafters.heads.eagle import EaglePasses
from specdemo.drafters.heads.medusa import Medusa
from specdemo.drafters.heads.peagle import PEagle
from specdemo.drafters.heads.ready import LayeredPasses
from specdemo.drafters.names import DRAFTERS
from specdemo.engines import linear, ops
from specdemo.engines.choose import ops_for, runner_maker
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.capture import CapturedFunctions, CudaCapture, Work
from specdemo.engines.gpu.graph import LONGEST, CapturedPasses, Graphs, Outcome
from specdemo.engines.passes import alone, answered
from specdemo.engines.rows import MOST_ROWS, branches_of
from specdemo.engines.runner import Pass, Runner
from specdemo.racing.race import rule_for
from specdemo.settings import MATCH, MAX_NODES, REJECTION, Settings
from specdemo.studies.rules import BROKEN, make_rule
from specdemo.system.hardware import cpu_multiplies_bf16
from specdemo.system.progress import attended
from tests.harness import engines
from tests.harness.classes import Eagle, FusedModel, GraphRunner, HeadDrafter
from tests.harness.doubles import MODEL_VOCAB, ids_of
from tests.harness.engines import ARCHITECTURES, ByAddress, cpu_engine, recorded, tiny_model
from tests.harness.models import run_by
from tests.harness.texts import decode
from tests.harness.toys import ModelToy

from ..sentences import gist, tells

pytestmark = pytest.mark.usefixtures("little_room")

PROMPT = [5, 9, 2, 33, 17, 60, 0, 8]
FORBIDDEN = {"_local_scalar_dense", "nonzero", "masked_select", "item", "_unique2", "repeat_interleave"}


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ROOM", 128)


def by_transformers(model: PreTrainedModel, capacity: int) -> Runner:
    return runner_maker(model, eager=True)[1](capacity)


def graphs_of(architecture: str, seed: int = 0) -> Graphs:
    return Graphs(FusedModel.of(tiny_model(architecture, seed)), ops, recorded, 1)


class OperationRecorder(TorchDispatchMode):
    """Every operation with the shapes it reads and writes, and the memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.outside: set[int] = set()
        self._made: dict[int, Tensor] = {}  # kept, so that no memory is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in FORBIDDEN, name
        answer = function(*args, **(kwargs or {}))
        reads, writes = (torch.utils._pytree.tree_leaves(part) for part in ((args, kwargs), answer))
        shapes = [[tuple(x.shape) if isinstance(x, Tensor) else x for x in part] for part in (reads, writes)]
        self.seen.append((name, *shapes))
        self.outside |= {_memory(x) for x in reads if isinstance(x, Tensor) and _memory(x) not in self._made}
        self._made |= {_memory(x): x for x in writes if isinstance(x, Tensor) and _memory(x) not in self.outside}
        return answer


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "smollm3"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [1, 6])
def test_a_captured_pass_is_the_same_operations_on_the_same_memory_at_every_length(
    architecture: str, count: int, tree: bool
) -> None:
    graphs = graphs_of(architecture)
    passes = graphs.acquire(1).passes
    watched = []
    for length in (0, 3, 110):
        passes.where[0].fill_(length)
        passes.branches.copy_(branches_of([-1, 0, *[length % 2] * 4][:count]))
        with OperationRecorder() as watch:
            passes.run(count, passes.branches if tree else passes.chain)
        watched.append((watch.seen, watch.outside))
    assert watched[0] == watched[1] == watched[2]
    assert {_memory(passes.ids), _memory(passes.where), _memory(passes.cache.keys)} <= watched[0][1]
    assert (_memory(passes.branches) in watched[0][1]) == tree


class CountedWaits(TorchDispatchMode):
    """Counts what would make a host wait for its GPU: reading a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in FORBIDDEN
        return function(*args, **(kwargs or {}))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if "ngram" not in name and name != "lookahead"])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(k=3, temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=24),
        Settings(k=3, max_new_tokens=24),
        Settings(k=3, temperature=0.8, rule=REJECTION, max_new_tokens=24),
    ],
    ids=["sampled", "greedy", "rejection"],
)
def test_a_round_reads_numbers_off_the_device_once(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = graph_toy()
    lists = 0

    def counted(tensor: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return plain_tolist(tensor)

    plain_tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    events = run(toy, name, settings)
    next(events)
    next(events)  # in the first round a draft model reads the prompt
    rounds = 0
    for _ in range(4):
        lists = 0
        with CountedWaits() as waits:
            rounds += isinstance(next(events), Round)
        assert lists + waits.count == 1
    assert rounds == 4


@pytest.mark.parametrize("rows", [2, 17, 18, 27, MOST_ROWS])
def test_a_tree_is_read_and_a_path_kept_without_a_wait_for_the_device(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the end of the cache, where there is no place for the rows that fill a captured pass up."""
    runner, expected = GraphRunner(graphs_of("llama"), 128), by_transformers(tiny_model("llama"), 128)
    prompt, ids = [place % 50 for place in range(128 - rows)], [7 * row % MODEL_VOCAB for row in range(rows)]
    parents = [max(-1, row - 1 - row % 2) for row in range(rows)]
    for one in (runner, expected):
        one.capture_hidden_states([1])
        one.prefill(prompt)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    with CountedWaits() as waits:
        logits = runner.forward(ids, parents)
        runner.keep([row for row in range(rows - 1) if row % 2 == 0])
    assert waits.count == 0
    monkeypatch.undo()
    torch.testing.assert_close(logits, expected.forward(ids, parents))
    expected.keep([row for row in range(rows - 1) if row % 2 == 0])
    torch.testing.assert_close(runner.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(runner.forward([4]), expected.forward([4]))


def test_what_cannot_be_captured_in_a_round_runs_as_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    state = torch.zeros(2)

    def broken(work: Work) -> Work:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    def grow(x: Tensor) -> Tensor:
        state.add_(1)
        return x + state

    functions, messages = CapturedFunctions(broken, state), list[str]()
    with attended(lambda: False, messages.append):
        assert [float(functions("key", grow)(torch.ones(2))[0]) for _ in range(2)] == [2, 3]
    assert [tells(words, "capturing round") for words in messages] == [True]
    assert [tells(record.message, "round captured:") for record in caplog.records] == [True]


class Launches(TorchDispatchMode):
    """Counts what a host launches on its GPU: operations that are no views, outside of captured work."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        view = any(out.alias_info is not None and not out.alias_info.is_write for out in function._schema.returns)
        self.count += not (view or name in ("detach", "detach_", "_pin_memory") or name.startswith("empty"))
        return function(*args, **(kwargs or {}))


def captured_apart(work: Work) -> Work:
    """Replays whose operations are not counted."""
    replay = engines.recorded(work)

    def apart() -> Any:
        with _disable_current_modes():
            return replay()

    return apart


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["draft-model", "eagle", "block", "medusa", "p-eagle"])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (Settings(top_k=20, top_p=0.9, temperature=0.8), 16),
        (Settings(), 14),
        (Settings(temperature=0.8, rule=REJECTION), 16),
    ],
    ids=str,
)
def test_a_round_launches_a_few_operations_outside_its_captured_work(
    name: str, settings: Settings, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model's round has them for its own first pass too. Of these most are copies into fixed buffers."""
    monkeypatch.setitem(globals(), "recorded", captured_apart)
    events, counts = run(graph_toy(), name, replace(settings, k=3, max_new_tokens=60)), []
    for event in islice(events, 6):  # captures come in the first rounds
        assert not isinstance(event, Finished)
    for _ in range(6):
        with Launches() as seen:
            event = next(events)
        if isinstance(event, Round) and len(event.drafted) == 3:
            counts.append(seen.count)
    assert 0 < min(counts) <= max(counts) <= most


class GraphToy(ModelToy):
    """Tiny random transformers that run as on a GPU."""

    graphs: Graphs
    draft_graphs: Graphs

    def target_runner(self, capacity: int) -> Any:
        return GraphRunner(self.graphs, capacity)

    def draft_runner(self, capacity: int) -> Any:
        return GraphRunner(self.draft_graphs, capacity)


def graph_toy() -> GraphToy:
    toy = GraphToy(model=tiny_model("llama"), draft_model=tiny_model("llama", 1))
    toy.graphs, toy.draft_graphs = graphs_of("llama"), graphs_of("llama", seed=1)
    Eagle.capture(toy.heads["eagle"], recorded)
    Block.capture(toy.heads["block"], recorded)
    Medusa.capture(toy.heads["medusa"], recorded)
    PEagle.capture(toy.heads["p-eagle"], recorded)
    return toy


def run(toy: ModelToy, name: str, settings: Settings) -> Iterator[Event]:
    runner = toy.target_runner(len(PROMPT) + settings.max_new_tokens + (MAX_NODES if settings.tree else 0))
    return decode(runner, toy.drafter(name, runner, settings), PROMPT, settings)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(Settings(k=4), id="greedy"),
        pytest.param(Settings(k=4, temperature=1.0, seed=3), id="sampled"),
        pytest.param(Settings(k=4, temperature=1.0, seed=3, rule=REJECTION), id="rejection"),
    ],
)
def test_a_draft_model_drafts_on_captured_passes_what_it_drafts_on_others(settings: Settings) -> None:
    others = ModelToy(model=tiny_model("llama"), draft_model=tiny_model("llama", 1))
    ours, theirs = (
        [
            event.drafted
            for event in run(toy, "draft-model", replace(settings, max_new_tokens=50))
            if isinstance(event, Round)
        ]
        for toy in (graph_toy(), others)
    )
    assert [[token.id for token in drafted] for drafted in ours] == [
        [token.id for token in drafted] for drafted in theirs
    ]
    assert max(map(len, ours)) == 4


@pytest.mark.parametrize("name", ["draft-model", "eagle"])
def test_the_probabilities_of_a_captured_draft_are_those_of_its_tokens(name: str) -> None:
    """What the page shows of a round: those of the round, not of the capture."""
    toy, settings = graph_toy(), Settings(k=3, temperature=1.0, max_new_tokens=40)
    runner = toy.target_runner(80)
    rule, rounds = rule_for(settings), 0
    drafter = toy.drafter(name, runner, settings, rule)
    for event in batch.decode(Decoding(runner, drafter, PROMPT, rule, distributions=True)):
        if isinstance(event, Round) and event.drafted:
            assert event.distributions is not None
            for token, (probs, ids) in zip(event.drafted, event.distributions.draft_probs, strict=True):
                column = token.id if ids is None else ids.tolist().index(token.id)
                assert token.q == pytest.approx(float(probs[0, column]))
            rounds += 1
    assert rounds > 4


def test_what_is_captured_serves_rules_of_the_same_kind_only() -> None:
    settings = Settings(temperature=0.8, top_k=9, top_p=0.9, rule=REJECTION)
    kind = rule_for(settings).kind
    assert rule_for(replace(settings, seed=5, k=2, max_new_tokens=9, ahead=2)).kind == kind
    other: list[dict[str, Any]] = [{"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}, {"rule": MATCH}]
    assert all(rule_for(replace(settings, **one)).kind != kind for one in other)
    assert all(make_rule(settings, broken).kind != kind for broken in BROKEN)


HEADS: list[type[HeadDrafter]] = [Eagle, Block, Medusa, PEagle]
SAMPLED = Settings(k=4, temperature=1.0, max_new_tokens=90, seed=3)
BEYOND = list(range(60))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        pytest.param(SAMPLED, BEYOND, id="chain beyond what is captured"),
        pytest.param(replace(SAMPLED, k=12, tree=True), PROMPT, id="tree"),
        pytest.param(SAMPLED, PROMPT, id="chain", marks=pytest.mark.slow),
        pytest.param(replace(SAMPLED, k=12, tree=True), BEYOND, id="tree beyond", marks=pytest.mark.slow),
    ],
)
def test_captured_heads_draft_what_they_draft_uncaptured(
    kind: type[HeadDrafter], settings: Settings, prompt: list[int]
) -> None:
    drafted = []
    for captured in (False, True):
        toy = ModelToy(model=tiny_model("llama"), window=40)  # the text grows longer
        if captured:
            kind.capture(toy.heads[kind.name], recorded)
        runner = toy.target_runner(len(prompt) + settings.max_new_tokens + MAX_NODES)
        events = list(decode(runner, toy.drafter(kind.name, runner, settings), prompt, settings))
        tests = [token for event in events if isinstance(event, Round) for token in event.drafted]
        drafted.append(([token.id for token in tests], [token.q for token in tests]))
    (ids, q), (other_ids, other_q) = drafted
    assert len(ids) > 90
    assert ids == other_ids
    assert q == pytest.approx(other_q, rel=1e-4)


@pytest.mark.parametrize("kind", [Eagle, Block, PEagle])  # a medusa head keeps nothing of a text
def test_a_heads_slot_goes_from_run_to_run_and_nothing_of_a_run_stays(kind: type[HeadDrafter]) -> None:
    toy = graph_toy()
    slots = toy.heads[kind.name].slots
    assert slots is not None
    (slot,) = slots._free
    assert isinstance(slot, LayeredPasses)
    assert isinstance(slot.backend, TorchBackend)
    entries = slot.backend.entries
    texts = []
    for _ in range(2):
        events = run(toy, kind.name, SAMPLED)
        texts.append([next(events) for _ in range(6)])
        assert slots._free == []
        assert entries.abs().max() > 0
        entries[:, :, :, 100:] = torch.nan
        events.close()  # type: ignore[attr-defined]
        assert slots._free == [slot]
    assert ids_of(texts[0]) == ids_of(texts[1])


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_captured_passes_are_the_same_operations_on_the_same_memory_at_every_length(
    kind: type[HeadDrafter],
) -> None:
    ready = ModelToy(model=tiny_model("llama")).heads[kind.name]
    passes = kind.passes(ready, 128, captured=True)
    (states, tokens), rows = passes.states_and_tokens()[-3], branches_of([-1, 0, 0])[1:3]
    watched = []
    for length in (0, 3, 110):
        passes.seek(length)
        rows.copy_(branches_of([-1, 0, length % 2])[1:3])
        with torch.inference_mode(), OperationRecorder() as watch:
            next_logits = passes.begin(states, tokens, 4)
            alone(answered(next_logits([])))
            alone(answered(next_logits([tokens[:1]])))
            if isinstance(passes, EaglePasses):
                passes.branch(passes.output.expand(2, -1), tokens[:2], rows)
        watched.append((watch.seen, watch.outside))
    assert watched[0] == watched[1] == watched[2]
    kept = [cast(TorchBackend, passes.backend).entries] if isinstance(passes, LayeredPasses) else []
    assert {_memory(tensor) for tensor in (states, tokens, *kept)} <= watched[0][1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_cannot_be_captured_drafts_all_the_same(
    kind: type[HeadDrafter], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    toy = ModelToy(model=tiny_model("llama"))
    kind.capture(toy.heads[kind.name], broken)
    assert "not permitted" in caplog.text
    for settings in (SAMPLED, replace(SAMPLED, k=12, tree=True)):
        events = list(run(toy, kind.name, settings))
        assert any(event.drafted for event in events if isinstance(event, Round))


def test_runs_that_take_turns_keep_to_their_own_slots() -> None:
    toy, settings = graph_toy(), Settings(k=3, max_new_tokens=30)
    plain = list(run(toy, "none", replace(settings, k=0)))
    lanes = [run(toy, "none", replace(settings, k=0)), run(toy, "draft-model", settings)]
    events: list[list[Event]] = [[], []]
    for _ in range(len(plain) + 1):
        for place, lane in enumerate(lanes):
            events[place] += [event] if (event := next(lane, None)) else []
    assert ids_of(events[0]) == ids_of(events[1]) == ids_of(plain)
    assert len(toy.graphs._free) == 2
    assert len(toy.draft_graphs._free) == 1


def test_a_slot_is_used_again_and_large_ones_of_another_size_make_place() -> None:
    graphs = graphs_of("gpt2")
    first = graphs._free[0]
    assert first.capacity == 128
    runner = GraphRunner(graphs, 100)
    runner.prefill(PROMPT)
    assert graphs._free == []
    runner.prefill(PROMPT)  # without a release
    runner.release()
    runner.release()
    assert graphs._free == [first]
    for context, capacity in ((200, 256), (256, 256), (700, 768), (1100, 1280)):
        large = GraphRunner(graphs, context)
        large.prefill(PROMPT)
        large.release()
        assert [slot.capacity for slot in graphs._free] == [128, capacity]


def test_larger_slots_are_captured_before_their_runs_begin_and_only_as_many_as_there_are_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = Graphs(FusedModel.of(tiny_model("llama")), ops, recorded, 2)
    runners = [GraphRunner(graphs, context) for context in (100, 200, 150)]
    assert [slot.capacity for slot in graphs._free] == [128]
    never = GraphRunner(graphs, 150)
    del never  # without having begun
    assert [slot.capacity for slot in graphs._free] == [128, 256]
    runners += [GraphRunner(graphs, 180)]
    assert [slot.capacity for slot in graphs._free] == [128]

    def late(work: Callable[[], Outcome]) -> Callable[[], Outcome]:
        raise AssertionError("captured while a clock runs")

    monkeypatch.setattr(graphs, "capture", late)
    for runner in runners:
        runner.prefill(PROMPT)
        runner.release()
    assert [slot.capacity for slot in graphs._free] == [128, 128, 256, 256, 256]


def test_a_run_that_is_dropped_gives_its_slots_back() -> None:
    """Those of the target, of a draft model and of a head, whether it has begun or not."""
    toy = graph_toy()
    eagle = toy.heads["eagle"].slots
    assert eagle is not None
    pools: dict[str, Any] = {"target": toy.graphs, "draft-model": toy.draft_graphs, "eagle": eagle}
    for name in ("eagle", "draft-model"):
        for begun in (False, True):
            events = run(toy, name, Settings(k=3, max_new_tokens=9))
            if begun:
                next(events)
            assert {held for held, pool in pools.items() if not pool._free} == {"target", name}
            del events
            assert all(len(pool._free) == 1 for pool in pools.values())


def test_a_capture_before_a_run_is_told() -> None:
    """By a fake capture: one of a slot that there is already takes no time and gives no message."""
    graphs, messages = graphs_of("llama"), list[str]()
    with attended(lambda: False, messages.append):
        GraphRunner(graphs, 100)
        assert messages == []
        large = GraphRunner(graphs, 200)
        assert [tells(words, "capturing passes length") for words in messages] == [True]
        large.prefill(PROMPT)
        large.release()
        GraphRunner(graphs, 250)
    assert len(messages) == 1


def test_a_pass_is_run_once_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            steps.append(f"begin in {pool}")

        def capture_end(self) -> None:
            steps.append("end")

        def replay(self) -> None:
            steps.append("replay")

    fake = SimpleNamespace(
        Stream=lambda device: "stream",
        graph_pool_handle=partial(next, (f"pool {number}" for number in count(1))),
        CUDAGraph=Graph,
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )
    monkeypatch.setattr(graph.torch, "cuda", fake)

    def work() -> Outcome:
        steps.append("work")
        return torch.ones(1), []

    replay = CudaCapture(torch.device("cpu"))(work)
    assert steps == ["work", "begin in pool 1", "work", "end"]
    outcome = replay()
    assert replay() is outcome
    assert steps[4:] == ["replay", "replay"]

    def short_of_memory() -> Outcome:
        if steps[-1:] and steps[-1].startswith("begin"):
            raise MemoryError
        return work()

    def broken(self: Graph) -> None:
        steps.append("end")
        raise RuntimeError("the capture is broken")

    for end in (Graph.capture_end, broken):
        monkeypatch.setattr(Graph, "capture_end", end)
        steps.clear()
        capture = CudaCapture(torch.device("cpu"))
        broken_in = capture.pool
        with pytest.raises(MemoryError):  # the cause, whatever comes of it
            capture(short_of_memory)
        assert steps[-1] == "end"
        with suppress(RuntimeError):
            capture(work)
        begun = [step for step in steps if step.startswith("begin")]
        assert begun == [f"begin in {broken_in}", f"begin in {capture.pool}"]
        assert broken_in != capture.pool


def test_only_a_gpu_captures() -> None:
    model = tiny_model("llama")
    assert runner_maker(model)[0] == cpu_engine(model.dtype)
    assert runner_maker(model, eager=True)[0] == "eager"
    assert ops_for(64, model.device) is ops


# Several texts in one pass ---------------------------------------------------------------------------------


@dataclass
class Several:
    """Runners that read together, beside eager ones that read each text alone."""

    make: Callable[[int], Any]
    model: Any

    def begun(self, starts: Sequence[int], context: int = 128) -> list[tuple[Any, Runner]]:
        """Pairs of runners that have read prompts of these lengths."""
        both = [(self.make(context), by_transformers(self.model, context)) for _ in starts]
        for start, pair in zip(starts, both, strict=True):
            for runner in pair:
                runner.capture_hidden_states([2, 0])
                runner.prefill([(7 * place + start) % MODEL_VOCAB for place in range(start)])
        return both

    def check(self, both: Sequence[tuple[Any, Runner]], texts: Sequence[Any], parents: Any = None) -> None:
        """Read these tokens after each text, in one pass; of the first text they may be a tree."""
        branches = [parents, *[None] * (len(texts) - 1)]
        found = read_together([Pass(ours, *each) for (ours, _), *each in zip(both, texts, branches, strict=True)])
        for (ours, eager), ids, logits, branch in zip(both, texts, found, branches, strict=True):
            torch.testing.assert_close(logits, eager.forward(ids, branch), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.hidden_states, eager.hidden_states, atol=1e-4, rtol=1e-4)
            assert ours.length == eager.length


@pytest.fixture(params=["by address"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Several:
    """Of captured passes, with few captured lengths, since each text has a slot; or of the fused path for a model."""
    engine, _, architecture = request.param.partition(" of ")
    model = tiny_model(architecture or "qwen3")
    monkeypatch.setattr(linear, "library_for", lambda dtype: None)
    if engine == "fused":
        return Several(run_by("fused", model, monkeypatch), model)
    fused = FusedModel.of(model)
    monkeypatch.setattr(graph, "LENGTHS", (LONGEST, 3, 2, 1))
    monkeypatch.setattr(graph, "TREES", (9,))
    monkeypatch.setattr(graph, "TOGETHER", (2, 4, 8, 16, 32, 48))
    functions: Any = ByAddress if engine == "by address" else ops
    return Several(partial(GraphRunner, Graphs(fused, functions, recorded, 1)), model)


on_every_engine = pytest.mark.parametrize("several", ["by address", "uncaptured", "fused of llama"], indirect=True)


TEXTS = [
    pytest.param([3, 8], [[4], [7, 7, 1]], id="2 texts"),
    pytest.param([8, 4, 20], [torch.tensor([5, 6]), [3], list(range(LONGEST))], id="a draft on the device"),
    pytest.param([5, 9], [list(range(40)), [3]], id="a piece of a prompt"),
    pytest.param(range(2, 34, 2), [[place, 9, 5][: 1 + place % 3] for place in range(16)], id="16 texts"),
    pytest.param([4, 9, 5, 7], [list(range(LONGEST))] * 4, id="more rows than are captured"),
    pytest.param([4, 9], [list(range(49)), [5]], id="more rows than are captured of one text"),
    pytest.param([127, 4, 126], [[3], [2, 1], [5, 6]], id="the end of a cache"),
]


@pytest.mark.parametrize("several", ["by address", "fused of llama"], indirect=True)
@pytest.mark.parametrize(("starts", "texts"), TEXTS)
def test_several_texts_are_read_in_one_pass(several: Several, starts: Sequence[int], texts: Sequence[Any]) -> None:
    """Each gets what it gets alone, and goes on alone and with others, in another order and from where it was cut."""
    both = several.begun(starts)
    several.check(both, texts)
    for place, (ours, eager) in enumerate(both):
        ours.rollback(ours.length - 2 - place % 2)
        eager.rollback(eager.length - 2 - place % 2)
    several.check(both[1:], [[6]] * len(both[1:]))
    several.check(both[1:][::-1], [[1]] * len(both[1:]))


@on_every_engine
def test_a_tree_and_a_text_of_another_capacity_are_read_beside_others(several: Several) -> None:
    both = [*several.begun([6, 4, 3])[::-1], *several.begun([5], 200)]
    several.check(both, [[4, 8, 9, 3], [2, 6], [1], [1, 2]], [-1, 0, 0, 1])
    for runner in both[0]:
        runner.keep([0, 2])
    several.check(both, [[1], [2], [3], [4]])


def test_passes_over_several_texts_are_captured_when_they_are_first_needed_and_told(several: Several) -> None:
    """Once for a number of rows and a capacity, whichever texts there are; and the longest bounds them."""
    messages, both = list[str](), several.begun([3, 4, 5])
    with attended(lambda: False, messages.append):
        several.check(both[:2], [[1], [2]])
        several.check(both[1:], [[1], [2]])
        assert [*map(gist, messages)] == ["capturing 2"]
        several.check(both, [[1], [2], [3]])
        assert [*map(gist, messages[1:])] == ["capturing 4"]
        for ours, _ in both:
            ours.release()
        both = several.begun([9, 7, 8])
        several.check(both, [[1], [2], [3]])
        assert len(messages) == 2
        several.check(both, [list(range(LONGEST))] * 3)  # of which two fit into a pass
    assert [*map(gist, messages[2:])] == ["capturing 48"]


def test_slots_of_a_capacity_share_the_passes_that_the_kernels_can_read_them_by(several: Several) -> None:
    """With torch's operations each slot has its own."""
    captured = 0

    def counted(work: Work) -> Work:
        nonlocal captured
        captured += 1
        return recorded(work)

    for functions, times in ((cast(Any, ByAddress), 1), (ops, 2)):
        captured = 0
        graphs = Graphs(FusedModel.of(several.model), functions, counted, 2)
        assert captured == times * (len(graph.LENGTHS) + len(graph.TREES))
        lanes = Several(partial(GraphRunner, graphs), several.model)
        both = lanes.begun([3, 5])
        for ids in ([1], [2, 3], [7]):  # in turn
            for pair in both:
                lanes.check([pair], [ids])


@on_every_engine
@torch.inference_mode()
def test_numbers_that_are_none_stay_with_their_text(several: Several) -> None:
    both = several.begun([3, 6, 9])
    both[1][0]._cache.values[:, :, :2].fill_(torch.nan)
    first, second, third = read_together([Pass(ours, [1, 2]) for ours, _ in both])
    assert second.isnan().all()
    for logits, (_, eager) in ((first, both[0]), (third, both[2])):
        torch.testing.assert_close(logits, eager.forward([1, 2]), atol=1e-4, rtol=1e-4)


def test_a_slot_holds_a_pass_for_every_draft() -> None:
    passes = CapturedPasses(FusedModel.of(tiny_model("llama")), ops, recorded, 64)
    assert sorted(passes._passes) == list(range(1, LONGEST + 1))
    assert sorted(passes._trees) == [9, LONGEST, 24, 32, 48, MOST_ROWS]
    assert passes.ids.max() < MODEL_VOCAB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_exact_where_kernels_read_them(dtype: str) -> None:
    """By a stand-in: what the kernels say of themselves `test_kernels` checks."""
    if dtype == "bfloat16" and not cpu_multiplies_bf16():
        pytest.skip("models in bfloat16 compute in float32 here")
    model, kernels = (
        copy.deepcopy(tiny_model("llama")).to(getattr(torch, dtype)),
        SimpleNamespace(**{**vars(ops), "EXACT": True}),
    )
    for functions, rows in ((kernels, (LONGEST, MOST_ROWS)), (ops, (0, 0))):
        runner = GraphRunner(Graphs(FusedModel.of(model), cast(Any, functions), lambda work: work, 1), 64)
        assert (runner.exact_rows, runner.exact_tree_rows) == rows


def test_the_first_layers_are_captured_once() -> None:
    """The first runner is asked for before a race is timed; those after it capture nothing."""
    whole = GraphRunner(graphs_of("llama"), 20)
    first: Any = whole.first_layers(2, 20)
    assert cast(Any, whole.first_layers(2, 20))._graphs is first._graphs is not whole._graphs
    assert cast(Any, whole.first_layers(1, 20))._graphs is not first._graphs
    assert first.exact_rows == whole.exact_rows
    first.prefill(PROMPT)
    assert first._slot not in first._graphs._free

"""Captured passes against transformers' forward, and captured heads against heads that are not captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.drafters.heads.eagle import EaglePasses
from specdemo.drafters.heads.ready import HeadPasses
from specdemo.engines import ops
from specdemo.engines.gpu.capture import capture_for
from specdemo.engines.gpu.graph import LONGEST, Graphs
from specdemo.engines.passes import alone, answered
from specdemo.engines.rows import MOST_ROWS
from specdemo.engines.runner import Runner
from specdemo.errors import BadInput
from specdemo.settings import MAX_K
from tests.harness.classes import EagerRunner, FusedModel, GraphRunner
from tools.bench.models import WITH_HEADS, captured, random_head

from .helpers import EXACT, SWITCH, VOCAB, graphs_of, relative_error, tiny

LENGTHS = (1, 3, 6, MAX_K + 1)  # of passes
CONTEXT = 150  # tokens
TREES = [-1, 0, 0, 0, 1, 1, 2, 5, 5], [-1, *[0] * 19]  # the parents of the rows of a pass
FAMILIES = "llama", "qwen2", "qwen3", "gpt2", "mistral", "phi3", "glm", "gemma"
OTHERS = "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "glm4", "ministral", "ministral3"
WITH_EXPERTS = "mixtral", "qwen3_moe", "olmoe", "flex_olmo"
NO_WORSE = 1.25  # the largest ratio of our error to that of transformers' forward
HEAD_READS = ((60, 0), (1, 60), (5, 61), (17, 550), (1, 567))  # states to read, and entries in the cache before them
HEAD_CONTEXT = 700  # tokens, more than a head's window


@pytest.mark.parametrize(
    ("family", "functions"),
    [*((family, None) for family in (*FAMILIES, *OTHERS, *WITH_EXPERTS)), ("qwen3", ops), ("mixtral", ops)],
    ids=str,
)
@pytest.mark.usefixtures("nothing_packed")
def test_logits_are_those_of_transformers(device: torch.device, family: str, functions: ModuleType | None) -> None:
    """Passes of several lengths in float32, made of these functions or of the fastest."""
    model = tiny(family, device)
    ours = GraphRunner(captured(FusedModel.of(model), functions), 2 * CONTEXT)
    error = max(relative_error(*rows) for rows in passes([ours, EagerRunner(model, 2 * CONTEXT)]))
    assert error < EXACT, f"relative error {error:.0e}"


def test_a_run_has_the_angles_of_its_longest_text(device: torch.device) -> None:
    """LongRoPE's, on both sides of the switch, of runs beside each other in slots of the same captured model."""
    model = tiny("longrope", device)
    check_angles(model, graphs_of(model))


def check_angles(model: PreTrainedModel, graphs: Graphs) -> None:
    ids, logits = torch.randint(VOCAB, (SWITCH,)).tolist(), list[Tensor]()
    capacities = SWITCH, SWITCH + 1
    ours, theirs = [GraphRunner(graphs, each) for each in capacities], [EagerRunner(model, each) for each in capacities]
    for runner, truth in zip(ours, theirs, strict=True):
        for one in (runner, truth):
            one.prefill(ids[:-7])
    for begin, end in ((-7, -6), (-6, -1)):
        for runner, truth in zip(ours, theirs, strict=True):
            logits.append(runner.forward(ids[begin:end]))
            assert relative_error(logits[-1], truth.forward(ids[begin:end])) < EXACT
    assert relative_error(logits[0], logits[1]) > 100 * EXACT, "the angles make no difference"
    with pytest.raises(BadInput):
        ours[0].forward([1], [-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", [*OTHERS, *WITH_EXPERTS])
def test_a_row_is_the_same_bits_in_every_pass(cuda: torch.device, family: str, dtype: torch.dtype) -> None:
    graphs = graphs_of(tiny(family, cuda).to(dtype))
    if graphs.ops is ops:
        pytest.skip("passes are made of torch's own operations here")
    trees = [*TREES, [(row - 1) // 2 if row else -1 for row in range(MOST_ROWS)]]
    assert passes_unlike_alone(GraphRunner(graphs, CONTEXT), range(2, LONGEST + 1), trees) == []


def passes_unlike_alone(runner: Runner, counts: Iterable[int], trees: Iterable[list[int]]) -> list[object]:
    """The passes of which a row is not bit for bit what it is alone: by the rows of a chain, or by a tree's parents."""
    runner.prefill(torch.randint(runner.vocab_size, (20,)).tolist())
    differing = list[object]()
    chains = [list(range(-1, count - 1)) for count in counts]
    for parents in [*chains, *trees]:
        chain = parents in chains
        ids = torch.randint(runner.vocab_size, (len(parents),)).tolist()
        together = runner.forward(ids, None if chain else parents)
        runner.keep([])
        for leaf in [row for row in range(len(ids)) if row not in parents]:
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = torch.cat([runner.forward([ids[row]]) for row in path])
            runner.rollback(runner.length - len(path))
            if not torch.equal(together[path], alone):
                differing.append(len(parents) if chain else parents)
    runner.release()
    return differing


def test_bfloat16_is_as_near_to_float32_as_transformers_own(device: torch.device) -> None:
    exact = tiny("qwen3", device)
    rough = type(exact)(exact.config).eval().to(device)
    rough.load_state_dict(exact.state_dict())
    rough = rough.bfloat16()
    capacity = 2 * CONTEXT
    runners = EagerRunner(exact, capacity), GraphRunner(graphs_of(rough), capacity), EagerRunner(rough, capacity)
    errors = [(relative_error(ours, truth), relative_error(theirs, truth)) for truth, ours, theirs in passes(runners)]
    ours, theirs = (sum(error) / len(errors) for error in zip(*errors, strict=True))
    assert ours < NO_WORSE * theirs, f"relative error {ours:.1e}, that of transformers {theirs:.1e}"


def passes(runners: Sequence[Runner]) -> Iterator[list[Tensor]]:
    """The logits of the same passes by each runner, trees where all can read them. After each pass half of its tokens
    are taken back, or of a tree all but a path."""
    vocab = runners[0].vocab_size
    prompt = torch.randint(vocab, (CONTEXT,)).tolist()
    yield [runner.prefill(prompt) for runner in runners]
    for count in LENGTHS:
        ids = torch.randint(vocab, (count,)).tolist()
        yield [runner.forward(ids) for runner in runners]
        for runner in runners:
            runner.rollback(runner.length - count // 2)
    for parents in [] if any(runner.cannot_branch for runner in runners) else TREES:
        ids, path = torch.randint(vocab, (len(parents),)).tolist(), [0, 3]
        yield [runner.forward(ids, parents) for runner in runners]
        for runner in runners:
            runner.keep(path)
        yield [runner.forward(ids[-1:]) for runner in runners]
    for runner in runners:
        runner.release()


@pytest.mark.parametrize("name", WITH_HEADS)
@torch.inference_mode()
def test_captured_heads_draft_the_same(device: torch.device, name: str) -> None:
    """The logits of drafts after the same random states, in float32."""
    kind = WITH_HEADS[name]
    ready = random_head(kind, tiny("qwen3", device), capture_for(device))
    assert ready.slots, "nothing is captured"
    shape = ready.head.shape
    states = torch.randn(HEAD_CONTEXT, len(shape.state_layers) * shape.hidden, device=device)
    tokens = torch.randint(shape.vocab_size, (HEAD_CONTEXT,), device=device)
    both = ready.slots.acquire(HEAD_CONTEXT), kind.passes(ready, 2 * HEAD_CONTEXT)
    errors = []
    for count, live in HEAD_READS:
        read = slice(live, live + count)
        for one in both:
            one.seek(live)
        errors.append(relative_error(*(drafted(one, states[read], tokens[read], tokens[-3:]) for one in both)))
    ready.slots.release(both[0])
    assert max(errors) < EXACT, f"relative errors of {len(errors)} drafts: {errors}"


def drafted(head: HeadPasses, states: Tensor, tokens: Tensor, drawn: Tensor) -> Tensor:
    """The logits of a draft of the tokens `drawn`, and of trees of them where a head reads those, [T, V']."""
    next_logits = head.begin(states, tokens, len(drawn))
    ids = drawn.split(1)
    found = [alone(answered(next_logits(ids[:position]))).clone() for position in range(len(ids))]
    if isinstance(head, EaglePasses):
        head.seek(HEAD_CONTEXT - 200)
        x = head.output.expand(2, -1)
        for parents in ([-1, -1], [-1, -1, 0, 1]):
            x, logits = head.branch(x, drawn[:2], head.backend.rows(parents, 2))
            found.append(logits.clone())
    return torch.cat(found)

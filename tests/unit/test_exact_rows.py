"""The logits of a token are the same bits whatever its pass reads beside it, up to as many rows as the engine says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.decoding.batch import read_together
from specdemo.engines.linear import can_pack
from specdemo.engines.rows import MOST_ROWS
from specdemo.engines.runner import ANY_ROWS, Pass
from specdemo.system.hardware import QUANTIZED, cpu_attends_alike, cpu_multiplies_bf16
from tests.harness.models import FAMILIES, VOCAB, model_of, run_by
from tests.harness.trees import TREES, check

CONTEXT = 600
IDS: list[int] = torch.randint(3, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
TYPES = "float32", "float16", "bfloat16", "bfloat16 avx2", "bfloat16 avx512", *QUANTIZED
WAYS = [*(("native", dtype) for dtype in TYPES), ("fused", "bfloat16"), ("fused", "float32"), ("graph", "float32")]
WAYS += [("eager", "float32")]
CASES = [
    (name, *way)
    for name in FAMILIES
    for way in WAYS
    if not (name.startswith("gpt2") and way[1].startswith("int"))  # whose products are stored the other way round
]


def exact_rows(name: str, engine: str, dtype: str) -> tuple[int, int]:
    """Up to how many rows of a chain and of a tree an engine is exact."""
    if engine == "native":
        return ANY_ROWS, MOST_ROWS
    packed = cpu_multiplies_bf16() and cpu_attends_alike() and can_pack(torch.bfloat16)
    return (9 if dtype == "bfloat16" and packed and not name.startswith("gemma2") else 0), 0


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("name", "engine", "dtype"), CASES, ids=map(" by ".join, CASES))
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_pass(
    name: str, engine: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in chains and trees, beside other texts, and at the ends of what is read at once and of windows."""
    stored, _, level = dtype.partition(" ")
    if level:
        request.getfixturevalue("run_as")(level)
    model = model_of(name, max_position_embeddings=CONTEXT)
    make = run_by(engine, model, monkeypatch, QUANTIZED.get(stored) or getattr(torch, stored))
    runner: Any = make(CONTEXT)
    assert (runner.exact_rows, runner.exact_tree_rows) == exact_rows(name, engine, dtype)
    if not runner.exact_rows:
        return
    runner.capture_hidden_states([2, 0])
    most = min(runner.exact_rows, 40)
    span = most if engine == "native" else 2 * most

    def passes(start: int, rows: int) -> tuple[Tensor, Tensor]:
        """Of the tokens after a prompt, so many at a time."""
        runner.prefill(IDS[:start])
        logits, states = [], []
        for begin in range(start, start + span, rows):
            logits.append(runner.forward(IDS[begin : min(begin + rows, start + span)]))
            states.append(runner.hidden_states)
        return torch.cat(logits), torch.cat(states)

    for start in (1, 24, 185, 505):
        alone = passes(start, 1)
        for rows in (2, 3, 7, most):
            assert all(map(torch.equal, passes(start, rows), alone)), (start, rows)
        if engine == "native":
            assert torch.equal(runner.prefill(IDS[: start + span]), alone[0][-1:]), start
    drafts = [IDS[100 : 100 + rows] for rows in (1, 3, min(most, 17))]
    several, apart = [list[Any](make(CONTEXT) for _ in drafts) for _ in range(2)]
    for place, both in enumerate(zip(several, apart, strict=True)):
        for one in both:
            one.capture_hidden_states([1])
            one.prefill(IDS[: 3 + 10 * place])
    tree = [None, [-1, 0, 0] if runner.exact_tree_rows else None, None]
    together = read_together([Pass(*each) for each in zip(several, drafts, tree, strict=True)])
    for logits, one, other, draft, parents in zip(together, several, apart, drafts, tree, strict=True):
        assert torch.equal(logits, other.forward(draft, parents))
        assert torch.equal(one.hidden_states, other.hidden_states)
    if runner.exact_tree_rows:
        for place, parents in enumerate(TREES):  # after texts that end inside of a pair and of a block of keys
            check(lambda: make(160), IDS[: (1, 12, 31, 32, 63)[place % 5]], parents, torch.equal)

"""What the Triton kernels compute, by Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")
DRAWN = """
import torch
from specdemo.decoding.noise import draw, key_of, signed
from specdemo.engines.gpu import noise
from specdemo.engines.gpu.noise import race

noise.BLOCK, noise.BLOCKS = 64, 4  # larger blocks are searched number by number here
for size, spread in ((5, 3.0), (600, 0.0), (1_100, 3.0), (700, 12.0)):
    p = (spread * torch.randn(3, size, generator=torch.Generator().manual_seed(size))).softmax(-1)
    p[0] = torch.where(p[0] < 0.9 * p[0].mean(), 0, p[0])
    keys = [key_of(9, position) for position in range(3)]
    tokens, margins = race(p, torch.tensor(list(map(signed, keys))))
    expected, exact = draw(p.double(), keys)
    assert torch.equal(tokens[exact > 1e-6], expected[exact > 1e-6]), (tokens, expected)
    torch.testing.assert_close(margins, exact, rtol=1e-6, atol=1e-8)
known = torch.arange(2, 900, 5)
q = torch.rand(3, len(known))
assert torch.equal(race(q, torch.tensor([4, 5, 6]), known)[0], draw(q.double(), [4, 5, 6], known)[0])
p = torch.full((4, 900), 1 / 900)
p[0], p[1, 899], p[2, 3] = 0, float("nan"), float("inf")
assert race(p, torch.tensor([1, 2, 3, 4]))[0].ge(0).tolist() == [False, False, False, True]
"""
GROWN = """
import torch
from specdemo.drafters.captured_trees import Growth
from specdemo.engines.gpu import trees
from tests.harness.growth import grown

trees.COMPARED = 2**14  # fewer steps, which are slow here
numbers = torch.Generator().manual_seed(2)
for nodes, width, rows, stop, spread in (
    (16, 8, 64, 0.0, 2.0), (63, 8, 20, 0.0, 0.3), (5, 8, 64, 0.02, 3.0), (40, 64, 999, 0.0, 1.0)
):
    growth, limits = Growth.of_text(63, torch.device("cpu")), torch.tensor([nodes, stop], dtype=torch.float64)
    for depth in range(5):
        logits = (spread * torch.randn(len(growth.places), 30, generator=numbers)).mul(4).round() / 4  # some tie
        shares, ids = logits[:1 if depth == 2 else None].softmax(-1).topk(7)
        if depth == 4:
            shares[0, 0] = torch.nan
        expected = grown(growth, ids, shares, limits, width, rows)
        fields = growth.table, growth.places, growth.real, growth.read, growth.depth
        found = trees.grown(*fields, ids, shares, limits, width, rows)
        for name, ours, theirs in zip(Growth._fields, found, expected, strict=True):
            assert ours.dtype == theirs.dtype, name
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=f"{name} {depth} {nodes}")
        growth = expected
    assert growth.table[1, 0].isnan() or not growth.real.any()
"""
PASSED = """
import torch
from tools.bench import models
from specdemo.engines.gpu import graph, kernels, products
from specdemo.engines.linear import Linear
from tests.gpu import test_kernels, test_passes
torch.manual_seed(0)
graph.ROOM, test_passes.CONTEXT, test_passes.LENGTHS = 128, 20, (3,)  # what is read in a pass and more
test_passes.TREES = test_passes.TREES[:1]
models.ops_for, test_kernels.READS = lambda *asked: kernels, ((1, 0), (3, 126))
products.NARROW, test_kernels.WIDE = 600, 650  # larger parts begin earlier: programs run one after the other here
kernels.MOST_CHUNKS, test_kernels.LONG = 2, 512
cpu = torch.device("cpu")
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)  # as on a GPU
"""
LIKE_LLAMA = """
for dtype in (torch.float32, torch.float16):
    test_kernels.test_operations_agree_with_float64(cpu, dtype, (6, 2, 16))
for family in ("qwen3", "gpt2"):
    test_passes.test_logits_are_those_of_transformers(cpu, family, None)
"""
EXPERTS = """
from specdemo.engines.layout import FusedModel
from tools.bench.models import captured
test_kernels.check_choices(kernels, cpu)
for family in test_passes.WITH_EXPERTS:
    test_passes.test_logits_are_those_of_transformers(cpu, family, None)
model = test_passes.tiny("longrope", cpu)
test_passes.check_angles(model, captured(FusedModel.of(model), kernels))
"""
OTHERS = """
test_kernels.test_operations_agree_with_float64(cpu, torch.float32, (2, 1, 256))
for family in ("mistral", *test_passes.OTHERS):
    test_passes.test_logits_are_those_of_transformers(cpu, family, None)
"""
# Triton 3.6 does not know that NumPy 2.4 makes no number of an array with one.
WITH_NUMPY = """
from triton.runtime import interpreter

as_triton_does = interpreter._patch_lang_tensor

def patched(tensor, scope):
    as_triton_does(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patched
"""
# As a GPU does it: with a row the same bits whatever rows are beside it. NumPy does not promise that.
BY_ROWS = """
import numpy

numpy.matmul = lambda a, b, **more: numpy.einsum("...ij,...jk->...ik", a, b, **more)
"""
FEW_TREES = """
import torch
from specdemo.engines.gpu import kernels
from tests.gpu.test_kernels import TREES, leaves_unlike_their_chains

for name, live in [("one token", 127), ("two of the same", 125)]:
    few = kernels, 2, 1, 16, TREES[name], live, torch.device("cpu")
    for window in (0, 3):
        assert leaves_unlike_their_chains(*few, torch.float32, most=1, window=window) == 0, (name, window)
"""
ALL_TREES = """
import torch
from specdemo.engines.gpu import kernels
from tests.gpu.test_kernels import TREES, leaves_unlike_their_chains

torch.manual_seed(0)
single, half = torch.float32, torch.float16
for dtype, shape, live in ((single, (3, 1, 64), 63), (half, (2, 2, 32), 128)):
    for name, parents in TREES.items():
        asked = kernels, *shape, parents, live, torch.device("cpu"), dtype
        for look in ({}, {"window": 66, "cap": 2.0}):
            assert leaves_unlike_their_chains(*asked, most=1, **look) == 0, (name, shape, live, look)
"""
# With the tile of 32 rows, which a large product of 16 bits has from 17 rows on, and the columns of a wide one.
PRODUCTS = """
import torch
from specdemo.engines.gpu import kernels, products
from tests.gpu.test_kernels import products_unlike_alone

torch.manual_seed(0)
products.LARGE, products.NARROW = 2000, 60
launch, tiles = products._product, set()
class Noted:
    def __getitem__(self, programs):
        def launched(*given, **constants):
            tiles.add((constants["ROWS"], constants["COLUMNS"]))
            return launch[programs](*given, **constants)
        return launched
products._product = Noted()
for outer in (40, 70):
    assert products_unlike_alone(kernels, outer, 96, (2, 17), torch.device("cpu"), torch.bfloat16) == [], outer
assert tiles == {(16, 8), (32, 8), (16, 32), (32, 32)}
"""
PASSED_TREES = """
import torch
from tools.bench.models import captured
from specdemo.engines.gpu import graph, kernels
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.engines.linear import Linear
from tests.gpu.helpers import tiny
from tests.unit.test_rows import TEXT, check

graph.ROOM = 128
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)
for family in ("qwen3", "gemma2"):
    graphs = captured(FusedModel.of(tiny(family, torch.device("cpu"))), kernels)
    assert GraphRunner(graphs, 96).exact_tree_rows == 64
    check(lambda: GraphRunner(graphs, 96), TEXT, [-1, 0, 0, 2, 2], torch.equal)
"""
WITH_EXPERTS = """
import torch
from tools.bench.models import captured
from specdemo.engines.gpu import graph, kernels
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.engines.linear import Linear
from specdemo.decoding.batch import read_together
from specdemo.engines.runner import Pass
from tests.gpu.helpers import tiny
from tests.gpu.test_passes import passes_unlike_alone

torch.manual_seed(0)
graph.ROOM = 128
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)
graphs = captured(FusedModel.of(tiny("qwen3_moe", torch.device("cpu"), 64)).first_layers(1), kernels)
runner, other = GraphRunner(graphs, 96), GraphRunner(graphs, 96)
assert (runner.exact_rows, runner.exact_tree_rows) == (17, 64)
assert passes_unlike_alone(runner, [17], [[-1, 0, 0]]) == []
for one in (runner, other):
    one.prefill([3, 1, 4])
together = read_together([Pass(other, [5]), Pass(runner, [9, 2])])[1]
runner.rollback(3)
assert torch.equal(runner.forward([9, 2]), together)
"""
SEVERAL = """
import torch
from tools.bench.models import captured
from specdemo.engines.gpu import graph, kernels
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.engines.linear import Linear
from specdemo.decoding.batch import read_together
from specdemo.engines.runner import Pass
from tests.gpu.helpers import tiny
from tests.gpu.test_kernels import chains_unlike_alone

torch.manual_seed(0)
cpu, graph.ROOM = torch.device("cpu"), 128
for shape in ((2, 2, 16), (6, 2, 32)):
    for chains in ([(0, 1), (127, 1)], [(5, 3), (126, 2), (60, 7)]):
        for look in ({}, {"window": 5, "cap": 2.0}):
            assert chains_unlike_alone(kernels, *shape, chains, cpu, torch.float32, **look) == 0, (shape, chains, look)
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)
for family in ("qwen3", "gemma3_text"):
    graphs = captured(FusedModel.of(tiny(family, cpu)), kernels)
    runners, texts = [GraphRunner(graphs, 96) for _ in range(3)], [[7], [3, 4], [5, 6, 8]]
    for start, runner in enumerate(runners):
        runner.prefill([9, 2, 4, 1, 7, 3, 8][: 1 + 3 * start] * 2)
    together = read_together([Pass(runner, ids) for runner, ids in zip(runners, texts, strict=True)])
    for runner, ids, logits in zip(runners, texts, together, strict=True):
        runner.rollback(runner.length - len(ids))
        assert torch.equal(runner.forward(ids), logits), ids
"""


# Each kernel of a pass broken in turn, in a trial of it. Nothing is tried before the text, which takes as long again.
BROKEN = """
import torch
from tests.harness.models import config_of
from specdemo.engines import ops, self_test
from specdemo.engines.gpu import graph, kernels
from specdemo.engines.linear import Linear
from specdemo.models import trial

graph.ROOM, self_test.LENGTH, cpu = 128, 40, torch.device("cpu")
self_test.CHAINS, self_test.TREES, self_test.DRAFTED = (2, 9), (8,), 2
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)
trial.ops_for = lambda *_: kernels
config = config_of(family, num_hidden_layers=1)
assert trial.outcome("kernels", config, torch.float32, cpu) == ""
for name in names:
    right = getattr(kernels, name)
    def wrong(*given, **named):
        found = right(*given, **named)
        return (found[0].flip(-1), found[1]) if name == "choose" else found.flip(-1)
    setattr(kernels, name, wrong)
    (part,) = (part for part, of_part in ops.PARTS.items() if name in of_part)
    assert "logits" in trial.outcome(part, config, torch.float32, cpu), name
    setattr(kernels, name, right)
"""
OF_EXPERTS_BROKEN = 'family, names = "qwen3_moe", ("choose", "chosen_product")'
OF_A_LAYER_BROKEN = 'family, names = "granite", ("product", "plus", "write_kv", "attend")'


EXACT = {"few trees": FEW_TREES, "all trees": ALL_TREES, "pass over a tree": PASSED_TREES, "several texts": SEVERAL}
EXACT |= {"trial of experts": OF_EXPERTS_BROKEN + BROKEN, "trial of a layer": OF_A_LAYER_BROKEN + BROKEN}
EXACT |= {"experts and rows": WITH_EXPERTS, "rows of a product": PRODUCTS}
SCRIPTS = {"draw": DRAWN, "depth of a tree": GROWN, "pass": WITH_NUMPY + PASSED + LIKE_LLAMA}
SCRIPTS |= {"families": WITH_NUMPY + PASSED + OTHERS, "experts": WITH_NUMPY + PASSED + EXPERTS}
SCRIPTS |= {name: WITH_NUMPY + BY_ROWS + script for name, script in EXACT.items()}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_kernels_compute_what_torch_does_and_trees_to_the_last_bit_as_chains(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr

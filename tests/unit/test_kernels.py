"""The Triton kernels without a GPU: what they compute, by Triton's interpreter, and whether they compile for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")

TRITON = version("triton") if find_spec("triton") else ""
NUMBERS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes
SHARED = 99 * 1024  # bytes that a program of consumer GPUs can have; others have more
PROCESSOR, RESERVED = 228 * 1024, 1024  # bytes that the programs of a processor of an H100 share, and of these each has
DRAWN = """
import torch
from specdemo.decoding.noise import draw, key_of, signed
from specdemo.engines.gpu.noise import race

for size, spread in ((5, 3.0), (700, 0.0), (20_000, 3.0), (9_000, 12.0)):
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
PASSED = """
import torch
from specdemo.bench import gpu_models
from specdemo.engines.gpu import graph, kernels
from specdemo.engines.linear import Linear
from tests.gpu import test_kernels, test_passes
torch.manual_seed(0)
graph.ROOM, test_passes.CONTEXT, test_passes.LENGTHS = 128, 20, (3,)  # what is read in a pass and more
gpu_models.ops_for, test_kernels.READS = lambda model: kernels, ((1, 0), (3, 126))
kernels.MANY, test_kernels.WIDE = 600, 650  # larger parts begin earlier: programs run one after the other here
kernels.MOST_CHUNKS, test_kernels.LONG = 2, 512
cpu = torch.device("cpu")
Linear.of = lambda weight, bias, parts=1: Linear.unpacked(weight, bias)  # as on a GPU
for dtype in (torch.float32, torch.float16):
    test_kernels.test_operations_agree_with_float64(cpu, dtype, (6, 2, 16))
for family in ("qwen3", "gpt2"):
    test_passes.test_logits_are_those_of_transformers(cpu, family, None)
"""


@pytest.mark.parametrize("script", [DRAWN, pytest.param(PASSED, marks=pytest.mark.slow)], ids=["draw", "pass"])
def test_the_kernels_draw_the_same_tokens_and_make_a_pass_as_torch_does(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


PRODUCT = {"INNER": 576, "NORMED": True, "BIASED": True, "ADDED": True, "ROWS": 16, "COLUMNS": 32, "PARTS": 4}
ATTEND = {"HEADS": 9, "GROUP": 3, "WIDTH": 64, "CHUNK": 128, "ROWS": 16}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "floats", "integers", "constants"),
    [
        ("_product", "eps", ["count", "outer"], PRODUCT),
        ("_swiglu", "", [], {"INNER": 1536, "STEP": 1024}),
        ("_write_kv", "eps", ["capacity"], {"HEADS": 9, "KV_HEADS": 3, "HALF": 32, "NORMED": True, "ROTATED": True}),
        ("_attend", "scale", ["count", "capacity"], ATTEND),
        ("_combine", "", ["count"], {"HEADS": 9, "WIDTH": 64, "CHUNK": 128, "CHUNKS": 8}),
    ],
)
def test_the_kernels_compile_for_a_gpu(
    name: str, floats: str, integers: list[str], constants: dict[str, Any], number: str, capability: int
) -> None:
    from specdemo.engines.gpu import kernels

    size, options = NUMBERS[number], {"_product": {"num_stages": kernels.WIDE_STAGES}, "_write_kv": {"num_warps": 1}}
    sized = {"_product": {"STEP": kernels.STEP_BYTES // size}, "_attend": {"KEYS": kernels.KEY_BYTES // size}}
    types = dict.fromkeys(integers, "i32") | {floats: "fp32", "start": "*i64"}
    if name in ("_attend", "_combine"):  # what programs leave for each other
        types |= dict.fromkeys(("found", "peak", "weight"), "*fp32")
    constants = {**constants, **sized.get(name, {})}
    compiled = built(getattr(kernels, name), types, number, constants, capability, options.get(name))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED


@pytest.mark.skipif(not TRITON.startswith("3.6."), reason="other versions may have other ways to lay tiles out")
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("normed", [True, False])
def test_products_read_as_fast_as_memory_allows(normed: bool, columns: int) -> None:
    """What Triton makes of them, which small changes of the source undo: 16 bytes are copied at a time, and laid out
    so that no reads of shared memory wait for each other; a processor holds three programs."""
    from specdemo.engines.gpu import kernels

    constants = {**PRODUCT, "INNER": 2560, "NORMED": normed, "BIASED": False, "COLUMNS": columns, "STEP": 256}
    types = {"count": "i32", "outer": "i32", "eps": "fp32"}
    stages = kernels.STAGES if columns == kernels.COLUMNS else kernels.WIDE_STAGES
    compiled = built(kernels._product, types, "bf16", constants, 90, {"num_stages": stages})
    tiles = re.findall(r"swizzled_shared<{(.*), order = \[\d, \d, 0\]}>", compiled.asm["ttgir"])
    assert tiles == ["vec = 8, perPhase = 1, maxPhase = 8"] * 2  # rows and weights
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c.\.shared.*?, (0x\w+)", compiled.asm["ptx"])]
    step = 256 * (16 + columns) * 2  # bytes; each of 128 threads copies its share before the loop and in it
    assert copies.count(16) == step // (128 * 16) * stages
    assert 3 * (compiled.metadata.shared + RESERVED) <= PROCESSOR


def built(
    kernel: Any, types: dict[str, str], number: str, constants: dict[str, Any], capability: int, options: Any
) -> Any:
    """A kernel as it is launched: buffers lie, and the columns of a product count, in multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(constants, "constexpr") | types
    signature = {argument: types.get(argument, f"*{number}") for argument in kernel.arg_names}
    even = [(place,) for place, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name == "outer"]
    attributes = {place: [["tt.divisibility", 16]] for place in even}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_noise_compiles_for_a_gpu(capability: int) -> None:
    from specdemo.engines.gpu import noise

    types = {"keys": "*i64", "ids": "*i64", "times": "*fp64", "tokens": "*i64", "size": "i32", "parts": "i32"}
    constants = {"OWN_IDS": True, "BLOCK": noise.BLOCK, "BLOCKS": noise.BLOCKS}
    assert built(noise._race, types, "fp32", constants, capability, None).asm["cubin"]

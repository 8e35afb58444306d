"""The Triton kernels without a GPU: what they compute, by Triton's interpreter, and whether they compile for one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")

NUMBERS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes
SHARED = 99 * 1024  # bytes that a program of consumer GPUs can have; others have more
INTERPRETED = """
import torch
from specdemo.lab import gpu_checks
from specdemo.runners import graph, kernels
from specdemo.runners.layout import Product
torch.manual_seed(0)
graph.ROOM = gpu_checks.CONTEXT = 128
gpu_checks.HEADS, gpu_checks.READS = ((6, 2, 16),), ((1, 0), (3, 126))
gpu_checks.ops_for, gpu_checks.LENGTHS = lambda model: kernels, (3,)
cpu, Product.of = torch.device("cpu"), Product.unpacked  # as on a GPU
found = [gpu_checks.kernels_agree(kernels, cpu, dtype) for dtype in (torch.float32, torch.float16)]
found += [gpu_checks.logits_agree(family, cpu) for family in ("qwen3", "gpt2")]
assert all(check.passed for check in found), found
"""


def test_the_kernels_agree_with_torch_and_make_a_pass() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


PRODUCT = {"INNER": 576, "NORMED": True, "BIASED": True, "ADDED": True, "ROWS": 16, "COLUMNS": 32}
ATTEND = {"HEADS": 9, "GROUP": 3, "WIDTH": 64, "CHUNK": 128, "ROWS": 16}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "floats", "integers", "constants"),
    [
        ("_product", "eps", ["count", "outer"], PRODUCT),
        ("_swiglu", "", [], {"INNER": 1536, "STEP": 1024}),
        ("_place", "eps", ["capacity"], {"HEADS": 9, "KV_HEADS": 3, "HALF": 32, "NORMED": True, "ROTATED": True}),
        ("_attend", "scale", ["count", "capacity"], ATTEND),
        ("_combine", "", ["count"], {"HEADS": 9, "WIDTH": 64, "CHUNK": 128, "CHUNKS": 8}),
    ],
)
def test_the_kernels_compile_for_a_gpu(
    name: str, floats: str, integers: list[str], constants: dict[str, Any], number: str, capability: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specdemo.runners import kernels

    size, options = NUMBERS[number], {"_product": {"num_stages": kernels.STAGES}, "_place": {"num_warps": 1}}
    sized = {"_product": {"STEP": kernels.STEP_BYTES // size}, "_attend": {"KEYS": kernels.KEY_BYTES // size}}
    constants = {**constants, **sized.get(name, {})}
    types = dict.fromkeys(constants, "constexpr") | dict.fromkeys(integers, "i32") | {floats: "fp32"}
    types["start"] = "*i64"
    if name in ("_attend", "_combine"):  # what programs leave for each other
        types |= dict.fromkeys(("found", "peak", "weight"), "*fp32")
    kernel = getattr(kernels, name)
    signature = {argument: types.get(argument, f"*{number}") for argument in kernel.arg_names}
    source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options.get(name))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED

"""What Triton makes of the kernels for GPUs of every kind, which needs none."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from specdemo.engines.linear import Linear, Norm
from tools.bench.compiled import CAPABILITIES, META, TYPES, WIDTHS, calls, compiling

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")

TRITON = version("triton") if find_spec("triton") else ""
KNOWN = TRITON.startswith("3.6.")  # other versions may lay tiles out, and spill, in other ways
CALLS = tuple(calls("bf16")) if TRITON else ()
PROCESSOR, RESERVED = 228 * 1024, 1024  # bytes that the programs of a processor of an H100 share, and of these each has
A_LITTLE, SPILLED = 16, {("_product", "fp32", 100): 320}  # bytes that are spilled of many kernels, and of some


@pytest.mark.sampled(71)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", TYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_fits_into_99_kb_and_spills_no_more_than_is_known(capability: int, number: str, call: str) -> None:
    """Triton raises where a kernel takes more shared memory than the smallest GPUs have."""
    with compiling(capability) as made:
        calls(number)[call]()
    assert made
    for kernel in made if KNOWN else ():
        assert kernel.spilled <= SPILLED.get((kernel.name, number, capability), A_LITTLE), kernel


@pytest.mark.parametrize(("number", "width", "length"), [("bf16", 128, ", long"), ("fp32", 128, "")])
def test_attention_that_once_took_more_than_such_a_gpu_has(number: str, width: int, length: str) -> None:
    with compiling(89) as made:
        calls(number)[f"attend {width}{length}"]()
    assert [kernel.name for kernel in made] == ["_attend", "_combine"]
    assert not KNOWN or made[0].spilled <= A_LITTLE


def test_every_width_of_heads_is_compiled() -> None:
    from specdemo.engines.gpu import kernels

    assert tuple(filter(kernels.usable, range(1, 1025))) == WIDTHS


@pytest.mark.skipif(not KNOWN, reason="other versions may have other ways to lay tiles out")
@pytest.mark.parametrize("columns", [8, 32])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("chosen", [True, False])
def test_products_read_as_fast_as_memory_allows(chosen: bool, normed: bool, columns: int) -> None:
    """What Triton makes of them, which small changes of the source undo: 16 bytes are copied at a time, and laid out
    so that no reads of shared memory wait for each other; a processor holds three programs."""
    from specdemo.engines.gpu import products

    stages = {products.FEW: products.FEW_STAGES, products.MANY: products.MANY_STAGES}[columns]
    outer, inner = products.NARROW if columns == products.FEW else 2 * products.NARROW, 2560

    def of(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=META)

    norm = Norm(of(inner), None, 1e-6) if normed else None
    with compiling(90) as made:
        if chosen:
            products.chosen_product(of(4, outer, inner), of(1, inner), of(1, 1).int(), norm)
        else:
            products.product(Linear.unpacked(of(outer, inner), None), of(1, inner), norm, of(1, outer))
    (kernel,) = made
    tiles = re.findall(r"swizzled_shared<{(.*), order = \[\d, \d, 0\]}>", kernel.texts["ttgir"].read_text())
    assert tiles == ["vec = 8, perPhase = 1, maxPhase = 8"] * 2  # rows and weights
    copies = re.findall(r"cp\.async\.c.\.shared.*?, (0x\w+)", kernel.texts["ptx"].read_text())
    step = 256 * (16 + columns) * 2  # bytes; each of 128 threads copies its share before the loop and in it
    assert [int(size, 16) for size in copies].count(16) == step // (128 * 16) * stages
    assert 3 * (kernel.shared + RESERVED) <= PROCESSOR

"""What Triton makes of the kernels for GPUs of every kind, which needs none: each is compiled, and none is run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm import tqdm

from specdemo.engines.layout import Router
from specdemo.engines.linear import Linear, Norm
from specdemo.engines.rows import MOST_ROWS, WIDTH

from .rows import Row

META = torch.device("meta")
CAPABILITIES = 80, 86, 89, 90, 100, 120
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = 16, 32, 64, 128, 256  # of heads
SHARED = 99 * 1024  # bytes that a program of consumer GPUs can have; others have more
# Of few columns and of many, and so large that a program computes 32 rows: columns, numbers of a sum, rows.
PRODUCTS = (2048, 576, 1), (2560, 2560, 1), (2048, 8192, 17), (9728, 2560, 17)


class Kernel(NamedTuple):
    """A compiled kernel: what a program takes of shared memory and of the stack, where registers are spilled to, in
    bytes, the registers of a thread, and the texts of the compiler by their suffix."""

    name: str
    shared: int
    registers: int
    spilled: int
    texts: dict[str, Path]


class Driver:
    """In place of Triton's for a GPU: nothing is launched. Kernels are compiled anew for each, or read from a cache."""

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> Driver:
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": SHARED}

    def load_binary(self, *given: object) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024  # a module, a function, registers, spills, and the most threads

    def launcher_cls(self, *given: object) -> Callable[..., None]:
        return lambda *given: None


@contextmanager
def compiling(capability: int) -> Iterator[list[Kernel]]:
    """Kernels that are launched inside are compiled for a GPU of this compute capability, and noted.

    Raises `OutOfResources` of Triton where one takes more than `SHARED`.
    """
    from triton import knobs
    from triton.runtime import driver

    from specdemo.engines.gpu import products

    made: list[Kernel] = []

    def note(module: object, function: object, name: str, files: dict[str, str], key: str) -> None:
        texts = {Path(file).suffix[1:]: Path(file) for file in files.values()}
        usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", texts["cubin"]], text=True)
        registers, spilled = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "STACK"))
        made.append(Kernel(name, json.loads(texts["json"].read_text())["shared"], registers, spilled, texts))

    early = (capability // 10, capability % 10) >= products.EARLY_FROM
    knobs.runtime.kernel_load_start_hook.add(note)
    try:
        with (
            patch.object(driver, "_active", Driver(capability)),
            patch.object(products, "starts_early", lambda _: early),
        ):
            yield made
    finally:
        knobs.runtime.kernel_load_start_hook.remove(note)


def calls(number: str) -> dict[str, Callable[[], object]]:
    """Calls that launch every kernel with the largest of what it takes: all tiles, widths of heads, short contexts,
    whose chunks are one step of `_attend`, and long ones."""
    from specdemo.engines.gpu import kernels, noise, routing, trees

    def of(*shape: int, dtype: torch.dtype = TYPES[number]) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    def norm(size: int) -> Norm:
        return Norm(of(size), None, 1e-6)

    lines, bytes_ = of(MOST_ROWS, dtype=torch.int64), of(2, MOST_ROWS, dtype=torch.uint8)
    rows, turns = kernels.RowPaths(lines, lines, bytes_, bytes_[0]), (of(1000, 1, 256), of(1000, 1, 256))
    found: dict[str, Callable[[], object]] = {}
    for outer, inner, count in PRODUCTS:
        plain, x = Linear.unpacked(of(outer, inner), None), of(count, inner)
        biased = Linear.unpacked(of(outer, inner), of(outer))
        ways: dict[str, tuple[Any, ...]] = {
            "": (plain, x),
            ", normed, biased": (biased, x, norm(inner)),
            ", biased, added": (biased, x, None, of(count, outer)),
            ", normed, gated": (plain, x, norm(inner), None, True),
        }
        for name, given in ways.items():
            found[f"product {count} x {inner} x {outer}{name}"] = partial(kernels.product, *given)
    for outer in (128, 1536):
        chosen = of(2, 8, dtype=torch.int32)
        experts = partial(kernels.chosen_product, of(5, 2 * outer, 2048), of(2, 2048), chosen, norm(2048), True)
        found[f"experts {outer}, normed, gated"] = experts
        found[f"experts {outer}"] = partial(kernels.chosen_product, of(5, outer, 768), of(2, 8, 768), chosen)
    for width in WIDTHS:
        q, keys, longer = of(2, 16, width), of(2, 1000, width), of(2, 10_000, width)
        qkv, norms, rotation = of(2, 20 * width), (norm(width), norm(width)), (*turns, of(1000, 1, 1))
        found[f"write {width}"] = partial(kernels.write_kv, qkv, norms, rotation, keys, keys, rows)
        found[f"attend {width}"] = partial(kernels.attend, q, keys, keys, rows)
        found[f"attend {width}, long"] = partial(kernels.attend, q, longer, longer, rows)
        found[f"attend {width}, long, in a window"] = partial(kernels.attend, q, longer, longer, rows, None, 512, 50.0)
    together = norm(16 * width), norm(2 * width)
    found[f"write {width}, normed together"] = partial(kernels.write_kv, qkv, together, rotation, keys, keys, rows)
    found["plus 576"] = partial(kernels.plus, of(2, 576), of(2, 576), None, 1.0)
    wide = of(2, 16_384), of(2, 8, 16_384), norm(16_384), 0.3, of(2, 8)
    found["plus 16384, of experts, normed"] = partial(kernels.plus, *wide)
    for experts_ in (8, 512):
        router = Router(Linear.unpacked(of(experts_, 64), None), 8, True)
        found[f"choose of {experts_}"] = partial(routing.choose, router, of(2, experts_))
    found["race"] = partial(noise.prepare, 151_936, META)
    table, limits = of(4, 64, dtype=torch.float64), of(2, dtype=torch.float64)
    for read in (1, WIDTH, 64):
        places = of(read, dtype=torch.int64)
        fields = table, places, places.bool(), of(1, dtype=torch.int64), of(1, dtype=torch.int64)
        ids, shares = of(read, WIDTH, dtype=torch.int64), of(read, WIDTH)
        found[f"tree {read}"] = partial(trees.grown, *fields, ids, shares, limits, max(WIDTH, read), MOST_ROWS)
    return found


def worst() -> list[Row]:
    """The most that each kernel takes by compute capability: KB of shared memory, registers, bytes that are spilled."""
    found: dict[str, dict[int, list[float]]] = {}
    for capability, number in product(CAPABILITIES, TYPES):
        for call in tqdm(calls(number).values(), f"{capability / 10}, {number}"):
            with compiling(capability) as made:
                call()
            for kernel in made:
                most = found.setdefault(kernel.name, {each: [0, 0, 0] for each in CAPABILITIES})
                taken = round(kernel.shared / 1024, 1), kernel.registers, kernel.spilled
                most[capability] = [*map(max, most[capability], taken)]
    return [
        {"kernel": f"`{name}`", **{f"{key / 10}": ", ".join(map(str, taken)) for key, taken in most.items()}}
        for name, most in found.items()
    ]

"""Each operation of a captured pass against torch in float64: Triton's kernels on a GPU, torch's own on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specdemo.engines import ops
from specdemo.engines.choose import OLDEST
from specdemo.engines.gpu import graph
from specdemo.engines.layout import Linear, Norm, Router
from specdemo.engines.rows import MOST_ROWS, branches_of
from tests.harness.classes import FusedModel
from tools.bench import models

from .helpers import EXACT, ROUGH, relative_error, tiny

READS = ((1, 0), (1, 127), (5, 126), (17, 300))  # tokens to read, and tokens in the cache before them
STUMPS = [-1, *(max(0, row - row % 3) for row in range(MOST_ROWS - 1))]  # a path, with two more tokens at each
TREES = {
    "one token": [-1, 0],
    "two of the same": [-1, 0, 0, 0, 1, 1, 2, 5, 5],
    "a chain": list(range(-1, 16)),
    "as wide as can be": [-1, *[0] * (MOST_ROWS - 1)],
    "as many": [(row - 1) // 2 if row else -1 for row in range(MOST_ROWS)],
    "as deep": STUMPS,
}
# How attention sees and scores: windows that end within a step, and within a chunk before.
LOOKS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 140, "cap": 2.0},
    {"scale": 0.05, "cap": 0.5},
    {"window": 1},
]
SHAPES = (8, 2, 64), (6, 6, 32), (9, 3, 16), (4, 2, 256)  # numbers of heads and of key heads, and their width
WIDER = 36, 4, 64  # of a model so wide that its kernels let the next ones start later
# The lines and columns of a weight: of few columns, of many, and so large that a program computes 32 rows of a product.
WEIGHTS = (70, 512), (2100, 576), (9728, 1024)
WIDE, LONG = 8250, 5000  # a product's rows and a cache's capacity for which the kernels take larger tiles


def fastest(device: torch.device) -> ModuleType:
    """The operations that captured passes are made of on this device."""
    return models.ops_for(FusedModel.of(tiny("qwen3", device)).width, device)


@pytest.mark.gpu
def test_passes_are_made_of_tritons_kernels(cuda: torch.device) -> None:
    """Passes of torch's operations are right as well, and slow."""
    if not find_spec("triton") or torch.cuda.get_device_capability(cuda) < OLDEST:
        pytest.skip("the kernels do not run on this machine")
    assert fastest(cuda) is not ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, pytest.param(WIDER, marks=pytest.mark.slow)], ids=str)
def test_operations_agree_with_float64(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """`shape` is the number of heads and of key heads, and their width."""
    functions, errors = fastest(device), dict[str, float]()
    for count, live in READS:
        for name, inputs, more in operation_inputs(*shape, count, live, device, dtype):
            exact = [in_float64(value) for value in inputs]
            ours, truth = call(functions, name, inputs, **more), call(ops, name, exact, **more)
            if name == "write_kv":  # writes keys and values too
                ours, truth = (ours, *inputs[3:5]), (truth, *exact[3:5])
            both = zip(ours, truth, strict=True) if isinstance(ours, tuple) else [(ours, truth)]
            errors[name] = max(errors.get(name, 0.0), *(relative_error(*pair) for pair in both))
    limit = EXACT if dtype == torch.float32 else ROUGH
    assert max(errors.values()) < limit, f"relative errors: {errors}"


def call(functions: ModuleType, name: str, inputs: list[Any], **more: Any) -> Any:
    """Of operations that read which row sees what the inputs end with the start of the rows and their parents."""
    if name not in ("write_kv", "attend"):
        return getattr(functions, name)(*inputs)
    *inputs, start, parents = inputs
    keys, count = inputs[-2], len(inputs[0])
    table = branches_of(range(-1, count - 1) if parents is None else parents).to(start.device)
    where = start.new_zeros(2, max(graph.TOGETHER))
    where[0] = start
    rows = functions.placed(where, table[:count], table[-1, :count], keys.shape[1])
    return getattr(functions, name)(*inputs, rows, **more)


def operation_inputs(
    heads: int, kv_heads: int, width: int, count: int, live: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """The name of an operation, its arguments and those by name, for each operation and each way to call it."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    hidden, outer, capacity, by_head = heads * width, 70, live + count + 77, (heads * width, kv_heads * width)
    start = torch.tensor([live], device=device)
    linear = Linear.unpacked(noise(outer, hidden), None)
    for norm in (None, Norm(noise(hidden), None, 1e-5), Norm(noise(hidden), noise(hidden), 1e-5)):
        yield "product", [linear, noise(count, hidden), norm], {}
    for norm_added, scale in (
        (None, 0.3),
        (Norm(noise(hidden), None, 1e-5), 1.0),
        (Norm(noise(hidden), None, 0.1), 3.0),
    ):
        yield "plus", [noise(count, hidden), noise(count, hidden), norm_added, scale], {}
    for used, normed in ((2, False), (3, True), (5, False)):
        yield "choose", [Router(linear, used, normed), noise(count, 5)], {}
    chosen, shares, plain = torch.randint(5, (count, 3), device=device), noise(count, 3), Norm(noise(hidden), None, 0.1)
    yield "chosen_product", [noise(5, outer, hidden), noise(count, hidden), chosen, plain], {}
    yield "chosen_product", [noise(5, 2 * outer, hidden), noise(count, hidden), chosen, plain, True], {}
    yield "chosen_product", [noise(5, outer, hidden), noise(count, 3, hidden), chosen], {}
    for norm_added in (None, plain):
        yield "plus", [noise(count, hidden), noise(count, 3, hidden), norm_added, 0.3, shares], {}
    biased = Linear.unpacked(noise(outer, hidden), noise(outer))
    yield "product", [biased, noise(count, hidden), None, noise(count, outer)], {}
    yield "product", [Linear.unpacked(noise(2 * outer, hidden), None), noise(count, hidden), norm, None, True], {}
    turns = noise(capacity, 1, width), noise(capacity, 1, width)
    of_heads, of_all = (tuple(Norm(noise(size), None, 1e-6) for size in sizes) for sizes in ((width, width), by_head))
    for head_norms in (None, of_heads, of_all):
        for rotation in (None, turns, (*turns, noise(capacity, 1, 1))):
            qkv, (keys, values) = noise(count, (heads + 2 * kv_heads) * width), noise(2, kv_heads, capacity, width)
            yield "write_kv", [qkv, head_norms, rotation, keys, values, start, None], {}
    keys, values = noise(2, kv_heads, capacity, width)
    keys[:, live + count :] = values[:, live + count :] = 1e4  # entries after the text, which must not be read
    for seen in LOOKS:
        yield "attend", [noise(count, heads, width), keys, values, start, None], seen
    yield "write_kv", [noise(count, (heads + 2 * kv_heads) * width), None, turns, keys, values, start, STUMPS], {}
    for seen in LOOKS:
        yield "attend", [noise(count, heads, width), keys, values, start, STUMPS], seen
    yield "product", [Linear.unpacked(noise(WIDE, width), None), noise(count, width)], {}
    if not live:
        keys, values = noise(2, kv_heads, LONG, width)
        for seen in ({}, {"window": LONG // 3}):
            yield "attend", [noise(count, heads, width), keys, values, start + LONG - count, None], seen


def in_float64(value: Any) -> Any:
    """A copy of an argument in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Linear):
        assert value.weight is not None
        return Linear.unpacked(value.weight.double(), in_float64(value.bias))
    if isinstance(value, Norm):
        return Norm(value.weight.double(), in_float64(value.bias), value.eps)
    return tuple(map(in_float64, value)) if isinstance(value, tuple) else value


@pytest.mark.gpu
def test_experts_are_chosen_in_their_order_and_no_others_are_read(cuda: torch.device) -> None:
    functions = fastest(cuda)
    check_choices(functions, cuda)


def check_choices(functions: ModuleType, device: torch.device) -> None:
    """Equally likely experts, weights of others that are no numbers, and scores that are none."""
    router = Router(Linear.unpacked(torch.zeros(6, 32, device=device), None), 3, True)
    scores = torch.tensor([[0.0] * 6, [0, 2, 1, 2, 1, 1], [-9, -9, 0, -9, -9, -9]], device=device)
    shares, chosen = functions.choose(router, scores)
    assert chosen.tolist() == [[0, 1, 2], [1, 3, 2], [2, 0, 1]]
    assert functions.choose(replace(router, used=1), scores)[1].tolist() == [[0], [1], [2]]
    torch.testing.assert_close(shares.sum(-1), torch.ones(3, device=device))
    x, weights = torch.randn(3, 32, device=device), torch.randn(6, 32, 32, device=device)
    weights[4:] = torch.nan
    assert functions.chosen_product(weights, x, chosen).isfinite().all()
    shares, chosen = functions.choose(router, torch.full_like(scores, torch.nan))
    assert shares.isnan().all()
    assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", WEIGHTS, ids=str)
def test_a_row_of_a_product_is_the_same_bits_in_every_pass(
    cuda: torch.device, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    functions = fastest(cuda)
    if functions is ops:
        pytest.skip("passes are made of torch's own operations here")
    assert products_unlike_alone(functions, *size, (2, 6, 16, 17, 33, MOST_ROWS), cuda, dtype) == []


def products_unlike_alone(
    functions: ModuleType, outer: int, inner: int, counts: Sequence[int], device: torch.device, dtype: torch.dtype
) -> list[tuple[str, int]]:
    """The products of so many rows of which a row is not bit for bit what it is alone."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, added, norm = noise(max(counts), inner), noise(max(counts), outer), Norm(noise(inner), None, 1e-5)
    biased = Linear.unpacked(noise(outer, inner), noise(outer))
    plain = Linear.unpacked(noise(outer, inner), None)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "plain": lambda x, _: functions.product(plain, x),
        "biased, added, normed": lambda x, added: functions.product(biased, x, norm, added),
        "gated": lambda x, _: functions.product(plain, x, norm, None, True),
    }
    differing = list[tuple[str, int]]()
    for name, way in ways.items():
        alone = torch.cat([way(*row) for row in zip(x.split(1), added.split(1), strict=True)])
        several = ((count, way(x[:count], added[:count])) for count in counts)
        differing += [(name, count) for count, rows in several if not torch.equal(rows, alone[:count])]
    return differing


@pytest.mark.gpu
def test_a_row_of_attention_is_the_same_bits_in_every_pass(cuda: torch.device) -> None:
    """A token read alone and the same token read among 17. Torch's own operations do not promise this."""
    functions = fastest(cuda)
    if functions is ops:
        pytest.skip("passes are made of torch's own operations here")
    same = 0
    for live in range(100, 100 + 17 * 20, 17):
        q, start = torch.randn(17, 8, 64, device=cuda).bfloat16(), torch.tensor([live], device=cuda)
        keys, values = torch.randn(2, 2, 512, 64, device=cuda).bfloat16()
        alone = [call(functions, "attend", [q[at : at + 1], keys, values, start + at, None]) for at in range(17)]
        same += torch.equal(torch.cat(alone), call(functions, "attend", [q, keys, values, start, None]))
    assert same == 20, f"{same} of 20 passes over 17 tokens equal single ones bit by bit"


BESIDE = {
    "one each": [(5, 1), (300, 1), (127, 1)],
    "several each": [(100, 5), (0, 1), (126, 17), (300, 4)],
    "many": [(20 * place, 1 + place % 4) for place in range(16)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, WIDER], ids=str)
def test_a_row_is_the_same_bits_whatever_texts_are_read_beside(
    cuda: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    functions = fastest(cuda)
    if functions is ops:
        pytest.skip("torch's own operations read no texts together")
    for name, chains in BESIDE.items():
        for look in LOOKS:
            assert chains_unlike_alone(functions, *shape, chains, cuda, dtype, **look) == 0, (name, look)


def chains_unlike_alone(
    functions: ModuleType,
    heads: int,
    kv_heads: int,
    width: int,
    chains: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    **look: Any,
) -> int:
    """Of several chains that are read in one pass, how many are not bit for bit what they are in one of their own.

    Each is given by the number of tokens in its cache and of those that are read.
    """

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    capacity, total = 8 + max(live + count for live, count in chains), sum(count for _, count in chains)
    caches = [noise(2, kv_heads, capacity, width) for _ in chains]
    shared = [cache.clone() for cache in caches]
    norms, rotation = (Norm(noise(width), None, 1e-6),) * 2, (noise(capacity, 1, width), noise(capacity, 1, width))
    qkv = noise(total, (heads + 2 * kv_heads) * width)
    depths = [row for _, count in chains for row in range(count)]
    apart = [graph.distance(shared[0], cache) for cache in shared]
    where = torch.zeros(2, max(graph.TOGETHER), dtype=torch.long)
    where[0, :total], where[1, :total] = (
        torch.tensor(each).repeat_interleave(torch.tensor([count for _, count in chains]))
        for each in ([live for live, _ in chains], apart)
    )
    straight = torch.arange(MOST_ROWS, dtype=torch.uint8).repeat(total, 1)
    on_device = (part.to(device) for part in (where, straight, torch.tensor(depths, dtype=torch.uint8)))
    rows = functions.placed(*on_device, capacity, apart=True)
    attended = functions.attend(functions.write_kv(qkv, norms, rotation, *shared[0], rows), *shared[0], rows, **look)
    differing, begin = 0, 0
    for (live, count), cache, written in zip(chains, caches, shared, strict=True):
        own, start = slice(begin, begin + count), torch.tensor([live], device=device)
        q = call(functions, "write_kv", [qkv[own], norms, rotation, *cache, start, None])
        alone = call(functions, "attend", [q, *cache, start, None], **look)
        differing += not (torch.equal(attended[own], alone) and torch.equal(written, cache))
        begin += count
    return differing


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, WIDER], ids=str)
def test_a_row_of_a_tree_is_the_same_bits_as_that_of_its_chain(
    cuda: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """After texts that end at any place of a step and of a chunk, and in caches that the tree fills."""
    functions = fastest(cuda)
    if functions is ops:
        pytest.skip("passes are made of torch's own operations here")
    differing = {
        (name, live, window): count
        for name in TREES
        for live in (0, 5, 63, 64, 100, 127, 128, 300, 1000)
        for window in (0, 40)
        if (count := leaves_unlike_their_chains(functions, *shape, TREES[name], live, cuda, dtype, window=window))
    }
    assert not differing


def leaves_unlike_their_chains(
    functions: ModuleType,
    heads: int,
    kv_heads: int,
    width: int,
    parents: list[int],
    live: int,
    device: torch.device,
    dtype: torch.dtype,
    most: int = MOST_ROWS,
    **look: Any,
) -> int:
    """Of the first `most` leaves of a tree, how many end a path whose rows are not bit for bit those of a chain.

    The tree is filled up with copies of its last row, as a captured pass is, and with them fills the cache.
    """

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    rows = min(rows for rows in graph.TREES if rows >= len(parents))
    capacity, start = live + rows, torch.tensor([live], device=device)
    fresh, rotation = noise(2, kv_heads, capacity, width), (noise(capacity, 1, width), noise(capacity, 1, width))
    norms = Norm(noise(width), None, 1e-6), Norm(noise(width), None, 1e-6)
    qkv = noise(len(parents), (heads + 2 * kv_heads) * width)

    def attended(qkv: Tensor, parents: list[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = fresh.clone()
        q = call(functions, "write_kv", [qkv, norms, rotation, keys, values, start, parents])
        return call(functions, "attend", [q, keys, values, start, parents], **look), keys, values

    tree, tree_keys, tree_values = attended(torch.cat([qkv, qkv[-1:].expand(rows - len(qkv), -1)]), parents)
    differing = 0
    for leaf in [row for row in range(len(parents)) if row not in parents][:most]:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        at, slots = torch.tensor(path, device=device), slice(live, live + len(path))
        alone, keys, values = attended(qkv[at], None)
        same = torch.equal(tree[at], alone) and torch.equal(tree_keys[:, live + at], keys[:, slots])
        differing += not (same and torch.equal(tree_values[:, live + at], values[:, slots]))
    return differing

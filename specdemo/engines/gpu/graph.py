"""The fused path on a GPU, where launching an operation can take longer than running it.

A pass is captured once for each number of tokens and replayed as a whole. So it reads fixed buffers and nothing else:
token ids, the number of tokens in the cache, keys and values. It waits for nothing, and the shapes of its operations do
not depend on the length of the text.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...settings import MAX_K
from ...system.device import to_device
from ...system.progress import tell
from ..fused import Cache, FusedRunner, SharedPasses, end_all, hidden_states, round_up
from ..layout import FusedModel
from ..ops import UNIT
from ..passes import in_groups
from ..rows import MOST_ROWS, TREES, branches_of, size_of_tree
from ..runner import Pass, Runner
from .capture import Capture, CapturedFunctions, CudaCapture, Work
from .layer import added, mlp

log = logging.getLogger(__name__)
LONGEST = MAX_K + 1  # tokens in a pass of a round; a longer pass of one text is not captured
LENGTHS = range(LONGEST, 0, -1)  # in the order of capture: shorter passes reuse the memory of the longest
# Rows of the passes for several sequences. They are captured when they are first needed.
TOGETHER = 2, 4, 8, 16, 32, 48, 64, 96, 144
ROOM = 1024  # the least capacity of a slot, in tokens

Outcome = tuple[Tensor, list[Tensor]]  # logits [T, V], and the output of each layer, [T, hidden]


class Slot:
    """Buffers for one run at a time, of up to `capacity` tokens, with captured passes that work on them."""

    capacity: int

    def clear(self) -> None:
        """Forget the last run."""
        raise NotImplementedError


S = TypeVar("S", bound=Slot)


class SlotPool(Generic[S]):
    """The free slots. A run has one from when it is made, before a race is timed, until it is released or dropped.

    Runs of the same context have slots of the same capacity, and so the same order of sums.
    """

    def __init__(self, count: int) -> None:
        """Capture `count` slots of `ROOM` tokens now."""
        self._free = [self.new_slot(ROOM) for _ in range(count)]

    def new_slot(self, capacity: int) -> S:
        """Capture a slot, which takes seconds."""
        raise NotImplementedError

    def capacity_for(self, context: int) -> int:
        """The capacity of the slot for a run of up to `context` tokens: these, rounded up to a multiple of `ROOM`.

        From 8 * `ROOM` on the multiple is of a larger power of two, an eighth to a quarter of the context, so that few
        different capacities are captured.
        """
        return round_up(context, max(ROOM, 1 << max(context.bit_length() - 3, 0)))

    def acquire(self, context: int) -> S:
        """A slot for a run of up to `context` tokens."""
        capacity = self.capacity_for(context)
        slot = next((slot for slot in self._free if slot.capacity == capacity), None)
        if slot is None:
            # Large slots make room. The first ones stay: without a graph CUDA would free the memory pool.
            self._free = [slot for slot in self._free if slot.capacity == ROOM]
            tell("capturing the passes for texts of this length")
            return self.new_slot(capacity)
        self._free.remove(slot)
        slot.clear()
        return slot

    def release(self, slot: S) -> None:
        """Take back the slot of a run. This launches nothing, since a run may be dropped in the middle of a capture."""
        self._free.append(slot)


class CapturedPasses:
    """Captured passes over chains and trees, by the number of rows: of one sequence, or of chains of several.

    Torch's operations work on `cache`. Triton's kernels work on any cache of that capacity, which a pass finds by its
    distance from `cache`; so there all slots of a capacity share their passes.
    """

    def __init__(self, model: FusedModel, ops: ModuleType, capture: Capture, capacity: int) -> None:
        self.model, self.ops, self.capture = model, ops, capture
        self.cache = Cache(model, capacity)
        device, most = model.embedding.device, max(*TREES, *TOGETHER)
        self.ids = torch.zeros(most, dtype=torch.long, device=device)
        self.where, self.where_together = torch.zeros(2, 2, most, dtype=torch.long, device=device)  # see `ops.placed`
        self.first_line = to_device(torch.tensor([[1], [0]]), device)
        self.chain = to_device(branches_of(range(-1, MOST_ROWS - 1)), device)
        self.branches = self.chain.clone()
        self.paths, self.depths = self.chain[MOST_ROWS - 1].repeat(most, 1), self.chain.new_zeros(most)  # of several
        # A slot serves any run, so those of trees are always captured. They make a capture take a third more time, and
        # the memory of the largest pass.
        trees = () if model.depends_on_length else TREES  # `cannot_branch`
        self._trees = {rows: capture(partial(self.run, rows, self.branches)) for rows in trees}
        self._passes = {count: capture(partial(self.run, count, self.chain)) for count in LENGTHS}
        self._together: dict[int, Work] = {}
        self.functions = CapturedFunctions(capture, self.where, self.ids)  # drafts, see `following` and `branching`

    def place(self, cache: Cache) -> Tensor:
        """The `where` of a pass at the beginning of a cache."""
        place = torch.zeros_like(self.where)
        place[1] = distance(self.cache.keys, cache.keys)
        return place

    def seek(self, slot: GraphSlot) -> None:
        """Make the end of a slot's text the place of the next pass."""
        torch.add(slot.place, self.first_line, alpha=slot.cache.length, out=self.where)  # one launch

    def read(self, slot: GraphSlot, ids: Sequence[int] | Tensor, parents: Sequence[int] | None) -> Outcome:
        """Run a pass over T tokens after those in the cache of a slot. The next pass overwrites what this returns.

        A tree is padded with copies of its last row, which write the same keys and values to the same place.
        """
        count = len(ids)
        self.seek(slot)
        self.ids[:count].copy_(to_device(ids, self.ids.device))
        if parents is None:
            return self._passes[count]()
        self.branches.copy_(to_device(branches_of(parents), self.ids.device))
        rows = size_of_tree(count)
        self.ids[count:rows] = self.ids[count - 1]
        return self._trees[rows]()

    def read_together(self, chains: Sequence[tuple[Cache, Sequence[int] | Tensor]]) -> Outcome:
        """Run a pass over the tokens of several chains, each after those in its cache.

        It is padded with copies of the last row, which write the same keys and values to the same place.
        """
        places = list[tuple[int, int, int]]()
        for cache, ids in chains:
            places += [(cache.length, distance(self.cache.keys, cache.keys), depth) for depth in range(len(ids))]
        count = len(places)
        rows = min(rows for rows in TOGETHER if rows >= count)
        places += places[-1:] * (rows - count)
        where = to_device(torch.tensor(places).T, self.ids.device)
        self.where_together[:, :rows].copy_(where[:2])
        self.depths[:rows].copy_(where[2])
        torch.cat([to_device(ids, self.ids.device) for _, ids in chains], out=self.ids[:count])
        self.ids[count:rows] = self.ids[count - 1]
        if rows not in self._together:  # a capture runs the pass too, so it needs its inputs
            tell(f"capturing the passes over {rows} tokens of several texts")
            self._together[rows] = self.capture(partial(self.run, rows))
        return self._together[rows]()

    def following(self, logits: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        """What gives the logits after each token of a chain, where those of the first token are given and `where` is
        its place. It can be captured."""

        def next_logits(tokens: Sequence[Tensor]) -> Tensor:
            if not tokens:
                return logits
            self.ids[:1] = tokens[-1]
            logits_after, _ = self.run(1, self.chain)
            self.where[0] += 1
            return logits_after

        return next_logits

    def branching(self, token_ids: Tensor, paths: Tensor, depth: Tensor) -> Tensor:
        """The logits after T tokens of a tree at `where`, [T, V]. It can be captured.

        Args:
            paths: the rows that they see, in the form of `branches_of`, uint8 [T, MOST_ROWS]. Those of their ancestors
                were written by passes before.
            depth: how many ancestors each has, int64 [1].
        """
        count = len(token_ids)
        self.ids[:count] = token_ids
        logits, _ = self.run(count, torch.cat([paths, depth.byte().expand(1, MOST_ROWS)]))
        return logits

    @torch.inference_mode()
    def run(self, count: int, branches: Tensor | None = None) -> Outcome:
        """The pass that is captured: with `branches` (`branches_of`) of one sequence, else of chains of several.

        It reads `ids`, `where`, the branches and the cache, and nothing on the host.
        """
        model, ops, cache, where = self.model, self.ops, self.cache, self.where
        paths, depths = self.paths[:count], self.depths[:count]
        if branches is None:
            where = self.where_together
        else:
            paths, depths = branches[:count], branches[-1, :count]
        rows = ops.placed(where, paths, depths, cache.keys.shape[2], branches is None)
        x = model.embed(self.ids[:count])
        if model.positions is not None:
            x = x + F.embedding(where[0, :count] + depths, model.positions)
        scales, outputs = model.scales, []
        for layer, keys, values in zip(model.layers, cache.keys, cache.values, strict=True):
            qkv = ops.product(layer.qkv, x, norm=layer.attention_norm)
            rotation = None if layer.rope is None else cache.rotations[layer.rope]
            q = ops.write_kv(qkv, layer.head_norms, rotation, keys, values, rows)
            look = {"scale": scales.attention, "window": layer.window, "cap": scales.score_cap}
            attended = ops.attend(q, keys, values, rows, **look)
            x = added(ops, x, layer.out, attended, layer.out_norm, scales.residual)
            outputs.append(x := mlp(ops, x, layer, scales.residual))
        return model.finished(ops.product(model.head, x, norm=model.norm)), outputs


def distance(keys: Tensor, others: Tensor) -> int:
    """From the keys of one cache to those of another of the same shape, see `ops.placed`; the same as of the values."""
    units, rest = divmod(others.data_ptr() - keys.data_ptr(), UNIT * keys.element_size())
    assert rest == 0, "memory comes in multiples of 64 bytes"
    return units


class GraphSlot(Slot):
    """The cache of a run of the target, and the captured passes that work on it."""

    def __init__(self, passes: CapturedPasses, cache: Cache, capacity: int) -> None:
        self.passes, self.cache, self.capacity = passes, cache, capacity
        self.place = passes.place(cache)

    def clear(self) -> None:
        self.cache.clear()


class Graphs(SlotPool[GraphSlot]):
    """The captured passes of a model, and the caches of its runs. With torch's operations a captured pass works on one
    cache, so there `SharedPasses` reads sequences together, uncaptured."""

    def __init__(self, model: FusedModel, ops: ModuleType, capture: Capture, slots: int) -> None:
        self.model, self.ops, self.capture = model, ops, capture
        self.together = GraphPasses(model) if ops.APART else SharedPasses(model)
        self.functions = CapturedFunctions(capture)
        self._parts: dict[int, Graphs] = {}
        self._passes: dict[int, CapturedPasses] = {}  # that the slots of a capacity share
        super().__init__(slots)

    def new_slot(self, capacity: int) -> GraphSlot:
        self._passes = {size: passes for size, passes in self._passes.items() if size in (ROOM, capacity)}
        if passes := self._passes.get(capacity):
            return GraphSlot(passes, Cache(self.model, capacity), capacity)
        passes = CapturedPasses(self.model, self.ops, self.capture, capacity)
        if self.ops.APART:
            self._passes[capacity] = passes
        return GraphSlot(passes, passes.cache, capacity)

    def capacity_for(self, context: int) -> int:
        """At most as many as its angles are for: a slot has those of its capacity, see `Rope.of_run`."""
        ends = (rope.longest for rope in self.model.ropes if rope.beyond is not None and context <= rope.longest)
        return min([super().capacity_for(context), *ends])

    def first_layers(self, count: int) -> Graphs:
        """Captured passes of the first layers, for one run, captured at the first call."""
        if count not in self._parts:
            tell("capturing the passes of the first layers")
            self._parts[count] = Graphs(self.model.first_layers(count), self.ops, self.capture, 1)
        return self._parts[count]


class GraphPasses(SharedPasses):
    """Reads chains of several runners in captured passes, each of as many as have the same capacity, and trees in turn.

    The kernels add up a row as in a pass of its own, so the number of rows is only bounded by what is captured.
    """

    @torch.inference_mode()
    def read(self, passes: Sequence[Pass]) -> list[Tensor]:
        groups = defaultdict[object, list[int]](list)
        for place, one in enumerate(passes):
            chain = one.parents is None and one.rows <= MOST_ROWS
            groups[cast(GraphRunner, one.runner).slot.capacity if chain else place, chain].append(place)
        logits = dict[int, Tensor]()
        for places in groups.values():
            logits |= zip(places, self._read([passes[place] for place in places]), strict=True)
        return [logits[place] for place in range(len(passes))]

    def _read(self, passes: Sequence[Pass]) -> list[Tensor]:
        """The logits of chains of the same capacity, or of one pass of any kind."""
        logits = list[Tensor]()
        for group in in_groups(passes, max(TOGETHER)):
            if len(group) == 1:
                logits.append(group[0].read())
                continue
            runners, counts = [cast(GraphRunner, one.runner) for one in group], [one.rows for one in group]
            for runner, count in zip(runners, counts, strict=True):
                runner.place(count)
            slots, total = [runner.slot for runner in runners], sum(counts)
            chains = [(slot.cache, one.ids) for slot, one in zip(slots, group, strict=True)]
            found, outputs = slots[0].passes.read_together(chains)
            end_all(runners, counts, outputs)
            logits += found[:total].clone().split(counts)
        return logits


class GraphRunner(FusedRunner):
    """A `FusedRunner` that has a slot and replays the slot's passes."""

    _slot: GraphSlot | None = None

    def __init__(self, graphs: Graphs, capacity: int) -> None:
        super().__init__(graphs.model, capacity, graphs.together)
        self._graphs = graphs
        self._slot = graphs.acquire(capacity)

    def __del__(self) -> None:
        self.release()  # a run may be dropped before it begins

    @property
    def slot(self) -> GraphSlot:
        assert self._slot is not None, "it was released"
        return self._slot

    @property
    def claimed_rows(self) -> tuple[int, int]:
        """None with any of torch's operations: its products sum in other orders, and its attention uses a mask."""
        return (LONGEST, MOST_ROWS) if self._graphs.ops.EXACT else (0, 0)

    @property
    def capture_seconds(self) -> float:
        return CudaCapture.seconds

    def captured(self, key: object, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._graphs.functions(key, function)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        if self._cache is None or len(ids) > (LONGEST if parents is None else MOST_ROWS):
            return super().forward(ids, parents)
        if parents is not None:
            self.check_branches()
        count = len(ids)
        self.place(count)
        logits, outputs = self.slot.passes.read(self.slot, ids, parents)
        self.end(count, hidden_states(outputs, self.captured_layers, self.model.dtype))
        return logits[:count].clone()

    def begin_chain(self, count: int) -> CapturedPasses:
        """The passes whose `following` gives the logits of a chain, of which `count` tokens will be read."""
        self.place(count)
        self.slot.passes.seek(self.slot)
        self.end(count, None)
        return self.slot.passes

    def begin_tree(self) -> CapturedPasses:
        """The passes whose `branching` reads a tree after the text. None of its tokens becomes text."""
        self.place(MOST_ROWS)
        self.slot.passes.seek(self.slot)
        return self.slot.passes

    def first_layers(self, count: int, capacity: int) -> Runner:
        return GraphRunner(self._graphs.first_layers(count), capacity)

    def of_ends(self) -> Callable[[int], FusedRunner]:
        whole = self._graphs
        return partial(GraphRunner, Graphs(whole.model.ends(), whole.ops, whole.capture, 1))

    def release(self) -> None:
        super().release()
        if self._slot:
            self._graphs.release(self._slot)
            self._slot = None

    def _new_cache(self) -> Cache:
        self._slot = self._slot or self._graphs.acquire(self.context)
        return self._slot.cache

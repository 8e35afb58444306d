"""The fused decode path on a GPU, where it takes longer to ask for an operation than to do it.

A pass over a few tokens is captured once for each number of tokens and replayed as a whole. So a pass is a function
of fixed buffers and of nothing else: token ids, how many tokens are live, keys and values. It waits for nothing, and
its operations and their shapes are the same at every length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hardware import sent
from ..types import MAX_K
from . import check_fits
from .fused import Cache, FusedRunner, round_up
from .layout import FusedModel, swiglu

LONGEST = MAX_K + 1  # tokens in a pass of a round; what is longer is run as it comes
LENGTHS = range(LONGEST, 0, -1)  # in the order of capture: the shorter then find room in the memory the longest took
ROOM = 1024  # the least capacity of a slot, in tokens

Outcome = tuple[Tensor, list[Tensor]]  # logits [T, V], and the states behind each layer, [T, hidden] each
Work = Callable[[], Any]  # on a GPU; gives tensors
Capture = Callable[[Work], Work]


class CudaCapture:
    """Makes CUDA graphs that share their memory: none needs what another left there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # while it captures, torch cannot give back what it only keeps
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            work()  # what a first call sets up must not become part of the graph
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outcome = work()
            except BaseException:  # where memory is short, say: a stream that is left capturing can do nothing else
                with suppress(RuntimeError):  # what it says of a broken capture would hide the cause
                    graph.capture_end()
                self.pool = torch.cuda.graph_pool_handle()  # torch may take the old one for still recorded to
                raise
            graph.capture_end()
        torch.cuda.synchronize(self.device)

        def replay() -> Any:
            graph.replay()
            return outcome

        return replay


class Replayed:
    """A function of tensors whose calls are captured: the next call overwrites what the last one returned."""

    def __init__(self, function: Callable[..., Any], capture: Capture, buffers: Iterable[tuple[Any, ...]]) -> None:
        """`buffers` are the arguments to capture calls of; what calls give for tensors is copied to those."""
        self.function = function
        self._calls = {_shapes(own): (own, capture(partial(function, *own))) for own in buffers}

    def __call__(self, *arguments: Any) -> Any:
        """What no call was captured for is run as it comes."""
        own, replay = self._calls.get(_shapes(arguments), (None, None))
        if own is None or replay is None:
            return self.function(*arguments)
        for buffer, argument in zip(own, arguments, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(argument)
        return replay()


def _shapes(arguments: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(part.shape) if isinstance(part, Tensor) else part for part in arguments)


class Slot:
    """Room for one run at a time, and the captured passes that read and write it, by the number of tokens."""

    def __init__(self, model: FusedModel, ops: ModuleType, capture: Capture, capacity: int) -> None:
        self.model, self.ops, self.capacity = model, ops, capacity
        self.cache = Cache(model, capacity)
        self.ids = torch.zeros(LONGEST, dtype=torch.long, device=model.embedding.device)
        self.start = torch.zeros(1, dtype=torch.long, device=model.embedding.device)
        self._passes = {count: capture(partial(self.run, count)) for count in LENGTHS}

    def read(self, ids: Sequence[int] | Tensor) -> Outcome:
        """Run the pass over T tokens behind the live ones. The next pass overwrites what this returns."""
        self.start.fill_(self.cache.length)
        self.ids[: len(ids)].copy_(sent(ids, self.ids.device))
        return self._passes[len(ids)]()

    def clear(self) -> None:
        self.cache.clear()

    @torch.inference_mode()
    def run(self, count: int) -> Outcome:
        """What is captured. It may read `ids`, `start` and the cache's buffers, and must not look at any number."""
        model, ops, cache, start = self.model, self.ops, self.cache, self.start
        x = model.embed(self.ids[:count])
        if model.positions is not None:
            places = start + torch.arange(count, device=start.device)
            x = x + F.embedding(places, model.positions)
        outputs = []
        for layer, keys, values in zip(model.layers, cache.keys, cache.values, strict=True):
            qkv = ops.product(layer.qkv, x, norm=layer.attention_norm)
            q = ops.place(qkv, layer.head_norms, cache.rotation if layer.rotated else None, keys, values, start)
            x = ops.product(layer.out, ops.attend(q, keys, values, start), plus=x)
            activate = ops.swiglu if layer.activate is swiglu else layer.activate
            x = ops.product(layer.down, activate(ops.product(layer.up, x, norm=layer.mlp_norm)), plus=x)
            outputs.append(x)
        return ops.product(model.head, x, norm=model.norm), outputs


class Run(Protocol):
    """What needs a slot: for at most `context` tokens."""

    context: int


class Room(Protocol):
    """Room for one run at a time, of up to `capacity` tokens."""

    capacity: int

    def clear(self) -> None:
        """Forget the run."""
        ...


S = TypeVar("S", bound=Room)


class Slots(Generic[S]):
    """Slots for runs, which are captured at once and used again and again.

    Runs of the same context have slots of the same capacity, and so the same order of sums.
    """

    def __init__(self, new: Callable[[int], S], count: int) -> None:
        """`new` makes a slot of a capacity; `count` runs of up to `ROOM` tokens can go on before it is called again."""
        self._new = new
        self._free = [new(ROOM) for _ in range(count)]
        self._waiting: WeakSet[Run] = WeakSet()

    def make_room(self, run: Run) -> None:
        """Have a slot for a run when it asks for one. To capture one takes seconds: this is before a clock runs."""
        capacity = capacity_for(run.context)
        others = sum(capacity_for(other.context) == capacity for other in self._waiting if other is not run)
        if others >= sum(slot.capacity == capacity for slot in self._free):
            # Large slots of another size make place. Those from the beginning stay: without a graph the pool would go.
            self._free = [slot for slot in self._free if slot.capacity in (ROOM, capacity)]
            self._free.append(self._new(capacity))
        self._waiting.add(run)

    def take(self, run: Run) -> S:
        """A slot for a run."""
        self.make_room(run)
        self._waiting.discard(run)
        slot = next(slot for slot in self._free if slot.capacity == capacity_for(run.context))
        self._free.remove(slot)
        return slot

    def give(self, slot: S) -> None:
        """The run is over."""
        slot.clear()
        self._free.append(slot)


class Graphs(Slots[Slot]):
    """A model with slots for its runs."""

    def __init__(self, model: FusedModel, ops: ModuleType, capture: Capture, slots: int) -> None:
        self.model, self.ops, self.capture = model, ops, capture
        super().__init__(lambda capacity: Slot(self.model, self.ops, self.capture, capacity), slots)


def capacity_for(context: int) -> int:
    """Of the slot for a run of up to so many tokens: at most a quarter more, beyond a few times `ROOM`."""
    return round_up(context, max(ROOM, 1 << max(context.bit_length() - 3, 0)))


class GraphRunner(FusedRunner):
    """A `FusedRunner` that takes a slot at the prefill and replays the slot's passes."""

    def __init__(self, graphs: Graphs, capacity: int) -> None:
        super().__init__(graphs.model, capacity)
        graphs.make_room(self)
        self._graphs = graphs
        self._slot: Slot | None = None

    @torch.inference_mode()
    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        if self._slot is None or self._ahead or len(ids) > LONGEST:
            return super().forward(ids)
        check_fits(self, len(ids))
        logits, outputs = self._slot.read(ids)
        self._slot.cache.length += len(ids)
        if self._kept:
            self.states = torch.cat([outputs[layer] for layer in self._kept], -1)
        return logits.clone()

    def release(self) -> None:
        super().release()
        if self._slot:
            self._graphs.give(self._slot)
            self._slot = None

    def _new_cache(self) -> Cache:
        self._slot = self._graphs.take(self)
        return self._slot.cache

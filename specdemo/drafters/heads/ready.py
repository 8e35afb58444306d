"""A head made ready for its target, and the passes that a drafter asks it for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from ...engines.cpu.library import PackedLinear
from ...engines.gpu.capture import Capture, CapturedFunction, CapturedFunctions, Work
from ...engines.gpu.graph import LENGTHS, LONGEST, Slot, SlotPool
from ...engines.layout import Linear, Norm, Step
from ...engines.passes import PendingPass
from ...engines.quantized import GROUP, Quantized, Weight, quantized, rows_of
from ...system.device import to_device
from ...system.hardware import compute_dtype
from ..captured_trees import Growth
from ..chain import NextLogits, NextPass
from .backends import NativeBackend, TorchBackend, native_backend
from .networks import Head, HeadLayer, LayeredHead

H = TypeVar("H", bound=Head)


class Packed(nn.Module):
    """A linear layer or a norm for passes of a few rows."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


def _in_type_of(like: Weight, weight: Tensor) -> Weight:
    """A weight of a head in the number type of one of the target's, or in 8 bits where that is quantized."""
    if isinstance(like, Quantized) and weight.shape[1] % GROUP == 0:
        return quantized(weight, 8)
    return weight.to(like.dtype)


def pack(module: nn.Module, like: Weight) -> None:
    """Replace the linear layers and the norms below `module` by packed ones, which can no longer be trained.

    `like` is a weight of the target, see `_in_type_of`.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            parts = module.parts.get(name, 1) if isinstance(module, HeadLayer) else 1
            module._modules[name] = Packed(Linear.of(_in_type_of(like, child.weight.detach()), bias, parts))
        elif isinstance(child, nn.RMSNorm):
            assert child.eps is not None
            module._modules[name] = Packed(Norm.of(child.weight.detach(), None, child.eps))
        else:
            pack(child, like)


def _equal(own: Tensor, targets: Weight) -> bool:
    return isinstance(targets, Tensor) and torch.equal(own, targets)


class ReadyHead(Generic[H]):
    """A head tied to its target: packed, with the target's embeddings.

    `embedding` and `output` are the weights of the target's input and output embeddings, [V, hidden] each. A head may
    have its own instead.
    """

    slots: HeadSlots | None = None  # if its passes are captured

    def __init__(self, head: H, embedding: Weight, output: Weight) -> None:
        own = None if head.own_embedding is None else head.own_embedding.to(embedding.device, embedding.dtype)
        self.embedding = embedding if own is None or _equal(own, embedding) else own  # often it is a copy
        self.dtype = compute_dtype(embedding.dtype, embedding.device)
        self.head = head.to(embedding.dtype).to(embedding.device, self.dtype).eval()
        self.token_ids = head.token_ids.to(embedding.device)  # [V']
        everything = len(self.token_ids) == len(output)  # in rising order, so that no copy is needed
        to = embedding.device, embedding.dtype
        if head.own_output is None:
            rows = output if everything else output[self.token_ids]
        else:
            rows = output if everything and _equal(head.own_output.to(*to), output) else head.own_output
        of_places: Sequence[Weight] = head.place_outputs or (rows,)
        self._outputs = [Linear.of(one.to(*to) if isinstance(one, Tensor) else one, None) for one in of_places]
        packed = isinstance(self._outputs[0].multiply, PackedLinear)
        layers = head.decoder_layers() if packed and head.in_library else ()
        for layer in layers:
            layer.join()
        pack(self.head, embedding)
        self.native = native_backend(cast(LayeredHead, head), self._outputs[0]) if layers else None

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """The embeddings of T tokens, [T, hidden]."""
        return rows_of(self.embedding, to_device(tokens, self.embedding.device)).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the draft vocabulary, [T, hidden] -> [T, V']. If each place has an output, row i is of place i."""
        x = self.head.norm(x)
        if len(self._outputs) == 1:
            return self._outputs[0](x)
        return torch.cat([output(row[None]) for output, row in zip(self._outputs, x, strict=False)])

    def bigram_bias(self, previous: Tensor) -> Tensor | float:
        """What the previous tokens [T] add to the logits, [T, V'] or 0.0."""
        head = self.head
        if head.after is None:
            return 0.0
        return head.bigram_bias(previous if head.shape.bigram_table else self.embed(previous))

    def zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of zeros on the head's device, by default in its type."""
        return torch.zeros(*sizes, dtype=dtype or self.dtype, device=self.embedding.device)

    def backend(self, capacity: int, captured: bool = False) -> TorchBackend | NativeBackend:
        """The fastest backend here, for one text of at most `capacity` tokens."""
        if self.native and not captured:
            return self.native(capacity, self.dtype)
        head: Any = self.head
        return TorchBackend(head, self.logits, capacity, self.zeros(0), captured)

    def read(self, passes: Sequence[Any]) -> list[Tensor]:
        logits: list[Tensor] = passes[0].passes.read_all(passes)
        return logits


class HeadPasses(Slot):
    """What a kind of head computes in a run. A slot of captured passes serves run after run."""

    functions: CapturedFunctions | None = None  # keeps its captured chains; None if nothing is captured
    start_is_one_pass = True  # and gives logits, so that texts can be read together; else each has passes of its own

    def __init__(self, ready: ReadyHead[Any], capacity: int, captured: bool = False) -> None:
        """`captured` says that `capture` will follow."""
        self.ready, self.capacity = ready, capacity

    def seek(self, live: int) -> None:
        """Forget all entries but the first `live`."""

    def clear(self) -> None:
        pass

    def begin(self, states: Tensor, tokens: Tensor, k: int) -> NextPass:
        """Read T hidden states of the target [T, layers * hidden], each with the token that follows it [T].

        Their entries become live. Returns a function that gives the logits of the next k tokens, one by one.
        """
        return self.following(*self.start(states, tokens, k))

    def beginning(self, states: Tensor, tokens: Tensor, k: int) -> Generator[PendingPass, Tensor, NextPass]:
        """`begin`, by passes that can be read together with those of others."""
        if not self.start_is_one_pass:
            return self.begin(states, tokens, k)
        logits = yield StartPass(self, states, tokens, k)
        return self.following(logits, tokens[-1:])

    def start(self, states: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        """`begin`, up to what depends on the tokens that are drawn: what `following` needs."""
        raise NotImplementedError

    def following(self, *given: Tensor) -> NextLogits:
        """What gives the logits of the next tokens, from what `start` gave. It can be captured.

        In a tree the tokens are those of each depth, [T] each, and the logits those after the last T of them, [T, V'],
        or [1, V'] if they are all the same. Here the logits of all places [k, V'] are given, and the pending token; the
        bigram term is added to each.
        """
        logits, pending = given

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            place = len(drawn)
            return logits[place : place + 1] + self.ready.bigram_bias(drawn[-1] if drawn else pending)

        return next_logits

    def state(self) -> tuple[Tensor, ...]:
        """What `following` changes, on the device."""
        return ()

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        """The names of the methods that drafts call, with the arguments of each call to capture."""
        raise NotImplementedError

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        for name, arguments in self.calls().items():
            setattr(self, name, CapturedFunction(getattr(self, name), capture, arguments))

    def states_and_tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers for states and next tokens, one pair for each number of tokens that a round can leave unread."""
        states = self.ready.zeros(LONGEST, self.ready.head.shape.states)
        tokens = self.ready.zeros(LONGEST, dtype=torch.long)
        return [(states[:count], tokens[:count]) for count in LENGTHS]


class HeadSlots(SlotPool[HeadPasses]):
    """Captures the passes of one run now, and of further ones when they begin."""

    def __init__(self, ready: ReadyHead[Any], kind: type[HeadPasses], capture: Capture) -> None:
        self.ready, self.kind, self.capture = ready, kind, capture
        super().__init__(1)

    def new_slot(self, capacity: int) -> HeadPasses:
        slot, capture = self.kind(self.ready, capacity, captured=True), self.capture

        def from_the_start(work: Work) -> Work:  # each call of captured passes takes up entries of the cache
            slot.seek(0)
            return capture(work)

        slot.capture(from_the_start)
        slot.functions = CapturedFunctions(capture, *slot.state())  # in the middle of a run, after its entries
        return slot


class FilledPlaces:
    """Reads trees of a head whose passes have filled all places, each tree as a whole; see `captured_trees.Reader`."""

    state: Sequence[Tensor] = ()

    def __init__(self, passes: HeadPasses) -> None:
        self.passes, self.drawn = passes, list[Tensor]()

    def begin(self, *given: Tensor) -> Tensor:
        self.next_logits = self.passes.following(*given)
        return self.next_logits(self.drawn)

    def read(self, growth: Growth) -> Tensor:
        self.drawn.append(growth.token_ids)
        return self.next_logits(self.drawn)


class HeadPass(PendingPass):
    """A pass of a head. The C library reads those of one head together. Heads without layers gain nothing by that
    (measured)."""

    passes: HeadPasses

    @property
    def together(self) -> ReadyHead[Any] | None:
        ready = self.passes.ready
        return ready if ready.native and not ready.slots else None

    @property
    def place(self) -> int:
        return cast(NativeBackend, cast(LayeredPasses, self.passes).backend).cache.length

    def go_back(self, place: int) -> None:
        self.passes.seek(place)


@dataclass(frozen=True, slots=True)
class StartPass(HeadPass):
    """What a draft asks for whose logits come from one pass, see `HeadPasses.start`."""

    passes: HeadPasses
    states: Tensor
    tokens: Tensor
    k: int

    @property
    def rows(self) -> int:
        return len(self.tokens) + self.k

    def read(self) -> Tensor:
        return self.passes.start(self.states, self.tokens, self.k)[0]


class LayeredPasses(HeadPasses):
    """The passes of a head with decoder layers."""

    def __init__(self, ready: ReadyHead[Any], capacity: int, captured: bool = False) -> None:
        self.backend = ready.backend(capacity, captured)
        super().__init__(ready, self.backend.capacity)

    def seek(self, live: int) -> None:
        self.backend.seek(live)

    def clear(self) -> None:
        self.backend.clear()

    def state(self) -> tuple[Tensor, ...]:
        return self.backend.state()

"""What the trained heads share: their files, their vocabulary, and small parts of their networks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..hardware import arithmetic, sent
from ..runners import Runner
from ..runners.graph import LENGTHS, LONGEST, Capture, CudaCapture, Slots, Work
from ..runners.layout import Layer, Norm, Product, Rope, Step, swiglu
from ..runners.library import Multiply
from ..runners.native import NativeHead, NativeLayers, can_run
from ..types import MAX_K, BadInput, Draft, Settings, Verdict
from .base import Drafter, draw
from .head_cache import WINDOW, DeviceCache, HeadCache, NativeHeadCache, frequencies

if TYPE_CHECKING:
    from ..models import Loaded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a head: those of the target it reads, and its own."""

    vocab_size: int  # the target's
    hidden: int  # the target's hidden size, and the head's
    state_layers: tuple[int, ...]  # the target's layers whose outputs the head reads
    draft_vocab: int  # how many tokens it can draft
    depth: int
    heads: int
    kv_heads: int
    width: int  # of an attention head
    mlp: int
    eps: float


class Parts(NamedTuple):
    """The norms of a decoder layer, and the weights of its products, [outer, inner] each."""

    attention_norm: nn.RMSNorm
    qkv: Tensor
    out: Tensor
    mlp_norm: nn.RMSNorm
    gate_up: Tensor
    down: Tensor


class Head(nn.Module):
    """A small network that drafts from the target's own hidden states.

    Its embedding and its output layer are rows of the target's: they are tied on by `tie`, not trained and
    not stored. `token_ids` [draft_vocab] names the target's tokens that it can draft, the most frequent ones.
    """

    kind: ClassVar[str]
    mutual: ClassVar[bool] = False  # whether the tokens of a pass see those behind them
    token_ids: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab))
        self.state_norm = nn.Parameter(torch.ones(len(shape.state_layers), shape.hidden))
        self.fuse = nn.Linear(len(shape.state_layers) * shape.hidden, shape.hidden, bias=False)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    def fused(self, states: Tensor) -> Tensor:
        """One vector from the target's states of a token, [..., layers * hidden] -> [..., hidden]."""
        states = states.unflatten(-1, self.state_norm.shape)
        normed = nn.functional.rms_norm(states, self.state_norm.shape[1:], None, self.shape.eps) * self.state_norm
        return self.fuse(normed.flatten(-2))

    def follow(self, previous: Tensor) -> Tensor | float:
        """What the token before adds to the logits, from its embedding; nothing, unless the kind of head says so."""
        return 0.0

    def parts(self) -> list[Parts]:
        """The decoder layers, taken apart."""
        raise NotImplementedError

    def beside_norm(self) -> nn.RMSNorm | None:
        """The norm of what a layer reads beside its input, if it reads anything."""
        return None


class Packed(nn.Module):
    """A linear layer or a norm, laid out for passes of a few rows."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


def pack(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the linear layers, with weights stored as `dtype`, and the norms below `module` by packed ones.

    They can no longer be trained.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            module._modules[name] = Packed(Product.of(child.weight.detach().to(dtype), bias))
        elif isinstance(child, nn.RMSNorm):
            assert child.eps is not None
            module._modules[name] = Packed(Norm.of(child.weight.detach(), None, child.eps))
        else:
            pack(child, dtype)


class ReadyHead:
    """A head beside its target: in the target's number types, packed, with the target's rows it is tied to.

    These are of its `embedding` and of the weights of its `output` layer, [V, hidden] each. Where passes are captured,
    `slots` has those of the head. Where the library for CPUs runs it, `native` has its layers and its output.
    """

    slots: Slots[HeadPasses] | None = None

    def __init__(self, head: Head, embedding: Tensor, output: Tensor) -> None:
        self.embedding = embedding
        self.dtype = arithmetic(embedding.dtype, embedding.device)
        self.head = head.to(embedding.dtype).to(embedding.device, self.dtype).eval()
        self.token_ids = head.token_ids.to(self.embedding.device)  # [draft_vocab]
        self._output = Product.of(output[self.token_ids], None)
        self.native = self._native()
        pack(self.head, embedding.dtype)

    def _native(self) -> tuple[NativeLayers, NativeHead] | None:
        """Layers and output for the library; None where it does not multiply by the output, so by no weight at all."""
        if not isinstance(self._output.multiply, Multiply):
            return None
        head, shape = self.head, self.head.shape

        def product(weight: Tensor, parts: int = 1) -> Product:
            return Product.of(weight.detach().to(self.embedding.dtype), None, parts)

        def norm(norm: nn.RMSNorm) -> Norm:
            return Norm.of(norm.weight.detach(), None, shape.eps)

        layers = [
            Layer(
                attention_norm=norm(layer.attention_norm),
                qkv=product(layer.qkv, len(layer.qkv) // shape.width),
                head_norms=None,
                rotated=True,
                out=product(layer.out),
                mlp_norm=norm(layer.mlp_norm),
                up=product(layer.gate_up, 2),
                activate=swiglu,
                down=product(layer.down),
            )
            for layer in head.parts()
        ]
        if not can_run(layers, self._output, shape.width):
            return None
        beside = head.beside_norm()
        sizes = shape.heads, shape.kv_heads, shape.width
        native = NativeLayers(layers, *sizes, norm(beside) if beside else None, WINDOW, head.mutual)
        return native, NativeHead(native, norm(head.norm), self._output)

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """The target's embeddings, [T, hidden]."""
        return nn.functional.embedding(sent(tokens, self.embedding.device), self.embedding).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Of the draft vocabulary, [T, hidden] -> [T, draft_vocab]."""
        return self._output(self.head.norm(x))

    def capture(self, passes: type[HeadPasses], capture: Capture) -> None:
        """Have the passes of a run captured now, and of others when they begin."""

        def new(capacity: int) -> HeadPasses:
            like = torch.empty(0, dtype=self.dtype, device=self.embedding.device)
            made = passes(self, DeviceCache(self.head.shape, capacity, like))

            def from_the_start(work: Work) -> Work:  # each call of what is captured takes places of the cache
                made.cache.go_to(0)
                return capture(work)

            made.capture(from_the_start)
            return made

        self.slots = Slots(new, 1)


class HeadPasses:
    """What a head computes in a run, and its cache. Nothing but the cache and tensors goes in."""

    def __init__(self, ready: ReadyHead, cache: HeadCache | NativeHeadCache) -> None:
        self.ready, self.cache, self.capacity = ready, cache, cache.capacity

    def capture(self, capture: Capture) -> None:
        """Have what a draft needs captured; the cache must be a `DeviceCache`."""
        raise NotImplementedError

    def states_and_tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers for the states and the next token of as many tokens as a round can leave unread."""
        ready, shape = self.ready, self.ready.head.shape
        device = ready.embedding.device
        states = torch.zeros(LONGEST, len(shape.state_layers) * shape.hidden, dtype=ready.dtype, device=device)
        tokens = torch.zeros(LONGEST, dtype=torch.long, device=device)
        return [(states[:count], tokens[:count]) for count in LENGTHS]

    def clear(self) -> None:
        """The run is over."""
        assert isinstance(self.cache, HeadCache), "only slots are used again"
        self.cache.clear()


def ready_head(kind: type[Head], loaded: Loaded) -> ReadyHead:
    """The preset's head of that kind, made ready once.

    Raises:
        BadInput: its file cannot be read, or it was trained for a target of another shape.
    """
    if kind.kind not in loaded.heads:
        assert loaded.embeddings is not None, "the models were released"
        embedding, output = loaded.embeddings
        head = load_head_for(output, kind, loaded.head_files[kind.kind])
        loaded.heads[kind.kind] = ReadyHead(head, embedding, output)
    return loaded.heads[kind.kind]


def load_head_for(output: Tensor, kind: type[Head], path: Path) -> Head:
    """`load_head`, for the target with this output layer, [V, hidden].

    Raises:
        BadInput: the file cannot be read, or was trained for a target of another shape.
    """
    head = load_head(kind, path)
    ours, theirs = (head.shape.vocab_size, head.shape.hidden), tuple(output.shape)
    if ours != theirs:
        raise BadInput(
            f"The head {path.name} was trained for a target of {ours[0]} tokens and hidden size {ours[1]}, "
            f"but this one has {theirs[0]} and {theirs[1]}."
        )
    return head


class HeadDrafter(Drafter):
    """What the drafters with a trained head share: they follow the target's hidden states of the text.

    The state of a token goes together with the token that follows it; a state without an entry in the head's cache
    yet is *unread*. Places count from the first token that the head's window could still reach.
    """

    kind: ClassVar[type[Head]]
    passes_kind: ClassVar[type[HeadPasses]]  # by torch's operations
    native_kind: ClassVar[type[HeadPasses]]  # by the library for CPUs

    def __init__(self, ready: ReadyHead, runner: Runner, settings: Settings, noise: torch.Generator) -> None:
        self.ready, self.runner, self.settings, self.noise = ready, runner, settings, noise
        self.context = runner.context + MAX_K + 1  # entries of its cache, with those of a draft
        self._unread: list[Tensor] = []  # [T, layers * hidden] each
        self._passes: HeadPasses | None = None
        if ready.slots:
            ready.slots.make_room(self)
        runner.keep_states(ready.head.shape.state_layers)

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return None if cls.kind.kind in loaded.head_files else f"this preset ships no {cls.kind.kind} head"

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> HeadDrafter:
        new = cls.kind.kind not in loaded.heads
        ready = ready_head(cls.kind, loaded)
        if new and loaded.engine == "graph":
            cls.capture(ready, CudaCapture(ready.embedding.device))
        return cls(ready, runner, settings, noise)

    @classmethod
    def capture(cls, ready: ReadyHead, capture: Capture) -> None:
        """Have a head's passes captured, or run as they come where that cannot be done."""
        try:
            ready.capture(cls.passes_kind, capture)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            log.warning("The passes of the head cannot be captured: they run as they come.", exc_info=True)

    def chain(self, passes: HeadPasses, states: Tensor, tokens: Tensor, k: int) -> Draft:
        """Read T unread states, each with the token that follows it [T], and draft k tokens."""
        raise NotImplementedError

    def draw(self, next_logits: Callable[[Sequence[Tensor]], Tensor], k: int) -> Draft:
        """`base.draw` over the draft vocabulary."""
        return draw(next_logits, k, self.settings, self.noise, self.ready.token_ids, self.runner.vocab_size)

    def reset(self, prompt_ids: Sequence[int]) -> None:
        states = self.runner.states
        assert states is not None, "the prompt has been read"
        skipped, self._entries = max(0, len(states) - WINDOW), 0
        self._unread = [states[skipped:]]
        self._passes = self._new_passes(self.context - skipped, states)

    def _new_passes(self, capacity: int, like: Tensor) -> HeadPasses:
        self._give_back()
        if self.ready.slots:
            return self.ready.slots.take(self)
        if self.ready.native:
            layers, width = self.ready.native[0], self.ready.head.shape.width
            cache = NativeHeadCache(layers, capacity, self.ready.dtype, Rope(frequencies(width)))
            return self.native_kind(self.ready, cache)
        return self.passes_kind(self.ready, HeadCache(self.ready.head.shape, capacity, like))

    def _give_back(self) -> None:
        if self._passes and self.ready.slots:
            self.ready.slots.give(self._passes)
        self._passes = None

    @torch.inference_mode()
    def propose(self, context: Sequence[int], k: int) -> Draft:
        assert self._passes is not None, "reset comes first"
        states, self._unread = torch.cat(self._unread), []
        self._passes.cache.go_to(self._entries)
        draft = self.chain(self._passes, states, sent(context[-len(states) :], states.device), k)
        self._entries += len(states)
        return draft

    def observe(self, verdict: Verdict) -> None:
        states = self.runner.states
        assert states is not None
        self._unread.append(states[: verdict.accepted + 1])

    def release(self) -> None:
        self._unread = []
        self._give_back()


def save_head(head: Head, path: Path, card: dict[str, Any]) -> None:
    """Write a head in bfloat16, with its sizes and the card that says how it was made, inside and beside it."""
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.to(torch.int32)
        for name, tensor in head.state_dict().items()
    }
    facts = {"kind": head.kind, "shape": json.dumps(asdict(head.shape)), "card": json.dumps(card)}
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=facts)
    partial.replace(path)
    path.with_suffix(".json").write_text(json.dumps(card, indent=2) + "\n")


def load_head(kind: type[Head], path: Path) -> Head:
    """Read a head that `save_head` wrote, in float32.

    Raises:
        BadInput: the file is missing, damaged, or not a head of that kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if facts.get("kind") != kind.kind:
                raise BadInput(f"{path.name} is not a head of the kind {kind.kind}.")
            fields = json.loads(facts["shape"])
            head = kind(Shape(**{**fields, "state_layers": tuple(fields["state_layers"])}))
            head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"The head {path.name} cannot be read: {error}.") from error
    return head


def most_frequent(counts: Sequence[int] | Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, in rising order."""
    return torch.as_tensor(counts).argsort(descending=True, stable=True)[:size].sort().values

"""The weights of a known model, rearranged so that a pass needs few operations.

One product computes queries, keys and values, and another gate and up. `linear.Linear.of` chooses how each is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..system.hardware import compute_dtype
from .cpu.library import PackedLinear
from .families import (
    EXPERTS_DOWN,
    EXPERTS_UP,
    HEAD_NORMS,
    ROUTER,
    Family,
    Scales,
    activation,
    family_of,
    head_width,
    key_heads,
    layer_kinds,
    mixture,
    windows,
)
from .linear import Linear, Norm, Step, gated_gelu, gelu, packs_on_one_core, swiglu, upcast
from .named_weights import StoredAs, Weights, embeddings, plain
from .quantized import Quantized, Weight, rows_of, widened
from .ropes import Rope, kinds_of_ropes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LEAST_ROWS = 4  # of packed bfloat16 products: fewer take longer, and oneDNN splits long sums of one row differently
MOST_AT_ONCE = 4  # layers that are packed at a time: each takes memory and threads
FEW = 4096  # logits of a plain model, see `FusedModel.ends_of`
ACTIVATIONS: dict[str, Step] = {"silu": swiglu, "gelu_pytorch_tanh": gated_gelu, "gelu_new": gelu}
Store = Callable[..., Linear]  # `Linear.of` or `_unpacked`


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `used` experts for each token, see `families.Mixture`. `product` gives a score for each expert."""

    product: Linear
    used: int
    normed: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts, the likeliest first: [T, hidden] -> two [T, used]."""
        return self.choose(self.product(x))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The same, of the scores of all experts [T, experts].

        As in transformers the probabilities are float32, and the weights get the type of the scores. Equally likely
        experts are chosen in their order, as in `experts.h`; `topk` promises none.
        """
        sorted_probs, order = scores.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
        weights, chosen = sorted_probs[:, : self.used], order[:, : self.used]
        return (weights / weights.sum(-1, keepdim=True) if self.normed else weights).to(scores.dtype), chosen


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: x + out_norm(attention(attention_norm(x))), then the same with its MLP.

    `up` and `down` are those of the MLP or, if there is a router, of each expert.

    A norm is None where there is none. `head_norms` scale queries and keys before the rotation, each head by itself or
    all heads of a token together, by their size. `rope` is the index of the model's rotation, None if there is none
    (some layers of SmolLM3). A token sees the last `window` tokens, itself included, or all if that is 0.
    """

    attention_norm: Norm | None
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None
    rope: int | None
    out: Linear
    mlp_norm: Norm | None
    up: tuple[Linear, ...]
    activate: Step
    down: tuple[Linear, ...]
    out_norm: Norm | None = None
    down_norm: Norm | None = None
    window: int = 0
    router: Router | None = None

    @property
    def mlps(self) -> list[tuple[Linear, Linear]]:
        """The two products of its MLP or of each expert."""
        return list(zip(self.up, self.down, strict=True))

    @property
    def products(self) -> list[Linear]:
        """All of its products."""
        return [self.qkv, self.out, *([self.router.product] if self.router else []), *self.up, *self.down]


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A model's weights, rearranged for `FusedRunner`. Made once, shared by every run.

    Positions enter in one of two ways: `positions` [context, hidden] are added to the embeddings (GPT-2), or queries
    and keys are rotated (`ropes`). The model computes in `dtype`; its weights may be stored in a smaller type.
    """

    layers: tuple[Layer, ...]
    embedding: Weight
    positions: Tensor | None
    ropes: tuple[Rope, ...]
    norm: Norm
    head: Linear
    vocab_size: int
    heads: int
    kv_heads: int
    width: int
    scales: Scales
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None = None) -> FusedModel:
        """Rearrange the weights of a model that `knows` accepts.

        Args:
            dtype: the type to store them in, if the model has another.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        return cls.of_weights(model.config, StoredAs(weights, dtype) if dtype else weights)

    @classmethod
    def of_weights(cls, config: PreTrainedConfig, weights: Weights) -> FusedModel:
        """Rearrange weights that have transformers' names."""
        return _rearranged(config, weights, range(config.num_hidden_layers), Linear.of)

    @classmethod
    def ends_of(cls, config: PreTrainedConfig, weights: Weights, plain: bool = False) -> FusedModel:
        """A model of the first and the last layer.

        Args:
            plain: leave its weights as they are, in float32, and only the first `FEW` rows of its head.
        """
        kept = end_layers(config.num_hidden_layers)
        if plain:
            return _rearranged(config, weights, kept, _unpacked, torch.float32, FEW)
        return _rearranged(config, weights, kept, Linear.of)

    def first_layers(self, count: int) -> FusedModel:
        """A model of the first layers, with the same norm and head. No weight is copied."""
        return replace(self, layers=self.layers[:count])

    def ends(self) -> FusedModel:
        """A model of the first and the last layer, with the same norm and head. No weight is copied."""
        return replace(self, layers=tuple(self.layers[index] for index in end_layers(len(self.layers))))

    @property
    def windows(self) -> list[int]:
        """The windows of its layers, each once."""
        return sorted({layer.window for layer in self.layers})

    @property
    def least_rows(self) -> int:
        """The fewest rows of a pass. A shorter one is padded with copies of its last row."""
        packed = self.dtype == torch.bfloat16 and self.embedding.device.type == "cpu"
        return LEAST_ROWS if packed else 1

    @property
    def exact_products(self) -> bool:
        """Whether a row of a product has the same bits whatever the other rows are, see `fused.MOST_ROWS`."""
        return self.least_rows > 1 and self.head.weight is None

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of products become codes of one byte, see `cpu/quantized.h`."""
        products = [self.head, *(product for layer in self.layers for product in layer.products)]
        steps = [product.multiply for product in products]
        return any(isinstance(step, PackedLinear) and step.code_bytes == 1 for step in steps)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, without positions: [T] -> [T, hidden]."""
        x = rows_of(self.embedding, ids).to(self.dtype)
        if self.scales.embedding == 1:
            return x
        # transformers rounds the factor to the type of the embeddings. As a number it needs no copy to a GPU, which
        # cannot be captured.
        return x * torch.tensor(self.scales.embedding, dtype=self.embedding.dtype).item()

    def finished(self, logits: Tensor) -> Tensor:
        """The logits of the model, of the products of its head."""
        scales = self.scales
        if scales.logits != 1:
            logits = logits * scales.logits
        return logits if scales.logits_cap == 0 else capped(logits, scales.logits_cap)

    @property
    def depends_on_length(self) -> bool:
        """Whether its angles depend on how long the text of a run can get, see `Rope.of_run`."""
        return any(rope.beyond is not None for rope in self.ropes)

    def rotations(self, length: int, run: int) -> list[tuple[Tensor, ...]]:
        """For each rope the cosines and signed sines of the first `length` positions, each [length, 1, width].

        With them `x * cos + swap_halves(x) * sin` is the rotary embedding. If rotated queries grow with their position,
        what multiplies them comes third, [length, 1, 1].

        Args:
            run: the most tokens of the run.
        """
        tables = (_tables(rope.of_run(run), length) for rope in self.ropes)
        return [tuple(part[:, None].to(self.dtype) for part in of_rope) for of_rope in tables]


def _tables(rope: Rope, length: int) -> list[Tensor]:
    """See `FusedModel.rotations`."""
    (cos, sin), of_queries = rope.rotation(length), rope.query_scales(length)
    tables = [torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]
    return tables if of_queries is None else [*tables, of_queries[:, None]]


def end_layers(count: int) -> list[int]:
    """The first and the last of so many layers."""
    return sorted({0, count - 1})


def _unpacked(weight: Weight | Sequence[Weight], bias: Tensor | None, parts: int = 1) -> Linear:
    """A weight [out, in] in float32, in place of `Linear.of`."""
    weights = [weight] if isinstance(weight, (Tensor, Quantized)) else weight
    rows = [widened(one).float() for one in weights]
    return Linear.unpacked(rows[0] if len(rows) == 1 else torch.cat(rows), None if bias is None else bias.float())


def _rearranged(
    config: PreTrainedConfig,
    weights: Weights,
    kept: Sequence[int],
    store: Store,
    dtype: torch.dtype | None = None,
    most: int | None = None,
) -> FusedModel:
    """
    Args:
        kept: the layers that the model shall have.
        store: makes its products.
        dtype: that it computes in; None for that of the device.
        most: the most logits of its head.
    """
    family, width = family_of(config), head_width(config)
    heads, kv_heads = config.num_attention_heads, key_heads(config)
    stated = getattr(config, family.rotated) if family.rotated else None  # true where there is a rotation
    rotated, kinds, seen = stated or [True] * config.num_hidden_layers, kinds_of_ropes(config), windows(config)
    of_kind = [kinds.index(kind) if len(kinds) > 1 else 0 for kind in layer_kinds(config)]
    parts = heads + 2 * kv_heads
    embedding, output = embeddings(config, weights)
    output, dtype = output[:most], dtype or compute_dtype(embedding.dtype, embedding.device)
    joint = partial(_joint, family, weights, store)
    ropes = () if family.positions else Rope.all_of(config, embedding.device)
    # No family has both such an order and norms of heads, whose weights would need it too.
    order = _in_halves(width, 2 * len(ropes[0].frequencies), family.interleaved) if ropes else None

    def norm(name: str) -> Norm:
        weight = plain(weights, f"{name}.weight")
        if family.centred:
            bias = plain(weights, f"{name}.bias").detach().to(dtype)
            return Norm.of(weight.detach().to(dtype), bias, config.layer_norm_epsilon)
        weight = 1 + weight.detach().float() if family.above_one else weight.detach().to(dtype)
        return Norm.of(weight, None, config.rms_norm_eps)

    def rearranged(index: int) -> Layer:
        layer = f"{family.layers}.{index}"
        router, up, down = _mlps(config, weights, index, store)

        def norm_of(name: str | None) -> Norm | None:
            return None if name is None else norm(f"{layer}.{name}")

        qkv = (f"{layer}.{name}" for name in family.qkv)
        of_heads = [norm(f"{layer}.{name}") for name in HEAD_NORMS] if family.normed_heads else None
        return Layer(
            attention_norm=norm_of(family.attention_norm),
            qkv=joint(*qkv, parts=parts, ordered=parts - kv_heads, order=order),
            head_norms=None if of_heads is None else (of_heads[0], of_heads[1]),
            rope=of_kind[index] if ropes and rotated[index] else None,
            out=joint(f"{layer}.{family.out}"),
            mlp_norm=norm_of(family.mlp_norm),
            up=up,
            activate=ACTIVATIONS[activation(config)],
            down=down,
            out_norm=norm_of(family.out_norm),
            down_norm=norm_of(family.down_norm),
            window=seen[index],
            router=router,
        )

    layers, head = _packed(rearranged, kept, output, store)
    return FusedModel(
        layers=layers,
        embedding=embedding,
        positions=plain(weights, family.positions).detach() if family.positions else None,
        ropes=ropes,
        norm=norm(family.norm),
        head=head,
        vocab_size=len(output),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        scales=Scales.of(config),
        dtype=dtype,
    )


def _mlps(
    config: PreTrainedConfig, weights: Weights, index: int, store: Store
) -> tuple[Router | None, tuple[Linear, ...], tuple[Linear, ...]]:
    """The router of a layer, if there is one, and the products of its MLP or of each expert."""
    family, of_layer = family_of(config), mixture(config, index)
    layer, joint = f"{family.layers}.{index}", partial(_joint, family, weights, store)
    if of_layer is None:
        up = joint(*(f"{layer}.{name}" for name in family.up), parts=2 if family.gated else 1)
        return None, (up,), (joint(f"{layer}.{family.down}"),)
    router = Router(joint(f"{layer}.{ROUTER.removesuffix('.weight')}"), of_layer.used, of_layer.normed)

    def each(name: str, parts: int) -> tuple[Linear, ...]:
        whole = weights[f"{layer}.{name}"]  # [experts, outer, inner], or if it is quantized [experts * outer, inner]
        rows = whole.detach().flatten(0, 1) if isinstance(whole, Tensor) else whole
        size = len(rows) // of_layer.count
        return tuple(store(rows[start : start + size], None, parts) for start in range(0, len(rows), size))

    return router, each(EXPERTS_UP, 2), each(EXPERTS_DOWN, 1)


def _in_halves(width: int, turned: int, interleaved: bool) -> list[int] | None:
    """The order of a head's numbers in which number i and number i + width / 2 turn together; None if they do already.

    Only the first `turned` numbers turn. The order of queries and keys does not change their products.
    """
    pairs = range(turned // 2)
    first, second = ([2 * i for i in pairs], [2 * i + 1 for i in pairs]) if interleaved else (pairs, pairs)
    still, half = range(turned, width), (width - turned) // 2
    second = [i + (0 if interleaved else turned // 2) for i in second]
    order = [*first, *still[:half], *second, *still[half:]]
    return None if order == list(range(width)) else order


def _packed(
    layer: Callable[[int], Layer], kept: Sequence[int], output: Weight, store: Store
) -> tuple[tuple[Layer, ...], Linear]:
    """The layers and the head. Where FBGEMM packs them, several at a time, since it uses one core for a weight."""
    if not isinstance(output, Tensor) or not packs_on_one_core(output):
        return tuple(map(layer, kept)), store(output, None)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, torch.get_num_threads())) as threads:
        head = threads.submit(store, output, None)  # takes the longest
        return tuple(threads.map(layer, kept)), head.result()


def _joint(
    family: Family,
    weights: Weights,
    store: Store,
    *names: str,
    parts: int = 1,
    ordered: int = 0,
    order: Sequence[int] | None = None,
) -> Linear:
    """Several linear maps of the same input as one, with their outputs concatenated.

    On a GPU the weights of the model become views of the joint weight, so that memory holds them once.

    Args:
        order: of the outputs of each of the first `ordered` parts.
    """
    owns = [weights[f"{name}.weight"] for name in names]
    if family.transposed:
        owns = [plain(weights, f"{name}.weight").detach().T.contiguous() for name in names]
    biases = [upcast(plain(weights, f"{name}.bias")) for name in names if f"{name}.bias" in weights]
    bias, size = torch.cat(biases) if biases else None, sum(map(len, owns)) // parts
    if order is not None:
        rows = [part * size + (order[i] if part < ordered else i) for part in range(parts) for i in range(size)]
        starts = accumulate(map(len, owns[:-1]), initial=0)  # each has whole parts
        owns = [
            own[[row - start for row in rows[start : start + len(own)]]]
            for own, start in zip(owns, starts, strict=True)
        ]
        bias = None if bias is None else bias[rows]
    tensors = [own.detach() for own in owns if isinstance(own, Tensor)]
    if len(tensors) < len(owns):
        return store(owns, bias, parts)
    weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if order is None and weight.device.type != "cpu" and not family.transposed:
        for name, joint in zip(names, weight.split([len(own) for own in owns]), strict=True):
            plain(weights, f"{name}.weight").data = joint
    return store(weight, bias, parts)


def capped(x: Tensor, cap: float) -> Tensor:
    """x, kept between -cap and cap: cap * tanh(x / cap)."""
    return (x / cap).tanh() * cap

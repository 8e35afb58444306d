"""A forward pass of few operations, for GPT-2 and the families in `families.py`.

It computes the same as transformers' forward, from rearranged weights (`layout.py`) and with preallocated keys and
values. It calls no modules, and makes masks and copies of grouped heads only where needed.

In bfloat16 on a CPU the logits of a token are the same bits in every pass of up to `MOST_ROWS` tokens:

- Packed products of `FusedModel.least_rows` to `MOST_ROWS` rows have this property (measured).
- Attention works on `QUERIES_AT_ONCE` queries at a time. It has the property with at least `LEAST_QUERIES` of them, and
  with as many keys as `padded` says, which fixes the order of its sums.

So for K < `MOST_ROWS` greedy text is the same to the last bit with and without a draft. In float32 the last bits can
differ, which changes a token only where two logits tie exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..system.device import to_device
from ..system.hardware import attends_in_groups, cpu_attends_alike
from ..system.progress import check_stopped
from .exactness import SelfTest
from .families import DEPENDS_ON_LENGTH
from .layout import FusedModel, Layer
from .ops import attention, mixed, normed_heads, plus, rotate
from .passes import in_groups
from .rows import depths_of, mask_of, places
from .runner import ANY_ROWS, Pass, Runner

MOST_ROWS = 9
QUERIES_AT_ONCE, LEAST_QUERIES = 32, 4
KEYS_AT_ONCE, LONGEST_SUM, KEY_STEP = 512, 192, 32  # see `padded`


class SharedPasses:
    """Reads the passes of several runners of a model in one, see `Together`: their products, but not their attention.

    A pass has at most as many rows as the runners are exact for, or is that of one runner.

    Attributes:
        self_test: of this model on this machine; None if there was none.
    """

    def __init__(self, model: FusedModel) -> None:
        self.model = model
        self.self_test: SelfTest | None = None
        self._beginnings: dict[int, SharedPasses] = {}

    def first_layers(self, count: int) -> Any:
        if count not in self._beginnings:
            self._beginnings[count] = type(self)(self.model.first_layers(count))
        return self._beginnings[count]

    @torch.inference_mode()
    def read(self, passes: Sequence[Pass]) -> list[Tensor]:
        most, logits = passes[0].runner.exact_rows or ANY_ROWS, list[Tensor]()
        for group in in_groups(passes, most):
            begun = [(cast(FusedRunner, one.runner), one.ids, one.parents) for one in group]
            parts = [runner.begin(ids, parents) for runner, ids, parents in begun]
            rows = [runner.rows(len(ids), parents) for runner, ids, parents in begun]
            runners, counts = [runner for runner, _, _ in begun], [len(part) for part in parts]
            captured = {layer for runner in runners for layer in runner.captured_layers}
            x, outputs = runners[0].run(torch.cat(parts), rows, captured)
            end_all(runners, counts, outputs)
            logits += runners[0].logits(x).split(counts)
        return logits


Outputs = Mapping[int, Tensor] | Sequence[Tensor]
"""The outputs of layers, by their numbers: [T, hidden] each."""


def end_all(runners: Sequence[FusedRunner], counts: Sequence[int], outputs: Outputs) -> None:
    """End a pass over so many rows of each runner; `outputs` may have more rows."""
    dtype, begin = runners[0].model.dtype, 0
    states = {layers: hidden_states(outputs, layers, dtype) for layers in {one.captured_layers for one in runners}}
    for runner, count in zip(runners, counts, strict=True):
        runner.end(count, states[runner.captured_layers], begin)
        begin += count


def hidden_states(outputs: Outputs, layers: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """A copy of the outputs of layers, beside each other: [T, layers * hidden]. None of no layers."""
    return torch.cat([outputs[layer] for layer in layers], -1).to(dtype) if layers else None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a pass that belong to one sequence: `count` tokens after the first `start` of its cache."""

    cache: Cache
    start: int
    count: int
    parents: Sequence[int] | None

    @property
    def end(self) -> int:
        return self.start + self.count

    def rotations(self) -> list[tuple[Tensor, ...]]:
        """For each of the model's ropes, what `FusedModel.rotations` has of these rows."""
        at = places(self.start, self.count, self.parents)
        return [tuple(part[at] for part in parts) for parts in self.cache.rotations]

    def filled(self, count: int) -> Rows:
        """These and so many copies of the last. They write keys and values too, which the next pass overwrites before
        it reads them."""
        parents = None if self.parents is None else [*self.parents, *[self.parents[-1]] * count]
        return replace(self, count=self.count + count, parents=parents)


class FusedRunner(Runner):
    """A `Runner` of a `FusedModel`. Its cache of `capacity` tokens is allocated at the prefill.

    No row of a tree is exact: with a mask there are gaps between the keys of a branch, and the order of sums depends on
    them.
    """

    def __init__(self, model: FusedModel, capacity: int, together: SharedPasses | None = None) -> None:
        """Runners of the same `together` can be read in one pass."""
        super().__init__(capacity)
        self.model = model
        self.together: Any = together or SharedPasses(model)
        self.device = model.embedding.device
        self.vocab_size = model.vocab_size

    @property
    def length(self) -> int:
        return self._cache.length if self._cache else 0

    @property
    def claimed_rows(self) -> tuple[int, int]:
        """`exact_rows` and `exact_tree_rows` of this engine on the machines on which it was tested."""
        exact = self.model.exact_products and not self.model.scales.score_cap and cpu_attends_alike()
        return (MOST_ROWS if exact else 0), 0

    @property
    def _exact(self) -> tuple[int, int]:
        found: SelfTest | None = self.together.self_test
        return found.exact_of(self.claimed_rows) if found else self.claimed_rows

    @property
    def exact_rows(self) -> int:
        return self._exact[0]

    @property
    def exact_tree_rows(self) -> int:
        return self._exact[1]

    @property
    def cannot_branch(self) -> str | None:
        return DEPENDS_ON_LENGTH if self.model.depends_on_length else None  # a tree needs a longer cache

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        if self._cache:
            self.release()
        self._cache = self._new_cache()
        return self.logits(self._read(ids)[-1:])

    @torch.inference_mode()
    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        return self.logits(self._read(ids, parents))

    def first_layers(self, count: int, capacity: int) -> Runner:
        together = self.together.first_layers(count)
        return FusedRunner(together.model, capacity, together)

    def of_ends(self) -> Callable[[int], FusedRunner]:
        """What makes runners of the model's first and last layer: from a capacity, as in `choose.MakeRunner`."""
        ends = self.model.ends()
        return partial(FusedRunner, ends, together=SharedPasses(ends))

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Begin with a cache that is full of these, [layers, kv_heads, S, width], S at most the capacity."""
        self._cache = self._cache or self._new_cache()
        self._cache.fill(keys, values)
        self._cache.length = self.context

    def rollback(self, length: int) -> None:
        if self._cache:
            self._cache.length = min(self._cache.length, length)

    def release(self) -> None:
        self._cache = self.hidden_states = None

    def _new_cache(self) -> Any:
        return Cache(self.model, self.context)

    def logits(self, x: Tensor) -> Tensor:
        """The logits after T tokens, of the outputs of the last layer [T, hidden]."""
        return self.model.finished(self.model.head(self.model.norm(self._filled(x)))[: len(x)])

    def _filled(self, x: Tensor) -> Tensor:
        """x [T, hidden], padded with copies of its last row to the least rows of the model's products."""
        missing = self.model.least_rows - len(x)
        return torch.cat([x, x[-1:].expand(missing, -1)]) if missing > 0 else x

    def _read(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Read T more tokens. Returns their hidden states after the last layer, [T, hidden]."""
        x, outputs = self.run(self.begin(ids, parents), [self.rows(len(ids), parents)], self.captured_layers)
        self.end(len(ids), hidden_states(outputs, self.captured_layers, self.model.dtype))
        return x

    def begin(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None) -> Tensor:
        """Begin a pass over T tokens: their embeddings, [T, hidden]."""
        self.place(len(ids))
        return self._embed(ids, self._start, parents)

    def place(self, count: int) -> None:
        """Begin a pass over `count` tokens after those in the cache.

        Raises:
            ValueError: the cache has no room for them.
        """
        assert self._cache is not None, "prefill comes first"
        self.check_fits(count)
        self._start = self.length

    def rows(self, count: int, parents: Sequence[int] | None) -> Any:
        """The `count` rows of the pass that has begun."""
        return Rows(self._cache, self._start, count, parents)

    def end(self, count: int, states: Tensor | None, begin: int = 0) -> None:
        """End the pass over `count` tokens, those from row `begin` on in the `states` of captured layers, if any."""
        self._cache.length = self._start + count
        self.hidden_states = None if states is None else states[begin : begin + count]

    def _embed(self, ids: Sequence[int] | Tensor, start: int, parents: Sequence[int] | None = None) -> Tensor:
        x = self.model.embed(to_device(ids, self.device))
        return x if self.model.positions is None else x + self.model.positions[places(start, len(ids), parents)]

    def run(self, x: Tensor, rows: Sequence[Any], captured: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the layers over x [T, hidden], whose rows are those of one sequence after the other.

        Returns the outputs of the last layer and of the captured ones, [T, hidden] each.
        """
        model, count = self.model, len(x)
        x = self._filled(x)
        rows = [*rows[:-1], rows[-1].filled(len(x) - count)]
        counts = [one.count for one in rows]
        masks = {window: [self._mask_of(one, x.dtype, window) for one in rows] for window in model.windows}
        both = zip(rows, masks[model.windows[0]], strict=True)  # the masks of all windows are as wide
        caches = [
            (one.cache.by_layer(0, one.end if mask is None else mask.shape[1]), one.cache.by_layer(one.start, one.end))
            for one, mask in both
        ]
        by_rope = zip(*(one.rotations() for one in rows), strict=True)
        rotations = [[_joined(parts) for parts in zip(*of_rows, strict=True)] for of_rows in by_rope]
        outputs: dict[int, Tensor] = {}

        for index, layer in enumerate(model.layers):
            if count > MOST_ROWS:  # a prompt, of which one layer may take as long as many rounds
                check_stopped()
            normed = layer.attention_norm(x) if layer.attention_norm else x
            qk, v = self._split(layer.qkv(normed), layer, rotations)
            attended = list[Tensor]()
            shares = zip(caches, masks[layer.window], _apart(qk, counts), _apart(v, counts), strict=True)
            for (read, written), mask, own_qk, own_v in shares:
                (keys, values), (new_keys, new_values) = read[index], written[index]
                new_keys.copy_(own_qk[:, model.heads :].transpose(0, 1))
                new_values.copy_(own_v.transpose(0, 1))
                attended.append(self._attend(own_qk, keys, values, mask))
            x = plus(x, layer.out(_joined(attended)), layer.out_norm, model.scales.residual)
            normed = layer.mlp_norm(x) if layer.mlp_norm else x
            x = plus(x, self._mlp(layer, normed), layer.down_norm, model.scales.residual)
            if index in captured:
                outputs[index] = x[:count]
        return x[:count], outputs

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """The MLP of a layer, or the experts of each token, whose outputs are added up from the likeliest on."""
        if layer.router is None:
            return layer.down[0](layer.activate(layer.up[0](x)))
        weights, chosen = layer.router(x)
        outputs = x.new_empty(*chosen.shape, x.shape[-1])  # [T, used, hidden]
        mlps = layer.mlps
        for expert in chosen.unique().tolist():
            up, down = mlps[expert]
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            outputs[rows, ranks] = down(layer.activate(up(self._filled(x[rows]))))[: len(rows)]
        return mixed(outputs, weights)

    def _split(self, qkv: Tensor, layer: Layer, rotations: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys in one tensor, [T, heads + kv_heads, width], and values [T, kv_heads, width]."""
        model = self.model
        qk, v = qkv.view(len(qkv), -1, model.width).split([model.heads + model.kv_heads, model.kv_heads], 1)
        if layer.head_norms:
            parts = zip(layer.head_norms, qk.split([model.heads, model.kv_heads], 1), strict=True)
            qk = torch.cat([normed_heads(norm, part) for norm, part in parts], 1)
        if layer.rope is not None:
            cos, sin, *of_queries = rotations[layer.rope]
            qk = rotate(qk, cos, sin)
            for scale in of_queries:
                qk[:, : model.heads] *= scale
        return qk, v

    def _attend(self, qk: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of the queries of `_split` over keys and values [kv_heads, S, width]: [T, heads * width].

        The query heads that share a key head become more queries of that head, so that no key or value is copied. For
        a prompt (`_mask_of`) they are copied if torch would otherwise need memory for the square of its length.
        """
        (count, _, width), heads, kv_heads = qk.shape, self.model.heads, self.model.kv_heads
        group, keys, values, scale = heads // kv_heads, keys[None], values[None], self.model.scales.attention
        if mask is None or len(mask) == mask.shape[1] == count:  # of a prompt, see `_mask_of`
            q, grouped = qk[:, :heads].transpose(0, 1)[None], attends_in_groups(qk.dtype, qk.device, mask is not None)
            if not grouped:
                keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            return out[0].transpose(0, 1).reshape(count, heads * width)
        padding = len(mask) - group * count
        q = qk[:, :heads].reshape(count, kv_heads, group, width).permute(1, 2, 0, 3)
        q = q.reshape(1, kv_heads, group * count, width)
        q = F.pad(q, (0, 0, 0, padding)) if padding else q
        out = attention(q, keys, values, mask, scale, self.model.scales.score_cap)
        out = out[0, :, : group * count].unflatten(1, (group, count))
        return out.permute(2, 0, 1, 3).reshape(count, heads * width)

    def _mask_of(self, rows: Rows, dtype: torch.dtype, window: int) -> Tensor | None:
        """The mask of these rows where a token sees the last `window` tokens, or all if that is 0.

        It is for grouped queries, see `_mask`. A prompt is read from position 0, so its causal triangle needs no mask,
        and queries are not grouped for its window, [T, T].
        """
        if rows.parents or rows.start or rows.end <= MOST_ROWS or self.model.scales.score_cap:
            return self._mask(rows, dtype, window)
        if not window or window >= rows.end:
            return None
        seen = torch.ones(rows.count, rows.count, dtype=torch.bool, device=self.device).tril_().triu_(1 - window)
        return torch.zeros(rows.count, rows.count, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)

    def _mask(self, rows: Rows, dtype: torch.dtype, window: int) -> Tensor:
        """0 where a grouped query sees a key, minus infinity elsewhere, [group * T, keys], both sizes padded."""
        group = self.model.heads // self.model.kv_heads
        start, end, keys = rows.start, rows.end, padded(rows.end)
        if rows.parents is None:
            mask = torch.full((rows.count, keys), -torch.inf, dtype=dtype, device=self.device).triu_(start + 1)
        else:
            mask = F.pad(mask_of(rows.parents, start, dtype, self.device), (0, keys - end), value=-torch.inf)
        if window:
            positions = torch.arange(end, device=self.device)
            if rows.parents is not None:
                positions[start:] = start + to_device(depths_of(rows.parents), self.device)
            mask[:, :end].masked_fill_(positions <= positions[start:, None] - window, -torch.inf)
        in_last = group * len(mask) % QUERIES_AT_ONCE
        return F.pad(mask.repeat(group, 1), (0, 0, 0, max(0, LEAST_QUERIES - in_last) if in_last else 0))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _apart(x: Tensor, counts: list[int]) -> Sequence[Tensor]:
    return [x] if len(counts) == 1 else x.split(counts)


class Cache:
    """Keys and values [layers, kv_heads, capacity, width] of a run; the first `length` positions are in use."""

    def __init__(self, model: FusedModel, capacity: int) -> None:
        room = capacity + model.least_rows - 1  # a padded pass of one token writes this many more
        shape = len(model.layers), model.kv_heads, padded(room), model.width
        self.keys, self.values = torch.zeros(2, *shape, dtype=model.dtype, device=model.embedding.device)
        self.rotations = model.rotations(room, capacity)
        self.length = 0

    @torch.inference_mode()
    def clear(self) -> None:
        """Fill with zeros. Attention reads masked positions too, and infinity times a weight of zero is NaN."""
        self.keys.zero_()
        self.values.zero_()
        self.length = 0

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """See `FusedRunner.fill`."""
        for part, numbers in ((self.keys, keys), (self.values, values)):
            part[:, :, : numbers.shape[2]] = numbers

    def move(self, start: int, path: Sequence[int]) -> None:
        """Move the rows of a path, counted from `start`, to the positions from `start` on."""
        rows, end = to_device(path, self.keys.device) + start, start + len(path)
        for part in (self.keys, self.values):
            part[:, :, start:end] = part[:, :, rows]

    def by_layer(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """The keys and the values of these positions in each layer, [kv_heads, end - start, width] each."""
        keys, values = self.keys[:, :, start:end].unbind(), self.values[:, :, start:end].unbind()
        return list(zip(keys, values, strict=True))


def padded(keys: int) -> int:
    """The number of keys to give to attention for `keys` in use, so that more keys do not change the order of its sums.

    The kernel reads `KEYS_AT_ONCE` keys at a time. Its product with the values sums up to `LONGEST_SUM` of them in one
    piece, and between one and two times that number in two equal halves (measured), so these are padded to twice
    `LONGEST_SUM`. Other numbers do not change the order; `KEY_STEP` only avoids odd sizes.
    """
    before, rest = divmod(keys, KEYS_AT_ONCE)
    halved = LONGEST_SUM < rest <= 2 * LONGEST_SUM
    return before * KEYS_AT_ONCE + (2 * LONGEST_SUM if halved else round_up(rest, KEY_STEP))


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step

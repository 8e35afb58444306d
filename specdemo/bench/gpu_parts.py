"""The operations of a captured pass one by one, to find the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..engines import ops
from ..engines.fused import Cache as Buffers
from ..engines.gpu import graph
from ..engines.gpu.graph import Graphs, Outcome
from ..engines.layout import Layer
from ..engines.linear import swiglu

Part = Callable[[Layer, Tensor, Tensor], Tensor]  # of a layer, its keys and its values


def parts(
    graphs: Graphs, functions: ModuleType, count: int, live: int
) -> Iterator[tuple[str, Callable[[], object], int | None]]:
    """Each operation of a pass over `count` tokens behind `live` others: name, function, bytes.

    An operation runs in all layers, captured, with each layer's own weights, keys and values, so that no cache holds
    them. It is captured on its first call, with inputs made by torch's own operations, so that one which fails does
    not stop the others. Its bytes are those of the weights or of the keys and values that it reads, None if neither.
    """
    model = graphs.model
    buffers = Buffers(model, max(live + count, graph.ROOM))
    start = torch.tensor([live], device=model.embedding.device)
    first, keys, values, rotation = model.layers[0], buffers.keys, buffers.values, buffers.rotation
    x = torch.randn(count, model.embedding.shape[1]).to(start.device, model.dtype)

    def write_kv(layer: Layer, keys: Tensor, values: Tensor, by: ModuleType = functions) -> Tensor:
        return by.write_kv(qkv, layer.head_norms, rotation if layer.rotated else None, keys, values, rows[by])

    def activate(layer: Layer, *_: Tensor) -> Tensor:
        return functions.swiglu(up) if layer.activate is swiglu else layer.activate(up)

    with torch.inference_mode():  # the inputs
        rows = {by: by.placed(start, None, count, keys.shape[2]) for by in (ops, functions)}
        qkv = ops.product(first.qkv, x, norm=first.attention_norm)
        q = write_kv(first, keys[0], values[0], ops)
        attended = ops.attend(q, keys[0], values[0], rows[ops])
        up = ops.product(first.up, x, norm=first.mlp_norm)
        inner = first.activate(up)
    # These must live as long as the captured passes.
    read = [x, start, *rows.values(), qkv, q, attended, up, inner, keys, values]

    def in_all(part: Part) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for layer, own_keys, own_values in zip(model.layers, keys, values, strict=True):
                out = part(layer, own_keys, own_values)
            return out

        return run

    def weights(inputs: Tensor, outputs: int) -> int:
        return inputs.shape[-1] * outputs * model.embedding.element_size()

    every: dict[str, tuple[Part, int | None]] = {
        "qkv": (lambda layer, *_: functions.product(layer.qkv, x, norm=layer.attention_norm), weights(x, qkv.shape[1])),
        "write_kv": (write_kv, None),
        "attend": (
            lambda _, keys, values: functions.attend(q, keys, values, rows[functions]),
            2 * keys[0, :, : live + count].nbytes,
        ),
        "out": (lambda layer, *_: functions.product(layer.out, attended, plus=x), weights(attended, x.shape[1])),
        "up": (lambda layer, *_: functions.product(layer.up, x, norm=layer.mlp_norm), weights(x, up.shape[1])),
        "activate": (activate, None),
        "down": (lambda layer, *_: functions.product(layer.down, inner, plus=x), weights(inner, x.shape[1])),
    }
    layers = len(model.layers)
    works = [(name, in_all(part), None if size is None else layers * size) for name, (part, size) in every.items()]
    works.append(("head", lambda: functions.product(model.head, x, norm=model.norm), weights(x, model.vocab_size)))
    for name, run, size in works:

        @torch.inference_mode()
        def work(run: Callable[[], Tensor] = run) -> Outcome:
            return run(), read

        @cache
        def captured(work: Callable[[], Outcome] = work) -> Callable[[], Outcome]:
            return graphs.capture(work)

        yield name, lambda captured=captured: captured()(), size  # type: ignore[misc]

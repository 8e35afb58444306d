"""What the parts of a layer add to the rows of a captured pass, of operations as in `ops`."""

from __future__ import annotations

from types import ModuleType
from typing import cast

from torch import Tensor

from ..layout import Layer
from ..linear import Linear, Norm, stacked, swiglu


def added(ops: ModuleType, x: Tensor, step: Linear, inner: Tensor, norm: Norm | None, scale: float) -> Tensor:
    """x [T, hidden] plus step(inner), normed and scaled as the model has it."""
    if norm is None and scale == 1:
        return cast(Tensor, ops.product(step, inner, plus=x))
    return cast(Tensor, ops.plus(x, ops.product(step, inner), norm, scale))


def mlp(ops: ModuleType, x: Tensor, layer: Layer, scale: float) -> Tensor:
    """x [T, hidden] plus what the MLP of a layer adds, or the experts of each row."""
    norm, gated = layer.mlp_norm, layer.activate is swiglu
    if layer.router is None:
        inner = ops.product(layer.up[0], x, norm=norm, gated=gated)
        return added(ops, x, layer.down[0], inner if gated else layer.activate(inner), layer.down_norm, scale)
    shares, chosen = ops.choose(layer.router, ops.product(layer.router.product, x, norm=norm))
    inner = ops.chosen_product(stacked(layer.up), x, chosen, norm=norm, gated=gated)
    outputs = ops.chosen_product(stacked(layer.down), inner if gated else layer.activate(inner), chosen)
    return cast(Tensor, ops.plus(x, outputs, layer.down_norm, scale, shares))

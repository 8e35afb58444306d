"""The weights of a model by the names that transformers gives them, as they are or converted to another number type."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..system.hardware import QUANTIZED, STORED, UNQUANTIZED, unquantized
from .families import OUTPUT, ROUTER, family_of, final_norm_eps
from .quantized import GROUP, TOO_LARGE, Quantized, Weight, quantized

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Weights = Mapping[str, Weight]


def plain(weights: Weights, name: str) -> Tensor:
    """A weight that is never quantized."""
    weight = weights[name]
    assert isinstance(weight, Tensor)
    return weight


def final_norm(config: PreTrainedConfig, weights: Weights) -> tuple[Tensor, float] | None:
    """The weight [hidden] and the epsilon of a model's final RMS norm; None if its norm is not like Llama's."""
    eps, name = final_norm_eps(config), f"{family_of(config.get_text_config()).norm}.weight"
    return None if eps is None or name not in weights else (plain(weights, name).detach(), eps)


def embeddings(config: PreTrainedConfig, weights: Weights) -> tuple[Weight, Weight]:
    """The input and the output embeddings of a known model, [V, hidden] each; one object if they are tied."""
    both = weights[family_of(config).embedding], weights.get(OUTPUT)
    first, last = (one.detach() if isinstance(one, Tensor) else one for one in both)
    assert first is not None
    return first, first if last is None else last


class StoredAs(UserDict[str, Weight]):
    """Weights that are converted to another number type when read, so that memory holds one type at a time."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__(weights)
        self.dtype = dtype

    def __getitem__(self, name: str) -> Weight:
        return stored_as(name, plain(self.data, name), self.dtype)


def stored_as(name: str, weight: Weight, dtype: torch.dtype) -> Weight:
    """A weight in another number type.

    Of a quantized type are matrices whose rows have whole groups, but for those of routers, which choose between whole
    experts. The matrices of the experts of a layer, [experts, outer, inner], become one [experts * outer, inner].
    Vectors beside them are float32, since some are too large for float16. What is quantized already stays as it is,
    unless it has more bits than were asked for.

    Raises:
        ValueError: a number is too large for float16. This is checked on a CPU only.
    """
    rounds = dtype in QUANTIZED.values() and dtype not in STORED and not name.endswith(ROUTER)
    bits = 4 if dtype == torch.quint4x2 else 8
    if isinstance(weight, Quantized):
        return quantized(weight, bits) if rounds and weight.bits > bits else weight
    if rounds and weight.dim() > 1 and weight.shape[-1] % GROUP == 0:
        return quantized(weight.flatten(0, -2), bits)
    if dtype in QUANTIZED.values() and weight.dim() == 1:
        return weight.float()
    dtype = unquantized(dtype)
    stored = weight.to(dtype)
    if dtype == torch.float16 != weight.dtype and weight.device.type == "cpu" and stored.isinf().any():
        raise ValueError(TOO_LARGE)
    return stored


def narrowed(weight: Tensor) -> Tensor:
    """A weight for a file from which `stored_as` makes an unquantized one: a matrix in float32 becomes float16, or
    bfloat16 where a number is too large for it."""
    if weight.dim() == 1 or weight.dtype != torch.float32:
        return weight
    half = weight.to(UNQUANTIZED)
    return weight.bfloat16() if half.isinf().any() else half

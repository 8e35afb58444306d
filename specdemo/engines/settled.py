"""Rotary embeddings whose angles depend on where a pass ends; a run settles on one set of angles.

LongRoPE (Ding et al., arXiv 2402.13753; Phi-3.5, Phi-4-mini) has one set of factors for short texts and one for long
texts. Dynamic NTK rescales its base with the length. transformers chooses by the largest position of a pass, so a token
would get other logits in a pass that reads a draft than in a pass of its own. Here the last position that a run can
reach decides for all of its passes. So a run that stays short writes the text of `generate`, and one that may get long
is treated as a long text from its first token on.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from .families import has_equal_factors
from .modules import with_module, with_parts


class Settled(Module):
    """A rotary embedding in a run of at most `length` tokens. Every pass seems to end at the last of them."""

    def __init__(self, rotary: Any, length: int) -> None:
        super().__init__()
        self.rotary, self.last = with_parts(rotary, {}), length - 1
        # It writes into its buffers, and runs of other lengths may go on at the same time.
        self.rotary._buffers = deepcopy(rotary._buffers)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """The result of the rotary embedding for positions [..., T]: one or several tensors [..., T, width]."""
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.last)
        rotation = self.rotary(x, torch.cat([position_ids, last], -1), *args, **options)
        if isinstance(rotation, Tensor):
            return rotation[..., :-1, :]
        return tuple(part[..., :-1, :] for part in rotation)


def settled(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """The model for a run of at most `length` tokens: itself, or a copy that shares its weights.

    A copy is made if its rotary embedding depends on where a pass ends.
    """
    if has_equal_factors(model.config.get_text_config()):
        return model
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if _depends_on_length(module):
            model = with_module(model, path, Settled(module, length))
    return model


def _depends_on_length(module: Module) -> bool:
    """The test of transformers' `dynamic_rope_update` (`modeling_rope_utils`). Some models have a type for each kind
    of layer."""
    stated = getattr(module, "rope_type", None)
    kinds = stated.values() if isinstance(stated, dict) else [stated]
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)

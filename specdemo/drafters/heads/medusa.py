"""Medusa (Cai et al., arXiv 2401.10774): a residual block and an output of its own for each place of a draft.

It reads the target's last hidden state, behind the target's final norm, and nothing else of the text: it has no decoder
layer. All places are filled in one pass, so it is a kind of block head. It drafts chains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...types import MAX_K, BadInput
from .formats import Config
from .networks import ALL, BlockHead, HeadShape
from .published_shape import TargetSizes

Take = Callable[[str, tuple[int, ...]], Tensor]  # a tensor by its name and shape, checked


class MedusaHead(BlockHead):
    """For each place residual blocks x + silu(W x + b), `layers` of them."""

    def __init__(self, shape: HeadShape, layers: int) -> None:
        super().__init__(shape)
        places, hidden = shape.most_drafted, shape.hidden
        self.blank = None
        self.fuse, self.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.residual = nn.Parameter(torch.zeros(places, layers, hidden, hidden))
        self.residual_bias = nn.Parameter(torch.zeros(places, layers, hidden))

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """See `BlockHead`. The row of the pending token gives nothing: what follows it is the first place's."""
        x = last.expand(k, -1)  # [k, hidden]
        for layer in range(self.residual.shape[1]):
            product = torch.einsum("koi,ki->ko", self.residual[:k, layer], x)
            x = x + F.silu(product + self.residual_bias[:k, layer])
        return torch.cat([pending[None].to(x.dtype), x])


def medusa_head(name: str, config: Config, target: TargetSizes, take: Take) -> MedusaHead:
    """The head of a configuration. Place i has the tensors `i.j.linear` of its blocks j, and its output behind them.

    Raises:
        BadInput: it is not one for this target, or the target's final norm is not one that is known here.
    """
    stated = config.get("medusa_num_heads") or config.get("num_heads"), config.get("medusa_num_layers", 1)
    if not all(isinstance(number, int) and number > 0 for number in stated):
        raise BadInput(f"{name} needs whole numbers medusa_num_heads and medusa_num_layers, but it has {stated}.")
    if target.final_norm is None:
        raise BadInput(
            f"{name} reads the target's last state behind its final norm, and this target's is not known here."
        )
    (weight, eps), hidden = target.final_norm, target.hidden
    places, layers = min(stated[0] or 0, MAX_K), stated[1]
    shape = HeadShape(
        vocab_size=target.vocab_size,
        hidden=hidden,
        target_hidden=hidden,
        state_layers=(target.layers - 1,),
        draft_vocab=target.vocab_size,
        depth=0,
        heads=1,
        kv_heads=1,
        width=2,
        mlp=1,
        eps=eps,
        window=1,
        state_norms=ALL,
        block_size=places + 1,
        rank=0,
    )
    with torch.device("meta"):
        head = MedusaHead(shape, layers)

    def stacked(part: str, *sizes: int) -> Tensor:
        every = [[take(f"{i}.{j}.linear.{part}", sizes) for j in range(layers)] for i in range(places)]
        return torch.stack([torch.stack(row) for row in every])

    weights = {"token_ids": torch.arange(shape.draft_vocab), "state_norm": weight[None]}
    weights |= {"residual": stacked("weight", hidden, hidden), "residual_bias": stacked("bias", hidden)}
    head.load_state_dict(weights, assign=True)
    head.place_outputs = [take(f"{i}.{layers}.weight", (target.vocab_size, hidden)) for i in range(places)]
    return head.requires_grad_(False)

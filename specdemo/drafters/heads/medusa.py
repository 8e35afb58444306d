"""Medusa (Cai et al., arXiv 2401.10774): residual blocks and an output of its own for each place of a draft.

It reads the target's last hidden state and nothing else of the text: it has no decoder layer. All places are filled in
one pass, as those of a block head are, so it drafts chains and trees as that one does.

A head trained here is smaller and knows more (in the manner of Hydra, arXiv 2402.05109). It also reads the pending
token; by the bigram term of a block head, a place knows what was drawn for the one before. The places share the
target's output rows and the first half of a gated layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...types import MAX_K, BadInput
from .formats import Config
from .networks import ALL, BlockHead, HeadShape
from .published_shape import TargetSizes

Take = Callable[[str, tuple[int, ...]], Tensor]  # a tensor by its name and shape, checked


class MedusaHead(BlockHead):
    """Places with `shape.blocks` residual blocks x + silu(W x + b) each, behind the target's final norm; with none, as
    trained here, places that share a gated layer of `shape.mlp` features, before that norm."""

    kind = "medusa"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.blank, places = None, shape.most_drafted
        self.fuse = nn.Identity()  # type: ignore[assignment]
        if shape.blocks:
            self.norm = nn.Identity()  # type: ignore[assignment]
            self.places = nn.ModuleList(
                nn.ModuleList(nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.blocks)) for _ in range(places)
            )
        else:
            self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
            self.gate_up = nn.Linear(2 * shape.hidden, 2 * shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, places * shape.hidden, bias=False)

    def guesses(self, pending: Tensor, last: Tensor) -> Tensor:
        """What the places make of the embedded pending token and the target's state, both [..., hidden]:
        [places, ..., hidden]."""
        if not self.shape.blocks:
            gate, up = self.gate_up(torch.cat([self.token_norm(pending.to(last.dtype)), last], -1)).chunk(2, -1)
            return last + torch.stack(self.down(F.silu(gate) * up).chunk(self.shape.most_drafted, -1))
        places = []
        for blocks in self.places:
            x = last
            for block in cast(nn.ModuleList, blocks):
                x = x + F.silu(block(x))
            places.append(x)
        return torch.stack(places)

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """See `BlockHead`. The row of the pending token gives nothing: what follows it is the first place's."""
        return torch.cat([pending[None].to(last.dtype), self.guesses(pending[None], last[None])[:k, 0]])


def medusa_shape(
    target: TargetSizes, eps: float, places: int, draft_vocab: int, *, blocks: int = 0, mlp: int = 0, rank: int = 0
) -> HeadShape:
    """The sizes of a head with so many places; it has no decoder layer, so most of theirs stand for nothing."""
    return HeadShape(
        vocab_size=target.vocab_size,
        hidden=target.hidden,
        target_hidden=target.hidden,
        state_layers=(target.layers - 1,),
        draft_vocab=draft_vocab,
        depth=0,
        heads=1,
        kv_heads=1,
        width=2,
        mlp=mlp,
        eps=eps,
        window=1,
        state_norms=ALL,
        block_size=places + 1,
        blocks=blocks,
        rank=rank,
    )


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
    places, blocks = min(stated[0] or 0, MAX_K), stated[1]
    with torch.device("meta"):
        head = MedusaHead(medusa_shape(target, eps, places, target.vocab_size, blocks=blocks))
    weights = {"token_ids": torch.arange(target.vocab_size), "state_norm": weight[None]}
    for i in range(places):
        for j in range(blocks):
            weights[f"places.{i}.{j}.weight"] = take(f"{i}.{j}.linear.weight", (hidden, hidden))
            weights[f"places.{i}.{j}.bias"] = take(f"{i}.{j}.linear.bias", (hidden,))
    head.load_state_dict(weights, assign=True)
    head.place_outputs = [take(f"{i}.{blocks}.weight", (target.vocab_size, hidden)) for i in range(places)]
    return head.requires_grad_(False)

"""Medusa: all K tokens from one hidden state, by a head without decoder layers (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import BadInput
from ...settings import MAX_K
from .drafter import HeadDrafter
from .networks import Head
from .published import PublishedHead
from .published_shape import MOST_LAYERS
from .ready import HeadPasses


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """The sizes of a Medusa head, which has no decoder layers; see `HeadShape` for those of the same name."""

    vocab_size: int
    hidden: int
    state_layers: tuple[int, ...]  # the last one
    draft_vocab: int
    eps: float
    places: int  # of a draft
    blocks: int = 0  # residual blocks of each place; 0 where these share a gated layer
    mlp: int = 0  # features of that layer
    rank: int = 0  # of the bigram term; 0 where there is none

    window: ClassVar[int] = 1  # it reads no token but the last
    bigram_table: ClassVar[bool] = False

    @property
    def most_drafted(self) -> int:
        return self.places

    @property
    def states(self) -> int:
        return self.hidden


class MedusaHead(Head):
    """A guess for each place of a draft, from the target's last hidden state.

    It reads nothing else of the text and keeps nothing: it has no decoder layer. Each place has residual blocks
    x + silu(W x + b), after the target's final norm, and an output of its own.

    A head trained here is smaller and knows more (in the manner of Hydra, arXiv 2402.05109). It also reads the pending
    token, and the bigram term of a block head tells a place what was drawn for the previous one. The places share the
    target's output rows, and the first half of a gated layer of `shape.mlp` features before the final norm.
    """

    kind = "medusa"
    shape: MedusaShape

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        self.add_bigrams(shape)
        if shape.blocks:
            self.norm = nn.Identity()  # type: ignore[assignment]
            self.places = nn.ModuleList(
                nn.ModuleList(nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.blocks))
                for _ in range(shape.places)
            )
        else:
            self.norm = nn.RMSNorm(shape.hidden, shape.eps)
            self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
            self.gate_up = nn.Linear(2 * shape.hidden, 2 * shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, shape.places * shape.hidden, bias=False)

    @classmethod
    def of_published(cls, published: PublishedHead) -> MedusaHead:
        """See `Head`. Place i has the tensors `i.j.linear` of its blocks j, and its output after them."""
        name, config, target, take = published.name, published.config, published.target, published.take
        stated = config.get("medusa_num_heads") or config.get("num_heads"), config.get("medusa_num_layers", 1)
        if not all(isinstance(number, int) and 0 < number <= MOST_LAYERS for number in stated):
            raise BadInput(f"{name} needs whole numbers medusa_num_heads and medusa_num_layers, but it has {stated}.")
        if target.final_norm is None:
            raise BadInput(
                f"{name} reads the target's last state after its final norm, and this target's is not known here."
            )
        (weight, eps), hidden, vocab = target.final_norm, target.hidden, target.vocab_size
        places, blocks = min(stated[0] or 0, MAX_K), stated[1]
        with torch.device("meta"):
            head = cls(MedusaShape(vocab, hidden, (target.layers - 1,), vocab, eps, places, blocks))
        weights = {"token_ids": torch.arange(vocab), "state_norm": weight[None]}
        for i in range(places):
            for j in range(blocks):
                weights[f"places.{i}.{j}.weight"] = take(f"{i}.{j}.linear.weight", hidden, hidden)
                weights[f"places.{i}.{j}.bias"] = take(f"{i}.{j}.linear.bias", hidden)
        head.load_state_dict(weights, assign=True)
        head.place_outputs = [take(f"{i}.{blocks}.weight", vocab, hidden) for i in range(places)]
        return head.requires_grad_(False)

    @classmethod
    def shape_from(cls, fields: dict[str, Any]) -> MedusaShape:
        if "places" in fields:
            return MedusaShape(**fields)
        # Older files have the sizes of a block head without layers.
        known = {field.name: fields[field.name] for field in dataclass_fields(MedusaShape) if field.name in fields}
        return MedusaShape(places=fields["block_size"] - 1, **known)

    def guesses(self, pending: Tensor, last: Tensor) -> Tensor:
        """The output of each place for the embedded pending token and the target's state, both [..., hidden]:
        [places, ..., hidden]."""
        if not self.shape.blocks:
            gate, up = self.gate_up(torch.cat([self.token_norm(pending.to(last.dtype)), last], -1)).chunk(2, -1)
            return last + torch.stack(self.down(F.silu(gate) * up).chunk(self.shape.places, -1))
        places = []
        for blocks in self.places:
            x = last
            for block in cast(nn.ModuleList, blocks):
                x = x + F.silu(block(x))
            places.append(x)
        return torch.stack(places)


class MedusaPasses(HeadPasses):
    """A few products over the target's last state. Nothing is kept of the text."""

    def start(self, states: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        return self.guess(states[-1:], tokens[-1:], k), tokens[-1:]

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        one, longest = self.states_and_tokens()[-1], self.ready.head.shape.places
        return {"guess": [(*one, k) for k in range(longest, 0, -1)]}

    def guess(self, state: Tensor, pending: Tensor, k: int) -> Tensor:
        """The logits of k places, from a state [1, hidden] and the pending token [1]: [k, V']."""
        ready = self.ready
        guesses = ready.head.guesses(ready.embed(pending), ready.head.fused(state))  # [places, 1, hidden]
        return ready.logits(guesses[:k, 0])


class Medusa(HeadDrafter):
    """Draws K tokens, one from the logits of each place of a Medusa head."""

    name = "medusa"
    network = MedusaHead
    passes = MedusaPasses

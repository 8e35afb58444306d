"""A block head: all K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..chain import NextLogits
from .backends import NativeBackend
from .drafter import HeadDrafter
from .networks import BlockHead
from .ready import LayeredPasses, ReadyHead, StartPass


class BlockPasses(LayeredPasses):
    """One pass over what the target has read since the last draft, and one over the block after it."""

    def __init__(self, ready: ReadyHead[BlockHead], capacity: int, captured: bool = False) -> None:
        super().__init__(ready, capacity, captured)
        self.start_is_one_pass = ready.head.selector is None  # which needs more than logits
        shape = ready.head.shape
        self.last = ready.zeros(shape.hidden)  # the fused state of the last token read
        self.masks = ready.zeros(max(shape.block_size - 1, 0), dtype=torch.long) + (shape.mask_token or 0)

    def start(self, states: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        self.read(states)
        return *self.block(tokens[-1:], k), tokens[-1:]

    def following(self, *given: Tensor) -> NextLogits:
        selector = self.ready.head.selector
        if selector is None:
            return super().following(*given)
        *candidates, pending = given

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            unary, tokens, gate = (rows[len(drawn) : len(drawn) + 1] for rows in candidates)
            logits: Tensor = selector.logits(unary, tokens, gate, drawn[-1] if drawn else pending)
            return logits

        return next_logits

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        both, longest = self.states_and_tokens(), self.ready.head.shape.most_drafted
        return {
            "read": [(states,) for states, _ in both],
            "block": [(both[-1][1], k) for k in range(longest, 0, -1)],
        }

    def read(self, states: Tensor) -> None:
        """Write the entries of T states of the target, [T, layers * hidden], in each layer, and make them live."""
        fused = self.ready.head.fused(states)
        self.backend.run(fused, outputs=0)
        self.backend.advance(len(states))
        self.last.copy_(fused[-1])

    def block(self, pending: Tensor, k: int) -> tuple[Tensor, ...]:
        """The logits [k, V'] of k positions after the pending token [1], or what a selector needs of them.

        A block of masks always has its full size, as in training: all of its tokens see each other.
        """
        x = self.entering(pending, k)
        outputs = self.of_places(self.backend.run(x, outputs=len(x)), k)
        logits, head = self.backend.logits(outputs), self.ready.head
        return (logits,) if head.selector is None else head.selector.candidates(logits, head.norm(outputs))

    def entering(self, pending: Tensor, k: int) -> Tensor:
        """What the tokens of a block enter the layers with, [T, hidden]."""
        ready = self.ready
        if ready.head.shape.mask_token is None:
            return ready.head.block(ready.embed(pending)[0], self.last, k)  # [k + 1, hidden]
        return ready.embed(torch.cat([pending, self.masks]))  # [block_size, hidden]

    def of_places(self, outputs: Tensor, k: int) -> Tensor:
        """Those of the outputs of a block that give the logits of its k places."""
        first = 0 if self.ready.head.shape.from_anchor else 1
        return outputs[first : first + k]

    @staticmethod
    def read_all(wanted: Sequence[StartPass]) -> list[Tensor]:
        """Blocks of as many tokens are read in one pass."""
        every = [cast(BlockPasses, each.passes) for each in wanted]
        backends, nothing = [passes.backend for passes in every], [None] * len(every)
        fused = [passes.ready.head.fused(each.states) for passes, each in zip(every, wanted, strict=True)]
        NativeBackend.run_all(backends, fused, nothing, outputs=0)
        for passes, states in zip(every, fused, strict=True):
            passes.backend.advance(len(states))
            passes.last.copy_(states[-1])
        entering = [passes.entering(each.tokens[-1:], each.k) for passes, each in zip(every, wanted, strict=True)]
        outputs: dict[int, Tensor] = {}
        for size in {len(x) for x in entering}:
            places = [place for place, x in enumerate(entering) if len(x) == size]
            some = [backends[place] for place in places], [entering[place] for place in places]
            found = NativeBackend.run_all(*some, nothing[: len(places)], outputs=size)
            outputs |= zip(places, found.split(size), strict=True)
        rows = [passes.of_places(outputs[place], wanted[place].k) for place, passes in enumerate(every)]
        return list(backends[0].logits(torch.cat(rows)).split([len(each) for each in rows]))


class Block(HeadDrafter):
    """Draws K tokens from one pass of the head."""

    name = "block"
    network = BlockHead
    passes = BlockPasses


class DSpark(Block):
    """`Block` with a head of its own, so that DFlash and DSpark can race each other."""

    name = "dspark"


class DFlash2(Block):
    name = "dflash2"

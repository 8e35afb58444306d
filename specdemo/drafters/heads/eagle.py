"""EAGLE: a one-layer head that continues the target's own hidden states (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...decoding.drafter import CHAIN, DraftOptions
from ...engines.passes import PendingPass, answered
from ...system.device import to_device
from ...tokens import Draft
from ..captured_trees import CapturedTrees, Growth, paths_of, paths_of_text
from ..chain import NextLogits, NextPass
from ..tree import grow_by_depth
from .backends import NativeBackend
from .drafter import HeadDrafter
from .networks import EagleHead
from .ready import HeadPass, LayeredPasses, ReadyHead

DEPTHS = 6  # of a tree in a captured call; nine in ten trees of 16 tokens end within (SmolLM2-135M, T = 0 and 0.8)


class EaglePasses(LayeredPasses):
    """The first pass of a draft reads the target's new states, the others the head's own last output."""

    start_is_one_pass = False

    def __init__(self, ready: ReadyHead[EagleHead], capacity: int, captured: bool = False) -> None:
        super().__init__(ready, capacity, captured)
        self.output = ready.zeros(1, ready.head.shape.hidden, dtype=self.backend.dtype)

    def begin(self, states: Tensor, tokens: Tensor, k: int) -> NextPass:
        return lambda drawn: EaglePass(self, drawn[-1]) if drawn else EaglePass(self, tokens, states)

    def start(self, states: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        return (self.first(states, tokens),)

    def following(self, *given: Tensor) -> NextLogits:
        return lambda drawn: EaglePasses.next(self, drawn[-1]) if drawn else given[0]  # not the captured `next`

    def state(self) -> tuple[Tensor, ...]:
        return (self.output, *super().state())

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        both = self.states_and_tokens()
        return {"first": both, "next": [both[-1][1:]]}

    def first(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Read T states of the target [T, layers * hidden] with the tokens that follow them [T]."""
        return self._read(self.ready.head.fused(states), tokens)

    def next(self, token: Tensor) -> Tensor:
        """Read the output of the last pass with the token that was drawn from its logits, [1]."""
        return self._read(self.output, token)

    def _read(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The logits after the last of T pairs, [1, V']; the entries of all become live."""
        output = self.backend.run(x, self.ready.embed(tokens), outputs=1)
        self.output.copy_(self.feedback(output))
        self.backend.advance(len(tokens))
        return self.backend.logits(output)

    @staticmethod
    def read_all(wanted: Sequence[EaglePass]) -> list[Tensor]:
        """`first` and `next` of several texts in one pass of the C library."""
        all_passes, ready = [each.passes for each in wanted], wanted[0].passes.ready
        x = [each.passes.output if each.states is None else ready.head.fused(each.states) for each in wanted]
        second = [ready.embed(each.tokens) for each in wanted]
        outputs = NativeBackend.run_all([passes.backend for passes in all_passes], x, second, outputs=1)
        logits = wanted[0].passes.backend.logits(outputs)  # what can fail comes before what cannot be undone
        for passes, each, fed_back in zip(all_passes, wanted, wanted[0].passes.feedback(outputs).split(1), strict=True):
            passes.output.copy_(fed_back)
            passes.backend.advance(each.rows)
        return list(logits.split(1))

    def branch(self, x: Tensor, tokens: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        """Read T tokens of a tree with the outputs of their parents. Returns outputs [T, hidden] and logits [T, V']."""
        output = self.backend.run(x, self.ready.embed(tokens), outputs=len(x), rows=rows)
        return self.feedback(output), self.backend.logits(output)

    def feedback(self, output: Tensor) -> Tensor:
        """What the next pass reads of the outputs of this one, [T, hidden]."""
        head = self.ready.head
        return head.norm(output.to(self.ready.dtype)) if head.shape.normed_feedback else output


@dataclass(frozen=True, slots=True)
class EaglePass(HeadPass):
    """What a draft asks for: `EaglePasses.first` where there are states of the target, else `EaglePasses.next`."""

    passes: EaglePasses
    tokens: Tensor
    states: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def read(self) -> Tensor:
        passes = self.passes
        return passes.next(self.tokens) if self.states is None else passes.first(self.states, self.tokens)


class EagleTree:
    """Reads trees, see `captured_trees.Reader`: a token reads the output of its parent, and sees the entries of its
    ancestors."""

    def __init__(self, passes: EaglePasses) -> None:
        self.passes = passes
        self.state: Sequence[Tensor] = passes.output, paths_of_text(passes.output.device)

    def begin(self, *given: Tensor) -> Tensor:
        return given[0]

    def read(self, growth: Growth) -> Tensor:
        outputs, paths = self.state
        paths = paths_of(growth, paths)
        outputs, logits = self.passes.branch(outputs[growth.rows], growth.token_ids, paths)
        self.state = outputs, paths
        return logits


class Eagle(HeadDrafter):
    """Draws K tokens one after another from the head."""

    name = "eagle"
    network = EagleHead
    passes = EaglePasses

    @torch.inference_mode()
    def propose(
        self, context: Sequence[int], k: int, options: DraftOptions = CHAIN
    ) -> Generator[PendingPass, Tensor, Draft]:
        """A tree takes one pass for each depth."""
        depth, stop, _ = options
        if depth is None:
            return (yield from super().propose(context, k, options))
        passes, states, tokens = self._unread_with(context)
        known = self.ready.token_ids
        if passes.functions and CapturedTrees.possible():
            trees = CapturedTrees(partial(EagleTree, passes), passes.functions, known, DEPTHS)
            return trees.draw(passes.start(states, tokens, 1), k, depth, self.rule, len(context), stop)
        logits = yield from answered(passes.begin(states, tokens, 1)(()))
        outputs = [passes.output]  # after the text, and after each row

        def read(of_depth: list[int], parents: list[int]) -> Tensor:
            count = len(of_depth)
            x = torch.cat([outputs[row + 1] for row in parents[-count:]])
            output, logits = passes.branch(x, to_device(of_depth, x.device), passes.backend.rows(parents, count))
            outputs.extend(output.split(1))
            return logits

        return (yield from grow_by_depth(logits, read, k, depth, self.rule, len(context), known, stop))

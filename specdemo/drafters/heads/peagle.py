"""P-EAGLE (Hui et al., arXiv 2602.01469): an EAGLE-3 head of several layers that fills all places in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...settings import MAX_K
from .drafter import HeadDrafter
from .networks import BlockLayer, EagleHead
from .ready import LayeredPasses, ReadyHead
from .shapes import HeadShape

MOST_READ = 512  # tokens of a prompt in a pass, since the mask of their attention grows with their square


class PEagleHead(EagleHead):
    """An EAGLE-3 head with more layers and a mask for each place of a draft but the first.

    The first layer reads pairs as EAGLE's does, further ones are plain. A pair of a place after the first is the mask
    token's embedding and `mask_hidden` [states], a learned vector that is fused as the target's hidden states are. A
    token of a pass sees those before it, masks included. This is what vLLM computes (`llama_eagle3.py` and
    `llm_base_proposer.py`), and what the library speculators trains (`models/peagle/core.py`).
    """

    kind = "p-eagle"
    in_library = False  # the C library has no layers of different kinds, nor an output of each token in causal ones

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.zeros(shape.states))
        self.layers = nn.ModuleDict({str(index): BlockLayer(shape) for index in range(1, shape.depth)})

    def decoder_layers(self) -> Sequence[Any]:
        return [self, *self.layers.values()]


class PEaglePasses(LayeredPasses):
    """One pass over what the target has read since the last draft and the masks after it.

    The entries of the masks do not become live: the next pass overwrites them.
    """

    def __init__(self, ready: ReadyHead[PEagleHead], capacity: int, captured: bool = False) -> None:
        super().__init__(ready, capacity, captured)
        self.masks = ready.zeros(MAX_K - 1, dtype=torch.long) + (ready.head.shape.mask_token or 0)
        with torch.inference_mode():
            self.masked = ready.head.fused(ready.head.mask_hidden)  # [hidden]

    def start(self, states: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        # No place sees those after it, so captured passes need one length of draft only.
        return self.places(states, tokens, MAX_K if self.functions else k)[:k], tokens[-1:]

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        return {"places": [(*both, MAX_K) for both in self.states_and_tokens()]}

    def places(self, states: Tensor, tokens: Tensor, k: int) -> Tensor:
        """The logits [k, V'] of k places after T states of the target [T, layers * hidden] and the tokens that follow
        them [T], whose entries become live."""
        fused = self.ready.head.fused(states)
        *parts, (x, last) = zip(fused.split(MOST_READ), tokens.split(MOST_READ), strict=True)
        for earlier, their_tokens in parts:
            self.backend.run(earlier, self.ready.embed(their_tokens), outputs=len(earlier))
            self.backend.advance(len(earlier))
        x = torch.cat([x, self.masked.expand(k - 1, -1)])
        outputs = self.backend.run(x, self.ready.embed(torch.cat([last, self.masks[: k - 1]])), outputs=len(x))
        self.backend.advance(len(last))
        return self.backend.logits(outputs[len(last) - 1 :])


class PEagle(HeadDrafter):
    """Draws K tokens from one pass of the head."""

    name = "p-eagle"
    network = PEagleHead
    passes = PEaglePasses

"""The multi-token-prediction (MTP) layer that a target brings in its own checkpoint (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_layers import MtpModel

from ..decoding.acceptance import Answer
from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Needs
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.eager import PreallocatedCache, for_sampling
from ..engines.passes import PendingPass
from ..engines.runner import Runner
from ..settings import MAX_K
from ..system.device import to_device
from ..system.progress import tell
from ..tokens import Draft
from .chain import draw_chain


class MtpHead:
    """An MTP layer, run by transformers' own code, with the embeddings of its target where it has none of its own.

    It reads the state of a token beside the embedding of the token that follows: a norm of each, a projection, a
    decoder layer and a norm. The target's output layer turns the result into logits of the token after that. Only the
    first step is trained. Later steps read the layer's own last output in place of a state of the target.

    The states of the target are those after its final norm, and those fed back are after the layer's own, as in SGLang
    for all families. Others began with states before a norm, and found that more guesses are accepted with those after
    it (the target's: llama.cpp #24025, lablup/mlxcel #1753; the layer's own: ROCm/ATOM #1764).
    """

    def __init__(self, layer: MtpModel, final_norm: Module, target_layers: int) -> None:
        self.layer, self.final_norm, self.target_layers = layer, final_norm, target_layers
        weight = layer.layers[0].eh_proj.weight
        self.device, self.dtype = weight.device, weight.dtype

    @torch.inference_mode()
    def normed(self, states: Tensor) -> Tensor:
        """Outputs of the target's last decoder layer [T, hidden] after its final norm."""
        after: Tensor = self.final_norm(states.to(self.device, self.dtype))
        return after

    @torch.inference_mode()
    def read(self, states: Tensor, tokens: Tensor, cache: PreallocatedCache, live: int) -> tuple[Tensor, Tensor]:
        """Read T states [T, hidden], each with the token that follows it [T], after the first `live` cache entries.

        Returns the last output, [1, hidden], and the logits from it, [1, V].
        """
        cache.seek(live)
        positions = torch.arange(live, live + len(states), device=self.device)[None]
        output = self.layer.forward_layer(0, states[None], positions, cache, input_ids=tokens.to(self.device)[None])
        last = output[0, -1:]
        return last, for_sampling(self.layer.shared_head(last))


class Mtp(Drafter):
    """Draws K tokens one after another from the target's own MTP layer.

    As in `heads`, the layer's cache holds one entry for each token that the target has read; those of drafted
    tokens follow, and the next round overwrites them. It drafts chains only: no engine checks trees of these targets.
    """

    name = "mtp"

    def __init__(self, head: MtpHead, runner: Runner, rule: Rule) -> None:
        self.head, self.runner, self.rule = head, runner, rule
        self._unread: list[Tensor] = []  # states without an entry in the cache, [T, hidden] each
        self._live = 0  # entries made of the target's states
        self._cache = PreallocatedCache(runner.context + MAX_K)
        runner.capture_hidden_states([head.target_layers - 1])

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        missing = parts.open_mtp if isinstance(parts.open_mtp, str) else None
        return Needs(missing, device=parts.embedding_device)

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Mtp:
        """
        Raises:
            LoadError: the checkpoint's layer is damaged.
        """
        if cls.name not in parts.ready_heads:
            assert not isinstance(parts.open_mtp, str), "the preset has none"
            tell("opening the MTP layer")
            parts.ready_heads[cls.name] = parts.open_mtp()
        return cls(parts.ready_heads[cls.name], runner, rule)

    def propose(
        self, context: Sequence[int], k: int, options: DraftOptions = CHAIN
    ) -> Generator[PendingPass, Tensor, Draft]:
        states, self._unread = torch.cat(self._unread), []
        live, self._live = self._live, self._live + len(states)
        unread = to_device(context[-len(states) :], self.head.device)
        output = states

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            nonlocal output
            at = self._live + len(drawn) - 1 if drawn else live
            output, logits = self.head.read(output, drawn[-1] if drawn else unread, self._cache, at)
            return logits

        size = self.runner.vocab_size
        return (yield from draw_chain(next_logits, k, self.rule, len(context), None, size, options.stop_below))

    def observe(self, answer: Answer) -> None:
        states = self.runner.hidden_states  # of what was kept of the last pass
        assert states is not None, "the target has read the text"
        self._unread.append(self.head.normed(states))

    def release(self) -> None:
        self._unread, self._cache = [], PreallocatedCache(0)

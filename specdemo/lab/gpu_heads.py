"""Untrained heads for whatever target: hardly anything they draft passes, but drafting takes what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.block import Block, BlockPasses
from ..drafters.eagle import Eagle, EaglePasses
from ..drafters.head import HeadDrafter, HeadPasses, ReadyHead, Shape
from ..drafters.head_cache import HeadCache
from ..runners.graph import Capture, Run
from ..runners.layout import embeddings, head_width

WITH_HEADS: dict[str, type[HeadDrafter]] = {"eagle": Eagle, "block": Block}
DRAFT_VOCAB = 8192  # as large as the shipped heads' at most
READS = ((60, 0), (1, 60), (5, 61), (17, 550), (1, 567))  # states to read, and entries that are live before them
CONTEXT = 700  # tokens: some more than the window


def random_head(kind: type[HeadDrafter], target: PreTrainedModel, capture: Capture | None = None) -> ReadyHead:
    """A head with layers of the target's shape, two of them where it has several; captured if told how."""
    config = target.config.get_text_config()
    last, vocab = config.num_hidden_layers - 1, config.vocab_size
    layer = config.num_attention_heads, config.num_key_value_heads, head_width(config), 2 * config.hidden_size
    shape = Shape(vocab, config.hidden_size, (0, last // 2, last), min(vocab, DRAFT_VOCAB), 2, *layer, 1e-5)
    ready = ReadyHead(kind.kind(shape), *embeddings(dict(target.named_parameters())))
    if capture:
        ready.capture(kind.passes_kind, capture)
    return ready


@torch.inference_mode()
def logits_of_captured(kind: type[HeadDrafter], ready: ReadyHead) -> list[tuple[Tensor, Tensor]]:
    """Logits of drafts by captured passes and by others, after the same random states."""
    assert ready.slots, "nothing is captured"
    shape, device = ready.head.shape, ready.embedding.device
    states = torch.randn(CONTEXT, len(shape.state_layers) * shape.hidden, device=device).to(ready.dtype)
    tokens = torch.randint(shape.vocab_size, (CONTEXT,), device=device)
    cache = HeadCache(shape, 2 * CONTEXT, states)
    runs = ready.slots.take(Asking()), kind.passes_kind(ready, cache)
    found = []
    for count, live in READS:
        read = slice(live, live + count)
        for passes in runs:
            passes.cache.go_to(live)
        ours, theirs = (_drafted(passes, states[read], tokens[read], tokens[-3:].split(1)) for passes in runs)
        found.append((ours, theirs))
    ready.slots.give(runs[0])
    return found


class Asking(Run):
    """What needs a slot."""

    context = CONTEXT


def _drafted(passes: HeadPasses, states: Tensor, tokens: Tensor, drawn: Sequence[Tensor]) -> Tensor:
    """The logits of a draft in which these tokens are drawn."""
    if isinstance(passes, EaglePasses):
        rows = [passes.first(states, tokens).clone()]
        return torch.cat([*rows, *(passes.next(token).clone() for token in drawn)])
    assert isinstance(passes, BlockPasses)
    passes.read(states)
    return passes.block(tokens[-1:], len(drawn)).clone()

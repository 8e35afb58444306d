"""The sizes of heads with decoder layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...engines.ropes import Rope
from ...settings import MAX_K

ROPE_THETA = 10_000.0
ALL_TOKENS = 2**31 - 1  # a window that ends nowhere
RANK = 64  # of the bigram term of the heads that are trained here
EACH, ALL, NONE = "each", "all", "none"  # of the target's states are normed before they are fused: by itself, together


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Fields with a default are for published heads (`published`); the default is that of the heads trained here."""

    vocab_size: int  # V, the target's
    hidden: int  # the head's hidden size
    state_layers: tuple[int, ...]  # the target's layers whose outputs the head reads
    draft_vocab: int  # V', how many tokens it can draft
    depth: int
    heads: int
    kv_heads: int
    width: int  # of an attention head
    mlp: int
    eps: float
    window: int = 512  # how many tokens a head attends to; it is trained on texts no longer
    target_hidden: int = 0  # the target's hidden size; 0 stands for the head's
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": ROPE_THETA})  # as transformers names them
    state_norms: str = EACH
    fused_norm: bool = False  # what was fused is normed too
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False  # queries and keys are normed before they are rotated, as in Qwen3
    normed_residual: bool = False  # the residual of an eagle or a P-EAGLE head is normed
    normed_feedback: bool = False  # an eagle head reads its own output normed
    mask_token: int | None = None  # what a place to be filled begins as; None is the target's last hidden state
    # Of a block head:
    layer_windows: tuple[int, ...] = ()  # of each layer, where they differ; `window` is then the largest
    block_size: int = 0  # tokens of a block, the pending one included; 0: as many as are needed
    from_anchor: bool = False  # the output of the pending token gives the first of the draft
    normed_context: bool = True  # the target's fused states go through the norms of the layers too
    rank: int = RANK  # of the bigram term; 0 where there is none
    bigram_table: bool = False  # the bigram term begins with a table of tokens and not with their embeddings
    conv_taps: int = 0  # how many tokens of a block a convolution reads; 0 where there is none
    conv_group: int = 0  # how many channels share what a token adds to the kernel
    candidates: int = 0  # how many tokens of a place can be drawn; 0: all of them
    selector_rank: int = 0  # of the term that tells the candidates apart

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens each layer attends to."""
        return self.layer_windows or (self.window,) * self.depth

    @property
    def most_drafted(self) -> int:
        return self.block_size - (not self.from_anchor) if self.block_size else MAX_K

    @property
    def states(self) -> int:
        """How many numbers the target's hidden states of a token are."""
        return len(self.state_layers) * (self.target_hidden or self.hidden)


def frequencies(width: int, device: torch.device | None = None, theta: float = ROPE_THETA) -> Tensor:
    """The frequencies of the rotary embedding (Su et al., arXiv 2104.09864), in radians per position, [width / 2]."""
    return theta ** -(torch.arange(width // 2, device=device) / (width // 2))


def rope_of(shape: HeadShape) -> Rope:
    if shape.rope.get("rope_type", "default") == "default":
        return Rope(frequencies(shape.width, theta=shape.rope["rope_theta"]))
    from transformers import PreTrainedConfig  # late, since few heads rescale their frequencies

    config = PreTrainedConfig(
        rope_parameters=dict(shape.rope),
        head_dim=shape.width,
        hidden_size=shape.heads * shape.width,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.rope.get("original_max_position_embeddings"),
    )
    return Rope.of(config, torch.device("cpu"))

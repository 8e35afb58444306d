"""The rotary embeddings of a known model: the angles by which each position turns queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .families import (
    FULL,
    family_of,
    has_equal_factors,
    has_growing_queries,
    has_ropes_by_kind,
    head_width,
    layer_kinds,
    rope_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding (Su et al., arXiv 2104.09864).

    Number i of a head and number i + width / 2 turn together, by `frequencies` radians per position, float32 [up to
    width / 2]. `scale` multiplies cosines and sines (YaRN). The last `still` pairs of a head do not turn.

    `growth` is how much rotated queries grow with each `span` positions, see `query_scales`. LongRoPE (Ding et al.,
    arXiv 2402.13753) has a rotation `beyond` for runs that can get longer than `longest` tokens, see `of_run`.
    """

    frequencies: Tensor
    scale: float = 1.0
    still: int = 0
    growth: float = 0.0
    span: int = 1
    beyond: Rope | None = None
    longest: int = 0

    def of_run(self, length: int) -> Rope:
        """The rotation of a run of at most `length` tokens: one for all of its passes, as in `settled`."""
        return self.beyond if self.beyond is not None and length > self.longest else self

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `length` positions, float32 [length, width / 2] each."""
        angles = torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return (F.pad(cos, (0, self.still), value=1.0), F.pad(sin, (0, self.still))) if self.still else (cos, sin)

    def query_scales(self, length: int) -> Tensor | None:
        """What multiplies the rotated queries of the first `length` positions, float32 [length]; None for nothing.

        It is 1 + growth * log(1 + position // span): Llama 4's attention temperature, as Ministral 3 has it.
        """
        if not self.growth:
            return None
        spans = torch.arange(length, device=self.frequencies.device) / self.span
        return 1 + self.growth * torch.log(1 + spans.floor())

    @classmethod
    def of(cls, config: PreTrainedConfig, device: torch.device, kind: str = FULL) -> Rope:
        """The rotation of the layers of a kind, of a model that `knows` accepts.

        Frequencies are theta ** -(2 i / width), or rescaled ones.
        """
        stated, width = rope_of(config, kind), head_width(config)
        name, longest = stated.get("rope_type", "default"), stated.get("original_max_position_embeddings", 0)

        def rope(length: int | None = None) -> Rope:
            if name == "default":
                turned = int(width * stated.get("partial_rotary_factor", 1.0))
                frequencies, scale = 1 / stated["rope_theta"] ** (torch.arange(0, turned, 2).float() / turned), 1.0
            else:
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                by_kind = {"layer_type": kind} if has_ropes_by_kind(config) else {}
                frequencies, scale = ROPE_INIT_FUNCTIONS[name](config, seq_len=length, **by_kind)
            return cls(frequencies.float().to(device), scale, width // 2 - len(frequencies))

        if has_growing_queries(config):
            return replace(rope(), growth=stated["llama_4_scaling_beta"], span=longest)
        if name == "longrope" and not has_equal_factors(config):
            return replace(rope(), beyond=rope(longest + 1), longest=longest)
        return rope()

    @classmethod
    def all_of(cls, config: PreTrainedConfig, device: torch.device) -> tuple[Rope, ...]:
        """The rotations of a model that `knows` accepts: one, or one for each kind of layer (`kinds_of_ropes`)."""
        return tuple(cls.of(config, device, kind) for kind in kinds_of_ropes(config))


def kinds_of_ropes(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers that have rotations of their own; one kind if all layers have the same."""
    return sorted({*layer_kinds(config)}) if has_ropes_by_kind(config) else [FULL]


def rotation_bytes(config: PreTrainedConfig, engine: str, dtype: torch.dtype) -> int:
    """Bytes of rotations that a run of an engine, which computes in `dtype`, keeps for each position."""
    text = config.get_text_config()
    if engine == "eager" or family_of(text).positions:
        return 0
    # The two numbers that turn together have the same cosine and sine. Only the native engine keeps these once.
    halves, kept = (1, torch.float32) if engine == "native" else (2, dtype)
    return len(kinds_of_ropes(text)) * (halves * head_width(text) + has_growing_queries(text)) * kept.itemsize

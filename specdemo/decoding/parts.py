"""What a loaded preset has for drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..engines.quantized import Weight
from ..engines.runner import Runner

Guesses: TypeAlias = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Asks people what follows a text of these tokens: the tokens of each guess; none where nobody guesses."""


class Translator(Protocol):
    """Turns the target's tokens into those of a draft model with another tokenizer, and back."""

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """The text of the target's tokens in the draft model's tokens."""

    def to_target(self, token_ids: Sequence[int], read: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens that continue `token_ids` as `drafted` continues `read`; empty if there are none."""


@dataclass(frozen=True, repr=False)  # a repr would print every weight
class DrafterParts:
    """What a loaded preset has for drafters; None or an empty mapping where it has nothing of the kind.

    `embeddings` are the weights of the target's input and output embeddings, [V, hidden] each. In `ready_heads`
    drafters keep the trained heads, tied to these embeddings, from run to run, by drafter.
    """

    embeddings: tuple[Weight, Weight] | None = None
    make_draft_runner: Callable[[int], Runner] | None = None  # from a capacity in tokens, a runner of the draft model
    ngram_table: Path | None = None
    skip_layers: int | None = None  # how many of the target's layers draft
    head_files: Mapping[str, Path] = field(default_factory=dict)  # trained heads by drafter; a folder is published
    missing_heads: Mapping[str, str] = field(default_factory=dict)  # by drafter, why the preset's head is not there
    ready_heads: dict[str, Any] = field(default_factory=dict)
    open_mtp: Callable[[], Any] | str = "this preset has a target without an MTP layer"  # opens it, or says why not
    captured: bool = False  # the target's passes are captured on a GPU, and a head's should be
    layers: int = 0  # of the target
    final_norm: tuple[Tensor, float] | None = None  # its weight [hidden] and epsilon, if it is an RMS norm as in Llama
    translator: Translator | None = None  # for a draft model with another tokenizer
    draft_context: int | None = None  # the most tokens that the draft model was made to read
    draft_device: torch.device | None = None  # of the draft model's logits
    draft_name: str = ""
    remembered: Sequence[Sequence[int]] = ()  # the tokens of earlier answers to the person who asks
    guesses: Guesses | None = None  # of people, who draft

    @property
    def embedding_device(self) -> torch.device | None:
        """Where what reads the target's embeddings computes; None without them."""
        return self.embeddings[0].device if self.embeddings else None

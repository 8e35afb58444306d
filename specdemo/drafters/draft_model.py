"""A draft model: a smaller language model with the target's tokenizer (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runners import Runner
from ..types import Draft, Settings, Verdict
from .base import Drafter, draw

if TYPE_CHECKING:
    from ..models import Loaded


class DraftModel(Drafter):
    """Draws K tokens from a small model, one after another, under the target's own warping.

    Its cache holds the context and what it drafted, except its own last token, which it never needed
    to read. `observe` keeps what was accepted; what is unread then (one token, or two after a fully
    accepted draft) is read by the first pass of the next proposal.

    The logits are cut or padded to the target's `vocab_size` before they become probabilities: models
    of one family pad their vocabularies differently, and a padding entry is never a token.
    """

    description = "A smaller model with the same tokenizer drafts. Good guesses, but each costs a small pass."

    def __init__(self, runner: Runner, vocab_size: int, settings: Settings, noise: torch.Generator) -> None:
        self.runner, self.vocab_size, self.settings, self.noise = runner, vocab_size, settings, noise
        self._context_length = 0

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return None if loaded.draft_model is not None else "this preset has no draft model"

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> DraftModel:
        return cls(loaded.draft_runner(runner.context), runner.vocab_size, settings, noise)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        self._context_length = len(context)
        runner, unread = self.runner, context[self.runner.length :]
        if max(unread) >= runner.vocab_size:  # a padding entry of a wider target, which has no embedding here
            return Draft()

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            read = runner.forward(drawn[-1] if drawn else unread) if runner.length else runner.prefill(unread)
            logits = read[-1:]  # [1, V]
            padding = self.vocab_size - logits.shape[-1]  # negative where there is something to cut
            return F.pad(logits, (0, padding), value=-torch.inf)

        return draw(next_logits, k, self.settings, self.noise)

    def observe(self, verdict: Verdict) -> None:
        self._context_length += verdict.accepted  # nothing was proposed where K was 0, and nothing changes then
        self.runner.rollback(min(self.runner.length, self._context_length))

    def release(self) -> None:
        self.runner.release()

"""A draft model: a smaller language model with the target's tokenizer (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding.drafter import Drafter, DrafterParts
from ..decoding.rule import Rule
from ..engines.runner import Runner
from ..types import Draft, Verdict
from .chain import draw_chain
from .text_draft_model import LONGER, TextDraftModel


class DraftModel(Drafter):
    """Draws K tokens from a small model, one after another, under the target's own warping.

    Its cache holds the context and what it drafted, except its own last token, which it never needed
    to read. `observe` keeps what was accepted; what is unread then (one token, or two after a fully
    accepted draft) is read by the first pass of the next proposal.

    The logits are cut or padded to the target's `vocab_size` before they become probabilities: models
    of one family pad their vocabularies differently, and a padding entry is never a token.
    """

    name = "draft-model"

    def __init__(self, runner: Runner, vocab_size: int, rule: Rule) -> None:
        self.runner, self.vocab_size, self.rule = runner, vocab_size, rule
        self._context_length = 0

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        return None if parts.make_draft_runner is not None else "this preset has no draft model"

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        assert parts.make_draft_runner is not None
        if parts.translator is not None:
            return TextDraftModel(parts.make_draft_runner(LONGER * runner.context), parts.translator)
        return cls(parts.make_draft_runner(runner.context), runner.vocab_size, rule)

    @property
    def drafts_on(self) -> torch.device:
        return self.runner.device

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

        return draw_chain(next_logits, k, self.rule, len(context), stop_below=self.stop_below)

    def observe(self, verdict: Verdict) -> None:
        self._context_length += verdict.accepted  # nothing was proposed where K was 0, and nothing changes then
        self.runner.rollback(min(self.runner.length, self._context_length))

    def release(self) -> None:
        self.runner.release()

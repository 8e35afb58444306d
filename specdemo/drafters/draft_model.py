"""A draft model: a smaller language model with the target's tokenizer (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding.drafter import Drafter, DrafterParts
from ..decoding.rule import Rule
from ..engines.rows import MOST_ROWS
from ..engines.runner import Runner
from ..types import BadInput, Draft, Verdict
from .chain import NextLogits, draw_chain
from .text_draft_model import LONGER, TextDraftModel
from .tree import Named, grow_by_depth


class DraftModel(Drafter):
    """Draws K tokens from a small model, one after another, under the target's own warping.

    Its cache holds the context and the draft without its last token, which was never read. `observe` keeps
    what was accepted. The first pass of the next proposal reads what is unread then: one token, or two after
    a fully accepted draft.

    The logits are cut or padded to the target's `vocab_size` before they become probabilities: models
    of one family pad their vocabularies differently, and a padding entry is never a token.
    """

    name = "draft-model"
    branches = True

    def __init__(self, runner: Runner, vocab_size: int, rule: Rule) -> None:
        self.runner, self.vocab_size, self.rule = runner, vocab_size, rule
        self._context_length = 0

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        return None if parts.make_draft_runner is not None else "this preset has no draft model"

    @classmethod
    def context_limit(cls, parts: DrafterParts) -> int | None:
        return None if parts.translator else parts.draft_context  # with a translator it reads the end of a long text

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        assert parts.make_draft_runner is not None
        if parts.translator is not None:
            if rule.settings.tree:
                raise BadInput("A draft model with another tokenizer drafts chains only: leave out the tree.")
            return TextDraftModel(parts.make_draft_runner(LONGER * runner.context), parts.translator)
        return cls.drafting(parts.make_draft_runner, runner, rule)

    @classmethod
    def drafting(cls, make_runner: Callable[[int], Runner], target: Runner, rule: Rule) -> DraftModel:
        """A drafter for one run of the target. `make_runner` makes a runner of the draft model, from a capacity.

        Raises:
            BadInput: a tree is asked for and the draft model cannot draft one.
        """
        tree = rule.settings.tree
        drafting = make_runner(target.context + (MOST_ROWS if tree else 0))
        if tree and drafting.cannot_branch:
            raise BadInput(f"The draft model cannot draft a tree: {drafting.cannot_branch}. Draft a chain.")
        return cls(drafting, target.vocab_size, rule)

    @property
    def drafts_on(self) -> torch.device:
        return self.runner.device

    def propose(self, context: Sequence[int], k: int) -> Draft:
        unread = self._unread(context)
        if not unread:
            return Draft()
        return draw_chain(self._next_logits(unread), k, self.rule, len(context), stop_below=self.stop_below)

    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        """One pass for each depth, over all tokens up to that depth. None of them stays in the cache."""
        unread = self._unread(context)
        if not unread:
            return Draft()
        token_ids: list[int] = []

        def read(named: Named, following: list[int]) -> Tensor:
            token_ids.extend(named.token_ids[node] for node in following)
            logits = self.runner.forward(token_ids, named.row_parents)[-len(following) :]
            self.runner.keep([])
            return self._cut(logits)

        logits = self._next_logits(unread)(())
        return grow_by_depth(logits, read, nodes, depth, self.rule, len(context), stop_below=self.stop_below)

    def _unread(self, context: Sequence[int]) -> Sequence[int]:
        """The tokens that the model has not read; empty if it cannot read them."""
        self._context_length = len(context)
        unread = context[self.runner.length :]
        # A padding entry of a wider target has no embedding here.
        return () if max(unread) >= self.runner.vocab_size else unread

    def _next_logits(self, unread: Sequence[int]) -> NextLogits:
        """The logits for a chain of tokens that follows `unread`."""
        runner = self.runner

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            read = runner.forward(drawn[-1] if drawn else unread) if runner.length else runner.prefill(unread)
            return self._cut(read[-1:])

        return next_logits

    def _cut(self, logits: Tensor) -> Tensor:
        """Cut or pad logits to the target's vocabulary, [T, V]."""
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    def observe(self, verdict: Verdict) -> None:
        self._context_length += verdict.accepted  # where K was 0 nothing was proposed, and nothing changes
        self.runner.rollback(min(self.runner.length, self._context_length))

    def release(self) -> None:
        self.runner.release()

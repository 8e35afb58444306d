"""Draft models: a smaller language model (Leviathan 2023, Chen 2023), or the first layers of the target."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..decoding.acceptance import DRAFTER_OVERFLOWED, Answer
from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Needs
from ..decoding.parts import DrafterParts, Translator
from ..decoding.rule import Drawn, Rule
from ..decoding.sampling import largest
from ..engines.gpu.graph import CapturedPasses, GraphRunner
from ..engines.passes import PendingPass
from ..engines.rows import MOST_ROWS
from ..engines.runner import Pass, Runner
from ..errors import BadInput, NotFinite
from ..tokens import Draft
from .captured_trees import CapturedTrees, Growth, paths_of, paths_of_text
from .chain import captured_chain, draw_chain, fitted
from .tree import grow_by_depth

DEPTHS = 2  # of a tree in a captured call: a pass that no token needs would take longer than a wait
LONGER = 2  # the cache of a model with another tokenizer, in units of the target's: its own tokens may be shorter


class ModelTree:
    """Reads trees by the captured passes of a draft model, placed after the text; see `captured_trees.Reader`.

    A pass reads the tokens of one depth. It finds their ancestors' keys and values where passes before wrote them.
    """

    def __init__(self, passes: CapturedPasses, vocab_size: int) -> None:
        self.passes, self.vocab_size = passes, vocab_size
        self.state: Sequence[Tensor] = (paths_of_text(passes.ids.device),)

    def begin(self, *given: Tensor) -> Tensor:
        return fitted(given[0], self.vocab_size)

    def read(self, growth: Growth) -> Tensor:
        paths = paths_of(growth, *self.state)
        self.state = (paths,)
        return fitted(self.passes.branching(growth.token_ids, paths, growth.depth), self.vocab_size)


class DraftModel(Drafter):
    """Draws K tokens from a small model, one after another, under the target's own warping.

    Its cache holds the context and the draft without its last token, which was never read. `observe` keeps
    what was accepted. The first pass of the next proposal reads what is unread then: one token, or two after
    a fully accepted draft.
    """

    name = "draft-model"

    def __init__(self, runner: Runner, vocab_size: int, rule: Rule) -> None:
        self.runner, self.vocab_size, self.rule = runner, vocab_size, rule
        self._context_length = 0

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        missing = None if parts.make_draft_runner is not None else "this preset has no draft model"
        context = None if parts.translator else parts.draft_context  # with a translator it reads the end of a long text
        return Needs(missing, context, parts.draft_device)

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        assert parts.make_draft_runner is not None
        if parts.translator is not None:
            if rule.settings.tree:
                raise BadInput("A draft model with another tokenizer drafts chains only: leave out the tree.")
            return TextDraftModel(parts.make_draft_runner(LONGER * runner.context), parts.translator)
        return cls.with_runner(parts.make_draft_runner, runner, rule)

    @classmethod
    def with_runner(cls, make_runner: Callable[[int], Runner], target: Runner, rule: Rule) -> DraftModel:
        """A drafter for one run of the target. `make_runner` makes a runner of the draft model, from a capacity."""
        drafting = make_runner(target.context + (MOST_ROWS if rule.settings.branches else 0))
        if rule.settings.tree and drafting.cannot_branch:
            raise BadInput(f"The draft model cannot draft a tree: {drafting.cannot_branch}. Draft a chain.")
        return cls(drafting, target.vocab_size, rule)

    def propose(
        self, context: Sequence[int], k: int, options: DraftOptions = CHAIN
    ) -> Generator[PendingPass, Tensor, Draft]:
        """A tree takes one pass for each depth, over all tokens up to that depth where it is not captured. None of them
        stays in the cache."""
        depth, stop, alone = options
        if depth is None:
            return (yield from self.chain(context, k, stop, alone))
        runner, first = self.runner, self._unread(context)
        if first is None:
            return Draft()
        token_ids: list[int] = []

        def read(of_depth: list[int], parents: list[int]) -> Pass:
            if token_ids:
                runner.keep([])
            token_ids.extend(of_depth)
            return Pass(runner, token_ids, parents)

        logits = (yield first)[-1:]
        if alone and isinstance(runner, GraphRunner) and CapturedTrees.possible():
            passes = runner.begin_tree()
            trees = CapturedTrees(partial(ModelTree, passes, self.vocab_size), passes.functions, None, DEPTHS)
            return trees.draw([logits], k, depth, self.rule, len(context), stop)
        logits = fitted(logits, self.vocab_size)
        draft = yield from grow_by_depth(logits, read, k, depth, self.rule, len(context), stop_below=stop)
        if token_ids:
            runner.keep([])
        return draft

    def chain(
        self,
        context: Sequence[int],
        k: int,
        stop_below: float = 0.0,
        alone: bool = False,
        drawn: Sequence[Drawn] = (),
        all_pass: float = 1.0,
    ) -> Generator[PendingPass, Tensor, Draft]:
        """A chain of at most k tokens, which begins with those that are `drawn` already. See `draw_chain`."""
        runner, first = self.runner, self._unread(context, drawn)
        if first is None:
            return Draft()
        if alone and not drawn and isinstance(runner, GraphRunner):
            logits = (yield first)[-1:]
            passes = runner.begin_chain(k - 1)
            functions, size = passes.functions, self.vocab_size
            return captured_chain(passes.following, functions, [logits], k, self.rule, len(context), None, size)

        def next_logits(tokens: Sequence[Tensor]) -> Pass:
            return Pass(runner, tokens[-1]) if len(tokens) > len(drawn) else first

        size = self.vocab_size
        return (yield from draw_chain(next_logits, k, self.rule, len(context), None, size, stop_below, drawn, all_pass))

    def _unread(self, context: Sequence[int], drawn: Sequence[Drawn] = ()) -> Pass | None:
        """The pass over what the cache lacks; None where that cannot be read."""
        self._context_length = len(context)
        unread = [*context, *(int(token.column) for token in drawn)][self.runner.length :]
        if max(unread, default=0) >= self.runner.vocab_size:  # a padding entry of a wider target has no embedding here
            return None
        return Pass(self.runner, unread, prompt=not self.runner.length)

    def observe(self, answer: Answer) -> None:
        self._context_length += answer.accepted  # where K was 0 nothing was proposed, and nothing changes
        self.runner.rollback(min(self.runner.length, self._context_length))

    def release(self) -> None:
        self.runner.release()


class LayerSkip(DraftModel):
    """A draft model that is the first layers of the target (Elhoushi et al., arXiv 2404.16710), with its norm and head.

    It shares the target's weights and has a cache of its own. So it can be captured on a GPU like any model, but the
    target's pass over a draft computes the first layers again. The paper's does not.
    """

    name = "layer-skip"

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return Needs(None if parts.skip_layers else "this preset names no layer to stop at")

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> DraftModel:
        assert parts.skip_layers is not None
        return cls.with_runner(partial(runner.first_layers, parts.skip_layers), runner, rule)


class TextDraftModel(Drafter):
    """A draft model with another tokenizer: it drafts text, which is encoded again for the target (universal assisted
    generation; Timor et al., arXiv 2502.05202, algorithm 2, string-level exact match).

    It writes K of its own tokens, the likeliest each time, and proposes their text.

    Its distribution is over other tokens than the target's, so nothing is drawn from it: the draft is chosen at every
    temperature. K tokens of its own are often fewer of the target's.

    Each round the target's text is translated anew, and the cache keeps the beginning that stayed the same. If the text
    is too long for the cache, the model reads its end.
    """

    name = "draft-model"

    def __init__(self, runner: Runner, translator: Translator) -> None:
        self.runner, self.translator = runner, translator
        self._read: list[int] = []  # the tokens in the cache
        self._skipped = 0  # how many tokens at the beginning of the text it does not read

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        runner, text = self.runner, self.translator.to_draft(context)
        if len(text) - self._skipped + k > runner.context:
            self._skipped = max(len(text) - runner.context // 2, 0)
        text = text[self._skipped :]
        if not text or k >= runner.context or max(text) >= runner.vocab_size:
            return Draft()
        unread = self._forget_but(text)
        drafted: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(k):
            read = runner.forward(drafted[-1] if drafted else unread) if runner.length else runner.prefill(unread)
            best = largest(read[-1:])  # [1, V']
            drafted.append(best.places)
            values.append(best.values)
        if not bool(torch.cat(values).isfinite().all()):
            raise NotFinite(DRAFTER_OVERFLOWED)
        written = [int(token) for token in torch.cat(drafted).tolist()]
        self._read = [*text, *written[:-1]]
        return Draft(self.translator.to_target(context, text, written)[:k])

    def _forget_but(self, text: list[int]) -> list[int]:
        """Keep what the cache has of `text`, and return the rest: at least the last token, so that there are logits."""
        kept = next((i for i, (old, new) in enumerate(zip(self._read, text, strict=False)) if old != new), None)
        kept = min(len(self._read), len(text)) if kept is None else kept
        kept = min(kept, len(text) - 1, self.runner.length)
        self.runner.rollback(kept)
        return text[kept:]

    def release(self) -> None:
        self._read = []
        self.runner.release()

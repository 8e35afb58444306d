"""What the drafters with a trained head share."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...decoding.acceptance import Answer
from ...decoding.drafter import CHAIN, Drafter, DraftOptions, Needs
from ...decoding.parts import DrafterParts
from ...decoding.rule import Rule
from ...engines.gpu.capture import Capture, CudaCapture
from ...engines.passes import PendingPass, answered
from ...engines.rows import MOST_ROWS, WIDTH
from ...engines.runner import Runner
from ...errors import BadInput
from ...settings import MAX_K, MAX_NODES
from ...system.device import to_device
from ...system.progress import tell
from ...tokens import Draft
from ..captured_trees import CapturedTrees
from ..chain import captured_chain, draw_chain
from ..tree import grow_by_depth
from .files import load_head, load_published
from .networks import Head
from .published_shape import TargetSizes
from .ready import FilledPlaces, HeadPasses, HeadSlots, ReadyHead

log = logging.getLogger(__name__)
DEEPEST = 8  # the most tokens on a path of a tree, where all places are filled at once


class HeadDrafter(Drafter):
    """Reads the target's hidden states of the text, and drafts what follows.

    It reads each state together with the token that follows it. A state that has no entry in the head's cache yet is
    *unread*. Positions count from the first token in the head's window.
    """

    network: ClassVar[type[Head]]
    passes: ClassVar[type[HeadPasses]]

    def __init__(self, ready: ReadyHead[Any], runner: Runner, rule: Rule) -> None:
        self.ready, self.runner, self.rule = ready, runner, rule
        drafted = MOST_ROWS if rule.settings.tree else MAX_K + 1
        self.context = runner.context + drafted  # entries of its cache, with those of a draft
        self._unread: list[Tensor] = []
        self._live = 0  # entries made of the target's states
        runner.capture_hidden_states(ready.head.shape.state_layers)
        self._passes: Any = ready.slots.acquire(self.context) if ready.slots else None  # an instance of `passes`

    def __del__(self) -> None:
        self.release()  # a run may be dropped before it begins

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        missing = parts.missing_heads.get(cls.name, f"this preset ships no {cls.name} head")
        return Needs(None if cls.name in parts.head_files else missing, device=parts.embedding_device)

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> HeadDrafter:
        return cls(cls.make_ready(parts), runner, rule)

    @classmethod
    def make_ready(cls, parts: DrafterParts) -> ReadyHead[Any]:
        """The preset's head of this name, made ready once; captured where the target's passes are."""
        name = cls.name
        if name not in parts.ready_heads:
            assert parts.embeddings is not None, "the models were released"
            embedding, output = parts.embeddings
            path = parts.head_files[name]
            sizes = TargetSizes(len(output), output.shape[1], parts.layers, parts.final_norm)
            published = path.is_dir()
            head = load_published(path, cls.network, sizes) if published else load_head(cls.network, path, output)
            try:
                ready = ReadyHead(head, embedding, output)
            except ValueError as error:  # its weights are too large for what the target's are rounded to
                raise BadInput(f"The head {path.name} cannot be used: {error}") from error
            parts.ready_heads[name] = ready
            if parts.captured:
                tell(f"capturing the passes of the {name} head")
                cls.capture(ready, CudaCapture(embedding.device))
        return cast(ReadyHead[Any], parts.ready_heads[name])

    @classmethod
    def capture(cls, ready: ReadyHead[Any], capture: Capture) -> None:
        """Capture a head's passes. If that fails, they run uncaptured."""
        try:
            ready.slots = HeadSlots(ready, cls.passes, capture)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            log.warning("The passes of the head cannot be captured: they run as they come.", exc_info=True)

    @torch.inference_mode()
    def propose(
        self, context: Sequence[int], k: int, options: DraftOptions = CHAIN
    ) -> Generator[PendingPass, Tensor, Draft]:
        """A tree takes one pass, as a chain does; only the bigram term tells the branches apart."""
        passes, states, tokens = self._unread_with(context)
        depth, stop, _ = options
        deepest = min(k, self.ready.head.shape.most_drafted, *([] if depth is None else [depth, DEEPEST]))
        known, size = self.ready.token_ids, self.runner.vocab_size
        if passes.functions and (depth is None or CapturedTrees.possible()):
            given, functions = passes.start(states, tokens, deepest), passes.functions
            if depth is None:
                return captured_chain(passes.following, functions, given, deepest, self.rule, len(context), known, size)
            width = max(WIDTH, 1 << (k - 1).bit_length())  # all tokens of a depth, in few different shapes
            reader = partial(FilledPlaces, passes)
            trees = CapturedTrees(reader, functions, known, DEEPEST, width, DEEPEST * MAX_NODES)
            return trees.draw(given, k, deepest, self.rule, len(context), stop)
        next_logits = yield from passes.beginning(states, tokens, deepest)
        if depth is None:
            return (yield from draw_chain(next_logits, deepest, self.rule, len(context), known, size, stop))
        drawn: list[Tensor] = []  # of each depth

        def read(of_depth: list[int], parents: list[int]) -> Tensor | PendingPass:
            drawn.append(to_device(of_depth, tokens.device))
            return next_logits(drawn)

        logits = yield from answered(next_logits(drawn))
        limits = stop, k, DEEPEST * MAX_NODES  # all tokens of a depth
        return (yield from grow_by_depth(logits, read, k, deepest, self.rule, len(context), known, *limits))

    def _unread_with(self, context: Sequence[int]) -> tuple[Any, Tensor, Tensor]:
        """The passes, the unread states, and the token after each of them."""
        assert self._passes is not None, "the prompt has been read"
        parts, self._unread = self._unread, []
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        tokens = to_device(context[-len(states) :], states.device)
        self._passes.seek(self._live)
        self._live += len(states)
        return self._passes, states, tokens

    def observe(self, answer: Answer) -> None:
        states = self.runner.hidden_states
        assert states is not None, "the text has been read"
        if not (self._live or self._unread):  # they are those of the prompt
            skipped = max(0, len(states) - self.ready.head.shape.window)
            if skipped:  # a view would keep those of the whole prompt
                states = states[skipped:].clone()
            if not self.ready.slots:
                self._passes = self.passes(self.ready, self.context - skipped)
        self._unread.append(states)

    def release(self) -> None:
        if self._passes and self.ready.slots:
            self.ready.slots.release(self._passes)
        self._passes, self._unread = None, []

"""What the drafters with a trained head share."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...decoding.answer import Answer
from ...decoding.drafter import DrafterParts, ModelDrafter, answered
from ...decoding.rule import Rule
from ...engines.gpu.capture import Capture, CudaCapture
from ...engines.rows import MOST_ROWS, WIDTH
from ...engines.runner import Runner, States, Wanted
from ...system.hardware import to_device
from ...system.progress import tell
from ...types import MAX_K, MAX_NODES, Draft
from ..captured_trees import CapturedTrees
from ..chain import CapturedChains, draw_chain
from ..tree import grow_by_depth
from .files import load_head, load_published
from .networks import Head
from .published_shape import TargetSizes
from .ready import FilledPlaces, HeadPasses, ReadyHead

log = logging.getLogger(__name__)
DEEPEST = 8  # the most tokens on a path of a tree, where all places are filled at once


class HeadDrafter(ModelDrafter):
    """Reads the target's hidden states of the text, and drafts what follows.

    It reads each state together with the token that follows it. A state that has no entry in the head's cache yet is
    *unread*. Positions count from the first token in the head's window.
    """

    branches = True
    network: ClassVar[type[Head]]
    passes: ClassVar[type[HeadPasses]]
    _passes: Any = None  # of the run, an instance of `passes`

    def __init__(self, ready: ReadyHead[Any], runner: Runner, rule: Rule) -> None:
        self.ready, self.runner, self.rule = ready, runner, rule
        drafted = MOST_ROWS if rule.settings.tree else MAX_K + 1
        self.context = runner.context + drafted  # entries of its cache, with those of a draft
        self._unread: list[States] = []
        self._live = 0  # entries made of the target's states
        runner.capture_hidden_states(ready.head.shape.state_layers)
        if ready.slots:
            self._passes = ready.slots.acquire(self.context)

    def __del__(self) -> None:
        self.release()  # a run may be dropped before it begins

    @property
    def drafts_on(self) -> torch.device:
        return self.ready.embedding.device

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        name = cls.name
        return None if name in parts.head_files else parts.missing_heads.get(name, f"this preset ships no {name} head")

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> HeadDrafter:
        return cls(cls.make_ready(parts), runner, rule)

    @classmethod
    def make_ready(cls, parts: DrafterParts) -> ReadyHead[Any]:
        """The preset's head of this name, made ready once; captured where the target's passes are.

        Raises:
            BadInput: its file cannot be read, or it was trained for a target of another shape.
        """
        name = cls.name
        if name not in parts.ready_heads:
            assert parts.embeddings is not None, "the models were released"
            embedding, output = parts.embeddings
            path = parts.head_files[name]
            sizes = TargetSizes(len(output), output.shape[1], parts.layers, parts.final_norm)
            published = path.is_dir()
            head = load_published(path, cls.network, sizes) if published else load_head(cls.network, path, output)
            ready = ReadyHead(head, embedding, output)
            parts.ready_heads[name] = ready
            if parts.captured:
                tell(f"capturing the passes of the {name} head")
                cls.capture(ready, CudaCapture(embedding.device))
        return cast(ReadyHead[Any], parts.ready_heads[name])

    @classmethod
    def capture(cls, ready: ReadyHead[Any], capture: Capture) -> None:
        """Capture a head's passes. If that fails, they run uncaptured."""
        try:
            ready.capture(cls.passes, capture)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            log.warning("The passes of the head cannot be captured: they run as they come.", exc_info=True)

    def reset(self, prompt_ids: Sequence[int]) -> None:
        states = self.runner.hidden_states
        assert states is not None, "the prompt has been read"
        if self._live:  # of another text
            self.release()
        skipped, self._live = max(0, len(states) - self.ready.head.shape.window), 0
        # A view would keep those of the whole prompt.
        self._unread = [States.of(states[skipped:].clone() if skipped else states)]
        if not self.ready.slots:
            self._passes = self.passes(self.ready, self.context - skipped)
        elif not self._passes:
            self._passes = self.ready.slots.acquire(self.context)

    @torch.inference_mode()
    def drafting(self, context: Sequence[int], k: int, depth: int | None = None) -> Generator[Wanted, Tensor, Draft]:
        """A tree takes one pass, as a chain does; only the bigram term tells the branches apart."""
        passes, states, tokens = self._unread_with(context)
        deepest = min(k, self.ready.head.shape.most_drafted, *([] if depth is None else [depth, DEEPEST]))
        known, size = self.ready.token_ids, self.runner.vocab_size
        if passes.functions and (depth is None or CapturedTrees.possible()):
            given = passes.start(states, tokens, deepest)
            if depth is None:
                chains = CapturedChains(passes.following, passes.functions, known, size)
                return chains.draw(given, deepest, self.rule, len(context))
            width = max(WIDTH, 1 << (k - 1).bit_length())  # all tokens of a depth, in few different shapes
            reader = partial(FilledPlaces, passes)
            trees = CapturedTrees(reader, passes.functions, known, DEEPEST, width, DEEPEST * MAX_NODES)
            return trees.draw(given, k, deepest, self.rule, len(context), self.stop_below)
        next_logits = yield from passes.beginning(states, tokens, deepest)
        if depth is None:
            return (yield from draw_chain(next_logits, deepest, self.rule, len(context), known, size, self.stop_below))
        drawn: list[Tensor] = []  # of each depth

        def read(of_depth: list[int], parents: list[int]) -> Tensor | Wanted:
            drawn.append(to_device(of_depth, tokens.device))
            return next_logits(drawn)

        logits = yield from answered(next_logits(drawn))
        limits = self.stop_below, k, DEEPEST * MAX_NODES  # all tokens of a depth
        return (yield from grow_by_depth(logits, read, k, deepest, self.rule, len(context), known, *limits))

    def _unread_with(self, context: Sequence[int]) -> tuple[Any, Tensor, Tensor]:
        """The passes, the unread states, and the token after each of them."""
        assert self._passes is not None, "reset comes first"
        parts, self._unread = [states.tensor for states in self._unread], []
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        tokens = to_device(context[-len(states) :], states.device)
        self._passes.seek(self._live)
        self._live += len(states)
        return self._passes, states, tokens

    def observe(self, answer: Answer) -> None:
        assert self.runner.states is not None, "the text has been read"
        self._unread.append(self.runner.states)

    def release(self) -> None:
        if self._passes and self.ready.slots:
            self.ready.slots.release(self._passes)
        self._passes, self._unread = None, []

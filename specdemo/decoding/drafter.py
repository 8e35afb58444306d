"""What every drafter is, and what it may need of a loaded preset."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ..engines.quantized import Weight
from ..engines.runner import Runner, Wanted, read_together
from ..types import Draft
from .answer import Answer
from .rule import Rule


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
    draft_name: str = ""
    remembered: Sequence[Sequence[int]] = ()  # the tokens of earlier answers to the person who asks


T = TypeVar("T")


def alone(steps: Generator[Wanted, Tensor, T]) -> T:
    """The result of what yields passes, each of which is read by itself."""
    try:
        wanted = next(steps)
        while True:
            (logits,) = read_together([wanted])
            wanted = steps.send(logits)
    except StopIteration as ended:
        result: T = ended.value
        return result


def answered(logits: Tensor | Wanted) -> Generator[Wanted, Tensor, Tensor]:
    """The logits, or those of the pass that gives them."""
    return (yield logits) if isinstance(logits, Wanted) else logits


class Drafter:
    """Proposes tokens for the target to check. One object serves one run.

    A new drafter is one new file with a subclass of this and one line in `drafters.names.DRAFTERS`.
    Whatever it proposes, the text stays the target's own. Under rejection sampling this requires that `Draft.probs` is
    exactly the distribution its tokens were drawn from (or None if they were not drawn).
    """

    name: ClassVar[str]  # as in `drafters.names.DRAFTERS`
    parallel_drafting: ClassVar[bool] = False  # a draft of many tokens costs what a draft of one costs
    branches: ClassVar[bool] = False  # whether it can draft a tree
    remembers: ClassVar[bool] = False  # whether it copies from `DrafterParts.remembered`
    # Set by K = auto. A chain ends with the token at which the chance that all its tokens pass falls below this. A tree
    # holds no token but the first with a lower chance to pass.
    stop_below: float = 0.0
    reads_alone: bool = False  # set by the loop where no passes of other prompts can be one with its own

    @property
    def drafts_on(self) -> torch.device | None:
        """The device that computes a draft, whose clock times it; None stands for the device of the target's logits."""
        return None

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        """Why this preset cannot use the drafter, in words; None if it can."""
        return None

    @classmethod
    def context_limit(cls, parts: DrafterParts) -> int | None:
        """The longest run that it can read, in tokens; None if it can read what the target can."""
        return None

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        """A drafter for one run. `runner` is the target's; `rule` draws the tokens."""
        return cls()

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Begin a run."""

    def propose(self, context: Sequence[int], k: int) -> Draft:
        """At most k >= 1 tokens to follow `context` (prompt and emitted text, the pending token last)."""
        raise NotImplementedError

    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        """A tree of at most `nodes` >= 1 chosen tokens, at most `depth` >= 1 of them on a path.

        Only drafters with `branches` are asked for one. Likelier tokens come first, as far as parents allow, so that a
        smaller tree is the beginning of a larger one: K = auto learns how often the token of each rank passes.
        """
        raise NotImplementedError

    def drafting(self, context: Sequence[int], k: int, depth: int | None = None) -> Generator[Wanted, Tensor, Draft]:
        """Draft a chain as `propose` does, or with a `depth` a tree as `propose_tree` does.

        Yields the passes that it needs, so that those of several prompts can be one, and is sent their logits.
        """
        yield from ()
        return self.propose(context, k) if depth is None else self.propose_tree(context, k, depth)

    @property
    def sources(self) -> Sequence[Drafter]:
        """All that `draft_source` may name."""
        return [self]

    def draft_source(self, context: Sequence[int]) -> Drafter:
        """The drafter that would propose what follows `context`: this one, unless it hands over to another.

        K = auto learns about each of them by its name.
        """
        return self

    def steps(self, tokens: int) -> int:
        """How many sequential steps a draft of this many tokens takes."""
        return min(tokens, 1) if self.parallel_drafting else tokens

    def observe(self, answer: Answer) -> None:
        """Learn what became of the last draft."""

    def release(self) -> None:
        """Free what the run allocated. Safe to call twice."""


class ModelDrafter(Drafter):
    """A drafter that a model computes: it has `drafting`, and drafts alone by it."""

    def drafting(self, context: Sequence[int], k: int, depth: int | None = None) -> Generator[Wanted, Tensor, Draft]:
        raise NotImplementedError

    def propose(self, context: Sequence[int], k: int) -> Draft:
        return alone(self.drafting(context, k))

    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        return alone(self.drafting(context, nodes, depth))

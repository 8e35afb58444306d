"""What every drafter is, and what it may need of a loaded preset."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..engines.quantized import Weight
from ..engines.runner import PendingPass, Runner, read_together
from ..types import Draft
from .acceptance import Answer
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
    draft_device: torch.device | None = None  # of the draft model's logits
    draft_name: str = ""
    remembered: Sequence[Sequence[int]] = ()  # the tokens of earlier answers to the person who asks

    @property
    def embedding_device(self) -> torch.device | None:
        """Where what reads the target's embeddings computes; None without them."""
        return self.embeddings[0].device if self.embeddings else None


T = TypeVar("T")


def alone(steps: Generator[PendingPass, Tensor, T]) -> T:
    """The result of what yields passes, each of which is read by itself."""
    try:
        wanted = next(steps)
        while True:
            (logits,) = read_together([wanted])
            wanted = steps.send(logits)
    except StopIteration as ended:
        result: T = ended.value
        return result


def answered(logits: Tensor | PendingPass) -> Generator[PendingPass, Tensor, Tensor]:
    """The logits, or those of the pass that gives them."""
    return (yield logits) if isinstance(logits, PendingPass) else logits


class DraftOptions(NamedTuple):
    """How a draft is to be made.

    Attributes:
        depth: the most tokens on a path of a tree; None asks for a chain.
        stop_below: of K = auto. A chain ends with the token at which the chance that all its tokens pass falls below
            this. A tree holds no token but the first with a lower chance to pass.
        alone: whether no passes of other prompts can be one with the drafter's own, so that it may call captured work.
    """

    depth: int | None = None
    stop_below: float = 0.0
    alone: bool = False


CHAIN = DraftOptions()


class Needs(NamedTuple):
    """What a drafter needs of a preset.

    Attributes:
        missing: what of it is not there, in words; None if nothing.
        context: the longest run that it can read, in tokens; None if it can read what the target can.
        device: the one that computes a draft, whose clock times it; None stands for that of the target's logits.
    """

    missing: str | None = None
    context: int | None = None
    device: torch.device | None = None


class Drafter:
    """Proposes tokens for the target to check. One object serves one run.

    A new drafter is one new file with a subclass of this and one line in `drafters.names.DRAFTERS`: its `name`, what it
    needs, and `propose`. Whatever it proposes, the text stays the target's own. Under rejection sampling this requires
    that `Draft.probs` is exactly the distribution its tokens were drawn from (or None if they were not drawn).
    """

    name: ClassVar[str]  # as in `drafters.names.DRAFTERS`

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return Needs()

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        """A drafter for one run. `runner` is the target's; `rule` draws the tokens."""
        return cls()

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Proposal:
        """At most k >= 1 tokens to follow `context` (prompt and emitted text, the pending token last).

        With a `depth` they are a tree of chosen tokens. Likelier ones come first, as far as parents allow, so that a
        smaller tree is the beginning of a larger one: K = auto learns how often the token of each rank passes.

        A drafter that reads a model is a generator. It yields the passes that it needs, so that those of several
        prompts can be one (`batch`), is sent their logits, and returns the draft.
        """
        raise NotImplementedError

    def observe(self, answer: Answer) -> None:
        """Learn what became of the last draft; the first call follows the pass over the prompt."""

    def release(self) -> None:
        """Free what the run allocated. Safe to call twice."""


Proposal: TypeAlias = Draft | Generator[PendingPass, Tensor, Draft]


def drafted(proposal: Proposal) -> Generator[PendingPass, Tensor, Draft]:
    """The draft, by the passes that it needs."""
    return proposal if isinstance(proposal, Draft) else (yield from proposal)


class Either(Drafter):
    """Hands over to one of two drafters, in each round anew. K = auto learns about each of them by its own name."""

    def __init__(self, first: Drafter, other: Drafter) -> None:
        self.first, self.other = first, other

    def choice(self, context: Sequence[int]) -> Drafter:
        """Which of the two would propose what follows `context`."""
        raise NotImplementedError

    def observe(self, answer: Answer) -> None:
        self.first.observe(answer)  # both in every round: a head reads the states of all tokens
        self.other.observe(answer)

    def release(self) -> None:
        self.first.release()
        self.other.release()


def source_of(drafter: Drafter, context: Sequence[int]) -> Drafter:
    """The drafter that would propose what follows `context`: this one, unless it hands over to another."""
    while isinstance(drafter, Either):
        drafter = drafter.choice(context)
    return drafter


def sources_of(drafter: Drafter) -> list[Drafter]:
    """All that `source_of` may name."""
    return [*sources_of(drafter.first), *sources_of(drafter.other)] if isinstance(drafter, Either) else [drafter]

"""What every drafter is, and how it is asked for a draft."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..engines.passes import PendingPass
from ..engines.runner import Runner
from ..tokens import Draft
from .acceptance import Answer
from .parts import DrafterParts
from .rule import Rule


class DraftOptions(NamedTuple):
    """How a draft is to be made.

    Attributes:
        depth: the most tokens on a path of a tree; None asks for a chain.
        stop_below: set by K = auto. A chain ends with the token at which the chance that all its tokens pass falls
            below this. A tree holds no token but the first with a lower chance to pass.
        alone: whether no passes of other prompts can be one with the drafter's own, so that it may call captured work.
    """

    depth: int | None = None
    stop_below: float = 0.0
    alone: bool = False


CHAIN = DraftOptions()


class Needs(NamedTuple):
    """What a drafter needs of a preset.

    Attributes:
        missing: what the preset lacks, in words; None if nothing.
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
    waited: float = 0.0  # seconds in which it waited for a person: they count as nobody's time

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

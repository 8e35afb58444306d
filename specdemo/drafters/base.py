"""What every drafter is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..runners import Runner
from ..sampling import largest, probabilities, sample
from ..types import Draft, Settings, Verdict

if TYPE_CHECKING:
    from ..models import Loaded


class Drafter:
    """Proposes tokens for the target to check. One object serves one run.

    A new drafter is one new file with a subclass of this and one line in `drafters.DRAFTERS`.
    Whatever it proposes, the text stays the target's own, as long as `Draft.probs` is exactly the
    distribution its tokens were drawn from (or None, if they were not drawn).
    """

    description: ClassVar[str]  # one line for the menu
    at_once: ClassVar[bool] = False  # a draft of many tokens costs what a draft of one costs
    reads_ahead: ClassVar[bool] = False  # with the target, whose pass over the draft is that much shorter

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        """Why this preset cannot use the drafter, in words; None if it can."""
        return None

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> Drafter:
        """A drafter for one run. `runner` is the target's; `noise` is for proposing and used by no one else."""
        return cls()

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """A run begins."""

    def propose(self, context: Sequence[int], k: int) -> Draft:
        """At most k >= 1 tokens to follow `context` (prompt and emitted text, the pending token last)."""
        raise NotImplementedError

    def author(self, context: Sequence[int]) -> type[Drafter]:
        """Who would propose what follows `context`: this drafter, unless it is one that hands over to others.

        K = auto keeps what it learns of each apart.
        """
        return type(self)

    def observe(self, verdict: Verdict) -> None:
        """What the target made of the last proposal."""

    def release(self) -> None:
        """Free what the run allocated. Safe to call twice."""


def draw(
    next_logits: Callable[[Sequence[Tensor]], Tensor],
    k: int,
    settings: Settings,
    noise: torch.Generator,
    token_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> Draft:
    """Draw k tokens one after another, each under the target's own warping.

    `next_logits` gets the tokens drawn so far, [1] int64 each, and returns the logits of the next one, [1, V]. They
    stay on the device: a drafter that does not look at them lets it work ahead. At temperature 0 nothing is drawn:
    the largest logit is taken, and the draft carries no probabilities, which says so.

    A drafter that knows only some of the target's `vocab_size` tokens gives their `token_ids` [V'] and the logits of
    those, [1, V']; it proposes every other token with probability 0.
    """
    drawn: list[Tensor] = []
    rows: list[Tensor] = []
    for _ in range(k):
        logits = next_logits(drawn)
        if settings.temperature == 0:
            place = largest(logits)
        else:
            probs = probabilities(logits, settings)
            uniform = torch.rand(1, generator=noise, device=noise.device, dtype=torch.float64)
            place = sample(probs, uniform.to(probs.device))
            rows.append(probs)
        drawn.append(place if token_ids is None else token_ids[place])
    ids = torch.cat(drawn)
    if not rows:
        return Draft(ids)
    q = torch.cat(rows)  # [k, V or V']
    if token_ids is not None:
        q = q.new_zeros(k, vocab_size).index_copy_(1, token_ids, q)
    return Draft(ids, q)

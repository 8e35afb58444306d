"""The base of the verification rules, which test drafts and are the only source of random numbers in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..engines.rows import size_of_tree
from ..engines.runner import Capturing
from ..settings import Settings
from ..types import Draft
from .answer import Answer
from .constraint import Constraint
from .sampling import certainty, largest, probabilities


class Drawn(NamedTuple):
    """A drafted token, see `Rule.draw`."""

    column: Tensor  # int64 [1]
    q: Tensor  # [1], NaN if the logits were not finite
    probs: Tensor | None  # [1, V]; None if the token was chosen


class Rule:
    """Tests the drafts of one run: says which drafted tokens are accepted, and which token follows them.

    draft      k guesses of what follows the text. They form a tree: each follows the text or another of them, its
               parent. A chain is the tree with parents -1, 0, 1, ...
    pass       the target reads the pending token, which is the newest of the text, and the draft. Row 0 of the pass is
               the pending token, row i + 1 the drafted token i. The logits of a row are of the token after it.
    p, q       the probabilities of the target and of the drafter, after temperature, top-k and top-p
    path       the drafted tokens that the target takes, each of which follows the one before
    accepted   on the path
    rejected   follows the text or an accepted token, and failed its test
    untested   follows a token that was not accepted, or the end of the text
    resampled  the target's own token after the path, where drafted tokens were rejected
    bonus      the target's own token after the path, where nothing more was drafted
    target     the target's own token where nothing was drafted at all

    A subclass says how a token is drawn from a distribution and how a draft is tested. `needs_draft_probs` says whether
    it reads `Draft.probs`. Target and drafter get the same warping, because both go through here. A rule has no state
    but its settings, its noise and the text that its grammar has read.
    """

    name: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    constraint: Constraint | None = None  # what a grammar allows after the text, if the run has one

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def kind(self) -> tuple[object, ...]:
        """What draws and tests depend on, beside their numbers and what a rule was given: what is captured for one kind
        serves all rules of it."""
        settings = self.settings
        return (type(self), settings.temperature, settings.top_k, settings.top_p)

    def masked(self, logits: Tensor, draft: Draft) -> Tensor:
        """The target's logits after each row of a pass [k + 1, V], for `verify`: minus infinity for what is forbidden.

        The mask comes before temperature, top-k and top-p, and so before p is known: both rules test against it.
        """
        return logits if self.constraint is None else self.constraint.masked(logits, draft)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The text has grown by these tokens."""
        if self.constraint is not None:
            self.constraint.advance(token_ids)

    def draft_numbers(self, positions: Iterable[int]) -> Tensor | None:
        """The random numbers with which tokens are drafted for these positions of the text, one each, on the host; None
        at temperature 0. Positions count from 0, the prompt included."""
        return self._draft_numbers(positions) if self.settings.temperature else None

    def draw(self, logits: Tensor, number: Tensor | None, token_ids: Tensor | None = None) -> Drawn:
        """Draw a drafted token from logits [1, V], or choose the largest at temperature 0. A GPU is not waited for.

        If no token can be drawn, the result is some column with a q that `verify` refuses.

        Args:
            number: of its position, [1] on the device of the logits, see `draft_numbers`.
            token_ids: the target's tokens that the columns stand for, int64 [V], rising; None if they are all of them.
        """
        if number is None:
            values, columns, _ = largest(logits)
            return Drawn(columns, certainty(values), None)
        probs = probabilities(logits, self.settings)
        column = self._draw(probs, number, token_ids)
        return Drawn(column, probs[0].gather(0, column), probs)

    def of_next_round(self) -> Rule:
        """A rule that draws the drafts of the next round before this one is verified."""
        return copy(self)

    def likeliest(
        self, logits: Tensor, position: int | Tensor | None, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that the target is likeliest to draw at a position, by a drafter's logits, for a tree.

        Args:
            logits: [R, V], all for the same position.
            position: in captured work, which reads no position on the host, its number, see `draft_numbers`.
        Returns:
            Columns int64 and estimates of their chance, [R, count] each, the likeliest first. If logits are not finite,
            the first estimate of the row is NaN.
        """
        shares = self._shares(logits, position, token_ids).topk(min(count, logits.shape[-1]))
        return shares.indices, shares.values

    def _shares(self, logits: Tensor, position: int | Tensor | None, token_ids: Tensor | None) -> Tensor:
        """A drafter's estimate of the chance that the target draws each token, [R, V] -> [R, V]."""
        return probabilities(logits, self.settings)

    def confidence(self, logits: Tensor, drawn: Drawn) -> float:
        """The drafter's probability of the token that it drew from logits [1, V]; NaN if they are not finite."""
        if self.settings.temperature > 0:
            return float(drawn.q)
        return float(logits[0].softmax(-1)[drawn.column])

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Capturing | None = None) -> Answer:
        """Test a draft of k tokens, and draw the token that follows the accepted ones.

        Args:
            logits: the target's after each row of the pass, [k + 1, V].
            position: of the first drafted token.
            captured: captures the calls of a function, see `engines.runner.Runner`.
        Raises:
            NotFinite: the logits of the target or of the drafter were not finite where the round depends on them.
        """
        raise NotImplementedError

    def _captured(
        self, logits: Tensor, draft: Draft, captured: Capturing | None
    ) -> tuple[Callable[..., tuple[Tensor, Any]], Tensor, Draft]:
        """The test, and what it reads: where its calls are captured, a tree is filled up to a size that they have.
        `answer.follow` leaves the rest out."""
        test = captured(self.kind, self._test) if captured else self._test
        if test == self._test or not draft.tree:
            return test, logits, draft
        missing = size_of_tree(len(logits)) - len(logits)
        q = None if draft.q is None else F.pad(draft.q, (0, missing))
        token_ids, parents = [*draft.token_ids, *[0] * missing], [*draft.parents, *[-1] * missing]
        return test, F.pad(logits, (0, 0, 0, missing)), replace(draft, token_ids=token_ids, parents=parents, q=q)

    def _test(self, logits: Tensor, *read: Any) -> tuple[Tensor, Any]:
        """The part of `verify` on the device: what the host needs in one vector, and the target's probabilities."""
        raise NotImplementedError

    def _draft_numbers(self, positions: Iterable[int]) -> Tensor:
        """See `draft_numbers`, on the host."""
        raise NotImplementedError

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        """A column of `probs` [1, V], int64 [1]."""
        raise NotImplementedError

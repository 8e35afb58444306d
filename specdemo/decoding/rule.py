"""What a verification rule is: it tests drafts, and it is the only source of random numbers in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..types import Draft, NotFinite, Settings, TokenKind, Verdict
from .sampling import certainty, largest, probabilities

OVERFLOWED = "{} gave logits that are not finite numbers: choose another dtype, such as float32, or {}."
TARGET_OVERFLOWED = OVERFLOWED.format("The target", "another preset")
DRAFTER_OVERFLOWED = OVERFLOWED.format("The drafter", "another drafter")


class Drawn(NamedTuple):
    """A drafted token, see `Rule.draw_draft`."""

    column: Tensor  # int64 [1]
    q: Tensor  # [1], NaN if the logits were not finite
    probs: Tensor | None  # [1, V]; None if the token was chosen


class LastRound(NamedTuple):
    """What a rule saw in its last round, above temperature 0.

    The position of its first token, the target's probabilities [k + 1, V], and for each drawn token the drafter's
    [1, V'] with the tokens int64 [V'] that the columns stand for (None if they are all). Of a tree, whose tokens are
    chosen, `path` are the rows that lead to the emitted tokens; None stands for all, one behind the other.
    """

    position: int
    target_probs: Tensor
    draft_probs: Sequence[tuple[Tensor, Tensor | None]]
    path: Sequence[int] | None = None


class Rule:
    """Tests the drafts of one run. Target and drafter get the same warping, because both go through here.

    A subclass says how a token is drawn from a distribution and how a draft is tested. `needs_draft_probs` says whether
    it reads `Draft.probs`.
    """

    name: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    last_round: LastRound | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._draft_probs: list[tuple[Tensor, Tensor | None]] = []

    def draw_draft(self, logits: Tensor, position: int, token_ids: Tensor | None = None) -> Drawn:
        """Draw a drafted token from logits [1, V], or choose the largest at temperature 0. A GPU is not waited for.

        Where there is no token to draw, some column is returned with a q that `verify` refuses.

        Args:
            position: of the token in the text, the prompt included, from 0.
            token_ids: the target's tokens that the columns stand for, int64 [V], rising; None if they are all of them.
        """
        if self.settings.temperature == 0:
            values, columns, _ = largest(logits)
            return Drawn(columns, certainty(values), None)
        probs = probabilities(logits, self.settings)
        column = self._draw(probs, position, token_ids)
        self._draft_probs.append((probs, token_ids))
        return Drawn(column, probs[0].gather(0, column), probs)

    def likeliest(
        self, logits: Tensor, position: int, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that the target is likeliest to draw at a position, as far as a drafter can tell, for a tree.

        Their columns int64 and the drafter's estimates of the chance, both [R, count] and the likeliest first, from
        logits [R, V] for the same position. With logits that are not finite the first estimate of a row is NaN.
        """
        shares = self._shares(logits, position, token_ids).topk(min(count, logits.shape[-1]))
        return shares.indices, shares.values

    def _shares(self, logits: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """A drafter's estimate of the chance that the target draws each token, [R, V] -> [R, V]."""
        return probabilities(logits, self.settings)

    def confidence(self, logits: Tensor, drawn: Drawn) -> float:
        """How likely the drafter takes the token to be that it drew from logits [1, V]; NaN if they are not finite."""
        if self.settings.temperature > 0:
            return float(drawn.q)
        return float(logits[0].softmax(-1)[drawn.column])

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        """Test a draft of k tokens, and draw the token that follows the accepted ones.

        Args:
            logits: [k + 1, V], the target's at each drafted position and after the last; of a tree, the target's
                after the pending token and after each drafted one.
            position: of the first drafted token.
        Raises:
            NotFinite: the logits of the target or of the drafter were not finite where the round depends on them.
        """
        raise NotImplementedError

    def _walked(self, verdict: Verdict) -> Verdict:
        """The verdict on a tree, whose path the last round takes too."""
        if self.last_round:
            self.last_round = self.last_round._replace(path=[0, *(node + 1 for node in verdict.path)])
        return verdict

    def _draw(self, probs: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """A column of `probs` [1, V], int64 [1]."""
        raise NotImplementedError

    def _target_probs(self, logits: Tensor, position: int) -> Tensor:
        """`probabilities` of the target's logits, kept as the last round's."""
        probs = probabilities(logits, self.settings)
        self.last_round, self._draft_probs = LastRound(position, probs, self._draft_probs), []
        return probs


def kind_after(accepted: int, drafted: int) -> TokenKind:
    """The kind of the token that follows the accepted ones of a draft."""
    if not drafted:
        return TokenKind.TARGET
    return TokenKind.BONUS if accepted == drafted else TokenKind.RESAMPLED


def check_finite(target: Sequence[float], drafter: Sequence[float]) -> None:
    """Refuse probabilities that came of logits that are not finite: NaN fails every comparison.

    Args:
        target: those of tested tokens, at least 0, then that of the emitted token, above 0.
        drafter: those of the drafted tokens, above 0.
    Raises:
        NotFinite: naming the model.
    """
    if not (target[-1] > 0 and all(p >= 0 for p in target)):
        raise NotFinite(TARGET_OVERFLOWED)
    if not all(q > 0 for q in drafter):
        raise NotFinite(DRAFTER_OVERFLOWED)

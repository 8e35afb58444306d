"""What verification rules have in common, and the match rule. They are the only source of random numbers in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engines.rows import depths_of, size_of_tree
from ..settings import MATCH, MAX_K, Settings
from ..system.device import packed, to_device, unpacked
from ..tokens import Draft
from . import noise
from .acceptance import Answer, follow
from .constraint import Constraint
from .sampling import certainty, largest
from .warping import probabilities

Capturing: TypeAlias = Callable[[object, Callable[..., Any]], Callable[..., Any]]  # see `Runner.captured`


class Drawn(NamedTuple):
    """A drafted token, see `Rule.draw`."""

    column: Tensor  # int64 [1]
    q: Tensor  # [1], NaN if the logits were not finite
    probs: Tensor | None  # [1, V]; None if the token was chosen


class Rule:
    """Tests the drafts of one run: says which drafted tokens are accepted, and which token follows them.

    target     the model whose distribution the text follows; also a token of its own where nothing was drafted
    drafter    what proposes drafts
    draft      k guesses (drafted tokens) of what follows the text, at most K. They form a tree: each follows the text
               or another of them, its parent. A chain is the tree with parents -1, 0, 1, ...
    round      a draft, a pass over it and its test, which emits 1 to k + 1 tokens
    pass       the target reads the pending token, which is the newest of the text, and the draft. Row 0 of the pass is
               the pending token, row i + 1 the drafted token i. The logits of a row are of the token after it.
    p, q       the probabilities of the target and of the drafter, after temperature, top-k and top-p
    path       the drafted tokens that the target takes, each of which follows the one before
    accepted   on the path
    rejected   follows the text or an accepted token, and failed its test
    untested   follows a token that was not accepted, or the end of the text
    resampled  the target's own token after the path, where drafted tokens were rejected; the page says corrected
    bonus      the target's own token after the path, where nothing more was drafted

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
        """What is captured for one kind serves all rules of it: draws and tests depend on this and their numbers."""
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
        """The random numbers with which tokens are drafted for these positions of the text (0 is the first token of the
        prompt), one each, on the host; None at temperature 0."""
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
        Raises:
            NotFinite: a probability that the answer holds is of logits that were not finite.
        """
        raise NotImplementedError

    def _captured(
        self, logits: Tensor, draft: Draft, captured: Capturing | None
    ) -> tuple[Callable[..., tuple[Tensor, Any]], Tensor, Draft]:
        """The test, and what it reads: where its calls are captured, a tree is filled up to a size that they have.
        `acceptance.follow` leaves the rest out."""
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


class Match(Rule):
    """A drafted token is accepted if it is the token that the target draws at its position.

    The target draws its own token at each position with the noise of (seed, position), see `noise.draw`. The emitted
    token is a function of the prefix, the seed and the position, so the text depends neither on the drafter nor on K:
    it is the text that the target alone writes with that seed. A drafter draws with the same noise (Gumbel coupling,
    arXiv 2408.07978), so it often draws the target's token. At temperature 0 both are argmax.
    """

    name = MATCH

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._noise: dict[tuple[int, int], Tensor] = {}  # see `_log_e`

    def key(self, position: int) -> int:
        return noise.key_of(self.settings.seed, position)

    def _draft_numbers(self, positions: Iterable[int]) -> Tensor:
        """The keys of the noise that the target will use."""
        return torch.tensor([noise.signed(self.key(position)) for position in positions], dtype=torch.int64)

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        return noise.draw(probs, number, token_ids)[0].clamp(min=0)

    def _shares(self, logits: Tensor, position: int | Tensor | None, token_ids: Tensor | None) -> Tensor:
        """softmax(logits - T ln e), with the noise e that the target will use.

        The target draws argmax(logits' - T ln e) from its own logits', which the drafter's logits estimate. So the same
        noise is added to them, and T = 0 is no special case.
        """
        temperature = self.settings.temperature
        if not temperature:
            return logits.softmax(-1)
        assert position is not None, "above temperature 0 a position has a number"
        scores = logits - temperature * self._log_e(position, logits, token_ids)
        if self.settings.top_k or self.settings.top_p < 1:
            scores = scores.masked_fill(probabilities(logits, self.settings) == 0, -torch.inf)
        return scores.softmax(-1)

    def _log_e(self, position: int | Tensor, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """ln e of a position's noise, [V]. That of a position that the host knows is kept, since a tree has several
        tokens for it."""
        if isinstance(position, Tensor):
            return _ln_e(position, logits, token_ids)
        known = position, logits.shape[-1]
        if known not in self._noise:
            ln_e = _ln_e(self.key(position), logits, token_ids)
            self._noise = {known: ln_e, **dict(islice(self._noise.items(), MAX_K))}
        return self._noise[known]

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Capturing | None = None) -> Answer:
        test, logits, read = self._captured(logits, draft, captured)
        device, k = logits.device, len(read.token_ids)
        greedy, drawn_there = not self.settings.temperature, isinstance(draft.token_ids, Tensor)
        x = None if greedy and not drawn_there else to_device(read.token_ids, device)  # a greedy test reads none
        q = None if read.q is None else to_device(read.q, device)
        keys, rows, sizes = None, None, (k + 1, k + 1, k + 1, 0)
        if not greedy:
            keys = to_device(self._draft_numbers(position + depth for depth in row_depths(read)), device)
            rows, sizes = parent_rows(read, device), (k + 1, k + 1, k + 1, k)
        vector, probs = test(logits, keys, x, q, rows)
        own, own_p, margins, p, q_x, ids = unpacked(vector, *sizes, 0 if q is None else k, 0 if x is None else k)
        answer = follow(draft, own, own_p, margins, p, q_x, ids or cast(Sequence[int], read.token_ids))
        return answer._replace(target_probs=probs)

    def _test(
        self, logits: Tensor, keys: Tensor | None, x: Tensor | None, q: Tensor | None, rows: Tensor | None
    ) -> tuple[Tensor, Any]:
        """What `follow` needs, in one vector, and the target's probabilities if it draws."""
        if keys is None:
            values, tokens, margins = largest(logits)  # [k + 1] each
            return packed(tokens, certainty(values), margins, q, x), None
        assert x is not None
        probs = probabilities(logits, self.settings)
        tokens, margins = noise.draw(probs, keys)
        tokens = tokens.clamp(min=0)  # -1: nothing to draw, and then p of token 0 is 0 or NaN
        p = probs.gather(1, tokens[:, None])[:, 0]
        return packed(tokens, p, margins, drafted_probs(probs, x, rows), q, x), probs


def _ln_e(key: int | Tensor, logits: Tensor, token_ids: Tensor | None) -> Tensor:
    """ln e of the noise of a key, for logits [..., V] of some tokens: [V] in their type."""
    ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
    return (-torch.log1p(-noise.uniforms(key, ids))).log().to(logits.dtype)


def row_depths(draft: Draft) -> Sequence[int]:
    """The position that each row's logits predict, counted from the first drafted token, [k + 1]."""
    parents = draft.row_parents
    return range(len(draft.token_ids) + 1) if parents is None else depths_of(parents)


def drafted_probs(target_probs: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
    """The target's probability of each drafted token x [k], from its distribution after each row [k + 1, V].

    Args:
        rows: those of the tokens' parents, int64 [k]; None for a chain.
    """
    if rows is None:  # an index for the rows would take three times as long
        return target_probs[: len(x)].gather(1, x[:, None])[:, 0]
    return target_probs[rows, x]


def parent_rows(draft: Draft, device: torch.device) -> Tensor | None:
    """See `drafted_probs`."""
    parents = draft.row_parents
    return None if parents is None else to_device(parents[1:], device)

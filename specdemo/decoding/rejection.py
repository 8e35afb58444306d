"""Accept, resample, bonus: the rule that makes speculation lossless.

Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
`verify` and its parts are pure functions on tensors; `Rejection` gives them fresh random numbers each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from ..settings import REJECTION, Settings
from ..system.device import packed, to_device, unpacked
from ..tokens import Draft
from . import noise
from .acceptance import Answer, answer_to, follow
from .rule import Capturing, Rule, drafted_probs, parent_rows, row_depths
from .sampling import library_for
from .warping import probabilities

TESTING, DRAFTING = 1, 2  # purposes of random numbers, see `noise.key_of`

Term = Callable[[Tensor, Tensor], Tensor]  # of the rule, from p and q


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q), elementwise. A drafted token has q > 0, or it could not have been drawn."""
    return (p / q).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution that follows a rejection: max(0, p - q), unnormalised, [..., V].

    Where p = q only rounding can reject a token. There the residual is empty, and p is returned instead.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def verify(
    target_probs: Tensor, draft: Draft, draws: Tensor, passes: Term = acceptance_probability, left: Term = residual
) -> Answer:
    """Walk through a draft of k tokens, and draw the token that follows.

    In a chain, drafted token x_i is accepted iff draws[i] < min(1, p_i(x_i) / q_i(x_i)). The token after the accepted
    ones is drawn with draws[k]: from the residual max(0, p - q) if a test failed (*resampled*), from
    the target's own next distribution if none did (*bonus*, or *target* when the draft was empty).

    A chain without probabilities is one-hot: q = 1, so x is accepted with probability p(x), and the
    residual is p without x. At temperature 0 p is one-hot as well, and the rule reads: accept iff x is
    the target's argmax, else emit the argmax.

    The tokens of a tree were chosen, not drawn from q: tested by p / q, they would not follow p. So the target draws a
    token of its own after each row, with the draw of that row, and the walk goes on as long as that token was drafted.

    Args:
        target_probs: [k + 1, V], the target's distribution after each row of the pass.
        draws: [k + 1], uniform in [0, 1).
        passes, left: the terms of the rule for chains; the Lab breaks one of them on purpose.
    Raises:
        NotFinite: the logits of the target or of the drafter were not finite where the round depends on them.
    """
    return judged(draft, draws, outcome_of(target_probs, *read_of(draft, draws, target_probs.device), passes, left))


def read_of(
    draft: Draft, draws: Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """What `outcome_of` reads of a draft: tokens, their `probs` or `q`, the draws, and the rows of their parents."""
    q = None if draft.q is None else to_device(draft.q, device)
    return to_device(draft.token_ids, device), draft.probs, q, to_device(draws, device), parent_rows(draft, device)


def outcome_of(
    target_probs: Tensor,
    x: Tensor,
    draft_probs: Tensor | None,
    q: Tensor | None,
    draws: Tensor,
    rows: Tensor | None,
    passes: Term,
    left: Term,
) -> Tensor:
    """What `judged` needs, in one vector."""
    k, p = len(x), drafted_probs(target_probs, x, rows)  # [k]
    if rows is not None:
        tokens = sample(target_probs, draws) % target_probs.shape[-1]
        return packed(tokens, target_probs.gather(1, tokens[:, None])[:, 0], p, q, x)

    if draft_probs is not None:
        draft_probs = draft_probs.to(target_probs)  # [k, V]
        q = draft_probs.gather(1, x[:, None]).squeeze(1)  # [k]
    else:
        q = torch.ones_like(p) if q is None else q.to(p.dtype)
    passed = draws[:k] < passes(p, q)
    accepted = passed.cumprod(0).sum(0, keepdim=True)  # [1], how many passed before the first failure

    p_next = target_probs.index_select(0, accepted)  # [1, V]
    rest = left(p_next, _draft_probs_at(accepted, x, draft_probs, p_next)) if k else p_next  # nothing was proposed
    # 0 where `sample` finds no token, and then p of 0 is not positive
    token = sample(rest, draws[k:]) % rest.shape[-1]  # [1]

    token_p = p_next.gather(1, token[:, None])[0]
    return packed(accepted, token, token_p, p, q, draws, x)


def judged(draft: Draft, draws: Tensor, vector: Tensor) -> Answer:
    """What became of a draft, from the vector of `outcome_of`."""
    k = len(draws) - 1  # of what was read
    if draft.tree:
        own, own_p, p, q, x = unpacked(vector, k + 1, k + 1, k, 0 if draft.q is None else k, k)
        return follow(draft, own, own_p, (), p, q, x)
    (n,), own, own_p, p, q, drawn, x = unpacked(vector, 1, 1, 1, k, k, k + 1, k)
    passed, before = [place < n for place in range(k)], [0.0] * int(n)  # of the rows before the last
    return answer_to(draft, passed, [*before, *own], [*before, *own_p], p, q, x, draws=drawn[:k])


class Rejection(Rule):
    """Rejection sampling for one run. Its random numbers are keyed by seed, round, purpose and index.

    A number that helped to decide an earlier token is never used again. With numbers keyed by position it would be, and
    the text would not follow the target's distribution.
    """

    name = REJECTION
    needs_draft_probs = True

    def __init__(self, settings: Settings, passes: Term = acceptance_probability, left: Term = residual) -> None:
        super().__init__(settings)
        self._parts, self._round = (passes, left), 0

    def of_next_round(self) -> Rejection:
        rule = cast(Rejection, super().of_next_round())
        rule._round += 1
        return rule

    def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
        key = noise.key_of(self.settings.seed, self._round, purpose)
        return torch.tensor([noise.uniform(key, index) for index in indices], dtype=torch.float64)

    @property
    def kind(self) -> tuple[object, ...]:
        return (*super().kind, *self._parts)

    def _draft_numbers(self, positions: Iterable[int]) -> Tensor:
        return self._uniforms(DRAFTING, positions)

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        return sample(probs, number) % probs.shape[-1]

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Capturing | None = None) -> Answer:
        test, logits, read = self._captured(logits, draft, captured)
        # The walk takes one row of each depth, so rows of the same depth may share a number.
        draws = self._uniforms(TESTING, row_depths(read))
        self._round += 1
        vector, probs = test(logits, *read_of(read, draws, logits.device))
        return judged(draft, draws, vector)._replace(target_probs=probs)

    def _test(
        self,
        logits: Tensor,
        x: Tensor,
        draft_probs: Tensor | None,
        q: Tensor | None,
        draws: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        probs = probabilities(logits, self.settings)
        return outcome_of(probs, x, draft_probs, q, draws, rows, *self._parts), probs


def _draft_probs_at(position: Tensor, x: Tensor, draft_probs: Tensor | None, like: Tensor) -> Tensor:
    """The distribution that the drafted token at a position [1] was drawn from, [1, V].

    Past the end of the draft it is zeros, so that the residual is p itself, from which the bonus is drawn.
    """
    inside = position.clamp(max=len(x) - 1)
    if draft_probs is None:
        probs = one_hot(x.index_select(0, inside), like.shape[-1], like.dtype)
    else:
        probs = draft_probs.index_select(0, inside)
    return probs * (position < len(x))


def sample(probs: Tensor, draw: Tensor) -> Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability exceeds `draw`.

    `probs` may be unnormalised. A token of probability 0 is never returned. One uniform draw for each token
    is all the randomness, so that runs can be reproduced and tests can enumerate them.

    Args:
        probs: [..., V], non-negative, not all zero.
        draw: [...], uniform in [0, 1).
    Returns:
        [...], int64; V, which is no token, where all are zero or not numbers.
    """
    functions = library_for(probs)
    if functions is not None:
        places = torch.empty(probs.shape[:-1], dtype=torch.long)
        draw = draw.to(probs.device, torch.float64).expand(places.shape).contiguous()
        functions.sample(probs.data_ptr(), places.numel(), probs.shape[-1], draw.data_ptr(), places.data_ptr())
        return places
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Rounding may carry the product up to the total itself, which no cumulative value exceeds.
    threshold = torch.minimum(draw[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def one_hot(ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """A distribution with all mass on each id, [...] int64 -> [..., V]. Torch's own waits for a GPU."""
    return torch.zeros(*ids.shape, vocab, dtype=dtype, device=ids.device).scatter_(-1, ids[..., None], 1)

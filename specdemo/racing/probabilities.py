"""The tokens that were most likely at the positions of a round, for the tooltip and the step-through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..decoding import noise
from ..decoding.acceptance import branches, path_of, places_tested
from ..decoding.events import Distributions, Round
from ..formats import significant, traced
from ..tokens import DraftedToken
from .trace import Candidate, TokenProbabilities

SHOWN = 10  # tokens
LEAST = 1e-3  # less cannot be seen as a bar


def probabilities_of(event: Round, name: Callable[[int], str]) -> tuple[TokenProbabilities, ...]:
    """For each token that a round with distributions emitted, the candidates at its position.

    Under the match rule the candidates are the tokens of the least e / p and e / q, which decide. Under rejection
    sampling they are the likeliest by p or q, and at the last position also by the residual.

    Args:
        name: the text of a token by itself.
    """
    assert event.distributions, "they were asked for"
    seen, count = event.distributions, len(event.emitted)
    drafted = [token.id for token in places_tested(event.drafted)[:count]]
    p, q = target_and_draft_probs(seen, event.drafted, drafted)
    p, q = p[:count], torch.cat([q, q.new_zeros(count - len(q), q.shape[-1])])  # a bonus has no q
    emitted = [token.id for token in event.emitted]
    own = torch.tensor([emitted, [*drafted, *emitted[len(drafted) :]]], device=p.device).T  # [n, 2]
    if seen.seed is not None:
        keys = [noise.key_of(seen.seed, seen.position + i) for i in range(count)]
        ids = torch.cat([own, *(_first_drawn(probs, keys) for probs in (p, q))], 1)  # [n, 22]
        e = [(-torch.log1p(-noise.uniforms(key, row))).tolist() for key, row in zip(keys, ids.cpu(), strict=True)]
        left = [None] * count
        least = 0.0
    else:
        rest = (p - q).clamp(min=0)
        likeliest = torch.cat([torch.maximum(p, q), rest[-1:]]).topk(min(SHOWN, p.shape[-1])).indices
        ids = torch.cat([own, likeliest[:-1], likeliest[-1:].expand(count, -1)], 1)
        e = [[None] * ids.shape[1]] * count
        left = rest.sum(-1).tolist()
        least = LEAST
    both = torch.stack([p.gather(1, ids), q.gather(1, ids)], 2).tolist()  # [n, 22, 2]
    rows = zip(ids.tolist(), both, e, left, strict=True)
    return tuple(_ranked(list(zip(ids, both, e, strict=True)), rest, least, name) for ids, both, e, rest in rows)


def target_and_draft_probs(
    seen: Distributions, draft: Sequence[DraftedToken], token_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """p [k + 1, V] and q [n, V] of a round, for the first n drafted tokens; q is one-hot where tokens were chosen.

    Of a tree they are those of the emitted path, with one drafted token for each place.
    """
    p = seen.target_probs[[index + 1 for index in path_of(draft)]] if branches(draft) else seen.target_probs
    q = p.new_zeros(len(token_ids), p.shape[-1])
    for row, token in enumerate(token_ids):
        probs, ids = seen.draft_probs[row] if seen.draft_probs else (q.new_ones(1, 1), torch.tensor([token]))
        q[row, slice(None) if ids is None else ids.to(q.device)] = probs[0].to(q)
    return p, q


def _first_drawn(probs: Tensor, keys: Sequence[int]) -> Tensor:
    """The tokens of the least e / p in each row [n, V], the least first, [n, 10]; filled up with token 0."""
    probs, drawn = probs.clone(), []
    for _ in range(min(SHOWN, probs.shape[-1])):
        drawn.append(noise.draw(probs, keys)[0].clamp(min=0)[:, None])
        probs.scatter_(1, drawn[-1], 0.0)
    return torch.cat(drawn, 1)


def _ranked(
    candidates: Sequence[tuple[int, Sequence[float], float | None]],
    left: float | None,
    least: float,
    name: Callable[[int], str],
) -> TokenProbabilities:
    """The candidates of one position, likeliest first; the first two are always shown."""
    seen = {id for id, _, _ in candidates[:2]}
    seen |= {id for id, (p, q), _ in candidates[2:] if max(p / (left or 1), q) > least}
    ranked = sorted({(-max(p, q), id, p, q, e) for id, (p, q), e in candidates if id in seen})
    shown = (Candidate(id, name(id), traced(p), traced(q), significant(e)) for _, id, p, q, e in ranked)
    return TokenProbabilities(None if left is None else traced(left), tuple(shown))

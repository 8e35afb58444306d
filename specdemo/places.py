"""What was likely where a draft was tested: the few tokens that a round in slow motion has room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .events import Candidate, Event, Place, Round
from .text import LaneText
from .types import Draft, Verdict
from .verify import verify

LIKELIEST = 10  # tokens
LEAST = 1e-3  # what can be seen as a bar
DECIMALS = 6


class Watch:
    """`verify` as the rule of a decode; `places` reads the laws it was given once the round's clock has stopped."""

    def __init__(self, text: LaneText) -> None:
        self._text = text
        self._seen = torch.empty(0), Draft()

    def __call__(self, target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
        self._seen = target_probs, draft
        return verify(target_probs, draft, draws)

    def places(self, event: Event) -> tuple[Place, ...]:
        """For each token that the round just emitted, the likeliest where it came from, by p or q.

        In the last place, where it may have been drawn from the residual, the likeliest of that as well.
        """
        if not isinstance(event, Round):
            return ()
        target_probs, draft = self._seen
        count, vocab = len(event.emitted), target_probs.shape[-1]
        p = target_probs[:count]  # [n, V]
        x = torch.tensor([token.id for token in event.drafted[:count]], dtype=torch.long, device=p.device)
        draft_probs = F.one_hot(x, vocab) if draft.probs is None else draft.probs[: len(x)]
        q = torch.cat([draft_probs.to(p), p.new_zeros(count - len(x), vocab)])  # the bonus is drawn against no draft
        left = (p - q).clamp(min=0)
        likeliest = torch.cat([torch.maximum(p, q), left[-1:]]).topk(min(LIKELIEST, vocab)).indices
        emitted = torch.tensor([token.id for token in event.emitted], device=p.device)
        own = torch.stack([emitted, torch.cat([x, emitted[len(x) :]])], 1)  # [n, 2]
        ids = torch.cat([own, likeliest[:-1], likeliest[-1:].expand(count, -1)], 1)  # [n, 22]
        numbers = torch.stack([ids.double(), p.gather(1, ids).double(), q.gather(1, ids).double()], 2)  # [n, 22, 3]
        return tuple(map(self._place, numbers.tolist(), left.sum(-1).tolist()))

    def _place(self, candidates: Sequence[Sequence[float]], left: float) -> Place:
        own, others = candidates[:2], (c for c in candidates[2:] if c[1] >= LEAST * (left or 1) or c[2] >= LEAST)
        ranked = sorted({(-max(p, q), int(token_id), p, q) for token_id, p, q in (*own, *others)})
        return Place(
            _short(left), tuple(Candidate(i, self._text.name(i), _short(p), _short(q)) for _, i, p, q in ranked)
        )


def _short(probability: float) -> float:
    return round(min(probability, 1.0), DECIMALS)  # a sum in single precision can pass 1

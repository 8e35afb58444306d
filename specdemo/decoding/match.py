"""The match rule: a drafted token is accepted if it is the token that the target draws at its position.

The target draws its own token at each position with the noise of (seed, position), see `noise.draw`. The emitted token
is a function of the prefix, the seed and the position, so the text depends neither on the drafter nor on K: it is the
text that the target alone writes with that seed. A drafter draws with the same noise (Gumbel coupling, arXiv
2408.07978), so it often draws the target's token. At temperature 0 both are argmax.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from ..system.hardware import to_device
from ..types import MATCH, MAX_K, Draft, Settings, Verdict
from . import noise, tree
from .rule import Rule, check_finite, kind_after
from .sampling import certainty, largest, probabilities


class Match(Rule):
    name = MATCH

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._noise: dict[tuple[int, int], Tensor] = {}  # see `_log_e`

    def key(self, position: int) -> int:
        return noise.key_of(self.settings.seed, position)

    def _draw(self, probs: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """With the noise that the target will draw with."""
        return noise.draw(probs, [self.key(position)], token_ids)[0].clamp(min=0)

    def _shares(self, logits: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """softmax(logits - T ln e), with the noise e that the target will draw with.

        The target draws argmax(logits' - T ln e) from logits' of its own, and the drafter's softmax(logits) estimates
        which of those are the largest. So the noise is added to the logits, and T = 0 is no special case.
        """
        temperature = self.settings.temperature
        if not temperature:
            return logits.softmax(-1)
        scores = logits - temperature * self._log_e(position, logits, token_ids)
        if self.settings.top_k or self.settings.top_p < 1:
            scores = scores.masked_fill(probabilities(logits, self.settings) == 0, -torch.inf)
        return scores.softmax(-1)

    def _log_e(self, position: int, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """ln e of a position's noise, [V]; kept, since a tree has several tokens for the same position."""
        known = position, logits.shape[-1]
        if known not in self._noise:
            ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
            ln_e = (-torch.log1p(-noise.uniforms(self.key(position), ids))).log()
            self._noise = {known: ln_e.to(logits.dtype), **dict(islice(self._noise.items(), MAX_K))}
        return self._noise[known]

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        """Accept the drafted tokens that the target draws too, up to the first that differs; see `Rule`.

        The token after the accepted ones is the target's own: *resampled* where it differs from the drafted one,
        *bonus* behind a fully accepted draft, *target* if nothing was drafted.
        """
        if draft.parents is not None:
            return self._verify_tree(logits, draft, position)
        k = len(draft.token_ids)
        x = to_device(draft.token_ids, logits.device)  # [k]
        if self.settings.temperature == 0:
            values, tokens, margins = largest(logits)  # [k + 1] each
            p_drawn = certainty(values)
            p_drafted = (tokens[:k] == x).to(p_drawn)
        else:
            probs = self._target_probs(logits, position)
            tokens, margins = noise.draw(probs, [self.key(position + i) for i in range(k + 1)])
            tokens = tokens.clamp(min=0)  # where there is nothing to draw, p of token 0 is 0 or NaN
            p_drawn = probs.gather(1, tokens[:, None])[:, 0]
            p_drafted = probs[:k].gather(1, x[:, None])[:, 0]
        q = torch.ones_like(p_drafted) if draft.q is None else to_device(draft.q, logits.device)
        accepted = (tokens[:k] == x).long().cumprod(0).sum(0, keepdim=True)  # [1]

        # One transfer, and on a GPU the only wait, brings everything to the host.
        answer = torch.cat([part.double() for part in (accepted, tokens, margins, p_drawn, p_drafted, q, x)]).tolist()
        n, rest = int(answer[0]), answer[1:]
        drawn, margin, p_next = (rest[i * (k + 1) : (i + 1) * (k + 1)] for i in range(3))
        p, q_x, ids = (rest[3 * (k + 1) + i * k : 3 * (k + 1) + (i + 1) * k] for i in range(3))
        check_finite(p_next[: n + 1], q_x)
        return Verdict(
            accepted=n,
            token_id=int(drawn[n]),
            kind=kind_after(n, k),
            token_p=p_next[n],
            p=p,
            q=q_x,
            drafted=[int(token) for token in ids],
            margins=margin[: n + 1],
            target_ids=[int(token) for token in drawn],
        )

    def _verify_tree(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        """Accept the path through a tree on which the target draws every token."""
        x = to_device(draft.token_ids, logits.device)  # [k]
        above = to_device([parent + 1 for parent in draft.parents or ()], logits.device)  # the row that tests each
        if self.settings.temperature == 0:
            values, tokens, margins = largest(logits)
            p = certainty(values)
            return tree.verdict_of(draft, tree.Draws(tokens, p, margins), (tokens[above] == x).to(p))
        probs = self._target_probs(logits, position)
        tokens, margins = noise.draw(probs, [self.key(position + depth) for depth in tree.depths(draft)])
        tokens = tokens.clamp(min=0)  # as in a chain
        p = probs.gather(1, tokens[:, None])[:, 0]
        return self._walked(tree.verdict_of(draft, tree.Draws(tokens, p, margins), probs[above, x]))

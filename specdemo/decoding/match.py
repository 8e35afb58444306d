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
from . import noise
from .rule import Rule
from .sampling import certainty, largest, probabilities
from .walk import drafted_probs, follow, row_depths


class Match(Rule):
    name = MATCH

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._noise: dict[tuple[int, int], Tensor] = {}  # see `_log_e`

    def key(self, position: int) -> int:
        return noise.key_of(self.settings.seed, position)

    def _draw(self, probs: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """Draw with the noise that the target will use."""
        return noise.draw(probs, [self.key(position)], token_ids)[0].clamp(min=0)

    def _shares(self, logits: Tensor, position: int, token_ids: Tensor | None) -> Tensor:
        """softmax(logits - T ln e), with the noise e that the target will use.

        The target draws argmax(logits' - T ln e) from its own logits', which the drafter's logits estimate. So the same
        noise is added to them, and T = 0 is no special case.
        """
        temperature = self.settings.temperature
        if not temperature:
            return logits.softmax(-1)
        scores = logits - temperature * self._log_e(position, logits, token_ids)
        if self.settings.top_k or self.settings.top_p < 1:
            scores = scores.masked_fill(probabilities(logits, self.settings) == 0, -torch.inf)
        return scores.softmax(-1)

    def _log_e(self, position: int, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """ln e of a position's noise, [V]. It is kept, since a tree has several tokens for the same position."""
        known = position, logits.shape[-1]
        if known not in self._noise:
            ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
            ln_e = (-torch.log1p(-noise.uniforms(self.key(position), ids))).log()
            self._noise = {known: ln_e.to(logits.dtype), **dict(islice(self._noise.items(), MAX_K))}
        return self._noise[known]

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        if self.settings.temperature == 0:
            values, tokens, margins = largest(logits)  # [k + 1] each
            return follow(draft, tokens, certainty(values), margins)
        probs = self._target_probs(logits, position)
        tokens, margins = noise.draw(probs, [self.key(position + depth) for depth in row_depths(draft)])
        tokens = tokens.clamp(min=0)  # -1: nothing to draw, and then p of token 0 is 0 or NaN
        p = probs.gather(1, tokens[:, None])[:, 0]
        x = to_device(draft.token_ids, probs.device)  # [k]
        return follow(draft, tokens, p, margins, drafted_probs(probs, x, draft.parents))

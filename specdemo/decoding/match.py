"""The match rule: a drafted token is accepted if it is the token that the target draws at its position.

The target draws its own token at each position with the noise of (seed, position), see `noise.draw`. The emitted token
is a function of the prefix, the seed and the position, so the text depends neither on the drafter nor on K: it is the
text that the target alone writes with that seed. A drafter draws with the same noise (Gumbel coupling, arXiv
2408.07978), so it often draws the target's token. At temperature 0 both are argmax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from ..engines.runner import Capturing
from ..settings import MATCH, MAX_K, Settings
from ..system.device import packed, to_device, unpacked
from ..types import Draft
from . import noise
from .answer import Answer, drafted_probs, follow, parent_rows, row_depths
from .rule import Rule
from .sampling import certainty, largest, probabilities


class Match(Rule):
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

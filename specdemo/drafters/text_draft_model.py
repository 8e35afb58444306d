"""A draft model with another tokenizer: it drafts text, which is encoded again for the target.

Universal assisted generation; Timor et al., arXiv 2502.05202, algorithm 2 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoding.acceptance import DRAFTER_OVERFLOWED
from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..decoding.parts import Translator
from ..decoding.sampling import largest
from ..engines.runner import Runner
from ..types import Draft, NotFinite

LONGER = 2  # the room of its cache, in units of the target's: its own tokens may be shorter


class TextDraftModel(Drafter):
    """Writes K of its own tokens, the likeliest each time, and proposes their text in the target's tokens.

    Its distribution is over other tokens than the target's, so nothing is drawn from it: the draft is chosen at every
    temperature. K tokens of its own are often fewer of the target's.

    Each round the target's text is translated anew, and the cache keeps the beginning that stayed the same. If the text
    is too long for the cache, the model reads its end.
    """

    name = "draft-model"

    def __init__(self, runner: Runner, translator: Translator) -> None:
        self.runner, self.translator = runner, translator
        self._read: list[int] = []  # the tokens in the cache
        self._skipped = 0  # how many tokens at the beginning of the text it does not read

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        runner, text = self.runner, self.translator.to_draft(context)
        if len(text) - self._skipped + k > runner.context:
            self._skipped = max(len(text) - runner.context // 2, 0)
        text = text[self._skipped :]
        if not text or k >= runner.context or max(text) >= runner.vocab_size:
            return Draft()
        unread = self._forget_but(text)
        drafted: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(k):
            read = runner.forward(drafted[-1] if drafted else unread) if runner.length else runner.prefill(unread)
            best = largest(read[-1:])  # [1, V']
            drafted.append(best.places)
            values.append(best.values)
        if not bool(torch.cat(values).isfinite().all()):
            raise NotFinite(DRAFTER_OVERFLOWED)
        written = [int(token) for token in torch.cat(drafted).tolist()]
        self._read = [*text, *written[:-1]]
        return Draft(self.translator.to_target(context, text, written)[:k])

    def _forget_but(self, text: list[int]) -> list[int]:
        """Keep what the cache has of `text`, and return the rest: at least the last token, so that there are logits."""
        kept = next((i for i, (old, new) in enumerate(zip(self._read, text, strict=False)) if old != new), None)
        kept = min(len(self._read), len(text)) if kept is None else kept
        kept = min(kept, len(text) - 1, self.runner.length)
        self.runner.rollback(kept)
        return text[kept:]

    def release(self) -> None:
        self._read = []
        self.runner.release()

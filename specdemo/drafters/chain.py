"""Draws a chain of tokens by the rule of the run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoding.rule import Drawn, Rule
from ..engines.gpu.capture import CapturedFunctions
from ..engines.passes import PendingPass, alone, answered
from ..system.device import to_device
from ..tokens import Draft

NextLogits = Callable[[Sequence[Tensor]], Tensor]
"""Gets the tokens drawn so far, [1] int64 each, and returns the logits of the next one, [1, V]."""
NextPass = Callable[[Sequence[Tensor]], Tensor | PendingPass]
"""The same, or returns a pass whose last row gives them."""


def draw_chain(
    next_logits: NextPass,
    k: int,
    rule: Rule,
    position: int | Tensor | None,
    token_ids: Tensor | None = None,
    vocab_size: int = 0,
    stop_below: float = 0.0,
    begun: Sequence[Drawn] = (),
    all_pass: float = 1.0,
) -> Generator[PendingPass, Tensor, Draft]:
    """Draw at most k tokens one after another, the first for `position`. Captured work, which reads no position on the
    host, is given the numbers of all instead (`Rule.draft_numbers`).

    The chain may have `begun` with tokens of the whole target's vocabulary; `all_pass` is then the chance of these.

    The tokens stay on the device, which can work ahead as long as the drafter does not look at them. If logits are not
    finite, `Rule.verify` refuses the draft.

    On a CPU the draft ends when the product of the drafter's own probabilities, its estimate of the chance that all
    tokens pass, falls below `stop_below`. On a GPU it does not, since that would mean waiting for it.

    A drafter that knows only some of the target's `vocab_size` tokens gives their `token_ids` [V'], rising, and their
    logits [1, V']. The other tokens have probability 0.

    Where a grammar constrains the text, guesses are drawn among what it allows. The draft ends where the drafter has
    no such token. `Draft.probs` are then masked too: they are what the tokens were drawn from. Since the mask depends
    on the tokens before it only, so does where the draft ends, and the text keeps its distribution.
    """
    numbers = rule.draft_numbers(range(position, position + k)) if isinstance(position, int) else position
    drawn = [*begun]
    tokens = [token.column for token in begun]
    following = rule.constraint.fork() if rule.constraint else None
    if following:
        following.advance([int(token) for token in tokens])
    for i in range(len(begun), k):
        logits = (yield from answered(next_logits(tokens)))[-1:]
        if token_ids is None and vocab_size:
            logits = fitted(logits, vocab_size)
        if following and logits.is_cpu:  # on a GPU this would mean waiting for each token
            logits = following.among(logits, token_ids)
            if bool((logits == -torch.inf).all()):
                break
        if numbers is not None:
            numbers = to_device(numbers, logits.device)
        drawn.append(rule.draw(logits, None if numbers is None else numbers[i : i + 1], token_ids))
        column = drawn[-1].column
        tokens.append(column if token_ids is None else token_ids[column])
        if following and logits.is_cpu:
            following.advance([int(tokens[-1])])
        if stop_below and logits.is_cpu:
            all_pass *= rule.confidence(logits, drawn[-1])
            if all_pass < stop_below:
                break
    return chain_of(drawn, rule, token_ids, vocab_size)


def captured_chain(
    following: Callable[..., NextLogits],  # from what is `given` at the beginning, tensors, the logits of each token
    functions: CapturedFunctions,  # keeps what is captured; of this `following` alone
    given: Sequence[Tensor],
    k: int,
    rule: Rule,
    position: int,
    token_ids: Tensor | None,
    vocab_size: int,
) -> Draft:
    """The chain of `draw_chain` on a GPU, all of its draws and the passes between them by one captured call."""

    def call(k: int, numbers: Tensor | None, *begun: Tensor) -> tuple[Any, ...]:
        draft = alone(draw_chain(following(*begun), k, rule, numbers, token_ids, vocab_size))
        return draft.token_ids, draft.probs, draft.q, [probs for probs, _ in draft.drawn_from]

    numbers = rule.draft_numbers(range(position, position + k))
    numbers = numbers if numbers is None else to_device(numbers, given[0].device)
    tokens, probs, q, each = functions(rule.kind, call)(k, numbers, *given)
    return Draft(tokens, probs, q, drawn_from=[(row, token_ids) for row in each])


def chain_of(drawn: Sequence[Drawn], rule: Rule, token_ids: Tensor | None, vocab_size: int) -> Draft:
    """The draft of tokens that were drawn one after another."""
    if not drawn:
        return Draft()
    columns, q = torch.cat([token.column for token in drawn]), torch.cat([token.q for token in drawn])
    tokens = columns if token_ids is None else token_ids[columns]
    probs = [token.probs for token in drawn if token.probs is not None]  # [1, V or V'] each, none if chosen
    drawn_from = [(each, token_ids) for each in probs]
    if not (probs and rule.needs_draft_probs):
        return Draft(tokens, q=q, drawn_from=drawn_from)
    spread = torch.cat(probs)
    if token_ids is not None:
        spread = spread.new_zeros(len(tokens), vocab_size).index_copy_(1, token_ids, spread)
    return Draft(tokens, spread, q, drawn_from=drawn_from)


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [T, V'] of a draft model, cut or padded to the target's vocabulary, [T, V].

    Models of one family pad their vocabularies differently, and a padding entry is never a token.
    """
    return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)

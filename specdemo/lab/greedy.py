"""Is greedy decoding with a drafter really lossless? Token for token, against the target alone and transformers.

transformers' own `generate` runs the same weights through its own forward, cache and loop: it shares no code with ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..decode import check_room
from ..events import emitted_tokens
from ..race import check_drafter, compare, is_near_tie, start
from ..types import Settings
from .bench import Prompt

if TYPE_CHECKING:
    from ..models import Loaded


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Two greedy texts of one prompt, as they should be: the same.

    `text` is a drafter's name, or `transformers`; it is compared with the target alone. Where they part,
    `logit_gap` is how far apart the target's logits of the two tokens are, and `near_tie` whether that is so little
    that rounding decides.
    """

    prompt_id: str
    category: str
    text: str
    tokens: int
    identical: bool
    first_difference: int | None
    logit_gap: float | None
    near_tie: bool | None


def steps(prompts: Sequence[Prompt], drafters: Sequence[str], transformers: bool = True) -> int:
    """How many checks `greedy` yields."""
    return len(prompts) * (len(drafters) + transformers)


def greedy(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    drafters: Sequence[str],
    k: int,
    max_new_tokens: int,
    transformers: bool = True,
) -> Iterator[GreedyCheck]:
    """Check every prompt with every drafter, and the target alone against transformers unless told not to.

    Raises:
        BadInput: a drafter cannot be used here, or a prompt has no room.
    """
    settings = Settings(k=k, max_new_tokens=max_new_tokens)
    for name in drafters:
        check_drafter(loaded, name)
    prompt_ids = {prompt.id: loaded.encode(prompt.prompt) for prompt in prompts}
    for ids in prompt_ids.values():
        check_room(len(ids), settings, loaded.context)
    for prompt in prompts:
        ids = prompt_ids[prompt.id]
        plain = _text(loaded, "none", ids, settings)
        for name in drafters:
            yield _check(loaded, prompt, ids, name, plain, _text(loaded, name, ids, settings))
        if transformers:
            yield _check(loaded, prompt, ids, "transformers", plain, _theirs(loaded, ids, max_new_tokens))


def in_words(checks: Sequence[GreedyCheck]) -> list[str]:
    """What the checks showed, one sentence for each drafter and for transformers."""
    lines = []
    for text in dict.fromkeys(check.text for check in checks):
        mine = [check for check in checks if check.text == text]
        same, ties = sum(check.identical for check in mine), sum(bool(check.near_tie) for check in mine)
        texts, are = "text" if len(mine) == 1 else "texts", "is" if 1 in (same, len(mine)) else "are"
        line = f"{text}: {same} of {len(mine)} {texts} {are} the target's own, token for token"
        if ties:
            line += f"; {ties} {_part(ties)} at a near-tie, which rounding decides (float32 rounds less)"
        if unexplained := len(mine) - same - ties:
            line += f"; {unexplained} {_part(unexplained)} where rounding is no explanation: something is wrong"
        lines.append(line + ".")
    return lines


def _part(count: int) -> str:
    return "parts" if count == 1 else "part"


def _text(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> list[int]:
    return [token.id for event in start(loaded, drafter, prompt_ids, settings) for token in emitted_tokens(event)]


def _theirs(loaded: Loaded, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers' `generate` writes greedily. What is not said here it takes from the checkpoint."""
    from transformers import GenerationConfig

    ids = torch.tensor([prompt_ids], device=loaded.device)
    ends = sorted(loaded.eos_ids)
    config = GenerationConfig(
        do_sample=False,
        repetition_penalty=1.0,  # some checkpoints ask for another
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
    )
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in out[0, len(prompt_ids) :]]


def _check(
    loaded: Loaded, prompt: Prompt, prompt_ids: Sequence[int], text: str, plain: list[int], other: list[int]
) -> GreedyCheck:
    found = compare(loaded, prompt_ids, plain, other)
    near_tie = None
    if not found.identical:
        gap, dtype = found.logit_gap, str(loaded.dtype).removeprefix("torch.")
        near_tie = gap is not None and is_near_tie(gap, dtype)
    return GreedyCheck(
        *(prompt.id, prompt.category, text, len(plain)),
        *(found.identical, found.first_difference, found.logit_gap, near_tie),
    )

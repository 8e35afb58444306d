"""Decodes several prompts of a loaded preset at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..decoding.batch import Failed, decode_batch
from ..decoding.events import Event
from ..decoding.loop import Decoding, rule_for
from ..models.loaded import Loaded
from ..models.placement import check_caches
from ..types import MAX_SEED, BadInput, Settings
from .race import check_drafter, check_fits, check_rule, costs_of, decoding_of


def batch(
    loaded: Loaded, drafter: str, prompts: Sequence[Sequence[int]], settings: Settings, at_once: int
) -> Iterator[tuple[int, Event | Failed]]:
    """Decode prompts, at most `at_once` at a time: the events of each with its index, see `decode_batch`.

    Prompt i has the seed + i. The text of each is the one that it gets alone.

    Raises:
        BadInput: as for `race.race`.
    """
    check_drafter(loaded, drafter)
    check_rule(drafter, settings)
    if settings.ahead and at_once > 1:
        raise BadInput("Several prompts at once cannot be drafted ahead.")
    for prompt in prompts:
        check_fits(loaded, len(prompt), settings, drafter)
    bytes_per_token = loaded.token_bytes["target"] + loaded.token_bytes.get(drafter, 0)
    longest = max(map(len, prompts)) + settings.max_new_tokens
    check_caches([bytes_per_token] * min(at_once, len(prompts)), longest, loaded.device)
    settings = replace(settings, k=0) if drafter == "none" else settings
    costs = costs_of(loaded, settings, at_once)

    def decodings() -> Iterator[Decoding]:
        for index, prompt in enumerate(prompts):
            seeded = replace(settings, seed=(settings.seed + index) % (MAX_SEED + 1))
            yield decoding_of(loaded, drafter, prompt, rule_for(seeded), costs)

    yield from decode_batch(decodings(), at_once)

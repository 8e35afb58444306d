"""What the form, a link or an API call asks for, checked: nothing is clamped, everything wrong is refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...drafters.names import DRAFTERS
from ...errors import BadInput
from ...racing.compare import OWN_DRAFTER
from ...racing.request import DraftedLane, Request, read_lanes, with_readers
from ...settings import SETTINGS, Field, Settings, one_of, whole_if_it_is

MAX_PROMPT = 200_000  # characters: more than any context here holds, and cheap to refuse before tokenising


def read_request(
    *,
    prompt: Any,
    preset: Any,
    drafter: Any,
    presets: Sequence[str],
    most_new_tokens: int | None = None,
    stop: Any = (),
    raw: Any = False,
    isolated: Any = False,
    lanes: Any = None,
    readers: Any = 1,
    **settings: Any,
) -> Request:
    r"""Check the values of a form or a call.

    Args:
        most_new_tokens: how many may be asked for here, None if the context is the only limit.
        stop: a list, or a text with one string a line (where \n stands for a line break).
        readers: how many prompts are decoded at once; the others are examples.
        lanes: texts like eagle:4, which then stand for `drafter`, K and `tree`; None if those are given.
    """
    if not isinstance(prompt, str):
        raise BadInput("The prompt must be a text.")
    if not prompt.strip():
        raise BadInput("The prompt is empty: type something first.")
    if len(prompt) > MAX_PROMPT:
        raise BadInput(f"The prompt has {len(prompt):,} characters; at most {MAX_PROMPT:,} are taken. Shorten it.")
    one_of("preset", preset, presets)
    more: tuple[DraftedLane, ...] = ()
    if lanes is not None:
        first, *rest = read_lanes(lanes)
        drafter, more = first.drafter, tuple(rest)
        settings |= first.own_settings
    one_of("drafter", drafter, list(DRAFTERS))
    for name, value in (("raw", raw), ("isolated", isolated)):
        Field(name, "", "switch", in_sentences=name).check(value)
    numbers = {name: whole_if_it_is(value) for name, value in settings.items()}
    if most_new_tokens is not None:
        tokens = SETTINGS["max_new_tokens"]
        tokens.check(numbers.get("max_new_tokens", tokens.value), most_new_tokens)
    read = Settings(**numbers, stop=_stop_strings(stop))
    return with_readers(Request(prompt, preset, drafter, read, raw, isolated, more), readers)


def shown_request(request: Request) -> dict[str, Any]:
    """What the page shows of a request. Of a server, which drafts as it likes, K is None."""
    fields = request.as_dict()
    return {**fields, "settings": {**fields["settings"], "k": None}} if request.drafter == OWN_DRAFTER else fields


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return tuple(line.replace("\\n", "\n") for line in stop.split("\n") if line)
    if not isinstance(stop, (list, tuple)):
        raise BadInput("The stop strings must be a list of texts.")
    return tuple(stop)

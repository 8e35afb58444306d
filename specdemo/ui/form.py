"""What the form, a link or an API call asks for, checked: nothing is clamped, everything wrong is refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..drafters import DRAFTERS
from ..types import BadInput, Settings

MAX_PROMPT = 200_000  # characters: more than any context here holds, and cheap to refuse before tokenising


@dataclass(frozen=True, slots=True)
class Request:
    """One race, asked for and found to be sound in itself; whether the preset can do it is seen when it is loaded."""

    prompt: str
    preset: str
    drafter: str
    settings: Settings
    raw: bool = False
    isolated: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Everything that was asked for, ready for JSON."""
        return asdict(self)


def read_request(
    *,
    prompt: Any,
    preset: Any,
    drafter: Any,
    presets: Sequence[str],
    stop: Any = (),
    raw: Any = False,
    isolated: Any = False,
    **settings: Any,
) -> Request:
    r"""Check the values of a form or a call. `stop` is a list, or a text with one string a line
    (where \n stands for a line break).

    Raises:
        BadInput: a sentence naming what was given and what is allowed.
    """
    if not isinstance(prompt, str):
        raise BadInput("The prompt must be a text.")
    if not prompt.strip():
        raise BadInput("The prompt is empty: type something first.")
    if len(prompt) > MAX_PROMPT:
        raise BadInput(f"The prompt has {len(prompt):,} characters; at most {MAX_PROMPT:,} are taken. Shorten it.")
    one_of("preset", preset, presets)
    one_of("drafter", drafter, list(DRAFTERS))
    for name, value in (("raw", raw), ("isolated", isolated)):
        if not isinstance(value, bool):
            raise BadInput(f"{name} must be true or false, not {value!r}.")
    numbers = {name: _whole_if_it_is(value) for name, value in settings.items()}
    return Request(prompt, preset, drafter, Settings(**numbers, stop=_stop_strings(stop)), raw, isolated)


def one_of(what: str, value: Any, known: Sequence[str]) -> None:
    """Refuse a value that is not among the known ones."""
    if not isinstance(value, str) or value not in known:
        raise BadInput(f"There is no {what} called {_brief(value)}. Choose one of: {', '.join(known)}.")


def _whole_if_it_is(value: Any) -> Any:
    """JSON and sliders write 4 as 4.0 at times. Only a float that is a whole number is taken for one."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return tuple(line.replace("\\n", "\n") for line in stop.split("\n") if line)
    if not isinstance(stop, (list, tuple)):
        raise BadInput("The stop strings must be a list of texts.")
    return tuple(stop)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

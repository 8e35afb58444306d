"""The fields of the Lab's forms, and reading what was filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...drafters.names import DRAFTERS
from ...servers.address import MAX_ADDRESS
from ...types import MAX_K, BadInput, brief
from ..values import one_of

MAX_LAB_PROMPT = 20_000  # characters; a race takes more, `form.MAX_PROMPT`
ABLE = [name for name in DRAFTERS if name != "none"]
OF_SERVERS = "address", "key"  # kinds of fields


@dataclass(frozen=True, slots=True)
class Field:
    """One control of a form.

    `kind` is whole, number, text, choice (a few), list (a choice of one in a list), drafter or drafters (several), or
    one of `OF_SERVERS`: the address of a server and its API key, which may both be empty. A number has bounds, a choice
    has `choices`: what each value means in words. A drafter without a `value` begins as the preset's own, drafters as
    all that the preset can use (`value` "all") or the preset's own. Fields of one `group` stand under it as a heading.
    """

    name: str
    label: str
    kind: str
    value: Any = None
    low: float = 0
    high: float = 0
    choices: Mapping[str, str] | None = None
    info: str = ""
    group: str = ""

    @property
    def bounds(self) -> str:
        """Of a number, in words."""
        return f"{self.low:g} to {self.high:,g}"

    def read(self, given: Any) -> Any:
        """The value that was filled in.

        Raises:
            BadInput: a sentence naming what was given and what is allowed.
        """
        if self.kind in ("whole", "number"):
            return self._number(given)
        if self.kind == "text":
            if not isinstance(given, str) or not given.strip() or len(given) > MAX_LAB_PROMPT:
                raise BadInput(f'"{self.label}" must be a text of 1 to {MAX_LAB_PROMPT:,} characters.')
            return given
        if self.kind in OF_SERVERS:  # not quoted: it may hold a key
            if not isinstance(given, str) or len(given) > MAX_ADDRESS:
                raise BadInput(f'"{self.label}" must be a text of at most {MAX_ADDRESS} characters.')
            return given.strip()
        if self.kind == "drafters":
            if not isinstance(given, list) or not given:
                raise BadInput("Choose at least one drafter.")
            for name in given:
                one_of("drafter", name, ABLE)
            return list(dict.fromkeys(given))
        one_of(self.label.lower(), given, ABLE if self.kind == "drafter" else list(self.choices or ()))
        return given

    def _number(self, given: Any) -> float | int:
        whole = self.kind == "whole"
        sound = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not sound or not self.low <= given <= self.high or (whole and given != int(given)):  # NaN fails
            kind = "a whole number" if whole else "a number"
            instead = ", but it is empty" if given is None else f", not {brief(given, 40)}"
            raise BadInput(f'"{self.label}" must be {kind} from {self.bounds}{instead}.')
        return int(given) if whole else float(given)


def k_field(value: int, group: str = "") -> Field:
    return Field("k", "Draft length K (drafted tokens per round)", "whole", value, 1, MAX_K, group=group)


def temperature_field(value: float, low: float = 0.0) -> Field:
    return Field("temperature", "Temperature", "number", value, low, 2)


DRAFTER = Field("drafter", "Drafter", "drafter")
PROMPT = Field("prompt", "Prompt", "text", "Tell me about the sea.")
NEW_TOKENS = Field("max_new_tokens", "Tokens per text", "whole", 48, 8, 512)

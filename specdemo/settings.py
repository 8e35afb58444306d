"""How to decode: the settings, what is allowed in each, and how a form, a command, a link or a call asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from .errors import BadInput
from .formats import brief

MAX_K = 16
MAX_NODES = 63  # of a drafted tree: with the token that they follow they fill a word of 64 bits
MAX_AHEAD = 16
AUTO = "auto"  # K as `decoding.adaptive_k` chooses it, round by round
MAX_SEED = 2**32 - 1  # torch's CPU generator reads 32 bits: larger seeds would repeat the texts of smaller ones
MAX_NEW_TOKENS = 1_000_000
MAX_STOP_STRINGS = 8
MAX_STOP = 1_000  # characters of each
MAX_GRAMMAR = 100_000  # characters
MATCH, REJECTION = "match", "rejection"
RULES = {MATCH: "Match", REJECTION: "Rejection sampling"}  # the verification rules, see `decoding.rule`
KINDS = {bool: "switch", int: "whole", float: "number", str: "text", tuple: "text"}  # of a `Field`, by its value
OF_SERVERS = "address", "key"  # kinds of a `Field`
FORM, COMMAND = "form", "command"  # `Field.shown_in`


DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "stored", "stored16")  # the names of types of weights


def check_dtype_name(name: str) -> None:
    if name not in ("auto", *DTYPES):
        raise BadInput(f"There is no dtype called {name!r}. Choose one of: auto, {', '.join(DTYPES)}.")


def read_k(text: str) -> int | str:
    """K as a person types it, a whole number or AUTO.

    Raises:
        ValueError: it is neither.
    """
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ValueError(f"K is a whole number or {AUTO}, not {text!r}.") from None


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that a form, a command, a link or a call asks for: what is allowed, and the words for it.

    `kind` is switch, whole, number, text, choice, drafter, drafters (several), or one of `OF_SERVERS`: the address of a
    server and its API key, which may be empty. A number has bounds, and so has the length of a text. `choices` say what
    each value means in words; a number may be one of them, too. A drafter without a `value` begins as the preset's own,
    drafters as all that the preset can use (`value` "all") or the preset's own.

    Attributes:
        label: on the page. There `info` stands below it, and fields of one `group` stand below that as a heading.
        in_sentences: its name there, if that is not the label in quotation marks.
        help: on the command line.
        shown_in: FORM or COMMAND, if only one of them has it.
    """

    name: str
    label: str
    kind: str
    value: Any = None
    low: float = 0
    high: float = 0
    choices: Mapping[str, str] = field(default_factory=dict)
    info: str = ""
    group: str = ""
    in_sentences: str = ""
    help: str = ""
    shown_in: str = ""

    def read(self, given: Any) -> Any:
        """The value that was filled in."""
        value = whole_if_it_is(given) if self.kind == "whole" else given
        self.check(value)
        if self.kind == "drafters":
            return list(dict.fromkeys(value))
        return float(value) if self.kind == "number" else value.strip() if self.kind in OF_SERVERS else value

    def check(self, value: Any, high: float | None = None) -> None:
        """Check one value, with a bound of the caller's own if `high` is given."""
        known, instead, also = list(self.choices), _instead(value), ""
        good = isinstance(value, str) and value in known
        if self.kind in ("drafter", "drafters"):
            several = self.kind == "drafters"
            if several and not (isinstance(value, list) and value):
                raise BadInput("Choose at least one drafter.")
            for one in value if several else [value]:
                one_of("drafter", one, known)
            return
        if self.kind == "switch":
            good, allowed = isinstance(value, bool), "true or false"
        elif self.kind in ("whole", "number"):
            kind: Any = int if self.kind == "whole" else (int, float)
            number = isinstance(value, kind) and not isinstance(value, bool)
            good |= number and self.low <= value <= (self.high if high is None else high)  # NaN fails every comparison
            allowed = f"a {'whole ' * (kind is int)}number from {self.bounds(high)}"
            also = f" Or choose {' or '.join(known)}." if known else ""
        elif self.kind == "choice":
            allowed = " or ".join(filter(None, known))
        else:  # a text, which is not quoted: it may hold a key
            good = isinstance(value, str) and self.low <= len(value.strip()) and len(value) <= self.high
            allowed, instead = f"a text of {f'{self.low} to' if self.low else 'at most'} {self.high:,} characters", ""
        if not good:
            name = self.in_sentences or f'"{self.label}"'
            raise BadInput(f"{name} must be {allowed}{instead}.{also}")

    def bounds(self, high: float | None = None) -> str:
        """Of a number, in words."""
        return f"{self.low:,} to {self.high if high is None else high:,}"


def setting(
    default: Any, in_sentences: str, low: float = 0, high: float = 0, help: str = "", label: str = "", **more: Any
) -> Any:
    """A field of a dataclass that is a `Field` of the same name; `default` tells its kind."""
    kind, label = KINDS[type(default)], label or in_sentences.capitalize()
    kind = "choice" if kind == "text" and "choices" in more else kind
    one = Field("", label, kind, default, low, high, in_sentences=in_sentences, help=help, **more)
    return field(default=default, metadata={"field": one})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to decode. Values out of range are refused, never clamped.

    The form, the API, the command line, links and traces have the settings that are named here. With `tree` the drafts
    branch, and K is how many tokens they have on all branches together; with AUTO each is a tree or a chain, whichever
    pays more.
    """

    k: int | str = setting(
        4, "K", 0, MAX_NODES, f"Tokens drafted in a round, 0 to {MAX_K} or {AUTO}.", choices={AUTO: ""}
    )
    temperature: float = setting(0.0, "temperature", 0, 2, "The temperature, 0 (greedy) to 2.")
    top_k: int = setting(0, "top-k", 0, 1_000_000, "Sample from the k likeliest tokens; 0 is off.", "Top-k (0 is off)")
    top_p: float = setting(
        1.0,
        "top-p",
        0,
        1,
        "Sample from the likeliest tokens whose probabilities add up to this; 1 is off.",
        label="Top-p (1 is off)",
    )
    max_new_tokens: int = setting(128, "max new tokens", 1, MAX_NEW_TOKENS, "The most tokens to write.")
    seed: int = setting(0, "seed", 0, MAX_SEED, "The same seed, settings and machine give the same tokens.")
    rule: str = setting(MATCH, "The rule", help=f"How drafted tokens are tested: {' or '.join(RULES)}.", choices=RULES)
    tree: bool = setting(
        False,
        "tree",
        help=f"Draft trees of K tokens, up to {MAX_NODES}; with auto, where they pay. Experimental on a GPU.",
    )
    stop: tuple[str, ...] = setting((), "stop", help="Stop after this text; may be given several times.")
    ahead: int = setting(
        0,
        "ahead",
        0,
        MAX_AHEAD,
        "Prepare the next draft for this many tokens that may follow each position; 0 is off.",
        label="Draft ahead (0 is off)",
    )
    grammar: str = setting(
        "",
        "The grammar",
        0,
        MAX_GRAMMAR,
        "A JSON schema or a grammar in Lark's format that the text must satisfy.",
        label="JSON schema or grammar",
    )

    @property
    def branches(self) -> bool:
        """Whether the passes of a draft model branch: over a tree, or over what may follow several outcomes."""
        return self.tree or self.ahead > 0

    def __post_init__(self) -> None:
        for name, one in SETTINGS.items():
            if name != "stop":
                one.check(getattr(self, name), MAX_K if name == "k" and not self.tree else None)
        if self.top_p == 0:
            raise BadInput("top-p must be above 0 (and at most 1, which turns it off).")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadInput(f"At most {MAX_STOP_STRINGS} stop strings are allowed, not {len(self.stop)}.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise BadInput("A stop string cannot be empty.")
        if max(map(len, self.stop), default=0) > MAX_STOP:
            raise BadInput(f"A stop string has at most {MAX_STOP:,} characters.")
        if not all(is_text(text) for text in self.stop):
            raise BadInput("A stop string holds half of a character (a lone surrogate), which is not text.")
        if not is_text(self.grammar):
            raise BadInput("The grammar holds half of a character (a lone surrogate), which is not text.")


SETTINGS: dict[str, Field] = {each.name: replace(each.metadata["field"], name=each.name) for each in fields(Settings)}


def one_of(what: str, value: Any, known: Sequence[str]) -> None:
    """Check that a value is one of the known ones."""
    if not isinstance(value, str) or value not in known:
        raise BadInput(f"There is no {what} called {brief(value)}. Choose one of: {', '.join(known)}.")


def whole_if_it_is(value: Any) -> Any:
    """JSON and sliders write 4 as 4.0 at times, and numpy has whole numbers of its own. Of floats only one that is a
    whole number is taken for one."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_text(words: str) -> bool:
    """Whether it can be written down: half of a surrogate pair cannot."""
    try:
        words.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _instead(value: object) -> str:
    return ", but it is empty" if value is None else f", not {brief(value)}"

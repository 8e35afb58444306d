"""What is drafted, what is tested, what is emitted, and the settings, as plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

MAX_K = 16
MAX_NODES = 63  # of a drafted tree: with the token that they follow they fill a word of 64 bits
AUTO = "auto"  # K as `decoding.adaptive_k` chooses it, round by round
MAX_SEED = 2**32 - 1  # torch's CPU generator reads 32 bits: larger seeds would repeat the texts of smaller ones
MAX_NEW_TOKENS = 1_000_000
MAX_STOP_STRINGS = 8
FOLDERS = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|/)(?:[^\s'\"/\\]+[/\\])*")  # of an absolute path
MATCH, REJECTION = RULES = "match", "rejection"  # the verification rules, see `decoding.rule`

IntIfKnown: TypeAlias = Any
"""An int, or None in the lane of a server that does not tell it. Our own lanes know it, so what reads them need not
ask; a checked `int | None` would make all of them."""
FloatIfKnown: TypeAlias = Any
"""A float, or None: see `IntIfKnown`."""


def read_k(text: str) -> int | str:
    """K as a person types it, a whole number or AUTO.

    Raises:
        ValueError: it is neither.
    """
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ValueError(f"K is a whole number or {AUTO}, not {text!r}.") from None


class BadInput(ValueError):
    """Something a person typed or passed that cannot be used; the message is shown to them as is."""


class NotFinite(ArithmeticError):
    """A model gave logits with NaN or infinity, of which no token can be drawn; the message is a sentence to show."""


class TokenKind(str, Enum):
    """Where an emitted token came from, see `decoding.rule.Rule`."""

    ACCEPTED = "accepted"
    RESAMPLED = "resampled"
    BONUS = "bonus"
    TARGET = "target"
    UNKNOWN = "unknown"  # one of the above, but a server does not say which


class DraftOutcome(str, Enum):
    """The outcome of a drafted token's test, see `decoding.rule.Rule`."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNTESTED = "untested"


class FinishReason(str, Enum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of k proposed tokens. An empty draft is legal: the round is then plain decoding.

    Attributes:
        token_ids: [k]; an int64 tensor where tokens were drawn on a device, so that the host need not wait for them.
        probs: [k, V], the distribution that each token was drawn from, after warping. Only rejection sampling reads it.
            None stands for one-hot.
        q: [k], the drafter's probability of each token, NaN where its logits were not finite; in a tree its estimate of
            the chance that the target draws it. None stands for 1: the tokens were chosen and not drawn.
        parents: [k], the token of the draft that each one follows, which comes before it, or -1 where it follows the
            text. None stands for those of a chain: -1, 0, 1, ... Others are of chosen tokens: there are no `probs`.
    """

    token_ids: Sequence[int] | Tensor = ()
    probs: Tensor | None = None
    q: Tensor | None = None
    parents: Sequence[int] | None = None


def parents_or_chain(parents: Sequence[int] | None, count: int) -> Sequence[int]:
    """The parents of `count` tokens; those of a chain, which names none, are -1, 0, 1, ..."""
    return range(-1, count - 1) if parents is None else parents


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to a draft of k tokens: the accepted ones, then `token_id`.

    `path` are the accepted tokens by their places in the draft, and `parents` those of the draft. `p`, `q` and
    `drafted` have one entry per drafted token: its probability under the target and under the drafter, and its id.
    `draws` are the uniform numbers that rejection sampling tested with. `margins` are those of the emitted tokens under
    the match rule, see `noise.draw`. `token_p` is the target's probability of `token_id`. `target_ids` are the tokens
    that the target draws after each row of the pass, [k + 1], where the rule draws them.
    """

    path: Sequence[int]
    token_id: int
    kind: TokenKind
    token_p: float
    p: Sequence[float] = ()
    q: Sequence[float] = ()
    drafted: Sequence[int] = ()
    draws: Sequence[float] = ()
    margins: Sequence[float] = ()
    target_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Token:
    """An emitted token. What is not known is None: a server may not tell probabilities, nor every id.

    `p` is the target's probability of it. `margin` tells under the match rule how close the second candidate came, see
    `noise.draw`.
    """

    id: IntIfKnown
    kind: TokenKind
    p: float | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A proposed token and the outcome of its test. Under rejection sampling it passes iff `draw` < min(1, `p` / `q`).

    `id`, `p` and `q` are None where they are not known, `draw` also under the match rule, which draws no such number.
    `parent` is the index in the draft of the token that this one follows, -1 for the first of a path; None in a chain,
    where each token follows the one before it.
    """

    id: IntIfKnown
    outcome: DraftOutcome
    p: float | None = None
    q: float | None = None
    draw: float | None = None
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: what is allowed, and the words for it.

    `default` tells the type, and `choices` are allowed besides. `low` and `high` are the bounds of a number, `name`
    stands in sentences, `help` on the command line and `label` on the page, where it is not the name.
    """

    default: Any
    name: str
    low: float = 0
    high: float = 0
    help: str = ""
    label: str = ""
    choices: tuple[str, ...] = ()

    def check(self, value: object, high: float | None = None) -> None:
        """Check one value, with a bound of the caller's own if `high` is given.

        Raises:
            BadInput: naming the setting, the value and what is allowed.
        """
        kind, high, also = type(self.default), self.high if high is None else high, ""
        good, allowed = value in self.choices, " or ".join(self.choices)
        if kind is bool:
            good, allowed = isinstance(value, bool), "true or false"
        elif kind in (int, float):
            number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
            good |= number and self.low <= value <= high  # type: ignore[operator]  # NaN fails every comparison
            also = f" Or choose {allowed}." if allowed else ""
            allowed = f"a {'whole ' * (kind is int)}number from {self.low:,} to {high:,}"
        if not good:
            raise BadInput(f"{self.name} must be {allowed}{_instead(value)}.{also}")


def setting(default: Any, *words: Any, **more: Any) -> Any:
    """A field that is a `Setting`."""
    return field(default=default, metadata={"setting": Setting(default, *words, **more)})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to decode. Values out of range are refused, never clamped.

    The form, the API, the command line, links and traces have the settings that are named here. With `tree` the drafts
    branch, and K is how many tokens they have on all branches together; with AUTO each is a tree or a chain, whichever
    pays more.

    Raises:
        BadInput: naming the setting, what was given and what is allowed.
    """

    k: int | str = setting(4, "K", 0, MAX_NODES, f"Tokens drafted in a round, 0 to {MAX_K} or {AUTO}.", choices=(AUTO,))
    temperature: float = setting(0.0, "temperature", 0, 2, "The temperature, 0 (greedy) to 2.")
    top_k: int = setting(0, "top-k", 0, 1_000_000, "Sample from the k likeliest tokens; 0 is off.", "Top-k (0 is off)")
    top_p: float = setting(
        *(1.0, "top-p", 0, 1, "Sample from the likeliest tokens whose probabilities add up to this; 1 is off."),
        label="Top-p (1 is off)",
    )
    max_new_tokens: int = setting(128, "max new tokens", 1, MAX_NEW_TOKENS, "The most tokens to write.")
    seed: int = setting(0, "seed", 0, MAX_SEED, "The same seed, settings and machine give the same tokens.")
    rule: str = setting(MATCH, "The rule", help=f"How drafted tokens are tested: {' or '.join(RULES)}.", choices=RULES)
    tree: bool = setting(False, "tree", help=f"Draft trees of K tokens, up to {MAX_NODES}; with auto, where they pay.")
    stop: tuple[str, ...] = setting((), "stop", help="Stop after this text; may be given several times.")

    def __post_init__(self) -> None:
        for name, one in SETTINGS.items():
            if name != "stop":
                one.check(getattr(self, name), MAX_K if name == "k" and not self.tree else None)
        if self.top_p == 0:
            raise BadInput("top-p must be above 0 (and at most 1, which turns it off).")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadInput(f"At most {MAX_STOP_STRINGS} stop strings, please; there are {len(self.stop)}.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise BadInput("A stop string cannot be empty.")
        if not all(is_text(text) for text in self.stop):
            raise BadInput("A stop string holds half of a character (a lone surrogate), which is not text.")


SETTINGS: dict[str, Setting] = {each.name: each.metadata["setting"] for each in fields(Settings)}


def brief(value: object, most: int = 60) -> str:
    """A value as a sentence can quote it, whatever someone sent."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 3] + "..."


def reason(error: BaseException) -> str:
    """What a library says of a failure, as a sentence can quote it: its first line, without the folders of a path."""
    return FOLDERS.sub("", str(error).strip().partition("\n")[0]).rstrip(".")


def is_text(words: str) -> bool:
    """Whether it can be written down: half of a surrogate pair cannot."""
    try:
        words.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _instead(value: object) -> str:
    return ", but it is empty" if value is None else f", not {brief(value)}"

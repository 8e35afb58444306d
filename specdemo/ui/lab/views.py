"""What the Lab can be asked: its views, the fields of their forms, and reading what was filled in.

Light on purpose: the page is built from this, and what measures is imported when someone measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...drafters.names import DRAFTERS
from ...servers.address import MAX_ADDRESS
from ...studies.broken import DESCRIPTIONS
from ...types import MATCH, MAX_K, REJECTION, BadInput, brief
from ..values import one_of

MAX_LAB_PROMPT = 20_000  # characters; a race takes more, `form.MAX_PROMPT`
ABLE = [name for name in DRAFTERS if name != "none"]
K_SWEEP, TEMPERATURE_SWEEP = "K", "temperature"
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


@dataclass(frozen=True, slots=True)
class View:
    """One question: its `words` say which, for someone who has not read a paper; `run` is what the button says."""

    name: str
    title: str
    words: str
    fields: tuple[Field, ...]
    run: str = "Run"

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the form by name.

        Raises:
            BadInput: the first one that is wrong.
        """
        return {field.name: field.read(values.get(field.name)) for field in self.fields}

    def without_servers(self) -> View:
        """The view for a page whose visitors may not name servers."""
        return replace(self, fields=tuple(field for field in self.fields if field.kind not in OF_SERVERS))

    def told(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What may be kept of what was asked: neither addresses nor keys."""
        secret = {field.name for field in self.fields if field.kind in OF_SERVERS}
        return {name: value for name, value in asked.items() if name not in secret}


def _k(value: int, group: str = "") -> Field:
    return Field("k", "Draft length K (drafted tokens per round)", "whole", value, 1, MAX_K, group=group)


def _temperature(value: float, low: float = 0.0) -> Field:
    return Field("temperature", "Temperature", "number", value, low, 2)


DRAFTER = Field("drafter", "Drafter", "drafter")
PROMPT = Field("prompt", "Prompt", "text", "Tell me about the sea.")
NEW_TOKENS = Field("max_new_tokens", "Tokens per text", "whole", 48, 8, 512)
TRY, MEASURE = "Numbers to try", "Or measure them here"

PROFILE = View(
    "profile",
    "What things cost",
    "Drafting pays off if a drafted token is cheap and if checking many tokens takes hardly longer than writing one. "
    "This view measures both on the server: a pass of the target over 1 to 17 tokens, and a draft of each drafter.",
    (
        Field("drafters", "Drafters", "drafters", "all"),
        _k(4),
        Field("repeats", "Repeats of each measurement", "whole", 2, 1, 20),
        PROMPT,
    ),
)
THEORY = View(
    "theory",
    "What to expect",
    "How much faster can it be? Three numbers decide: how long a drafted token takes, how long a pass of the target "
    "takes, and how often a drafted token passes (alpha). Change them to see what the theory predicts for each K. Then "
    "measure, to see how far a real run is from the prediction, and why.",
    (
        Field("draft_ms", "Time for one drafted token, ms", "number", 1.0, 0, 10_000, group=TRY),
        Field("target_ms", "Time for one pass of the target, ms", "number", 30.0, 0.001, 10_000, group=TRY),
        Field("alpha", "Acceptance rate, alpha", "number", 0.6, 0, 1, group=TRY),
        Field("drafter", "Drafter", "drafter", group=MEASURE),
        _k(4, MEASURE),
        Field("prompt", "Prompt", "text", "Write a Python function that reverses a string.", group=MEASURE),
    ),
    run="Measure",
)
SEEDS = "One is enough at temperature 0: the text never varies."
SWEEP = View(
    "sweep",
    "Which K, which temperature",
    "A longer draft can gain more, but each of its tokens costs time, and a rejected token discards the rest. Higher "
    "temperatures make the target less predictable. This view writes the same texts with each setting, on easy prompts "
    "(lists, counting) and hard ones (stories), and shows what was fastest. The answer can be: do not speculate.",
    (
        Field(
            "vary",
            "What to vary",
            "choice",
            K_SWEEP,
            choices={K_SWEEP: "K: 0, 1, 2, 4, 8, 16", TEMPERATURE_SWEEP: "Temperature: 0, 0.3, 0.7, 1, 1.5"},
        ),
        Field("drafters", "Drafters", "drafters"),
        Field("k", "K, if the temperature varies", "whole", 4, 1, MAX_K),
        Field("temperature", "Temperature, if K varies", "number", 0.0, 0, 2),
        Field("prompts", "Prompts per category", "whole", 4, 1, 4),
        Field("seeds", "Samples per prompt", "whole", 1, 1, 10, info=SEEDS),
        NEW_TOKENS,
    ),
)
DOMAINS = View(
    "domains",
    "Where drafts pass",
    "A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which "
    "drafted tokens pass: by category, by kind of token, and by position in the draft.",
    (
        DRAFTER,
        _k(4),
        _temperature(0.0),
        Field("prompts", "Prompts per category", "whole", 2, 1, 3),
        NEW_TOKENS,
    ),
)
LOSSLESS = View(
    "lossless",
    "Is it lossless?",
    "Does drafting change what the model says? Three checks answer this. At temperature 0 every text must be the "
    "target's own, token for token. Above 0 the probabilities of every next token must be the target's own. They are "
    "first computed from the model's probabilities, then estimated by sampling thousands of rounds. Pick a broken rule "
    "and watch the test catch it.",
    (
        DRAFTER,
        Field("rule", "Verification rule", "choice", MATCH, choices={MATCH: "Match", REJECTION: "Rejection sampling"}),
        Field("broken", "Broken rule to sample with", "list", "", choices={"": "None: the rule above", **DESCRIPTIONS}),
        _k(2),
        _temperature(1.0, 0.05),
        Field("rounds", "Samples", "whole", 1600, 0, 20_000),
        Field("prompts", "Prompts at temperature 0", "whole", 4, 0, 24),
        PROMPT,
    ),
)
SERVERS, PRESET, BOUNDS = "Your servers", "Or the preset", "How much"
BASELINE = "Without it, no speed-up can be computed."
DOCTOR = View(
    "doctor",
    "Does it pay off?",
    "Speculation is on, but it is not faster. Why? This view examines a server that you run, or the preset: what is "
    "accepted at each position, what a round costs, and the speed-up over eight kinds of prompts, with many requests "
    "at once and with longer prompts. It says which setting to change and whether the text stays the same.",
    (
        Field("server", "Address of the server", "address", "", info="Such as http://127.0.0.1:8080", group=SERVERS),
        Field("server_key", "Its API key", "key", "", group=SERVERS),
        Field("baseline", "The same server without speculation", "address", "", info=BASELINE, group=SERVERS),
        Field("baseline_key", "Its API key", "key", "", group=SERVERS),
        Field("drafter", "Drafter", "drafter", group=PRESET),
        _k(4, PRESET),
        Field("prompts", "Prompts per kind", "whole", 1, 1, 3, group=BOUNDS),
        replace(NEW_TOKENS, group=BOUNDS),
        Field("at_once", "Requests at once, at most", "whole", 4, 0, 16, info="0 leaves them out.", group=BOUNDS),
        Field("context", "Longest prompt, tokens", "whole", 1024, 0, 4096, info="0 leaves it out.", group=BOUNDS),
    ),
)
VIEWS = {view.name: view for view in (PROFILE, THEORY, SWEEP, DOMAINS, LOSSLESS, DOCTOR)}

"""Where guesses pass: by category of prompt, by kind of token and by position in the draft. Counted from events."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.acceptance import branches
from ..decoding.events import Round, text_of
from ..errors import BadInput
from ..racing.trace import SPECULATIVE, Entry, read_trace, trace_lines
from ..settings import COMMAND, Field
from ..system.imports import LazyModule
from ..tokens import DraftOutcome
from .statistics import pooled_rate, rates_differ
from .study import DRAFTER, NEW_TOKENS, RULE, SEED, Study, k_field, prompt_fields, settings_in, temperature_field

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import lanes, race
else:
    lanes, race = LazyModule("specdemo.racing.lanes"), LazyModule("specdemo.racing.race")

CATEGORY, KIND, POSITION = "category", "kind of token", "position in the draft"
SEVERAL_TRACES = "Count in this trace, with no model; may be given several times."
COUNTED = ("drafted", "tested", "accepted")
ENOUGH = 30  # tested guesses that a group needs before a sentence is made of it


class Domains(Study):
    """A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which
    drafted tokens pass: by category, by kind of token, and by position in the draft.
    """

    name = "domains"
    title = "Where drafts pass"
    summary = "Count which drafted tokens pass: by category of prompt, by kind of token, by position in the draft."
    fields = (
        DRAFTER,
        k_field(4),
        temperature_field(0.0),
        SEED,
        RULE,
        *prompt_fields("domains", 2, 3),
        NEW_TOKENS,
        Field("traces", "Traces", "traces", help=SEVERAL_TRACES, shown_in=COMMAND),
    )
    heading = "Counts"
    columns = (
        ("by", "by", ""),
        ("name", "group", ""),
        *((name, name, ",.0f") for name in COUNTED),
        ("acceptance_rate", "acceptance rate", ".0%"),
        ("low", "from", ".0%"),
        ("high", "to", ".0%"),
        ("draft_efficiency", "draft efficiency", ".0%"),
    )

    @classmethod
    def needs_models(cls, asked: Mapping[str, Any]) -> bool:
        return not asked.get("traces")

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.counts = Counts()
        self.texts = self.readable(self.prompts("domains")) if self.needs_models(asked) else []
        self.steps = len(self.texts)

    def run(self) -> Iterator[str]:
        for trace in self.asked.get("traces") or ():
            drafted = [entry for entry in read_trace(trace_lines(trace))[1] if entry.lane == SPECULATIVE]
            self.counts.add(Path(trace.name.removesuffix(".gz")).stem, drafted)
            yield "Reading traces"
        if not self.texts:
            return
        loaded, drafter, settings = self.loaded, self.asked["drafter"], settings_in(self.asked)
        race.check_drafter(loaded, drafter)
        prompt_ids = [loaded.encode(prompt.prompt) for prompt in self.texts]
        for ids in prompt_ids:
            race.check_fits(loaded, len(ids), settings, drafter)
        for prompt, ids in zip(self.texts, prompt_ids, strict=True):
            text = lanes.LaneText(loaded.tokenizer, ids, loaded.eos_ids)
            with closing(race.start(loaded, drafter, ids, settings)) as events:  # type: ignore[type-var]
                self.counts.add(prompt.category, [Entry(SPECULATIVE, text.read(event)) for event in events])
            self.done += 1
            yield "Writing texts"

    def words(self) -> list[str]:
        return self.counts.in_words()

    def rows(self) -> list[dict[str, Any]]:
        return self.counts.rows()


@dataclass(slots=True)
class Counts:
    """Drafted tokens by category, kind and position, over any number of texts."""

    groups: dict[tuple[str, str], dict[str, Counter[str]]] = field(default_factory=dict)
    """How many are `COUNTED` in each text, by question and group."""
    texts: int = 0

    def add(self, category: str, entries: Iterable[Entry]) -> None:
        """Count one text: the entries of one lane, in order."""
        text, name = "", str(self.texts)
        self.texts += 1
        for entry in entries:
            if isinstance(entry.event, Round):
                if branches(entry.event.drafted):
                    raise BadInput("Drafts are counted by position, and those of this trace are trees.")
                before = text
                for position, token in enumerate(entry.event.drafted, 1):
                    kind = kind_of(token.text, before)
                    for group in ((CATEGORY, category), (KIND, kind.value), (POSITION, str(position))):
                        count = self.groups.setdefault(group, {}).setdefault(name, Counter())
                        count["drafted"] += 1
                        count["tested"] += token.outcome is not DraftOutcome.UNTESTED
                        count["accepted"] += token.outcome is DraftOutcome.ACCEPTED
                    before += token.text
            text += text_of(entry.event)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group, in the order of the three questions.

        `low` and `high` bound the acceptance rate, with texts as units: guesses of one text pass or fail together. None
        of a single text.
        """
        order = {kind.value: index for index, kind in enumerate(Kind)}
        rows = []
        for by in (CATEGORY, KIND, POSITION):
            names = [name for question, name in self.groups if question == by]
            for name in sorted(names, key=lambda name: order.get(name, int(name) if by == POSITION else 0)):
                counts = self.groups[by, name].values()
                drafted, tested, accepted = (sum(count[of] for count in counts) for of in COUNTED)
                rate = pooled_rate([(count["accepted"], count["tested"]) for count in counts], 1.0)
                row = {"by": by, "name": name, "drafted": drafted, "tested": tested, "accepted": accepted}
                row |= {"draft_efficiency": accepted / drafted, "acceptance_rate": rate and rate.mean}
                rows.append(row | {"low": rate and rate.low, "high": rate and rate.high})
        return rows

    def in_words(self) -> list[str]:
        """The largest difference of each kind in a sentence, where enough was tested."""
        lines = []
        for by in (CATEGORY, KIND, POSITION):
            rows = [row for row in self.rows() if row["by"] == by and row["tested"] >= ENOUGH]
            if len(rows) < 2:
                continue
            worst, best = (pick(rows, key=lambda row: row["acceptance_rate"]) for pick in (min, max))
            differ = rates_differ(self._parts(by, best["name"]), self._parts(by, worst["name"]), len(rows))
            caution = "" if differ else " (with so few texts and so many groups this may be chance)"
            lines.append(
                f"By {by}: {best['name']} passes most often, {best['acceptance_rate']:.0%} of the tested guesses, "
                f"{worst['name']} least, {worst['acceptance_rate']:.0%}{caution}."
            )
        return lines

    def _parts(self, by: str, name: str) -> dict[str, tuple[float, float]]:
        return {text: (count["accepted"], count["tested"]) for text, count in self.groups[by, name].items()}


# What kind of token a token is -------------------------------------------------------------------------------


class Kind(str, Enum):
    """The kinds that acceptance is counted by."""

    PUNCTUATION = "punctuation"
    FUNCTION_WORD = "function word"
    CONTENT_WORD = "content word"
    NUMBER = "number"
    SYMBOL = "whitespace or code symbol"
    CONTINUATION = "word continuation"


PUNCTUATION = frozenset(".,;:!?'\"()-\u2013\u2014\u2026\u2018\u2019\u201c\u201d\u00ab\u00bb\u00bf\u00a1")

# Articles, pronouns, prepositions, conjunctions, auxiliaries and particles of English.
_ENGLISH = """
    a about above after again against all also am among an and another any are around as at be because been before
    being below between both but by can could did do does doing down during each either few for from had has have
    having he her here hers herself him himself his how i if in into is it its itself just may me might mine more
    most much must my myself neither no nor not of off on once one only onto or other our ours ourselves out over own
    same shall she should since so some such than that the their theirs them themselves then there these they this
    those through to too toward towards under until up upon us very was we were what when where which while who whom
    whose why will with within without would yes yet you your yours yourself yourselves
"""
FUNCTION_WORDS = frozenset(_ENGLISH.split())


def kind_of(token: str, before: str) -> Kind:
    """The kind of a token with this text after the text `before`; the first rule that fits decides.

    1. A token without any visible character is whitespace (or part of a character: a continuation).
    2. One without letters is a number if it holds a digit, punctuation if every visible character is a mark of prose,
       and a code symbol otherwise.
    3. One with letters that is written right after a letter, a digit, an underscore or an apostrophe within a word
       continues that word.
    4. The rest begin words: function words by a list of English ones, else content words.

    It looks backwards only, so that a rejected guess, which nothing follows, is sorted by the same rules: the first
    piece of a longer word counts as the word it looks like. Scripts without spaces come out as continuations.
    """
    visible = token.strip()
    if not visible:
        return Kind.SYMBOL if token else Kind.CONTINUATION
    if not any(_is_letter(c) for c in visible):
        if any(c.isnumeric() for c in visible):
            return Kind.NUMBER
        return Kind.PUNCTUATION if PUNCTUATION.issuperset(visible) else Kind.SYMBOL
    if not token[0].isspace() and _in_word(token, before):
        return Kind.CONTINUATION
    word = visible.strip("".join(PUNCTUATION)).lower()
    return Kind.FUNCTION_WORD if word in FUNCTION_WORDS else Kind.CONTENT_WORD


def _in_word(token: str, before: str) -> bool:
    """Whether the token's first character goes on with the word that `before` ends in."""
    if before[-1:] in ("'", "\u2019"):  # don + ' + t, but not the opening mark of a quotation
        return _is_wordy(before[-2:-1])
    return _is_wordy(before[-1:]) and (_is_wordy(token[0]) or token[0] in "'\u2019")


def _is_wordy(character: str) -> bool:
    return character == "_" or character.isalnum() or _is_letter(character)


def _is_letter(character: str) -> bool:
    return bool(character) and unicodedata.category(character)[0] in "LM"  # letters and the marks on them

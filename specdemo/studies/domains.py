"""Where guesses pass: by category of prompt, by kind of token and by position in the draft. Counted from events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..decoding.events import Round, branches
from ..models.loaded import Loaded
from ..racing.race import SPECULATIVE, check_drafter, check_fits, start
from ..racing.text import LaneText
from ..racing.trace import Entry
from ..types import BadInput, DraftOutcome, Settings
from .kinds import Kind, kind_of
from .prompts import Prompt
from .statistics import pooled_rate, rates_differ

CATEGORY, KIND, POSITION = "category", "kind of token", "position in the draft"
COUNTED = ("drafted", "tested", "accepted")
ENOUGH = 30  # tested guesses that a group needs before a sentence is made of it


@dataclass(slots=True)
class Counts:
    """Drafted tokens by category, kind and position, over any number of texts."""

    groups: dict[tuple[str, str], dict[str, Counter[str]]] = field(default_factory=dict)
    """How many are `COUNTED` in each text, by question and group."""
    texts: int = 0

    def add(self, category: str, entries: Iterable[Entry]) -> None:
        """Count one text: the entries of one lane, in order.

        Raises:
            BadInput: its drafts are trees, which have many tokens at the same position.
        """
        text, name = "", str(self.texts)
        self.texts += 1
        for entry in entries:
            if isinstance(entry.event, Round):
                if branches(entry.event.drafted):
                    raise BadInput("Drafts are counted by position, and those of this trace are trees.")
                before = text
                for position, (token, span) in enumerate(zip(entry.event.drafted, entry.spans.drafted, strict=True), 1):
                    kind = kind_of(span, before)
                    for group in ((CATEGORY, category), (KIND, kind.value), (POSITION, str(position))):
                        count = self.groups.setdefault(group, {}).setdefault(name, Counter())
                        count["drafted"] += 1
                        count["tested"] += token.outcome is not DraftOutcome.UNTESTED
                        count["accepted"] += token.outcome is DraftOutcome.ACCEPTED
                    before += span
            text += "".join(entry.spans.emitted)

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


def domains(
    loaded: Loaded, drafter: str, prompts: Sequence[Prompt], settings: Settings
) -> Iterator[tuple[Prompt, list[Entry]]]:
    """Generate on every prompt with the drafter; yields each prompt with what to count, one text at a time.

    Raises:
        BadInput: the drafter cannot be used here, or a prompt has no room.
    """
    check_drafter(loaded, drafter)
    prompt_ids = {prompt.id: loaded.encode(prompt.prompt) for prompt in prompts}
    for ids in prompt_ids.values():
        check_fits(loaded, len(ids), settings, drafter)
    for prompt in prompts:
        text = LaneText(loaded.tokenizer, prompt_ids[prompt.id], loaded.eos_ids)
        with closing(start(loaded, drafter, prompt_ids[prompt.id], settings)) as events:  # type: ignore[type-var]
            yield prompt, [Entry(SPECULATIVE, event, text.read(event)) for event in events]

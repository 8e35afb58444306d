"""Where guesses pass: by category of prompt, by kind of token and by place in the draft. Counted from events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

from ..decode import check_room
from ..events import Entry, Round
from ..race import SPECULATIVE, check_drafter, start
from ..text import LaneText
from ..types import Fate, Settings
from .bench import Prompt
from .kinds import Kind, kind_of

if TYPE_CHECKING:
    from ..models import Loaded

CATEGORY, KIND, PLACE = "category", "kind of token", "place in the draft"
ENOUGH = 30  # tested guesses that a group needs before a sentence is made of it
NORMAL = 1.96  # standard deviations that hold 95%


@dataclass(slots=True)
class Count:
    """Drafted tokens of one group."""

    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95% interval of the acceptance rate; the guesses are taken as independent."""
        if not self.tested:
            return None
        n, rate, z = self.tested, self.accepted / self.tested, NORMAL
        middle, half = rate + z * z / (2 * n), z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


@dataclass(slots=True)
class Counts:
    """Drafted tokens by category, kind and place, over any number of texts."""

    groups: dict[tuple[str, str], Count] = field(default_factory=dict)

    def add(self, category: str, entries: Iterable[Entry]) -> None:
        """Count one text: the entries of one lane, in order."""
        text = ""
        for entry in entries:
            if isinstance(entry.event, Round):
                before = text
                for place, (token, span) in enumerate(zip(entry.event.drafted, entry.spans.drafted, strict=True), 1):
                    kind = kind_of(span, before)
                    for group in ((CATEGORY, category), (KIND, kind.value), (PLACE, str(place))):
                        count = self.groups.setdefault(group, Count())
                        count.drafted += 1
                        count.tested += token.fate is not Fate.UNTESTED
                        count.accepted += token.fate is Fate.ACCEPTED
                    before += span
            text += "".join(entry.spans.emitted)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group, in the order of the three questions; `low` and `high` bound the acceptance rate."""
        order = {kind.value: place for place, kind in enumerate(Kind)}
        rows = []
        for by in (CATEGORY, KIND, PLACE):
            names = [name for question, name in self.groups if question == by]
            for name in sorted(names, key=lambda name: order.get(name, int(name) if by == PLACE else 0)):
                count = self.groups[by, name]
                low, high = count.interval() or (None, None)
                row = {"by": by, "name": name, "drafted": count.drafted, "tested": count.tested}
                row |= {"accepted": count.accepted, "draft_efficiency": count.accepted / count.drafted}
                rate = count.accepted / count.tested if count.tested else None
                rows.append(row | {"acceptance_rate": rate, "low": low, "high": high})
        return rows

    def in_words(self) -> list[str]:
        """The largest difference of each kind in a sentence, where enough was tested."""
        lines = []
        for by in (CATEGORY, KIND, PLACE):
            rows = [row for row in self.rows() if row["by"] == by and row["tested"] >= ENOUGH]
            if len(rows) < 2:
                continue
            worst, best = (pick(rows, key=lambda row: row["acceptance_rate"]) for pick in (min, max))
            told = "" if best["low"] > worst["high"] else " (the intervals overlap, so this may be chance)"
            lines.append(
                f"By {by}: {best['name']} passes most often, {best['acceptance_rate']:.0%} of the tested guesses, "
                f"{worst['name']} least, {worst['acceptance_rate']:.0%}{told}."
            )
        return lines


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
        check_room(len(ids), settings, loaded.context)
    for prompt in prompts:
        text = LaneText(loaded.tokenizer, prompt_ids[prompt.id], loaded.eos_ids)
        with closing(start(loaded, drafter, prompt_ids[prompt.id], settings)) as events:  # type: ignore[type-var]
            yield prompt, [Entry(SPECULATIVE, event, text.read(event)) for event in events]

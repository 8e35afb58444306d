"""Several prompts at once: from how many readers on drafting no longer pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..decoding.events import Finished, Round
from ..errors import BadInput
from ..formats import formatted
from ..settings import AUTO, COMMAND, FORM, SETTINGS, Field, read_k
from ..system.imports import LazyModule
from .grid import ALONE, Grid
from .plots import ALONE as TARGET_ALONE
from .plots import TIMES, Axis, Plot
from .statistics import Spread
from .study import DRAFTER, NEW_TOKENS, PROMPT_FILE, PROMPT_FILES, form_and_command, temperature_field
from .summaries import Figures, Row, Runs, mean, share, with_speedups
from .tables import Rows

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import batch
else:
    batch = LazyModule("specdemo.racing.batch")

GROUPS_HELP = "How many groups of prompts are decoded at each size."
SIZES_HELP = "Numbers of readers, separated by commas."
SIZES, MOST_READERS = (1, 2, 4, 8, 16), 64
PAYING = "Above the line drafting pays. Whiskers: 95% confidence interval over groups of prompts."
SPEED = Axis("tokens/s", ".0f")
over_readers = partial(Plot, at="batch", x=Axis("readers at once"), by="name")
KS = {AUTO: "auto: by the number of readers", "1": "1 token", **{str(k): f"{k} tokens" for k in (2, 3, 4, 8)}}


class Readers(Grid):
    """A pass of the target reads all of its weights, for one prompt or for sixteen, so a server decodes several prompts
    at once. Guesses take the same room in a pass as further prompts do. This view writes texts for 1 to 16
    readers at once, with and without the drafter, and says from how many readers on drafting no longer pays.
    """

    name = "batch"
    title = "Several readers at once"
    summary = "Time 1 to 16 prompts at once, with and without a drafter, and say from how many on it no longer pays."
    fields = (
        DRAFTER,
        Field("k", "Draft length K", "choice", AUTO, choices=KS, shown_in=FORM),
        replace(SETTINGS["k"], value=AUTO, shown_in=COMMAND),
        temperature_field(0.0),
        Field("repeats", "Groups of prompts", "whole", 4, 2, 20, help=GROUPS_HELP),
        *form_and_command(NEW_TOKENS, 32, 48),
        Field("sizes", "Readers at once", "text", "1,2,4,8,16", help=SIZES_HELP, shown_in=COMMAND),
        replace(PROMPT_FILE, value=PROMPT_FILES / "domains.jsonl"),
    )
    axes = ("batch", "drafter")
    figures: ClassVar[Figures] = {
        "tokens_per_second": mean("tokens_per_second"),
        "tokens_per_second_per_reader": mean(lambda run: run["tokens_per_second"] / run["batch"]),
        "tokens_per_round": share("tokens", "rounds"),
        "speedup": mean("speedup"),
    }
    units = ("repeat",)
    heading = "All figures, and their 95% intervals over groups of prompts"
    columns = (
        ("batch", "readers", ",.0f"),
        ("drafter", "drafter", ""),
        ("tokens_per_second", "tokens/s of all", ".1f"),
        ("tokens_per_second_per_reader", "tokens/s of each", ".1f"),
        ("tokens_per_round", "tokens per round", ".2f"),
        ("speedup", "times the target alone", "times"),
    )
    plots = (
        (
            over_readers(
                "All readers together", "Tokens per second of all prompts together.", {"tokens_per_second": ""}, SPEED
            ),
            over_readers(
                "Each reader", "Tokens per second of one prompt.", {"tokens_per_second_per_reader": ""}, SPEED
            ),
            over_readers("With the drafter", PAYING, {"speedup": ""}, TIMES, rule=TARGET_ALONE),
        ),
    )

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, {**chosen, "k": read_k(str(chosen["k"]))})
        sizes = sorted(chosen.get("sizes", SIZES))
        if not all(1 <= size <= MOST_READERS for size in sizes):
            raise BadInput(f"There can be 1 to {MOST_READERS} readers at once.")
        self.texts_of(self.readable(self.prompts("domains")))
        groups = [{"repeat": repeat} for repeat in range(chosen["repeats"])]
        drafters = [{"drafter": drafter} for drafter in (ALONE, chosen["drafter"])]
        self.plan(groups, drafters, [{"batch": size} for size in sizes])

    def ids_of(self, names: Row) -> list[list[int]]:
        """The prompts of a group; those of the next repeat follow them."""
        ids, size, repeat = [*self.prompt_ids.values()], names["batch"], names["repeat"]
        return [ids[(repeat * size + place) % len(ids)] for place in range(size)]

    def write(self, names: Row) -> Iterator[Row]:
        """Decode prompts at once, until the first of them ends: figures while all of them are decoded."""
        tokens, rounds, seconds = 0, 0, 0.0
        chosen = names["drafter"], self.ids_of(names), self.settings_of(names), names["batch"]
        with closing(batch.batch(self.loaded, *chosen)) as events:  # type: ignore[type-var]
            for _, event in events:
                if isinstance(event, Round):
                    tokens, rounds, seconds = tokens + len(event.emitted), rounds + 1, seconds + event.seconds
                elif isinstance(event, Finished):
                    break
                elif isinstance(event, batch.Failed):
                    raise event.error
        if seconds:
            found = {"tokens": tokens, "rounds": rounds, "seconds": seconds}
            yield {**found, "tokens_per_second": tokens / seconds}

    def at(self, names: Row) -> str:
        return f"{names['batch']} at once"

    @classmethod
    def with_comparison(cls, runs: Runs) -> Runs:
        """The groups in pairs."""
        return with_speedups(runs, lambda run: run["drafter"] == ALONE, "batch", "repeat")

    def words(self) -> list[str]:
        return in_words(self.rows(), self.chosen["drafter"])

    def drawn(self) -> Mapping[str, Rows]:
        names = {ALONE: "target alone"}
        return {"": [{**row, "name": names.get(row["drafter"], f"with {row['drafter']}")} for row in self.rows()]}


def in_words(rows: Sequence[Mapping[str, Any]], drafter: str) -> list[str]:
    """From how many readers on drafting no longer pays, and what all of them gain by being read at once."""
    found = [(row["batch"], row["speedup"]) for row in rows if row["speedup"] is not None]
    if not found:
        return []
    words = [_crossing(found, drafter)]
    alone = {row["batch"]: row["tokens_per_second"].mean for row in rows if row["drafter"] == ALONE}
    if len(alone) > 1:
        few, many = min(alone), max(alone)
        words.append(
            f"Without a drafter {many} readers at once get {alone[many] / alone[few]:.1f} times the tokens of {few}."
        )
    return words


def _crossing(found: Sequence[tuple[int, Spread]], drafter: str) -> str:
    """`found` are the numbers of readers, rising, and the drafter's speed compared with the target alone."""
    losing = next((place for place, (_, spread) in enumerate(found) if spread.mean < 1), len(found))
    words = []
    if losing:
        size, spread = found[losing - 1]
        sure = spread.low is None or spread.low > 1
        pays = "pays" if sure else "seems to pay, which can be chance,"
        words.append(f"{drafter} {pays} for up to {_readers(size)} here ({_times(spread)}).")
    if losing < len(found):
        size, spread = found[losing]
        sure, named = spread.high is None or spread.high < 1, "it" if losing else drafter
        advice = f"do not speculate with {named} here" if sure else f"{named} seems not to pay, which can be chance"
        words.append(f"From {_readers(size)} on, {advice} ({_times(spread)}).")
    return " ".join(words)


def _readers(size: int) -> str:
    return "1 reader" if size == 1 else f"{size} readers"


def _times(spread: Spread) -> str:
    return f"{formatted(spread, '.2f')} times the tokens of the target alone"

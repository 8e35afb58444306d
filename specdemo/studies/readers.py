"""Several prompts at once: from how many readers on drafting no longer pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..decoding.events import Finished, Round
from ..errors import BadInput
from ..formats import formatted
from ..settings import AUTO, COMMAND, FORM, SETTINGS, Field, Settings, read_k
from ..system.imports import LazyModule
from .statistics import Spread, geometric_mean
from .study import DRAFTER, NEW_TOKENS, PROMPT_FILE, PROMPT_FILES, Study, settings_in, temperature_field

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import batch
else:
    batch = LazyModule("specdemo.racing.batch")

GROUPS_HELP = "How many groups of prompts are decoded at each size."
SIZES_HELP = "Numbers of readers, separated by commas."
SIZES, MOST_READERS = (1, 2, 4, 8, 16), 64
ALONE = "none"  # the target alone
KS = {AUTO: "auto: by the number of readers", "1": "1 token", **{str(k): f"{k} tokens" for k in (2, 3, 4, 8)}}


class BatchStudy(Study):
    """A pass of the target reads all of its weights, for one prompt or for sixteen, so a server decodes several prompts
    at once. Drafted tokens take the same room in a pass as further prompts do. This view writes texts for 1 to 16
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
        replace(NEW_TOKENS, value=32, cli_default=48),
        Field("sizes", "Readers at once", "wholes", "1,2,4,8,16", help=SIZES_HELP, shown_in=COMMAND),
        replace(PROMPT_FILE, value=PROMPT_FILES / "domains.jsonl"),
    )
    heading = "All figures, and their 95% intervals over groups of prompts"
    columns = (
        ("batch", "readers", ",.0f"),
        ("drafter", "drafter", ""),
        ("tokens_per_second", "tokens/s of all", ".1f"),
        ("tokens_per_second_per_reader", "tokens/s of each", ".1f"),
        ("tokens_per_round", "tokens per round", ".2f"),
        ("speedup", "times the target alone", "times"),
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.sizes = asked.get("sizes", SIZES)
        if not all(1 <= size <= MOST_READERS for size in self.sizes):
            raise BadInput(f"There can be 1 to {MOST_READERS} readers at once.")
        self.settings = settings_in({**asked, "k": read_k(str(asked["k"]))})
        self.prompts_read = self.readable(self.prompts("domains"))
        self.groups: list[BatchRun] = []
        self.steps = 2 * len(self.sizes) * asked["repeats"]

    def run(self) -> Iterator[str]:
        ids = [self.loaded.encode(prompt.prompt) for prompt in self.prompts_read]
        for repeat in range(self.asked["repeats"]):
            for size in self.sizes:
                prompts = group_of(ids, size, repeat)
                for drafter in (ALONE, self.asked["drafter"])[:: 1 if repeat % 2 else -1]:
                    self.groups.append(decode_group(self.loaded, drafter, prompts, self.settings, repeat))
                    self.done += 1
                    yield f"{size} at once"

    def words(self) -> list[str]:
        return in_words(self.rows(), self.asked["drafter"])

    def rows(self) -> list[dict[str, Any]]:
        return summarise(self.groups)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Some prompts decoded at once. Tokens, rounds and seconds are those while all of them were decoded."""

    size: int
    drafter: str
    repeat: int
    tokens: int
    rounds: int
    seconds: float


def group_of(ids: Sequence[Sequence[int]], size: int, repeat: int) -> list[Sequence[int]]:
    """The prompts of a group; those of the next repeat follow them."""
    return [ids[(repeat * size + place) % len(ids)] for place in range(size)]


def decode_group(
    loaded: Loaded, drafter: str, prompts: Sequence[Sequence[int]], settings: Settings, repeat: int
) -> BatchRun:
    """Decode prompts at once, until the first of them ends."""
    tokens, rounds, seconds = 0, 0, 0.0
    with closing(batch.batch(loaded, drafter, prompts, settings, len(prompts))) as events:  # type: ignore[type-var]
        for _, event in events:
            if isinstance(event, Round):
                tokens, rounds, seconds = tokens + len(event.emitted), rounds + 1, seconds + event.seconds
            elif isinstance(event, Finished):
                break
            elif isinstance(event, batch.Failed):
                raise event.error
    return BatchRun(len(prompts), drafter, repeat, tokens, rounds, seconds)


def summarise(groups: Sequence[BatchRun]) -> list[dict[str, Any]]:
    """A row for each number of readers, alone and with the drafter. `speedup` is of the groups in pairs, None alone."""
    rows, in_order = [], sorted(groups, key=lambda group: (group.size, group.drafter != ALONE))
    for size, drafter in dict.fromkeys((group.size, group.drafter) for group in in_order):
        mine = {group.repeat: group for group in groups if (group.size, group.drafter) == (size, drafter)}
        alone = {group.repeat: _rate(group) for group in groups if (group.size, group.drafter) == (size, ALONE)}
        pairs = {str(at): [_rate(group) / alone[at]] for at, group in mine.items() if at in alone}
        rate = geometric_mean({str(at): [_rate(group)] for at, group in mine.items()})
        assert rate
        low, high = (end and end / size for end in (rate.low, rate.high))
        each = Spread(rate.mean / size, low, high, rate.count)
        tokens, rounds = (sum(getattr(group, of) for group in mine.values()) for of in ("tokens", "rounds"))
        row = {"batch": size, "drafter": drafter, "tokens_per_second": rate, "tokens_per_second_per_reader": each}
        speedup = None if drafter == ALONE else geometric_mean(pairs)
        rows.append({**row, "tokens_per_round": tokens / rounds, "speedup": speedup})
    return rows


def _rate(group: BatchRun) -> float:
    return group.tokens / group.seconds


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

"""What a finished race showed, ready for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

from scipy.special import bdtr  # the binomial distribution: the chance of at most so many

from ..decoding import noise
from ..decoding.events import Event
from ..engines.memory_rate import memory_rate
from ..models.loaded import Loaded
from ..settings import Settings
from ..tokens import FinishReason
from .bandwidth import weight_bytes
from .busy import best_passes, remember
from .compare import exact_rows
from .figures import LaneFigures
from .lanes import LaneText
from .outcome import Outcome
from .outcome import report as report_of
from .remembered import remembered_by
from .request import PLAIN, SPECULATIVE, DraftedLane, Request
from .trace import Entry
from .words import sentence

# The share of first guesses of a published head that pass. Its authors report 0.65 to 0.85 (EAGLE-3 for Llama-3.1-8B:
# 0.75 to 0.80; DFlash for Qwen3-8B: 0.82 on mathematics; P-EAGLE: 0.64 on code where EAGLE-3 had 0.73, by vLLM #32628;
# Medusa for Vicuna-7B: about 0.6; the MTP layer of DeepSeek-V3: 0.85 to 0.9). Even after a short training it is 0.4
# (P-EAGLE for Qwen3-8B after 5,000 texts).
USUAL = {  # by drafter
    **dict.fromkeys(("eagle", "block", "dspark", "dflash2"), (0.65, 0.85)),
    "p-eagle": (0.6, 0.75),
    "medusa": (0.5, 0.65),
    "mtp": (0.7, 0.9),
}
FAR_BELOW = 1 / 3  # of the lowest usual share: below this something may be wrong
POOR = 0.6  # of the lowest usual share: reached by briefly trained heads and on texts that are hard to guess
UNLIKELY = 1 / 200  # how often a poor head may be doubted by chance
# What may differ from the head's training, the likeliest first.
CAUSES = "the layers it reads", "its rope_theta", "the chat template", "the thinking mode", "a quantized target"
OF_MTP = "an MTP layer that was not trained on when its model was fine-tuned", *CAUSES[2:4]


def summary(
    loaded: Loaded,
    prompt_ids: Sequence[int],
    settings: Settings,
    entries: Sequence[Entry],
    drafted: Mapping[str, DraftedLane | None] | None = None,
) -> dict[str, Any]:
    """What came of a race of one reader, ready for JSON.

    Args:
        drafted: the lanes with a drafter by name; by default one, of an unknown K.
    """
    lanes = {PLAIN: None, **({SPECULATIVE: None} if drafted is None else drafted)}
    return _outcome(loaded, settings, entries, lanes, dict.fromkeys(lanes, prompt_ids)).as_dict()


def outcome_of(loaded: Loaded, request: Request, entries: Sequence[Entry]) -> Outcome:
    """What came of the race that was asked for, and whether a published head seems to be wired wrongly."""
    prompts = [loaded.encode(prompt, request.raw) for prompt in request.prompts]
    read = dict(zip(request.lanes, cycle(prompts), strict=False))
    lanes = {**dict.fromkeys(request.lanes), **request.drafted}
    return _outcome(loaded, request.settings, entries, lanes, read, request.pairs)


def _outcome(
    loaded: Loaded,
    settings: Settings,
    entries: Sequence[Entry],
    lanes: Mapping[str, DraftedLane | None],
    prompts: Mapping[str, Sequence[int]],
    pairs: Mapping[str, str] | None = None,
) -> Outcome:
    found = Outcome.of(settings, entries, lanes, environment=measured(loaded), pairs=pairs)
    if found.verdicts:
        remember(loaded, found.best.pace)
    verdicts, doubts = {**found.verdicts}, dict[str, str]()
    for lane, request in lanes.items():
        if pairs and doubts:  # one is enough
            break
        if request and (doubt := _doubt(loaded, request.drafter, found.lanes[lane])):
            judged = SPECULATIVE if pairs else lane
            verdicts[judged] = replace(verdicts[judged], doubt=doubt)
            doubts.setdefault(request.drafter, doubt)
    lane_events = {lane: figures.events for lane, figures in found.lanes.items()}
    reports = {lane: report(loaded, prompts[lane], events, settings.grammar) for lane, events in lane_events.items()}
    cut = dict.fromkeys(filter(None, map(cut_short, reports.values())))
    words = " ".join([found.sentence, *doubts.values(), *cut])
    return replace(found, verdicts=verdicts, sentence=words, reports=reports)


def measured(loaded: Loaded) -> dict[str, Any]:
    """The environment of a loaded preset with its best passes so far, and with the present `memory_rate`, if it can be
    measured."""
    environment = {**loaded.environment(), "best_passes": best_passes(loaded)}
    read = weight_bytes(environment)
    rate = memory_rate(environment["device"], read) if read else None
    return {**environment, "memory_rate": rate} if rate else environment


def _doubt(loaded: Loaded, drafter: str, lane: LaneFigures) -> str:
    """A sentence on the head of a lane's drafter, by that lane or by all runs and trials: with K = auto a head that is
    always wrong is not asked again."""
    head = loaded.head_formats.get(drafter)
    if head is None:
        return ""
    firsts = sum((model.first_guesses for model in loaded.costs.values()), Counter[tuple[str, bool]]())
    passed = firsts[drafter, True]
    counts = (lane.drafts, lane.first_passed), (passed + firsts[drafter, False], passed)
    return next(filter(None, (sentence("first guesses", FirstGuesses(drafter, head, *each)) for each in counts)), "")


@dataclass(frozen=True)
class FirstGuesses:
    """Of the drafts of a published head those whose first guess passed: the facts of whether it seems wired wrongly.

    If none passes, few drafts are enough: K = auto soon stops asking a head that is always wrong. `head` is its format.
    """

    drafter: str
    head: str
    drafts: int
    passed: int

    @property
    def usual(self) -> tuple[float, float]:
        return USUAL[self.drafter]

    @property
    def causes(self) -> str:
        return ", ".join(OF_MTP if self.drafter == "mtp" else CAUSES)

    @property
    def share(self) -> float:
        return self.passed / self.drafts

    @property
    def are_few(self) -> bool:
        lowest = self.usual[0]
        few = self.passed < FAR_BELOW * lowest * self.drafts
        return few and bool(bdtr(self.passed, self.drafts, POOR * lowest) <= UNLIKELY)


def report(loaded: Loaded, prompt_ids: Sequence[int], events: Sequence[Event], grammar: str = "") -> dict[str, Any]:
    """What came of one lane, ready for JSON: `text, token_ids, kinds, finish_reason, stats`.

    With a `grammar` also `satisfied`: whether the text is complete, or ended before it could be.
    """
    text = LaneText(loaded.tokenizer, prompt_ids, loaded.eos_ids)
    for event in events:
        text.read(event)
    found = report_of(text.text, LaneFigures.of(events))
    if grammar:
        constraint = loaded.constraint(grammar)
        token_ids = [token for token in found["token_ids"] if token not in loaded.eos_ids]
        found["satisfied"] = constraint.advance(token_ids) == len(token_ids) and constraint.finished
    return found


class Ending(NamedTuple):
    """How a text ended: the facts of whether that was in the middle of what its grammar asks for."""

    satisfied: bool
    reason: str | None
    tokens: int

    @property
    def is_cut_short(self) -> bool:
        return not self.satisfied and self.reason in (FinishReason.LENGTH, FinishReason.STOP)


def cut_short(report: Mapping[str, Any]) -> str:
    """A sentence if a text ended in the middle of what its grammar asks for, else ""."""
    ending = Ending(report.get("satisfied", True), report["finish_reason"], len(report["token_ids"]))
    return sentence("ending", ending)


def trace_header(loaded: Loaded, request: Request) -> dict[str, Any]:
    """What a race was asked for, and what it ran on. With the entries this is all that is needed to run it `again`."""
    environment = loaded.environment()

    def lane(name: str, run: DraftedLane) -> dict[str, Any]:
        exact = {"engine": loaded.engine, "exact_rows": exact_rows(environment, run.tree)}
        count = remembered_by(loaded, run)
        memory = {"remembered": count} if count else {}
        return {"name": name, **asdict(run), "rule": request.settings.rule, "noise": noise.VERSION, **exact, **memory}

    readers = {"readers": len(request.prompts), "others": list(request.others)} if request.others else {}
    return {
        "lanes": [lane(name, run) for name, run in request.lanes.items()],
        "preset": loaded.preset.name,
        "weights": loaded.weights,
        "drafter": request.drafter,
        "prompt": request.prompt,
        **readers,
        "raw": request.raw,
        "isolated": request.isolated,
        "settings": asdict(request.settings),
        "environment": environment,
    }

"""A scripted engine for the tests of the page: the prompt is echoed, word by word, by a model that is not there.

Everything the page does with a real model happens here as well, in milliseconds: loading with progress, rounds with
accepted, resampled, bonus, rejected and untested tokens, stopping, failing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from specdemo.decoding.parts import DrafterParts
from specdemo.errors import BadInput
from specdemo.models.hub_token import hub_token
from specdemo.models.presets import Defaults, Preset
from specdemo.models.sources import Folder
from specdemo.models.store import LoadError
from specdemo.racing.race import check_drafter, check_rule
from specdemo.racing.request import AT_ONCE, Request
from specdemo.racing.trace import Entry
from specdemo.settings import AUTO, SETTINGS, Settings
from specdemo.studies.study import Study
from specdemo.system.progress import tell
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from specdemo.ui.engine import NOTHING_LOADED, Backend, LoadedRace, Status
from specdemo.ui.race.form import CHAT, FIELDS, INTERLEAVED, MORE_LANES, NO_LANE, read_form
from tests.harness.texts import with_text
from tests.harness.ui_classes import Engine

WRONG = " wrong"
PIECE = re.compile(r"\s?[^\s]+|\s")
MARGIN = 1e-4  # of every token: how close another one came
PREFILL_SECONDS, PASS_SECONDS, DEARER_PASS_SECONDS, DRAFT_SECONDS = 0.03, 0.02, 0.025, 0.002  # on the engine's clock

PLACEMENT = {"cpu": 269_030_016}  # bytes of weights
MEMORY_RATE = 3e10  # bytes per second that the memory streams

PRESETS = {
    name: Preset(name, title, description, Folder(Path(name)), defaults=defaults)
    for name, title, description, defaults in (
        ("scripted", "Scripted 135M", "A preset of the tests.", Defaults("prompt-lookup", 4, 0.0, 24)),
        ("other", "Other 1.7B", "Much larger.", Defaults("none", 2, 0.5, 12, raw=True)),
    )
}
FORM = {  # values of all fields, which are in order
    **{name: one.value for name, one in SETTINGS.items()},
    **{"prompt": "one", "preset": "scripted", "drafter": "none", "auto": False, "match": True, "max_new_tokens": 8},
    **{"stop": "", "mode": CHAT, "order": INTERLEAVED, AT_ONCE.name: AT_ONCE.value},
    **{name: value for lane in MORE_LANES for name, value in zip(lane, (NO_LANE, AUTO), strict=True)},
}
PROMPTS = {"facts": ["one two three four five", "What is rain?"], "code": ["for x in range(3): print(x)"]}


class Words:
    """A tokenizer that gives every new piece of text the next number."""

    def __init__(self) -> None:
        self.pieces: list[str] = [WRONG]

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in PIECE.findall(text):
            if piece not in self.pieces:
                self.pieces.append(piece)
            ids.append(self.pieces.index(piece))
        return ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.pieces[index] for index in ids)


@dataclass
class ScriptedLoaded:
    """What `models.load` gives, as far as the page uses it."""

    preset: Preset
    tokenizer: Words = field(default_factory=Words)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    released: bool = False
    context: int = 8192
    eos_ids: frozenset[int] = frozenset()
    weights: dict[str, Any] = field(default_factory=lambda: {"target": {"source": "script"}, "draft_model": None})
    draft_model: Any = None
    head_formats: dict[str, str] = field(default_factory=dict)
    costs: dict[Any, Any] = field(default_factory=dict)
    chains_only: str | None = None
    missing_heads: dict[str, str] = field(default_factory=dict)
    parts: DrafterParts = field(default_factory=lambda: DrafterParts(ngram_table=Path("a table")))

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        return self.tokenizer.encode(prompt)

    def cannot_branch(self, drafter: str) -> str | None:
        return self.chains_only

    def environment(self) -> dict[str, Any]:
        return {"device": "cpu", "device_name": "a scripted processor", "dtype": "bfloat16", "placement": PLACEMENT}

    def release(self) -> None:
        self.released = True

    def target_runner(self, capacity: int) -> Any:
        logits = torch.full((len(self.tokenizer.pieces),), 0.375)
        logits[0] = 0.0  # the token of `WRONG`, which a text that differs has
        return SimpleNamespace(prefill=lambda ids: logits[None], release=lambda: None)


class Script:
    """How the engine behaves; tests change these between runs.

    `pace` is the real seconds one emitted token takes; with `real` an event takes as long as on the engine's clock;
    `fail_at` a token count at which `failure` is raised, `differ_at` a place at which the drafted lane writes
    another token, `load_failure` what loading raises.
    `tokens` are those that the hub would be asked with, one for each load.
    `says` is what a run tells before its first event, if anything.
    `used` is the engine of the server that has the script.
    `gate` holds every run at its first event while it is cleared, `loading` holds a load. `open_races` counts
    the races whose generators were neither finished nor closed, `ended_races` the others.
    """

    used: Engine

    def __init__(self) -> None:
        self.gate, self.loading = threading.Event(), threading.Event()
        self.open_races = 0
        self.began_at = self.ended_at = 0.0
        self.loads: list[ScriptedLoaded] = []
        self.reset()

    def reset(self) -> None:
        self.ended_races = 0
        self.races: list[list[Entry]] = []
        self.settings: list[Settings] = []
        self.pace = 0.0
        self.real = False
        self.fail_at: int | None = None
        self.failure: Exception = RuntimeError("the script says so")
        self.differ_at: int | None = None
        self.load_failure: Exception | None = None
        self.tokens: list[str | None] = []
        self.reported: list[Preset] = []
        self.says = ""
        self.gate.set()
        self.loading.set()

    @property
    def entries(self) -> list[Entry]:
        """The events of the latest race."""
        return self.races[-1]

    def engine(self, token: Callable[[], str | None] = lambda: None) -> Engine:
        engine = Engine(PRESETS, ScriptedBackend(self), token)
        engine.report = self.report  # type: ignore[method-assign]
        return engine

    def begin(self) -> None:
        """What a server does when it starts."""
        self.used.begin_loading("scripted")

    def forget(self) -> None:
        """Have the engine as it was before."""
        engine = self.used
        list(engine.stream(None, lambda loaded: (_ for _ in "1")))  # it has ended what it was doing
        engine._loaded = None
        engine.status = Status("idle", "", NOTHING_LOADED)
        engine._took.clear()
        self.loads.clear()

    def load(self, preset: Preset, progress: Any, instead_of: Any = None) -> ScriptedLoaded:
        self.tokens.append(hub_token())
        for percent in (10, 50, 90):
            progress(percent / 100, f"downloading, {percent}% done")
            self.loading.wait(30)
        if self.load_failure:
            raise in_words(self.load_failure)
        loaded = ScriptedLoaded(preset)
        if preset.draft_model is not None:
            loaded.parts = replace(loaded.parts, make_draft_runner=loaded.target_runner)
        self.loads.append(loaded)
        return self.loads[-1]

    def report(self, preset: Preset) -> Iterator[str]:
        """What models that a visitor names need; one that is called "huge" cannot be held."""
        self.reported.append(preset)
        yield f"{preset.name}: downloads up to 1.0 GB."
        if "huge" in preset.name:
            raise BadInput("huge would take 900.0 GB of memory.")

    def header(self, loaded: ScriptedLoaded, asked: Request) -> dict[str, Any]:
        return {
            "lanes": [{"name": name, **asdict(lane)} for name, lane in asked.lanes.items()],
            "preset": loaded.preset.name,
            "weights": loaded.weights,
            "drafter": asked.drafter,
            "prompt": asked.prompt,
            "readers": len(asked.prompts),
            "others": list(asked.others),
            "raw": asked.raw,
            "isolated": asked.isolated,
            "settings": asdict(asked.settings),
            "environment": loaded.environment(),
        }

    def race(self, loaded: Any, asked: Request) -> Iterator[Entry]:
        settings, isolated, lanes = asked.settings, asked.isolated, dict[str, Iterator[Event]]()
        for (name, run), prompt in zip(asked.lanes.items(), cycle(asked.prompts), strict=False):
            text = list(islice(cycle(loaded.encode(prompt)), settings.max_new_tokens))
            if name in asked.drafted:
                check_drafter(loaded, run.drafter)
                check_rule(run.drafter, replace(settings, k=run.k, tree=run.tree))
                text = self.drafted(text)
            k = 4 if run.k == AUTO else int(run.k)
            lanes[name] = script(text, k if run.drafter != "none" else 0, run.tree)
        clocks = dict.fromkeys(lanes, 0.0)
        written = 0
        entries: list[Entry] = []
        self.races.append(entries)
        self.settings.append(settings)
        self.open_races += 1
        due = self.began_at = time.monotonic()
        if self.says:
            tell(self.says)
        try:
            while lanes:
                lane = min(lanes, key=clocks.__getitem__) if not isolated else next(iter(lanes))
                self.gate.wait(30)
                event = next(lanes[lane], None)
                if event is None:
                    del lanes[lane]
                    continue
                clocks[lane] += event.seconds
                written += len(emitted_tokens(event))
                if self.fail_at is not None and written >= self.fail_at:
                    raise in_words(self.failure)
                due += event.seconds if self.real else self.pace * len(emitted_tokens(event))
                time.sleep(max(0.0, due - time.monotonic()))
                entries.append(Entry(lane, read(loaded.tokenizer, event)))
                yield entries[-1]
        finally:
            self.open_races -= 1
            self.ended_races += 1
            self.ended_at = time.monotonic()

    def drafted(self, text: list[int]) -> list[int]:
        place = self.differ_at
        return text if place is None else [*text[:place], 0, *text[place + 1 :]]


class ScriptedBackend(Backend):
    """Loads and races by these functions, or as the script does."""

    def __init__(self, script: Script, load: Any = None, race: Any = None) -> None:
        super().__init__()
        self._load, self._race, self._header = load or script.load, race or script.race, script.header

    def load(self, preset: Preset, progress: Any, instead_of: Any) -> Any:
        return self._load(preset, progress, instead_of)

    def race(self, loaded: Any, request: Request) -> LoadedRace:
        return ScriptedRace(loaded, request, self._header(loaded, request), self._race)


@dataclass
class ScriptedRace(LoadedRace):
    raced: Callable[[Any, Request], Iterator[Entry]]

    def entries(self) -> Iterator[Entry]:
        return self.raced(self.loaded, self.request)


def in_words(failure: Exception) -> Exception:
    """A failure whose words reach the page."""
    return LoadError(str(failure)) if isinstance(failure, MemoryError) else failure


def script(text: Sequence[int], k: int, tree: bool = False) -> Iterator[Event]:
    """A lane that writes `text`. Its rounds accept 0, 1, ..., k guesses in turn; the guess that fails is `WRONG`.

    Trees are `branching`, and their rounds accept 0, 1 and 2 tokens in turn.
    """
    yield Prefilled(len(text), Token(text[0], TokenKind.TARGET, 0.5, MARGIN), PREFILL_SECONDS)
    at, index = 1, 0
    while at < len(text):
        guesses = min(k, len(text) - at - 1)
        accepted = min(index % (3 if tree else k + 1), guesses)
        drafted, emitted = [], [Token(token, TokenKind.ACCEPTED, 0.9, MARGIN) for token in text[at : at + accepted]]
        if tree and guesses:
            drafted, guesses = branching(text, at, accepted), 2
        for place in range(0 if tree else guesses):
            if place < accepted:
                drafted.append(DraftedToken(text[at + place], DraftOutcome.ACCEPTED, 0.9, 0.45, 0.25))
            else:
                outcome = DraftOutcome.REJECTED if place == accepted else DraftOutcome.UNTESTED
                drafted.append(DraftedToken(0, outcome, 0.125, 0.5, 0.75))
        kind = TokenKind.TARGET if not guesses else TokenKind.BONUS if accepted == guesses else TokenKind.RESAMPLED
        emitted.append(Token(text[at + accepted], kind, 0.625, MARGIN))
        drafting, checking = (DRAFT_SECONDS, DEARER_PASS_SECONDS) if guesses else (0.0, PASS_SECONDS)
        yield Round(index, tuple(drafted), tuple(emitted), drafting, checking, drafting + checking + 0.001)
        at, index = at + accepted + 1, index + 1
    yield Finished(FinishReason.LENGTH)


def branching(text: Sequence[int], at: int, accepted: int) -> list[DraftedToken]:
    """A tree of the next `accepted` tokens, at most two; beside each there is a wrong one with another after it."""
    drafted: list[DraftedToken] = []
    path = -1
    for place in range(min(accepted + 1, 2)):
        wrong = [0] if place < accepted else [0, text[at - 1]]
        for token in wrong:
            drafted.append(DraftedToken(token, DraftOutcome.REJECTED, 0.125, 0.25, parent=path))
            drafted.append(DraftedToken(text[at], DraftOutcome.UNTESTED, 0.5, 0.5, parent=len(drafted) - 1))
        if place < accepted:
            drafted.append(DraftedToken(text[at + place], DraftOutcome.ACCEPTED, 0.9, 0.45, parent=path))
            path = len(drafted) - 1
    return drafted


def read(tokenizer: Words, event: Event) -> Event:
    drafted = event.drafted if isinstance(event, Round) else ()
    emitted = [tokenizer.pieces[token.id] for token in emitted_tokens(event)]
    return with_text(event, emitted, [tokenizer.pieces[token.id] for token in drafted])


def asked_by_form(**values: Any) -> Request:
    """What the form asks for with some values. Raises BadInput if one is wrong."""
    return read_form([{**FORM, **values}[name] for name in FIELDS], 2000)


def stand_in(monkeypatch: pytest.MonkeyPatch, study: type[Study], other: type[Study]) -> None:
    """Measure and show by `other` in the tab of a study."""
    for name in ("__init__", "run", "words", "tables", "rows", "drawn", "sections", "result"):
        monkeypatch.setattr(study, name, getattr(other, name))

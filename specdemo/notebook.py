"""A race from Python, for notebooks: `from specdemo import race`.

    race("List ten fruits.", drafter="ngram", k=4)

In a notebook the texts stream below the cell, and the result shows itself as a recording does on the page.
"""

from __future__ import annotations

import html
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .decoding.events import Finished, emitted_tokens
from .errors import BadInput
from .models.one_loaded import Kept, load_kept
from .models.presets import DEFAULT_PRESET, find_preset
from .racing.outcome import Outcome
from .racing.request import Request, fitted, parameters, read_request
from .racing.trace import PLAIN, Entry, save_trace, write_trace

if TYPE_CHECKING:
    from .models.loaded import Loaded

BETWEEN = 0.2  # seconds between two pictures of the texts; the lanes' clocks stand still meanwhile
HEIGHT = 760  # pixels of the view
COLOURS = {"accepted": "#1a7f37", "resampled": "#b35900", "bonus": "#0969da"}
_kept: Kept = {}  # the preset of the last race


@dataclass(repr=False)
class Race:
    """A race that has ended.

    Attributes:
        request: what was asked for.
        header, entries: of its trace.
        outcome: its figures and verdicts.
    """

    request: Request
    header: dict[str, Any]
    entries: Sequence[Entry]
    outcome: Outcome = field(repr=False)

    @property
    def numbers(self) -> dict[str, Any]:
        """All figures, texts and verdicts, as `python -m specdemo race --json` prints them."""
        return self.outcome.as_dict()

    @property
    def text(self) -> str:
        """The text of the first lane with a drafter."""
        lane = next(iter(self.request.drafted))
        return str(self.outcome.reports[lane]["text"])

    @property
    def speed_up(self) -> float | None:
        """That of the fastest lane while writing; None if nothing was drafted. `numbers` has `speed_up_in_all` too."""
        return self.outcome.speed_up

    @property
    def same_text(self) -> bool | None:
        """Whether all lanes wrote the text of the target alone, token for token; None if they need not."""
        found = self.outcome.comparison
        return found.identical if found else None

    @property
    def sentence(self) -> str:
        """What the race showed, and why."""
        return self.outcome.sentence

    @property
    def trace(self) -> str:
        """The trace as JSON lines: Recordings on the page opens it, and `race --again` runs it again."""
        return "".join(write_trace(self.header, self.entries))

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, packed if its name ends in .gz."""
        save_trace(Path(path), self.header, self.entries)

    def __repr__(self) -> str:
        return f"{self.sentence} {self.outcome.badge['title']}."

    def _repr_html_(self) -> str:
        """The race to play and to step through. The frame is a document of its own, without access to the notebook."""
        from .ui.replay.playable import playable_json
        from .ui.share.saved import saved_page

        page = html.escape(saved_page(playable_json("saved", lambda: self.trace.split("\n"))))
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe title="The race" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def race(
    prompt: str,
    preset: str | Path = DEFAULT_PRESET,
    drafter: str | None = None,
    k: int | str | None = None,
    *,
    lanes: Sequence[str] | None = None,
    guesses: Iterable[str] | None = None,
    dtype: str = "auto",
    **settings: Any,
) -> Race:
    """Race the target alone against the target with a drafter. The preset stays loaded for the next race.

    Args:
        preset: its name, or a model: a hub id, a folder or a GGUF file.
        drafter: by default the preset's own, and so is `k`.
        lanes: instead of `drafter` and `k` up to three lanes, as eagle:4 or ngram:auto.
        guesses: those of the drafter `you`, one a round, "" for none; after the last nothing is drafted. By default you
            type each. One that begins a new word begins with a space.
        dtype: of the weights, see `loaded.load`.
        settings: any of `settings.Settings`, as temperature or max_new_tokens, and raw, isolated, readers.
    Raises:
        TypeError: there is no such setting.
    """
    known = {name: default for name, (_, default) in parameters().items()}
    known |= {"raw": None, "isolated": False, "readers": 1}
    if unknown := sorted({*settings} - {*known}):
        raise TypeError(f"There is no setting {', '.join(unknown)}. There are: {', '.join(sorted(known))}.")
    chosen = find_preset(str(preset))
    asked = {**known, "drafter": drafter, "k": k, **settings}
    request = read_request(prompt=prompt, preset=chosen.name, defaults=chosen.defaults, lanes=lanes, **asked)
    if guesses is not None and not request.asks:
        raise BadInput("Only the drafter you takes guesses: choose it, or leave them out.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, in a notebook without widgets
        loaded = load_kept(_kept, chosen, dtype)
    from .racing import batch, summary

    loaded = _guessed(loaded, guesses) if request.asks else loaded
    request, _ = fitted(request, loaded)
    entries = list(_shown(request, batch.race_request(loaded, request)))
    header = summary.trace_header(loaded, request)
    header["environment"] = summary.measured(loaded)
    return Race(request, header, entries, summary.outcome_of(loaded, request, entries))


def _guessed(loaded: Loaded, guesses: Iterable[str] | None) -> Loaded:
    """The preset with these guesses, or with what somebody types."""
    from .racing.guesses import guessed_in_lines

    given = None if guesses is None else iter(guesses)

    def ask(text: str) -> str | None:
        if given is not None:
            return next(given, None)
        try:
            return input(f"{text}> ")
        except EOFError:
            return None

    return guessed_in_lines(loaded, ask)


def _shown(request: Request, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The entries, shown as they come where this is a notebook."""
    show, texts, due = _display(), dict.fromkeys(request.lanes, ""), 0.0
    with closing(entries) as running:  # type: ignore[type-var]
        for entry in running:
            if show:
                texts[entry.lane] += _coloured(entry)
                if time.monotonic() >= due:
                    show(_texts(texts))
                    due = time.monotonic() + BETWEEN
            yield entry
    if show:
        show(_texts(texts))


def _display() -> Callable[[str], None] | None:
    """What shows HTML below the cell, in place of what it showed before; None outside a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:  # a terminal shows no HTML
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def _coloured(entry: Entry) -> str:
    """The text of an event, with a colour for each origin."""
    if isinstance(entry.event, Finished):
        return html.escape(entry.event.text)
    shown = []
    for token in emitted_tokens(entry.event):
        colour, text = COLOURS.get(token.kind.value), html.escape(token.text)
        shown.append(f'<span style="color: {colour}">{text}</span>' if colour else text)
    return "".join(shown)


def _texts(texts: dict[str, str]) -> str:
    """The texts side by side."""
    cells = "".join(
        f'<div style="flex: 1; min-width: 0"><b>{html.escape("target alone" if name == PLAIN else name)}</b>'
        f'<pre style="white-space: pre-wrap">{text}</pre></div>'
        for name, text in texts.items()
    )
    return f'<div style="display: flex; gap: 24px">{cells}</div>'

"""What an examination found as tables, and as one HTML page for a colleague: it needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape

from .diagnosis import Diagnosis
from .plots import IN_DRAFT, Axis, Plot
from .tables import Table, table

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.15rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
pre { white-space: pre-wrap; }
.scroll { overflow-x: auto; }
"""
_PASSES = (
    ("speed_up", "speed-up", ".2f"),
    ("tokens_per_round", "tokens a round", ".2f"),
    ("acceptance_rate", "accepted of tested", ".0%"),
)
_COUNTS = tuple((name, name, "d") for name in ("tokens", "rounds", "drafts", "drafted"))
TABLES = {  # of the attributes of a `Diagnosis`
    "positions": (
        "By position of the draft",
        (
            *((name, name, "d") for name in ("position", "drafts", "tested", "accepted")),
            ("conditional", "accepted of tested", ".0%"),
            ("unconditional", "accepted of drafts", ".0%"),
        ),
    ),
    "kinds": (
        "By kind of prompt",
        (("kind", "kind", ""), ("texts", "texts", "d"), *_PASSES),
    ),
    "at_once": (
        "Several requests at once",
        (
            ("at_once", "at once", "d"),
            ("texts", "texts", "d"),
            ("tokens_per_second", "tokens/s", ".1f"),
            ("alone_tokens_per_second", "target alone, tokens/s", ".1f"),
            ("speed_up", "speed-up", ".2f"),
        ),
    ),
    "contexts": (
        "Longer prompts",
        (
            ("prompt_tokens", "tokens of the prompt", ",.0f"),
            ("texts", "texts", "d"),
            *_PASSES,
            ("baseline_tokens_per_second", "target alone, tokens/s", ".1f"),
        ),
    ),
    "samples": (
        "Every text",
        (
            ("prompt", "prompt", ""),
            ("context", "after tokens", ",d"),
            *_COUNTS,
            ("tokens_per_second", "tokens/s", ".1f"),
            ("baseline_tokens_per_second", "target alone, tokens/s", ".1f"),
            ("speed_up", "speed-up", ".2f"),
            ("same_text", "same text", "yes"),
        ),
    ),
}

BASELINE = 1, "the target alone"
TIMES = Axis("times the target alone", "times")
at_once = partial(Plot, at="at_once", x=Axis("requests at once"), part="at_once")
SPEED_UP = Plot(
    "Speed-up by kind of prompt",
    "After the prompt. An outlined bar is slower than the target alone. Whiskers: 95% confidence interval.",
    {"speed_up": ""},
    TIMES,
    "kind",
    rule=BASELINE,
    part="kinds",
)
PLOTS = (  # of the attributes of a `Diagnosis`
    Plot(
        "Acceptance at each position",
        "Of the guesses that were tested there, and of all drafts: each guess is tested only if all before it passed.",
        {"conditional": "of those tested", "unconditional": "of all drafts"},
        Axis("share accepted", ".0%", end=1),
        "position",
        IN_DRAFT,
        part="positions",
    ),
    at_once(
        "Tokens per second of requests at once",
        "Of all together, including their prompts and the waiting.",
        {"tokens_per_second": "with speculation", "alone_tokens_per_second": "the target alone"},
        Axis("tokens/s", ".0f"),
    ),
    at_once(
        "Speed-up of requests at once",
        "Above the line speculation pays.",
        {"speed_up": "with speculation"},
        TIMES,
        rule=BASELINE,
    ),
    Plot(
        "Speed-up after longer prompts",
        "The same questions, each after a long text of notes.",
        {"speed_up": "speed-up"},
        TIMES,
        "prompt_tokens",
        Axis("tokens of the prompt"),
        rule=BASELINE,
        part="contexts",
    ),
)


def tables_of(found: Diagnosis) -> list[Table]:
    return [table(title, columns, getattr(found, name)) for name, (title, columns) in TABLES.items()]


def html_page(words: Sequence[str], paste: str, measured: Sequence[str], tables: Iterable[Table]) -> str:
    """The whole page. Everything is escaped, as what a server calls itself.

    Args:
        words: the verdict and what to do, then what else is said.
        measured: what was examined, and how.
    """
    return "".join(_page(words, paste, measured, tables))


def _page(words: Sequence[str], paste: str, measured: Sequence[str], tables: Iterable[Table]) -> Iterator[str]:
    verdict, to_do, *others = words
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Does speculation pay?</title><style>{STYLE}</style></head><body>"
    yield f'<h1>Does speculation pay?</h1><p class="verdict">{escape(verdict)}</p>'
    yield f"<p>{escape(to_do)}</p><pre>{escape(paste)}</pre>"
    for heading, lines in (("What was found", others), ("What was measured", measured)):
        yield f"<h2>{heading}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
    for shown in tables:
        if shown.rows:
            yield f'<h2>{escape(shown.title)}</h2><div class="scroll"><table><tr>'
            yield "".join(f'<th scope="col">{escape(header)}</th>' for header in shown.headers) + "</tr>"
            for row in shown.rows:
                yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            yield "</table></div>"
    yield "</body></html>\n"

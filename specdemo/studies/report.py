"""An examination as one HTML page for a colleague: it needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .diagnosis import Diagnosis
from .statistics import Spread
from .tables import Table, format_value

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.15rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
caption { text-align: left; padding: .3rem 0; color: GrayText; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
svg { width: 8rem; height: .8rem; vertical-align: middle; margin-left: .5rem; }
"""
Columns = Sequence[tuple[str, str, str]]
"""The key in a row, the heading and the format of each column; a format that ends in a bar draws one to 1."""

SAMPLES = "samples"  # the long table
HEADINGS = {
    "speed_up": "speed-up",
    "tokens_per_round": "tokens a round",
    "acceptance_rate": "accepted of tested",
    "at_once": "at once",
    "tokens_per_second": "tokens/s",
    "alone_tokens_per_second": "baseline, tokens/s",
    "baseline_tokens_per_second": "baseline, tokens/s",
    "prompt_tokens": "tokens of the prompt",
    "context": "after tokens",
    "same_text": "same text",
}


def _columns(**forms: str) -> Columns:
    return [(key, HEADINGS.get(key, key), form) for key, form in forms.items()]


_PASSES = {"speed_up": ".2f", "tokens_per_round": ".2f", "acceptance_rate": ".0%|"}
TABLES: dict[str, tuple[str, str, Columns]] = {
    "positions": (
        "By position of the draft",
        "Conditional: of the guesses that were tested there. Unconditional: of all drafts.",
        _columns(position="d", drafts="d", tested="d", accepted="d", conditional=".0%|", unconditional=".0%|"),
    ),
    "kinds": (
        "By kind of prompt",
        "The speed-up counts the text after the first token, on both sides.",
        _columns(kind="", texts="d", **_PASSES),
    ),
    "at_once": (
        "Several requests at once",
        "Tokens per second of all requests together, including their prompts and the waiting.",
        _columns(at_once="d", texts="d", tokens_per_second=".1f", alone_tokens_per_second=".1f", speed_up=".2f"),
    ),
    "contexts": (
        "Longer prompts",
        "The same questions, each after a long text of notes.",
        _columns(prompt_tokens=",.0f", texts="d", **_PASSES, baseline_tokens_per_second=".1f"),
    ),
    SAMPLES: (
        "Every text",
        "",
        _columns(
            **{"prompt": "", "context": ",d", "tokens": "d", "rounds": "d", "drafts": "d", "drafted": "d"},
            **{"tokens_per_second": ".1f", "baseline_tokens_per_second": ".1f", "speed_up": ".2f", "same_text": "yes"},
        ),
    ),
}


def facts(found: Diagnosis) -> list[str]:
    """The figures that are one number each, as sentences."""
    lines, round_ = [], found.round
    lines += [f"Speed-up: {format_value(found.speed_up, '.2f')}."] * (found.speed_up is not None)
    lines.append(f"Tokens a round: {format_value(found.tokens_per_round, '.2f')}.")
    if found.often is not None:
        lines.append(f"Rounds with a draft: {found.often:.0%}.")
    if round_["ms"] is not None:
        parts = [("drafting", "draft_ms"), ("verifying", "verify_ms"), ("the rest", "other_ms")]
        split = ", ".join(f"{name} {round_[key]:.1f} ms" for name, key in parts if round_[key] is not None)
        lines.append(f"A round takes {round_['ms']:.1f} ms{f': {split}' if split else ''}.")
    if round_["cost"] is not None:
        lines.append(
            f"One of the baseline takes {round_['baseline_ms']:.1f} ms, so a round costs "
            f"{format_value(round_['cost'], '.2f')} of them and needs as many tokens to break even."
        )
    if found.break_even["alpha"] is not None:
        lines.append(f"If all positions passed alike, {found.break_even['alpha']:.0%} of the tested guesses would do.")
    return lines


def html_report(found: Diagnosis, answer: str = "", tables: Sequence[Table] = ()) -> str:
    """The whole page. What a server calls itself is escaped; neither an address nor a key stands in it.

    Args:
        answer: stands above the rest instead of the verdict.
        tables: stand before those of the diagnosis.
    """
    return "".join(_page(found, answer, tables))


def _page(found: Diagnosis, answer: str, tables: Sequence[Table]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Does speculation pay?</title><style>{STYLE}</style></head><body>"
    yield f'<h1>Does speculation pay?</h1><p class="verdict">{escape(answer or found.verdict)}</p>'
    yield from _list(found.advice())
    yield "<h2>Figures</h2>"
    yield from _list(facts(found))
    for made in tables:
        cells: Columns = [(str(place), header, "") for place, header in enumerate(made.headers)]
        rows = [{str(place): cell for place, cell in enumerate(row)} for row in made.rows]
        yield from _table(made.title, "", cells, rows)
    for name, (title, words, columns) in TABLES.items():
        yield from _table(title, words, columns, getattr(found, name))
    if found.left_out:
        yield "<h2>Left out</h2>"
        yield from _list(found.left_out)
    yield "<h2>What was measured</h2>"
    yield from _list(_measured(found))
    yield "</body></html>\n"


def _measured(found: Diagnosis) -> Iterator[str]:
    for name, side in (("With speculation", found.engine), ("Baseline", found.baseline)):
        if side is not None:
            yield f"{name}: {', '.join(f'{key} {value}' for key, value in side.items())}."
    settings = found.plan["settings"]
    yield f"Texts of {settings['max_new_tokens']} tokens at temperature {settings['temperature']:g}."
    yield "Both sides took turns. Intervals are of 95%, by a bootstrap over prompts."


def _list(lines: Iterable[str]) -> Iterator[str]:
    yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(title: str, words: str, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield f'<h2>{escape(title)}</h2><div class="scroll"><table><caption>{escape(words)}</caption><tr>'
    yield "".join(f'<th scope="col">{escape(heading)}</th>' for _, heading, _ in columns) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(_cell(row[key], form) for key, _, form in columns) + "</tr>"
    yield "</table></div>"


def _cell(value: Any, form: str) -> str:
    share = value.mean if isinstance(value, Spread) else value
    bar = ""
    if form.endswith("|") and share is not None:
        bar = (
            '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            '<rect width="100" height="10" fill="#8884"/>'
            f'<rect width="{100 * min(1.0, share):.1f}" height="10" fill="#0072b2"/></svg>'
        )
    return f"<td>{escape(format_value(value, form))}{bar}</td>"

"""`python -m specdemo doctor`: does speculation pay on a server or a preset, and if not, why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import BadInput
from .models import ModelsOrEager
from .options import (
    AnyK,
    AsJson,
    Drafter,
    MaxNewTokens,
    check_writable,
    numbers,
    say,
    show_table,
    with_options,
    with_progress,
)

if TYPE_CHECKING:
    from ..studies.writers import Writer


@with_options
def doctor(
    *,
    server: Annotated[str | None, Option(help="A running vLLM, llama.cpp server or SGLang.")] = None,
    baseline: Annotated[str | None, Option(help="The same server without speculation.")] = None,
    models: ModelsOrEager,
    drafter: Drafter = None,
    k: AnyK = None,
    temperature: Annotated[float, Option(help="0 is greedy; up to 2. Texts are compared at 0 only.")] = 0.0,
    max_new_tokens: MaxNewTokens = 96,
    prompts: Annotated[int, Option(min=1, max=3, help="Of each of the eight kinds.")] = 2,
    at_once: Annotated[str, Option(help="Requests at once, separated by commas; empty leaves them out.")] = (
        "1,2,4,8,16"
    ),
    contexts: Annotated[str, Option(help="Lengths of prompts, separated by commas; empty leaves them out.")] = (
        "256,1024,4096"
    ),
    seconds: Annotated[float, Option(help="The most time that it takes.")] = 600.0,
    json_: AsJson = False,
    csv: Annotated[Path | None, Option(help="Also write the tables to this file.")] = None,
    html: Annotated[Path | None, Option(help="Also write a report to this file, one page of HTML.")] = None,
) -> None:
    """Does speculation pay on a server, or on a preset with a drafter, and what to change if it does not?

    Without --server it examines the preset. API keys stand in SPECDEMO_SERVER_KEY and SPECDEMO_BASELINE_KEY.
    """
    check_writable(csv, html)
    if server is None and baseline is not None:
        raise BadInput("--baseline belongs to --server: a preset is its own baseline.")
    counts, lengths = _counts(at_once, "Requests at once"), _counts(contexts, "Lengths of prompts")
    with _servers(server, baseline) if server else _of_preset(models, drafter, k) as sides:
        from ..studies.diagnosis import Diagnosis
        from ..studies.doctor import Doctor, DoctorPlan, settings_of
        from ..studies.report import SAMPLES, TABLES, facts, html_report
        from ..studies.tables import json_text, write_csv

        settings = settings_of(temperature, max_new_tokens, server is not None)
        study = Doctor(*sides, DoctorPlan(prompts, settings, counts, lengths, seconds))
        for _ in with_progress(study.run(), study.steps):
            pass
    found = Diagnosis(study)
    if csv:
        write_csv(csv, found.rows())
    if html:
        html.write_text(html_report(found), encoding="utf-8")
    if json_:
        typer.echo(json_text(found.as_dict()), nl=False)
        return
    for name, (_, _, columns) in TABLES.items():
        if name != SAMPLES and (rows := getattr(found, name)):
            show_table(rows, {key: form.rstrip("|") for key, _, form in columns})
    say([*facts(found), *found.left_out, "", found.verdict, *found.advice()])


def _counts(text: str, what: str) -> list[int]:
    return numbers(text, int, what) if text.strip() else []


@contextmanager
def _servers(server: str, baseline: str | None) -> Iterator[tuple[Writer, Writer | None]]:
    from ..studies.writers import ServerWriter
    from .servers import pair_connected

    with pair_connected(server, baseline) as (mine, theirs):
        yield ServerWriter(mine), ServerWriter(theirs) if theirs else None


@contextmanager
def _of_preset(models: ModelsOrEager, drafter: str | None, k: Any) -> Iterator[tuple[Writer, Writer | None]]:
    with models.loaded() as loaded:
        from ..studies.writers import PresetWriter

        usual = loaded.preset.defaults
        mine = PresetWriter(loaded, drafter or usual.drafter, usual.k if k is None else k)
        yield mine, PresetWriter(loaded, "none", 0)

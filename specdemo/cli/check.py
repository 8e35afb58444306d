"""`python -m specdemo check`: is speculation worth it for a model, or on a server."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm
from typer import Option

from .models import Models
from .options import BASELINE_KEY, SERVER_KEY, AsJson, Drafters, check_writable, read_text, say, show, with_options


@with_options
def check(
    *,
    models: Models,
    drafters: Drafters = "",
    server: Annotated[str | None, Option(help="Instead of models, a running vLLM, llama.cpp server or SGLang.")] = None,
    baseline: Annotated[str | None, Option(help="The same server without speculation.")] = None,
    at_once: Annotated[int, Option(help="The most requests that a server gets at once; 0 leaves them out.")] = 4,
    context: Annotated[int, Option(help="The longest prompt of a server, in tokens; 0 leaves longer ones out.")] = 0,
    seconds: Annotated[int, Option(help="The most time that it takes once the models are loaded.")] = 120,
    text: Annotated[
        Path | None, Option(help="Compare quantized weights on the text of this file, not on 24 short ones.")
    ] = None,
    json_: AsJson = False,
    csv: Annotated[Path | None, Option(help="Also write the table of the drafters to this file.")] = None,
    html: Annotated[Path | None, Option(help="Also write a report to this file, one page of HTML.")] = None,
) -> None:
    """Is speculation worth it for a model, or on a server: yes, no or unclear, and what to change.

    What models take is told first. API keys stand in SPECDEMO_SERVER_KEY and SPECDEMO_BASELINE_KEY.
    """
    from ..studies.check import Check
    from ..studies.tables import json_text, write_csv

    check_writable(csv, html)
    keys = {"server_key": os.environ.get(SERVER_KEY, ""), "baseline_key": os.environ.get(BASELINE_KEY, "")}
    asked: dict[str, Any] = {field.name: field.value for field in Check.fields}
    asked["text"] = "" if text is None else read_text(text)
    asked |= {"server": server or "", "baseline": baseline or "", "at_once": at_once, "context": context}
    asked |= {"seconds": seconds, **keys}
    for field in Check.fields:
        if field.kind != "drafters":
            field.check(asked[field.name])
    if not server and models.target is None and models.head is None:
        models.look(models.chosen)  # what is named by itself is described anyhow
    with models.loaded() if Check.needs_models(asked) else nullcontext() as loaded:
        if loaded is not None:
            from ..racing.race import drafters_of

            asked["drafters"] = drafters_of(loaded, drafters)
        study = Check(loaded, asked)
        with closing(study.run()) as steps, tqdm(total=seconds, unit="s") as bar:  # type: ignore[type-var]
            for words in steps:
                bar.set_postfix_str(words, refresh=False)
                bar.update(study.done - bar.n)
    if csv:
        write_csv(csv, study.rows())
    if html:
        html.write_text(study.page(), encoding="utf-8")
    if json_:
        typer.echo(json_text(study.result()), nl=False)
        return
    for table in study.tables():
        if table.rows:
            show(table)
    say(study.words())

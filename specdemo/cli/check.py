"""`python -m specdemo check`: is speculation worth it for a model, or on a server."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm
from typer import Option

from ..studies.check import Check
from ..studies.tables import json_text, write_csv
from .models import Models
from .options import BASELINE_KEY, SERVER_KEY, AsJson, check_writable, options_of, read_text, say, show, with_options

TYPED = [field for field in Check.fields if field.kind != "key"]  # a key is not for a command line
Options = options_of(TYPED)


@with_options
def check(
    *,
    models: Models,
    options: Options,  # type: ignore[valid-type]
    text: Annotated[
        Path | None, Option(help="Compare quantized weights on the text of this file, not on 24 short ones.")
    ] = None,
    json_: AsJson = False,
    csv: Annotated[Path | None, Option(help="Also write the table of the drafters to this file.")] = None,
    html: Annotated[Path | None, Option(help="Also write a report to this file, one page of HTML.")] = None,
) -> None:
    """Is speculation worth it for a model, or on a server: yes, no or unclear, and what to change.

    What models take is printed first. API keys stand in SPECDEMO_SERVER_KEY and SPECDEMO_BASELINE_KEY.
    """
    check_writable(csv, html)
    given = asdict(options)
    for field in TYPED:
        if field.kind != "drafters":
            field.check(given[field.name])
    given["text"] = "" if text is None else read_text(text)
    given |= {"server_key": os.environ.get(SERVER_KEY, ""), "baseline_key": os.environ.get(BASELINE_KEY, "")}
    if not given["server"] and models.target is None and models.head is None:
        models.look(models.chosen)  # what is named by itself is described anyhow
    with models.loaded() if Check.needs_models(given) else nullcontext() as loaded:
        if loaded is not None:
            from ..racing.race import drafters_of

            given["drafters"] = drafters_of(loaded, given["drafters"])
        study = Check(loaded, given)
        with closing(study.run()) as steps, tqdm(total=given["seconds"], unit="s") as bar:  # type: ignore[type-var]
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
    verdict, to_do, *others = study.words()
    say([verdict, to_do, "", *study.paste().splitlines(), ""])
    for table in study.tables():
        if table.rows:
            show(table)
    say(others)

"""`python -m specdemo lab ...`: why it is fast or slow, which K, and whether it is really lossless."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import BadInput
from ..racing.provenance import provenance
from ..racing.trace import read_trace, trace_lines
from ..studies.lab import STUDIES
from ..studies.study import Study
from .models import Models, ModelsOrEager
from .options import (
    SERVER_KEY,
    AsJson,
    Files,
    options_of,
    read_options,
    say,
    show,
    with_options,
    with_progress,
)

if TYPE_CHECKING:
    from ..models.loaded import Loaded

app = typer.Typer(help="Why it is fast or slow, which K, and whether it is really lossless.", no_args_is_help=True)


def add(study: type[Study]) -> None:
    """Add the command of a study: it asks for its fields, runs it, and prints and writes what was found."""

    def command(models: Models, options: Any, files: Files) -> None:
        given = read_options(typed, options)
        given |= {field.name: os.environ.get(SERVER_KEY, "") for field in study.options() if field not in typed}
        study.check_options(given)
        facts: dict[str, Any] = {}
        with models.loaded() if study.needs_models(given) else nullcontext() as loaded:
            if loaded is not None:
                given |= _of_preset(loaded, study, given)
            running = study(loaded, given)  # type: ignore[arg-type]  # if it needs no models
            if running.left_out:
                typer.echo(running.left_out, err=True)
            for _ in with_progress(running.run(), running.steps):
                pass
            if loaded is not None:
                facts = provenance(loaded)
        for table in running.tables():
            show(table)
        say(running.words())
        files.write({**facts, **running.result()}, running.rows())
        if running.failed:
            raise typer.Exit(1)

    typed = [field for field in study.options() if field.kind != "key"]  # a key is not for a command line
    command.__annotations__ = {
        "models": ModelsOrEager if study.by_eager else Models,
        "options": options_of(typed),
        "files": Files,
    }
    app.command(study.name, help=study.summary)(with_options(command))


def _of_preset(loaded: Loaded, study: type[Study], given: Mapping[str, Any]) -> dict[str, Any]:
    """The drafters, which depend on what the preset has."""
    from ..racing.race import drafters_of

    own = loaded.preset.defaults.drafter
    drafters = {field.name: field.kind for field in study.options() if field.kind in ("drafter", "drafters")}
    return {
        name: given[name] or own if kind == "drafter" else drafters_of(loaded, given[name])
        for name, kind in drafters.items()
    }


for declared in STUDIES.values():
    if declared.summary:
        add(declared)


@app.command()
@with_options
def theory(
    draft_ms: Annotated[float | None, Option(help="Milliseconds to draft one token.")] = None,
    target_ms: Annotated[float | None, Option(help="Milliseconds of a target pass over one token.")] = None,
    profile: Annotated[Path | None, Option(help="Instead of both: a file that `lab profile --json` wrote.")] = None,
    drafter: Annotated[str | None, Option(help="With --profile: the drafter whose costs are taken.")] = None,
    at_once: Annotated[
        bool, Option("--at-once", help="The drafter drafts all tokens at once: --draft-ms is the time of a draft.")
    ] = False,
    alpha: Annotated[float | None, Option(help="The acceptance rate: the chance that a drafted token passes.")] = None,
    json_: AsJson = False,
    csv: Annotated[Path | None, Option(help="Also write the table to this file.")] = None,
) -> None:
    """What speculation could gain with these costs: the ideal, the break-even acceptance, the best K."""
    from ..studies import theory as lab

    files = Files(csv=csv)
    if profile is not None and drafter is not None:
        costs = costs_in(profile, drafter)
    elif draft_ms is not None and target_ms is not None:
        if not target_ms > 0:
            raise BadInput(f"The time of a target pass must be above 0, not {target_ms!r}.")
        costs = lab.Costs(draft_ms / target_ms, parallel=at_once)
    else:
        raise BadInput("Give either --draft-ms and --target-ms, or --profile and --drafter.")
    rows, best = lab.table(costs, alpha), None if alpha is None else lab.best_k(alpha, costs)
    if json_:
        typer.echo(json.dumps({**asdict(costs), "alpha": alpha, "rows": rows, "best_k": best}))
    else:
        show(lab.for_each_k(costs, alpha))
        say(lab.in_words(costs, alpha))
    files.write(None, rows)


@app.command()
@with_options
def explain(trace: Annotated[Path, Option(help="A trace, as `record` writes it.")], files: Files) -> None:
    """Set a recorded race beside the theory, and split the gap between the two into its parts."""
    from ..studies.explain import explain_race

    header, entries = read_trace(trace_lines(trace))
    found = explain_race(entries, str(header.get("drafter")))
    say(found.in_words())
    files.write(asdict(found), [asdict(part) for part in found.parts])


def costs_in(profile: Path, drafter: str) -> Any:
    """The costs of a drafter in a file that `lab profile --json` wrote."""
    from ..studies.profile import costs

    try:
        found = costs(json.loads(profile.read_text(encoding="utf-8")), drafter)
    except OSError as error:
        raise BadInput(f"The profile cannot be read: {error}.") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput(f"{profile.name} is not what `lab profile --json` writes: {error}.") from error
    if found is None:
        raise BadInput(f"{profile.name} holds no costs of a drafter called {drafter!r}.")
    return found

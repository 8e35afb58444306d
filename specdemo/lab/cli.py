"""`python -m specdemo bench ...`: measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..drafters import DRAFTERS
from ..presets import PRESETS, find_preset
from ..race import check_drafter
from ..types import BadInput

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

HELD_OUT = PRESETS / "prompts" / "heldout.jsonl"


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def drafters(
    preset: Annotated[str, typer.Option("--preset", help="Which models.")] = "smollm2-135m",
    prompts: Annotated[Path, typer.Option("--prompts", help="JSON lines of id, category and prompt.")] = HELD_OUT,
    names: Annotated[str, typer.Option("--drafters", help="Separated by commas; all that can run by default.")] = "",
    ks: Annotated[str, typer.Option("-k", help="Values of K, separated by commas.")] = "4",
    temperatures: Annotated[str, typer.Option("--temperature", help="Separated by commas.")] = "0",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Of each run.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="How often everything is run.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option("--json", help="Also write every run to this file.")] = None,
) -> None:
    """Every drafter of a preset against the target alone, by category of prompt."""
    from tqdm import tqdm

    from ..models import load
    from .bench import Case, bench, read_prompts, table

    chosen, asked = find_preset(preset), read_prompts(prompts)
    try:
        k_values, t_values = [int(k) for k in ks.split(",")], [float(t) for t in temperatures.split(",")]
    except ValueError as error:
        raise BadInput("K and temperature are numbers, separated by commas.") from error
    if repeats < 1:
        raise BadInput("Repeats must be at least 1.")
    loaded = load(chosen, dtype, device)
    able = [name for name, kind in DRAFTERS.items() if name != "none" and not kind.missing(loaded)]
    chosen_names = [name.strip() for name in names.split(",")] if names else able
    for name in chosen_names:
        check_drafter(loaded, name)
    cases = [Case(name, k) for name in chosen_names for k in k_values]
    with tqdm(total=(len(asked) * repeats + 1) * len(cases) * len(t_values)) as bar:
        outcome = bench(loaded, asked, cases, t_values, max_new_tokens, repeats, bar.update)
    typer.echo(table(outcome["summary"]))
    if out:
        out.write_text(json.dumps(outcome), encoding="utf-8")

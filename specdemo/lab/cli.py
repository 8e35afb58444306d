"""`python -m specdemo bench ...`: measurements."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import (
    Device,
    DrafterName,
    Drafters,
    DType,
    JsonFile,
    MaxNewTokens,
    PresetName,
    PromptFile,
    Repeats,
    Temperatures,
    check_writable,
)
from ..presets import DEFAULT_PRESET, PRESETS, find_preset
from ..race import SPECULATIVE, drafters_of
from ..results import joined, read_results, results_path
from ..types import AUTO, BadInput, Settings, read_k

if TYPE_CHECKING:
    from ..models import Loaded
    from .bench import Case

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

CHECKS = "Check first. What breaks the GPU breaks it for its whole process: then measure in another one, without."
HELD_OUT = PRESETS / "prompts" / "heldout.jsonl"
PAGE_PROMPT = "Explain what a list is in Python, with three short examples."
# K of transformers: some to find the best among where no number is given, and what its documentation uses.
TUNED_K, LOOKUP_K = (3, 5, 8), 10
DRAFTER_SHAPES = {
    **{"drafter": "", "temperature": "g", "k": "", "speed_up": ".2f", "speed_up_from": ".2f", "speed_up_to": ".2f"},
    **{
        "tokens_per_round": ".2f",
        "acceptance_rate": ".0%",
        "draft_efficiency": ".0%",
        "draft_cost": ".0%",
        "by place": "",
    },
}

Against = Annotated[
    str,
    typer.Option(
        "--against",
        help="What transformers does with the same weights: hf, hf-assisted (as it comes, and tuned), "
        "hf-assisted-tuned, hf-prompt-lookup; separated by commas.",
    ),
]
Each = Annotated[int, typer.Option("--each", min=0, help="At most so many prompts of a category; 0 takes all.")]
InTurn = Annotated[
    bool,
    typer.Option(
        "--in-turn",
        help="Ours write a text together, a round each in turn, so that a busy machine slows all of them alike.",
    ),
]
INTERRUPTED = 130  # what shells answer for a program that was interrupted
Ks = Annotated[str, typer.Option("-k", "--k", help="Values of K from 1 to 16, or auto, separated by commas.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    against: Against = "",
    preset: PresetName = DEFAULT_PRESET,
    prompts: PromptFile = HELD_OUT,
    each: Each = 0,
    names: Drafters = "",
    ks: Ks = AUTO,
    temperatures: Temperatures = "0",
    max_new_tokens: MaxNewTokens = 128,
    repeats: Repeats = 1,
    in_turn: InTurn = False,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
) -> None:
    """Measure speed on this machine: the target alone, with drafters, and against transformers, by kind of prompt."""
    if context.invoked_subcommand is None:
        from .bench import table

        outcome = run(
            against,
            preset,
            prompts,
            each,
            names,
            ks,
            temperatures,
            max_new_tokens,
            repeats,
            in_turn,
            dtype,
            device,
            json_,
        )
        typer.echo(table(outcome["summary"]))
        keep(outcome, json_)


@app.command()
def drafters(
    preset: PresetName = DEFAULT_PRESET,
    prompts: PromptFile = HELD_OUT,
    each: Each = 0,
    names: Drafters = "",
    ks: Ks = "2,4,6,8",
    temperatures: Temperatures = "0,0.7,1",
    max_new_tokens: MaxNewTokens = 128,
    repeats: Repeats = 1,
    in_turn: InTurn = False,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
    save: Annotated[bool, typer.Option("--save", help="Keep these rows for the preset's drafter menu.")] = False,
) -> None:
    """Every drafter of a preset in one table: what passes, what a draft costs, and what comes of it."""
    from .bench import drafter_rows
    from .tables import text_table, write_json

    outcome = run(
        "", preset, prompts, each, names, ks, temperatures, max_new_tokens, repeats, in_turn, dtype, device, json_
    )
    rows = drafter_rows(outcome["summary"])
    typer.echo(
        text_table([{**row, "by place": percentages(row["acceptance_by_place"])} for row in rows], DRAFTER_SHAPES)
    )
    keep(outcome, json_)
    if save:
        told = {name: outcome[name] for name in ("environment", "weights", "prompts_sha256", "in_turn")}
        asked = {
            "prompts": len({run["prompt_id"] for run in outcome["runs"]}),
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
        }
        path = results_path(PRESETS / f"{preset}.toml")
        former = read_results(path)
        now = joined(former, {**told, **asked, "rows": rows})
        write_json(path, now)
        kept = {row["drafter"] for row in now["rows"]}
        if lost := sorted({row["drafter"] for row in former["rows"]} - kept if former else ()):
            typer.echo(f"Measured otherwise or elsewhere, so no longer kept: {', '.join(lost)}.", err=True)


def keep(outcome: dict[str, Any], out: Path | None) -> None:
    """Write everything to `out`; a bench that was interrupted ends here, when what it has is kept."""
    from .tables import write_json

    if out:
        write_json(out, outcome)
    if outcome["interrupted"]:
        typer.echo("Interrupted: these are the texts that were finished.", err=True)
        raise typer.Exit(INTERRUPTED)


def percentages(shares: list[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def run(
    against: str,
    preset: str,
    prompts: Path,
    each: int,
    names: str,
    ks: str,
    temperatures: str,
    max_new_tokens: int,
    repeats: int,
    in_turn: bool,
    dtype: str,
    device: str,
    out: Path | None,
) -> dict[str, Any]:
    """Measure; everything can then be written to `out`."""
    from tqdm import tqdm

    from ..models import load
    from .bench import ALONE, bench, provenance, read_prompts, some

    check_writable(out)
    chosen, asked = find_preset(preset), some(read_prompts(prompts), each)
    try:
        k_values = [read_k(k.strip()) for k in ks.split(",")]
        t_values = list(dict.fromkeys(float(t) for t in temperatures.split(",")))
    except ValueError as error:
        raise BadInput("K and temperature are numbers, separated by commas; K may be auto.") from error
    for k, temperature in [(k, t) for k in k_values for t in t_values]:
        Settings(k=k, temperature=temperature, max_new_tokens=max_new_tokens)
    if repeats < 1:
        raise BadInput("Repeats must be at least 1.")
    methods = theirs(against)
    loaded = load(chosen, dtype, device)
    cases = [*cases_of_hf(loaded, methods, k_values), ALONE, *cases_of_ours(loaded, names, k_values)]
    texts = json.dumps([prompt.prompt for prompt in asked])
    with tqdm(total=(len(asked) * repeats + 1) * len(cases) * len(t_values)) as bar:
        outcome = {
            **provenance(loaded),
            "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(),
            **bench(loaded, asked, cases, t_values, max_new_tokens, repeats, in_turn, bar.update),
        }
    return outcome


@app.command()
def page(
    preset: PresetName = DEFAULT_PRESET,
    prompt: Annotated[str, typer.Option("--prompt", help="What both lanes write about.")] = PAGE_PROMPT,
    drafter: DrafterName = None,
    k: Annotated[Any, typer.Option("-k", "--k", parser=read_k, metavar="K", help="The preset's by default.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    repeats: Repeats = 5,
    out: JsonFile = None,
) -> None:
    """What it costs the engine to show a race in a browser on the same machine."""
    from tqdm import tqdm

    from .bench_page import SHAPES, WAYS, Asked, bench_page
    from .tables import text_table, write_json

    check_writable(out)
    usual = find_preset(preset).defaults
    asked = Asked(prompt, preset, drafter or usual.drafter, usual.k if k is None else k, max_new_tokens)
    Settings(k=asked.k, max_new_tokens=max_new_tokens)
    if repeats < 1:
        raise BadInput("Repeats must be at least 1.")
    with tqdm(total=repeats * len(WAYS)) as bar:
        outcome = bench_page(asked, repeats, bar.update)
    typer.echo(text_table(outcome["rows"], SHAPES))
    if out:
        write_json(out, outcome)


def theirs(against: str) -> list[str]:
    """The methods that `--against` names."""
    from .bench_hf import METHODS

    named = [method.strip() for method in against.split(",") if method.strip()]
    for method in named:
        if method not in METHODS:
            raise BadInput(f"There is no method called {method!r} to compare with. Choose from: {', '.join(METHODS)}.")
    return named


def cases_of_hf(loaded: Loaded, methods: list[str], ks: list[int | str]) -> list[Case]:
    """What to run by transformers; what the preset has nothing for is told and left out."""
    from .bench import Case
    from .bench_hf import ASSISTED, PROMPT_LOOKUP, TUNED, missing

    numbers = [k for k in ks if k != AUTO and k != 0]
    tuned = [Case(TUNED, "draft-model", k) for k in numbers or TUNED_K]
    cases: list[Case] = []
    for method in methods:
        if reason := missing(method, loaded):
            typer.echo(reason, err=True)
        elif method == ASSISTED:
            cases += [Case(method, "draft-model"), *tuned]
        elif method == TUNED:
            cases += tuned
        elif method == PROMPT_LOOKUP:
            cases += [Case(method, "prompt-lookup", k) for k in [*numbers, LOOKUP_K]]
        else:
            cases.append(Case(method))
    return list(dict.fromkeys(cases))


def cases_of_ours(loaded: Loaded, names: str, ks: list[int | str]) -> list[Case]:
    """Each drafter with each K; K = 0 is the target alone, which is run anyway."""
    from .bench import Case

    cases = [Case(SPECULATIVE, name, k) for name in drafters_of(loaded, names) for k in ks if k != 0]
    return list(dict.fromkeys(cases))


@app.command()
def roofline(
    preset: PresetName = DEFAULT_PRESET,
    k: Annotated[int, typer.Option("-k", "--k", help="Passes over 1 and K + 1 tokens are timed.")] = 5,
    shapes: Annotated[str | None, typer.Option("--shapes", help="Of random weights, separated by commas.")] = None,
    context_: Annotated[int, typer.Option("--context", help="Tokens in the cache.")] = 128,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
) -> None:
    """How near a pass comes to the speed of the memory, for a preset and for random weights of well-known shapes.

    The preset's passes take turns with those of transformers' own forward and, on a CPU, with those of a layout that
    does not care for the last bit.
    """
    from ..models import load
    from . import roofline as lab
    from .bench import provenance
    from .tables import write_json

    check_writable(json_)
    Settings(k=k)
    if context_ < 1:
        raise BadInput("The context must be at least 1 token.")
    asked = list(lab.SHAPES) if shapes is None else [shape for shape in shapes.split(",") if shape]
    for shape in asked:
        if shape not in lab.SHAPES:
            raise BadInput(f"There is no shape called {shape!r}. Choose from: {', '.join(lab.SHAPES)}.")
    loaded = load(find_preset(preset), dtype, device)
    if context_ + k + 1 > loaded.context:
        raise BadInput(f"{preset} holds {loaded.context} tokens: {context_} and a pass over {k + 1} are too many.")
    stream, lengths = lab.Stream(loaded.device), [1, k + 1]
    makers, stored = lab.engines(loaded), loaded.weights_dtype
    rows = list(lab.passes(preset, loaded.model, makers, lengths, context_, stream, stored=stored))
    for shape in asked:
        typer.echo(f"{shape}, random weights ...", err=True)
        rows += lab.random_passes(shape, stored, loaded.device, lengths, context_, stream)
    typer.echo(lab.table(stream.bandwidth, rows))
    if json_:
        found = {"bandwidth": stream.bandwidth, "passes": [lab.as_dict(row) for row in rows]}
        write_json(json_, {**provenance(loaded), **found})


@app.command()
def gpu(
    dtype: DType = "auto",
    device: Device = "auto",
    tiny: Annotated[bool, typer.Option("--tiny", help="Everything small, on a CPU too: to see that it runs.")] = False,
    checking: Annotated[bool, typer.Option("--checks/--no-checks", help=CHECKS)] = True,
    json_: JsonFile = None,
) -> None:
    """Is the captured engine right on this GPU, and how near does it come to what the GPU can do? Random weights."""
    from ..hardware import choose_device, choose_dtype
    from . import bench_gpu, gpu_checks
    from .tables import write_json

    check_writable(json_)
    chosen = choose_device(device)
    if chosen.type == "cpu" and not tiny:
        raise BadInput("This measures a GPU, and there is none here. With --tiny it runs on the CPU, to no purpose.")
    sizes = bench_gpu.TINY if tiny else bench_gpu.FULL
    checks: list[gpu_checks.Check] = []
    rows: list[bench_gpu.Row] = []

    def keep() -> None:
        """So that what is known is kept, whatever comes after."""
        if json_:
            facts = {"environment": bench_gpu.environment(chosen), "sizes": sizes.name}
            write_json(json_, {**facts, "checks": checks, "measurements": rows})

    for check in gpu_checks.checks(chosen) if checking else ():
        typer.echo(f"{'ok' if check.passed else 'WRONG':<6}{check.name}: {check.found}")
        checks.append(check)
        keep()
    for row in bench_gpu.measurements(chosen, choose_dtype(dtype, chosen), sizes):
        typer.echo(bench_gpu.line(row), err=True)
        rows.append(row)
        keep()
    typer.echo("\n" + bench_gpu.table(rows, sizes))
    wrong = [check.name for check in checks if not check.passed]
    if wrong := [*wrong, *(row["what"] for row in rows if row["part"] == bench_gpu.FAILED)]:
        typer.echo(f"WRONG: {', '.join(wrong)}.")
        raise typer.Exit(1)

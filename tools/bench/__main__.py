"""`python -m tools.bench ...`: the measurements that made the tables of the docs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm
from typer import Argument, Option

from specdemo.cli.main import main
from specdemo.cli.models import Models
from specdemo.cli.options import (
    Device,
    DType,
    JsonFile,
    check_writable,
    numbers,
    options_of,
    read_options,
    save_json,
    with_options,
)
from specdemo.errors import BadInput
from specdemo.models.presets import PRESETS
from specdemo.models.results import read_results, results_path
from specdemo.settings import AUTO, MATCH, MAX_K, Field, Settings, one_of, read_k
from specdemo.studies.prompts import some
from specdemo.studies.study import DRAFTERS, KS, NEW_TOKENS, PROMPT_FILE, PROMPT_FILES, TEMPERATURES
from specdemo.system.imports import import_quickly

if TYPE_CHECKING:
    import torch

    from .gpu import Gpu, Sizes
    from .tables import Columns

app = typer.Typer(
    help="Measure speed on this machine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

HELD_OUT = PROMPT_FILES / "heldout.jsonl"
DRAFTER_COLUMNS: Columns = {
    **{"drafter": "", "temperature": "g", "k": "", "speed_up": ".2f", "speed_up_from": ".2f", "speed_up_to": ".2f"},
    **{"tokens_per_round": ".2f", "acceptance_rate": ".0%", "draft_efficiency": ".0%", "draft_cost": ".0%"},
    "by place": (lambda row: " ".join(f"{share:.0%}" for share in row["acceptance_by_place"]), ""),
}
REPORT_FILE = Path("gpu-report.json")
INTERRUPTED = 130  # what shells answer for a program that was interrupted

Against = Annotated[
    str,
    Option(
        help="Other programs to compare with on the same weights, separated by commas: hf (transformers), hf-assisted "
        "(with its own settings, and with K), hf-prompt-lookup, llama.cpp (the package xllamacpp), or openvino."
    ),
]
Servers = Annotated[
    list[str],
    Option(
        "--server",
        metavar="NAME=COMMAND",
        help="Also a server that speaks like llama.cpp's and that this command starts on {target}, the GGUF file, and "
        "perhaps {draft_model}; can be given more than once. That with the name llama.cpp is compared with.",
    ),
]


MANY_TREES = "Also trees of so many tokens, or auto, by drafters that can, separated by commas."
TOGETHER = (
    "The methods of specdemo write a text together, a round each in turn, so that a busy machine "
    "slows all of them alike."
)
EARLIER = "The drafter suffix also copies from the answers to the prompts before."
REPEATS = Field("repeats", "", "whole", 1, 1, help="How often everything is run.")
FIELDS = (
    replace(PROMPT_FILE, value=HELD_OUT),
    Field("each", "", "whole", 0, help="The most prompts of a category; 0 takes all."),
    DRAFTERS,
    Field("trees", "", "text", "", help=MANY_TREES),
    replace(NEW_TOKENS, value=128),
    REPEATS,
    Field("rules", "", "text", MATCH, help="match, rejection, or both, separated by a comma."),
    Field("in_turn", "", "switch", False, help=TOGETHER),
    Field("remember", "", "switch", False, help=EARLIER),
)
SIZES = KS, TEMPERATURES
Texts = options_of(FIELDS)
OfAll = options_of([replace(KS, value=AUTO), TEMPERATURES])
OfDrafters = options_of([replace(KS, value="2,4,6,8"), replace(TEMPERATURES, value="0,0.7,1")])


@app.callback(invoke_without_command=True)
@with_options
def bench(
    context: typer.Context,
    models: Models,
    texts: Texts,  # type: ignore[valid-type]
    sizes: OfAll,  # type: ignore[valid-type]
    against: Against = "",
    server: Servers = [],  # noqa: B006
    json_: JsonFile = None,
) -> None:
    """Measure speed on this machine: the target alone, with drafters, and against others, by kind of prompt."""
    if context.invoked_subcommand is None:
        outcome = measure(models, asked_of(texts, sizes), against, server, json_)
        from .results import table, trees_markdown
        from .rows import tree_rows

        typer.echo(table(outcome["summary"]))
        if rows := tree_rows(outcome["runs"]):
            typer.echo("\n".join(["", *trees_markdown(rows)]))
        keep(outcome, json_)


@app.command()
@with_options
def drafters(
    models: Models,
    texts: Texts,  # type: ignore[valid-type]
    sizes: OfDrafters,  # type: ignore[valid-type]
    json_: JsonFile = None,
    save: Annotated[bool, Option("--save", help="Keep these rows for the preset's drafter menu.")] = False,
) -> None:
    """Every drafter of a preset in one table: what passes, what a draft costs, and the speed-up."""
    asked = asked_of(texts, sizes)
    outcome = measure(models, asked, "", [], json_)
    from .results import joined
    from .rows import drafter_rows
    from .tables import text_table

    rows = drafter_rows(outcome["summary"])
    typer.echo(text_table(rows, DRAFTER_COLUMNS) + "\n")
    keep(outcome, json_)
    if save:
        facts = {name: outcome[name] for name in ("environment", "weights", "prompts_sha256", "in_turn")}
        prompts = len({run["prompt_id"] for run in outcome["runs"]})
        shared = {"prompts": prompts, "max_new_tokens": asked["max_new_tokens"], "repeats": asked["repeats"]}
        path = results_path(PRESETS / f"{models.chosen.name}.toml")
        former = read_results(path)
        now = joined(former, {**facts, **shared, "rows": rows})
        save_json(path, now)
        kept = {row["drafter"] for row in now["rows"]}
        if lost := sorted({row["drafter"] for row in former["rows"]} - kept if former else ()):
            typer.echo(f"Measured otherwise or elsewhere, so no longer kept: {', '.join(lost)}.", err=True)


def keep(outcome: dict[str, Any], out: Path | None) -> None:
    """Write everything to `out`; a bench that was interrupted ends here, when what it has is kept."""
    from .results import record

    if out:
        save_json(out, record(outcome))
    if outcome["interrupted"]:
        typer.echo("Interrupted: these are the texts that were finished.", err=True)
        raise typer.Exit(INTERRUPTED)


def asked_of(texts: Any, sizes: Any) -> dict[str, Any]:
    return {**read_options(FIELDS, texts), **read_options(SIZES, sizes)}


def measure(
    models: Models, asked: Mapping[str, Any], against: str, server: Sequence[str], out: Path | None
) -> dict[str, Any]:
    """Run the bench; everything that `keep` can write."""
    check_writable(out)
    _ = models.chosen  # or it is refused now
    k_values, t_values, new_tokens = asked["ks"], asked["temperatures"], asked["max_new_tokens"]
    rules = list(dict.fromkeys(asked["rules"].split(",")))
    trees = numbers(asked["trees"], read_k, "The tokens of trees") if asked["trees"] else []
    sizes: list[tuple[int | str, bool]] = [*((k, False) for k in k_values), *((nodes, True) for nodes in trees)]
    for (k, tree), temperature, rule in product(sizes, t_values, rules):
        Settings(k=k, temperature=temperature, max_new_tokens=new_tokens, rule=rule, tree=tree)
    prompts = some(asked["prompts"], asked["each"])
    throughput = import_quickly("tools.bench.throughput")
    from . import llamacpp
    from .cases import ALONE, OPENVINO, cases_of_ours, cases_of_theirs, named_commands, theirs
    from .rows import made_by

    others = theirs(against)
    commands = named_commands(server, others)
    if OPENVINO in others and any(t_values):
        raise BadInput("OpenVINO is compared at temperature 0 only.")
    with models.loaded() as loaded:
        ours = cases_of_ours(loaded, asked["drafters"], k_values, rules, trees)
        cases = [*cases_of_theirs(loaded, others, k_values), *commands, ALONE, *ours]
        total = (len(prompts) * asked["repeats"] + 1) * len(cases) * len(t_values)
        longest = max(len(throughput.read(loaded, prompt, new_tokens)) for prompt in prompts)
        context = longest + new_tokens + MAX_K
        with (
            llamacpp.servers(loaded, cases, context, lambda _, line: typer.echo(line, err=True), commands) as servers,
            tqdm(total=total) as bar,
        ):
            return {
                **made_by(loaded),
                **({"others": {case.method: other.facts for case, other in servers.items()}} if servers else {}),
                "prompts_sha256": hashlib.sha256(json.dumps([p.prompt for p in prompts]).encode()).hexdigest(),
                **throughput.bench(
                    loaded,
                    prompts,
                    cases,
                    t_values,
                    new_tokens,
                    asked["repeats"],
                    asked["in_turn"],
                    bar.update,
                    servers,
                    asked["remember"],
                ),
            }


@app.command("table")
def table_(
    path: Annotated[Path, Argument(help="A file that `bench --json` wrote.")],
    drafters: Annotated[bool, Option("--drafters", help="One row for each drafter: its fastest K, and auto.")] = False,
    trees: Annotated[bool, Option("--tree", help="Trees beside the chains of the same drafter.")] = False,
) -> None:
    """The rows of a bench as a table in Markdown."""
    from . import results

    found = results.read_record(path)
    lines = results.drafters_markdown(found["runs"]) if drafters else results.markdown(found["rows"])
    typer.echo("\n".join(results.trees_markdown(found["trees"]) if trees else lines))


@app.command("docs")
def docs_() -> None:
    """Write the pages of docs/results from the files of presets/results."""
    from . import docs

    docs.write()


@app.command()
@with_options
def roofline(
    models: Models,
    k: Annotated[int, Option("-k", "--k", help="Passes over 1 and K + 1 tokens are timed.")] = 5,
    shapes: Annotated[
        str | None,
        Option(
            help="Shapes of models to time with random weights, separated by commas; by default all, unless the "
            "preset's weights are quantized."
        ),
    ] = None,
    context_: Annotated[int, Option("--context", min=1, help="Tokens in the cache.")] = 128,
    json_: JsonFile = None,
) -> None:
    """How near a pass comes to the speed of the memory, for a preset and for random weights of well-known shapes.

    The preset's passes take turns with those of transformers' own forward and, on a CPU, with those of a layout that
    does not care for the last bit.
    """
    from . import roofline as lab
    from .rows import made_by

    check_writable(json_)
    Settings(k=k)
    asked = [shape for shape in (shapes or "").split(",") if shape]
    for shape in asked:
        one_of("shape", shape, [*lab.SHAPES])
    with models.loaded() as loaded:
        if context_ + k + 1 > loaded.context:
            sizes = f"{loaded.context} tokens: {context_} and a pass over {k + 1} are too many"
            raise BadInput(f"{models.chosen.name} holds {sizes}.")
        stream, lengths = lab.Stream(loaded.device, lab.BUFFER, lab.REPEATS), [1, k + 1]
        makers, stored = lab.engines(loaded), loaded.weights_dtype
        if shapes is None and stored.is_floating_point:
            asked = list(lab.SHAPES)
        elif asked and not stored.is_floating_point:
            raise BadInput("Random weights are not quantized: leave out --shapes, or choose other --weights.")
        kept = loaded.bytes_per_pass + context_ * loaded.token_bytes["target"]
        rows = list(lab.passes(models.chosen.name, loaded.model, makers, lengths, context_, stream, kept=kept))
        for shape in asked:
            typer.echo(f"{shape}, random weights ...", err=True)
            rows += lab.random_passes(shape, stored, loaded.device, lengths, context_, stream)
        typer.echo(lab.table(stream.bandwidth, rows))
        save_json(json_, {**made_by(loaded), "bandwidth": stream.bandwidth, "passes": rows})


@app.command()
def kernels(json_: JsonFile = None) -> None:
    """What each Triton kernel takes of six kinds of GPUs, without one: KB of shared memory for a program, registers of
    a thread, and bytes of a thread that are spilled."""
    check_writable(json_)
    if not find_spec("triton"):
        raise BadInput("There is no Triton for this machine.")
    import torch

    from .compiled import worst
    from .gpu import environment
    from .rows import command
    from .tables import text_table

    rows = worst()
    typer.echo(text_table(rows, dict.fromkeys(rows[0], "")))
    facts = {"command": command(), "environment": environment(torch.device("cpu"))}
    save_json(json_, {**facts, "ran": "Compiled, not run", "rows": rows})


@app.command()
def gpu(
    dtype: DType = "auto",
    device: Device = "auto",
    tiny: Annotated[
        bool, Option("--tiny", help="Use tiny sizes, which run on a CPU too, to see that it works.")
    ] = False,
    report: Annotated[
        bool, Option("--report", help="Run the tests of a GPU too, and measure fewer sizes, in 4 minutes.")
    ] = False,
    only: Annotated[
        str, Option(metavar="PARTS", help="Only these parts: shapes, passes, pair, preset, vllm; with commas.")
    ] = "",
    json_: JsonFile = None,
) -> None:
    """How near the captured engine comes to what this GPU can do: with random weights, and with the drafters of the
    default preset, whose texts are compared.
    """
    from specdemo.system.hardware import choose_device, choose_dtype

    from . import gpu as bench_gpu
    from . import gpu_report

    json_ = json_ or (REPORT_FILE if report else None)
    check_writable(json_)
    chosen = choose_device(device)
    if chosen.type == "cpu" and not tiny:
        raise BadInput(
            "There is no GPU to measure here. With --tiny it runs on the CPU, where its figures mean nothing."
        )
    sizes = bench_gpu.TINY if tiny else bench_gpu.REPORT if report else bench_gpu.FULL
    parts = [part.strip() for part in only.split(",") if part.strip()]
    for part in parts:
        one_of("part", part, [*bench_gpu.PARTS])

    def work(on: bench_gpu.Gpu) -> None:
        if report and not parts:
            tiny_too = ["--tiny"] if tiny else []
            gpu_report.report(on, ["--report", *tiny_too, "--dtype", dtype, "--device", device])
        else:
            bench_gpu.measure(on, parts)

    report_on(chosen, choose_dtype(dtype, chosen), sizes, work, json_, bench_gpu.NOTES)


@app.command()
def cpu(json_: JsonFile = Path("cpu-report.json")) -> None:
    """Whether the engine is right on this CPU, and how fast it and Apple's GPU are: its tests, then the default preset
    by each type of weights, whose texts are compared. It takes about ten minutes.
    """
    import torch

    from . import cpu_report

    check_writable(json_)
    report_on(torch.device("cpu"), torch.float32, cpu_report.SIZES, cpu_report.report, json_, "All weights are real.")


def report_on(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, work: Callable[[Gpu], None], json_: Path | None, notes: str
) -> None:
    """Do some work with rows that are printed and saved as they come, and print them as tables at the end.

    Raises:
        Exit: something failed.
    """
    from .docs import measured
    from .gpu import Gpu, Row, environment, line
    from .rows import command

    facts: dict[str, Any] = {"command": command(), "environment": environment(device), "sizes": sizes.name}
    rows: list[Row] = []

    def take(row: Row) -> None:
        typer.echo(line(row), err=True)
        rows.append(row)
        save_json(json_, {**facts, "measurements": rows})  # after every row, for a run that is cut off

    work(Gpu(device, dtype, sizes, take))
    typer.echo("\n".join(["", *measured({**facts, "measurements": rows}), "", notes]))
    if failed := [row["what"] for row in rows if "error" in row]:
        typer.echo(f"FAILED: {', '.join(failed)}.")
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app, "python -m tools.bench")

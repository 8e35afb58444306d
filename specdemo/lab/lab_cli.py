"""`python -m specdemo lab ...`: why it is fast or slow, which K, and whether it is really lossless."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..events import read_trace, trace_lines
from ..imports import import_quickly
from ..options import (
    AsJson,
    Device,
    DrafterName,
    Drafters,
    DType,
    Eager,
    JsonFile,
    MaxNewTokens,
    PresetName,
    PromptFile,
    Repeats,
    Seed,
    Temperatures,
    TopK,
    TopP,
    check_writable,
)
from ..presets import DEFAULT_PRESET, PRESETS, find_preset
from ..race import PLAIN, SPECULATIVE, drafters_of
from ..types import BadInput, Settings

if TYPE_CHECKING:
    from ..models import Loaded
    from .bench import Prompt

app = typer.Typer(help="Why it is fast or slow, which K, and whether it is really lossless.", no_args_is_help=True)

Step = TypeVar("Step")
PROMPTS = PRESETS / "prompts"

K = Annotated[int, typer.Option("-k", help="Tokens drafted in one round.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy; up to 2.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Also write the table to this file.")]


@app.command()
def profile(
    preset: PresetName = DEFAULT_PRESET,
    names: Drafters = "",
    k: K = 4,
    prompt: Annotated[str, typer.Option("--prompt", help="What to say to the model.")] = "Tell me about the sea.",
    new_tokens: MaxNewTokens = 32,
    repeats: Repeats = 3,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
    csv: CsvFile = None,
) -> None:
    """Time a token of each model, a pass over 1 to 17 tokens, and what a drafted token costs."""
    from . import profile as lab
    from .bench import provenance
    from .tables import text_table, write_csv, write_json

    check_writable(json_, csv)
    at_least_1(repeats=repeats)
    with loaded_model(preset, dtype, device) as loaded:
        drafters = drafters_of(loaded, names)
        steps = lab.profile(loaded, loaded.encode(prompt), drafters, k, new_tokens, repeats)
        timings = [timing for step in told(steps, lab.steps(loaded, drafters, repeats)) for timing in step]
        facts = provenance(loaded)
    summary = lab.summarise(timings)
    times = {"mean_ms": ".2f", "p50_ms": ".2f", "p90_ms": ".2f"}
    shapes = {
        "models": {"model": "", "tokens_per_second": ".1f", **times, "ttft_ms": ".1f"},
        "passes": {"model": "", "tokens": "d", **times, "cost": ".2f"},
        "drafters": {"drafter": "", "ms_per_drafted_token": ".3f", "draft_cost": ".1%"},
    }
    for part, columns in shapes.items():
        typer.echo(text_table(summary[part], columns) + "\n")
    say(lab.in_words(summary, k))
    if json_:
        write_json(json_, {**facts, **summary})
    if csv:
        write_csv(csv, [{"part": part, **row} for part in shapes for row in summary[part]])


@app.command()
def theory(
    draft_ms: Annotated[float | None, typer.Option("--draft-ms", help="Milliseconds to draft one token.")] = None,
    target_ms: Annotated[float | None, typer.Option("--target-ms", help="Of a target pass over one token.")] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="Instead: what `lab profile --json` wrote.")] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", help="Whose costs in the profile.")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="The chance that a guess passes.")] = None,
    json_: AsJson = False,
    csv: CsvFile = None,
) -> None:
    """What speculation could gain with these costs: the ideal, the break-even acceptance, the best K."""
    import json

    from . import theory as lab
    from .tables import text_table, write_csv

    check_writable(csv)
    if profile is not None and drafter is not None:
        costs = costs_in(profile, drafter)
    elif draft_ms is not None and target_ms is not None:
        if not target_ms > 0:
            raise BadInput(f"The time of a target pass must be above 0, not {target_ms!r}.")
        costs = lab.Costs(draft_ms / target_ms)
    else:
        raise BadInput("Give either --draft-ms and --target-ms, or --profile and --drafter.")
    rows, best = lab.table(costs, alpha), None if alpha is None else lab.best_k(alpha, costs)
    if json_:
        typer.echo(json.dumps({"draft_cost": costs.draft, "alpha": alpha, "rows": rows, "best_k": best}))
    else:
        shapes = {"k": "d", "ideal_speedup": ".3f", "verify_cost": ".2f", "break_even_alpha": ".3f"}
        shapes |= {"expected_tokens": ".2f", "speedup": ".3f"} if alpha is not None else {}
        typer.echo(text_table(rows, shapes) + "\n")
        say(lab.in_words(costs, alpha))
    if csv:
        write_csv(csv, rows)


@app.command()
def explain(
    trace: Annotated[Path, typer.Option("--trace", help="A race, as `record` writes it.")],
    json_: JsonFile = None,
    csv: CsvFile = None,
) -> None:
    """Set a recorded race beside the theory, and split the gap between the two into its parts."""
    from .explain import explain as lab
    from .tables import write_csv, write_json

    check_writable(json_, csv)
    entries = read_trace(trace_lines(trace))[1]
    found = lab(*([entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)))
    say(found.in_words())
    if json_:
        write_json(json_, asdict(found))
    if csv:
        write_csv(csv, [asdict(part) for part in found.parts])


@app.command()
def sweep(
    preset: PresetName = DEFAULT_PRESET,
    names: Drafters = "",
    ks: Annotated[str, typer.Option("-k", help="Values of K, separated by commas; 0 is always run.")] = "0,1,2,4,8,16",
    temperatures: Temperatures = "0",
    seeds: Annotated[int, typer.Option("--seeds", help="How many texts of each prompt.")] = 1,
    prompts: PromptFile = PROMPTS / "easy-hard.jsonl",
    max_new_tokens: MaxNewTokens = 64,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
    csv: CsvFile = None,
) -> None:
    """Run drafters with several K, at several temperatures, on easy and hard prompts, and name the best K."""
    from . import sweep as lab
    from .bench import provenance, read_prompts
    from .tables import text_table, write_csv, write_json

    check_writable(json_, csv)
    at_least_1(seeds=seeds)
    try:
        k_values, t_values = [int(k) for k in ks.split(",")], [float(t) for t in temperatures.split(",")]
    except ValueError as error:
        raise BadInput("K and temperature are numbers, separated by commas.") from error
    asked = read_prompts(prompts)
    with loaded_model(preset, dtype, device) as loaded:
        plan = lab.Plan(asked, drafters_of(loaded, names), k_values, t_values, range(seeds), max_new_tokens)
        runs = list(told(lab.sweep(loaded, plan), plan.steps))
        facts = provenance(loaded)
    rows = lab.summarise(runs)
    best = lab.best_k(rows)
    shapes = {"category": "", "temperature": "g", "drafter": "", "k": "", "tokens_per_second": ".1f"}
    shapes |= {"ms_per_token": ".1f", "speedup": ".2f", "acceptance_rate": ".0%", "draft_efficiency": ".0%"}
    typer.echo(text_table(rows, shapes) + "\n")
    say(row["sentence"] for row in best)
    if json_:
        write_json(json_, {**facts, "runs": runs, "summary": rows, "best": best})
    if csv:
        write_csv(csv, rows)


@app.command()
def domains(
    preset: PresetName = DEFAULT_PRESET,
    drafter: DrafterName = None,
    k: K = 4,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    prompts: PromptFile = PROMPTS / "domains.jsonl",
    max_new_tokens: MaxNewTokens = 64,
    traces: Annotated[
        list[Path] | None, typer.Option("--trace", help="Count in this recorded race, with no model; may be repeated.")
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    json_: JsonFile = None,
    csv: CsvFile = None,
) -> None:
    """Count where guesses pass: by category of prompt, by kind of token, by place in the draft."""
    from . import domains as lab
    from .bench import provenance, read_prompts
    from .tables import text_table, write_csv, write_json

    check_writable(json_, csv)
    counts = lab.Counts()
    for trace in traces or ():
        drafted = [entry for entry in read_trace(trace_lines(trace))[1] if entry.lane == SPECULATIVE]
        counts.add(Path(trace.name.removesuffix(".gz")).stem, drafted)
    facts: dict[str, Any] = {}
    if not traces:
        asked = read_prompts(prompts)
        settings = Settings(k=k, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        with loaded_model(preset, dtype, device) as loaded:
            name, asked = drafter or loaded.preset.defaults.drafter, _readable(loaded, asked)
            for prompt, entries in told(lab.domains(loaded, name, asked, settings), len(asked)):
                counts.add(prompt.category, entries)
            facts = provenance(loaded)
    rows = counts.rows()
    shapes = {"by": "", "name": "", "drafted": "d", "tested": "d", "accepted": "d"}
    shapes |= {"acceptance_rate": ".0%", "low": ".0%", "high": ".0%", "draft_efficiency": ".0%"}
    typer.echo(text_table(rows, shapes) + "\n")
    say(counts.in_words())
    if json_:
        write_json(json_, {**facts, "rows": rows})
    if csv:
        write_csv(csv, rows)


@app.command()
def lossless(
    preset: PresetName = DEFAULT_PRESET,
    drafter: DrafterName = None,
    k: K = 2,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds from one context; 0 leaves them out.")] = 3000,
    rule: Annotated[str, typer.Option("--rule", help="exact, or one broken on purpose, to see it caught.")] = "exact",
    prompt: Annotated[str, typer.Option("--prompt", help="Whose answer holds the context.")] = "Tell me about the sea.",
    prompts: PromptFile = PROMPTS / "domains.jsonl",
    limit: Annotated[int, typer.Option("--limit", help="Check so many prompts greedily; 0 leaves them out.")] = 8,
    transformers: Annotated[bool, typer.Option(help="Also check the target alone against transformers.")] = True,
    max_new_tokens: MaxNewTokens = 64,
    dtype: DType = "auto",
    device: Device = "auto",
    eager: Eager = False,
    json_: JsonFile = None,
    csv: CsvFile = None,
) -> None:
    """Check that drafting changes nothing: greedy texts token for token, sampled ones by their law.

    Ends with status 1 if a check fails.
    """
    from . import greedy
    from . import lossless as lab
    from .bench import provenance, read_prompts
    from .law import RULES
    from .tables import write_csv, write_json

    check_writable(json_, csv)
    if rule not in RULES:
        raise BadInput(f"There is no rule called {rule!r}. Choose one of: {', '.join(RULES)}.")
    settings = Settings(k, temperature, top_k, top_p, max_new_tokens, seed)
    if temperature == 0 and rounds:
        raise BadInput("At temperature 0 nothing is sampled: choose one above 0, or --rounds 0.")
    if min(limit, rounds) < 0:
        raise BadInput("The limit and the rounds must be at least 0.")
    asked = read_prompts(prompts) if limit else []
    with loaded_model(preset, dtype, device, eager) as loaded:
        if asked:
            asked = _readable(loaded, asked)
            asked = asked[:: max(1, len(asked) // limit)][:limit]  # from the whole file
        name, ids = drafter or loaded.preset.defaults.drafter, loaded.encode(prompt)
        steps = greedy.steps(asked, [name], transformers)
        checks = list(told(greedy.greedy(loaded, asked, [name], k, max_new_tokens, transformers), steps))
        say(greedy.in_words(checks))
        places = [place for step in lab.exact(loaded, name, ids, settings) for place in step]
        say(lab.exact_in_words(places))
        sampled = None
        if rounds:
            context = lab.telling_context(loaded, name, ids, settings)
            batches = told(lab.sampling(loaded, name, context, settings, rounds, rule), -(-rounds // lab.BATCH))
            sampled = list(batches)[-1]
            say(sampled.in_words())
        facts = provenance(loaded)
    if json_:
        found = {"greedy": checks, "exact": places, "sampling": sampled}
        write_json(json_, {**facts, "settings": settings, "drafter": name, **found})
    if csv:
        write_csv(csv, [asdict(check) for check in checks])
    differ = not all(check.identical or check.near_tie for check in checks)
    if differ or (sampled and sampled.caught) or any(place.error > lab.PRECISION for place in places):
        raise typer.Exit(1)


def _readable(loaded: Loaded, asked: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that the model can read; says which are left out.

    Raises:
        BadInput: it can read none.
    """
    from .bench import readable

    can, cannot = readable(loaded, asked)
    names = ", ".join(prompt.id for prompt in cannot)
    if not can:
        raise BadInput(f"This model can read none of the prompts ({names}): they hold characters it does not know.")
    if cannot:
        typer.echo(f"Left out, since this model cannot read all their characters: {names}.", err=True)
    return can


def at_least_1(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise BadInput(f"{name.capitalize()} must be at least 1, not {number}.")


@contextmanager
def loaded_model(preset: str, dtype: str, device: str, eager: bool = False) -> Iterator[Loaded]:
    """The preset's models, freed at the end."""
    chosen = find_preset(preset)
    loaded = import_quickly("specdemo.models").load(chosen, dtype, device, eager=eager)
    try:
        yield loaded
    finally:
        loaded.release()


def told(steps: Iterable[Step], total: int) -> Iterator[Step]:
    """The steps, with a bar on stderr."""
    from tqdm import tqdm

    yield from tqdm(steps, total=total, disable=not total)


def say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def costs_in(profile: Path, drafter: str) -> Any:
    """The costs of a drafter in a file that `lab profile --json` wrote.

    Raises:
        BadInput: it cannot be read, is something else, or has no such drafter.
    """
    import json

    from .profile import costs

    try:
        found = costs(json.loads(profile.read_text(encoding="utf-8")), drafter)
    except OSError as error:
        raise BadInput(f"The profile cannot be read: {error}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{profile.name} is not what `lab profile --json` writes: {error}.") from error
    if found is None:
        raise BadInput(f"{profile.name} holds no costs of a drafter called {drafter!r}.")
    return found

"""`python -m specdemo lab ...`: why it is fast or slow, which K, and whether it is really lossless."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..errors import BadInput
from ..racing.compare import is_comparable
from ..racing.provenance import provenance
from ..racing.trace import read_trace, trace_lines
from ..settings import SETTINGS, Field, Settings, read_k
from ..studies.lab import STUDIES
from ..studies.prompts import read_prompts, readable
from ..studies.study import PROMPT_FILES, Study, settings_in
from .models import Models, ModelsOrEager
from .options import (
    SERVER_KEY,
    AsJson,
    Drafter,
    Drafters,
    Files,
    Ks,
    MaxNewTokens,
    PromptFile,
    Temperatures,
    Tree,
    numbers,
    options_of,
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

    def command(models: Models, asked: Any, files: Files) -> None:
        given = {field.name: _read(field, getattr(asked, field.name)) for field in typed}
        given |= {field.name: os.environ.get(SERVER_KEY, "") for field in study.options() if field not in typed}
        settings_in(given)  # what is wrong with them is said before a model is loaded
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

    typed = [field for field in study.options() if field.kind != "key"]  # a key is not for a command line
    command.__annotations__ = {"models": Models, "asked": options_of(typed), "files": Files}
    app.command(study.name, help=study.summary)(with_options(command))


def _read(field: Field, typed: Any) -> Any:
    match field.kind:
        case "wholes":
            return numbers(typed, int, field.label)
        case "numbers":
            return numbers(typed, float, field.label)
        case "prompts":
            return read_prompts(typed)
    return typed


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


Sampling = options_of(SETTINGS[name] for name in ("top_k", "top_p", "seed", "rule"))


@app.command()
@with_options
def lossless(
    models: ModelsOrEager,
    *,
    names: Drafters = "",
    drafter: Drafter = None,
    ks: Ks = "2",
    temperatures: Temperatures = "0,1",
    chosen: Sampling,  # type: ignore[valid-type]
    tree: Tree = False,
    rounds: Annotated[int, Option(min=0, help="Rounds to sample from one context; 0 skips this check.")] = 3000,
    broken: Annotated[str, Option(help="Sample by a broken rule, to see the test catch it.")] = "",
    prompt: Annotated[str, Option(help="The prompt whose answer is the context.")] = "Tell me about the sea.",
    prompts: PromptFile = PROMPT_FILES / "domains.jsonl",
    limit: Annotated[int, Option(min=0, help="Prompts whose texts are compared; 0 skips this check.")] = 8,
    transformers: Annotated[bool, Option(help="Also check the target alone against transformers.")] = True,
    server: Annotated[str | None, Option(help="Also check it against llama.cpp's server of the same file.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    files: Files,
) -> None:
    """Check that drafting changes nothing: texts token for token, and sampled tokens by their distribution.

    Texts are compared at every temperature under the match rule, at temperature 0 under rejection sampling. Ends with
    status 1 if a check fails.
    """
    from ..racing.race import drafters_of
    from ..servers.llamacpp import LlamaCpp
    from ..studies import greedy
    from ..studies import lossless as lab
    from ..studies.rules import make_rule
    from .servers import named

    settings = [
        Settings(k=k, temperature=temperature, max_new_tokens=max_new_tokens, tree=tree, **asdict(chosen))
        for k, temperature in product(numbers(ks, read_k, "Values of K"), numbers(temperatures, float, "Temperatures"))
    ]
    sampled_with = next((one for one in settings if one.temperature > 0), None)
    if rounds and sampled_with is None:
        raise BadInput("At temperature 0 nothing is sampled: choose one above 0, or --rounds 0.")
    if broken:
        make_rule(settings[0], broken)
        if tree:
            raise BadInput("The broken rules test chains: leave out --broken or --tree.")
    asked = read_prompts(prompts) if limit else []
    with models.loaded() as loaded:
        if asked:
            asked, left_out = readable(loaded, asked)
            if left_out:
                typer.echo(left_out, err=True)
            asked = asked[:: max(1, len(asked) // limit)][:limit]  # from the whole file
        drafting = drafters_of(loaded, names) if names else [drafter or loaded.preset.defaults.drafter]
        checks: list[greedy.GreedyCheck] = []
        for one in filter(is_comparable, settings):
            steps = greedy.steps(asked, drafting, transformers and one.temperature == 0)
            checks += with_progress(greedy.greedy(loaded, asked, drafting, one, transformers), steps)
        served: list[greedy.GreedyCheck] = []
        if server is not None:
            with named(server, SERVER_KEY) as dialect:
                if not isinstance(dialect, LlamaCpp):
                    raise BadInput("--server takes a server of llama.cpp here.")
                served = list(with_progress(greedy.against_server(loaded, dialect, asked, max_new_tokens), len(asked)))
        checks += served
        say([*greedy.in_words(checks), *greedy.differences_in_words(served)])
        papers, sampled = [], None
        if sampled_with:
            ids = loaded.encode(prompt)
            if not tree:  # whose tokens are tested by nothing but the target's own draws
                papers = list(lab.exact(loaded, drafting[0], ids, sampled_with, broken))
                say(lab.exact_in_words(papers))
        if sampled_with and rounds:
            context = lab.telling_context(loaded, drafting[0], ids, sampled_with)
            sampling = lab.sampling(loaded, drafting[0], context, sampled_with, rounds, broken)
            sampled = list(with_progress(sampling, -(-rounds // lab.BATCH)))[-1]
            say(sampled.in_words())
        facts = provenance(loaded)
    found = {"texts": checks, "exact": papers, "sampling": sampled}
    files.write({**facts, "settings": settings, "drafters": drafting, **found}, [asdict(check) for check in checks])
    differ = not all(check.identical or check.near_tie for check in checks)
    wrong = any(place.error > lab.PRECISION for paper in papers for place in paper.positions)
    if differ or wrong or (sampled and sampled.caught):
        raise typer.Exit(1)


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

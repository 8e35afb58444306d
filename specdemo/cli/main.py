"""The command line: `python -m specdemo presets | cache | serve | generate | race | record | check | lab | ...`.

What a command is asked for goes to stdout, everything else to stderr. Bad input ends with exit status 2
and one line on stderr.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..decoding.events import Finished, emitted_tokens
from ..errors import BadInput
from ..formats import byte_size, formatted, printable
from ..models.presets import load_presets
from ..racing.remembered import MemoryFile, remembering
from ..racing.trace import PLAIN, SPECULATIVE, environment_of, read_trace, request_of, save_trace, trace_lines
from ..system.imports import import_quickly
from ..tokens import TokenKind
from .check import check
from .export import export
from .lab import app as lab_app
from .models import ModelsOrEager
from .options import (
    FIGURES,
    AsJson,
    DecodingOptions,
    Device,
    DType,
    LaneNames,
    MemoryPath,
    ReaderCount,
    check_writable,
    guessed_on_stdin,
    lanes_table,
    memory_file,
    moved,
    say,
    with_options,
)

if TYPE_CHECKING:
    from ..models.loaded import Loaded

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(lab_app, name="lab")
app.command()(check)
app.command("doctor", hidden=True)(check)  # its older name
app.command()(export)
moved(
    app, "train", "`python -m tools.train` makes drafters, in the project's folder; `export` is a command of its own."
)

Prompt = Annotated[str, Option(help="What to say to the model; - reads stdin.")]

STYLES: dict[TokenKind, dict[str, Any]] = {
    TokenKind.ACCEPTED: {"fg": "green", "underline": True},
    TokenKind.RESAMPLED: {"fg": "yellow", "bold": True, "underline": True},
    TokenKind.BONUS: {"fg": "cyan", "bold": True},
    TokenKind.TARGET: {},
    TokenKind.UNKNOWN: {},
}


@app.command()
def presets(json_: AsJson = False) -> None:
    """List the presets."""
    good, broken = load_presets()
    for sentence in broken:
        typer.echo(sentence, err=True)
    if json_:
        facts = [{"name": p.name, "title": p.title, "description": p.description} for p in good.values()]
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    for preset in good.values():
        typer.echo(f"{preset.name:<25} {preset.title}. {preset.description}")


@app.command()
def cache(
    delete: Annotated[list[str] | None, Option(help="Delete this model; may be given several times.")] = None,
) -> None:
    """List the models that were fetched, or delete some."""
    from ..models.cached import delete_cached, list_cached

    for name in delete or ():
        entry = delete_cached(name)
        typer.echo(f"Deleted {entry.name}, {byte_size(entry.size)}.")
    if not delete:
        for entry in list_cached():
            place = "  (the hub's cache, which other programs use too)" if entry.of_hub else ""
            typer.echo(f"{byte_size(entry.size):>12}  {entry.name}{place}")


@app.command()
def serve(
    preset: Annotated[str | None, Option("--preset", help="The preset to load first; `presets` lists them.")] = None,
    port: Annotated[
        int | None, Option("--port", min=1, max=65535, help="The port; by default the first free one from 7860 on.")
    ] = None,
    host: Annotated[
        str | None, Option("--host", help="The address: 127.0.0.1 for this machine only, 0.0.0.0 for its network.")
    ] = None,
    open_: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    auth: Annotated[Path | None, Option("--auth", help="Ask for a login: a file with lines of user:password.")] = None,
    dtype: DType = "auto",
    mcp: Annotated[
        bool, Option("--mcp", help="Offer tools to language models, by the Model Context Protocol.")
    ] = False,
    metrics: Annotated[bool, Option("--metrics", help="Count races and tokens for Prometheus, at /metrics.")] = False,
) -> None:
    """Serve the page, as `python app.py` does."""
    import_quickly("specdemo.ui.serve").serve(preset, port, host, open_, auth, dtype, mcp, metrics)


@app.command()
@with_options
def generate(
    prompt: Prompt, models: ModelsOrEager, decoding: DecodingOptions, memory: MemoryPath = None, json_: AsJson = False
) -> None:
    """Generate with a drafter; tokens stream in, coloured by where they came from."""
    request = decoding.request(prompt, models.chosen)
    kept = memory_file(memory)
    with models.loaded(raw=request.raw) as opened:
        from ..racing import lanes, race, summary

        loaded = guessed_on_stdin(begun(kept, opened), request, streamed=not json_ and sys.stdout.isatty())
        request = decoding.fitted(request, loaded)
        prompt_ids = loaded.encode(request.prompt, request.raw)
        events = []
        text = lanes.LaneText(loaded.tokenizer, prompt_ids)
        for event in race.start(loaded, request.drafter, prompt_ids, request.settings):
            events.append(event)
            if not json_:
                read = text.read(event)
                for token in emitted_tokens(read):
                    typer.echo(typer.style(printable(token.text), **STYLES[token.kind]), nl=False)
                if isinstance(read, Finished):
                    typer.echo(printable(read.text), nl=False)
                sys.stdout.flush()
        outcome = summary.report(loaded, prompt_ids, events, request.settings.grammar)
        if kept:
            kept.add(loaded, outcome["token_ids"])
        if json_:
            typer.echo(json.dumps(outcome, ensure_ascii=False))
            return
        typer.echo()
        legend = " ".join(typer.style(kind.value, **style) for kind, style in STYLES.items())
        typer.echo(f"\n{legend}", err=True)
        typer.echo(f"{figures(outcome['stats'])}; ended by {outcome['finish_reason']}", err=True)
        say(filter(None, [summary.cut_short(outcome)]))


@app.command("race")
@with_options
def race_(
    context: typer.Context,
    *,
    prompt: Annotated[str | None, Option(help="What to say to the model; - reads stdin.")] = None,
    models: ModelsOrEager,
    decoding: DecodingOptions,
    lane: LaneNames = None,
    readers: ReaderCount = 1,
    isolated: Annotated[bool, Option("--isolated", help="One lane after the other.")] = False,
    again: Annotated[
        Path | None, Option(help="Run the race of this trace again, as `record` or the page wrote it.")
    ] = None,
    server: Annotated[
        str | None, Option(help="Race a running vLLM, llama.cpp server or SGLang (experimental) at this address.")
    ] = None,
    baseline: Annotated[str | None, Option(help="With --server: one without speculation, or a trace of one.")] = None,
    out: Annotated[Path | None, Option(help="With --server: write the trace to this file.")] = None,
    memory: MemoryPath = None,
    why: Annotated[bool, Option("--why", help="Also print the figures behind the verdicts.")] = False,
    json_: AsJson = False,
) -> None:
    """Race the target with a drafter, or with several, against the target alone, and say who won and why.

    With --server, the two are servers. Their API keys stand in SPECDEMO_SERVER_KEY and SPECDEMO_BASELINE_KEY.
    """
    if server is not None:
        ours = "preset head drafter k tree lane readers memory why dtype device eager isolated again schema grammar"
        if given := [_option(name) for name in ours.split() if _is_given(context, name)]:
            raise BadInput(f"With --server the server says what runs: leave out {', '.join(given)}.")
        if prompt is None:
            raise BadInput("Say what to race on, with --prompt.")
        from .servers import race_server

        race_server(server, baseline, prompt, decoding, out, json_)
        return
    if baseline is not None or out is not None:
        raise BadInput("--baseline and --out belong to --server.")
    if again is not None:
        free = ("again", "device", "json_")
        given = [name for name in context.params if name not in free and _is_given(context, name)]
        if given:
            raise BadInput(f"With --again the trace says what to run: leave out {', '.join(map(_option, given))}.")
        _race_again(again, models.device, json_)
        return
    if prompt is None:
        raise BadInput("Say what to race on, with --prompt, or give a trace with --again.")
    request = replace(decoding.request(prompt, models.chosen, lane, readers), isolated=isolated)
    kept = memory_file(memory)
    with models.loaded(raw=request.raw) as opened:
        from ..racing import batch, summary

        loaded = guessed_on_stdin(begun(kept, opened), request)
        request = decoding.fitted(request, loaded, lane)
        found = summary.outcome_of(loaded, request, list(batch.race_request(loaded, request)))
        outcome = found.as_dict()
        if kept:
            kept.add(loaded, outcome[next(iter(request.lanes))]["token_ids"])
        whole = {**outcome, "environment": found.environment}
        typer.echo(json.dumps(whole, ensure_ascii=False) if json_ else table(outcome, request.drafter, why))


def begun(kept: MemoryFile | None, loaded: Loaded) -> Loaded:
    """The models with the memory in a file, if there is one; stderr says how much it holds."""
    if kept is None:
        return loaded
    memory = kept.memory(loaded)
    typer.echo(f"{kept.path} holds {memory.tokens} tokens of earlier answers.", err=True)
    return remembering(loaded, memory)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> str:
    return "-k" if name == "k" else "--" + name.replace("_", "-")


def _race_again(path: Path, device: Device, json_: bool) -> None:
    """Run the race of a trace again, on the models and number type that it names, and compare the token ids."""
    header, recorded = read_trace(trace_lines(path))
    request, there = request_of(header), environment_of(header)
    dtype, eager = str(there.get("weights_dtype", "auto")), there.get("engine") == "eager"
    models = ModelsOrEager(preset=request.preset, dtype=dtype, device=device, eager=eager)
    with models.loaded(raw=request.raw) as loaded:
        from ..racing import again, summary

        entries = list(again.again(loaded, header, recorded))
        differing = again.differences(recorded, entries)
        if request.others:
            outcome = summary.outcome_of(loaded, request, entries).as_dict()
        else:
            drafted = {name: lane for name, lane in again.recorded_lanes(header).items() if name != PLAIN}
            prompt_ids = loaded.encode(request.prompt, request.raw)
            outcome = summary.summary(loaded, prompt_ids, request.settings, entries, drafted)
        same = not any(place is not None for place in differing.values())
        if json_:
            typer.echo(json.dumps({**outcome, "again": {"same": same, "first_difference": differing}}))
        else:
            others = again.other_environment(loaded, header)
            typer.echo("\n".join([table(outcome, request.drafter), *compared(differing, others)]))
    if not same:
        raise typer.Exit(1)


def compared(differing: dict[str, int | None], others: list[str]) -> list[str]:
    """What became of a race run again, a sentence a line: whether the token ids are those of its trace."""
    lines = [
        f"The lane {lane} parts from its trace at token {place + 1}."
        for lane, place in differing.items()
        if place is not None
    ]
    if not lines:
        return ["The token ids are the same as in the trace."]
    return [*lines, f"It was recorded elsewhere: {', '.join(others)}."] if others else lines


@app.command()
@with_options
def record(
    prompt: Prompt,
    out: Annotated[Path, Option(help="The trace to write, JSON lines; packed if it ends in .gz.")],
    models: ModelsOrEager,
    decoding: DecodingOptions,
    lane: LaneNames = None,
    readers: ReaderCount = 1,
) -> None:
    """Run a race and write its trace to a file."""
    request = decoding.request(prompt, models.chosen, lane, readers)
    check_writable(out)
    with models.loaded(raw=request.raw) as opened:
        from ..racing import batch, summary

        loaded = guessed_on_stdin(opened, request)
        request = decoding.fitted(request, loaded, lane)
        entries = list(batch.race_request(loaded, request))
        header = summary.trace_header(loaded, request)
        header["environment"] = summary.measured(loaded)
        save_trace(out, header, entries)
        typer.echo(f"{out}: {len(entries)} events.")


def figures(stats: dict[str, Any]) -> str:
    """The figures of one lane on one line."""
    line = f"{stats['tokens']} tokens in {stats['seconds']:.2f} s"
    if stats["tokens_per_second"]:
        line += f", {stats['tokens_per_second']:.1f} tokens/s"
    if stats["drafted"]:
        line += f", {stats['tokens_per_round']:.2f} tokens per round"
        line += f", acceptance rate {stats['acceptance_rate']:.0%} (of tested)"
        line += f", draft efficiency {stats['draft_efficiency']:.0%} (of drafted)"
    return line


def table(outcome: dict[str, Any], drafter: str, why: bool = False) -> str:
    """A race as a small table with sentences below it, and with the figures behind them if one asks `why`.

    `drafter` is that of a race of one.
    """
    verdicts = outcome["verdicts"]
    titles = {PLAIN: "target alone", SPECULATIVE: f"with {drafter}"}
    ratios = {"speed_up": "speed-up, writing", "speed_up_in_all": "speed-up, in all"}
    lanes = {name: {**outcome[name]["stats"], **dict.fromkeys(ratios.values(), "")} for name in (PLAIN, *verdicts)}
    for name, found in verdicts.items():
        known = {} if found["busy"] else found
        lanes[name] |= {words: formatted(known.get(ratio), "times", "-") for ratio, words in ratios.items()}
    of_all = {"tokens_per_second_of_all": "{:.1f}"} if "readers" in lanes[PLAIN] else {}
    shapes = {**FIGURES, **of_all, **dict.fromkeys(ratios.values(), "{}")}
    lines = lanes_table([titles.get(name, name) for name in lanes], list(lanes.values()), shapes)
    sentences = {name: found["sentence"] for name, found in verdicts.items()}
    others = [f"{name}: {sentence}" for name, sentence in sentences.items() if sentence not in outcome["sentence"]]
    lines += ["", *texts_compared(outcome), *others, outcome["sentence"]]
    return "\n".join([*lines, *(figures_behind(verdicts) if why else [])])


def figures_behind(verdicts: dict[str, Any]) -> list[str]:
    """What the verdict on each lane rests on."""
    lines = []
    for name, found in verdicts.items():
        lines += ["", *[f"{name}:"] * (len(verdicts) > 1), *found["notes"]]
        lines += [f"  {what:<47}{value}" for what, value in found["numbers"]]
    return lines


def texts_compared(outcome: dict[str, Any]) -> list[str]:
    """Whether the texts are that of the target alone, a sentence a line. One of them may only be shorter, if its lane
    was stopped."""
    verdicts, lines = outcome["verdicts"], []
    for name, found in verdicts.items():
        comparison = found["comparison"]
        if comparison is None:
            return ["Rejection sampling: the texts differ by chance, their distribution is the same."]
        both = [outcome[lane]["stats"] for lane in (PLAIN, name)]
        stopped = any(stats["finish_reason"] is None for stats in both)
        if comparison["identical"] or (stopped and comparison["first_difference"] >= min(s["tokens"] for s in both)):
            continue
        where = f"differs from that of the target alone from token {comparison['first_difference'] + 1} on"
        margin = comparison["margin"]
        apart = "" if margin is None else f"; the two tokens there were {margin:.4f} apart for the target"
        lines.append(f"The text {'' if len(verdicts) == 1 else f'of {name} '}{where}{apart}.")
    return lines or ["Identical to the target alone, token for token."]


def main(app: typer.Typer = app, name: str = "specdemo") -> None:
    """Run a command line; every error a person can mend is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a file may have no place for every character
    try:
        status = app(prog_name=name, standalone_mode=False)
    except BadInput as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        misused = getattr(error, "format_message", None)  # what typer raises for a misused command
        if misused and type(error).__name__ == "NoArgsIsHelpError":  # then that is the help
            typer.echo(misused(), err=True)
            sys.exit(2)
        if misused:
            fail(misused())
        from ..models.errors import explain

        sentence = explain(error)
        if sentence is None:
            raise
        fail(sentence)
    else:
        sys.exit(status or 0)


def fail(sentence: str) -> None:
    """One line on stderr and exit status 2."""
    typer.echo("specdemo: " + " ".join(sentence.split()), err=True)
    sys.exit(2)

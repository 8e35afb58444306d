"""The command line: `python -m specdemo presets | generate | race | record | bench | lab | train`.

What a command is asked for goes to stdout, everything else to stderr. Bad input ends with exit status 2
and one line on stderr.
"""

from __future__ import annotations

import gzip
import json
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .events import emitted_tokens, write_trace
from .imports import import_quickly
from .lab.cli import app as bench_app
from .lab.lab_cli import app as lab_app
from .options import AsJson, Device, DrafterName, DType, Eager, PresetName, Seed, TopK, TopP, check_writable
from .presets import Preset, find_preset, load_presets
from .text import LaneText
from .train.cli import app as train_app
from .types import BadInput, Settings, TokenKind, read_k

if TYPE_CHECKING:
    from .models import Loaded

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(train_app, name="train")
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")

K = Annotated[Any, typer.Option("-k", parser=read_k, metavar="K", help="Tokens drafted in a round: 0 to 16, or auto.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy; up to 2.")]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Stop after so many.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop after this text; may be given several times.")]
Prompt = Annotated[str, typer.Option("--prompt", help="What to say to the model; - reads stdin.")]
Raw = Annotated[
    bool | None,
    typer.Option("--raw/--chat", help="Continue the prompt as it is, or put it into the chat template."),
]

STYLES: dict[TokenKind, dict[str, Any]] = {
    TokenKind.ACCEPTED: {"fg": "green", "underline": True},
    TokenKind.RESAMPLED: {"fg": "yellow", "bold": True, "underline": True},
    TokenKind.BONUS: {"fg": "cyan", "bold": True},
    TokenKind.TARGET: {},
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
def generate(
    prompt: Prompt,
    preset: PresetName = "smollm2-135m",
    drafter: DrafterName = None,
    k: K = None,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Raw = None,
    dtype: DType = "auto",
    device: Device = "auto",
    eager: Eager = False,
    json_: AsJson = False,
) -> None:
    """Generate with a drafter; tokens stream in, coloured by where they came from."""
    chosen = find_preset(preset)
    settings = settings_for(chosen, k, temperature, top_k, top_p, max_new_tokens, seed, stop)
    raw = chosen.defaults.raw if raw is None else raw
    with loaded_model(chosen, dtype, device, eager) as loaded:
        from . import race

        prompt_ids = loaded.encode(read_prompt(prompt), raw)
        name = drafter or chosen.defaults.drafter
        events = []
        text = LaneText(loaded.tokenizer, prompt_ids)
        for event in race.start(loaded, name, prompt_ids, settings):
            events.append(event)
            if not json_:
                spans = text.read(event).emitted
                kinds = [token.kind for token in emitted_tokens(event)]
                for place, span in enumerate(spans):
                    style = STYLES[kinds[place]] if place < len(kinds) else {}
                    typer.echo(typer.style(printable(span), **style), nl=False)
                sys.stdout.flush()
        outcome = race.report(loaded, prompt_ids, events)
        if json_:
            typer.echo(json.dumps(outcome, ensure_ascii=False))
            return
        stats = outcome["stats"]
        typer.echo()
        legend = " ".join(typer.style(kind.value, **style) for kind, style in STYLES.items())
        typer.echo(f"\n{legend}", err=True)
        typer.echo(f"{figures(stats)}; ended by {outcome['finish_reason']}", err=True)


@app.command("race")
def race_(
    prompt: Prompt,
    preset: PresetName = "smollm2-135m",
    drafter: DrafterName = None,
    k: K = None,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Raw = None,
    dtype: DType = "auto",
    device: Device = "auto",
    eager: Eager = False,
    isolated: Annotated[bool, typer.Option("--isolated", help="One lane after the other.")] = False,
    json_: AsJson = False,
) -> None:
    """Race the target with a drafter against the target alone, and say who won and why."""
    chosen = find_preset(preset)
    settings = settings_for(chosen, k, temperature, top_k, top_p, max_new_tokens, seed, stop)
    raw = chosen.defaults.raw if raw is None else raw
    with loaded_model(chosen, dtype, device, eager) as loaded:
        from . import race

        prompt_ids = loaded.encode(read_prompt(prompt), raw)
        name = drafter or chosen.defaults.drafter
        entries = list(race.race(loaded, name, prompt_ids, settings, isolated))
        outcome = race.summary(loaded, prompt_ids, settings, entries)
        typer.echo(json.dumps(outcome, ensure_ascii=False) if json_ else table(outcome, name))


@app.command()
def record(
    prompt: Prompt,
    out: Annotated[Path, typer.Option("--out", help="The trace to write, JSON lines; packed if it ends in .gz.")],
    preset: PresetName = "smollm2-135m",
    drafter: DrafterName = None,
    k: K = None,
    temperature: Temperature = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    stop: Stop = None,
    raw: Raw = None,
    dtype: DType = "auto",
    device: Device = "auto",
    eager: Eager = False,
) -> None:
    """Run a race and write its trace to a file."""
    chosen = find_preset(preset)
    settings = settings_for(chosen, k, temperature, top_k, top_p, max_new_tokens, seed, stop)
    raw = chosen.defaults.raw if raw is None else raw
    check_writable(out)
    with loaded_model(chosen, dtype, device, eager) as loaded:
        from . import race

        text = read_prompt(prompt)
        name = drafter or chosen.defaults.drafter
        entries = list(race.race(loaded, name, loaded.encode(text, raw), settings))
        header = race.trace_header(loaded, name, text, raw, settings)
        trace = "".join(write_trace(header, entries)).encode("ascii")
        out.write_bytes(gzip.compress(trace, mtime=0) if out.suffix == ".gz" else trace)
        typer.echo(f"{out}: {len(entries)} events.")


def settings_for(
    preset: Preset,
    k: int | str | None,
    temperature: float | None,
    top_k: int,
    top_p: float,
    max_new_tokens: int | None,
    seed: int,
    stop: list[str] | None,
) -> Settings:
    """The settings of a command, with the preset's own where nothing was said."""
    asked = preset.defaults.filled_in({"k": k, "temperature": temperature, "max_new_tokens": max_new_tokens})
    return Settings(**asked, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ()))


def read_prompt(prompt: str) -> str:
    try:
        return sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise BadInput(f"The prompt on stdin is not text in {error.encoding}.") from error


@contextmanager
def loaded_model(preset: Preset, dtype: str, device: str, eager: bool) -> Iterator[Loaded]:
    """The preset's models, with the stages of a long first load told on stderr; freed at the end."""
    load = import_quickly("specdemo.models").load
    stages: list[str] = []

    def tell(fraction: float | None, words: str) -> None:
        if words not in stages:
            stages.append(words)
            if sys.stderr.isatty():
                typer.echo(f"\r\x1b[K{words}", err=True, nl=False)

    loaded = load(preset, dtype, device, tell, eager)
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", err=True, nl=False)
    try:
        yield loaded
    finally:
        loaded.release()


def printable(text: str) -> str:
    """Text with control characters shown, not obeyed: a model must not drive the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def figures(stats: dict[str, Any]) -> str:
    """The figures of one lane on one line."""
    line = f"{stats['tokens']} tokens in {stats['seconds']:.2f} s, {stats['tokens_per_second']:.1f} tokens/s"
    if stats["drafted"]:
        line += f", {stats['tokens_per_round']:.2f} tokens per round, {shares(stats)}"
    return line


def shares(stats: dict[str, Any]) -> str:
    rate, efficiency = stats["acceptance_rate"], stats["draft_efficiency"]
    return f"acceptance rate {rate:.0%} (of tested), draft efficiency {efficiency:.0%} (of drafted)"


def table(outcome: dict[str, Any], drafter: str) -> str:
    """A race as a small table with a sentence below it."""
    rows: list[tuple[str, ...]] = [("", "target alone", f"with {drafter}")]
    lanes = [outcome["plain"]["stats"], outcome["speculative"]["stats"]]
    formats = {
        "tokens": "{}",
        "seconds": "{:.2f}",
        "tokens_per_second": "{:.1f}",
        "ttft_seconds": "{:.3f}",
        "draft_seconds": "{:.2f}",
        "verify_seconds": "{:.2f}",
        "tokens_per_round": "{:.2f}",
        "acceptance_rate": "{:.0%}",
        "draft_efficiency": "{:.0%}",
    }
    for name, shape in formats.items():
        cells = [shape.format(lane[name]) if lane[name] is not None else "-" for lane in lanes]
        rows.append((name.replace("_", " "), *cells))
    lines = [f"{name:<20}{plain:>14}{speculative:>22}" for name, plain, speculative in rows]
    comparison = outcome["comparison"]
    if comparison is None:
        lines += ["", "Sampled: the two texts may differ by chance, their distribution is the same."]
    elif comparison["identical"]:
        lines += ["", "Identical to the target alone, token for token."]
    else:
        gap = comparison["logit_gap"]
        where = f"The texts differ from token {comparison['first_difference'] + 1} on"
        apart = "" if gap is None else f"; the target's logits of the two tokens there are {gap:.4f} apart"
        lines += ["", f"{where}{apart}."]
    return "\n".join([*lines, outcome["sentence"]])


def main() -> None:
    """Run the command line; every error a person can mend is one line on stderr."""
    try:
        status = app(prog_name="specdemo", standalone_mode=False)
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
        from .failures import explain

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

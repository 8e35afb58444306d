"""`python -m tools.train ...`: how the shipped drafters are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tqdm import tqdm
from typer import Option

from specdemo.cli.export import kind_of
from specdemo.cli.main import main
from specdemo.cli.models import Models
from specdemo.cli.options import Device, PresetName, check_writable, with_options
from specdemo.errors import BadInput
from specdemo.models.presets import DEFAULT_PRESET, PRESETS, find_preset
from specdemo.system.hardware import choose_device, choose_dtype, compute_dtype, device_name

from .chargpt import Recipe, train
from .data import Seed, write_text
from .head import Kind, TrainingPlan, judge, train_head
from .ngram import build_bigrams, build_table
from .shakespeare import ALPHABET, encode, read_plays, text_facts

WORDS = "Make drafters: have the target write text, and count or train on it."
app = typer.Typer(help=WORDS, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Folder = Annotated[Path, Option("--text", help="The folder of text shards.")]
States = Annotated[
    Path | None, Option("--keep-states", help="A folder for the target's states: 3.5 kB a token of SmolLM2-135M.")
]


@app.command()
@with_options
def data(
    models: Models,
    tokens: Annotated[int, Option(min=1, help="Tokens of text that the folder should hold in the end.")],
    text: Folder = Path("text"),
    rows: Annotated[int, Option(min=1, help="Conversations written side by side.")] = 192,
    columns: Annotated[int, Option(min=1, help="Tokens a row holds.")] = 512,
    seed: Seed = 0,
    states: States = None,
) -> None:
    """Let the target write prompts and answer them. Stop it when you like; run it again to go on."""
    with models.loaded(eager=True) as loaded, tqdm(total=tokens, unit=" tokens", unit_scale=True) as bar:
        target = loaded.model, loaded.tokenizer, loaded.eos_ids
        sizes = {"rows": rows, "columns": columns, "seed": seed}
        more: dict[str, Any] = {**sizes, "states_folder": states, "progress": bar.update}
        held = write_text(*target, text, tokens, made_by("data", loaded), **more)
    typer.echo(f"{text} holds {held:,} tokens.")


@app.command()
def ngram(
    preset: PresetName = DEFAULT_PRESET,
    text: Annotated[
        list[Path] | None, Option(help="A folder of text shards, `text` by default; more may be given.")
    ] = None,
    out: Annotated[Path | None, Option(help="The file of the table; by default in presets/weights.")] = None,
) -> None:
    """Count the n-gram table of a preset from its text."""
    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.ngram.safetensors"
    check_writable(path)
    build_table(text or [Path("text")], path, {**made_by("ngram"), "preset": preset}, typer.echo)


@app.command()
@with_options
def head(
    plan: TrainingPlan,
    preset: PresetName = DEFAULT_PRESET,
    text: Folder = Path("text"),
    out: Annotated[Path | None, Option(help="The file of the head; by default in presets/weights.")] = None,
    states: States = None,
    begin_with: Annotated[Path | None, Option(help="A trained head to go on from; it keeps its sizes.")] = None,
    device: Device = "auto",
) -> None:
    """Train a head on the text. Stop it when you like; run it again to go on."""
    kind_of(plan.kind)
    if not 0 < plan.rate < 1:
        raise BadInput("The rate must be between 0 and 1.")
    if plan.kind != "block" and plan.depth != 1:
        raise BadInput("Only block heads have several layers: leave out --depth.")
    if plan.kind == "medusa" and plan.state_layers:
        raise BadInput("A medusa head reads the target's last layer: leave out --layers.")
    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.{plan.kind}.safetensors"
    check_writable(path)
    models = Models(preset=preset, device=device)
    with models.loaded(eager=True) as loaded, tqdm(total=plan.tokens, unit=" tokens", unit_scale=True) as bar:
        more: dict[str, Any] = {"states_folder": states, "begin_with": begin_with}
        more |= {"progress": bar.update, "log": bar.write}
        train_head(loaded.model, plan, text, path, made_by("head", loaded), **more)
    typer.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB.")


@app.command()
def validate(
    kind: Kind,
    preset: PresetName = DEFAULT_PRESET,
    head: Annotated[Path | None, Option(help="A trained head; the preset's by default.")] = None,
    text: Folder = Path("text"),
    states: States = None,
    draft_vocab: Annotated[
        int, Option(min=0, help="Judge an eagle head with a draft vocabulary of this size; 0 keeps its own.")
    ] = 0,
    device: Device = "auto",
) -> None:
    """Judge a head by the held-out part of the text, as `head` does while it trains."""
    chosen, kind_of_head = find_preset(preset), kind_of(kind)
    path = head or chosen.heads.get(kind)
    if not isinstance(path, Path):
        raise BadInput(f"The preset {preset} has no head of the kind {kind!r}; name a file with --head.")
    with Models(preset=preset, device=device).loaded(eager=True) as loaded:
        typer.echo(json.dumps(judge(loaded.model, kind_of_head, path, text, states, draft_vocab)))


@app.command()
@with_options
def chargpt(
    out: Annotated[Path, Option(help="The folder that model, tokenizer and card are written to.")],
    recipe: Recipe,
    device: Device = "auto",
) -> None:
    """Train a character-level GPT on Shakespeare's plays."""
    chosen = choose_device(device)
    fast = compute_dtype(choose_dtype(None, chosen), chosen)
    dtype = fast if fast == torch.bfloat16 else torch.float32  # float16 would need its losses scaled
    text, held_out = read_plays()
    facts = {
        **made_by("chargpt"),
        "text": text_facts(text, held_out),
        "products": str(dtype).removeprefix("torch."),
        "device": device_name(chosen),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with tqdm(total=recipe.steps, unit=" steps") as bar:

        def progress(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)

        card = train(recipe, encode(text), encode(held_out), out, facts, chosen, dtype, progress)
    typer.echo(f"{out}: {card['parameters']:,} parameters, held-out loss {card['held_out_loss']} nats per character.")


@app.command()
def bigram(out: Annotated[Path, Option(help="The file of the table.")]) -> None:
    """Count which character follows which in Shakespeare's plays, with Laplace's rule."""
    check_writable(out)
    text, held_out = read_plays()
    build_bigrams(encode(text), len(ALPHABET) + 1, out, {**made_by("bigram"), "text": text_facts(text, held_out)})
    typer.echo(f"{out}: from {len(text):,} characters.")


def made_by(command: str, loaded: Any = None) -> dict[str, Any]:
    here = {"preset": loaded.preset.name, "weights": loaded.weights, **loaded.environment()} if loaded else {}
    return {"command": f"python -m tools.train {command}", **here}


if __name__ == "__main__":
    main(app, "python -m tools.train")

"""`python -m specdemo train ...`: how the shipped drafters are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm
from typer import Option

from ..models.presets import DEFAULT_PRESET, PRESETS, find_preset
from ..types import BadInput
from .options import Device, Models, PresetName, check_writable, numbers, with_options

app = typer.Typer(help="Make drafters: have the target write text, and count or train on it.")

Kind = Annotated[str, Option(help="The kind of head: eagle, block or medusa.")]
Folder = Annotated[Path, Option("--text", help="The folder of text shards.")]
States = Annotated[
    Path | None, Option("--keep-states", help="A folder for the target's states: 3.5 kB a token of SmolLM2-135M.")
]
Seed = Annotated[int, Option(help="The same seed and machine give the same result.")]


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
        from ..train.data import write_text

        provenance = {"command": "python -m specdemo train data", **made_by(loaded)}
        target = loaded.model, loaded.tokenizer, loaded.eos_ids
        sizes = {"rows": rows, "columns": columns, "seed": seed}
        more: dict[str, Any] = {**sizes, "states_folder": states, "progress": bar.update}
        held = write_text(*target, text, tokens, provenance, **more)
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
    from ..train.ngram import build_table

    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.ngram.safetensors"
    check_writable(path)
    provenance = {"command": "python -m specdemo train ngram", "preset": preset}
    try:
        build_table(text or [Path("text")], path, provenance, typer.echo)
    except ValueError as error:
        raise BadInput(str(error)) from error


@app.command()
def head(
    kind: Kind,
    tokens: Annotated[int, Option(min=1, help="How many tokens to read in all, repeats included.")],
    preset: PresetName = DEFAULT_PRESET,
    text: Folder = Path("text"),
    out: Annotated[Path | None, Option(help="The file of the head; by default in presets/weights.")] = None,
    rows: Annotated[int, Option(min=1, help="Rows of text in a step.")] = 8,
    places: Annotated[int, Option(min=1, help="Positions of a draft that are trained.")] = 4,
    rate: Annotated[float, Option(help="The highest learning rate of the matrices.")] = 2e-3,
    draft_vocab: Annotated[int, Option(min=1, help="How many tokens it can draft.")] = 8192,
    mlp: Annotated[int, Option(min=1, help="Width of its feed-forward part.")] = 1280,
    depth: Annotated[int, Option(min=1, help="Layers of a block head.")] = 1,
    layers: Annotated[str, Option(help="Layers of the target that the head reads, such as 8,20,29.")] = "",
    seed: Seed = 0,
    states: States = None,
    begin_with: Annotated[Path | None, Option(help="A trained head to go on from; it keeps its sizes.")] = None,
    device: Device = "auto",
) -> None:
    """Train a head on the text. Stop it when you like; run it again to go on."""
    from ..train.head import Plan, train_head

    kind_of(kind)
    if not 0 < rate < 1:
        raise BadInput("The rate must be between 0 and 1.")
    if kind != "block" and depth != 1:
        raise BadInput("Only block heads have several layers: leave out --depth.")
    if kind == "medusa" and layers:
        raise BadInput("A medusa head reads the target's last layer: leave out --layers.")
    state_layers = tuple(numbers(layers, int, "Layers")) if layers else ()
    plan = Plan(kind, tokens, rows, places, rate, draft_vocab, mlp, depth, state_layers, seed)
    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.{kind}.safetensors"
    check_writable(path)
    models = Models(preset=preset, device=device)
    with models.loaded(eager=True) as loaded, tqdm(total=tokens, unit=" tokens", unit_scale=True) as bar:
        provenance = {"command": "python -m specdemo train head", **made_by(loaded)}
        telling: dict[str, Any] = {"progress": bar.update, "log": bar.write}
        train_head(loaded.model, plan, text, path, provenance, states_folder=states, begin_with=begin_with, **telling)
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
    """Judge a head by the held-out part of the text, as `train head` does while it trains."""
    from ..train.head import judge

    chosen, kind_of_head = find_preset(preset), kind_of(kind)
    path = head or chosen.heads.get(kind)
    if not isinstance(path, Path):
        raise BadInput(f"The preset {preset} has no head of the kind {kind!r}; name a file with --head.")
    with Models(preset=preset, device=device).loaded(eager=True) as loaded:
        typer.echo(json.dumps(judge(loaded.model, kind_of_head, path, text, states, draft_vocab)))


@app.command()
def export(
    kind: Kind,
    out: Annotated[Path, Option(help="The folder that the head is written to.")],
    preset: PresetName = DEFAULT_PRESET,
    head: Annotated[Path | None, Option(help="A trained head; the preset's by default.")] = None,
    target_name: Annotated[
        str | None, Option(help="The target's name on the hub, for whoever loads the head; the preset's by default.")
    ] = None,
    format_: Annotated[str, Option("--format", help="The format: speculators.")] = "speculators",
) -> None:
    """Write a head as others publish theirs: in the format of the library speculators, which vLLM serves."""
    if format_ != "speculators":
        raise BadInput(f"There is no format {format_!r} to write; speculators is one.")
    chosen, kind_of_head = find_preset(preset), kind_of(kind)
    with Models(preset=preset, device="cpu").loaded(eager=True) as loaded:
        import torch

        from ..drafters.heads.files import load_head_for
        from ..train.export import export_head

        path = head or loaded.parts.head_files.get(kind)
        if path is None or not path.is_file():
            raise BadInput(
                f"The preset {preset} has no head of the kind {kind!r} that was trained here; name its file."
            )
        embeddings = loaded.parts.embeddings
        assert embeddings is not None, "a model on the CPU is not offloaded"
        trained = load_head_for(embeddings[1], kind_of_head, path)
        target = target_name or str(chosen.target), type(loaded.model).__name__
        export_head(trained, embeddings, target, out, torch.bfloat16)
    typer.echo(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB.")


@app.command()
def chargpt(
    out: Annotated[Path, Option(help="The folder that model, tokenizer and card are written to.")],
    layers: Annotated[int, Option(help="Layers of the model.")] = 4,
    width: Annotated[int, Option(help="Its hidden size, a multiple of the heads.")] = 64,
    heads: Annotated[int, Option(help="Attention heads of a layer.")] = 4,
    context: Annotated[int, Option(help="Characters it can read at once.")] = 256,
    batch: Annotated[int, Option(help="Windows of text in a step.")] = 2,
    steps: Annotated[int, Option(help="Steps of the training.")] = 4000,
    rate: Annotated[float, Option(help="The highest learning rate.")] = 4e-3,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a character-level GPT on Shakespeare's plays."""
    import torch
    import transformers

    from ..system.hardware import choose_device, choose_dtype, compute_dtype, device_name
    from ..train.chargpt import Recipe, train
    from ..train.shakespeare import encode, read_plays, text_facts

    recipe = Recipe(layers, width, heads, context, batch, steps, rate, seed)
    chosen = choose_device(device)
    fast = compute_dtype(choose_dtype(None, chosen), chosen)
    dtype = fast if fast == torch.bfloat16 else torch.float32  # float16 would need its losses scaled
    text, held_out = read_plays()
    facts = {
        "command": "python -m specdemo train chargpt",
        "text": text_facts(text, held_out),
        "products": str(dtype).removeprefix("torch."),
        "device": device_name(chosen),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with tqdm(total=steps, unit=" steps") as bar:

        def progress(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)

        card = train(recipe, encode(text), encode(held_out), out, facts, chosen, dtype, progress)
    typer.echo(f"{out}: {card['parameters']:,} parameters, held-out loss {card['held_out_loss']} nats per character.")


@app.command()
def bigram(out: Annotated[Path, Option(help="The file of the table.")]) -> None:
    """Count which character follows which in Shakespeare's plays, with Laplace's rule."""
    from ..train.ngram import build_bigrams
    from ..train.shakespeare import ALPHABET, encode, read_plays, text_facts

    check_writable(out)
    text, held_out = read_plays()
    facts = {"command": "python -m specdemo train bigram", "text": text_facts(text, held_out)}
    build_bigrams(encode(text), len(ALPHABET) + 1, out, facts)
    typer.echo(f"{out}: from {len(text):,} characters.")


def kind_of(name: str) -> Any:
    from ..train.head import KINDS

    if name not in KINDS:
        raise BadInput(f"There is no head of the kind {name!r}. Choose one of: {', '.join(KINDS)}.")
    return KINDS[name]


def made_by(loaded: Any) -> dict[str, Any]:
    return {"preset": loaded.preset.name, "weights": loaded.weights, **loaded.environment()}

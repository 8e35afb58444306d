"""`python -m specdemo train ...`: how the shipped drafters are made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import Device, DType, check_writable
from ..presets import PRESETS, find_preset
from ..types import BadInput

app = typer.Typer(help="Make drafters: text in the target's own voice, and what is counted or trained on it.")

PresetName = Annotated[str, typer.Option("--preset", help="Whose text, whose drafter.")]
Folder = Annotated[Path, typer.Option("--text", help="The folder of text shards.")]
States = Annotated[
    Path | None, typer.Option("--keep-states", help="A folder for the target's states: 3.5 kB a token of SmolLM2-135M.")
]


@app.command()
def data(
    tokens: Annotated[int, typer.Option("--tokens", help="How much text the folder should hold in the end.")],
    preset: PresetName = "smollm2-135m",
    text: Folder = Path("text"),
    rows: Annotated[int, typer.Option("--rows", help="Conversations written side by side.")] = 192,
    columns: Annotated[int, typer.Option("--columns", help="Tokens a row holds.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same machine: same text.")] = 0,
    states: States = None,
    dtype: DType = "auto",
    device: Device = "auto",
) -> None:
    """Let the target write prompts and answer them. Stop it when you like; run it again to go on."""
    from tqdm import tqdm

    from ..models import load
    from .data import write_text

    if min(tokens, rows, columns) < 1:
        raise BadInput("Tokens, rows and columns must be at least 1.")
    chosen = find_preset(preset)
    loaded = load(chosen, dtype, device, eager=True)
    with tqdm(total=tokens, unit=" tokens", unit_scale=True) as bar:
        provenance = {"command": "python -m specdemo train data", **made_by(loaded)}
        held = write_text(
            loaded.model,
            loaded.tokenizer,
            loaded.eos_ids,
            text,
            tokens,
            provenance,
            rows=rows,
            columns=columns,
            seed=seed,
            kept=states,
            tick=bar.update,
        )
    typer.echo(f"{text} holds {held:,} tokens.")


@app.command()
def ngram(
    preset: PresetName = "smollm2-135m",
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="A folder of text shards, `text` by default; more may be given.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The table; below presets/weights by default.")] = None,
) -> None:
    """Count the n-gram table of a preset from its text."""
    from .ngram import build_table

    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.ngram.safetensors"
    check_writable(path)
    try:
        build_table(
            text or [Path("text")], path, {"command": "python -m specdemo train ngram", "preset": preset}, typer.echo
        )
    except ValueError as error:
        raise BadInput(str(error)) from error


@app.command()
def head(
    kind: Annotated[str, typer.Option("--kind", help="eagle or block.")],
    tokens: Annotated[int, typer.Option("--tokens", help="How many tokens to read in all, repeats included.")],
    preset: PresetName = "smollm2-135m",
    text: Folder = Path("text"),
    out: Annotated[Path | None, typer.Option("--out", help="The head; below presets/weights by default.")] = None,
    rows: Annotated[int, typer.Option("--rows", help="Rows of text in a step.")] = 8,
    places: Annotated[int, typer.Option("--places", help="Places of a draft that are trained.")] = 4,
    rate: Annotated[float, typer.Option("--rate", help="The highest learning rate of the matrices.")] = 2e-3,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", help="How many tokens it can draft.")] = 8192,
    mlp: Annotated[int, typer.Option("--mlp", help="Width of its feed-forward part.")] = 1280,
    depth: Annotated[int, typer.Option("--depth", help="Layers of a block head.")] = 1,
    layers: Annotated[str, typer.Option("--layers", help="Of the target, read by the head: as in 8,20,29.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same machine: same head.")] = 0,
    states: States = None,
    begin_with: Annotated[
        Path | None, typer.Option("--begin-with", help="A trained head to go on from; it keeps its sizes.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a head on the text. Stop it when you like; run it again to go on."""
    from tqdm import tqdm

    from ..models import load
    from .head import Plan, train_head

    kind_of(kind)
    if min(tokens, rows, places, draft_vocab, mlp, depth) < 1 or not 0 < rate < 1:
        raise BadInput("Every size must be at least 1, and the rate between 0 and 1.")
    if kind == "eagle" and depth != 1:
        raise BadInput("An eagle head has one layer: leave out --depth.")
    try:
        state_layers = tuple(int(layer) for layer in layers.split(",")) if layers else ()
    except ValueError as error:
        raise BadInput(f"Layers are whole numbers, separated by commas, not {layers!r}.") from error
    plan = Plan(kind, tokens, rows, places, rate, draft_vocab, mlp, depth, state_layers, seed)
    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.{kind}.safetensors"
    check_writable(path)
    loaded = load(find_preset(preset), "auto", device, eager=True)
    provenance = {"command": "python -m specdemo train head", **made_by(loaded)}
    with tqdm(total=tokens, unit=" tokens", unit_scale=True) as bar:
        train_head(
            loaded.model,
            plan,
            text,
            path,
            provenance,
            kept=states,
            begin_with=begin_with,
            tick=bar.update,
            say=bar.write,
        )
    typer.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB.")


@app.command()
def validate(
    kind: Annotated[str, typer.Option("--kind", help="eagle or block.")],
    preset: PresetName = "smollm2-135m",
    head: Annotated[Path | None, typer.Option("--head", help="A trained head; the preset's by default.")] = None,
    text: Folder = Path("text"),
    states: States = None,
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", help="As if an eagle head drafted so many tokens; its own if 0.")
    ] = 0,
    device: Device = "auto",
) -> None:
    """Judge a head by the held-out part of the text, as `train head` does while it trains."""
    import json

    from ..models import load
    from .head import judge

    chosen, kind_of_head = find_preset(preset), kind_of(kind)
    path = head or chosen.heads.get(kind)
    if path is None:
        raise BadInput(f"The preset {preset} has no head of the kind {kind!r}; name a file with --head.")
    if draft_vocab < 0:
        raise BadInput("The draft vocabulary must have at least one token, or be 0 for the head's own.")
    loaded = load(chosen, "auto", device, eager=True)
    typer.echo(json.dumps(judge(loaded.model, kind_of_head, path, text, states, draft_vocab)))


@app.command()
def chargpt(
    out: Annotated[Path, typer.Option("--out", help="The folder that model, tokenizer and card are written to.")],
    layers: Annotated[int, typer.Option("--layers", help="Layers of the model.")] = 4,
    width: Annotated[int, typer.Option("--width", help="Its hidden size, a multiple of the heads.")] = 64,
    heads: Annotated[int, typer.Option("--heads", help="Attention heads of a layer.")] = 4,
    context: Annotated[int, typer.Option("--context", help="Characters it can read at once.")] = 256,
    batch: Annotated[int, typer.Option("--batch", help="Windows of so many characters in a step.")] = 2,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the training.")] = 4000,
    rate: Annotated[float, typer.Option("--rate", help="The highest learning rate.")] = 4e-3,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same machine: same model.")] = 0,
    device: Device = "auto",
) -> None:
    """Train a character-level GPT on Shakespeare's plays. Stop it when you like; run it again to go on."""
    import torch
    import transformers
    from tqdm import tqdm

    from ..hardware import choose_device, choose_dtype, device_name
    from .chargpt import Recipe, train
    from .shakespeare import encode, read_plays, text_facts

    recipe = Recipe(layers, width, heads, context, batch, steps, rate, seed)
    chosen = choose_device(device)
    fast = choose_dtype(None, chosen)
    dtype = fast if fast == torch.bfloat16 else torch.float32  # float16 would need its losses scaled
    text, held_out = read_plays(lambda _, words: None)
    facts = {
        "command": "python -m specdemo train chargpt",
        "text": text_facts(text, held_out),
        "products": str(dtype).removeprefix("torch."),
        "device": device_name(chosen),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with tqdm(total=steps, unit=" steps") as bar:

        def tick(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)

        card = train(recipe, encode(text), encode(held_out), out, facts, chosen, dtype, tick)
    typer.echo(f"{out}: {card['parameters']:,} parameters, held-out loss {card['held_out_loss']} nats per character.")


@app.command()
def bigram(
    out: Annotated[Path, typer.Option("--out", help="The table.")],
) -> None:
    """Count which character follows which in Shakespeare's plays, with Laplace's rule."""
    from .bigram import build_bigrams
    from .shakespeare import ALPHABET, encode, read_plays, text_facts

    check_writable(out)
    text, held_out = read_plays(lambda _, words: None)
    facts = {"command": "python -m specdemo train bigram", "text": text_facts(text, held_out)}
    build_bigrams(encode(text), len(ALPHABET) + 1, out, facts)
    typer.echo(f"{out}: from {len(text):,} characters.")


def kind_of(name: str) -> Any:
    """The class of a kind of head."""
    from .head import KINDS

    if name not in KINDS:
        raise BadInput(f"There is no head of the kind {name!r}. Choose one of: {', '.join(KINDS)}.")
    return KINDS[name]


def made_by(loaded: Any) -> dict[str, Any]:
    """Where text came from: preset, weights, machine and versions."""
    return {"preset": loaded.preset.name, "weights": loaded.weights, **loaded.environment()}

"""`python -m specdemo train ...`: how the shipped drafters are made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..presets import PRESETS, find_preset
from ..types import BadInput

app = typer.Typer(help="Make drafters: text in the target's own voice, and what is counted or trained on it.")

PresetName = Annotated[str, typer.Option("--preset", help="Whose text, whose drafter.")]
Folder = Annotated[Path, typer.Option("--text", help="The folder of text shards.")]


@app.command()
def data(
    tokens: Annotated[int, typer.Option("--tokens", help="How much text the folder should hold in the end.")],
    preset: PresetName = "smollm2-135m",
    text: Folder = Path("text"),
    rows: Annotated[int, typer.Option("--rows", help="Conversations written side by side.")] = 192,
    columns: Annotated[int, typer.Option("--columns", help="Tokens a row holds.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same machine: same text.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Let the target write prompts and answer them. Stop it when you like; run it again to go on."""
    from tqdm import tqdm

    from ..models import load
    from .data import write_text

    if min(tokens, rows, columns) < 1:
        raise BadInput("Tokens, rows and columns must be at least 1.")
    chosen = find_preset(preset)
    loaded = load(chosen, dtype, device)
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
            tick=bar.update,
        )
    typer.echo(f"{text} holds {held:,} tokens.")


@app.command()
def ngram(
    preset: PresetName = "smollm2-135m",
    text: Folder = Path("text"),
    out: Annotated[Path | None, typer.Option("--out", help="The table; below presets/weights by default.")] = None,
) -> None:
    """Count the n-gram table of a preset from its text."""
    from .ngram import build_table

    path = out or PRESETS / "weights" / f"{find_preset(preset).name}.ngram.safetensors"
    try:
        build_table(text, path, {"command": "python -m specdemo train ngram", "preset": preset}, typer.echo)
    except ValueError as error:
        raise BadInput(str(error)) from error


def made_by(loaded: Any) -> dict[str, Any]:
    """Where text came from: preset, weights, machine and versions."""
    return {"preset": loaded.preset.name, "weights": loaded.weights, **loaded.environment()}

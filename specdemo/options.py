"""The options that several commands share; what only one group of commands has stands with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .types import BadInput

PresetName = Annotated[str, typer.Option("--preset", help="Which models; see `presets`.")]
DrafterName = Annotated[
    str | None, typer.Option("--drafter", help="Who drafts, the preset's own by default; `none` is the target alone.")
]
Drafters = Annotated[str, typer.Option("--drafters", help="Separated by commas; all that can run by default.")]
PromptFile = Annotated[Path, typer.Option("--prompts", help="JSON lines of id, category and prompt.")]
Temperatures = Annotated[str, typer.Option("--temperature", help="Separated by commas.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Sample from the likeliest tokens that reach this mass; 1 is off.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Of each text.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Same seed, settings and machine: same tokens, unless K is auto and T > 0.")
]
Repeats = Annotated[int, typer.Option("--repeats", help="How often everything is run.")]
DType = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16 (on a CPU the weights only).")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Eager = Annotated[bool, typer.Option("--eager", help="Run the models by transformers' own forward.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")]


def check_writable(*files: Path | None) -> None:
    """Refuse, before any work is done, files that could not be written.

    Raises:
        BadInput: naming the folder that is not there or the file.
    """
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise BadInput(f"There is no folder {folder} to write {file.name} into.")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise BadInput(f"{file} cannot be written. Choose another file.")

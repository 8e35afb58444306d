"""The options that several commands share; what only one group of commands has stands with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
DType = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Eager = Annotated[bool, typer.Option("--eager", help="Run the models by transformers' own forward.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")]

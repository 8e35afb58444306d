"""`python -m specdemo export`: a head for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..errors import BadInput
from ..formats import byte_size
from ..models.presets import DEFAULT_PRESET, find_preset
from .models import Models
from .options import PresetName

Kind = Annotated[str, Option(help="The kind of head: eagle, block or medusa.")]


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

        from ..drafters.heads.export import export_head
        from ..drafters.heads.files import load_head
        from ..engines.quantized import widened

        path = head or loaded.parts.head_files.get(kind)
        if path is None or not path.is_file():
            raise BadInput(
                f"The preset {preset} has no head of the kind {kind!r} that was trained here; name its file."
            )
        assert loaded.parts.embeddings is not None, "a model on the CPU is not offloaded"
        first, last = map(widened, loaded.parts.embeddings)
        trained = load_head(kind_of_head, path, last)
        target = target_name or str(chosen.target), type(loaded.model).__name__
        export_head(trained, (first, last), target, out, torch.bfloat16)
    typer.echo(f"{out}: {byte_size(sum(file.stat().st_size for file in out.iterdir()))}.")


def kind_of(name: str) -> Any:
    """The class of a kind of head that is trained here."""
    from ..drafters.heads.medusa import MedusaHead
    from ..drafters.heads.networks import BlockHead, EagleHead

    kinds: dict[str, Any] = {"eagle": EagleHead, "block": BlockHead, "medusa": MedusaHead}
    if name not in kinds:
        raise BadInput(f"There is no head of the kind {name!r}. Choose one of: {', '.join(kinds)}.")
    return kinds[name]

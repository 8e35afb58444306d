"""Recognises the format of a published head by its configuration. This imports no torch.

========================================  ======  ===========================================================
format                                    kind    recognised by
========================================  ======  ===========================================================
EAGLE-3 (SafeAILab, SpecForge, AngelSlim)  eagle   `draft_vocab_size`, or an architecture that names Eagle3
speculators eagle3                        eagle   `speculators_model_type`
z-lab DFlash                              block   `dflash_config`
DSpark                                    block   `projector_type` in it, or `markov_rank` beside it
speculators dflash, dspark                block   `speculators_model_type`
Medusa                                    medusa  `medusa_num_heads`, or a model type or architecture of that name
========================================  ======  ===========================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...types import BadInput

CONFIG = "config.json"
Config = Mapping[str, Any]
SPECULATORS = {"eagle3": "eagle", "dflash": "block", "dspark": "block"}  # the types of heads that can be read


@dataclass(frozen=True, slots=True)
class Format:
    """A format of published heads: its name, the `kind` of head that reads it, and the target that the head names.

    `method` is eagle3, dflash, dspark or medusa. `nested` is true for the formats of the library speculators, which
    name layers by transformers' index of hidden states and keep the sizes of the layers in a table of their own.
    """

    name: str
    kind: str
    method: str
    nested: bool
    target: str | None


def head_name(folder: Path) -> str:
    """What messages call the head in a folder, which may be one of the hub's cache."""
    in_cache = folder.parent.name == "snapshots"
    name = folder.parent.parent.name.removeprefix("models--").replace("--", "/") if in_cache else folder.name
    return f"The head {name}"


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in the folder of a head.

    Raises:
        BadInput: there is none, or it cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise BadInput(f"There is no head in the folder {folder}: it has no {CONFIG}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"The file {path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise BadInput(f"The file {path} is not the configuration of a model.")
    return config


def format_of(config: Config, name: str) -> Format:
    """The format of a head, from its configuration; `name` is what messages call it.

    Raises:
        BadInput: it is not a format that can be read.
    """
    library = config.get("speculators_model_type")
    if library is not None:
        if library not in SPECULATORS:
            known = ", ".join(SPECULATORS)
            raise BadInput(f"{name} is of the speculators kind {library!r}, which is not read here: {known} are.")
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        target = verifier.get("name_or_path")
        return Format(f"speculators {library}", SPECULATORS[library], library, True, target)
    architectures = " ".join(map(str, config.get("architectures") or ()))
    block = config.get("dflash_config")
    target = config.get("target_model_name_or_path") or config.get("base_model_name_or_path")
    if block is not None or "DFlash" in architectures or "DSpark" in architectures:
        projector = (block or {}).get("projector_type") or "dflash"
        if "DFlash2" in architectures or "conv_kernel_size" in (block or {}) or projector not in ("dflash", "dspark"):
            kind = "dflash2" if projector == "dflash" else projector
            raise BadInput(f"{name} is of the kind {kind!r}, which is not read here: DFlash and DSpark are.")
        spark = projector == "dspark" or "DSpark" in architectures or "markov_rank" in config
        return Format("DSpark" if spark else "DFlash", "block", "dspark" if spark else "dflash", False, target)
    if "draft_vocab_size" in config or "eagle3" in architectures.lower():
        return Format("EAGLE-3", "eagle", "eagle3", False, target)
    if "medusa_num_heads" in config or "medusa" in f"{architectures} {config.get('model_type')}".lower():
        return Format("Medusa", "medusa", "medusa", False, target)
    said = architectures or config.get("model_type") or "nothing"
    raise BadInput(
        f"{name} is no head that can be read here: its {CONFIG} is not one of EAGLE-3, DFlash, DSpark, Medusa or the "
        f"library speculators; it names {said}."
    )

"""Recognises the format of a published head by its configuration. This imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...types import BadInput

CONFIG = "config.json"
Config = Mapping[str, Any]


class Format(NamedTuple):
    """A format of published heads.

    Attributes:
        kind: the kind of head that reads it.
        method: eagle3, peagle, dflash, dflash2, dspark or medusa.
        layers: the setting that names the target's layers that the head reads.
        ahead: how much larger its numbers are than those of the layers. A place in transformers' `hidden_states` is 1
            ahead, since the embeddings come first.
        library: whether it is of the library speculators, which keeps the sizes of the decoder layers in a table.
        target: the target that the head names.
    """

    name: str
    kind: str
    method: str
    layers: str = ""
    ahead: int = 0
    library: bool = False
    target: str | None = None


FORMATS = (
    Format("speculators eagle3", "eagle", "eagle3", "eagle_aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators peagle", "p-eagle", "peagle", "eagle_aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dflash", "block", "dflash", "aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dflash2", "block", "dflash2", "aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dspark", "block", "dspark", "aux_hidden_state_layer_ids", 1, library=True),
    Format("DFlash", "block", "dflash", "target_layer_ids"),  # of z-lab
    Format("DFlash 2", "block", "dflash2", "target_layer_ids"),
    Format("DSpark", "block", "dspark", "target_layer_ids"),
    Format("DFlash of DeepSpec", "block", "dspark", "target_layer_ids"),  # a DSpark without its Markov head
    Format("EAGLE-3", "eagle", "eagle3", "eagle_aux_hidden_state_layer_ids", 1),  # of SafeAILab, SpecForge, AngelSlim
    Format("P-EAGLE", "p-eagle", "peagle", "eagle_aux_hidden_state_layer_ids", 1),  # of AWS, SpecForge
    Format("EAGLE-3 of DeepSpec", "eagle", "eagle3", "target_layer_ids"),
    Format("Medusa", "medusa", "medusa"),
)
TABLES = "dflash_config", "transformer_layer_config", "speculators_config", "eagle_config"  # settings with settings
MASKS = "mask_token_id", "pard_token", "ptd_token_id"  # the settings of P-EAGLE that name its mask token, as in vLLM


def head_name(folder: Path) -> str:
    """What messages call the head in a folder, which may be one of the hub's cache."""
    in_cache = folder.parent.name == "snapshots"
    name = folder.parent.parent.name.removeprefix("models--").replace("--", "/") if in_cache else folder.name
    return f"The head {name}"


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in the folder of a head."""
    path = folder / CONFIG
    if not path.is_file():
        raise BadInput(f"There is no head in the folder {folder}: it has no {CONFIG}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"The file {path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise BadInput(f"The file {path} is not the configuration of a model.")
    for name, kind in {**dict.fromkeys(TABLES, dict), "architectures": list}.items():
        if not isinstance(config.get(name) or kind(), kind):
            raise BadInput(f"The file {path} has settings that are not read here: {name} is {config[name]!r}.")
    return config


def format_of(config: Config, name: str) -> Format:
    """The format of a head, from its configuration; `name` is what messages call it."""
    by_name = {found.name: found for found in FORMATS}
    if (method := config.get("speculators_model_type")) is not None:
        if f"speculators {method}" not in by_name:
            known = ", ".join(found.method for found in FORMATS if found.library)
            raise BadInput(f"{name} is of the speculators kind {method!r}, which is not read here: {known} are.")
        verifier = (config.get("speculators_config") or {}).get("verifier")
        target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return by_name[f"speculators {method}"]._replace(target=target)
    architectures = " ".join(map(str, config.get("architectures") or ()))
    block, found = config.get("dflash_config"), None
    if block is not None or "DFlash" in architectures or "DSpark" in architectures:
        projector = (block or {}).get("projector_type") or "dflash"
        second = "DFlash2" in architectures or "conv_kernel_size" in (block or {})
        if projector not in ("dflash", "dspark") or (second and projector != "dflash"):
            raise BadInput(
                f"{name} is of the kind {projector!r}, which is not read here: DFlash, DFlash 2 and DSpark are."
            )
        spark = projector == "dspark" or "DSpark" in architectures or "markov_rank" in config
        spark_name = "DFlash of DeepSpec" if config.get("markov_rank") == 0 else "DSpark"
        found = by_name["DFlash 2" if second else spark_name if spark else "DFlash"]
    elif "draft_vocab_size" in config or re.search("eagle3|peagle", architectures.lower()):
        masks = "peagle" in architectures.lower() or any(config.get(key) is not None for key in MASKS)
        found = by_name["P-EAGLE" if masks else "EAGLE-3 of DeepSpec" if "target_layer_ids" in config else "EAGLE-3"]
    elif "medusa_num_heads" in config or "medusa" in f"{architectures} {config.get('model_type')}".lower():
        found = by_name["Medusa"]
    if found is None:
        said = architectures or config.get("model_type") or "nothing"
        raise BadInput(
            f"{name} is no head that can be read here: its {CONFIG} is not one of EAGLE-3, P-EAGLE, DFlash, "
            f"DFlash 2, DSpark, Medusa or the library speculators; it names {said}."
        )
    return found._replace(target=config.get("target_model_name_or_path") or config.get("base_model_name_or_path"))

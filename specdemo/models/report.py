"""Says what models that a person names will need, before their weights are fetched, and saves them as a preset."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..drafters.draft_model import LONGER
from ..engines.choose import is_exact
from ..engines.families import is_hybrid
from ..errors import BadInput
from ..formats import byte_size
from ..system.hardware import free_memory
from .checkpoint import Checkpoint
from .configuration import embedding_rows
from .loaded import LANES
from .preset_models import find_models
from .presets import PRESETS, Preset
from .published_heads import head_facts
from .sizes import laid_out_bytes, plan, text_bytes
from .source import Source
from .store import LoadError
from .translation import BY_TEXT, differing_token

ESTIMATE = (
    "Estimated from the sizes: a guess by {name} costs about {share:.0%} of a pass of the target, so a round with a "
    "draft of 4 pays if it writes {tokens:.1f} tokens or more."
)
RUNNING_STATES = (
    "Some of its layers keep a running state, which cannot be rolled back: after a rejected guess it reads the "
    "accepted tokens again."
)
ON_DISK = (
    "Memory cannot hold the target: {size} of its weights stay on the disk and are read for every pass. That is slow, "
    "and the best case for speculation, since a pass takes as long for several tokens as for one."
)


def report_on(preset: Preset, dtype: str | None = None, device: str | None = None) -> Iterator[str]:
    """What the models of a preset need, sentence by sentence. Configurations and tokenizers are fetched, no weights.

    Raises:
        LoadError: a model does not exist or cannot be used here: one sentence says why. After the last sentence: main
            memory cannot hold them.
    """
    models, heads = find_models(preset, dtype, device, fetch=False), [*_heads_of(preset)]
    names = [str(source) for source in (preset.target, preset.draft_model) if source is not None]
    weights = [laid_out_bytes(found) for found in models]
    caches = [text_bytes(found, lanes) for found, lanes in zip(models, (LANES, 1), strict=False)]
    unlike = None
    if len(models) > 1:
        unlike = differing_token(models[0].vocabulary, models[1].vocabulary, embedding_rows(models[1].config))
    if unlike:  # the same text may have more tokens for it
        caches[1] *= LONGER
    needed, free, on_disk = sum(weights + caches) + sum(size or 0 for _, size, _ in heads), free_memory(), None
    if models[0].device.type == "cpu" and needed > free:
        on_disk = _bytes_on_disk(models)
        needed -= on_disk or 0

    for found, name, weight_bytes, cache_bytes in zip(models, names, weights, caches, strict=True):
        engine = "eager" if found is models[0] and on_disk is not None else found.engine
        yield _sentence(found, name, weight_bytes, cache_bytes, engine)
    if models[0].choice:
        yield models[0].choice
    if len(models) > 1:
        yield f"{BY_TEXT} {unlike}" if unlike else "The tokenizers match."
    yield from (sentence for _, _, sentence in heads)
    drafting = [*zip(names[1:], weights[1:], strict=True), *((name, size) for name, size, _ in heads)]
    for name, size in drafting:  # a pass takes about as long as its weights take to be read
        if size and weights[0]:
            share = size / weights[0]
            yield ESTIMATE.format(name=name, share=share, tokens=1 + 4 * share)
    if on_disk:
        yield ON_DISK.format(size=byte_size(on_disk))
    who = "It needs" if len(models) + len(heads) == 1 else "Together they need"
    yield f"{who} {byte_size(needed)} of memory; {byte_size(free)} are free."
    if models[0].device.type == "cpu" and needed > free:
        raise LoadError(
            f"{' and '.join(names)} would take {byte_size(needed)} of memory, but {byte_size(free)} are free: "
            "choose a smaller model."
        )


def _sentence(found: Checkpoint, name: str, weights: int, caches: int, engine: str) -> str:
    size = "nothing to download"
    if found.download != 0:
        size = f"downloads {'an unknown size' if found.download is None else f'up to {byte_size(found.download)}'}"
    exact = is_exact(engine, found.config, found.dtype, found.device)
    again = f" {RUNNING_STATES}" if is_hybrid(found.config) else ""
    return (
        f"{name}: {size}; {byte_size(weights)} of memory for the weights, {byte_size(caches)} for caches; "
        f"engine {engine}, {'exact to the bit' if exact else 'not exact to the bit'}; "
        f"licence {found.licence or 'not stated'}"
        f"{'; gated: its licence must be accepted on the hub' if found.gated else ''}.{again}"
    )


def _heads_of(preset: Preset) -> Iterator[tuple[str, int | None, str]]:
    """See `head_facts`, of the published heads. The preset can do without those that no person asked for."""
    for kind, head in preset.heads.items():
        if not isinstance(head, Path):
            try:
                yield head_facts(head)
            except (BadInput, LoadError):
                if kind in preset.asked_heads:
                    raise


def _bytes_on_disk(models: list[Checkpoint]) -> int | None:
    """Bytes of the target's weights that stay on the disk where memory has no room for them; None if it cannot run so.

    A GGUF file has to be in memory as a whole to be converted.
    """
    if any(found.header is not None for found in models):
        return None
    try:
        return plan(models).on_disk
    except LoadError:
        return None


def save_preset(preset: Preset, name: str, folder: Path = PRESETS) -> Path:
    """Write models that were given by name to a preset file, for the menu and `--preset`."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise BadInput(f"A preset is named by letters, digits, dots and dashes, not {name!r}.")
    path = folder / f"{name}.toml"
    sources: dict[str, Source | None] = {"target": preset.target, "draft_model": preset.draft_model}
    sources |= {f"heads.{kind}": head for kind, head in preset.heads.items() if not isinstance(head, Path)}
    lines = [f"title = {_toml(preset.title)}", f"description = {_toml(preset.description)}"]
    for table, source in sources.items():
        if source is not None:
            lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in source.table().items())]
    lines += ["", "[defaults]", f"drafter = {_toml(preset.defaults.drafter)}"]
    lines += ["tree = true"] if preset.defaults.tree else []
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError as error:
        raise BadInput(f"There is a preset called {name} already: choose another name.") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {os.strerror(error.errno or 0)}.") from error
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(field)}' for key, field in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # a string or a number of JSON is one of TOML

"""Reads and writes heads.

The file of a head that is trained here has its weights in bfloat16, its sizes, and a card that says how it was made. A
published head is a folder, see `published`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...engines.quantized import Weight
from ...errors import BadInput
from ...formats import reason
from .networks import Head
from .published import PublishedHead
from .published_shape import TargetSizes

H = TypeVar("H", bound=Head)


def save_head(head: Head, path: Path, card: dict[str, Any]) -> None:
    """Write a head, with its card in the file and in a JSON file of the same name."""
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.to(torch.int32)
        for name, tensor in head.state_dict().items()
    }
    facts = {"kind": head.kind, "shape": json.dumps(asdict(head.shape)), "card": json.dumps(card)}
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=facts)
    partial.replace(path)
    path.with_suffix(".json").write_text(json.dumps(card, indent=2) + "\n")


def load_head(kind: type[H], path: Path, output: Weight | None = None) -> H:
    """Read a head that `save_head` wrote, in float32, for the target with this output layer [V, hidden], if given."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if facts.get("kind") != kind.kind:
                raise BadInput(f"{path.name} is not a head of the kind {kind.kind}.")
            fields = json.loads(facts["shape"])
            tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
            head = kind(kind.shape_from({**fields, **tuples}))
            head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"The head {path.name} cannot be read: {reason(error)}.") from error
    ours = head.shape.vocab_size, head.shape.hidden
    if output is not None and ours != tuple(output.shape):
        raise BadInput(
            f"The head {path.name} was trained for a target of {ours[0]} tokens and hidden size {ours[1]}, "
            f"but this one has {output.shape[0]} and {output.shape[1]}."
        )
    return head


def load_published(folder: Path, kind: type[H], target: TargetSizes, weights: bool = True) -> H:
    """Read the head in a folder. Without `weights` only the names and shapes of its tensors are read, and the table of
    tokens, to check them."""
    published = PublishedHead(folder, kind.kind, target).open(weights)
    head: H = kind.of_published(published)
    published.check_empty()
    return head

"""The target's hidden states of the text it wrote: what the heads are trained on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.engines.modules import layers_at, outputs_of
from specdemo.errors import BadInput

BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class Text:
    """Some rows of a shard as a head reads them.

    `tokens` and `roles` [rows, columns]; `begin` and `place` [rows, columns], the column where each token's
    conversation begins and the token's position in it; `embedded` [rows, columns, hidden]; `states`
    [rows, columns, layers * hidden].
    """

    tokens: Tensor
    roles: Tensor
    begin: Tensor
    place: Tensor
    embedded: Tensor
    states: Tensor


def default_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The layers that a head reads by default: a low, a middle and the last one (EAGLE-3)."""
    layers = model.config.get_text_config().num_hidden_layers
    return round(0.28 * layers), round(0.67 * layers), layers - 1


def states_path(folder: Path, shard: Path, layers: tuple[int, ...]) -> Path:
    return folder / f"{shard.stem}.{'-'.join(map(str, layers))}.states"


def save_states(states: Tensor, tokens: Tensor, path: Path) -> None:
    """Write the hidden states [rows, columns, layers * hidden] of tokens [rows, columns] to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"states": states}, path.with_suffix(".partial"), metadata={"text": _digest(tokens)})
    path.with_suffix(".partial").replace(path)


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


class Shard:
    """A shard of text, and the target's states of its rows.

    With a `states_folder` they are computed once and then read from there (3.5 KB per token for three layers of
    SmolLM2-135M). Without it they are computed each time. What reads some of the default layers shares their file.

    Raises:
        BadInput: the states in the folder are those of other text.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], path: Path, states_folder: Path | None) -> None:
        self.model, self.layers = model, layers
        self.block = load_file(path)
        self.rows = len(self.block["tokens"])
        common = default_layers(model)
        self._kept_layers = common if set(layers) <= set(common) else layers
        self._kept = states_path(states_folder, path, self._kept_layers) if states_folder else None
        if self._kept and self._kept.exists():
            with safe_open(self._kept, framework="pt") as file:
                if (file.metadata() or {}).get("text") != _digest(self.block["tokens"]):
                    raise BadInput(f"{self._kept} holds the states of other text. Remove it or choose another folder.")

    def read(self, rows: Tensor) -> Text:
        """The text in these rows, on the model's device."""
        device = self.model.device
        tokens, roles = self.block["tokens"][rows].long().to(device), self.block["roles"][rows].to(device)
        begin, place = (part.to(device) for part in conversations(self.block["starts"][rows]))
        embedded = self.model.get_input_embeddings().weight.detach()[tokens]
        return Text(tokens, roles, begin, place, embedded, self._states(rows).to(device))

    def _states(self, rows: Tensor) -> Tensor:
        if self._kept is None:
            return self._compute(rows, self.layers)
        if not self._kept.exists():
            parts = [self._compute(part, self._kept_layers).cpu() for part in torch.arange(self.rows).split(BATCH_ROWS)]
            save_states(torch.cat(parts), self.block["tokens"], self._kept)
        with safe_open(self._kept, framework="pt") as file:
            stored = file.get_slice("states")
            kept = torch.stack([stored[int(row)] for row in rows]).chunk(len(self._kept_layers), -1)
            return torch.cat([kept[self._kept_layers.index(layer)] for layer in self.layers], -1)

    def _compute(self, rows: Tensor, layers: tuple[int, ...]) -> Tensor:
        return read_states(self.model, layers, self.block["tokens"][rows], self.block["starts"][rows])


def conversations(starts: Tensor) -> tuple[Tensor, Tensor]:
    """The column where each token's conversation begins, and its position in it, from `starts` bool [rows, columns]."""
    place = torch.arange(starts.shape[1]).expand_as(starts)
    begin = torch.where(starts, place, 0).cummax(1).values
    return begin, place - begin


def same_conversation(begin: Tensor) -> Tensor:
    """Whether the token of the second axis sees that of the third, [rows, columns, columns]."""
    columns = begin.shape[1]
    causal = torch.ones(columns, columns, dtype=torch.bool, device=begin.device).tril()
    return causal & (begin[:, :, None] == begin[:, None, :])


@torch.inference_mode()
def read_states(model: PreTrainedModel, layers: tuple[int, ...], tokens: Tensor, starts: Tensor) -> Tensor:
    """Outputs of `layers` for packed conversations, [rows, columns] -> [rows, columns, layers * hidden]."""
    begin, place = conversations(starts)
    device = model.device
    modules = layers_at(model, layers)
    with outputs_of(modules) as outputs:
        model.base_model(
            tokens.long().to(device),
            position_ids=place.to(device),
            attention_mask=same_conversation(begin.to(device))[:, None],
            use_cache=False,
        )
    return torch.cat([outputs[module] for module in modules], -1)

"""Train a character-level GPT like nanoGPT's, and write it as a GPT-2 checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from typer import Option

from specdemo.errors import BadInput

from .data import Seed
from .shakespeare import ALPHABET, character_tokenizer

CARD = "card.json"
WARM_UP, LAST_RATE = 0.05, 0.1  # share of the steps in which the rate rises, share of the rate that is left at the end


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of the model and of the training, in tokens, which are characters.

    Raises:
        BadInput: a number is out of range.
    """

    layers: Annotated[int, Option(help="Layers of the model.")] = 4
    width: Annotated[int, Option(help="Its hidden size, a multiple of the heads.")] = 64
    heads: Annotated[int, Option(help="Attention heads of a layer.")] = 4
    context: Annotated[int, Option(help="Characters it can read at once.")] = 256
    batch: Annotated[int, Option(help="Windows of text in a step.")] = 2
    steps: Annotated[int, Option(help="Steps of the training.")] = 4000
    rate: Annotated[float, Option(help="The highest learning rate.")] = 4e-3
    seed: Seed = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.batch, self.steps) < 1 or self.context < 2 or self.rate <= 0:
            raise BadInput("Layers, width, heads, batch, steps and rate must be above 0, and the context above 1.")
        if self.width % self.heads:
            raise BadInput(f"The width must be a multiple of the heads: {self.width} is not one of {self.heads}.")


def train(
    recipe: Recipe,
    text: np.ndarray,
    held_out: np.ndarray,
    folder: Path,
    facts: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Train on `text` and write model, tokenizer and card into `folder`.

    Args:
        text, held_out: token ids, int64; a step draws windows from anywhere in `text`.
        facts: more entries of the card.
        dtype: of the products. Weights and sums are float32, the written checkpoint is bfloat16.
        progress: called with the number of steps done and the last loss, in nats per character.
    Returns:
        The card, with the `held_out_loss` of the written weights.
    Raises:
        BadInput: there is too little text, or the folder holds a finished model.
    """
    if min(len(text), len(held_out)) <= recipe.context:
        raise BadInput(
            f"The text must be longer than a context of {recipe.context} characters, and so must the held-out."
        )
    if (folder / CARD).exists():
        raise BadInput(f"{folder} holds a finished model: remove it or choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    model = GPT2LMHeadModel(_config(recipe)).to(device)
    weights = {decay: [w for w in model.parameters() if (w.dim() >= 2) == bool(decay)] for decay in (0.1, 0.0)}
    groups = [{"params": some, "weight_decay": decay} for decay, some in weights.items()]  # matrices decay
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.99))
    model.train()
    began = time.perf_counter()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * _share_of_rate(step, recipe.steps)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = _loss(model, _windows(text, recipe, step).to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, loss.item())
    seconds = time.perf_counter() - began
    model.config.activation_function = "gelu_new"  # GPT-2's own name of it
    model.to(torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    card = {
        **facts,
        **asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_tokens": recipe.steps * recipe.batch * recipe.context,
        "held_out_loss": round(held_out_loss(model.float(), held_out), 4),
        "seconds": round(seconds),
    }
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, held_out: np.ndarray) -> float:
    """Nats per character on consecutive windows. A character is predicted from its own window only."""
    context = model.config.n_positions
    windows = torch.from_numpy(held_out[: len(held_out) // context * context]).view(-1, context)
    model.eval()
    losses = [float(_loss(model, some.to(model.device))) * len(some) for some in windows.split(16)]
    model.train()
    return sum(losses) / len(windows)


def _config(recipe: Recipe) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(ALPHABET) + 1,
        n_positions=recipe.context,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        activation_function="gelu_pytorch_tanh",  # "gelu_new", which it is saved as, in one operation
        initializer_range=(3 * recipe.width) ** -0.5,  # a narrow model learns slowly with GPT-2's 0.02
        resid_pdrop=0.0,  # no overfitting: every character is seen once or twice
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,  # no token begins or ends a text
        eos_token_id=None,
    )


def _windows(text: np.ndarray, recipe: Recipe, step: int) -> Tensor:
    """The windows of a step, [batch, context]: a function of seed and step, so that resuming changes nothing."""
    starts = np.random.default_rng([recipe.seed, step]).integers(0, len(text) - recipe.context + 1, recipe.batch)
    return torch.from_numpy(text[starts[:, None] + np.arange(recipe.context)])


def _loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
    logits = model(windows, use_cache=False).logits[:, :-1].float()  # [B, context - 1, V]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _share_of_rate(step: int, steps: int) -> float:
    """A linear rise, then a cosine down to `LAST_RATE`."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2

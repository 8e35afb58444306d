"""Writes a head in the format of the library speculators, which vLLM serves.

The numbers do not change: tensors that were read from that format are written back the same to the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...engines.families import OUT, OUTPUT
from ...errors import BadInput
from .networks import Head, LayeredHead
from .published import EMBEDDING, OFFSETS, WEIGHTS, tensors_of
from .published_shape import CONFIG, FULL, SLIDING
from .shapes import ALL, ALL_TOKENS, EACH, HeadShape

VERSION = "0.5.0"  # of the library that defines these configurations
DRAFTED = 4  # tokens that an engine drafts in a round unless its command says otherwise
ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
}


def export_head(
    head: Head,
    embeddings: tuple[Tensor, Tensor],
    target: tuple[str, str],
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a head into a folder.

    Args:
        embeddings: the target's input and output embeddings, [V, hidden] each, for a head without its own. The file
            gets the output's rows of the draft vocabulary.
        target: its name on the hub, and the class of its model.
        dtype: the type of all weights; None keeps their types.
    """
    if not isinstance(head, LayeredHead) or head.kind not in ("eagle", "block"):
        raise BadInput(f"This head cannot be written in this format: eagle and block can be, {head.kind} cannot.")
    shape = head.shape
    if head.kind == "block" and shape.mask_token is None:
        raise BadInput(
            "This head cannot be written in this format: its positions begin as the target's last state, and those of "
            "dflash as a mask token."
        )
    weights = head.state_dict()
    tensors: dict[str, Tensor] = {}
    for ours, parts in tensors_of(head.kind, shape).items():
        rows = weights[ours].flatten() if ours == "state_norm" else weights[ours]
        tensors |= zip(parts, rows.split([sizes[0] for sizes in parts.values()]), strict=True)
    for index in range(1 if head.kind == "eagle" else shape.depth):
        if shape.qkv_bias and not shape.out_bias:  # there is one word for both
            tensors[f"layers.{index}.{OUT}.bias"] = torch.zeros(shape.hidden)
    ids = head.token_ids.cpu().long()
    tensors[EMBEDDING] = embeddings[0] if head.own_embedding is None else head.own_embedding
    tensors[OUTPUT] = embeddings[1][ids] if head.own_output is None else head.own_output
    stored = {name: tensor.detach().cpu().to(dtype or tensor.dtype).contiguous() for name, tensor in tensors.items()}
    if shape.draft_vocab != shape.vocab_size:
        stored[OFFSETS] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.isin(torch.arange(shape.vocab_size), ids)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(head, target, str(stored[OUTPUT].dtype).removeprefix("torch."))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.clone() for name, tensor in stored.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def _config(head: LayeredHead, target: tuple[str, str], dtype: str) -> dict[str, Any]:
    shape, (name, architecture) = head.shape, target
    eagle = head.kind == "eagle"
    method = "eagle3" if eagle else "dflash2" if shape.candidates else "dspark" if shape.rank else "dflash"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED if eagle else shape.most_drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [ARCHITECTURES[method]],
        "speculators_model_type": method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": [architecture]},
        },
        "transformer_layer_config": _layer(shape, eagle),
        "draft_vocab_size": shape.draft_vocab,
        "dtype": dtype,
        **(_eagle(shape) if eagle else _block(shape)),
    }


def _layer(shape: HeadShape, eagle: bool) -> dict[str, Any]:
    depth = 1 if eagle else shape.depth
    windows = shape.windows[:depth]
    layer: dict[str, Any] = {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.eps,
        "attention_bias": shape.qkv_bias or shape.out_bias,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", **shape.rope},
    }
    if sliding := [window for window in windows if window != ALL_TOKENS]:
        layer |= {"sliding_window": sliding[0], "use_sliding_window": True}
        layer["layer_types"] = [FULL if window == ALL_TOKENS else SLIDING for window in windows]
    return layer


def _eagle(shape: HeadShape) -> dict[str, Any]:
    other = shape.target_hidden not in (0, shape.hidden)
    return {
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.state_layers],
        "target_hidden_size": shape.target_hidden if other else None,
        "fc_norm": shape.state_norms == EACH,
        "norm_before_fc": shape.state_norms == ALL,
        "norm_before_residual": shape.normed_residual,
        "norm_output": shape.normed_feedback,
        "embed_requires_grad": False,
    }


def _block(shape: HeadShape) -> dict[str, Any]:
    facts = {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.state_layers],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": shape.from_anchor,
        "sliding_window_non_causal": True,
    }
    if shape.rank:
        facts |= {"markov_rank": shape.rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
        facts["confidence_head_with_markov"] = False
    if shape.candidates:
        facts |= {"conv_kernel_size": shape.conv_taps, "conv_group_size": shape.conv_group}
        facts |= {"selector_rank": shape.selector_rank, "selector_top_k": shape.candidates}
    return facts

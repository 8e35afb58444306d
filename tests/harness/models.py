"""Tiny models of every family that the engines know, by name: in memory, in a folder, or run by an engine of choice.

`files.write_gguf` writes them as GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.engines import choose, linear
from specdemo.engines.cpu.library import library_for
from specdemo.engines.gpu import graph
from specdemo.engines.runner import Runner
from specdemo.models import weights
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.loaded import load
from specdemo.models.preset_models import find_models
from specdemo.models.presets import Preset
from specdemo.models.sources import Folder, Source
from specdemo.system.hardware import unquantized
from tests.harness.classes import Loaded
from tests.harness.engines import recorded

VOCAB = 299  # as many as the tokens of `files.make_tokenizer`
SWITCH = 64  # a longer text has other angles in a model with LongRoPE
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
GROWING = {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.4}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
PARTLY = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 6.0, 9.0, 12.0, 18.0, 24.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0}
RUNNING: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
MAMBA = {"mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 8}

# By name: the type of the model in transformers, and fields of its configuration.
Models = dict[str, tuple[str, dict[str, Any]]]


def wide(heads: int, kv_heads: int, width: int) -> dict[str, Any]:
    """A shape that fills no vector, block or thread evenly."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    return {**sizes, "hidden_size": heads * width, "intermediate_size": 70}


FAMILIES: Models = {  # those of `engines.families`, and how each can differ
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, 6 heads of 20": ("llama", wide(6, 2, 20)),
    "llama, 11 heads of 4": ("llama", wide(11, 1, 4)),
    "llama, 3 heads of 48": ("llama", wide(3, 3, 48)),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
    "llama 3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}),
    "gpt2": ("gpt2", {}),
    "gpt2, 4 heads of 32": ("gpt2", {"hidden_size": 128}),
    "gpt2 with a width that it does not read": ("gpt2", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, 4 heads of 128": ("qwen3", wide(4, 2, 128)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "ministral": ("ministral", WINDOWS),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
    "ministral3 with a window": ("ministral3", {"sliding_window": 5, "rope_parameters": GROWING}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**WINDOWS, "query_pre_attn_scalar": 7}),
    "gemma2 with low caps": ("gemma2", {**WINDOWS, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}),
    "gemma3": ("gemma3_text", {**WINDOWS, "rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 40}),
    "phi3": ("phi3", {"sliding_window": None, "rope_parameters": PARTLY}),
    "phi3 with a window": ("phi3", {"sliding_window": 5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOWS, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}}),
    "granite": ("granite", {**FACTORS, "mlp_bias": True}),
    "glm": ("glm", {"rope_parameters": PARTLY}),
    "glm4": ("glm4", {"rope_parameters": PARTLY, "attention_bias": True}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "mixtral with a window": ("mixtral", {**EXPERTS, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe with dense layers": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {**EXPERTS, "head_dim": 24}),
    "flex_olmo": ("flex_olmo", {**EXPERTS, "norm_topk_prob": True}),
    "longrope": (
        "phi3",
        {
            **{"hidden_size": 64, "sliding_window": None},
            **{"rope_parameters": LONG, "original_max_position_embeddings": SWITCH},
        },
    ),
}
EAGER: Models = {  # those that only transformers computes, in a way that passes and rollback meet
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
    "longrope, two scales": (
        "phimoe",
        {"rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 3.0}, **EXPERTS, "num_local_experts": 6},
    ),
    "qwen3_next": ("qwen3_next", {**RUNNING, **SHARED}),
    "qwen3_5": ("qwen3_5_text", RUNNING),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**RUNNING, **SHARED}),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2_moe": ("lfm2_moe", {**CONVOLUTIONS, "num_dense_layers": 1, **EXPERTS}),
    "falcon_h1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**MAMBA, "layer_types": RUNNING["layer_types"], "mamba_n_heads": 12, "num_local_experts": 0},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**RUNNING, "linear_num_key_heads": 4}),
}
MODELS: Models = {**FAMILIES, **EAGER}
ENGINES = ("native", "fused", "graph", "eager")


def config_of(name: str, **more: Any) -> PreTrainedConfig:
    kind, fields = MODELS[name]
    sizes = {key: size for key, size in SIZES.items() if kind != "gpt2" or key != "head_dim"}
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**sizes, **fields, **more})
    return config


def model_of(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model in float32. Norms begin as ones and biases as zeros: here they are neither.

    Args:
        more: fields of its configuration that are others.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(name, **more), dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.add_(torch.empty_like(weight).normal_(0, 0.3))
    return model.eval()


def tiny(kind: str, vocab_size: int, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model of two layers as transformers makes it, with another text for each seed."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        sizes |= {"n_positions": 128}
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256}
        sizes |= {"initializer_range": 0.2, **({"head_dim": 8} if kind == "qwen3" else {})}
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **{**sizes, **ids, **more})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def rounded(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The same, with weights that a type holds. Buffers stay: transformers computes angles in float32."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype))
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write a checkpoint as `from_pretrained` reads it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def preset_of(target: Source | Path, draft: Source | Path | None = None, **more: Any) -> Preset:
    """A preset of given sources; a path is a folder."""
    target = Folder(target) if isinstance(target, Path) else target
    draft = Folder(draft) if isinstance(draft, Path) else draft
    return Preset("toy", "Toy", "A preset of the tests.", target, draft, **more)


def unread(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Checkpoint:
    """A checkpoint of which only the configuration is known."""
    return Checkpoint(Folder(Path("a model")), config=config, dtype=dtype, device=torch.device(device))


def looked_at(preset: Preset, dtype: str | None = "float32", device: str = "cpu") -> Checkpoint:
    """The target of a preset before its weights are fetched, as a report has it."""
    return find_models(preset, dtype, device, fetch=False)[0]


def expected(found: Checkpoint) -> tuple[str, bool]:
    """The engine of a model, and whether its rows will be exact."""
    return found.engine, choose.is_exact(found.engine, found.config, found.dtype, found.device)


# Engines ----------------------------------------------------------------------------------------------------------


def choose_engine(engine: str, patch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> None:
    """Have a model run by an engine that would perhaps not be chosen on this machine's CPU, if it knows the model.

    "graph" is as on a GPU whose captured passes are recorded calls of torch's operations.
    """
    if engine == "native" and library_for(unquantized(dtype)) is None:
        pytest.skip("no C library here")
    if engine in ("fused", "graph"):
        for module in (choose, linear, weights):
            patch.setattr(module, "library_for", lambda dtype: None)
    if engine == "graph":
        patch.setattr(linear.Linear, "of", lambda weight, bias, parts=1: linear.Linear.unpacked(weight, bias))
        patch.setattr(graph, "ROOM", 128)  # tokens of a slot; fewer take less time
        patch.setattr(choose, "CudaCapture", lambda device: recorded)
        real = choose._on_gpu
        patch.setattr(choose, "_on_gpu", lambda model, slots: real(model, 1))
        patch.setattr(choose, "engine_of", lambda *_: engine)


def run_by(
    engine: str, model: PreTrainedModel, patch: pytest.MonkeyPatch, dtype: torch.dtype | None = None
) -> Callable[[int], Runner]:
    """What makes the runners of an engine for a model in memory; `dtype` is another type to store its weights in."""
    choose_engine(engine, patch, dtype or model.dtype)
    chosen, make = choose.runner_maker(model, eager=engine == "eager", dtype=dtype)
    assert chosen == engine
    return make


def load_by(
    engine: str, target: Source | Path, patch: pytest.MonkeyPatch, dtype: str = "float32", **more: Any
) -> Loaded:
    """A target loaded from its files on the CPU, run by an engine."""
    choose_engine(engine, patch)
    loaded = load(preset_of(target, **more), dtype, "cpu", eager=engine == "eager")
    assert loaded.engine == engine
    return loaded

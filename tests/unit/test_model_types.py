"""Types of models, one after another: each writes `generate`'s text, drafted or not, or is refused in a sentence.

The types are those of transformers' own mapping of causal language models, tiny and with random weights, saved and then
loaded by name as a user would. Windows and chunks are shorter than the texts.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdemo.models.loaded import load
from specdemo.models.presets import preset_of
from specdemo.models.store import LoadError
from tests.harness.models import expected, looked_at, save
from tests.harness.texts import generated, texts_drafted_and_not

from ..sentences import refuses

NEW_TOKENS = 24
IMAGE = 5  # a token that the prompt does not have

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DEEPSEEK = {
    **LATENT,
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DECODER = {
    "d_model": 32,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))},
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "forced_eos_token_id": None,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}, "image_token_index": IMAGE}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 6.0, 12.0, 24.0]}

GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
GROWING |= {"llama_4_scaling_beta": 0.4}

# The fields of a configuration that the type needs besides SIZES. "text_config" is a model for pictures and text.
TEXTS: dict[str, dict[str, Any]] = {
    "afmoe": {**WIDE, **EXPERTS, **WINDOW, "num_dense_layers": 1},
    "apertus": WIDE,
    "arcee": WIDE,
    "bart": DECODER,
    "biogpt": {},
    "bitnet": GROUPED,
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": GROUPED,
    "cohere2": {**WIDE, **WINDOW},
    "ctrl": {},
    "cwm": {**WIDE, **WINDOW},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "diffllama": GROUPED,
    "ernie4_5": WIDE,
    "exaone4": {**WIDE, **WINDOW},
    "falcon": {},
    "gemma": WIDE,
    "gemma2": {**WIDE, **WINDOW, "query_pre_attn_scalar": 8},
    "gemma3": {"text_config": {**WIDE, **WINDOW}, **PICTURES, "mm_tokens_per_image": 4, "tie_word_embeddings": False},
    "gemma3_text": {**WIDE, **WINDOW},
    "gemma3n_text": {
        **WIDE,
        **WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**WIDE, **WINDOW, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gemma4_unified_text": {**WIDE, **WINDOW},
    "glm": WIDE,
    "glm4": WIDE,
    "glm4_moe": {**DEEPSEEK, **WIDE},
    "got_ocr2": {  # its text is a Qwen2, which fused runners know when it is alone
        "text_config": GROUPED,
        "vision_config": {**VISION, "output_channels": 16, "mlp_dim": 48, "image_size": 32, "window_size": 2},
        "image_token_index": IMAGE,
    },
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_neox": {},
    "gpt_oss": {**WIDE, **EXPERTS, **WINDOW},
    "gptj": {"rotary_dim": 4},
    "granite": GROUPED,
    "granitemoe": {**GROUPED, **EXPERTS},
    "helium": WIDE,
    "hrm_text": WIDE,
    "hunyuan_v1_dense": WIDE,
    "jetmoe": GROUPED,
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "llama": WIDE,
    "llama4_text": {**WIDE, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
    },
    "minimax_m2": {**WIDE, **EXPERTS},
    "ministral": {**WIDE, **WINDOW},
    "ministral3": {**WIDE, "rope_parameters": GROWING},
    "mistral": {**WIDE, **WINDOW},
    "mixtral": {**GROUPED, **EXPERTS, **WINDOW},
    "modernbert-decoder": {"head_dim": 8, "local_attention": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "nanochat": GROUPED,
    "nemotron": WIDE,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, **WINDOW},
    "olmoe": {**GROUPED, **EXPERTS},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": GROUPED,
    "phi3, longrope": {**GROUPED, "original_max_position_embeddings": 4, "rope_parameters": LONG},
    "phimoe": {**GROUPED, **EXPERTS},
    "qwen2": GROUPED,
    "qwen2, sliding": {**GROUPED, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": WIDE,
    "qwen3_5_text": {**GROUPED, **LINEAR},
    "qwen3_moe": {**WIDE, **EXPERTS},
    "roberta": {"is_decoder": True, "hidden_size": 48},
    "seed_oss": WIDE,
    "smollm3": GROUPED,
    "stablelm": {**GROUPED, "partial_rotary_factor": 0.5},
    "starcoder2": {**GROUPED, **WINDOW},
    "trocr": DECODER,
    "vaultgemma": {**WIDE, **WINDOW},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}
FUSED = {"gpt2", "llama", "qwen2", "qwen2, sliding", "qwen3", "smollm3", "mistral", "ministral", "gemma", "gemma2"}
FUSED |= {"ministral3", "gemma3", "gemma3_text", "phi3", "phi3, longrope", "olmo2", "olmo3", "granite"}
FUSED |= {"glm", "glm4", "mixtral", "olmoe", "qwen3_moe"}
STATE = "state rolled"
ENCODER = "encoder, causal"
NO_PARTS = "keys values"
# What is said of the types that cannot be used, and the fields that say it.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": (STATE, {}),
    "mamba2": (STATE, {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "rwkv": (STATE, {}),
    "recurrent_gemma": (STATE, {}),
    "minimax": (STATE, {}),
    "jamba": (STATE, {**GROUPED, **EXPERTS}),
    "deepseek_v32": (STATE, {**DEEPSEEK, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}),
    "glm_moe_dsa": (STATE, {**DEEPSEEK, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}),
    "bert": (ENCODER, {}),
    "bert-generation": (ENCODER, {}),
    "roberta": (ENCODER, {}),
    "gemma3_text": (ENCODER, {**WIDE, **WINDOW, "use_bidirectional_attention": True}),
    "llama": (ENCODER, {**WIDE, "is_causal": False}),
    "cpmant": (NO_PARTS, {}),
    "openai-gpt": (NO_PARTS, {}),
    "prophetnet": (NO_PARTS, {"num_encoder_layers": 2, "num_decoder_layers": 2}),
    "xlm": (ENCODER, {}),
    "musicgen": ("loaded:", {}),
    "t5": ("not causal", {}),
}


def config_of(label: str, fields: dict[str, Any], vocab_size: int) -> PreTrainedConfig:
    kind, _, _ = label.partition(",")
    if "text_config" in fields:
        fields = {**fields, "text_config": {**SIZES, "vocab_size": vocab_size, **fields["text_config"]}}
        return AutoConfig.for_model(kind, **fields)
    if "num_encoder_layers" in fields or kind in ("musicgen", "cpmant", "t5"):  # the sizes have other names there
        return AutoConfig.for_model(kind, **fields)
    return AutoConfig.for_model(kind, **{"vocab_size": vocab_size, **SIZES, **fields})


def save_random(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A checkpoint with weights so large that its text has many different tokens, and rounding does not change it."""
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return save(model, tokenizer, folder)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("label", TEXTS)
def test_a_type_writes_the_text_of_generate_drafted_or_not(
    label: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save_random(config_of(label, TEXTS[label], len(tokenizer)), tokenizer, tmp_path / "model")
    preset = preset_of(str(folder))
    loaded = load(preset, "float32", "cpu")
    assert expected(looked_at(preset)) == (loaded.engine, loaded.exact_rows > 0)
    assert (loaded.engine != "eager") == (label in FUSED)
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    (_, greedy), _ = texts_drafted_and_not(loaded, prompt, NEW_TOKENS)
    assert greedy == generated(loaded.model, prompt, NEW_TOKENS)
    loaded.release()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", REFUSED)
def test_a_type_that_cannot_be_used_is_refused_by_its_configuration(
    label: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """There are no weights."""
    words, fields = REFUSED[label]
    config_of(label, fields, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    preset = preset_of(str(tmp_path))
    for look in (looked_at, load):
        with refuses(LoadError, words) as caught:
            look(preset, "float32", "cpu")
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_type_that_needs_another_package_says_so(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    AutoConfig.for_model("gemma3n").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for look in (looked_at, load):
        with refuses(LoadError, "timm") as caught:
            look(preset_of(str(tmp_path)), "float32", "cpu")
        assert "\n" not in str(caught.value)


def test_the_table_is_of_many_types_and_most_give_text() -> None:
    """Each of them is tested above."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    texts = {label.partition(",")[0] for label in TEXTS} & known
    refused = REFUSED.keys() & known - texts
    print(f"{len(texts)} types of models give text, {len(refused)} more are refused in a sentence.")
    assert len(texts) >= 60
    assert len(refused) >= 10

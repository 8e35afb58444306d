"""Loads models from damaged files, one after the other, and says after each what came of it.

    python -m tests.unit.hostile FOLDER FIRST EVERY

Two lines of JSON for every case: [number, what was changed], and what came of it: "loaded", a sentence, or a traceback.
The last line is the most memory that it took, in bytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from specdemo.errors import BadInput, NotFinite
from specdemo.models import trial
from specdemo.models.loaded import load
from specdemo.models.report import report_on
from specdemo.models.sources import Folder, Gguf, Source
from specdemo.models.store import LoadError
from specdemo.racing.race import race
from specdemo.settings import Settings
from tests.harness.files import make_tokenizer, write_gguf
from tests.harness.models import preset_of, save, tiny

from ..fakes import published

CASES = 300
WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADS: dict[str, Callable[[int], Any]] = {"eagle": published.eagle3, "block": published.dflash}
HEADS |= {"p-eagle": published.peagle, "medusa": published.medusa}
NUMBERS = [0, -1, -1000001, 1, 3, 7, 2**10, 2**20, 2**31, 2**40, 2**62, 10**30, 0.5, -2.5, float("nan"), float("inf")]
OTHERS = [None, True, False, "4", "", [], [3], [[1]], {}, {"a": 1}, ["full_attention"], ["sliding_attention"] * 2]
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}


def prepare(folder: Path) -> None:
    """Write good models and heads."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    size, windowed = len(tokenizer), {**SIZES, "sliding_window": 8}
    mixed = {**SIZES, "num_experts_per_tok": 2, "num_local_experts": 4}
    sparse = {**SIZES, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8}
    models = {
        "llama": tiny("llama", size, num_hidden_layers=published.LAYERS),
        "qwen3": tiny("qwen3", size),
        "gpt2": tiny("gpt2", size),
        "mistral": hf.MistralForCausalLM(hf.MistralConfig(vocab_size=size, **windowed)),
        "gemma2": hf.Gemma2ForCausalLM(hf.Gemma2Config(vocab_size=size, head_dim=8, **windowed)),
        "mixtral": hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=size, **mixed)),
        "qwen3_moe": hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(vocab_size=size, **sparse)),
        "stablelm": hf.StableLmForCausalLM(hf.StableLmConfig(vocab_size=size, **SIZES)),  # runs by transformers
    }
    for name, model in models.items():
        save(model, tokenizer, folder / name)
    write_gguf(folder / "llama.gguf")
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    write_gguf(folder / "qwen3moe.gguf", models["qwen3_moe"], counts)
    for kind, make in HEADS.items():
        published.write(folder / kind, *make(size))


def damaged_config(luck: random.Random, folder: Path) -> str:
    config = json.loads((folder / CONFIG).read_text())
    for _ in range(luck.choice((1, 1, 2))):
        inner = [value for value in config.values() if isinstance(value, dict) and value]
        table = luck.choice(inner) if inner and luck.random() < 0.2 else config
        name = luck.choice(sorted(table))
        sizes = [one for one in sorted(table) if type(table[one]) is int]
        if sizes and luck.random() < 0.6:
            name = luck.choice(sizes)
        if luck.random() < 0.1:
            del table[name]
        else:
            table[name] = luck.choice(NUMBERS if luck.random() < 0.7 else OTHERS)
    changed = json.dumps(config)
    if luck.random() < 0.05:
        changed = luck.choice(("", "[]", "[" * 100_000, "null", changed[:-20], '{"a":' * 50_000))
    (folder / CONFIG).write_text(changed)
    return changed[:3000]


def damaged_weights(luck: random.Random, folder: Path) -> str:
    """Of the header of a safetensors file."""
    path = folder / WEIGHTS
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header, rest = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = luck.choice(sorted(set(header) - {"__metadata__"}))
    tensor = header[name]
    match luck.randrange(8):
        case 0:
            del header[name]
        case 1:
            parts = ("codes", "scales", "lows", "scale_units")
            header |= {f"{name}:{part}": tensor for part in luck.sample(parts, 2)}
            del header[name]
        case 2:
            tensor["dtype"] = luck.choice(("F64", "I32", "U8", "BOOL", "F8_E4M3", "BF16", "X", 3))
        case 3:
            tensor["shape"] = luck.choice(
                ([], [0], [-1], [2**62, 4], tensor["shape"][::-1], [*tensor["shape"], 1], "a")
            )
        case 4:
            tensor["data_offsets"] = luck.choice(([0, 0], [8, 4], [0, 2**62], [-4, 4], [0, len(rest) + 8], []))
        case 5:
            rest = rest[: luck.randrange(len(rest))]
        case 6:
            header[name] = luck.choice(({}, None, [], 5))
        case 7:
            other = luck.choice(sorted(set(header) - {"__metadata__"}))
            header[name], header[other] = header[other], header[name]
    changed = json.dumps(header).encode()
    stated = luck.choice((0, 2**62, 10**6, len(changed) // 2)) if luck.random() < 0.1 else len(changed)
    path.write_bytes(struct.pack("<Q", stated) + changed + rest)
    return f"{stated} {name} {header.get(name)}"


def damaged_gguf(luck: random.Random, path: Path) -> str:
    whole = bytearray(path.read_bytes())
    keys = ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"]
    keys += ["attention.key_length", "attention.value_length", "context_length", "rope.dimension_count"]
    keys += ["expert_count", "expert_used_count", "expert_feed_forward_length"] if "moe" in path.stem else []
    named = [f"{path.stem}.{key}".encode() for key in keys]
    named += [
        b"tokenizer.ggml.tokens",
        b"tokenizer.ggml.merges",
        b"general.architecture",
        b"tokenizer.ggml.eos_token_id",
    ]
    tensors = [b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.1.ffn_up.weight", b"output_norm.weight"]
    number = luck.choice([one for one in NUMBERS if isinstance(one, int)])
    bits32, bits64 = struct.pack("<I", number % 2**32), struct.pack("<Q", number % 2**64)
    match luck.randrange(7):
        case 0:
            del whole[luck.randrange(len(whole)) :]
            return f"cut to {len(whole)}"
        case 1:
            place, word = luck.choice((8, 16)), bits64  # the number of tensors, and of fields
        case 2:
            name = luck.choice(named)
            place, word = whole.find(name) + len(name), struct.pack("<I", luck.randrange(14))  # its type
        case 3 | 4:
            name = luck.choice(named)
            place, word = whole.find(name) + len(name) + 4, bits32
        case 5:
            name = luck.choice(tensors)
            place, word = whole.find(name) + len(name), luck.choice((bits32, struct.pack("<IQ", 2, number % 2**64)))
        case _:
            name = luck.choice(tensors)
            begin = whole.find(name) + len(name)
            (dimensions,) = struct.unpack_from("<I", whole, begin)
            place = begin + 4 + 8 * dimensions
            word = luck.choice((struct.pack("<I", luck.choice((2, 8, 12, 14, 31, 41, 139))), b"\0\0\0\0" + bits64))
    whole[place : place + len(word)] = word
    path.write_bytes(whole)
    return f"{place}: {word!r}"


def loaded_and_run(target: Source, luck: random.Random, drafter: str = "prompt-lookup", **more: Any) -> None:
    dtype = luck.choice(("float32", "float32", "bfloat16", "float16", "int8", None))
    preset = preset_of(target, **more)
    with suppress(LoadError, BadInput):
        [*report_on(preset)]
    loaded = load(preset, dtype, "cpu")
    prompt = [token % loaded.rows for token in range(40, 59)]
    for _ in race(loaded, drafter, prompt, Settings(k=4, max_new_tokens=12)):
        pass


def tried(number: int, good: Path, folder: Path) -> tuple[str, Callable[[], None]]:
    """Damage a copy of some files in a folder: what was changed, and what loads them."""
    luck = random.Random(number)
    kind = ("config", "weights", "config", "gguf", "head")[number % 5]
    if kind == "gguf":
        folder.mkdir()
        path = Path(shutil.copy(good / luck.choice(("llama.gguf", "qwen3moe.gguf")), folder))
        return f"gguf {damaged_gguf(luck, path)}", lambda: loaded_and_run(Gguf(str(path)), luck)
    if kind == "head":
        drafter = luck.choice(sorted(HEADS))
        shutil.copytree(good / drafter, folder)
        said = damaged_config(luck, folder) if luck.random() < 0.7 else damaged_weights(luck, folder)
        heads: Any = {drafter: Folder(folder)}
        run = lambda: loaded_and_run(Folder(good / "llama"), luck, drafter, heads=heads, asked_heads=(drafter,))  # noqa: E731
        return f"{drafter} {said}", run
    families = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "mixtral", "qwen3_moe", "stablelm")
    family = luck.choice(families)
    shutil.copytree(good / family, folder)
    said = damaged_config(luck, folder) if kind == "config" else damaged_weights(luck, folder)
    return f"{family} {said}", lambda: loaded_and_run(Folder(folder), luck)


def main(folder: Path, numbers: Sequence[int]) -> None:
    import resource  # which Windows has not

    torch.set_num_threads(1)
    for number in numbers:
        said, run = tried(number, folder / "good", folder / str(number))
        print(json.dumps([number, said]), flush=True)
        try:
            run()
            outcome = "loaded"
        except (LoadError, BadInput, NotFinite) as error:
            outcome = f"{type(error).__name__}: {error}"
        except BaseException:
            outcome = traceback.format_exc()
        print(json.dumps(outcome), flush=True)
        shutil.rmtree(folder / str(number))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(most * (1 if sys.platform == "darwin" else 1024))


if __name__ == "__main__":
    os.environ["SPECDEMO_CACHE"] = str(Path(sys.argv[1]) / "cache")
    vars(trial)["tried"] = lambda *_: {}  # takes seconds for each type of weights
    if sys.argv[2] == "prepare":
        prepare(Path(sys.argv[1]) / "good")
    else:
        main(Path(sys.argv[1]), range(int(sys.argv[2]), CASES, int(sys.argv[3])))

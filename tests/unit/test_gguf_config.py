"""What a GGUF file says of attention: transformers' logits for the same, llama.cpp's own, or one sentence."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from specdemo.engines.families import knows
from specdemo.models import converted, gguf_weights
from specdemo.models import gguf as gguf_reading
from specdemo.models.gguf import Header, check_header, completed, config_of, read_header
from specdemo.models.loaded import load
from specdemo.models.presets import Preset
from specdemo.models.sources import Gguf
from specdemo.models.store import LoadError
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.llamacpp_process import started
from tests.harness.files import make_tokenizer, write_gguf
from tests.harness.models import ENGINES, expected, load_by, looked_at, preset_of, rounded

from ..sentences import refuses, tells
from .test_llamacpp import NEEDS_LLAMACPP

SIZES: dict[str, Any] = {
    **{"vocab_size": len(make_tokenizer()), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7}
IDS = [(7 * place) % 200 + 30 for place in range(60)]
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
AS_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1 + place / 10 for place in range(16)], [1.0 + place for place in range(16)]


def divisors(base: float, width: int) -> Tensor:
    """As llama.cpp's `LlamaModel.generate_extra_tensors` writes the rope of Llama 3: [width / 2]."""
    found = []
    for place in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (place / width)
        smooth = (LLAMA3["original_max_position_embeddings"] / wavelength - 1) / 3
        found.append(1 / ((1 - smooth) / 8 + smooth) if 0 <= smooth <= 1 else 1 if smooth > 1 else 8)
    return torch.tensor(found, dtype=torch.float32)


def long(original: int, **more: Any) -> dict[str, Any]:
    factors = {"long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": original}
    return {"rope_type": "longrope", "rope_theta": 300.0, "attention_factor": 1.25, **factors, **more}


SET_LATER = {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "_name_or_path"}  # or never
Case = tuple[Any, ...]
CASES: dict[str, Case] = {  # a configuration of transformers, and the header and perhaps tensors that say the same
    "linear": (
        hf.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "yarn": (hf.LlamaConfig, {"rope_parameters": AS_YARN}, YARN),
    "llama3": (
        hf.LlamaConfig,
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope.freq_base": 5e5},
        {"rope_freqs.weight": divisors(5e5, 32)},
    ),
    "linear, by its old name": (
        hf.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope.scale_linear": 4.0},
    ),
    "biases": (hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {}),
    "none": (hf.LlamaConfig, {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn with a magnitude": (
        hf.LlamaConfig,
        {"rope_parameters": {**AS_YARN, "attention_factor": 1.25 * (1 + 0.1 * math.log(4))}},
        {**YARN, "rope.scaling.attn_factor": 1.25},
    ),
    "yarn with bounds": (
        hf.LlamaConfig,
        {"rope_parameters": {**AS_YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
        {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "yarn of the whole context": (
        hf.Qwen2Config,
        {"rope_parameters": {**AS_YARN, "original_max_position_embeddings": 256}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 1.0},
    ),
    "StableLM": (
        hf.StableLmConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        {"rope.freq_base": 300.0, "rope.dimension_count": 16},
    ),
    "StableLM, whole heads": (
        hf.StableLmConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {},
    ),
    "StarCoder 2": (
        hf.Starcoder2Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "tie_word_embeddings": False},
        {"rope.freq_base": 300.0},
    ),
    "Nemotron": (
        hf.NemotronConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}},
        {"rope.freq_base": 300.0, "rope.dimension_count": 8},
    ),
    "Gemma 2": (
        hf.Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}},
        {"rope.freq_base": 300.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "Gemma 3": (
        hf.Gemma3TextConfig,
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"rope.freq_base": 300.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "Gemma 3 of another pattern": (
        hf.Gemma3TextConfig,
        {
            **GEMMA,
            "layer_types": ["full_attention" if layer in (3, 6) else "sliding_attention" for layer in range(1, 8)],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
            },
        },
        {"rope.freq_base": 300.0, "rope.freq_base_swa": 77.0, "attention.sliding_window_pattern": 3},
    ),
    "Phi-3, parts of heads": (
        hf.Phi3Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        {"rope.freq_base": 300.0, "rope.dimension_count": 16},
    ),
    "Phi-3 with factors": (
        hf.Phi3Config,
        {"rope_parameters": long(32), "original_max_position_embeddings": 32},
        {"rope.freq_base": 300.0, "rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 32},
        {"rope_factors_long.weight": torch.tensor(LONG), "rope_factors_short.weight": torch.tensor(SHORT)},
    ),
}


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gguf:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    return Gguf(str(tmp_path / "tiny.gguf"))


def written(case: Case, gguf: Gguf) -> hf.PreTrainedModel:
    """The model of a case, whose file is written."""
    kind, more, *in_file = case
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**{**SIZES, **more})).eval()
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(weight, std=0.5)
    return write_gguf(Path(gguf.file), rounded(model), *in_file)


@torch.inference_mode()
def last_logits(model: Any) -> Tensor:
    return torch.as_tensor(model(torch.tensor([IDS])).logits[0, -1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_a_configuration_that_says_the_same(case: Case, gguf: Gguf) -> None:
    model = written(case, gguf)
    loaded = load(preset_of(gguf), "float32", "cpu")
    assert (loaded.engine != "eager") == knows(model.config)
    assert expected(looked_at(preset_of(gguf))) == (loaded.engine, loaded.exact_rows > 0)
    torch.testing.assert_close(loaded.target_runner(64).prefill(IDS)[-1], last_logits(model), atol=1e-4, rtol=1e-4)
    loaded.release()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_weights_and_configuration_are_those_that_transformers_reads(
    case: Case, gguf: Gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time. What the file says of attention is left out: see above."""
    written(case, gguf)
    path, shares = Path(gguf.file), list[float]()
    monkeypatch.setattr(gguf_weights, "AT_ONCE", 1000)
    converted.convert(path, tmp_path, {"float32": None}, lambda share, _: shares.append(share or 0))
    assert shares == sorted(shares)
    assert len(shares) > 10
    theirs = hf.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    monkeypatch.setattr(gguf_reading, "completed", lambda config, *more: config)
    with path.open("rb") as file:
        ours = config_of(read_header(file))
    of_ours, of_theirs = (
        {key: value for key, value in config.to_dict().items() if key not in SET_LATER} for config in (ours, theirs)
    )
    assert of_ours == of_theirs
    model = hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_every_engine_rotates_as_the_file_says(
    name: str, engine: str, gguf: Gguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(CASES[name], gguf)
    loaded = load_by(engine, gguf, monkeypatch)
    torch.testing.assert_close(loaded.target_runner(64).prefill(IDS)[-1], last_logits(model), atol=1e-4, rtol=1e-4)
    loaded.release()


# llama.cpp 2026.10 reads the bounds of YaRN for Grok alone. Its table of GELU has 16 bits.
THEIRS = [name for name in CASES if name != "yarn with bounds"]


@NEEDS_LLAMACPP
@pytest.mark.parametrize(
    "name", [name if name == "llama3" else pytest.param(name, marks=pytest.mark.slow) for name in THEIRS]
)
def test_logits_are_those_of_llama_cpp(name: str, gguf: Gguf) -> None:
    written(CASES[name], gguf)
    loaded = load(preset_of(gguf), "float32", "cpu")
    served = {"gguf": gguf.file, "draft_gguf": None, "ngram": None, "threads": 1, "context": 256}
    asked = {"n_predict": 1, "n_probs": SIZES["vocab_size"], "ignore_eos": True, "cache_prompt": False}
    with started(served) as (address, _), Client(Address.read(address)) as client:
        answer = client.post("/completion", prompt=IDS, temperature=0.0, **asked)
    theirs = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
    ours = loaded.target_runner(64).prefill(IDS)[-1]
    others = [index for index in range(len(ours)) if index != 2]  # without the end token, which it is told to ignore
    found, wanted = ours[others].log_softmax(-1), torch.tensor([theirs[index] for index in others])
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)
    loaded.release()


def test_a_file_with_weights_that_the_model_has_no_place_for_is_refused(gguf: Gguf) -> None:
    more = {"blk.0.attn_sinks.weight": torch.ones(2), "blk.1.attn_sinks.weight": torch.ones(2)}
    write_gguf(Path(gguf.file), tensors=more)
    with refuses(LoadError, "tiny.gguf blk.0.attn_sinks.weight 1"):
        load(preset_of(gguf), "float32", "cpu")


# What is refused -------------------------------------------------------------------------------------------------


def header_of(kind: str, fields: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None = None) -> Header:
    stated = {"embedding_length": 64, "attention.head_count": 2, "context_length": 256, **fields}
    named = {f"{kind}.{field}": value for field, value in stated.items()}
    return Header({"general.architecture": kind, **named}, tensors or {"output_norm.weight": (64,)})


REFUSED: dict[str, tuple[Header, str]] = {
    "another kind": (header_of("llama", {"rope.scaling.type": "dynamic"}), "llama.rope.scaling.type dynamic"),
    "another field": (header_of("llama", {"rope.scaling.alpha": 7.0}), "llama.rope.scaling.alpha 7.0"),
    "mscale": (header_of("qwen2", {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}), "yarn_log_multiplier 0.1"),
    "a magnitude of what is not scaled": (header_of("llama", {"rope.scaling.attn_factor": 2.0}), "attn_factor 2.0"),
    "less extrapolation": (header_of("llama", {**YARN, "rope.scaling.yarn_ext_factor": 0.5}), "yarn_ext_factor 0.5"),
    "a part of a head": (header_of("llama", {"rope.dimension_count": 16}), "dimension_count 16"),
    "a part that is rounded": (
        header_of("stablelm", {"rope.dimension_count": 30, "attention.key_length": 44}),
        "dimension_count 30",
    ),
    "sections": (header_of("qwen2", {"rope.dimension_sections": [8, 4, 4]}), "dimension_sections [8, 4, 4]"),
    "another base of windows": (
        header_of("gemma2", {"rope.freq_base": 1e4, "rope.freq_base_swa": 77.0}),
        "freq_base_swa",
    ),
    "windows": (header_of("llama", {"attention.sliding_window_pattern": 2}), "sliding_window_pattern 2"),
    "factors by length": (
        header_of("llama", {}, {"rope_factors_long.weight": (16,), "rope_factors_short.weight": (16,)}),
        "rope_factors_long.weight",
    ),
    "no factors": (header_of("phi3", {"rope.scaling.type": "longrope"}), "type longrope"),
    "half of the factors": (header_of("phi3", {}, {"rope_factors_long.weight": (16,)}), "only one"),
    "another number of factors": (header_of("llama", {}, {"rope_freqs.weight": (8,)}), "numbers"),
    "factors of a layer": (header_of("llama", {}, {"blk.0.rope_freqs.weight": (16,)}), "blk.0.rope_freqs.weight"),
    "factors and a factor": (
        header_of("llama", {"rope.scaling.factor": 4.0}, {"rope_freqs.weight": (16,)}),
        "scaling.factor 4.0",
    ),
    "a scaled Phi-3": (header_of("phi3", YARN), "scaling.factor 4.0"),
    "a scaled hybrid": (header_of("lfm2", YARN), "scaling.factor 4.0"),
}


@pytest.mark.parametrize(("header", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_configuration_cannot_say_is_refused(header: Header, words: str) -> None:
    with refuses(LoadError, f"x.gguf rotary {words}"):
        check_header("x.gguf", header)


def test_a_kind_that_is_not_known_is_named(gguf: Gguf) -> None:
    write_gguf(Path(gguf.file))
    content = Path(gguf.file).read_bytes().replace(b"llama", b"lhama")
    Path(gguf.file).write_bytes(content)
    with refuses(LoadError, "tiny.gguf lhama"):
        load(preset_of(gguf), "float32", "cpu")


def test_a_refusal_comes_before_the_conversion_and_keeps_nothing(gguf: Gguf, tmp_path: Path) -> None:
    write_gguf(Path(gguf.file), header={"rope.scaling.type": "dynamic"})
    for look in (looked_at, load):
        with refuses(LoadError, "llama.rope.scaling.type dynamic."):
            look(preset_of(gguf), "float32", "cpu")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix not in (".lock", ".checked")]


def test_a_kind_of_model_that_is_not_read_is_refused_before_the_conversion(gguf: Gguf) -> None:
    write_gguf(Path(gguf.file))
    whole = Path(gguf.file).read_bytes()
    Path(gguf.file).write_bytes(whole.replace(b"llama", b"llana"))
    for look in (looked_at, load):
        assert tells(refusal_of(gguf, look), "llana known")


# Damaged files, and files of other things ----------------------------------------------------------------------------


def refusal_of(gguf: Gguf, look: Callable[[Preset], Any] = load) -> str:
    with pytest.raises(LoadError) as refused:
        look(preset_of(gguf))
    return str(refused.value)


def test_a_file_that_ends_too_early_is_incomplete(gguf: Gguf) -> None:
    path = Path(gguf.file)
    write_gguf(path)
    whole = path.read_bytes()
    for size in (len(whole) - 64, len(whole) * 9 // 10):
        path.write_bytes(whole[:size])
        assert tells(refusal_of(gguf), f"{path.name} incomplete: {size:,} {len(whole):,}")
    path.write_bytes(whole)
    load(preset_of(gguf))


@pytest.mark.parametrize("kind", [31, 139])
def test_a_type_that_is_not_known_is_named_with_its_tensor(gguf: Gguf, kind: int) -> None:
    path, name = Path(gguf.file), b"output_norm.weight"
    write_gguf(path)
    whole = bytearray(path.read_bytes())
    place = whole.find(name) + len(name) + 4 + 8  # after the number of dimensions and one of them
    whole[place : place + 4] = struct.pack("<I", kind)
    path.write_bytes(whole)
    for look in (load, looked_at):
        assert tells(refusal_of(gguf, look), f"output_norm.weight ({kind})")


@pytest.mark.parametrize(
    ("fields", "tensors", "words"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, True, "LoRA"),
        ({"general.type": "model"}, False, "vocabulary"),
    ],
)
def test_files_of_other_things_are_called_what_they_are(
    gguf: Gguf, fields: dict[str, str], tensors: bool, words: str
) -> None:
    writer = GGUFWriter(gguf.file, "llama")
    for key, value in fields.items():
        writer.add_string(key, value)
    if tensors:
        writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for look in (load, looked_at):
        assert tells(refusal_of(gguf, look), f"tiny.gguf {words}")


def test_a_file_that_is_too_small_for_its_sizes_is_refused_before_memory_is_taken(gguf: Gguf) -> None:
    path, key = Path(gguf.file), b"llama.feed_forward_length"
    write_gguf(path)
    whole = bytearray(path.read_bytes())
    place = whole.find(key) + len(key) + 4
    whole[place : place + 4] = struct.pack("<I", 2**24)
    path.write_bytes(whole)
    assert re.match(r"tiny\.gguf lacks \D+ 3,\d+,\d+,\d+ \D+ \d+,\d+ ", refusal_of(gguf))


def gguf_bytes(*fields: bytes, count: int | None = None) -> BytesIO:
    return BytesIO(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) if count is None else count) + b"".join(fields))


NESTED = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
HUGE = {
    "arrays in arrays": gguf_bytes(NESTED),
    "fields": gguf_bytes(count=2**63),
    **{
        f"an array of the type {kind}": gguf_bytes(struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, 2**36))
        for kind in range(13)
    },
    "a string": gguf_bytes(struct.pack("<QQ", 2**36, 1)),
}


@pytest.mark.parametrize("content", HUGE.values(), ids=HUGE.keys())
def test_what_is_larger_than_the_file_takes_no_memory(content: BytesIO) -> None:
    class Counting(BytesIO):
        most = 0

        def read(self, size: int | None = -1) -> bytes:
            self.most = max(self.most, size or 0)
            return super().read(size)

    file = Counting(content.getvalue())
    with refuses(ValueError, "header GGUF whole."):
        read_header(file)
    assert file.most < 2**27


# What no tiny file can show ----------------------------------------------------------------------------------------


def test_gemma_4_states_its_pattern_and_what_it_does_not_rotate() -> None:
    fields = {"rope.freq_base": 3e5, "rope.freq_base_swa": 77.0, "rope.dimension_count": 512, "block_count": 6}
    fields |= {"rope.dimension_count_swa": 256, "attention.key_length": 512, "attention.key_length_swa": 256}
    slides = [True, False, True, True, True, False]
    header = header_of("gemma4", {**fields, "attention.sliding_window_pattern": slides}, {"rope_freqs.weight": (256,)})
    check_header("x.gguf", header)
    config = completed(hf.Gemma4TextConfig(num_hidden_layers=6), header, lambda name: [1.0] * 64 + [1e30] * 192)
    assert config.rope_parameters == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 3e5},
    }
    assert config.layer_types == ["sliding_attention" if one else "full_attention" for one in slides]


@pytest.mark.parametrize(("kind", "layers", "width"), [("gemma2", 46, 32), ("gemma3", 62, 32), ("gemma3", 48, 256)])
def test_the_largest_gemmas_divide_products_by_the_width_that_llama_cpp_derives(
    kind: str, layers: int, width: int
) -> None:
    config = hf.AutoConfig.for_model("gemma2" if kind == "gemma2" else "gemma3_text", num_hidden_layers=layers)
    config.hidden_size, config.num_attention_heads = 64, 2
    header = header_of(kind, {"attention.key_length": 256})
    assert completed(config, header, lambda name: []).query_pre_attn_scalar == width

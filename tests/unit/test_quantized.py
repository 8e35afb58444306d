"""Weights of 4 and 8 bits: read as llama.cpp reads them, multiplied to the same bits in every pass, kept as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from specdemo.decoding.acceptance import branches
from specdemo.drafters.heads.files import save_head
from specdemo.engines import quantized as quantizing
from specdemo.engines.cpu.library import SOURCE, Library, PackedLinear, library_for
from specdemo.engines.quantized import (
    GROUP,
    READERS,
    Precise,
    Quantized,
    Weight,
    bits_kept,
    of_blocks,
    quantized,
    widened,
)
from specdemo.errors import BadInput
from specdemo.models import converted as converting
from specdemo.models import loaded as loading
from specdemo.models import preset_models
from specdemo.models import sizes as room
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, find_preset
from specdemo.models.sizes import laid_out_bytes, weight_bytes
from specdemo.models.sources import Gguf, Source, Wheel
from specdemo.models.store import LoadError
from specdemo.racing.race import start
from specdemo.settings import AUTO, Settings
from specdemo.system.compiled import compiled
from specdemo.system.hardware import UNQUANTIZED, cpu_has, cpu_instructions
from specdemo.tokens import DraftOutcome
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of, rounds_of
from tests.harness.files import blocks_of, make_tokenizer, write_gguf, write_wheel
from tests.harness.models import looked_at, preset_of, save, tiny
from tests.harness.texts import texts_drafted_and_not
from tests.harness.toys import untrained_heads

from ..sentences import refuses

LIBRARY = library_for(UNQUANTIZED, quantized=True)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C library here")

AVX2 = "-USIMD", '-DSIMD="simd_avx2.h"', "-mno-avx512f"
AVX512 = "-USIMD", '-DSIMD="simd_avx512.h"'
OUTER, INNER = 200, 512  # not whole blocks of columns
NEW_TOKENS = 24
KINDS = {  # of a Q4_K_M file and others: the parts of a product differ
    **{"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K"},
    **{"ffn_gate": "Q4_1", "ffn_up": "Q5_0", "ffn_down": "Q8_0"},
}


def stored(kind: str) -> tuple[Quantized, torch.Tensor]:
    """A weight as it is read, and its numbers as gguf has them."""
    raw = blocks_of(np.random.default_rng(0).standard_normal((OUTER, INNER), np.float32), kind)
    return of_blocks(raw, kind), torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))


def packed(*weights: Weight, bias: torch.Tensor | None = None, parts: int = 1) -> PackedLinear:
    assert LIBRARY is not None
    return PackedLinear(LIBRARY, weights, bias, parts)


def inputs(rows: int = 9) -> torch.Tensor:
    x = torch.randn(rows, INNER, generator=torch.Generator().manual_seed(1))
    x[:, ::37] *= 30  # some numbers are much larger than the others, as in large models
    return x


def test_every_kind_of_the_library_is_tested() -> None:
    assert {stored(kind)[0].kind for kind in READERS} == {2, 3, 4, 6, 7, 8}  # the cases of `sum_quantized`


@pytest.mark.parametrize("kind", READERS)
def test_a_type_of_gguf_files_is_read_as_gguf_reads_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "AT_ONCE", 10_000)  # bytes: not all rows at a time
    weight, numbers = stored(kind)
    assert torch.equal(weight.float(), numbers)
    assert weight.shape == (OUTER, INNER)
    some = [3, 0, 150]
    assert torch.equal(weight[some].float(), numbers[some])


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(("code", "steps"), [(Quantized, 254), (Precise, 65024)])
def test_a_product_is_that_of_the_numbers_and_its_rows_are_the_same_bits_in_every_pass(
    code: type[Quantized], steps: int, kind: str
) -> None:
    weight, numbers = stored(kind)
    weight = code(**weight.parts())
    product, x, bias = packed(weight, bias=torch.ones(OUTER)), inputs(), torch.ones(OUTER)
    exact = x.double() @ numbers.double().T + bias
    together = product(x)
    sizes, weights = x.double().abs(), numbers.double().abs().T
    largest = sizes.unflatten(1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, 1)
    rounding = 2.0**-20 * (sizes @ weights)
    assert ((together - exact).abs() <= largest @ weights / steps + rounding).all()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8):  # of 9
        assert torch.equal(torch.cat([product(part) for part in x.split(rows)]), together), rows


@pytest.mark.skipif(cpu_instructions() == "neon", reason="these are instructions of x86")
@pytest.mark.parametrize(
    ("needed", "options"),
    [
        ("avx2", [*AVX2, "-mno-avxvnni"]),
        ("avx_vnni", [*AVX2, "-mavxvnni"]),
        ("avx512_bw", [*AVX512, "-mno-avx512vnni"]),
        ("avx512_vnni", [*AVX512, "-mavx512vnni"]),
    ],
)
def test_all_instructions_give_the_same_bits(needed: str, options: list[str]) -> None:
    """Of a CPU that also has others. Whatever the codes are, no sum of a group is too large for it."""
    if not cpu_has(needed):
        pytest.skip(f"this CPU has no {needed}")
    functions = compiled(SOURCE, "-DFLOAT16", "-DQUANTIZED", *options)
    assert functions is not None
    other, x = Library.of(functions, UNQUANTIZED, True), inputs()
    ones = torch.ones(4, INNER)
    for kind in READERS:
        weight, _ = stored(kind)
        assert torch.equal(PackedLinear(other, [weight], None)(x), packed(weight)(x)), kind
        for most in (weight.codes.max(), weight.codes.min()):
            largest = replace(weight, codes=torch.full_like(weight.codes, int(most)))
            product, numbers = PackedLinear(other, [largest], None)(ones), largest.float()
            assert (product[0] - numbers.sum(1)).abs().max() < 1e-4 * numbers.abs().sum(1).max()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float16, torch.int32])
@pytest.mark.parametrize("outer", [1, OUTER, 256])
def test_packing_puts_the_outputs_of_a_block_beside_one_another(outer: int, dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    for size in (1, 3, 64, 100):  # not whole lines of the cache
        part = torch.randn(outer, size).mul(50).to(dtype)
        blocks = F.pad(part, (0, 0, 0, -outer % LIBRARY.columns)).unflatten(0, (-1, LIBRARY.columns))
        assert torch.equal(LIBRARY.packed_columns(part), blocks.transpose(1, 2)), size


@pytest.mark.parametrize("kind", READERS)
def test_parts_that_do_not_go_together_are_refused(kind: str) -> None:
    """C reads as many numbers of each as the codes ask for."""
    parts = stored(kind)[0].parts()
    wrong = [{**parts, name: part[:-1]} for name, part in parts.items()]
    wrong += [{**parts, name: part[:, :-1]} for name, part in parts.items()]
    wrong += [{**parts, name: part[0]} for name, part in parts.items()]
    wrong += [{**parts, name: part[:, :0]} for name, part in parts.items()]
    wrong += [{**parts, name: part.view(torch.bfloat16)} for name, part in parts.items() if part.dtype == UNQUANTIZED]
    wrong += [{**parts, "codes": parts["codes"].view(other)} for other in (torch.int16, torch.int32)]
    wrong += [{**parts, "codes": parts["codes"][:, :-1]}]
    wrong += [{other: one for other, one in parts.items() if other != name} for name in parts if "unit" in name]
    if parts["codes"].dtype == torch.uint8:
        wrong += [{other: one for other, one in parts.items() if other not in ("lows", "low_units")}]
    for each in wrong:
        with refuses(ValueError, "quantized"):
            Quantized(**each)


def written_by_others(folder: Path, kind: str = "Q4_0") -> Path:
    """A folder whose safetensors file claims to have a weight that is quantized, with scales of another shape."""
    tokenizer = make_tokenizer()
    save(tiny("llama", len(tokenizer)), tokenizer, folder)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    numbers = tensors.pop(name).numpy()
    parts = of_blocks(blocks_of(numbers, kind), kind).parts()
    tensors |= {f"{name}:{part}": numbers[:, :1].contiguous() for part, numbers in parts.items()}
    tensors[f"{name}:codes"] = parts["codes"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "stored"])
def test_the_files_of_others_have_no_quantized_weights(tmp_path: Path, dtype: str) -> None:
    with refuses(*((BadInput, "quantized stored:") if dtype == "stored" else (LoadError, "lacks"))):
        load(preset_of(written_by_others(tmp_path / "model")), dtype, "cpu")


def test_the_parts_of_a_product_may_be_of_different_kinds() -> None:
    whole = torch.randn(OUTER, INNER).to(UNQUANTIZED)
    weights: list[Weight] = [stored("Q4_K")[0], whole, stored("Q6_K")[0]]
    together = packed(*weights, parts=6)
    x = inputs()
    assert together.sizes == (6, OUTER // 2, INNER)
    assert torch.equal(together(x), torch.cat([packed(weight)(x) for weight in weights], -1))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("code", [Quantized, Precise])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(wrong: float, code: type[Quantized], kind: str) -> None:
    x = inputs(3)
    x[1, 5] = wrong
    out = packed(code(**stored(kind)[0].parts()))(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_rows_of_zeros_give_zeros() -> None:
    assert torch.equal(packed(stored("Q8_0")[0])(torch.zeros_like(inputs(2))).float(), torch.zeros(2, OUTER))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_rounded_by_half_a_step(bits: int) -> None:
    weight = torch.randn(OUTER, INNER)
    weight[7] = 0
    weight[8, :GROUP] = 3.0
    rounded = quantized(weight, bits)
    steps = rounded.scales.float().repeat_interleave(GROUP, 1)
    assert ((rounded.float() - weight).abs() <= 0.5 * steps + 2e-3 * weight.abs().amax(1, keepdim=True)).all()
    assert 8 * rounded.nbytes / weight.numel() == {4: 5.0, 8: 8.5}[bits]
    weight[3, 5] = -1e7
    with pytest.raises(ValueError, match="too large for float16"):
        quantized(weight, bits)


# In models ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["stored", "stored16", "int8", "int4"])
def loaded(
    request: pytest.FixtureRequest, cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Iterator[Loaded]:
    """A model with weights of such a type, and untrained heads."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "initializer_range": 0.1,
    }
    model = tiny("llama", len(tokenizer), tie_word_embeddings=request.param.startswith("stored"), **sizes)
    heads = untrained_heads(len(tokenizer), 256, layers=2, heads=4, draft_vocab=len(tokenizer) - 20)
    files = {kind: tmp_path / f"{kind}.safetensors" for kind in heads}
    for kind, head in heads.items():
        save_head(head, files[kind], {})
    if request.param.startswith("stored"):
        write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, stored_in=KINDS)
        source: Any = Gguf(str(tmp_path / "tiny.gguf"))
    else:
        source = save(model, tokenizer, tmp_path / "model")
    ready = load(preset_of(source, heads=files, skip_layers=1), request.param, "cpu")
    yield ready
    ready.release()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@torch.inference_mode()
def test_a_model_computes_with_its_numbers(loaded: Loaded) -> None:
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    model = loaded.model.float()
    assert loaded.engine == "native"
    runner = loaded.target_runner(64)
    ids = [*prompt, 5, 6, 7]
    wanted = model(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
    got = torch.cat([runner.prefill(prompt), runner.forward([5, 6, 7])])
    dtype = loaded.environment()["weights_dtype"]
    assert (got - wanted).abs().max() < (1e-3 if dtype == "stored16" else 0.1) * wanted.abs().max()
    packed_bits = 8 * loaded.placement["cpu"] / sum(weight.numel() for weight in model.parameters())
    assert packed_bits < {"stored": 9, "stored16": 9, "int8": 9.1, "int4": 5.2}[dtype]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("k", "tree"),
    [(4, False), (8, True), *(pytest.param(AUTO, tree, marks=pytest.mark.slow) for tree in (False, True))],
)
def test_drafts_change_no_token(loaded: Loaded, k: int | str, tree: bool) -> None:
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    names = [*loaded.parts.head_files, "layer-skip", "suffix"]  # heads read the target's embeddings and outputs
    for settings, alone in texts_drafted_and_not(loaded, prompt, NEW_TOKENS):
        for name in (name for name in names if not (tree and loaded.cannot_branch(name))):
            events = list(start(loaded, name, prompt, replace(settings, k=k, tree=tree)))
            assert ids_of(events) == alone, name
            if tree and k != AUTO and name in loaded.parts.head_files:  # a suffix may never recur
                assert any(branches(event.drafted) for event in rounds_of(events)), name


@pytest.fixture(scope="module")
def real() -> Iterator[Loaded]:
    loaded = load(find_preset(DEFAULT_PRESET), "stored", "cpu")
    yield loaded
    loaded.release()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "k", "tree"), [("lookup-eagle", 4, False), ("eagle", 12, True), ("layer-skip", 4, False)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token_of_the_real_model(
    real: Loaded, name: str, k: int, tree: bool, temperature: float
) -> None:
    assert (real.engine, real.environment()["weights_dtype"]) == ("native", "stored")
    prompt = real.encode("Write a Python function that says whether a number is prime, with a docstring.")
    settings = Settings(k=k, tree=tree, temperature=temperature, seed=3, max_new_tokens=96)
    drafted, alone = (list(start(real, drafter, prompt, settings)) for drafter in (name, "none"))
    assert ids_of(drafted) == ids_of(alone)
    became = {token.outcome for event in rounds_of(drafted) for token in event.drafted}
    assert {DraftOutcome.ACCEPTED, DraftOutcome.REJECTED} <= became


@torch.inference_mode()
def test_a_file_kept_as_stored_has_the_numbers_of_one_that_was_converted(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows of queries and keys are in another order in the file, the head is tied, and one product is not quantized."""
    model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512, tie_word_embeddings=True)
    model.model.norm.weight += 0.1  # which bfloat16 does not hold
    kinds = {**KINDS, "attn_output": "F16"}
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, stored_in=kinds)
    preset = preset_of(Gguf(str(tmp_path / "tiny.gguf")))
    as_stored, converted = (load(preset, dtype, "cpu") for dtype in ("stored16", "float32"))
    ours, theirs = (dict(one.model.state_dict()) for one in (as_stored, converted))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    for name in ("model.norm.weight", product := "model.layers.1.self_attn.o_proj.weight"):
        exact = model.state_dict()[name]
        assert torch.equal(ours[name], exact.half().float() if name == product else exact), name
    assert len([entry for entry in cache.glob("*-stored-v*") if entry.is_dir()]) == 1
    again = load(preset, "stored16", "cpu")
    prompt = again.encode("the cat sat on the mat", raw=True)
    logits, same = (one.target_runner(64).prefill(prompt) for one in (as_stored, again))
    exact = as_stored.model.float()(torch.tensor([prompt])).logits[0, -1:]
    assert torch.equal(logits, same)
    assert (logits - exact).abs().max() < 1e-3 * exact.abs().max()
    for one in (as_stored, converted, again):
        one.release()


def test_a_head_whose_weights_are_too_large_is_refused_in_a_sentence(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512)
    head: Any = untrained_heads(len(tokenizer), 256, layers=2, heads=4, draft_vocab=len(tokenizer) - 20)["eagle"]
    head.fuse.weight.data[3, 5] = 1e8
    save_head(head, tmp_path / "eagle.safetensors", {})
    preset = preset_of(save(model, tokenizer, tmp_path / "model"), heads={"eagle": tmp_path / "eagle.safetensors"})
    loaded = load(preset, "int8", "cpu")
    with pytest.raises(BadInput, match=r"The head eagle\.safetensors cannot be used: .* too large for float16"):
        list(start(loaded, "eagle", [3, 5, 7], Settings(k=2, max_new_tokens=4)))
    loaded.release()


@torch.inference_mode()
def test_a_draft_model_has_four_bits_of_what_is_stored(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, stored_in=KINDS)
    source = Gguf(str(tmp_path / "tiny.gguf"))
    both = load(preset_of(source, source), "stored", "cpu")
    target, draft = both.model.state_dict(), both.draft_model.state_dict()
    fewer = set()
    for name, weight in target.items():
        if torch.equal(draft[name], quantized(weight, 4).float() if weight.dim() > 1 else weight):
            fewer.add(name.split(".")[-2])
        else:
            assert torch.equal(draft[name], weight), name  # it has 4 bits in the file
    assert {"embed_tokens", "v_proj", "o_proj", "up_proj", "down_proj"} <= fewer
    assert not fewer & {"q_proj", "k_proj"}
    logits, (exact,) = both.draft_runner(8).prefill([3, 5, 7]), both.draft_model(torch.tensor([[3, 5, 7]])).logits
    assert (logits[-1] - exact[-1]).abs().max() < 0.05 * exact[-1].abs().max()
    both.release()


@torch.inference_mode()
def test_numbers_too_large_for_float16_are_kept_in_norms_and_refused_in_products(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A file may mix quantized weights with bfloat16, which has the range of float32."""
    model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512, tie_word_embeddings=True)
    norm, product = model.model.layers[0].input_layernorm.weight, model.model.layers[1].self_attn.o_proj.weight
    norm[3] = 1e5
    kinds = {**KINDS, "attn_output": "BF16"}
    write_gguf(tmp_path / "norm.gguf", model, tokenizer=tokenizer, stored_in=kinds)
    preset = preset_of(Gguf(str(tmp_path / "norm.gguf")))
    as_stored, converted = (load(preset, dtype, "cpu") for dtype in ("stored16", "float32"))
    prompt = as_stored.encode("the cat sat on the mat", raw=True)
    ours, theirs = (one.target_runner(64).prefill(prompt) for one in (as_stored, converted))
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()
    as_stored.release()
    converted.release()
    product[5, 7] = 1e5
    write_gguf(tmp_path / "product.gguf", model, tokenizer=tokenizer, stored_in=kinds)
    with refuses(LoadError, "float16; float32."):
        load(preset_of(Gguf(str(tmp_path / "product.gguf"))), "stored", "cpu")


def test_what_cannot_be_quantized_is_refused_in_a_sentence(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny("gpt2", len(tokenizer)), tokenizer, tmp_path / "gpt2")
    with refuses(BadInput, "gpt2 int8"):
        load(preset_of(folder), "int8", "cpu")
    monkeypatch.setattr(preset_models, "library_for", lambda dtype, quantized: None)
    with refuses(BadInput, "stored AVX2 NEON."):
        load(preset_of(folder), "stored", "cpu")
    with refuses(BadInput, "int4"):
        preset_models.check_dtype(torch.quint4x2, torch.device("cuda"))


def test_of_a_model_only_the_head_may_be_quantized(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Its inputs are rounded too, which the test of an engine must allow."""
    model = tiny("llama", len(tokenizer), hidden_size=256, tie_word_embeddings=False)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, stored_in={"output": "Q8_0"})
    loaded = load(preset_of(Gguf(str(tmp_path / "tiny.gguf"))), "stored", "cpu")
    assert loaded.engine == "native"
    loaded.release()


def test_weights_are_called_stored_only_if_some_are_kept_quantized(
    cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    write_gguf(tmp_path / "float32.gguf", tokenizer=tokenizer)
    write_gguf(tmp_path / "joined.gguf", tokenizer=tokenizer, stored_in={"ffn_up": "Q8_0"})
    for module in (converting, room):
        monkeypatch.setattr(module, "WHOLE", {"llama"})  # as GPT-2, of which all is read by transformers
    targets: list[Source | Path] = [folder, *(Gguf(str(tmp_path / name)) for name in ("float32.gguf", "joined.gguf"))]
    for target in targets:
        for needing in (load, looked_at):
            with refuses(BadInput, "quantized stored:"):
                needing(preset_of(target), "stored", "cpu")


def test_embeddings_are_looked_up_by_rows() -> None:
    weight, numbers = stored("Q6_K")
    ids = torch.tensor([5, 5, 199])
    assert torch.equal(widened(weight)[ids], numbers[ids])


@pytest.mark.parametrize("tied", [True, False])
def test_a_plan_knows_the_size_of_weights_that_are_kept_as_stored(
    tied: bool, cache: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model of 4 bits would be refused where memory has no room for 16."""
    model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer=tokenizer, stored_in=KINDS)
    planned: list[Checkpoint] = []
    plan = loading.plan

    def watched(models: Sequence[Checkpoint], *others: Any) -> Any:
        planned.extend(models)
        return plan(models, *others)

    monkeypatch.setattr(loading, "plan", watched)
    loaded = load(preset_of(Gguf(str(tmp_path / "tiny.gguf"))), "stored", "cpu")
    assert weight_bytes(planned[0]) == pytest.approx(loaded.placement["cpu"], rel=0.05)
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel() * bits_kept(KINDS["token_embd"]) / 8
    found = looked_at(loaded.preset, "stored")
    assert laid_out_bytes(found) == pytest.approx(loaded.placement["cpu"] - looked_up, rel=0.01)
    loaded.release()
    monkeypatch.setattr(Wheel, "fetch", lambda *_: tmp_path / "tiny.gguf")
    found = looked_at(preset_of(write_wheel(tmp_path, tmp_path / "tiny.gguf")), "stored")
    assert laid_out_bytes(found) == pytest.approx(loaded.placement["cpu"], rel=0.01)

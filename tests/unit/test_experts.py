"""Mixtures of experts: rows that share experts, what is read of them, their files and the text of their models.

`test_families` compares their logits with transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from specdemo.decoding import batch
from specdemo.decoding.batch import decode_batch, read_together
from specdemo.decoding.events import Round
from specdemo.drafters.heads.files import save_head
from specdemo.engines.cpu.library import library_for
from specdemo.engines.families import mixture
from specdemo.engines.passes import PendingPass
from specdemo.engines.quantized import widened
from specdemo.models.loaded import load
from specdemo.models.sources import Gguf
from specdemo.models.weights import StoredWeights
from specdemo.racing.bandwidth import bytes_of, experts_counted, experts_read
from specdemo.racing.race import decoding_of, rule_for, start
from specdemo.racing.verdict import LaneVerdict
from specdemo.settings import Settings
from specdemo.system.hardware import UNQUANTIZED
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.classes import LaneFigures, Loaded
from tests.harness.doubles import ids_of
from tests.harness.files import write_gguf
from tests.harness.models import expected, looked_at, model_of, preset_of, rounded, run_by, save
from tests.harness.toys import untrained_heads

from ..sentences import tells

KINDS = ("mixtral", "qwen3_moe with dense layers", "flex_olmo")
needs_native = pytest.mark.skipif(library_for(torch.float32) is None, reason="no C library here")


@pytest.mark.parametrize("engine", ["native", "fused"])
@torch.inference_mode()
def test_experts_that_no_row_chose_are_not_read(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are no numbers."""
    model = model_of("mixtral", num_hidden_layers=1, num_experts_per_tok=2)
    chosen = list[torch.Tensor]()
    mlp = model.model.layers[0].mlp
    hook = mlp.gate.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
    wanted = model(torch.tensor([[3, 9]])).logits[0]
    hook.remove()
    others = set(range(6)) - set(chosen[0].flatten().tolist())
    assert others, "all experts are chosen"
    for expert in others:
        mlp.experts.gate_up_proj[expert] = mlp.experts.down_proj[expert] = torch.nan
    runner = run_by(engine, model, monkeypatch)(8)
    got = torch.cat([runner.prefill([3]), runner.forward([9])])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_first_of_equally_likely_experts_are_chosen_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the scores are no numbers either: then the text is none, but nothing is read beyond the buffers."""
    model = model_of("qwen3_moe", num_hidden_layers=1)
    layer = model.model.layers[0].mlp
    layer.gate.weight.zero_()
    layer.experts.down_proj[3:] = torch.nan
    runner = run_by("native", model, monkeypatch)(16)
    assert runner.prefill([3, 9, 4]).isfinite().all()
    layer.gate.weight.fill_(torch.nan)
    wrong = run_by("native", model, monkeypatch)(80).prefill(list(range(1, 60)))
    assert wrong.isnan().all()


# Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_a_tensor_for_each_matrix_are_read(kind: str, tmp_path: Path) -> None:
    model, cpu = model_of(kind), torch.device("cpu")
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    published = load_file(file)
    some = [name for name in published if ".experts.3." in name]
    assert len(some) == 3 * len([layer for layer in range(3) if mixture(model.config, layer)])
    parts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]  # an expert may be in another file
    save_file({name: published[name] for name in some}, parts[0])
    save_file({name: weight for name, weight in published.items() if name not in some}, parts[1])
    for files in ([file], parts):
        stored = StoredWeights.of(files, model.config, torch.float32, cpu)
        assert stored is not None
        assert all(torch.equal(widened(stored[name]), weight) for name, weight in model.named_parameters())
        assert stored.nbytes == 4 * sum(weight.numel() for weight in model.parameters())
    for wrong in ({}, {some[0]: torch.zeros(3, 3)}):
        save_file({name: published[name] for name in some[1:]} | wrong, parts[0])
        assert StoredWeights.of(parts, model.config, torch.float32, cpu) is None


@needs_native
@pytest.mark.parametrize("up", ["Q8_0", "Q4_0"])
@torch.inference_mode()
def test_experts_of_a_gguf_file_stay_as_they_are(
    up: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or become float16 if gates have another type than what they are multiplied with."""
    # Before there is another cache, for which they would be compiled again.
    _ = [*map(library_for, (torch.float32, UNQUANTIZED)), library_for(UNQUANTIZED, quantized=True)]
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    model = model_of("qwen3_moe", attention_bias=False, tie_word_embeddings=True)
    fields = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 64}
    stored_in = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": up, "ffn_down_exps": "Q8_0", "attn_q": "Q8_0"}
    write_gguf(tmp_path / "tiny.gguf", model, header=fields, tokenizer=tokenizer, stored_in=stored_in)
    preset = preset_of(Gguf(str(tmp_path / "tiny.gguf")))
    found = looked_at(preset, "stored16")
    loaded = load(preset, "stored16", "cpu")
    assert expected(found) == (loaded.engine, True) == ("native", True)
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    wanted = loaded.model.float()(torch.tensor([prompt])).logits[0, -1:]
    got = loaded.target_runner(64).prefill(prompt)
    numbers = load(preset, "float32", "cpu")
    exact = numbers.target_runner(64).prefill(prompt)
    assert (got - wanted).abs().max() < 1e-3 * wanted.abs().max()
    assert (got - exact).abs().max() < 2e-2 * wanted.abs().max()
    experts = model.config.num_hidden_layers * 6 * 3 * 96 * 64
    assert loaded.environment()["experts"]["bytes"] > experts / 2
    for one in (loaded, numbers):
        one.release()


# Texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[*KINDS, "int8"])
def loaded(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Loaded]:
    """With untrained heads."""
    kind, dtype = ("qwen3_moe", "int8") if request.param == "int8" else (request.param, "float32")
    heads = untrained_heads(len(tokenizer), 96, layers=3, heads=4, draft_vocab=len(tokenizer) - 20)
    files = {name: tmp_path / f"{name}.safetensors" for name in heads}
    for name, head in heads.items():
        save_head(head, files[name], {})
    folder = save(rounded(model_of(kind)), tokenizer, tmp_path / "model")
    ready = load(preset_of(folder, heads=files, skip_layers=1), dtype, "cpu")
    yield ready
    ready.release()


@needs_native
@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_each_of_several_texts_at_once_is_what_it_is_alone(
    loaded: Loaded, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and texts of unequal length, one to four at a time, greedy and sampled, chains and trees."""
    prompts = [loaded.encode("the cat sat on the mat"[:length], raw=True) for length in (9, 3, 22, 14)]
    settings = [
        Settings(k=1 + index, temperature=0.8 * (index % 2), max_new_tokens=7 + 4 * index, seed=index, tree=index > 1)
        for index in range(4)
    ]
    both = list(zip(prompts, settings, strict=True))
    alone = {index: ids_of(list(start(loaded, "none", *run))) for index, run in enumerate(both)}
    shared = list[int]()

    def watched(passes: Sequence[PendingPass]) -> list[torch.Tensor]:
        shared.append(len(passes))
        return read_together(passes)

    monkeypatch.setattr(batch, "read_together", watched)
    for at_once in range(1, 5):
        shared.clear()
        texts: dict[int, list[Any]] = {index: [] for index in alone}
        decodings = (decoding_of(loaded, drafter, prompt, rule_for(each), None) for prompt, each in both)
        for index, event in decode_batch(decodings, at_once):
            texts[index].append(event)
        assert {index: ids_of(events) for index, events in texts.items()} == alone
        assert max(shared) == at_once


@needs_native
@torch.inference_mode()
def test_the_numbers_of_a_model_are_those_that_transformers_gets(loaded: Loaded) -> None:
    """Nearly, of int8 weights. Routers keep theirs: another expert would change all."""
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    wanted = loaded.model.float()(torch.tensor([prompt])).logits[0, -1:]
    got = loaded.target_runner(64).prefill(prompt)
    error = 0.1 if loaded.environment()["weights_dtype"] == "int8" else 1e-3
    assert (got - wanted).abs().max() < error * wanted.abs().max()


# Bytes ------------------------------------------------------------------------------------------------------------


def test_the_experts_of_a_pass_are_estimated_as_if_rows_chose_them_at_random() -> None:
    assert experts_read(128, 8, 1) == pytest.approx(8)
    generator, seen = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        seen += torch.rand(5, 128, generator=generator).topk(8).indices.unique().numel()
    assert experts_read(128, 8, 5) == pytest.approx(seen / 400, rel=0.02)


@needs_native
def test_what_a_race_reads_of_the_experts_is_counted(loaded: Loaded) -> None:
    """As the routers of transformers' model choose."""
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    assert "read" not in loaded.environment()["experts"], "nothing has been read"
    runner: Any = loaded.target_runner(64)
    runner.prefill(prompt)
    counted = loaded.environment()["experts"]["read"]
    model, chosen = loaded.model.float(), list[torch.Tensor]()
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    assert counted == {str(len(prompt)): fmean(one.unique().numel() for one in chosen)}
    settings = Settings(k=2, max_new_tokens=12)
    lane = LaneFigures.of(start(loaded, "eagle", prompt, settings))
    environment = loaded.environment()
    assert environment["experts"]["read"]["1"] == loaded.experts["used"]
    read = experts_counted(lane, environment)
    assert read is not None
    assert loaded.experts["used"] <= read <= loaded.experts["count"]


def test_a_pass_over_more_rows_reads_more_experts() -> None:
    def run(lengths: list[int], seconds: float) -> LaneFigures:
        token = Token(1, TokenKind.ACCEPTED)
        drafts = [(DraftedToken(1, DraftOutcome.ACCEPTED),) * length for length in lengths]
        emitted = 40 // len(lengths)
        return LaneFigures.of(
            Round(i, draft, (token,) * emitted, 0.0, seconds, seconds) for i, draft in enumerate(drafts)
        )

    plain, lane = run([0] * 40, 1.0), run([3] * 20, 2.0)
    environment: dict[str, Any] = {
        "bytes_per_pass": 10 * 10**9,
        "experts": {"count": 8, "used": 2, "bytes": 32 * 10**9},
    }
    assert bytes_of(plain, environment) == 10 * 10**9
    distinct = 8 * (1 - 0.75**4)
    assert bytes_of(lane, environment) == pytest.approx((2 + 4 * distinct) * 1e9)
    assert bytes_of(lane, {"bytes_per_pass": 7}) == bytes_of(lane, {"bytes_per_pass": 7, "experts": "8"}) == 7

    def figures() -> list[str]:
        found = LaneVerdict(plain, lane, environment=environment).as_dict()["numbers"]
        return [value for name, value in found if tells(name, "pass,")]

    assert figures()[0].startswith("10.000 GB")
    assert figures()[1].startswith(f"{2 + 4 * distinct:.3f} GB, estimated")
    environment["experts"] |= {"read": {"1": 2.0, "3": 3.5, "4": 3.75}}
    lane = run([3] * 12 + [2] * 4 + [0] * 4, 2.0)
    read = (12 * 3.75 + 4 * 3.5 + 4 * 2.0) / 20  # four rounds had no draft
    assert bytes_of(lane, environment) == pytest.approx((2 + 4 * read) * 1e9)
    assert figures()[1].startswith(f"{2 + 4 * read:.3f} GB, by ")  # those that were counted
    environment["experts"]["read"].pop("3")
    assert experts_counted(lane, environment) is None

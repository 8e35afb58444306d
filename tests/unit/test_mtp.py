"""The multi-token-prediction layers that targets bring: what they draft, against a forward written here, and refusals.

The checkpoints are random and tiny, with the names of tensors that the families publish: a model of three layers is
saved, and its third layer becomes the decoder layer of the MTP layer of a model of two.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.decoding.acceptance import Answer
from specdemo.decoding.drafter import Drafter
from specdemo.drafters.mtp import Mtp
from specdemo.engines.eager import PreallocatedCache
from specdemo.engines.families import FAMILIES
from specdemo.engines.hybrid import HybridRunner
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.mtp import find_mtp
from specdemo.models.store import LoadError
from specdemo.racing.race import check_drafter, race, rule_for, start
from specdemo.racing.request import Request
from specdemo.racing.summary import summary
from specdemo.settings import Settings
from specdemo.tokens import DraftOutcome
from tests.harness.doubles import Scripted, ids_of, proposed, rounds_of
from tests.harness.models import preset_of, save, tiny, unread
from tests.harness.texts import decode, generated, plain_text

from ..sentences import tells
from .test_model_types import SIZES as SMALL

SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "initializer_range": 0.2}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LAYERS = ["linear_attention", "full_attention", "full_attention"]
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
APART = {kind for kind, family in FAMILIES.items() if family.mtp == "apart"}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**LINEAR, "layer_types": LAYERS},
    "qwen3_next": {**LINEAR, **EXPERTS, "layer_types": LAYERS},
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS, "layer_types": LAYERS},
    "glm4_moe": {**ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {**ROUTED, **LATENT, **GROUPS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v3": {**ROUTED, **LATENT, **GROUPS},
}
PROMPT = "the cat sat on the mat"


def donor(kind: str, vocab_size: int) -> PreTrainedModel:
    """A random model of three layers, norms included. Its embeddings are large, so that the last token says much about
    the next, and some guesses are right."""
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2 if "qk_nope_head_dim" in KINDS[kind] else 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **{**sizes, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "e_score_correction_bias" in name:
                weight.add_(0.3 * torch.randn_like(weight))
        model.get_input_embeddings().weight.mul_(40)
    return model


def publish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint of two layers and an MTP layer. Returns the MTP layer's own tensors, by names of this file."""
    kind, hidden = model.config.model_type, model.config.hidden_size
    save(model, tokenizer, folder)
    of_norms = 0.2 * torch.randn(3, hidden) + (0 if kind in APART else 1)
    own = dict(zip(("embedding_norm", "hidden_norm", "norm"), of_norms, strict=True))
    own["projection"] = torch.cat([20 * torch.eye(hidden), 3 * torch.randn(hidden, hidden)], -1)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:2]
    if kind in APART:
        names = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "projection": "fc"}
        weights = {name.replace("model.layers.2.", "mtp.layers.0."): weight for name, weight in weights.items()}
        weights |= {f"mtp.{names.get(name, name)}.weight": weight for name, weight in own.items()}
        if kind == "qwen3_5_moe_text":  # its experts are published in one tensor
            experts = [
                [weights.pop(f"mtp.layers.0.mlp.experts.{expert}.{name}_proj.weight") for expert in range(4)]
                for name in ("gate", "up", "down")
            ]
            gates, ups, downs = map(torch.stack, experts)
            weights["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.cat([gates, ups], 1)
            weights["mtp.layers.0.mlp.experts.down_proj"] = downs
    else:
        names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
        config["num_nextn_predict_layers"] = 1
        weights |= {f"model.layers.2.{names[name]}.weight": weight for name, weight in own.items()}
        own["embedding"] = weights["model.embed_tokens.weight"].clone()
        own["output"] = weights["lm_head.weight"].clone()
        if kind == "glm4_moe_lite":  # its embeddings are its own; those of the others are copies
            for name in ("embedding", "output"):
                own[name] += 0.25 * own[name].std() * torch.randn_like(own[name])
        weights["model.layers.2.embed_tokens.weight"] = own["embedding"]
        weights["model.layers.2.shared_head.head.weight"] = own["output"]
    rewrite(folder, weights)
    (folder / "config.json").write_text(json.dumps(config))
    return own


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


Published = tuple[Path, PreTrainedModel, dict[str, Tensor]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Published]:
    folder, all_of_them = tmp_path_factory.mktemp("mtp"), {}
    for kind in KINDS:
        model = donor(kind, len(tokenizer))
        all_of_them[kind] = folder / kind, model, publish(model, tokenizer, folder / kind)
    return all_of_them


# What it drafts, written here --------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, kind: str, eps: float) -> Tensor:
    """An RMS norm; the weights of Qwen's count from 1."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight if kind in APART else weight)


@torch.inference_mode()
def expected_draft(one: Published, context: Sequence[int], k: int) -> list[int]:
    """The k likeliest tokens in a chain, each by one pass of the MTP layer over the whole text, without a cache."""
    _, model, own = one
    kind, eps, decoder = model.config.model_type, model.config.rms_norm_eps, model.get_decoder()
    layers = [*decoder.layers]
    try:
        decoder.layers = torch.nn.ModuleList(layers[:2])
        decoder.config.num_hidden_layers = 2
        states = decoder(torch.tensor([list(context[:-1])])).last_hidden_state[0]  # after the final norm
    finally:
        decoder.layers, decoder.config.num_hidden_layers = torch.nn.ModuleList(layers), 3
    embedding = own.get("embedding", model.get_input_embeddings().weight)
    following, drafted = list(context[1:]), list[int]()
    for _ in range(k):
        embedded = normed(embedding[following], own["embedding_norm"], kind, eps)
        both = torch.cat([embedded, normed(states, own["hidden_norm"], kind, eps)], -1)
        x = F.linear(both, own["projection"])
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        if kind == "qwen3_5_text":
            x = qwen_layer(layers[2], x, model.config)
        else:
            rotations = decoder.rotary_emb(x[None], positions)
            x = layers[2](x[None], position_embeddings=rotations, attention_mask=mask, position_ids=positions)[0]
        output = normed(x[-1:], own["norm"], kind, eps)
        drafted.append(int(F.linear(output, own.get("output", model.lm_head.weight)).argmax()))
        states, following = torch.cat([states, output]), [*following, drafted[-1]]
    return drafted


def qwen_layer(layer: Any, x: Tensor, config: Any) -> Tensor:
    """A dense decoder layer of Qwen3.5 with full attention, without its code: gated, and rotated in part."""
    attention, kind, eps, width = layer.self_attn, "qwen3_5_text", config.rms_norm_eps, config.head_dim
    y = normed(x, layer.input_layernorm.weight, kind, eps)
    q, gate = F.linear(y, attention.q_proj.weight).view(len(x), -1, 2 * width).chunk(2, -1)
    k, v = (F.linear(y, part.weight).view(len(x), -1, width) for part in (attention.k_proj, attention.v_proj))
    q, k = normed(q, attention.q_norm.weight, kind, eps), normed(k, attention.k_norm.weight, kind, eps)
    rotated = int(width * config.rope_parameters["partial_rotary_factor"])
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, rotated, 2) / rotated)
    angles = torch.arange(len(x))[:, None, None] * frequencies

    def turned(heads: Tensor) -> Tensor:
        a, b = heads[..., :rotated].chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., rotated:]], -1)

    q, k, v = (part.transpose(0, 1) for part in (turned(q), turned(k), v))
    k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    x = x + F.linear((seen * gate.sigmoid()).flatten(1), attention.o_proj.weight)
    y = normed(x, layer.post_attention_layernorm.weight, kind, eps)
    up = F.silu(F.linear(y, layer.mlp.gate_proj.weight)) * F.linear(y, layer.mlp.up_proj.weight)
    return x + F.linear(up, layer.mlp.down_proj.weight)


class Helped(Scripted):
    """Asks the MTP layer for a draft and keeps it, but hands on one of which more and more tokens are right."""

    def __init__(self, inner: Drafter, text: Sequence[int]) -> None:
        super().__init__(self.helped)
        self.inner, self.text, self.drafts = inner, text, list[tuple[list[int], list[int]]]()

    def helped(self, context: list[int], k: int) -> list[int]:
        self.drafts.append((context, [int(token) for token in proposed(self.inner, context, k).token_ids]))
        right = (len(self.drafts) - 1) % (k + 1)
        following = self.text[len(context) : len(context) + k]
        return [token if place < right else token + 1 for place, token in enumerate(following)]

    def observe(self, answer: Answer) -> None:
        super().observe(answer)
        self.inner.observe(answer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_forward_without_a_cache(published: dict[str, Published], kind: str) -> None:
    """After rounds in which none, some and all of the drafted tokens were right."""
    loaded = load(preset_of(published[kind][0]), "float32", "cpu")
    prompt, settings = loaded.encode(PROMPT, raw=True), Settings(k=3, max_new_tokens=30)
    text = [*prompt, *plain_text(loaded.target_runner(64), prompt, settings)]
    runner, rule = loaded.target_runner(64), rule_for(settings)
    helped = Helped(Mtp.build(loaded.parts, runner, rule), text)
    events = list(decode(runner, helped, prompt, settings, rule=rule))
    assert [*prompt, *ids_of(events)] == text
    assert {answer.accepted for answer in helped.answers} == {0, 1, 2, 3}
    for context, drafted in helped.drafts:
        assert drafted == expected_draft(published[kind], context, len(drafted))
    loaded.release()


def test_every_family_that_is_read_is_tested_here() -> None:
    assert KINDS.keys() == {kind for kind, family in FAMILIES.items() if family.mtp}


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_generate_and_of_the_target_alone(published: dict[str, Published], kind: str) -> None:
    loaded = load(preset_of(published[kind][0]), "float32", "cpu")
    assert isinstance(loaded.target_runner(8), HybridRunner) == (kind in APART)
    prompt, seen = loaded.encode(PROMPT, raw=True), set[DraftOutcome]()
    for seed, temperature in enumerate((0.0, 0.8, 0.8)):
        settings = Settings(k=2, temperature=temperature, seed=seed, max_new_tokens=24, top_k=2)
        alone, events = (list(start(loaded, drafter, prompt, settings)) for drafter in ("none", "mtp"))
        assert ids_of(events) == ids_of(alone)
        seen |= {token.outcome for event in rounds_of(events) for token in event.drafted}
        if not temperature:
            assert ids_of(events) == generated(loaded.model, prompt, 24)[: len(ids_of(events))]
    assert {DraftOutcome.ACCEPTED, DraftOutcome.REJECTED} <= seen
    loaded.release()
    assert not loaded.parts.ready_heads


def found_in(model: PreTrainedModel, folder: Path, *devices: str) -> Any:
    placement, files = dict.fromkeys(devices or ("cpu",), 1), [folder / "model.safetensors"]
    return find_mtp(unread(model.config), files, "eager", placement, lambda: model)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe", "deepseek_v3"])
def test_a_layer_has_the_number_types_of_its_target(published: dict[str, Published], kind: str) -> None:
    """In bfloat16, with what the family keeps in float32: the correction of the experts' scores."""
    folder = published[kind][0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    open_mtp = found_in(model, folder)
    assert not isinstance(open_mtp, str)
    before = copy.deepcopy(model.state_dict())
    head = open_mtp()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    layer, target = head.layer.layers[0].mtp_block, model.get_decoder().layers[-1]
    types = {name: tensor.dtype for name, tensor in target.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in layer.state_dict().items()} == types
    assert set(types.values()) == {torch.bfloat16, *([] if kind in APART else [torch.float32])}
    states = head.normed(torch.randn(3, model.config.hidden_size))
    output, logits = head.read(states, torch.tensor([3, 4, 5]), PreallocatedCache(8), 0)
    assert output.dtype == states.dtype == torch.bfloat16
    assert logits.shape == (1, model.config.vocab_size)


def test_a_layer_in_a_file_of_its_own_inside_a_larger_configuration(
    published: dict[str, Published], tmp_path: Path
) -> None:
    """As Qwen3.5 is published: with the weights of the model under `language_model`, beside those for images."""
    folder, _, _ = published["qwen3_5_text"]
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text, "architectures": ["Qwen3_5ForConditionalGeneration"]}
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    parts = [{name: named[name] for name in named if name.startswith("mtp.") == mine} for mine in (True, False)]
    places: dict[str, str] = {}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=lambda *_: {"model.safetensors"})
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"part-{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(part, f"part-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts = []
    for place in (folder, tmp_path):
        loaded = load(preset_of(place), "float32", "cpu")
        events = start(loaded, "mtp", loaded.encode(PROMPT, raw=True), Settings(k=3, max_new_tokens=8))
        drafts.append([token.id for event in rounds_of(events) for token in event.drafted])
        loaded.release()
    assert drafts[0] == drafts[1] != []


# Told and refused ----------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    """Why a checkpoint cannot be drafted for by its MTP layer."""
    loaded = load(preset_of(folder), "float32", "cpu")
    try:
        check_drafter(loaded, "mtp")
        with pytest.raises(LoadError) as raised:
            list(start(loaded, "mtp", loaded.encode(PROMPT, raw=True), Settings(k=2, max_new_tokens=4)))
        return str(raised.value)
    except BadInput as error:
        return str(error)
    finally:
        assert len(list(start(loaded, "none", [3, 4, 5], Settings(max_new_tokens=4)))) > 1
        loaded.release()


@pytest.mark.parametrize(
    ("kind", "changed", "sentence"),
    [
        ("qwen3_5_text", {}, "mtp preset without MTP"),
        ("qwen3_5_text", {"mtp.fc.weight": None}, "lacks layers.0.eh_proj.weight."),
        ("qwen3_5_text", {"mtp.fc.weight": torch.ones(64, 64)}, "shape"),
        ("qwen3_5_text", {"mtp.fc.bias": torch.ones(64)}, "known: layers.0.eh_proj.bias."),
        ("qwen3_5_text", {"mtp.layers.1.mlp.up_proj.weight": torch.ones(1)}, "2 MTP single"),
        ("qwen3_next", {"mtp.layers.0.mlp.experts.3.up_proj.weight": None}, "MTP layer"),
        ("glm4_moe", {"model.layers.2.embed_tokens.weight": torch.ones(9, 64)}, "embed_tokens [9, 64],"),
        ("deepseek_v3", {"model.layers.2.self_attn.kv_b_proj.weight": None}, "lacks"),
        ("glm4_moe", {"model.layers.3.eh_proj.weight": torch.ones(1)}, "2 MTP single"),
    ],
)
def test_what_is_absent_or_damaged_is_refused_in_one_sentence(
    published: dict[str, Published], tmp_path: Path, kind: str, changed: dict[str, Tensor | None], sentence: str
) -> None:
    shutil.copytree(published[kind][0], tmp_path, dirs_exist_ok=True)
    weights: dict[str, Any] = {**load_file(tmp_path / "model.safetensors"), **changed}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    rewrite(tmp_path, {name: weight for name, weight in kept.items() if changed or not name.startswith("mtp.")})
    message = refusal(tmp_path)
    assert tells(message, sentence)
    assert message.count(". ") == 0
    assert message.endswith(".")


def test_the_layer_of_a_target_that_is_quantized_or_spread_is_refused(published: dict[str, Published]) -> None:
    folder, model, _ = published["deepseek_v3"]
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    other.config.num_hidden_layers = 2
    assert tells(found_in(other, folder, "cuda:0", "cuda:1"), "several devices, MTP")
    other.config.quantization_config = {"quant_method": "fp8"}
    assert tells(found_in(other, folder), "quantized MTP")


def test_the_layers_of_other_families_are_refused_by_name(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save(tiny("llama", len(tokenizer)), tokenizer, tmp_path)
    rewrite(tmp_path, {**load_file(tmp_path / "model.safetensors"), "model.mtp.0.eh_proj.weight": torch.ones(1)})
    assert tells(refusal(tmp_path), "MTP whose")


def test_the_summary_of_a_race_doubts_a_layer_that_is_mostly_wrong(published: dict[str, Published]) -> None:
    loaded = load(preset_of(published["qwen3_5_text"][0]), "float32", "cpu")
    assert loaded.head_formats == {"mtp": "MTP"}
    prompt, settings = loaded.encode(PROMPT, raw=True), Settings(k=2, max_new_tokens=40)
    asked = Request("", "", "mtp", settings).drafted
    sentence = summary(loaded, prompt, settings, list(race(loaded, "mtp", prompt, settings)), asked)["sentence"]
    assert tells(sentence, "MTP 70% 90%")
    assert tells(sentence, "MTP fine-tuned")
    loaded.release()

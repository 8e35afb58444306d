"""Heads that cannot be right are refused in one sentence, with both shapes where a shape is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.drafters.heads.files import load_published
from specdemo.drafters.heads.formats import format_of
from specdemo.drafters.heads.networks import EagleHead
from specdemo.models.presets import Preset
from specdemo.models.published_heads import fetch_heads
from specdemo.models.sources import Folder
from specdemo.types import BadInput
from tests.unit import published
from tests.unit.published import HIDDEN, LAYERS, Config, Tensors, write
from tests.unit.test_published_heads import TARGET
from tests.unit.toys import MODEL_VOCAB

from ..refusals import refuses

NAME = "The head it"


def fetched(folder: Path, kind: str, family: str = "llama") -> None:
    """What a load does with a head that a person asked for, before it fetches the target's weights."""
    sizes = {"vocab_size": MODEL_VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    config = SimpleNamespace(**sizes, model_type=family, rms_norm_eps=1e-5)
    config.get_text_config = lambda: config
    preset = Preset("toy", "Toy", "Toy.", Folder(folder), heads={kind: Folder(folder)}, asked_heads=(kind,))
    target: Any = SimpleNamespace(config=config)
    fetch_heads(preset, target, lambda *stage: None)


def floats(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes)


# By the head that is good: what is said of it after a change to its configuration or its tensors, None to one left out.
WRONG: dict[Callable[[int], tuple[Config, Tensors]], dict[str, tuple[str, dict[str, Any]]]] = {
    published.eagle3: {
        "another width": (
            "was trained for a target of 61 tokens and hidden size 64, but this one has 61 and 32.",
            {"hidden_size": 64},
        ),
        "another vocabulary": (
            "was trained for a target of 99 tokens and hidden size 32, but this one has 61 and 32.",
            {"vocab_size": 99},
        ),
        "fewer states": (
            "has the tensor fc.weight of shape [32, 64], but its configuration and this target ask for [32, 96].",
            {"fc.weight": floats(32, 64)},
        ),
        "another number of layers read": (
            "has the tensor fc.weight of shape [32, 96], but its configuration and this target ask for [32, 64].",
            {"eagle_aux_hidden_state_layer_ids": [2, 3]},
        ),
        "other heads": (
            "has the tensor layers.0.self_attn.q_proj.weight of shape [32, 64], but its configuration and "
            "this target ask for [64, 64].",
            {"head_dim": 16},
        ),
        "rows of the output": (
            "has the tensor lm_head.weight of shape [39, 32], but its configuration and this target ask for [40, 32].",
            {"lm_head.weight": floats(39, 32)},
        ),
        "no norm": ("lacks the tensor norm.weight of shape [32].", {"norm.weight": None}),
        "no table of tokens": ("lacks the tensor d2t of shape [40].", {"d2t": None}),
        "tokens that there are not": (
            "has a table d2t that names 40 different tokens from 50 to 89, but it should name 40 of 61.",
            {"d2t": torch.full((40,), 50)},
        ),
        "a token twice": (
            "has a table d2t that names 39 different tokens from 0 to 38, but it should name 40 of 61.",
            {"d2t": torch.cat([torch.zeros(39), torch.tensor([-1.0])]).long()},
        ),
        "a tensor too many": (
            "has the tensor layers.0.mlp.down_proj.bias of shape [32], which is not known here: it may "
            "compute something else.",
            {"midlayer.mlp.down_proj.bias": floats(32)},
        ),
        "quantized": (
            "has the tensor fc.weight in int8, but quantized weights are not read here.",
            {"fc.weight": floats(32, 96).to(torch.int8)},
        ),
        "a state that there is not": (
            "reads the target's hidden states [0, 3, 6], but this target has those from 1 to 6.",
            {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        ),
        "two layers": ("has 2 decoder layers; EAGLE heads of one layer are read here.", {"num_hidden_layers": 2}),
        "another activation": ("has the activation 'gelu'; only 'silu' is read here.", {"hidden_act": "gelu"}),
        "another rotation": (
            'rotates its keys in a way that is not read here: {"rope_type": "longrope", "factor": 2}.',
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
        ),
        "no sizes": ("has no whole number intermediate_size in its configuration: 0.", {"intermediate_size": 0}),
        "a size that is not stated": (
            "has no whole number intermediate_size in its configuration: 0.",
            {"intermediate_size": None},
        ),
        "a fraction of heads": (
            "has no whole number num_attention_heads in its configuration: 4.5.",
            {"num_attention_heads": 4.5},
        ),
        "a norm that is a word": ("has a rms_norm_eps that is not read here: 'small'.", {"rms_norm_eps": "small"}),
        "heads that do not divide": (
            "has 4 heads for queries, 3 for keys and a head_dim of 8: the second must divide the first, "
            "and the third must be even.",
            {"num_key_value_heads": 3},
        ),
        "half a rotation": (
            'rotates its keys in a way that is not read here: {"rope_type": "llama3"}.',
            {"rope_scaling": {"rope_type": "llama3"}},
        ),
        "a vocabulary that is no number": (
            "has no whole number draft_vocab_size in its configuration: 'all'.",
            {"draft_vocab_size": "all"},
        ),
    },
    published.medusa: {
        "Medusa without an output": (
            "lacks the tensor 2.2.weight of shape [61, 32].",
            {"medusa_head.2.2.weight": None},
        ),
        "Medusa of another width": (
            "has the tensor 0.0.linear.weight of shape [64, 64], but its configuration and this target "
            "ask for [32, 32].",
            {"medusa_head.0.0.linear.weight": floats(64, 64)},
        ),
        "Medusa without places": (
            "needs whole numbers medusa_num_heads and medusa_num_layers, but it has (None, 2).",
            {"medusa_num_heads": None},
        ),
    },
    published.dflash: {
        "a target of other depth": (
            "was trained for a target of 36 layers, but this one has 6.",
            {"num_target_layers": 36},
        ),
        "no mask": (
            "needs a block_size of 2 or more and a mask_token_id below 61, but its configuration has 5 and 61.",
            {"dflash_config": {"mask_token_id": MODEL_VOCAB, "target_layer_ids": [1, 2, 4]}},
        ),
        "windows of another number of layers": (
            "has 2 decoder layers, but its layer_types are ['full_attention'] and its sliding_window is 4.",
            {"layer_types": ["full_attention"]},
        ),
        "Domino": (
            "is of the kind 'domino', which is not read here: DFlash, DFlash 2 and DSpark are.",
            {"dflash_config": {"projector_type": "domino"}},
        ),
    },
    published.dspark: {
        "another Markov head": (
            "has a Markov head of the type 'gated'; only 'vanilla' is read here.",
            {"markov_head_type": "gated"},
        ),
    },
    published.library_dflash: {
        "causal blocks": ("has layers in which a block is causal; those are not read here.", {"causal": True}),
    },
    published.deepspec_eagle3: {
        "layers of DeepSpec's EAGLE-3 that there are not": (
            "reads the target's hidden states [1, 2, 6], but this target has those from 0 to 5.",
            {"target_layer_ids": [1, 2, 6]},
        ),
    },
    published.library_eagle3: {
        "DFly": (
            "is of the speculators kind 'dfly', which is not read here: eagle3, peagle, dflash, dflash2, dspark are.",
            {"speculators_model_type": "dfly"},
        ),
    },
    published.peagle: {
        "P-EAGLE without a mask token": (
            "needs a mask token below 61, but mask_token_id, pard_token, ptd_token_id in its "
            "configuration are [None, None, 61].",
            {"ptd_token_id": MODEL_VOCAB},
        ),
        "P-EAGLE without the state of a mask": ("lacks the tensor mask_hidden of shape [96].", {"mask_hidden": None}),
        "P-EAGLE of fewer layers": (
            "lacks the tensor layers.3.input_layernorm.weight of shape [32].",
            {"num_hidden_layers": 4},
        ),
    },
    published.library_dflash2: {
        "kernels longer than a block": (
            "has kernels of 5 tokens in groups of 4 channels and chooses from 6 tokens: these do not fit "
            "a block of 4, a hidden size of 32 and 61 tokens.",
            {"conv_kernel_size": 5},
        ),
        "other groups of channels": (
            "has the tensor layers.0.attention_conv.kernel_projection.weight of shape [48, 32], but its "
            "configuration and this target ask for [24, 32].",
            {"conv_group_size": 8},
        ),
        "fewer tokens in DFlash 2": (
            "drafts 40 of 61 tokens; DFlash 2 is read here where it drafts all of them.",
            {"draft_vocab_size": 40},
        ),
        "scaled logits": (
            "scales its embeddings by 1 and its logits by 0.5, or caps them by 0; that is not read here.",
            {"output_multiplier": 0.5},
        ),
        "no taps": ("has no whole number conv_kernel_size in its configuration: 0.", {"conv_kernel_size": 0}),
        "causal blocks of DFlash 2": (
            "has layers in which a block is causal; those are not read here.",
            {"sliding_window_non_causal": False},
        ),
    },
    published.dflash2: {
        "no selector": (
            "lacks the tensor candidate_selector.successor_codebook of shape [61, 16].",
            {"candidate_selector.successor_codebook": None},
        ),
        "experts in DFlash 2": (
            "has the tensor layers.1.mlp.gate.weight of shape [8, 32], which is not known here: it may "
            "compute something else.",
            {"layers.1.mlp.gate.weight": floats(8, 32)},
        ),
    },
}


@pytest.mark.parametrize(
    ("make", "sentence", "change"),
    [
        pytest.param(make, sentence, change, id=name)
        for make, wrong in WRONG.items()
        for name, (sentence, change) in wrong.items()
    ],
)
def test_a_wrong_head_is_refused_in_a_sentence(
    make: Callable[[int], tuple[Config, Tensors]], sentence: str, change: dict[str, Any], tmp_path: Path
) -> None:
    config, tensors = make(MODEL_VOCAB)
    kind = format_of(config, NAME).kind
    fetched(write(tmp_path / "good", config, tensors), kind)
    of_tensors = {name for name, value in change.items() if name in tensors or isinstance(value, torch.Tensor)}
    config |= {name: value for name, value in change.items() if name not in of_tensors}
    tensors |= {name: change[name] for name in of_tensors}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(BadInput) as refused:
        fetched(write(tmp_path / "it", config, kept), kind)
    assert str(refused.value) == f"{NAME} {sentence}"


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (published.dflash, {"sliding_window": -1000001}, "has no whole number sliding_window"),
        (published.dflash, {"num_hidden_layers": 10**9}, "has no whole number num_hidden_layers"),
        (published.dflash, {"dflash_config": "a"}, "dflash_config is 'a'"),
        (published.eagle3, {"architectures": 5}, "architectures is 5"),
        (published.medusa, {"medusa_num_layers": 10**9}, "needs whole numbers medusa_num_heads and medusa_num_layers"),
        (published.library_eagle3, {"transformer_layer_config": [1]}, "transformer_layer_config is"),
        (published.library_eagle3, {"speculators_config": {"verifier": [1]}}, ""),
    ],
)
def test_settings_that_no_head_has_are_refused_before_memory_is_taken(
    tmp_path: Path, make: Callable[[int], tuple[Config, Tensors]], change: Config, words: str
) -> None:
    config, tensors = make(MODEL_VOCAB)
    kind, folder = format_of(config, NAME).kind, write(tmp_path / "it", {**config, **change}, tensors)
    if words:
        with pytest.raises(BadInput, match=words):
            fetched(folder, kind)
    else:
        fetched(folder, kind)


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    with refuses(BadInput, f"{NAME} EAGLE-3, eagle block."):
        fetched(write(tmp_path / "it", *published.eagle3(MODEL_VOCAB)), "block")


def test_a_medusa_head_needs_a_target_whose_final_norm_is_known(tmp_path: Path) -> None:
    folder = write(tmp_path / "it", *published.medusa(MODEL_VOCAB))
    with refuses(BadInput, "final norm,"):
        fetched(folder, "medusa", family="gemma3")


def test_a_head_of_the_hubs_cache_is_called_by_its_name_on_the_hub(tmp_path: Path) -> None:
    config, tensors = published.eagle3(MODEL_VOCAB)
    folder = write(tmp_path / "models--owner--name" / "snapshots" / "0123", config | {"vocab_size": 9}, tensors)
    with refuses(BadInput, "owner/name 9"):
        load_published(folder, EagleHead, TARGET)


class Dangerous:
    """What runs code where a pickle is trusted."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_files_that_are_no_head_are_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, tensors = published.eagle3(MODEL_VOCAB)
    with refuses(BadInput, "config.json"):
        load_published(tmp_path, EagleHead, TARGET)
    folder = write(tmp_path / "it", config, tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with refuses(BadInput, "it read:"):
        load_published(folder, EagleHead, TARGET)
    (folder / "model.safetensors").unlink()
    with refuses(BadInput, "model.safetensors pytorch_model.bin."):
        load_published(folder, EagleHead, TARGET)
    index = folder / "model.safetensors.index.json"
    for outside in ("../it.safetensors", str(tmp_path / "it.safetensors"), "..", 5):
        index.write_text(json.dumps({"weight_map": {"fc.weight": outside}}))
        with refuses(BadInput, "safetensors folder"):
            load_published(folder, EagleHead, TARGET)
    index.unlink()
    torch.save({"fc.weight": Dangerous()}, folder / "pytorch_model.bin")
    with refuses(BadInput, "it read:"):
        load_published(folder, EagleHead, TARGET)
    assert not (tmp_path / "ran").exists()
    for broken in ("{", "[]", "[" * 100_000):
        (folder / "config.json").write_text(broken)
        with refuses(BadInput, "config.json"):
            load_published(folder, EagleHead, TARGET)
    with refuses(BadInput, "x LlamaForCausalLM"):
        format_of({"architectures": ["LlamaForCausalLM"]}, "The head x")

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
from specdemo.drafters.heads.networks import EagleHead
from specdemo.drafters.heads.published_shape import format_of
from specdemo.errors import BadInput
from specdemo.models.presets import Preset
from specdemo.models.published_heads import fetch_heads
from specdemo.models.sources import Folder
from tests.harness.doubles import MODEL_VOCAB
from tests.unit.test_published_heads import TARGET

from ..fakes import published
from ..fakes.published import HIDDEN, LAYERS, Config, Tensors, write
from ..sentences import refuses

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
        "another width": ("61 64, 61 32.", {"hidden_size": 64}),
        "another vocabulary": ("99 32, 61 32.", {"vocab_size": 99}),
        "fewer states": ("fc.weight [32, 64], [32, 96].", {"fc.weight": floats(32, 64)}),
        "another number of layers read": (
            "fc.weight [32, 96], [32, 64].",
            {"eagle_aux_hidden_state_layer_ids": [2, 3]},
        ),
        "other heads": ("layers.0.self_attn.q_proj.weight [32, 64], [64, 64].", {"head_dim": 16}),
        "rows of the output": ("lm_head.weight [39, 32], [40, 32].", {"lm_head.weight": floats(39, 32)}),
        "no norm": ("norm.weight [32]. tensor", {"norm.weight": None}),
        "no table of tokens": ("d2t [40]. tensor", {"d2t": None}),
        "tokens that there are not": ("d2t 40 50 89, 40 61.", {"d2t": torch.full((40,), 50)}),
        "a token twice": ("d2t 39 0 38, 40 61.", {"d2t": torch.cat([torch.zeros(39), torch.tensor([-1.0])]).long()}),
        "a tensor too many": (
            "layers.0.mlp.down_proj.bias [32], something",
            {"midlayer.mlp.down_proj.bias": floats(32)},
        ),
        "quantized": ("fc.weight int8, quantized", {"fc.weight": floats(32, 96).to(torch.int8)}),
        "a state that there is not": ("target's [0, 3, 6], 1 6.", {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
        "two layers": ("2 EAGLE decoder", {"num_hidden_layers": 2}),
        "another activation": ("'gelu'; 'silu' activation", {"hidden_act": "gelu"}),
        "another rotation": (
            '{"rope_type": "longrope", "factor": 2}.',
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
        ),
        "no sizes": ("intermediate_size 0. configuration", {"intermediate_size": 0}),
        "a size that is not stated": ("intermediate_size 0. configuration", {"intermediate_size": None}),
        "a fraction of heads": ("num_attention_heads 4.5. configuration", {"num_attention_heads": 4.5}),
        "a norm that is a word": ("rms_norm_eps 'small'. read", {"rms_norm_eps": "small"}),
        "heads that do not divide": ("4 3 head_dim 8:", {"num_key_value_heads": 3}),
        "half a rotation": ('{"rope_type": "llama3"}. rotates', {"rope_scaling": {"rope_type": "llama3"}}),
        "a vocabulary that is no number": ("draft_vocab_size 'all'. configuration", {"draft_vocab_size": "all"}),
        "a number of architectures": ("config.json architectures 5.", {"architectures": 5}),
    },
    published.medusa: {
        "Medusa without an output": ("2.2.weight [61, 32].", {"medusa_head.2.2.weight": None}),
        "Medusa of another width": (
            "0.0.linear.weight [64, 64], [32, 32].",
            {"medusa_head.0.0.linear.weight": floats(64, 64)},
        ),
        "Medusa without places": ("medusa_num_heads medusa_num_layers, (None, 2).", {"medusa_num_heads": None}),
        "too many layers of Medusa": ("medusa_num_heads medusa_num_layers, 1000000000).", {"medusa_num_layers": 10**9}),
    },
    published.dflash: {
        "a target of other depth": ("36 6. trained", {"num_target_layers": 36}),
        "no mask": (
            "block_size 2 mask_token_id 61, 5 61.",
            {"dflash_config": {"mask_token_id": MODEL_VOCAB, "target_layer_ids": [1, 2, 4]}},
        ),
        "windows of another number of layers": (
            "2 layer_types ['full_attention'] sliding_window 4.",
            {"layer_types": ["full_attention"]},
        ),
        "Domino": ("'domino', DFlash, DFlash 2 DSpark", {"dflash_config": {"projector_type": "domino"}}),
        "settings that are a text": ("config.json dflash_config 'a'.", {"dflash_config": "a"}),
        "a window below 0": ("sliding_window -1000001", {"sliding_window": -1000001}),
        "too many layers": ("num_hidden_layers 1000000000", {"num_hidden_layers": 10**9}),
    },
    published.dspark: {"another Markov head": ("Markov 'gated'; 'vanilla'", {"markov_head_type": "gated"})},
    published.library_dflash: {"causal blocks": ("causal", {"causal": True})},
    published.deepspec_eagle3: {
        "layers of DeepSpec's EAGLE-3 that there are not": ("target's [1, 2, 6], 0 5.", {"target_layer_ids": [1, 2, 6]})
    },
    published.library_eagle3: {
        "DFly": ("'dfly', eagle3, dflash2,", {"speculators_model_type": "dfly"}),
        "a layer that is a list": ("config.json transformer_layer_config [1].", {"transformer_layer_config": [1]}),
    },
    published.peagle: {
        "P-EAGLE without a mask token": (
            "61, mask_token_id, pard_token, ptd_token_id [None, None, 61].",
            {"ptd_token_id": MODEL_VOCAB},
        ),
        "P-EAGLE without the state of a mask": ("mask_hidden [96]. tensor", {"mask_hidden": None}),
        "P-EAGLE of fewer layers": ("layers.3.input_layernorm.weight [32]. tensor", {"num_hidden_layers": 4}),
    },
    published.library_dflash2: {
        "kernels longer than a block": ("5 4 6 4, 32 61", {"conv_kernel_size": 5}),
        "other groups of channels": (
            "layers.0.attention_conv.kernel_projection.weight [48, 32], [24, 32].",
            {"conv_group_size": 8},
        ),
        "fewer tokens in DFlash 2": ("40 61 DFlash 2", {"draft_vocab_size": 40}),
        "scaled logits": ("1 0.5, 0;", {"output_multiplier": 0.5}),
        "no taps": ("conv_kernel_size 0. configuration", {"conv_kernel_size": 0}),
        "causal blocks of DFlash 2": ("causal", {"sliding_window_non_causal": False}),
    },
    published.dflash2: {
        "no selector": (
            "candidate_selector.successor_codebook [61, 16].",
            {"candidate_selector.successor_codebook": None},
        ),
        "experts in DFlash 2": ("layers.1.mlp.gate.weight [8, 32],", {"layers.1.mlp.gate.weight": floats(8, 32)}),
    },
}


@pytest.mark.parametrize(
    ("make", "values", "change"),
    [
        pytest.param(make, values, change, id=name)
        for make, wrong in WRONG.items()
        for name, (values, change) in wrong.items()
    ],
)
def test_a_wrong_head_is_refused_in_a_sentence(
    make: Callable[[int], tuple[Config, Tensors]], values: str, change: dict[str, Any], tmp_path: Path
) -> None:
    config, tensors = make(MODEL_VOCAB)
    kind = format_of(config, NAME).kind
    fetched(write(tmp_path / "good", config, tensors), kind)
    of_tensors = {name for name, value in change.items() if name in tensors or isinstance(value, torch.Tensor)}
    config |= {name: value for name, value in change.items() if name not in of_tensors}
    tensors |= {name: change[name] for name in of_tensors}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with refuses(BadInput, f"it {values}"):
        fetched(write(tmp_path / "it", config, kept), kind)


def test_a_verifier_that_says_nothing_is_let_be(tmp_path: Path) -> None:
    config, tensors = published.library_eagle3(MODEL_VOCAB)
    changed = {**config, "speculators_config": {"verifier": [1]}}
    fetched(write(tmp_path / "it", changed, tensors), format_of(config, NAME).kind)


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

"""Heads that are made to compute what their target computes are accepted whole, in each format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdemo.decoding.events import emitted_tokens
from specdemo.drafters.heads.block import Block
from specdemo.drafters.heads.medusa import Medusa
from specdemo.settings import Settings
from specdemo.tokens import TokenKind
from tests.harness.classes import Eagle, HeadDrafter
from tests.harness.doubles import MODEL_VOCAB
from tests.harness.texts import decode
from tests.unit.test_published_heads import toy_with

from ..fakes import published
from ..fakes.published import HIDDEN, LAYERS, MASK, Config, Tensors, write


def bigram_target() -> PreTrainedModel:
    """A target whose next token depends on the last one alone: it attends to nothing, and only one layer has an MLP.

    Its embeddings have a mean square of 1, so that a norm leaves them as they are.
    """
    config = LlamaConfig(
        vocab_size=MODEL_VOCAB,
        num_hidden_layers=LAYERS,
        initializer_range=0.25,
        max_position_embeddings=256,
        **published.FLAT,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight / weight.pow(2).mean(-1, keepdim=True).sqrt())
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            if index:
                layer.mlp.down_proj.weight.zero_()
    return model


def states_of_tokens(model: PreTrainedModel) -> Tensor:
    """The target's last hidden state after each token, normed, [V, hidden]."""
    with torch.no_grad():
        states: Tensor = model.model(torch.arange(MODEL_VOCAB)[:, None]).last_hidden_state[:, 0]
    return states


def eagle_copy(model: PreTrainedModel) -> tuple[Config, Tensors]:
    """Each place attends to itself only, since its query is its own key made long, and so brings the embedding of its
    own token into the layer; the MLP and the output are the target's. The residual is normed to nothing."""
    one = {"num_attention_heads": 1, "num_key_value_heads": 1, "norm_before_residual": True}
    config, tensors = published.eagle3(MODEL_VOCAB, MODEL_VOCAB, **one)
    eye, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    embedding_only = torch.cat([eye, nothing], 1)
    weights = model.state_dict()
    tensors = {name: torch.ones_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    tensors |= {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "lm_head.weight": weights["lm_head.weight"]}
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(HIDDEN)
    tensors |= {f"midlayer.self_attn.{part}_proj.weight": 12 * embedding_only for part in "qk"}
    tensors |= {"midlayer.self_attn.v_proj.weight": embedding_only, "midlayer.self_attn.o_proj.weight": eye}
    for part in ("gate", "up", "down"):
        tensors[f"midlayer.mlp.{part}_proj.weight"] = weights[f"model.layers.0.mlp.{part}_proj.weight"]
    return config, tensors


def spark_copy(model: PreTrainedModel) -> tuple[Config, Tensors]:
    """Its blocks give no logits at all: the Markov head has the target's."""
    config, tensors = published.dspark(MODEL_VOCAB)
    config["markov_rank"] = HIDDEN
    tensors["norm.weight"] = torch.zeros(HIDDEN)
    tensors["markov_head.markov_w1.weight"] = states_of_tokens(model)
    tensors["markov_head.markov_w2.weight"] = model.state_dict()["lm_head.weight"]
    return config, tensors


def constant_target() -> PreTrainedModel:
    """A target that has the same distribution at every place: all of its tokens have the same embedding."""
    model = bigram_target()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[MASK].clone())
    return model


def flash_copy(model: PreTrainedModel) -> tuple[Config, Tensors]:
    """Its first layer is the target's, and all others do nothing."""
    config, tensors = published.dflash(MODEL_VOCAB)
    weights = model.state_dict()
    for name in tensors:
        if name.endswith(("o_proj.weight", "layers.1.mlp.down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
        elif "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
        elif name.startswith("layers.0.mlp."):
            tensors[name] = weights[f"model.{name}"]
    return config, tensors


def second_flash_copy(model: PreTrainedModel) -> tuple[Config, Tensors]:
    """The same with convolutions that change nothing, and candidates that are all tokens with equal edges."""
    _, tensors = flash_copy(model)
    stated, more = published.dflash2(MODEL_VOCAB)
    stated["dflash_config"]["selector_top_k"] = MODEL_VOCAB
    for name in more.keys() - tensors.keys():
        tensors[name] = torch.zeros_like(more[name])
        if name.endswith("base_kernel"):
            tensors[name][:, 0] = 1
    return stated, tensors


def medusa_copy(model: PreTrainedModel) -> tuple[Config, Tensors]:
    """Its residual blocks add nothing, and its outputs are the target's."""
    config, tensors = published.medusa(MODEL_VOCAB)
    weights = model.state_dict()
    for name, tensor in tensors.items():
        tensors[name] = weights["lm_head.weight"] if len(tensor) == MODEL_VOCAB else torch.zeros_like(tensor)
    return config, tensors


COPIES = {
    "eagle": eagle_copy,
    "dspark": spark_copy,
    "dflash": flash_copy,
    "dflash2": second_flash_copy,
    "medusa": medusa_copy,
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", COPIES)
def test_a_head_that_copies_its_target_is_always_right(kind: str, temperature: float, tmp_path: Path) -> None:
    model = constant_target() if kind in ("dflash", "dflash2", "medusa") else bigram_target()
    config, tensors = COPIES[kind](model)
    drafter_class: type[HeadDrafter] = {"eagle": Eagle, "medusa": Medusa}.get(kind, Block)
    toy = toy_with(write(tmp_path / kind, config, tensors), drafter_class, model)
    settings = Settings(k=4, temperature=temperature, seed=2, max_new_tokens=61)
    runner = toy.target_runner(128)
    events = list(decode(runner, toy.drafter(drafter_class.name, runner, settings), [3, 1, 4, 1, 5], settings))
    tokens = [token for event in events for token in emitted_tokens(event)]
    kinds = [token.kind for token in tokens]
    assert TokenKind.RESAMPLED not in kinds
    k = 3 if kind == "medusa" else 4
    assert kinds.count(TokenKind.ACCEPTED) == 60 // (k + 1) * k
    assert temperature == 0 or len({token.id for token in tokens}) > 10

"""How many bytes of weights a pass reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdemo.models.placement import Part


def a_model(kind: str, tied: bool) -> Any:
    small = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12} if "moe" in kind else {}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **heads, **experts)).float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_the_weights_that_a_pass_reads_are_those_that_change_its_logits(kind: str, tied: bool) -> None:
    model = a_model(kind, tied)
    model(torch.tensor([[7]])).logits.square().sum().backward()
    read = 0
    for name, weight in model.named_parameters():
        parts = weight.grad.reshape(len(weight), -1)  # the rows of a table, or the experts of a layer
        used = parts.abs().amax(1) > 0 if "embed" in name or ".experts." in name else torch.ones(len(weight))
        read += int(used.sum()) * parts.shape[1]
    part = Part("a model", model.config, torch.float32)
    assert part.share_read * part.numbers == pytest.approx(read)
    assert (part.share_read < 1) == (not tied or "moe" in kind)

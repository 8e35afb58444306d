"""The decoder layers of a model are found wherever they are, and nobody looks for them in vain."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.decoding.events import Round
from specdemo.decoding.parts import DrafterParts
from specdemo.drafters.draft_model import LayerSkip
from specdemo.engines.modules import decoder_layers, layers_at
from specdemo.errors import BadInput
from specdemo.racing.race import rule_for
from specdemo.settings import Settings
from tests.harness.classes import EagerRunner
from tests.harness.doubles import MODEL_VOCAB, ids_of
from tests.harness.texts import decode, plain_text

from ..sentences import refuses
from .test_model_types import TEXTS, config_of

PATHS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "bart": "model.decoder.layers",
    "gemma3": "model.language_model.layers",
    "modernbert-decoder": "model.layers",  # its output is called decoder
    "ctrl": "transformer.h",  # layers of an older kind
}
TEXT = [3, 14, 15, 9, 26, 7, 35, 8, 0, 7, 9, 32]


def model_of(label: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(label, TEXTS[label], MODEL_VOCAB)).eval()


@pytest.mark.parametrize("label", PATHS)
def test_the_decoder_layers_are_found_read_and_left_out(label: str) -> None:
    model = model_of(label)
    path, stack = decoder_layers(model)
    assert path == PATHS[label]
    assert list(stack) == layers_at(model, range(2))
    settings = Settings(k=3, max_new_tokens=12)
    runner = EagerRunner(model, 40)
    runner.capture_hidden_states([1, 0])
    plain = plain_text(runner, TEXT, settings)
    runner.prefill(TEXT)
    with torch.inference_mode():
        states = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[1][0]
    assert runner.hidden_states is not None
    assert torch.allclose(runner.hidden_states[:, 32:], states, atol=1e-4)
    skipping = EagerRunner(model, 40)
    rule = rule_for(settings)
    drafter = LayerSkip.build(DrafterParts(skip_layers=1), skipping, rule)
    events = list(decode(skipping, drafter, TEXT, settings, rule=rule))
    assert ids_of(events) == plain
    assert any(event.drafted for event in events if isinstance(event, Round))


def test_an_encoder_of_images_with_as_many_layers_is_not_taken_for_the_decoder() -> None:
    config = config_of("gemma3", TEXTS["gemma3"], MODEL_VOCAB)
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers
    path, _ = decoder_layers(AutoModelForCausalLM.from_config(config))
    assert path == PATHS["gemma3"]


def test_a_model_that_does_not_give_logits_for_every_row_is_one_sentence() -> None:
    config = AutoConfig.for_model("cpmant", vocab_size=MODEL_VOCAB, hidden_size=32, dim_head=8, dim_ff=48)
    config.num_attention_heads, config.num_hidden_layers = 4, 2
    runner = EagerRunner(AutoModelForCausalLM.from_config(config).eval(), 40)  # a load refuses it
    runner.prefill(TEXT[:3])
    with refuses(BadInput, "cpmant 3"):
        runner.forward(TEXT[3:6])


def test_layers_that_are_not_found_are_one_sentence_for_whoever_needs_them() -> None:
    runner = EagerRunner(model_of("hrm_text"), 40)  # it has two lists of layers, and runs them in turn
    with refuses(BadInput, "hrm_text"):
        runner.capture_hidden_states([0])
    settings = Settings(k=3, max_new_tokens=12)
    with refuses(BadInput, "hrm_text"):
        LayerSkip.build(DrafterParts(skip_layers=1), runner, rule_for(settings))
    assert len(plain_text(runner, TEXT, settings)) == 12

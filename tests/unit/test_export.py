"""Heads in the format of the library speculators: what is written is read again, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdemo.drafters.heads.export import export_head
from specdemo.drafters.heads.files import load_head, load_published, save_head
from specdemo.drafters.heads.networks import BlockHead, EagleHead, Head
from specdemo.drafters.heads.ready import ReadyHead
from specdemo.errors import BadInput
from tests.conftest import Command
from tests.harness.doubles import MODEL_VOCAB
from tests.harness.engines import tiny_model
from tests.harness.toys import untrained_heads
from tests.unit.test_published_heads import BLOCKS, EAGLES, FORMATS, TARGET, made

from ..fakes.published import LAYERS, write
from ..sentences import refuses, tells

NAMES = "owner/target", "Qwen3ForCausalLM"
WRITTEN = [name for name in FORMATS if name not in ("Medusa", "P-EAGLE", "speculators peagle")]
LIBRARY = "SPECDEMO_SPECULATORS_PYTHON"  # names a Python that has the library; it needs other versions than specdemo


def embeddings() -> tuple[Tensor, Tensor]:
    model = tiny_model("qwen3", layers=LAYERS)
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def ours(folder: Path) -> EagleHead:
    """A head as it is trained here, from its file."""
    head = untrained_heads(MODEL_VOCAB, 32, LAYERS, heads=4, draft_vocab=40, window=24)["eagle"]
    save_head(head, folder / "ours.safetensors", {})
    return load_head(EagleHead, folder / "ours.safetensors")


@pytest.mark.parametrize("name", ["ours", *WRITTEN])
def test_export_import_and_export_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    kind: type[Head] = BlockHead if name in BLOCKS else EagleHead
    if name == "ours":
        first: Head = ours(tmp_path)
    else:
        config, tensors, _, _ = made(name)
        tensors = {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
        first = load_published(write(tmp_path / "head", config, tensors), kind, TARGET)
    export_head(first, embeddings(), NAMES, tmp_path / "one", torch.bfloat16)
    again = load_published(tmp_path / "one", kind, TARGET)
    export_head(again, embeddings(), NAMES, tmp_path / "two")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    if name in EAGLES or name in BLOCKS:  # every tensor that was read stands there unchanged
        written = load_file(tmp_path / "one" / "model.safetensors")
        for key, tensor in tensors.items():
            plain = key.replace("midlayer.", "layers.0.").removeprefix("logit_head.")
            if not plain.startswith("confidence_head.") and (plain in written or plain not in ("d2t", "t2d")):
                assert torch.equal(written[plain], tensor), key


def test_a_head_trained_here_drafts_the_same_in_the_librarys_format(tmp_path: Path) -> None:
    head = ours(tmp_path)
    export_head(head, embeddings(), NAMES, tmp_path / "out", torch.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in head.shape.state_layers]
    read = load_published(tmp_path / "out", EagleHead, TARGET)
    states = torch.randn(5, head.shape.states, generator=torch.Generator().manual_seed(1))
    logits = []
    for one in (head, read):
        ready = ReadyHead(one, *embeddings())
        x = ready.backend(32).run(ready.head.fused(states), ready.embed([1, 2, 3, 4, 5]), outputs=1)
        logits.append(ready.logits(x))
    torch.testing.assert_close(*logits)


def test_what_the_format_has_no_words_for_is_refused(tmp_path: Path) -> None:
    heads = untrained_heads(MODEL_VOCAB, 32, LAYERS, heads=4, draft_vocab=40)
    for name in ("block", "medusa", "p-eagle"):
        with refuses(BadInput, "format"):
            export_head(heads[name], embeddings(), NAMES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_shipped_head_is_exported(command: Command, tmp_path: Path) -> None:
    """Slow: it loads the default target."""
    out = tmp_path / "exported"
    status, _, message = command("export", "--kind", "eagle", "--out", str(out), "--target-name", "owner/name")
    assert status == 0, message
    config = json.loads((out / "config.json").read_text())
    target = {"name_or_path": "owner/name", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == target
    status, _, message = command("export", "--kind", "block", "--out", str(tmp_path / "b"))
    assert (status, tells(message, "written format")) == (2, True)


READ = """
import sys, json, torch
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel
from transformers.utils import logging
config = SpeculatorModelConfig.from_pretrained(sys.argv[1])
config.speculators_config.verifier.name_or_path = None  # else it would look for the target on the hub
config.transformer_layer_config._attn_implementation = "eager"
model = SpeculatorModel.registered_model_class_from_config(config)(config)
missing, unexpected = model.load_state_dict(load_file(sys.argv[1] + "/model.safetensors"), strict=False)
given = torch.load(sys.argv[2])
drafted = None
if type(model).__name__.startswith("Eagle3"):
    count = given["states"].shape[1]
    with torch.no_grad():
        (drafted,) = model(given["states"], given["tokens"], torch.zeros(1, count, dtype=torch.long), ttt_steps=1)
    drafted = drafted[0].tolist()
print(json.dumps([type(model).__name__, sorted(missing), sorted(unexpected), drafted]))
"""


@pytest.mark.servers
@pytest.mark.skipif(LIBRARY not in os.environ, reason=f"{LIBRARY} names no Python with the library speculators")
@pytest.mark.parametrize("name", ["ours", "speculators eagle3", "speculators dflash", "speculators dspark"])
def test_the_library_reads_what_is_written_and_drafts_the_same(name: str, tmp_path: Path) -> None:
    """By the library itself, in an environment of its own."""
    kind: type[Head] = BlockHead if name in BLOCKS else EagleHead
    head: Head = (
        ours(tmp_path) if name == "ours" else load_published(write(tmp_path / "head", *made(name)[:2]), kind, TARGET)
    )
    export_head(head, embeddings(), NAMES, tmp_path / "out", torch.float32)
    read = load_published(tmp_path / "out", kind, TARGET)
    tokens = torch.arange(3, 23)
    states = torch.randn(20, head.shape.states, generator=torch.Generator().manual_seed(1))
    torch.save({"states": states[None], "tokens": tokens[None]}, tmp_path / "given.pt")
    command = [os.environ[LIBRARY], "-c", READ, str(tmp_path / "out"), str(tmp_path / "given.pt")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=200, env=offline, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    _, missing, unexpected, drafted = json.loads(answer.stdout.splitlines()[-1])
    assert unexpected == []
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    if drafted is not None:
        ready, found = ReadyHead(read, *embeddings()), list[int]()
        backend, fused, embedded = ready.backend(32), ready.head.fused(states), ready.embed(tokens)
        for row in range(len(tokens)):
            x = backend.run(fused[row : row + 1], embedded[row : row + 1], outputs=1)
            backend.advance(1)
            found.append(int(ready.logits(x).argmax()))
        assert drafted == found

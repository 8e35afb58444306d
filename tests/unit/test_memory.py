"""What a load takes from memory: weights once, nothing after a failure, and a plan for several devices.

There is no GPU here: devices are what fakes of `torch.cuda` say they are, a capture is a function that is called once.
"""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import GPT2Model, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.engines import choose, ops
from specdemo.engines.cpu.huge_pages import WEIGHTS
from specdemo.engines.families import knows
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.capture import Work
from specdemo.engines.gpu.graph import Graphs
from specdemo.engines.quantized import widened
from specdemo.models import loaded as models
from specdemo.models import opened as in_memory
from specdemo.models import preset_models as opening
from specdemo.models import sizes as room
from specdemo.models.loaded import load
from specdemo.models.sources import Folder
from specdemo.models.store import LoadError, ignore
from specdemo.models.weights import StoredWeights, shapes
from specdemo.settings import Settings
from specdemo.studies.greedy import greedy
from specdemo.studies.prompts import Prompt
from specdemo.system.hardware import choose_dtype
from tests.harness.classes import EagerRunner, FusedModel, GraphRunner, Loaded
from tests.harness.engines import ARCHITECTURES, cpu_engine, tiny_model
from tests.harness.models import preset_of, save, tiny

from ..sentences import refuses, tells

PROMPT = [5, 9, 2, 33]
GB = 10**9


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """Folders of a target and of a draft model, large enough for their weights to stand out."""
    folder = tmp_path_factory.mktemp("pair")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1024, "tie_word_embeddings": True}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # wide heads: the library fills up others
    target = tiny("llama", len(tokenizer), **sizes)
    draft = tiny("llama", len(tokenizer), seed=1, **sizes)
    return save(target, tokenizer, folder / "target"), save(draft, tokenizer, folder / "draft")


def floats() -> dict[int, int]:
    """Bytes of every tensor of numbers that is alive, by where it lies."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.is_floating_point()]
    return {tensor.data_ptr(): tensor.nbytes for tensor in alive if tensor.device.type == "cpu"}


# Weights are in memory once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_pair_from_folders_is_in_memory_once(pair: tuple[Path, Path], dtype: str) -> None:
    if cpu_engine(choose_dtype(dtype, torch.device("cpu"))) != "native":
        pytest.skip("other layouts keep their weights out of sight")
    before = floats()
    loaded = load(preset_of(*pair, heads={"eagle": Path("none.safetensors")}), dtype, "cpu")  # which reads the table
    after = sum(size for place, size in floats().items() if place not in before)
    config = opening.find_checkpoint(Folder(pair[0]), torch.float32, ignore).config
    numbers, table = sum(map(prod, shapes(config).values())), config.vocab_size * config.hidden_size
    once = 2 * (numbers + table) * loaded.weights_dtype.itemsize  # the table is read by rows, and laid out as the head
    assert once <= after < once + table * loaded.weights_dtype.itemsize  # with room for other little things
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(pair[0].parent) not in maps.read_text(encoding="utf-8")  # nor does a file lie there
    loaded.release()


def test_nobody_keeps_transformers_model_longer_than_it_is_used(pair: tuple[Path, Path]) -> None:
    loaded = load(preset_of(*pair), "float32", "cpu")
    for ask in (lambda: loaded.model, lambda: loaded.draft_model):
        model = ask()
        assert ask() is model
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
    loaded.release()


Opened = list["weakref.ref[PreTrainedModel]"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The models that are opened by transformers, as far as they are alive."""
    models_opened: Opened = []
    real = in_memory.open_model

    def watched(*asked: Any) -> PreTrainedModel:
        model = real(*asked)
        models_opened.append(weakref.ref(model))
        return model

    monkeypatch.setattr(in_memory, "open_model", watched)
    return models_opened


def test_the_check_against_transformers_leaves_no_model_behind(pair: tuple[Path, Path], opened: Opened) -> None:
    loaded = load(preset_of(pair[0]), "float32", "cpu")
    prompts = [Prompt("a", "one", "the cat"), Prompt("b", "one", "the dog")]
    assert len(list(greedy(loaded, prompts, ["prompt-lookup"], Settings(k=2, max_new_tokens=4)))) == 4
    gc.collect()
    assert [model() for model in opened] == [None]  # opened once for both prompts
    loaded.release()


def logits(loaded: Loaded) -> Tensor:
    runner = loaded.target_runner(16)
    return torch.cat([runner.prefill(PROMPT), runner.forward([1, 2])])


@pytest.mark.parametrize("kind", ["sharded", "without its head"])
def test_every_form_of_a_checkpoint_is_read(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, opened: Opened
) -> None:
    folder = tmp_path / "model"
    model: Any = tiny("gpt2" if kind == "without its head" else "llama", len(tokenizer), tie_word_embeddings=True)
    save(model, tokenizer, folder)
    if kind == "sharded":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    else:
        bare: GPT2Model = model.transformer
        bare.save_pretrained(folder)  # its weights are called h.0. ..., not transformer.h.0. ...
        model.config.save_pretrained(folder)
    loaded = load(preset_of(folder), "float32", "cpu")
    assert loaded.engine == cpu_engine(torch.float32)
    assert not opened
    eager = EagerRunner(model, 16)
    torch.testing.assert_close(logits(loaded), torch.cat([eager.prefill(PROMPT), eager.forward([1, 2])]))
    loaded.release()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "smollm3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_known_model_are_those_of_transformers(architecture: str, tied: bool) -> None:
    config = type(tiny_model(architecture).config).from_dict(
        {**tiny_model(architecture).config.to_dict(), "tie_word_embeddings": tied, "attention_bias": tied}
    )
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert knows(config)
    assert shapes(config) == {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def test_what_is_in_a_checkpoint_is_asked_of_its_configuration(pair: tuple[Path, Path]) -> None:
    found = opening.find_checkpoint(Folder(pair[0]), torch.float32, ignore)
    files = opening.fetch_weights(found, ignore)
    cpu = torch.device("cpu")
    assert StoredWeights.of(files, found.config, torch.float32, cpu) is not None
    wider = LlamaConfig.from_dict({**found.config.to_dict(), "intermediate_size": 512})
    assert StoredWeights.of(files, wider, torch.float32, cpu) is None
    deeper = LlamaConfig.from_dict({**found.config.to_dict(), "num_hidden_layers": 3})
    assert StoredWeights.of(files, deeper, torch.float32, cpu) is None


# Quantised weights -------------------------------------------------------------------------------------------


def test_quantised_weights_run_by_transformers_own_forward(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What unpacks them needs libraries and GPUs that are not here: in their place the plain model is opened."""
    import transformers

    folder = Path(shutil.copytree(pair[0], tmp_path / "quantised"))
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(stated))
    plain = transformers.AutoModelForCausalLM.from_pretrained(pair[0])

    def opened(place: str, config: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, set[str]]]:
        plain.config = config
        return plain, {"missing_keys": set(), "mismatched_keys": set()}

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", opened)
        loaded = load(preset_of(folder), "float32", "cpu")
    assert loaded.engine == "eager"
    assert loaded.model is plain
    assert logits(loaded).isfinite().all()
    loaded.release()
    with refuses(LoadError, "quantised"):  # without the library that unpacks
        load(preset_of(folder), "float32", "cpu")


# A load that fails ---------------------------------------------------------------------------------------------


def captured_once(work: Work) -> Work:
    """In place of a CUDA graph, which keeps what it gives and not what it was made of."""
    outcome = work()
    return lambda: outcome


class ShortOfMemory:
    """Such a capture that fails at one of its calls."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, work: Work) -> Work:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return captured_once(work)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Tensor]]]:
    """Every weight that is read, while nothing is collected: only what nobody refers to goes."""
    monkeypatch.setattr(graph, "ROOM", 64)
    read = StoredWeights.__getitem__
    weights: list[weakref.ref[Tensor]] = []

    def watched(self: StoredWeights, name: str) -> Tensor:
        weight = widened(read(self, name))
        weights.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(StoredWeights, "__getitem__", watched)
    monkeypatch.setattr(models.gc, "collect", lambda: 0)
    gc.disable()
    try:
        yield weights
    finally:
        gc.enable()


def on_graphs(
    monkeypatch: pytest.MonkeyPatch, capture: Callable[[Work], Work], seen: list[weakref.ref[Tensor]]
) -> None:
    """As on a GPU. What the weights are laid out to is seen, too."""

    def make(model: FusedModel, slots: int) -> Any:
        seen.extend(weakref.ref(weight) for weight in (widened(model.embedding), model.norm.weight))
        return partial(GraphRunner, Graphs(model, ops, capture, 2))

    monkeypatch.setattr(choose, "engine_of", lambda *_: "graph")
    monkeypatch.setattr(choose, "_on_gpu", make)
    monkeypatch.setattr(in_memory, "self_test", lambda *_: None)  # replayed captures compute nothing here


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "at", ["the draft model", "a bug", "the first pass", "a later pass", "the draft model's passes"]
)
def test_a_load_that_fails_leaves_no_weight_behind_and_a_good_one_follows(
    at: str, pair: tuple[Path, Path], seen: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, real = ShortOfMemory({"the first pass": 1, "a later pass": 20}.get(at, 0)), in_memory.read_weights

    def read(found: Any, *more: Any) -> Any:
        if found.source == Folder(pair[1]):
            if at == "the draft model":
                raise RuntimeError("the file is damaged")
            if at == "the draft model's passes":
                short.at = short.calls + 3
        return real(found, *more)

    with monkeypatch.context() as patch:
        on_graphs(patch, short, seen)
        patch.setattr(in_memory, "read_weights", read)
        if at == "a bug":
            patch.setattr(models, "_eos_ids", lambda *_: 1 // 0)
        refusals = {"a bug": (ZeroDivisionError, "zero"), "the draft model": (LoadError, "damaged.")}
        with refuses(*refusals.get(at, (LoadError, "memory:"))):
            load(preset_of(*pair), "float32", "cpu")
    assert len(seen) > 10
    assert [weight() for weight in seen if weight() is not None] == []
    seen.clear()
    on_graphs(monkeypatch, captured_once, seen)
    loaded = load(preset_of(*pair), "float32", "cpu")
    assert loaded.target_runner(16).prefill(PROMPT).isfinite().all()
    assert loaded.draft_runner(16).prefill(PROMPT).isfinite().all()
    loaded.release()
    assert [weight() for weight in seen if weight() is not None] == []


def test_what_had_to_make_room_is_released_only_when_memory_is_short(
    pair: tuple[Path, Path], seen: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate said that both fit; the capture says otherwise, until the first one is gone."""
    old = load(preset_of(pair[1]), "float32", "cpu")
    on_graphs(monkeypatch, ShortOfMemory(3), seen)
    stages: list[str] = []
    loaded = load(preset_of(pair[0]), "float32", "cpu", lambda fraction, words: stages.append(words), instead_of=old)
    assert old.released
    assert models.MAKING_ROOM in stages
    assert loaded.target_runner(16).prefill(PROMPT).isfinite().all()
    with refuses(LoadError, "nowhere"):
        load(preset_of(pair[0] / "nowhere"), "float32", "cpu", instead_of=loaded)
    assert not loaded.released
    loaded.release()


class Cycle:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_memory_is_given_back_with_all_that_holds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own cache on a GPU is a fake."""
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("the cache of a GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    WEIGHTS.copy(torch.ones(3))
    gone = weakref.ref(Cycle())
    assert gone() is not None
    models._free_memory()
    assert gone() is None
    assert WEIGHTS._newest is None
    assert emptied == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    models._free_memory()
    assert emptied == ["the cache of a GPU"]


def test_a_target_over_several_devices_is_opened_by_the_plan_and_what_is_offloaded_is_told(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs by fakes; accelerate's hooks bring the weights of an offloaded model to the CPU for every pass, as they
    would to a GPU."""
    from accelerate import cpu_offload

    from specdemo.ui.facts import facts

    spread = room._Plan((torch.device("cpu"), torch.device("cuda:1")), {0: 5, "cpu": 7}, offloaded=3 * GB)
    asked: list[Any] = []
    devices: list[str] = []
    real, open_checkpoint = in_memory.open_model, in_memory.open_checkpoint

    def on_the_cpu(found: Any, files: Any, device: torch.device, *more: Any, **named: Any) -> in_memory._ModelInMemory:
        devices.append(str(device))
        return open_checkpoint(found, files, torch.device("cpu"), *more, **named)

    def opened(found: Any, device: Any, progress: Any, max_memory: Any = None) -> PreTrainedModel:
        asked.append(max_memory)
        model = real(found, device, progress)
        for part in (model.model.layers[1], model.lm_head):
            cpu_offload(part, execution_device=torch.device("cpu"))
        return model

    monkeypatch.setattr(models, "plan", lambda *asked: spread)
    monkeypatch.setattr(in_memory, "open_model", opened)
    monkeypatch.setattr(models, "open_checkpoint", on_the_cpu)
    stages: list[str] = []
    heads = {"eagle": Path("none.safetensors")}
    loaded = load(preset_of(*pair, heads=heads), "float32", "cpu", lambda fraction, words: stages.append(words))
    assert devices == ["cpu", "cuda:1"]
    assert asked == [{0: 5, "cpu": 7}]  # the draft model is fused, on its device
    assert tells(stages, "3.0 GB")
    assert loaded.engine == "eager"
    assert loaded.parts.embeddings is None
    assert loaded.parts.head_files == {}  # a head reads the target's embeddings, which are not there
    assert logits(loaded).isfinite().all()

    class OnGpu:
        missing_heads: ClassVar[dict[str, str]] = {}

        def environment(self) -> dict[str, Any]:
            return {"dtype": "bfloat16", "device": "cuda:0", "placement": {"cuda:0": 5 * GB, "cpu": 3 * GB}}

    assert tells(facts(OnGpu())[-1], "3.0 GB")
    loaded.release()

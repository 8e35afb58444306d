"""Which device a model is put on, and what it takes there: with fakes of `torch.cuda`, since there is no GPU here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from specdemo.models import opened
from specdemo.models import sizes as room
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.opened import device_map
from specdemo.models.sizes import (
    TOKENS,
    WORK_SPACE,
    cache_bytes,
    numbers_of,
    plan,
    share_read,
    weight_bytes,
)
from specdemo.models.store import LoadError
from tests.harness.models import unread

from ..sentences import refuses

GB = 10**9


def sized(gigabytes: float, device: str = "cuda") -> Checkpoint:
    """A model of known shape whose weights take so much in bfloat16."""
    wide = LlamaConfig(
        hidden_size=4096, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=2, vocab_size=1000
    )
    wide.num_hidden_layers = 1
    one = numbers_of(wide)
    wide.num_hidden_layers = 2
    layer = numbers_of(wide) - one
    wide.num_hidden_layers = max(round((gigabytes * GB / 2 - one + layer) / layer), 1)
    return unread(wide, torch.bfloat16, device)


def taken(model: Checkpoint) -> int:
    return weight_bytes(model) + cache_bytes(model)


def gpus(monkeypatch: pytest.MonkeyPatch, *free: float, reserved: float = 0, main: float = 64) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (int(free[number] * GB), 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: int(reserved * GB))
    monkeypatch.setattr(room, "free_memory", lambda: int(main * GB))
    monkeypatch.setattr(room.psutil, "swap_memory", lambda: SimpleNamespace(free=0))


def test_a_model_goes_on_one_gpu_with_its_draft_model_if_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = sized(8), sized(1)
    for part, size in ((target, 8), (draft, 1)):
        assert weight_bytes(part) == pytest.approx(size * GB, abs=0.2 * GB)
    both = (taken(target) + taken(draft) + WORK_SPACE) / GB
    gpus(monkeypatch, both + 0.001, 40)
    assert plan([target, draft]).devices == (torch.device("cuda:0"),) * 2
    gpus(monkeypatch, both - 0.001, 40)
    assert plan([target, draft]).devices == (torch.device("cuda:1"),) * 2
    gpus(monkeypatch, 40, 40)
    assert plan([sized(8, "cuda:1"), sized(1, "cuda:1")]).devices == (torch.device("cuda:1"),) * 2


def test_a_draft_model_goes_where_it_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 40, 40)
    for asked in ("cpu", "cuda:1"):
        chosen = plan([sized(8, "cuda:0"), sized(1, asked)])
        assert chosen.devices == (torch.device("cuda:0"), torch.device(asked))
    gpus(monkeypatch, 40, 1)
    with pytest.raises(LoadError):
        plan([sized(8, "cuda:0"), sized(2, "cuda:1")])


def test_a_draft_model_has_a_gpu_of_its_own_before_anything_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, 10)
    chosen = plan([sized(8), sized(2)])
    assert chosen.devices == (torch.device("cuda:1"), torch.device("cuda:0"))
    assert chosen.max_memory is None


def test_a_target_that_is_spread_leaves_room_for_caches_and_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 12, 16)
    target, draft = sized(18), sized(1)
    chosen = plan([target, draft])
    assert chosen.devices == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert chosen.max_memory is not None
    assert chosen.max_memory[0] == 12 * GB - cache_bytes(target) * 12 // 28 - WORK_SPACE
    assert chosen.max_memory[1] == 16 * GB - cache_bytes(target) * 16 // 28 - WORK_SPACE - taken(draft)
    assert chosen.offloaded == 0
    assert list(chosen.max_memory) == [0, 1, "cpu"]  # in the order in which they are filled
    config = target.config
    assert cache_bytes(target) == 2 * 2 * config.num_hidden_layers * 2 * 128 * TOKENS


def test_what_no_gpu_has_room_for_stays_in_main_memory_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 8)
    target = sized(18)
    chosen = plan([target])
    assert chosen.max_memory is not None
    assert chosen.offloaded == weight_bytes(target) - chosen.max_memory[0] > 9 * GB
    gpus(monkeypatch, 8, main=0.5)
    with refuses(LoadError, "18 8.0 GPU"):
        plan([target])
    gpus(monkeypatch, 8)
    with refuses(LoadError, "GPU"):  # no other device was asked for
        plan([sized(18, "cuda:0")])


def test_what_is_loaded_goes_only_where_there_is_no_room_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = sized(18)
    gpus(monkeypatch, 24, reserved=4)
    assert not plan([target], {"cuda:0": 4 * GB}).replaces
    gpus(monkeypatch, 16, reserved=8)
    chosen = plan([target], {"cuda:0": 8 * GB})
    assert chosen.replaces
    assert chosen.max_memory is None  # before the target is spread
    gpus(monkeypatch, 16)
    assert plan([target], {}).replaces  # to spread it, all else goes


def test_main_memory_is_reckoned_with_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    target = sized(8, "cpu")
    for main, held, replaces in ((64, None, False), (9, None, False), (64, 4, False), (9, 4, True), (5, 4, True)):
        gpus(monkeypatch, main=main)
        loaded = None if held is None else {"cpu": held * GB}
        assert plan([target], loaded).replaces == replaces, (main, held)
    gpus(monkeypatch, main=0.1)
    with refuses(LoadError, "7.9 0.4"):
        plan([target], {"cpu": 3 * GB // 10})
    gpus(monkeypatch, main=5)
    with refuses(LoadError, "12.0 5.0"):
        plan([target, sized(4, "cpu")])


def test_memory_is_reckoned_without_transformers_models_where_the_shape_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SimpleNamespace(named_parameters=lambda: [("all", torch.empty(77))])
    monkeypatch.setattr("specdemo.models.sizes.empty_model", lambda config: model)
    known, unknown = LlamaConfig(), LlamaConfig(hidden_act="gelu")
    assert weight_bytes(unread(known)) > 77 * 4
    assert weight_bytes(unread(unknown)) == 77 * 4
    quantised = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    assert weight_bytes(unread(quantised)) == 77 // 2


def test_where_transformers_puts_weights() -> None:
    assert device_map(torch.device("cpu"), None) == {}
    assert device_map(torch.device("cuda:1"), None) == {"device_map": {"": "cuda:1"}}
    assert device_map(torch.device("cuda:0"), {0: 5, "cpu": 7}) == {
        "device_map": "sequential",
        "max_memory": {0: 5, "cpu": 7},
    }


def test_weights_that_wait_for_a_pass_count_as_where_they_wait() -> None:
    first, away = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(10, 1, bias=False, device="meta")
    model: Any = torch.nn.Sequential(first, away)
    assert opened.placement(model) == {"cpu": 52}
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    assert opened.placement(model) == {"cpu": 12, "disk": 40}
    model.hf_device_map = {"": "disk"}
    assert opened.placement(model) == {"cpu": 12, "disk": 40}


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
    share = share_read(model.config)
    assert share * numbers_of(model.config) == pytest.approx(read)
    assert (share < 1) == (not tied or "moe" in kind)

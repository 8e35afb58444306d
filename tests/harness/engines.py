"""Tiny random transformers, the engines that run them on any machine, and toys of them."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from specdemo.drafters.names import drafter_class
from specdemo.engines import linear, ops
from specdemo.engines.choose import runner_maker
from specdemo.engines.cpu.library import library_for
from specdemo.engines.fused import FusedRunner, SharedPasses
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.capture import Work
from specdemo.engines.gpu.graph import Graphs
from specdemo.engines.native import NativeModel, NativeRunner
from tests.harness.classes import FusedModel, GraphRunner

from .doubles import MODEL_VOCAB
from .toys import ModelToy

ARCHITECTURES = ("llama", "qwen3", "gpt2")


@cache
def tiny_model(architecture: str, seed: int = 0, layers: int = 3) -> PreTrainedModel:
    """A random transformer in float32, so sure of each token that rounding does not change its greedy text."""
    shape = {"vocab_size": MODEL_VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    wide = {"initializer_range": 0.25, "num_hidden_layers": layers, "max_position_embeddings": 256}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if architecture == "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape, **sizes, **wide))
        elif architecture == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, **sizes, **wide, head_dim=8))
        elif architecture == "smollm3":  # its second layer does not rotate
            model = SmolLM3ForCausalLM(SmolLM3Config(**shape, **sizes, **wide, no_rope_layer_interval=2))
        else:
            heads = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 256, "initializer_range": 0.25}
            model = GPT2LMHeadModel(GPT2Config(**shape, **heads))
    return model.eval()


def model_with_biases(architecture: str) -> PreTrainedModel:
    """A tiny transformer with biases wherever it can have some, and these and the weights of its norms at random."""
    config = copy.deepcopy(tiny_model(architecture).config)
    config.attention_bias = config.mlp_bias = True  # Llama has none by default
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        small = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        assert len(small) > 4 * config.num_hidden_layers
        for parameter in small:
            nn.init.normal_(parameter)
    return model


def recorded(work: Work) -> Work:
    """In place of a capture: every replay leaves its outcome where the first one lay."""
    kept = work()

    def replay() -> Any:
        for old, new in zip(*map(torch.utils._pytree.tree_leaves, (kept, work())), strict=True):
            if old is not None:
                old.copy_(new)
        return kept

    return replay


def cpu_engine(dtype: torch.dtype) -> str:
    """What runs a known model with weights of this type on this machine's CPU."""
    return "native" if library_for(dtype) else "fused"


def native_runner(model: PreTrainedModel, capacity: int, dtype: torch.dtype | None = None) -> NativeRunner:
    """A runner by the library of `native.c`; skips the test where that cannot be had."""
    if library_for(dtype or model.dtype) is None:
        pytest.skip("no C library here")
    return NativeRunner(NativeModel(FusedModel.of(model, dtype)), capacity)


ENGINES = ("eager", "fused", "native", "graph")


def makes_runners(engine: str, model: PreTrainedModel) -> Callable[[int], Any]:
    """What makes the runners of an engine for a model. The passes of "graph" are `recorded`, of torch's operations."""
    if engine == "eager":
        return runner_maker(model, eager=True)[1]
    if engine == "native":
        return partial(NativeRunner, native_runner(model, 8).together)
    with pytest.MonkeyPatch.context() as patch:  # as on a machine without gcc
        patch.setattr(linear, "library_for", lambda dtype: None)
        fused = FusedModel.of(model)
    if engine == "fused":
        return partial(FusedRunner, fused)
    return partial(GraphRunner, Graphs(fused, ops, recorded, 1))


# Captured passes of several texts ----------------------------------------------------------------------------------


class ByAddress:
    """In place of the kernels: torch's operations on the caches that lie at the distances which the rows tell."""

    EXACT = APART = True
    product = staticmethod(ops.product)

    @staticmethod
    def placed(where: Tensor, paths: Tensor, depths: Tensor, capacity: int, apart: bool = False) -> tuple[Any, ...]:
        return where, paths, depths, apart

    @staticmethod
    def write_kv(qkv: Tensor, norms: Any, rotation: Any, keys: Tensor, values: Tensor, rows: Any) -> Tensor:
        each = apart(qkv, keys, values, *rows)
        return torch.cat([ops.write_kv(some, norms, rotation, *cache, placed) for some, cache, placed in each])

    @staticmethod
    def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Any, **look: Any) -> Tensor:
        each = apart(q, keys, values, *rows)
        return torch.cat([ops.attend(some, *cache, placed, **look) for some, cache, placed in each])


def apart(
    x: Tensor, keys: Tensor, values: Tensor, where: Tensor, paths: Tensor, depths: Tensor, apart: bool
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], ops.RowPlaces]]:
    """The rows of a cache, or each of the rows of several, with its keys and values and where it stands there."""
    size = 1 if apart else len(x)
    for row in range(0, len(x), size):
        distance, own = int(where[1, row]), slice(row, row + size)
        further = distance * ops.UNIT * keys.element_size()
        cache = lying_at(keys.data_ptr() + further, keys), lying_at(values.data_ptr() + further, values)
        ends = torch.minimum(paths[own], depths[own, None]) if apart else paths[own]
        yield x[own], cache, ops.placed(where[:, own], ends, depths[own], keys.shape[1])


def lying_at(address: int, like: Tensor) -> Tensor:
    """The tensor of the shape and type of another that lies at an address."""
    memory = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


@dataclass
class EngineToy(ModelToy):
    """Tiny models on an engine whose runners read together: "native", "fused", "graph", "ops" (captured passes that
    read the caches of several by torch's operations), or "eager", whose runners do not."""

    engine: str = "native"
    makers: dict[str, Any] = field(default_factory=dict)  # of the runners of "model" and of "draft_model"

    def maker(self, which: str) -> Any:
        if which not in self.makers:
            self.makers[which] = self.new_maker(which)
        return self.makers[which]

    def new_maker(self, which: str) -> Any:
        model = getattr(self, which)
        if self.engine in ("eager", "native"):
            return makes_runners(self.engine, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "library_for", lambda dtype: None)
            fused = FusedModel.of(model)
            if self.engine == "fused":
                return partial(FusedRunner, fused, together=SharedPasses(fused))
            patch.setattr(graph, "ROOM", 128)
            if which == "model":
                capture_heads(self)
            functions: Any = ByAddress if self.engine == "graph" else ops
            return partial(GraphRunner, Graphs(fused, functions, recorded, 1))

    def target_runner(self, capacity: int) -> Any:
        self.runners.append(self.maker("model")(capacity))
        return self.runners[-1]

    def draft_runner(self, capacity: int) -> Any:
        self.draft_runners.append(self.maker("draft_model")(capacity))
        return self.draft_runners[-1]


def capture_heads(toy: Any, *names: str) -> None:
    """Those named, or all, as on a GPU; the calls are `recorded`."""
    for name in names or toy.heads:
        drafter_class(name).capture(toy.heads[name], recorded)  # type: ignore[attr-defined]


def mixed(model: PreTrainedModel, other: PreTrainedModel, share: float) -> PreTrainedModel:
    """A copy whose weights are partly those of another: a draft model that is right now and then."""
    near, weights = type(model)(model.config).eval(), other.state_dict()
    near.load_state_dict({name: (1 - share) * own + share * weights[name] for name, own in model.state_dict().items()})
    return near

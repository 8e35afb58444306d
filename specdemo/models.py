"""A preset made ready: its models on a device, its tokenizer, and what a run needs to know of them."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from . import chat, sampling
from .costs import Costs
from .drafters.head import ReadyHead
from .hardware import arithmetic, choose_device, choose_dtype, cpu_model, cpu_name, device_name
from .imports import without_garbage_collection
from .opening import Opened, open_source
from .presets import Preset
from .runners import Runner
from .runners.choose import MakeRunner, runner_maker, runner_of_weights
from .runners.huge_pages import WEIGHTS
from .sources import Progress
from .types import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CONTEXT = 2048  # for models that state none
LANES = 2  # runs of the target that go on at a time: a race's


@dataclass(repr=False)  # a repr would print every weight
class Loaded:
    """A preset whose models are in memory.

    `dtype` is what is computed in, `weights_dtype` what the weights are stored in. `context` is the most tokens a run
    may hold, `eos_ids` the tokens that end a text, `weights` says which weights these are, for the header of a trace,
    and `engine` what runs the target: graph, native, fused or eager. `embeddings` are its input's and its output's,
    [V, hidden] each.
    """

    preset: Preset
    open_model: Callable[[], PreTrainedModel] | None
    tokenizer: PreTrainedTokenizerBase
    draft_model: PreTrainedModel | None
    embeddings: tuple[Tensor, Tensor] | None
    placement: dict[str, int]
    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    context: int
    eos_ids: frozenset[int]
    ngram_table: Path | None
    skip_layers: int | None
    weights: dict[str, Any]
    engine: str
    make_target_runner: MakeRunner | None
    make_draft_runner: MakeRunner | None
    costs: dict[tuple[bool, ...], Costs] = field(default_factory=dict)  # what rounds cost, see `race.costs_of`
    head_files: dict[str, Path] = field(default_factory=dict)  # trained heads by kind
    heads: dict[str, ReadyHead] = field(default_factory=dict)  # those of them that a run has made ready

    @property
    def model(self) -> PreTrainedModel:
        """The target as transformers has it; opened now, where no runner needed it."""
        assert self.open_model is not None, "the models were released"
        return self.open_model()

    def target_runner(self, capacity: int) -> Runner:
        """A runner of the target for a run of at most `capacity` tokens."""
        assert self.make_target_runner is not None, "the models were released"
        return self.make_target_runner(capacity)

    def draft_runner(self, capacity: int) -> Runner:
        """A runner of the draft model; only for presets that have one."""
        assert self.make_draft_runner is not None, "this preset has no draft model"
        return self.make_draft_runner(capacity)

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        """Token ids of a prompt, in the chat template unless `raw`; see `chat.encode`.

        Raises:
            BadInput: the prompt is blank, or is not text that can be encoded.
        """
        return chat.encode(self.tokenizer, prompt, raw, self.preset.chat_template_kwargs)

    def environment(self) -> dict[str, Any]:
        """The hardware, number type and versions that figures depend on."""
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "placement": self.placement,
            "engine": self.engine,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights_dtype": str(self.weights_dtype).removeprefix("torch."),
            "cpu": cpu_name(),
            "cpu_model": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": version("transformers"),
        }

    def release(self) -> None:
        """Drop the models and give their memory back. Safe to call twice; nothing can be run afterwards."""
        self.open_model = self.draft_model = self.embeddings = None
        self.make_target_runner = self.make_draft_runner = None
        self.heads.clear()
        _free_memory()


def ignore(fraction: float | None, words: str) -> None:
    """The progress callback of someone who does not want to know."""


def load(
    preset: Preset,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = ignore,
    eager: bool = False,
) -> Loaded:
    """Make a preset ready, fetching what is missing.

    Args:
        dtype: "float32", "bfloat16" or "float16"; None or "auto" is the preset's or what the device is good at. On a
            CPU float16 is for the weights alone, see `hardware.arithmetic`.
        device: "cpu", "cuda" or "cuda:1"; None or "auto" takes a GPU if there is one.
        progress: called with the stage in words, and how much of it is done where that is known.
        eager: run the models by transformers' own forward.
    Raises:
        BadInput: a dtype or device that does not exist, or a pair of models that does not go together.
        LoadError: the weights cannot be had or opened: one sentence says why and what to do.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(preset.dtype if dtype in (None, "auto") else dtype, chosen_device)
    if eager:  # nothing then multiplies by weights that are stored in less
        chosen_dtype = arithmetic(chosen_dtype, chosen_device)
    draft: Opened | None = None
    with without_garbage_collection():
        target = open_source(preset.target, chosen_dtype, chosen_device, progress, as_stored=not eager)
        if preset.draft_model is not None:
            draft = open_source(preset.draft_model, chosen_dtype, chosen_device, progress, as_stored=False)
            check_same_tokenizer(target.tokenizer, draft.tokenizer, draft.config, preset)
    layers = target.config.get_text_config().num_hidden_layers
    if preset.skip_layers is not None and preset.skip_layers >= layers:
        raise BadInput(
            f"{preset.name}.toml: the field skip_layers is {preset.skip_layers}, but the target has {layers} layers: "
            "it must be less."
        )
    where = target.embeddings[0].device
    progress(None, "capturing the passes" if where.type == "cuda" else "laying out the weights")
    if target.stored is not None:
        engine, make_target_runner = runner_of_weights(target.config, target.stored)
    else:
        engine, make_target_runner = runner_maker(target.open_model(), LANES, eager, chosen_dtype)
    make_draft_runner = runner_maker(draft.open_model(), 1, eager, chosen_dtype)[1] if draft is not None else None
    if where.type == "cpu":
        sampling.library()  # compiled now if need be, and not while the first run is timed
    progress(1.0, "ready")
    return Loaded(
        preset=preset,
        open_model=target.open_model,
        tokenizer=target.tokenizer,
        draft_model=draft.open_model() if draft is not None else None,
        embeddings=target.embeddings,
        placement=target.placement,
        device=where,
        dtype=arithmetic(chosen_dtype, where),
        weights_dtype=arithmetic(chosen_dtype, where) if engine == "eager" else chosen_dtype,
        context=min(context_of(opened.config) for opened in (target, draft) if opened is not None),
        eos_ids=_eos_ids(target, preset),
        ngram_table=preset.ngram_table,
        head_files=preset.heads,
        skip_layers=preset.skip_layers,
        weights={"target": target.identity, "draft_model": draft.identity if draft is not None else None},
        engine=engine,
        make_target_runner=make_target_runner,
        make_draft_runner=make_draft_runner,
    )


def check_same_tokenizer(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    draft_config: PreTrainedConfig,
    preset: Preset,
) -> None:
    """Refuse a draft model whose token ids do not mean what the target's mean.

    Padding at the end of a vocabulary may differ, and so may tokens that only one of the two has, as long as
    the draft model can read whatever the target writes.

    Raises:
        BadInput: naming both models and one token that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    names = {index: token for token, index in theirs.items()}
    readable = draft_config.get_text_config().vocab_size
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if names.get(index, token) == token and theirs.get(token, index) == index and index < readable:
            continue
        other = names.get(index)
        there = f"number {index} is {other!r}" if other is not None else f"there is no number {index}"
        raise BadInput(
            f"{preset.draft_model} cannot draft for {preset.target}: they have different tokenizers. "
            f"Token {index} is {token!r} for the target, but {there} for the draft model."
        )


def context_of(config: PreTrainedConfig) -> int:
    """The most tokens a model was made to read at once."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)


def _eos_ids(target: Opened, preset: Preset) -> frozenset[int]:
    ids = [*target.eos] if isinstance(target.eos, list) else [target.eos]
    ids += [target.tokenizer.eos_token_id, chat.end_of_turn(target.tokenizer, preset.chat_template_kwargs)]
    return frozenset(index for index in ids if index is not None)


def _free_memory() -> None:
    WEIGHTS.begin_anew()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

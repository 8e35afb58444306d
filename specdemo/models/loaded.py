"""A preset made ready: its models on a device, its tokenizer, and what a run needs to know of them.

>>> loaded = load(find_preset("nanogpt-shakespeare"), device="cpu")
>>> loaded.tokenizer.decode(loaded.encode("ROMEO:"))
'ROMEO:'
>>> loaded.target_runner(capacity=64).length
0
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..decoding.constraint import Constraint, tokenizer_of
from ..decoding.costs import CostModel
from ..decoding.parts import DrafterParts
from ..drafters.names import DRAFTERS, behind
from ..engines.choose import MakeRunner
from ..engines.cpu.huge_pages import WEIGHTS
from ..engines.exactness import SelfTest
from ..engines.families import attending_layers
from ..engines.runner import Runner
from ..formats import byte_size
from ..system.hardware import compute_dtype, cpu_model, cpu_name, device_name, dtype_name
from ..system.progress import attended
from ..system.replaced import LIBRARY, REPLACED
from . import chat
from .checkpoint import Checkpoint, fetch_weights
from .configuration import context_of, embedding_rows
from .errors import causes
from .mtp import find_mtp
from .opened import open_checkpoint
from .preset_models import find_models
from .presets import Preset
from .published_heads import fetch_heads, formats_of
from .sizes import check_files, experts_of, keys_and_values, plan, share_drafting, share_read
from .store import LoadError, Progress, ignore
from .translation import Translation, differing_token
from .trial import check_draws

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .opened import _ModelInMemory

log = logging.getLogger(__name__)
MAKING_ROOM = "unloading the previous preset to make room"
LANES = 2  # runs of the target at the same time, in a race


@dataclass(repr=False)  # a repr would print every weight
class Loaded:
    """A preset whose models are in memory.

    `dtype` is the type of computations, `weights_dtype` that of stored weights. `context` is the most tokens of a run,
    `rows` how many token ids the target can read, `eos_ids` the tokens that end a text. `weights` identifies the
    weights in the header of a trace. `engine` runs the target: graph, native, fused or eager; `exact_rows`,
    `exact_tree_rows` and `self_test` are those of its runners. `parts` are what its drafters need. `placement` is the
    bytes of the target's weights on each device, `held` those of all models. `token_bytes` is the bytes of a token's
    keys and values, of the target and of the drafters with their own cache. `bytes_per_pass` is the bytes of weights
    that a pass of the target reads for one token, see `sizes.share_read`.
    """

    preset: Preset
    open_model: Callable[[], PreTrainedModel] | None
    open_draft_model: Callable[[], PreTrainedModel] | None
    tokenizer: PreTrainedTokenizerBase
    parts: DrafterParts
    placement: dict[str, int]
    held: dict[str, int]
    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    context: int
    rows: int
    eos_ids: frozenset[int]
    weights: dict[str, Any]
    engine: str
    exact_rows: int
    exact_tree_rows: int
    self_test: SelfTest | None
    make_target_runner: MakeRunner | None
    token_bytes: Mapping[str, int]
    bytes_per_pass: int
    draft_dtype: torch.dtype | None  # of the draft model's stored weights
    experts: dict[str, int] = field(default_factory=dict)  # `count` of a layer, `used` by a token, `bytes` of all
    costs: dict[tuple[int, ...], CostModel] = field(default_factory=dict)  # what rounds cost, see `race.costs_of`
    _grammar_tokenizer: Any = None  # made for the first run with a grammar

    @property
    def model(self) -> PreTrainedModel:
        """The target as a transformers model. If no runner uses that, it is opened now, beside the runner's weights,
        and freed when nobody holds it any more."""
        assert self.open_model is not None, "the models were released"
        return self.open_model()

    @property
    def draft_model(self) -> PreTrainedModel:
        """The draft model as a transformers model, in the same way; only for presets that have one."""
        assert self.open_draft_model is not None, "this preset has no draft model"
        return self.open_draft_model()

    @property
    def released(self) -> bool:
        """Whether the models were released, so that nothing can run."""
        return self.make_target_runner is None

    @property
    def head_formats(self) -> dict[str, str]:
        mtp = {} if isinstance(self.parts.open_mtp, str) else {"mtp": "MTP"}
        return {**formats_of(self.parts.head_files), **mtp}

    @property
    def missing_heads(self) -> Mapping[str, str]:
        return self.parts.missing_heads

    def target_runner(self, capacity: int) -> Runner:
        assert self.make_target_runner is not None, "the models were released"
        return self.make_target_runner(capacity)

    def draft_runner(self, capacity: int) -> Runner:
        """A runner of the draft model; only for presets that have one."""
        assert self.parts.make_draft_runner is not None, "this preset has no draft model"
        return self.parts.make_draft_runner(capacity)

    def cannot_branch(self, drafter: str) -> str | None:
        """Why an available drafter cannot draft trees here; None if it can."""
        runners = [self.target_runner]
        if behind(drafter) == "draft-model" and self.parts.make_draft_runner:
            runners.append(self.draft_runner)
        if not DRAFTERS[drafter].branches or (len(runners) > 1 and self.parts.translator):
            return f"the drafter {drafter} drafts chains only"
        return next((reason for make in runners if (reason := make(1).cannot_branch)), None)

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        """Token ids of a prompt, in the chat template unless `raw`; see `chat.encode`."""
        return chat.encode(self.tokenizer, prompt, raw, self.preset.chat_template_kwargs, self.rows)

    def constraint(self, grammar: str) -> Constraint:
        """What a JSON schema or a grammar allows in a text of the target."""
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = tokenizer_of(self.tokenizer, self.rows, self.eos_ids)
        return Constraint.of(grammar, self._grammar_tokenizer)

    def environment(self) -> dict[str, Any]:
        """The hardware, number type and versions that figures depend on."""
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "devices": [*self.held],
            "placement": self.placement,
            "bytes_per_pass": self.bytes_per_pass,
            **({"experts": {**self.experts, **self._experts_read()}} if self.experts else {}),
            "engine": self.engine,
            "exact_rows": self.exact_rows,
            "exact_tree_rows": self.exact_tree_rows,
            "self_test": self.self_test and {**asdict(self.self_test), "replaced": [*REPLACED.values()]},
            "drafts_by_text": self.parts.translator is not None,
            "dtype": dtype_name(self.dtype),
            "weights_dtype": dtype_name(self.weights_dtype),
            **({"draft_weights_dtype": dtype_name(self.draft_dtype)} if self.draft_dtype else {}),
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

    def _experts_read(self) -> dict[str, dict[str, float]]:
        """See `Runner.experts_read`; empty where nothing was counted. A trace is JSON: names are strings."""
        counted = {} if self.released else self.target_runner(1).experts_read
        return {"read": {str(rows): mean for rows, mean in sorted(counted.items())}} if counted else {}

    def release(self) -> None:
        """Drop the models and free their memory. Safe to call twice; nothing can run afterwards."""
        self.open_model = self.open_draft_model = self.make_target_runner = None
        self.parts.ready_heads.clear()
        self.parts = DrafterParts()
        _free_memory()


def load(
    preset: Preset,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = ignore,
    eager: bool = False,
    instead_of: Loaded | None = None,
) -> Loaded:
    """Make a preset ready, fetching what is missing. If this fails, all memory is freed.

    Args:
        dtype: "float32", "bfloat16" or "float16"; None or "auto" is the preset's choice or the best for the device,
            which on a CPU is "stored" where the target's file is quantized. A draft model then has weights of 4 bits.
            On a CPU float16 is for the weights only, see `hardware.compute_dtype`.
        device: "cpu", "cuda" or "cuda:1"; None or "auto" takes CUDA if it is there, and on a Mac the faster
            of "cpu" and "mps", see `choose_on_mac`. A second one after a comma is that of the draft model, as in
            "cuda,cpu".
        progress: called with the stage in words, and how much of it is done if known.
        eager: run the models by transformers' own forward.
        instead_of: a loaded preset that is not needed any more. If memory has no room for both, it is released, after
            everything was checked and downloaded.
    Raises:
        LoadError: the weights cannot be fetched or opened: one sentence says why and what to do.
    """
    WEIGHTS.begin_anew()  # presets that share a chunk would keep each other's memory
    had_c = LIBRARY not in REPLACED
    try:
        with attended(lambda: False, partial(progress, None)):
            return _load(preset, dtype, device, progress, eager, instead_of)
    except BaseException as error:
        short = any(isinstance(cause, (MemoryError, torch.OutOfMemoryError)) for cause in causes(error))
        if isinstance(error, LoadError):
            log.debug("The load failed.", exc_info=error)
        for cause in causes(error):  # the variables of a function that failed live as long as its frame
            traceback.clear_frames(cause.__traceback__)
            if isinstance(error, LoadError):  # it is a sentence, while a bug keeps its traceback for the log
                cause.__traceback__ = None
        _free_memory()
        lost_c = had_c and LIBRARY in REPLACED and dtype in (None, "auto")  # then auto is another type
        if not lost_c and (not short or instead_of is None or instead_of.released):
            raise
    if instead_of is not None and not instead_of.released:
        progress(None, MAKING_ROOM)  # it takes more memory than estimated
        instead_of.release()
    return load(preset, dtype, device, progress, eager)


def _load(
    preset: Preset, dtype: str | None, device: str | None, progress: Progress, eager: bool, instead_of: Loaded | None
) -> Loaded:
    models = find_models(preset, dtype, device, progress, eager)
    if models[0].choice:
        progress(None, models[0].choice)
    heads, missing_heads = fetch_heads(preset, models[0], progress)
    where = plan(models, None if instead_of is None else instead_of.held)
    files = [fetch_weights(found, progress) for found in models]
    for found, its_files in zip(models, files, strict=True):
        check_files(found.source, found.config, its_files)
    if instead_of is not None and where.replaces:
        progress(None, MAKING_ROOM)
        instead_of.release()
    for size, place in ((where.offloaded, "in main memory"), (where.on_disk, "on the disk")):
        if size:
            progress(None, f"about {byte_size(size)} of the weights stay {place}, which is slow")

    if where.devices[0].type == "cuda":
        torch.cuda.set_device(where.devices[0])
    opening = partial(open_checkpoint, progress=progress, eager=eager)
    target = opening(models[0], files[0], where.devices[0], LANES, bool(preset.heads), max_memory=where.max_memory)
    opened = [target]
    if preset.draft_model:
        opened.append(opening(models[1], files[1], where.devices[1], 1, target=False))
    for drawing in {each.device for each in opened}:
        check_draws(drawing, embedding_rows(models[0].config))  # it compiles what draws, too
    progress(1.0, "ready")
    parts = _drafter_parts(preset, models, opened, files[0])
    heads = heads if parts.embeddings is not None else {}
    return _assembled(preset, models, opened, replace(parts, head_files=heads, missing_heads=missing_heads))


def _drafter_parts(
    preset: Preset, models: Sequence[Checkpoint], opened: Sequence[_ModelInMemory], files: Sequence[Path]
) -> DrafterParts:
    """What drafters need, but for heads in files.

    Args:
        files: the target's weights.
    """
    target, *drafts = models
    parts = DrafterParts(
        embeddings=opened[0].embeddings,
        ngram_table=preset.ngram_table,
        skip_layers=preset.skip_layers,
        open_mtp=find_mtp(target, files, opened[0].engine, opened[0].placement, opened[0].open_model),
        captured=opened[0].engine == "graph",
        layers=target.config.get_text_config().num_hidden_layers,
        final_norm=opened[0].final_norm,
    )
    for draft, of_draft in zip(drafts, opened[1:], strict=True):
        translation, make_runner = _translation(target, draft), of_draft.make_runner
        parts = replace(
            parts,
            make_draft_runner=_within(make_runner, draft.config) if translation else make_runner,
            draft_context=context_of(draft.config),
            draft_device=of_draft.device,
            draft_name=str(preset.draft_model),
            translator=translation,
        )
    return parts


def _assembled(
    preset: Preset, models: Sequence[Checkpoint], opened: Sequence[_ModelInMemory], parts: DrafterParts
) -> Loaded:
    target, of_target = models[0], opened[0]
    held: dict[str, int] = {}
    for each in opened:
        held |= {name: held.get(name, 0) + size for name, size in each.placement.items()}
    dtype = compute_dtype(target.dtype, of_target.device)
    names = zip(("target", "draft-model"), models, strict=False)
    token_bytes = {name: keys_and_values(found.config) * dtype.itemsize for name, found in names}
    token_bytes["layer-skip"] = int(token_bytes["target"] * share_drafting(target))
    token_bytes["mtp"] = token_bytes["target"] // len(attending_layers(target.config))
    runner, size = of_target.make_runner(1), sum(of_target.placement.values())
    return Loaded(
        preset=preset,
        open_model=of_target.open_model,
        open_draft_model=opened[1].open_model if preset.draft_model else None,
        tokenizer=target.tokenizer,
        parts=parts,
        placement=of_target.placement,
        bytes_per_pass=round(size * share_read(target.config, of_target.sizes)),
        experts=experts_of(target.config, size),
        held=held,
        device=of_target.device,
        dtype=dtype,
        draft_dtype=models[1].dtype if preset.draft_model else None,
        weights_dtype=dtype if of_target.engine == "eager" else target.dtype,
        token_bytes=token_bytes,
        context=context_of(target.config),
        rows=embedding_rows(target.config),
        eos_ids=_eos_ids(target, preset),
        weights={"target": target.identity, "draft_model": models[1].identity if preset.draft_model else None},
        engine=of_target.engine,
        exact_rows=runner.exact_rows,
        exact_tree_rows=runner.exact_tree_rows,
        self_test=of_target.self_test,
        make_target_runner=of_target.make_runner,
    )


def _translation(target: Checkpoint, draft: Checkpoint) -> Translation | None:
    """Between the tokenizers of a target and its draft model; None if they are alike."""
    if draft.tokenizer is target.tokenizer and embedding_rows(draft.config) >= embedding_rows(target.config):
        return None
    readable = embedding_rows(draft.config)
    unlike = differing_token(target.tokenizer.get_vocab(), draft.tokenizer.get_vocab(), readable)
    return Translation(target.tokenizer, draft.tokenizer, readable) if unlike else None


def _within(make_runner: MakeRunner, config: PreTrainedConfig) -> MakeRunner:
    """`make_runner` with capacities limited to what the model was made to read."""
    return lambda capacity: make_runner(min(capacity, context_of(config)))


def _eos_ids(target: Checkpoint, preset: Preset) -> frozenset[int]:
    ids = [*target.eos] if isinstance(target.eos, list) else [target.eos]
    ids += [target.tokenizer.eos_token_id, chat.end_of_turn(target.tokenizer, preset.chat_template_kwargs)]
    return frozenset(index for index in ids if index is not None)


def _free_memory() -> None:
    WEIGHTS.begin_anew()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

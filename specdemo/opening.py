"""A source of weights to a model and its tokenizer.

transformers opens every source, but to import its models takes longer than everything else of a start. So weights that
`sources` stored are read as they are, if the fused runners know such a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash

from .failures import in_words
from .hardware import arithmetic, free_memory
from .imports import import_quickly
from .presets import Folder, Hub, Source, Wheel
from .runners.choose import has_room_for
from .runners.layout import Weights, embeddings, is_plain, knows, stored_as
from .sources import LoadError, Progress, from_wheel, identity_of, weights_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, repr=False)  # a repr would print every weight
class Opened:
    """A model as its source gives it.

    `identity` says in a trace which weights these are, `placement` how many bytes of them lie on each device, and `eos`
    what ends a text by the model's own word. `embeddings` are those of input and output, [V, hidden] each. The weights
    are `stored` if they could be read without transformers' model, which is then opened when first called for.
    """

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]
    placement: dict[str, int]
    eos: int | list[int] | None
    embeddings: tuple[Tensor, Tensor]
    open_model: Callable[[], PreTrainedModel]
    stored: Weights | None = None


def open_source(
    source: Source, dtype: torch.dtype, device: torch.device, progress: Progress, as_stored: bool = True
) -> Opened:
    """The model of a source, fetched where it is missing.

    Args:
        as_stored: the weights will do, where they can be had without transformers' model.
    Raises:
        LoadError: the weights cannot be had or opened: one sentence says why and what to do.
    """
    logging.disable_progress_bar()  # ours is the callback
    place, identity, revision, variant = _find(source, dtype, progress)
    progress(None, f"loading {source}")

    @cache
    def by_transformers() -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        with in_words(source):
            return _by_transformers(source, place, revision, variant, dtype, device, progress)

    def open_model() -> PreTrainedModel:
        return by_transformers()[1]

    if isinstance(source, Wheel) and device.type == "cpu" and as_stored:
        with in_words(source):
            folder = Path(place)
            file = folder / weights_file(variant)
            config = PreTrainedConfig.from_json_file(folder / "config.json")
            if knows(config) and is_plain(config) and has_room_for(file.stat().st_size):
                weights = {name: stored_as(weight, dtype) for name, weight in load_file(file).items()}
                return Opened(
                    config=config,
                    tokenizer=PreTrainedTokenizerFast.from_pretrained(place),
                    identity=identity,
                    placement=_placement(weights.values()),
                    eos=json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id"),
                    embeddings=embeddings(weights),
                    open_model=open_model,
                    stored=weights,
                )
    tokenizer, model = by_transformers()
    return Opened(
        config=model.config,
        tokenizer=tokenizer,
        identity=identity,
        placement=_placement(model.parameters()),
        eos=model.generation_config.eos_token_id if model.generation_config is not None else None,
        embeddings=_embeddings(model, _stored(dtype, device, model.config)),
        open_model=open_model,
    )


def _stored(dtype: torch.dtype, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """What weights are stored in if `dtype` is asked for: only the fused runners store less than they compute in."""
    return dtype if knows(config) else arithmetic(dtype, device)


def _embeddings(model: PreTrainedModel, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Those of input and output, one and the same if they are tied."""
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding = first.detach().to(dtype)
    return embedding, embedding if last is first else last.detach().to(dtype)


@torch.no_grad()
def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the weights the values that they have when stored as `dtype`."""
    for weight in model.parameters():
        weight.copy_(stored_as(weight, dtype))


def _placement(weights: Iterable[Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for weight in weights:
        sizes[str(weight.device)] = sizes.get(str(weight.device), 0) + weight.nbytes
    return sizes


def _find(source: Source, dtype: torch.dtype, progress: Progress) -> tuple[str, dict[str, Any], str | None, str | None]:
    """What `from_pretrained` calls a source, what a trace calls it, and the revision and variant to take."""
    if isinstance(source, Wheel):
        folder, variant = from_wheel(source, dtype, progress)
        return str(folder), {**identity_of(source)}, None, variant
    if isinstance(source, Folder):
        if not (source.path / "config.json").is_file():
            raise LoadError(f"There is no model in the folder {source.path}: it has no config.json.")
        return str(source.path), {"source": "folder", "name": source.path.name}, None, None
    progress(None, f"looking for {source} on the hub")
    commit = _commit_of(source)  # every file is then taken from this one
    revision = commit or source.revision
    return source.repo, {"source": "hub", "repo": source.repo, "revision": revision}, revision or "main", None


def _by_transformers(
    source: Source,
    place: str,
    revision: str | None,
    variant: str | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    import_quickly("transformers.modeling_utils")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False, **({"revision": revision} if revision else {})}
    config = AutoConfig.from_pretrained(place, **options)
    check_rolls_back(config, source)
    computed = arithmetic(dtype, device)
    if device.type == "cpu":
        check_memory(config, computed, source)
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    model = AutoModelForCausalLM.from_pretrained(
        place,
        config=config,
        dtype=computed,
        variant=variant,
        device_map=_device_map(device),
        tqdm_class=_download_bar(source, progress),
        **options,
    )
    if _stored(dtype, device, config) != computed:
        _round(model, dtype)
    return tokenizer, model.eval()


def _commit_of(source: Hub) -> str | None:
    """The commit that the revision stands for now; None if the repository is a folder."""
    with in_words(source):
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


def check_memory(config: Any, dtype: torch.dtype, source: Source) -> None:
    """Refuse, before it is fetched, a model that main memory cannot hold: the system would end the whole process.

    Raises:
        LoadError: with what it needs and what there is.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=dtype).parameters()
    needed, free = sum(weight.nbytes for weight in weights), free_memory() + psutil.swap_memory().free
    if needed > free:
        raise LoadError(
            f"{source} needs {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free. "
            "Choose a smaller preset, or run it on a machine with more."
        )


def check_rolls_back(config: Any, source: Source) -> None:
    """Refuse an architecture that keeps a state which cannot be taken back after a rejected draft.

    Raises:
        LoadError: naming the model and the kind of layer.
    """
    from transformers import AutoModelForCausalLM

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

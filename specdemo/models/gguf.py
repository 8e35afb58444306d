"""Reads the header of a GGUF file, and makes a configuration of it, or refuses it.

The rest of the file need not be there. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

transformers 5.23 has tables of the fields of a header, but of what these say of attention it knows little more than the
base of the rotary embedding, and silently drops the rest. llama.cpp reads all of it: its `load_hparams`,
`llama_context` and `ggml_rope_ext` have the formulas.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log, prod
from typing import TYPE_CHECKING, Any, BinaryIO

from .configuration import MOST, MOST_LAYERS, MOST_TOKENS, wrong_sizes
from .store import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STRING, ARRAY = 8, 9
LONGEST = 2**26  # bytes of a string or of an array of numbers
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Tensors that divide the frequencies: those of every text, or of texts longer and not longer than the original context.
ALWAYS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
PATTERN = "attention.sliding_window_pattern"
FIELDS = {"freq_base", "freq_base_swa", "dimension_count", "dimension_count_swa", "scale_linear", "scaling.type"}
FIELDS |= {"scaling.factor", "scaling.attn_factor", "scaling.original_context_length", "scaling.finetuned"}
FIELDS |= {"scaling.yarn_ext_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"}
SAME = "attn_logit_softcapping", "final_logit_softcapping"  # fields that have the same name in a configuration
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}  # by the field of a configuration
# transformers' names of architectures, where they are not llama.cpp's
TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
TYPES |= {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
# Architectures, by llama.cpp's names:
READ = {"lfm2"}  # transformers reads all but what rescales the frequencies
WHOLE = {*READ, "gpt2"}  # of whose weights some are no rows of a tensor
TIED = {"bloom", "falcon"}  # have no output rows of their own, whatever is in the file
PARTLY = {"phi3", "stablelm", "nemotron", "minimax-m2"}  # may rotate only the first part of a head
TWO_ROPES = {"gemma3", "gemma4"}  # layers with a sliding window have a rotation of their own, which is not rescaled
SLIDING = {"gemma2", "gpt-oss", *TWO_ROPES}  # have such layers
# The least and the largest that a size can be, or each item of a list of them; of some 0 stands for none.
SIZES = {
    "block_count": (1, MOST_LAYERS),
    "context_length": (1, MOST_TOKENS),
    "attention.sliding_window": (0, MOST_TOKENS),
}
SIZES |= dict.fromkeys(("embedding_length", "vocab_size", "attention.key_length", "attention.value_length"), (1, MOST))
SIZES |= dict.fromkeys(("feed_forward_length", "attention.head_count", "attention.head_count_kv"), (0, MOST))
SIZES |= dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"), (0, MOST))
LARGE = {"gemma2": 46, "gemma3": 62}  # the number of layers of the models that divide products by another width


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a GGUF file by its keys, and by their names the shapes, types and places of its tensors.

    A place is counted in bytes from the first multiple of `general.alignment` after the header, which ends at `end`.
    """

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    end: int = 0

    @property
    def numbers(self) -> int:
        """The number of weights."""
        return sum(map(prod, self.shapes.values()))

    def span(self, tensor: str) -> tuple[int, int]:
        """Where a tensor begins in the file and how many bytes it has."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        unit = self.fields.get("general.alignment", 32)
        numbers, bytes_each = GGML_QUANT_SIZES[GGMLQuantizationType(self.kinds[tensor])]
        begin = -(-self.end // unit) * unit + self.places[tensor]
        return begin, prod(self.shapes[tensor]) // numbers * bytes_each

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model."""
        return str(self.fields["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """A field that begins with the architecture's name."""
        return self.fields.get(f"{self.architecture}.{key}", default)


def read_header(file: BinaryIO) -> Header:
    """The header of a GGUF file.

    Raises:
        ValueError: it is not a GGUF file, or its header is incomplete.
    """
    try:
        return _read(file)
    except (struct.error, KeyError, UnicodeDecodeError, RecursionError) as error:  # sizes may be wrong
        raise ValueError("The header of the GGUF file is not whole.") from error


def _read(file: BinaryIO) -> Header:
    end = 0

    def read(size: int) -> bytes:
        nonlocal end
        content = file.read(size) if size <= LONGEST else b""
        if len(content) < size:
            raise struct.error
        end += size
        return content

    def take(form: str) -> Any:
        return struct.unpack("<" + form, read(struct.calcsize("<" + form)))[0]

    def text() -> str:
        return read(take("Q")).decode("utf-8")

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind != ARRAY:
            return take(SCALARS[kind])
        inner, count = take("I"), take("Q")
        if inner in SCALARS:
            size = struct.calcsize("<" + SCALARS[inner])
            return [*struct.unpack(f"<{min(count, LONGEST)}{SCALARS[inner]}", read(count * size))]
        return [value(inner) for _ in range(count)]

    if read(4) != b"GGUF":
        raise ValueError("It is not a GGUF file: it does not begin as one does.")
    if take("I") < 2:
        raise ValueError("It is a GGUF file of version 1, which is not read any more.")
    tensors, count = take("Q"), take("Q")
    fields = {}
    for _ in range(count):
        key = text()
        fields[key] = value(take("I"))
    shapes, kinds, places = {}, {}, {}
    for _ in range(tensors):
        name = text()
        shapes[name] = tuple(take("Q") for _ in range(take("I")))
        kinds[name], places[name] = take("I"), take("Q")
    return Header(fields, shapes, kinds, places, end)


# Its configuration ----------------------------------------------------------------------------------------


def check_header(name: str, header: Header) -> None:
    """Refuse a GGUF file that would be read wrongly.

    Args:
        name: of the model, for the message.
    Raises:
        LoadError: naming what it lacks, or a field of its header that a configuration cannot express.
    """
    from gguf import GGMLQuantizationType

    if header.fields.get("general.type") == "adapter" or "adapter.type" in header.fields:
        raise LoadError(f"{name} is a LoRA adapter, not a model.")
    if not header.shapes:
        raise LoadError(f"{name} is a vocabulary without weights.")
    _check_sizes(name, header)
    known = {int(kind) for kind in GGMLQuantizationType}
    for tensor, kind in header.kinds.items():
        if kind not in known:
            raise LoadError(
                f"{name} cannot be loaded: its tensor {tensor} is stored in a type ({kind}) that is not known."
            )
    if (unknown := next(_unknown(header), None)) is not None:
        raise LoadError(f"{name} cannot be run here, because its rotary embedding is not known: {unknown}.")


def _check_sizes(name: str, header: Header) -> None:
    if not isinstance(header.fields.get("general.architecture"), str):
        raise LoadError(f"{name} does not say which kind of model it is: it has no general.architecture.")
    for key, (least, most) in SIZES.items():
        for size in wrong_sizes(header.of_model(key), least, most):
            raise LoadError(f"{name} cannot be loaded: its {key} is {size!r}, not from {least} to {most}.")


def check_complete(name: str, header: Header, size: int) -> None:
    """Refuse a GGUF file that ends before its tensors do.

    Args:
        size: bytes of the file.
    Raises:
        LoadError: so it is.
    """
    if type(unit := header.fields.get("general.alignment", 32)) is not int or unit < 1:
        raise LoadError(f"{name} cannot be loaded: its general.alignment is {unit!r}.")
    needed = max([header.end, *(sum(header.span(tensor)) for tensor in header.kinds)])
    if size < needed:
        raise LoadError(f"{name} is incomplete: it has {size:,} of {needed:,} bytes. Download it again.")


def config_of(header: Header, read: Callable[[str], list[float]] | None = None) -> PreTrainedConfig:
    """The configuration that a GGUF file describes, by transformers' tables of the fields.

    Args:
        header: one that `check_header` and `check_tokenizer` accept.
        read: gives the numbers of a tensor by its name; None while only the header is there: then they are ones.
    Raises:
        ValueError: transformers does not know models of this kind.
    """
    from transformers import CONFIG_MAPPING
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import get_gguf_config

    kind = TYPES.get(header.architecture, header.architecture)
    table = GGUF_CONFIG_MAPPING.get(kind.removesuffix("_text"))
    if table is None or kind not in CONFIG_MAPPING:
        raise ValueError(f"GGUF files of the kind {header.architecture} are not known")
    tokens = len(header.fields["tokenizer.ggml.tokens"])
    if header.architecture in READ:
        stated = get_gguf_config({**header.fields, "tokenizer.ggml.tokens": tokens}, (*header.shapes,))
    else:
        stated = {"vocab_size": tokens, **GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {})}
        found = ((ours, header.of_model(theirs)) for theirs, ours in table.items() if ours)
        stated |= {ours: value for ours, value in found if value is not None}
        stated["tie_word_embeddings"] = "output.weight" not in header.shapes or kind in TIED
    if kind == "stablelm":
        stated["use_qkv_bias"] = "blk.0.attn_q.bias" in header.shapes
        stated["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.shapes
    return completed(
        CONFIG_MAPPING[kind].from_dict(stated), header, read or (lambda name: [1.0] * header.shapes[name][0])
    )


def completed(config: PreTrainedConfig, header: Header, read: Callable[[str], list[float]]) -> PreTrainedConfig:
    """The configuration that transformers made of a GGUF file, completed with what its header says of attention.

    Args:
        header: one that `check_header` accepts.
        read: gives the numbers of a tensor by its name.
    """
    kind, stated = header.architecture, getattr(config, "rope_parameters", None)
    biases = {flag: True for flag, tensor in BIASES.items() if tensor in header.shapes and hasattr(config, flag)}
    if not stated or kind in READ:
        return type(config).from_dict({**config.to_dict(), **biases})
    rope = _rope(header, read)
    changes: dict[str, Any] = {**biases, "rope_parameters": {**stated, **rope}}
    if (size := header.of_model("expert_feed_forward_length")) is not None:
        changes["moe_intermediate_size"] = int(size)
    if kind in TWO_ROPES:
        own = {"rope_theta": header.of_model("rope.freq_base_swa", stated["sliding_attention"]["rope_theta"])}
        ropes = {"full_attention": rope, "sliding_attention": own}
        changes["rope_parameters"] = {layers: {**stated[layers], **more} for layers, more in ropes.items()}
    if LONG in header.shapes:  # Phi-3 keeps it here too
        changes["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if (pattern := header.of_model(PATTERN)) is not None:
        every = range(1, config.num_hidden_layers + 1)
        slides = pattern if isinstance(pattern, list) else [not pattern or layer % pattern for layer in every]
        changes["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if kind in LARGE:
        large = config.num_hidden_layers == LARGE[kind]
        changes["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads if large else _width(header)
    changes |= {field: value for field in SAME if (value := header.of_model(field)) is not None}
    return type(config).from_dict({**config.to_dict(), **changes})


def _rope(header: Header, read: Callable[[str], list[float]]) -> dict[str, Any]:
    """The `rope_parameters` that the header states."""
    rope: dict[str, Any] = {}
    if base := header.of_model("rope.freq_base"):
        rope["rope_theta"] = base
    if header.architecture in PARTLY:
        rope["partial_rotary_factor"] = _rotated(header) / _width(header)
    factor, magnitude = _factor(header), header.of_model("rope.scaling.attn_factor", 1.0)
    original = header.of_model("rope.scaling.original_context_length", header.of_model("context_length"))
    if factor != 1 and header.of_model("rope.scaling.type") == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if magnitude != 1:
            rope["attention_factor"] = magnitude * (1 + 0.1 * max(log(factor), 0.0))
        for beta in ("beta_fast", "beta_slow"):
            if value := header.of_model(f"rope.scaling.yarn_{beta}"):
                rope[beta] = value
    elif factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif ALWAYS in header.shapes and header.architecture == "gemma4":  # 1e30 divides what is not rotated
        kept = [divisor < 1e9 for divisor in read(ALWAYS)]
        rope |= {"rope_type": "proportional", "partial_rotary_factor": sum(kept) / len(kept)}
    elif {ALWAYS, LONG} & header.shapes.keys():
        long, short = (LONG, SHORT) if LONG in header.shapes else (ALWAYS, ALWAYS)
        rope |= {"rope_type": "longrope", "factor": 1.0, "long_factor": read(long), "short_factor": read(short)}
        rope |= {"attention_factor": magnitude, "original_max_position_embeddings": original}
    return rope


def _unknown(header: Header) -> Iterator[str]:
    """What the header says of the rotary embedding that neither transformers nor `_rope` can express."""
    kind, start = header.architecture, f"{header.architecture}.rope."
    stated = {key.removeprefix(start): value for key, value in header.fields.items() if key.startswith(start)}
    tensors = {tensor for tensor in header.shapes if "rope_f" in tensor}
    scaling, factor, base = stated.get("scaling.type", "linear"), _factor(header), stated.get("freq_base")
    scaled = factor != 1 and (bool(tensors) or kind in {*READ, "phi3"})
    wrong = {field: field not in FIELDS for field in stated}
    wrong["dimension_sections"] = kind not in READ
    wrong["freq_base_swa"] = kind not in TWO_ROPES and stated.get("freq_base_swa", base) != base
    width, rotated = _width(header), _rotated(header)
    as_computed = int(width * (rotated / width)) if kind in PARTLY and width else width
    wrong["dimension_count"] = kind not in READ and rotated != as_computed
    own = header.of_model("attention.key_length_swa", width)
    wrong["dimension_count_swa"] = stated.get("dimension_count_swa", own) != own
    wrong["scale_linear"] = wrong["scaling.factor"] = scaled
    known = {"none", "linear", "yarn", *(["longrope"] if LONG in tensors else [])}
    wrong["scaling.type"] = scaling not in known
    wrong["scaling.yarn_ext_factor"] = stated.get("scaling.yarn_ext_factor", 1) != 1
    multiplies = LONG in tensors or (scaling == "yarn" and factor != 1)
    wrong["scaling.attn_factor"] = stated.get("scaling.attn_factor", 1) != 1 and not multiplies
    for name, value in stated.items():
        if wrong[name]:
            yield f"{start}{name} is {value}"
    if header.of_model(PATTERN) is not None and kind not in SLIDING:
        yield f"{kind}.{PATTERN} is {header.of_model(PATTERN)}"
    for tensor in sorted(tensors):
        if tensor not in ({LONG, SHORT} if kind == "phi3" else {ALWAYS}):
            yield f"it has a tensor {tensor}"
        elif header.shapes[tensor] != (rotated // 2,):
            yield f"{tensor} has not as many numbers as there are frequencies"
    if len(tensors & {LONG, SHORT}) == 1:
        yield f"it has only one of {LONG} and {SHORT}"


def _factor(header: Header) -> float:
    """The divisor of the frequencies, which `rope.scaling.type` says how to use."""
    if header.of_model("rope.scaling.type") == "none":
        return 1.0
    return float(header.of_model("rope.scaling.factor") or header.of_model("rope.scale_linear") or 1.0)


def _width(header: Header) -> int:
    heads = header.of_model("attention.head_count", 1)
    stated = header.of_model("attention.key_length")
    return int(stated or header.of_model("embedding_length", 0) // (max(heads) if isinstance(heads, list) else heads))


def _rotated(header: Header) -> int:
    """How many numbers of a key are rotated."""
    return int(header.of_model("rope.dimension_count", _width(header)))

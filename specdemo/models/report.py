"""Reports what models that a person names will need, before their weights are fetched, and saves them as a preset."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, PreTrainedConfig

from ..drafters.draft_model import LONGER
from ..engines.choose import dtype_in_range, engine_of, is_exact
from ..engines.families import FAMILIES, OTHER, is_hybrid
from ..engines.quantized import READERS, bits_kept
from ..engines.ropes import rotation_bytes
from ..errors import BadInput
from ..system.hardware import AS_STORED, choose_devices, choose_dtype, compute_dtype, free_memory
from .checkpoint import find_checkpoint, stored_size
from .errors import wrap_load_errors
from .gguf import LONG, WHOLE, Header, check_header
from .gguf_tokenizer import check_tokenizer
from .loaded import LANES, check_prompts, context_of, embedding_rows
from .placement import plan
from .presets import PRESETS, Preset
from .published_heads import HeadReport, report_on_head
from .sizes import ModelPart, bits
from .source import Source
from .store import LoadError, ignore
from .translation import BY_TEXT, differing_token
from .weight_types import check_dtype, check_kept

# transformers' names for architectures of GGUF files, where they differ
TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
ESTIMATE = (
    "An estimate, by sizes alone: a guess by {name} costs about {share:.0%} of a pass of the target, so rounds with "
    "drafts of 4 pay from {tokens:.1f} tokens on."
)
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"  # tensors of a GGUF file
TOKENS = 2048  # of a text, in the estimate of memory for caches


RUNNING_STATES = (
    "Some of its layers keep a running state, which cannot be rolled back: after a rejected guess it reads the "
    "accepted tokens again."
)
ON_DISK = (
    "Memory cannot hold the target: {size} of its weights stay on the disk and are read for every pass. That is slow, "
    "and the best case for speculation, since a pass takes as long for several tokens as for one."
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model before its weights are fetched. Sizes are in bytes; `download` is None if unknown.

    `caches` is for all runs at the same time, with texts of `TOKENS` tokens or the model's context. A model that is
    `whole` is a GGUF file, which has to be in memory as a whole to be converted.
    """

    name: str
    download: int | None
    weights: int
    caches: int
    engine: str
    exact: bool
    licence: str | None
    gated: bool
    vocabulary: Mapping[str, int]
    reads: int  # how many token ids it can read
    part: ModelPart
    whole: bool

    def sentence(self) -> str:
        size = "nothing to download"
        if self.download != 0:
            size = f"downloads {'an unknown size' if self.download is None else f'up to {gigabytes(self.download)}'}"
        exact = "exact to the bit" if self.exact else "not exact to the bit"
        again = f" {RUNNING_STATES}" if is_hybrid(self.part.config) else ""
        return (
            f"{self.name}: {size}; {gigabytes(self.weights)} of memory for the weights, {gigabytes(self.caches)} for "
            f"caches; engine {self.engine}, {exact}; licence {self.licence or 'not stated'}"
            f"{'; gated: its licence must be accepted on the hub' if self.gated else ''}.{again}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A target, its draft model and published heads, if any, before their weights are fetched."""

    models: tuple[ModelReport, ...]
    free: int  # bytes of main memory
    on_cpu: bool
    unlike: str | None  # the first token that differs in the draft model
    on_disk: int = 0  # bytes of the target's weights that memory has no room for
    heads: tuple[HeadReport, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes of memory for the weights and caches of all models."""
        models = sum(model.weights + model.caches for model in self.models)
        return models + sum(head.size or 0 for head in self.heads) - self.on_disk

    def lines(self) -> list[str]:
        lines = [model.sentence() for model in self.models]
        if len(self.models) > 1:
            lines.append(f"{BY_TEXT} {self.unlike}" if self.unlike else "The tokenizers match.")
        lines += [head.sentence() for head in self.heads]
        lines += self.estimates()
        if self.on_disk:
            lines.append(ON_DISK.format(size=gigabytes(self.on_disk)))
        who = "It needs" if len(self.models) + len(self.heads) == 1 else "Together they need"
        return [*lines, f"{who} {gigabytes(self.needed)} of memory; {gigabytes(self.free)} are free."]

    def estimates(self) -> list[str]:
        """What a guess should cost, by sizes alone: a pass takes about as long as its weights take to be read."""
        target, *drafts = self.models
        sizes = [(draft.name, draft.weights) for draft in drafts] + [(head.name, head.size) for head in self.heads]
        return [
            ESTIMATE.format(name=name, share=size / target.weights, tokens=1 + 4 * size / target.weights)
            for name, size in sizes
            if size and target.weights
        ]

    def check(self) -> None:
        """Refuse what cannot run here, before anything large is fetched.

        Raises:
            LoadError: main memory cannot hold it.
        """
        if self.on_cpu and self.needed > self.free:
            names = " and ".join(model.name for model in self.models)
            raise LoadError(
                f"{names} would take {gigabytes(self.needed)} of memory, but {gigabytes(self.free)} are free: "
                "choose a smaller model."
            )


def report_on(preset: Preset, dtype: str | None = None, device: str | None = None) -> Report:
    """Look at the models of a preset. Configurations and tokenizers are fetched, weights are not.

    Raises:
        LoadError: a model does not exist or cannot be used here: one sentence says why.
    """
    chosen_device, draft_device = choose_devices(device)
    asked = preset.dtype if dtype in (None, "auto") else dtype
    chosen_dtype = choose_dtype(asked, chosen_device)
    check_dtype(chosen_dtype, chosen_device)
    sources = [source for source in (preset.target, preset.draft_model) if source is not None]
    devices = chosen_device, draft_device or chosen_device
    each = [*zip(sources, (LANES, 1), devices, strict=False)]
    models = [_report_of(source, lanes, preset, chosen_dtype, where) for source, lanes, where in each]
    in_range = dtype_in_range(chosen_dtype, [model.part.config for model in models])
    if asked in (None, "auto") and in_range != chosen_dtype:
        models = [_report_of(source, lanes, preset, in_range, where) for source, lanes, where in each]
    unlike = None
    if len(models) > 1:
        target, draft = models
        unlike = differing_token(target.vocabulary, draft.vocabulary, draft.reads)
        if unlike:  # the same text may have more tokens for it
            models[1] = replace(draft, caches=LONGER * draft.caches)
    report = Report(tuple(models), free_memory(), chosen_device.type == "cpu", unlike, heads=tuple(_heads_of(preset)))
    return _partly_on_disk(report, chosen_device) if report.on_cpu and report.needed > report.free else report


def _heads_of(preset: Preset) -> Iterator[HeadReport]:
    """The published heads. The preset can do without those that no person asked for."""
    for kind, head in preset.heads.items():
        if not isinstance(head, Path):
            try:
                yield report_on_head(head)
            except (BadInput, LoadError):
                if kind in preset.asked_heads:
                    raise


def _partly_on_disk(report: Report, device: torch.device) -> Report:
    """The report if the target's weights that memory has no room for stay on the disk."""
    if any(model.whole for model in report.models):
        return report
    try:
        on_disk = plan([model.part for model in report.models], device).on_disk
    except LoadError:
        return report
    target, *drafts = report.models
    return replace(report, models=(replace(target, engine="eager", exact=False), *drafts), on_disk=on_disk)


def _report_of(source: Source, lanes: int, preset: Preset, dtype: torch.dtype, device: torch.device) -> ModelReport:
    """What a source tells of its model without its weights, of which so many runs go on at the same time."""
    is_target = source is preset.target
    with wrap_load_errors(source):
        if (of_file := source.header()) is not None:
            header, facts = of_file
            check_header(str(source), header)
            check_tokenizer(str(source), header.fields)
            vocabulary: Mapping[str, int] = {
                token: index for index, token in enumerate(header.fields["tokenizer.ggml.tokens"])
            }
            facts = replace(facts, licence=facts.licence or header.fields.get("general.license"))
            config, numbers = _config(header), header.numbers
    if of_file is not None:
        if is_target:
            check_kept(source, dtype, _keeps_quantized(header))
        kept = _kept(header) if dtype == AS_STORED else None
    else:
        found = find_checkpoint(source, dtype, ignore)
        if is_target:
            check_kept(found.source, dtype, found.source.has_gguf)
            check_prompts(found, preset)
        facts, vocabulary, config = source.facts(found.revision), found.tokenizer.get_vocab(), found.config
        kept = stored_size(found) if dtype == AS_STORED else None
    engine, computed = engine_of(config, dtype, device), compute_dtype(dtype, device)
    skip_layers = (preset.skip_layers or 0) if is_target else 0
    part = ModelPart(str(source), config, computed if engine == "eager" else dtype, skip_layers)
    if of_file is None:
        numbers = part.numbers
    text = config.get_text_config()
    if engine != "eager" and device.type == "cpu" and text.tie_word_embeddings:
        numbers += text.vocab_size * text.hidden_size  # one for input rows, one laid out for the output
    row = part.keys_and_values * computed.itemsize + rotation_bytes(config, engine, computed)
    return ModelReport(
        name=str(source),
        download=facts.download,
        weights=numbers * bits(config, part.dtype) // 8 if kept is None else kept,
        caches=int((row * min(TOKENS, context_of(config)) + part.states) * (lanes + part.drafting)),
        engine=engine,
        exact=is_exact(engine, config, dtype, device),
        licence=facts.licence,
        gated=facts.gated,
        vocabulary=vocabulary,
        reads=embedding_rows(config),
        part=part,
        whole=of_file is not None,
    )


def _types(header: Header) -> dict[str, str]:
    """llama.cpp's names of the types of the tensors of a GGUF file."""
    return {tensor: GGMLQuantizationType(kind).name for tensor, kind in header.kinds.items()}


def _keeps_quantized(header: Header) -> bool:
    """Whether some weights of a GGUF file can be kept as stored."""
    return header.architecture not in WHOLE and not READERS.keys().isdisjoint(_types(header).values())


def _kept(header: Header) -> int:
    """Bytes of the weights of a GGUF file if they are kept as stored.

    Output rows are laid out for products. Rows of quantized input embeddings are read from the file one by one, and of
    others there is a copy.
    """
    types = _types(header)
    bits_of_each = {tensor: bits_kept(name) if name in READERS else 16 for tensor, name in types.items()}
    tied, copied = OUTPUT not in header.shapes, types.get(EMBEDDINGS) not in READERS
    copies = {EMBEDDINGS: tied + copied}
    return int(sum(copies.get(name, 1) * prod(header.shapes[name]) * size for name, size in bits_of_each.items()) // 8)


def _config(header: Header) -> PreTrainedConfig:
    """The configuration of a GGUF file, as far as a report needs it."""
    heads, hidden = int(header.of_model("attention.head_count")), int(header.of_model("embedding_length"))
    sizes: dict[str, Any] = {
        "vocab_size": len(header.fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(header.of_model("feed_forward_length")),
        "num_hidden_layers": int(header.of_model("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(header.of_model("attention.head_count_kv", heads)),
        "head_dim": int(header.of_model("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(header.of_model("context_length", TOKENS)),
        "tie_word_embeddings": OUTPUT not in header.shapes,
    }
    if experts := int(header.of_model("expert_count", 0)):
        sizes |= {"num_experts": experts, "num_experts_per_tok": int(header.of_model("expert_used_count", 1))}
        sizes["moe_intermediate_size"] = int(header.of_model("expert_feed_forward_length", sizes["intermediate_size"]))
    kind, two_factors = TYPES.get(header.architecture, header.architecture), LONG in header.shapes
    known = FAMILIES.get(kind, OTHER).layout == "llama"
    config: PreTrainedConfig = AutoConfig.for_model(kind, **sizes) if known else PreTrainedConfig(**sizes)
    if not known:
        config.model_type, config.rope_parameters = header.architecture, None
    if two_factors:
        config.rope_parameters = {"rope_type": "longrope"}  # the factors are not read yet
    return config


def save_preset(preset: Preset, name: str, folder: Path = PRESETS) -> Path:
    """Write models that were given by name to a preset file, for the menu and `--preset`."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise BadInput(f"A preset is named by letters, digits, dots and dashes, not {name!r}.")
    path = folder / f"{name}.toml"
    sources: dict[str, Source | None] = {"target": preset.target, "draft_model": preset.draft_model}
    sources |= {f"heads.{kind}": head for kind, head in preset.heads.items() if not isinstance(head, Path)}
    lines = [f"title = {_toml(preset.title)}", f"description = {_toml(preset.description)}"]
    for table, source in sources.items():
        if source is not None:
            lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in source.table().items())]
    lines += ["", "[defaults]", f"drafter = {_toml(preset.defaults.drafter)}"]
    lines += ["tree = true"] if preset.defaults.tree else []
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError as error:
        raise BadInput(f"There is a preset called {name} already: choose another name.") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {os.strerror(error.errno or 0)}.") from error
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(field)}' for key, field in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # a string or a number of JSON is one of TOML


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

"""Random models of well-known shapes, and pairs and heads of them with captured passes: what is measured where nothing
shall be downloaded, and what `tests/gpu` checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import ModuleList
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.initialization import no_init_weights

from specdemo.decoding.adaptive_k import DraftLengthController
from specdemo.decoding.batch import decode
from specdemo.decoding.costs import CostModel
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Event
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rule import Rule
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.heads.block import Block
from specdemo.drafters.heads.drafter import HeadDrafter
from specdemo.drafters.heads.eagle import Eagle
from specdemo.drafters.heads.ready import HeadSlots, ReadyHead
from specdemo.drafters.heads.shapes import HeadShape
from specdemo.engines.choose import ops_for
from specdemo.engines.families import head_width
from specdemo.engines.gpu.capture import Capture, capture_for
from specdemo.engines.gpu.graph import GraphRunner, Graphs
from specdemo.engines.layout import FusedModel
from specdemo.engines.named_weights import embeddings
from specdemo.engines.rows import MOST_ROWS
from specdemo.racing.race import rule_for
from specdemo.settings import AUTO, Settings
from specdemo.system.hardware import compute_dtype

WITH_HEADS: dict[str, type[HeadDrafter]] = {"eagle": Eagle, "block": Block}
DRAFT_VOCAB = 8192  # tokens, as many as the largest shipped head knows


def shape_of(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **other: Any) -> dict[str, Any]:
    """The fields of a configuration."""
    inner = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp}
    whole = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": True}
    return {**inner, **whole, **other}


SMALL = LlamaConfig(**shape_of(576, 30, 9, 3, 1536, 49152))  # SmolLM2-135M
SHAPES: dict[str, PreTrainedConfig] = {
    "SmolLM2-1.7B": LlamaConfig(**shape_of(2048, 24, 32, 32, 8192, 49152)),
    "Qwen3-0.6B": Qwen3Config(**shape_of(1024, 28, 16, 8, 3072, 151936, head_dim=128)),
    "Qwen3-4B": Qwen3Config(**shape_of(2560, 36, 32, 8, 9728, 151936, head_dim=128)),
    "Llama-8B": LlamaConfig(**shape_of(4096, 32, 32, 8, 14336, 128256, tie_word_embeddings=False)),
}


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, room: float) -> PreTrainedModel:
    """A model of this shape with at least one layer, and as many more as fit into `room` bytes."""
    with torch.device("meta"):
        one, two = (
            AutoModelForCausalLM.from_config(like(config, num_hidden_layers=layers), dtype=dtype) for layers in (1, 2)
        )
    first, second = (sum(weight.nbytes for weight in model.parameters()) for model in (one, two))
    layers = 1 + int(max(0.0, room - first) // (second - first))
    shape = like(config, num_hidden_layers=min(layers, config.num_hidden_layers))
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    noise = torch.empty(2**22, dtype=dtype, device=device).uniform_(-0.02, 0.02)
    with torch.no_grad():
        for weight in model.parameters():  # repeats a few random numbers: to draw billions would take minutes
            for part in weight.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])
    return model.eval()


def like(config: PreTrainedConfig, **other: Any) -> PreTrainedConfig:
    """A configuration with other sizes."""
    fields = {**config.to_dict(), **other}
    fields.pop("layer_types", None)  # one for each layer
    return type(config)(**fields)


def bytes_read(model: PreTrainedModel, context: int, tokens: int) -> int:
    """The bytes that a pass must read: every weight once, the embeddings of its tokens, and the keys and values.

    An embedding that is tied to the head is read as a whole, as the head.
    """
    embedding, wide = model.get_input_embeddings().weight, compute_dtype(model.dtype, model.device)
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(weight.numel() for weight in model.parameters()) - (0 if tied else embedding.numel())
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * head_width(config)  # of a token's keys and values
    return (weights + tokens * embedding.shape[1]) * model.dtype.itemsize + context * numbers * wide.itemsize


def captured(model: FusedModel, functions: ModuleType | None = None) -> Graphs:
    """The model's passes made of these functions, by default the fastest: captured on a GPU, called on a CPU."""
    device = model.embedding.device
    return Graphs(model, functions or ops_for(model.width, device), capture_for(device), 1)


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first layers of a model. The two share their weights."""
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(like(model.config, num_hidden_layers=layers), dtype=model.dtype)
    whole: Any = model
    part.model.embed_tokens, part.model.norm = whole.model.embed_tokens, whole.model.norm
    part.model.layers, part.model.rotary_emb = ModuleList(whole.model.layers[:layers]), whole.model.rotary_emb
    part.lm_head = whole.lm_head
    return part.eval()


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model of the same vocabulary, both captured."""

    target: PreTrainedModel
    graphs: Graphs
    draft_graphs: Graphs

    def drafter(self, capacity: int, rule: Rule) -> DraftModel:
        runner = GraphRunner(self.draft_graphs, capacity)
        return DraftModel(runner, self.target.config.get_text_config().vocab_size, rule)

    def events(
        self, prompt: Sequence[int], settings: Settings, drafter: Drafter | None = None, costs: CostModel | None = None
    ) -> Iterator[Event]:
        """A run with that drafter, by default the draft model."""
        capacity, rule = len(prompt) + settings.max_new_tokens + (MOST_ROWS if settings.tree else 0), rule_for(settings)
        runner, drafter = GraphRunner(self.graphs, capacity), drafter or self.drafter(capacity, rule)
        chooser = DraftLengthController(costs, settings.tree) if costs and settings.k == AUTO else None
        return decode(Decoding(runner, drafter, prompt, rule, costs=costs, chooser=chooser))


def random_head(kind: type[HeadDrafter], target: PreTrainedModel, capture: Capture | None = None) -> ReadyHead[Any]:
    """An untrained head with two layers of the target's shape. Its guesses fail, but they cost what a trained one's do.

    Args:
        capture: captures the head's passes, if given.
    """
    config = target.config.get_text_config()
    last, vocab = config.num_hidden_layers - 1, config.vocab_size
    layer = config.num_attention_heads, config.num_key_value_heads, head_width(config), 2 * config.hidden_size
    shape = HeadShape(vocab, config.hidden_size, (0, last // 2, last), min(vocab, DRAFT_VOCAB), 2, *layer, 1e-5)
    ready = ReadyHead(kind.network(shape), *embeddings(target.config, dict(target.named_parameters())))
    if capture:
        ready.slots = HeadSlots(ready, kind.passes, capture)
    return ready

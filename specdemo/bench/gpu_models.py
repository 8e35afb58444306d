"""Random models, pairs and heads with captured passes: what `bench gpu` measures and `tests/gpu` checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import ModuleList
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..decoding.costs import CostModel
from ..decoding.drafter import Drafter
from ..decoding.events import Event
from ..decoding.loop import decode, rule_for
from ..decoding.rule import Rule
from ..drafters.draft_model import DraftModel
from ..drafters.heads.block import Block
from ..drafters.heads.drafter import HeadDrafter
from ..drafters.heads.eagle import Eagle
from ..drafters.heads.ready import ReadyHead
from ..drafters.heads.shapes import HeadShape
from ..engines.choose import ops_for
from ..engines.gpu.graph import Capture, CudaCapture, GraphRunner, Graphs
from ..engines.layout import FusedModel, embeddings, head_width
from ..engines.rows import MOST_ROWS
from ..types import Settings

WITH_HEADS: dict[str, type[HeadDrafter]] = {"eagle": Eagle, "block": Block}
DRAFT_VOCAB = 8192  # tokens, as many as the largest shipped head knows


def captured(model: FusedModel, functions: ModuleType | None = None) -> Graphs:
    """The model's passes made of these functions, by default the fastest: captured on a GPU, called on a CPU.

    Unlike `choose.captured` it raises where the fastest functions fail.
    """
    return Graphs(model, functions or ops_for(model), capture_for(model.embedding.device), 1)


def capture_for(device: torch.device) -> Capture:
    """Captures on a GPU; on a CPU it returns the work as it is."""
    return CudaCapture(device) if device.type == "cuda" else lambda work: work


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first layers of a model. The two share their weights."""
    fields = {**model.config.to_dict(), "num_hidden_layers": layers}
    fields.pop("layer_types", None)
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(type(model.config)(**fields), dtype=model.dtype)
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
        drafter = drafter or self.drafter(capacity, rule)
        return decode(GraphRunner(self.graphs, capacity), drafter, prompt, rule, costs=costs)


def random_head(kind: type[HeadDrafter], target: PreTrainedModel, capture: Capture | None = None) -> ReadyHead[Any]:
    """An untrained head with two layers of the target's shape. Its guesses fail, but they cost what a trained one's do.

    Args:
        capture: captures the head's passes, if given.
    """
    config = target.config.get_text_config()
    last, vocab = config.num_hidden_layers - 1, config.vocab_size
    layer = config.num_attention_heads, config.num_key_value_heads, head_width(config), 2 * config.hidden_size
    shape = HeadShape(vocab, config.hidden_size, (0, last // 2, last), min(vocab, DRAFT_VOCAB), 2, *layer, 1e-5)
    ready = ReadyHead(kind.network(shape), *embeddings(dict(target.named_parameters())))
    if capture:
        ready.capture(kind.passes, capture)
    return ready

"""Tiny random transformers and heads, and all that a preset would load, of these or of tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

from specdemo.decoding.drafter import Drafter
from specdemo.decoding.parts import DrafterParts
from specdemo.decoding.rule import Rule
from specdemo.drafters.heads.medusa import MedusaHead, MedusaShape
from specdemo.drafters.heads.networks import BlockHead, EagleHead, Head
from specdemo.drafters.heads.peagle import PEagleHead
from specdemo.drafters.heads.ready import ReadyHead
from specdemo.drafters.heads.shapes import HeadShape
from specdemo.drafters.mtp import MtpHead
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.racing.race import rule_for
from specdemo.settings import Settings
from tests.harness.classes import EagerRunner
from tests.harness.doubles import accepting
from tools.train.data import ASSISTANT
from tools.train.ngram import build_table

from .doubles import (
    MODEL_VOCAB,
    PROMPT,
    SYMBOLS,
    VOCAB,
    TableRunner,
    Together,
    letters_tokenizer,
    random_table,
)
from .grammar import constraint_of

DRAFTER_NAMES = list(DRAFTERS)
TYPED: tuple[Sequence[Sequence[int]], ...] = (
    ([0, 1, 2, 0], [1, 2], [0, 1, 1], [2], [0, 1, 2, 0]),
    (),
    ([],),
    ([3, 0, 1], [1], [1, 0]),
)


def typed(context: Sequence[int]) -> Sequence[Sequence[int]]:
    """What people type after a text: what followed its last token before, and what a table says: one guess, several,
    none."""
    seen = [place for place, token in enumerate(context[:-1], start=1) if token == context[-1]]
    copied = [list(context[seen[-1] :][:4])] if seen and len(context) % 3 else []
    return [*copied, *TYPED[(len(context) + context[-1]) % len(TYPED)]]


def random_heads(
    embedding: Tensor, output: Tensor, layers: int, heads: int, draft_vocab: int, window: int = 512
) -> dict[str, ReadyHead[Any]]:
    """`untrained_heads` ready to draft for a target of these embeddings."""
    vocab, hidden = embedding.shape
    untrained = untrained_heads(vocab, hidden, layers, heads, draft_vocab, window)
    return {kind: ReadyHead(head, embedding, output) for kind, head in untrained.items()}


def untrained_heads(
    vocab: int, hidden: int, layers: int, heads: int, draft_vocab: int, window: int = 512
) -> dict[str, Head]:
    """An untrained head for every drafter that has one. Each leaves out some of the target's tokens, but that of
    DFlash 2 has them all."""
    state_layers = 0, layers // 2, layers - 1
    sizes = heads, 1, hidden // heads, 2 * hidden
    shape = HeadShape(vocab, hidden, state_layers, draft_vocab, 2, *sizes, 1e-5, window)
    medusa = MedusaShape(vocab, hidden, (layers - 1,), draft_vocab, 1e-5, places=5, mlp=2 * hidden, rank=8)
    masked = replace(shape, block_size=6, mask_token=0, normed_context=False, fused_norm=True, bigram_table=True)
    second = replace(masked, draft_vocab=vocab, rank=0, bigram_table=False, conv_taps=2, conv_group=hidden // 2)
    kinds: dict[str, tuple[type[Head], Any]] = {
        "eagle": (EagleHead, shape),
        "block": (BlockHead, shape),
        "medusa": (MedusaHead, medusa),
        "dspark": (BlockHead, replace(masked, from_anchor=True)),
        "dflash2": (BlockHead, replace(second, candidates=3, selector_rank=4)),
        "p-eagle": (PEagleHead, replace(shape, mask_token=0)),
    }
    made = {}
    for seed, (name, (kind, sizes_of_it)) in enumerate(kinds.items()):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = kind(sizes_of_it)
            for weight in head.parameters():
                nn.init.normal_(weight, std=0.5)
            head.token_ids.copy_(torch.randperm(vocab)[: len(head.token_ids)].sort().values)
        made[name] = head
    return made


def random_mtp(embedding: Tensor, output: Tensor, layers: int) -> MtpHead:
    """An untrained MTP layer, in float32, ready to draft for a target of these embeddings."""
    vocab, hidden = embedding.shape
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(**sizes, **heads, initializer_range=0.5, tie_word_embeddings=False)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(8)
        layer = MtpModel(Qwen3ForCausalLM(config), 1).eval()  # it draws all weights anew, embeddings included
    layer.embed_tokens = nn.Embedding.from_pretrained(embedding.float())
    layer.shared_head.weight = nn.Parameter(output.float(), requires_grad=False)
    return MtpHead(layer, nn.Identity(), layers)


# Everything a preset would load --------------------------------------------------------------------------------------


@dataclass
class Toy:
    """What `models.load` returns, as far as the core reads it. Every runner it hands out is kept in `runners`."""

    eos_ids: frozenset[int] = frozenset()
    weights: dict[str, Any] = field(default_factory=dict)
    context: int = 256
    token_bytes: Mapping[str, int] = field(default_factory=lambda: {"target": 0})
    ngram_table: Path | None = None
    skip_layers: int | None = 1
    heads: dict[str, ReadyHead[Any]] = field(default_factory=dict)
    mtp: MtpHead | None = None
    head_formats: dict[str, str] = field(default_factory=dict)
    translator: Any = None
    remembered: Sequence[Sequence[int]] = ()
    guesses: Any = typed
    engine: str = "eager"
    costs: dict[tuple[int, ...], Any] = field(default_factory=dict)
    tokenizer: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    runners: list[Any] = field(default_factory=list)
    draft_runners: list[Any] = field(default_factory=list)

    @property
    def parts(self) -> DrafterParts:
        return DrafterParts(
            make_draft_runner=None if getattr(self, "draft_model", None) is None else self.draft_runner,
            ngram_table=self.ngram_table,
            skip_layers=self.skip_layers,
            head_files={kind: Path(kind) for kind in self.heads},
            ready_heads=self.heads,
            open_mtp=DrafterParts.open_mtp if self.mtp is None else lambda: self.mtp,
            translator=self.translator,
            remembered=self.remembered,
            guesses=self.guesses,
        )

    def target_runner(self, capacity: int) -> Any:
        raise NotImplementedError

    def draft_runner(self, capacity: int) -> Any:
        raise NotImplementedError

    def drafter(self, name: str, runner: Any, settings: Settings, rule: Rule | None = None) -> Drafter:
        """A drafter by name, as a race builds it."""
        kind = drafter_class(name)
        reason = kind.needs(self.parts).missing
        assert reason is None, f"give the toys what the drafter {name} needs: {reason}"
        rule = rule or rule_for(settings)
        made = kind.build(self.parts, runner, rule)
        setattr(made, "shared_rule", rule)  # noqa: B010
        return made


@dataclass
class TableToy(Toy):
    """Target, draft model, first layers and n-gram table that know nothing of each other. With a translator the draft
    model has its tokens numbered as `Renumbering` says."""

    target: Tensor = field(default_factory=lambda: random_table(1, support=3))
    draft_model: Tensor = field(default_factory=lambda: random_table(2, support=3))
    early: Tensor = field(default_factory=lambda: random_table(3))
    together: Together | None = None  # what reads the passes of its target's runners
    draft_capacity: int | None = None  # of the draft model, if it has not the room that it asks for

    def __post_init__(self) -> None:
        vocab = self.target.shape[-1]
        self.tokenizer = self.tokenizer or letters_tokenizer(vocab)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            layers = nn.Embedding(vocab, vocab).double(), nn.Linear(vocab, vocab, bias=False).double()
        embedding, output = (layer.weight.detach() for layer in layers)
        self.heads = random_heads(embedding, output, layers=3, heads=2, draft_vocab=vocab - 1)
        self.mtp = random_mtp(embedding, output, 3)

    def environment(self) -> dict[str, Any]:
        return {"engine": "table", "exact_rows": TableRunner.exact_rows}

    def target_runner(self, capacity: int) -> TableRunner:
        self.runners.append(TableRunner(self.target, capacity, self.early))
        self.runners[-1].together = self.together
        return self.runners[-1]

    def draft_runner(self, capacity: int) -> TableRunner:
        table = self.draft_model if self.translator is None else self.draft_model.flip(0, 1, 2)
        self.draft_runners.append(TableRunner(table, self.draft_capacity or capacity))
        return self.draft_runners[-1]

    def constraint(self, grammar: str) -> Any:
        return constraint_of(grammar)


def alike_toy(folder: Path) -> TableToy:
    """A toy whose drafters say much of what its target says."""
    table = random_table(1, support=3)
    mixed = 0.6 * table + 0.4 * random_table(2, support=2)
    ngrams = ngram_file(folder, VOCAB)
    return TableToy(target=table, draft_model=mixed, early=mixed, ngram_table=ngrams)


def certain_toy(folder: Path) -> TableToy:
    """A toy whose first token is certain and goes on repeating the prompt, which keeps the tree of its runs small."""
    table = random_table(1, support=3)
    table[PROMPT[-2], PROMPT[-1]] = torch.tensor([0, 0, 1.0, 0])
    mixed = 0.5 * table + 0.5 * random_table(2, support=2)
    early, ngrams = random_table(3, support=2), ngram_file(folder, VOCAB)
    return TableToy(target=table, draft_model=mixed, early=early, ngram_table=ngrams)


@dataclass
class ModelToy(Toy):
    """Tiny random transformers."""

    model: PreTrainedModel | None = None
    draft_model: PreTrainedModel | None = None
    window: int = 512  # of its heads

    def __post_init__(self) -> None:
        assert self.model is not None
        self.tokenizer = self.tokenizer or letters_tokenizer(MODEL_VOCAB, SYMBOLS)
        layers = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding, output = (layer.weight.detach() for layer in layers)
        sizes = {"heads": 4, "draft_vocab": MODEL_VOCAB - 20, "window": self.window}
        self.heads = random_heads(embedding, output, self.model.config.num_hidden_layers, **sizes)
        self.mtp = random_mtp(embedding, output, self.model.config.num_hidden_layers)

    def target_runner(self, capacity: int) -> EagerRunner:
        assert self.model is not None
        self.runners.append(EagerRunner(self.model, capacity))
        return self.runners[-1]

    def draft_runner(self, capacity: int) -> EagerRunner:
        assert self.draft_model is not None
        self.draft_runners.append(EagerRunner(self.draft_model, capacity))
        return self.draft_runners[-1]


def drafter_for(toy: Toy, name: str, settings: Settings) -> Any:
    """A drafter by name, for a target that reads nothing."""
    return toy.drafter(name, toy.target_runner(toy.context), settings)


def head_after(toy: Any, name: str, text: Sequence[int], settings: Settings) -> Any:
    """A drafter with a head that has read a text, whose last token is pending."""
    runner = toy.target_runner(256)
    drafter = toy.drafter(name, runner, settings)
    runner.prefill(text[:-1])
    drafter.observe(accepting(0))
    return drafter


# Files ---------------------------------------------------------------------------------------------------------------


def ngram_file(folder: Path, vocab: int, seed: int = 5) -> Path:
    """A small n-gram table, counted by the real builder in random text with habits."""
    rng = np.random.default_rng(seed)
    habits = rng.dirichlet(np.full(vocab, 0.3), size=vocab).cumsum(-1)
    tokens = np.zeros((8, 96), dtype=np.int32)
    for column in range(1, tokens.shape[1]):
        draws = rng.random(len(tokens))
        tokens[:, column] = [
            min(vocab - 1, int(np.searchsorted(habits[last], draw)))
            for last, draw in zip(tokens[:, column - 1], draws, strict=True)
        ]
    write_shard(folder, tokens, vocab_size=vocab)
    build_table([folder], folder / "toy.safetensors", {"made": "for tests"})
    return folder / "toy.safetensors"


def write_shard(
    folder: Path, tokens: Any, roles: Any = ASSISTANT, starts: Any = (0,), name: str = "train-00000", **facts: Any
) -> None:
    """A shard of text, [rows, columns] of tokens; `starts` are the columns where conversations begin."""
    tokens = np.array(tokens, dtype=np.int32)
    begins = np.zeros(tokens.shape, dtype=bool)
    begins[:, [*starts]] = True
    block = {"tokens": tokens, "roles": np.broadcast_to(np.uint8(roles), tokens.shape).copy(), "starts": begins}
    folder.mkdir(exist_ok=True)
    save_file(block, folder / f"{name}.safetensors", metadata={"provenance": json.dumps(facts)})

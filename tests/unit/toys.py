"""Stand-ins small enough to reason about: language models given by a table, tiny random transformers, tokenizers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

from specdemo.decoding import batch
from specdemo.decoding.costs import CostModel
from specdemo.decoding.drafter import Drafter, DrafterParts
from specdemo.decoding.events import Event, Round, emitted_tokens
from specdemo.decoding.loop import Decoding, rule_for
from specdemo.decoding.rule import Rule
from specdemo.drafters.heads.drafter import HeadDrafter
from specdemo.drafters.heads.medusa import MedusaHead, MedusaShape
from specdemo.drafters.heads.networks import BlockHead, EagleHead, Head
from specdemo.drafters.heads.peagle import PEagleHead
from specdemo.drafters.heads.ready import ReadyHead
from specdemo.drafters.heads.shapes import HeadShape
from specdemo.drafters.mtp import MtpHead
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.drafters.none import NoDrafter
from specdemo.engines import linear, ops
from specdemo.engines.cpu.library import library_for
from specdemo.engines.eager import EagerRunner
from specdemo.engines.fused import FusedRunner
from specdemo.engines.gpu.capture import Work
from specdemo.engines.gpu.graph import GraphRunner, Graphs
from specdemo.engines.layout import FusedModel
from specdemo.engines.native import NativeRunner, native_model
from specdemo.engines.runner import ANY_ROWS
from specdemo.models.loaded import Loaded
from specdemo.racing.race import start
from specdemo.studies.statistics import chi_square
from specdemo.types import Draft, DraftOutcome, Settings, Verdict
from tools.train.data import ASSISTANT
from tools.train.ngram import build_table

VOCAB = 4  # tokens of a table model
MODEL_VOCAB = 61  # tokens of a tiny transformer
DRAFTER_NAMES = list(DRAFTERS)


# Table models ----------------------------------------------------------------------------------------------


PROMPT = (0, 1, 2, 0, 1)  # repeats itself, so that prompt lookup has something to propose


def random_table(seed: int, vocab: int = VOCAB, support: int = VOCAB) -> Tensor:
    """The probabilities of the token after each pair of tokens, [V, V, V] float64; `support` of a row are above 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab, vocab, vocab, generator=generator, dtype=torch.float64) + 0.05
    order = torch.rand(vocab, vocab, vocab, generator=generator).argsort(-1)
    weights[order >= support] = 0
    return weights / weights.sum(-1, keepdim=True)


class TableRunner:
    """A Runner whose logits are the logarithms of an explicit table, in float64.

    Its cache is the list of tokens it has read, and the logits are looked up in that cache, never in the
    arguments alone: a missing, stale or doubled entry gives the logits of another text. The state of a token in any
    layer is its one-hot vector. `passes` keeps where every pass began and what it read. The logits of its
    `first_layers` are those of the table `early`.
    """

    exact_rows = exact_tree_rows = ANY_ROWS
    cannot_branch: str | None = None

    def __init__(self, table: Tensor, capacity: int = 256, early: Tensor | None = None) -> None:
        self.table, self.context, self.early = table, capacity, early
        self.vocab_size = table.shape[-1]
        self.device = torch.device("cpu")
        self.tokens: list[int] = []
        self.passes: list[tuple[int, tuple[int, ...]]] = []
        self.kept_layers = 0
        self.hidden_states: Tensor | None = None
        self.released = 0
        self.begin = 0  # of the last pass
        self.parents: list[int] = []  # of its rows

    @property
    def length(self) -> int:
        return len(self.tokens)

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        self.kept_layers = len(layers)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        assert not self.tokens, "a prompt is read into an empty cache"
        return self.read(ids)[-1:]

    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        begin = self.length
        logits = self.read(ids)
        if parents is None:
            return logits
        self.parents = list(parents)
        assert len(parents) == len(ids)
        texts: list[list[int]] = []
        for token, parent in zip(self.tokens[begin:], parents, strict=True):
            assert -1 <= parent < len(texts)
            texts.append([*(self.tokens[:begin] if parent < 0 else texts[parent]), token])
        return torch.cat([self.looked_up(self.table, text, len(text) - 1) for text in texts])

    def keep(self, path: Sequence[int]) -> None:
        assert [self.parents[row] for row in path] == [-1, *path][: len(path)], "one row follows the other"
        self.tokens[self.begin :] = [self.tokens[self.begin + row] for row in path]
        if self.hidden_states is not None:
            self.hidden_states = self.hidden_states[list(path)]

    def read(self, ids: Sequence[int] | Tensor) -> Tensor:
        ids = [int(token) for token in ids]
        assert ids, "a pass reads at least one token"
        assert self.length + len(ids) <= self.context, "the cache is full"
        self.passes.append((self.length, tuple(ids)))
        begin = self.begin = self.length
        self.parents = list(range(-1, len(ids) - 1))
        self.tokens += ids
        one_hot = F.one_hot(torch.tensor(ids), self.vocab_size).to(self.table.dtype)
        self.hidden_states = one_hot.repeat(1, self.kept_layers) if self.kept_layers else None
        return self.looked_up(self.table, self.tokens, begin)

    def first_layers(self, count: int, capacity: int) -> TableRunner:
        assert count >= 1
        assert self.early is not None
        return TableRunner(self.early, capacity)

    def looked_up(self, table: Tensor, text: Sequence[int], begin: int) -> Tensor:
        """The logits after each token of a text from its place `begin` on."""
        pairs = [(text[place - 1] if place else 0, text[place]) for place in range(begin, len(text))]
        return torch.stack([table[pair] for pair in pairs]).log()

    def rollback(self, length: int) -> None:
        assert length >= 0
        chain = self.parents == list(range(-1, len(self.parents) - 1))
        assert chain or not self.begin < length < self.length, "a tree has no length to go back to"
        del self.tokens[length:]

    def release(self) -> None:
        self.tokens.clear()
        self.hidden_states = None
        self.released += 1


def counting_table(vocab: int) -> Tensor:
    """The next token is always one more than the last, [V, V, V] float64."""
    return torch.eye(vocab, dtype=torch.float64).roll(-1, 0).expand(vocab, vocab, vocab)


def texts_read(passes: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """For every token that was read in some passes, the text up to and including it."""
    texts: list[tuple[int, ...]] = []
    text: list[int] = []
    for begin, ids in passes:
        del text[begin:]
        for token in ids:
            text.append(token)
            texts.append(tuple(text))
    return texts


def true_texts(table: Tensor, prompt: Sequence[int], length: int, settings: Settings, eos: int = -1) -> dict:
    """The probability of every text of `length` tokens (fewer after `eos`) under the target alone.

    Temperature, top-k and top-p are written out again here, in plain Python, as the reference.
    """
    texts: dict[tuple[int, ...], float] = {}

    def walk(text: tuple[int, ...], weight: float) -> None:
        if len(text) == length or (text and text[-1] == eos):
            texts[text] = weight
            return
        row = table[tuple((*prompt, *text)[-2:])].tolist()
        for token, p in enumerate(warped(row, settings)):
            if p:
                walk((*text, token), weight * p)

    walk((), 1.0)
    return texts


def warped(row: Sequence[float], settings: Settings) -> list[float]:
    """Temperature, top-k and top-p on a list of probabilities without ties."""
    if settings.temperature == 0:
        return [float(p == max(row)) for p in row]
    heated = normalised([p ** (1 / settings.temperature) for p in row])
    ranked = sorted(range(len(row)), key=lambda token: -heated[token])
    if settings.top_k:
        ranked = ranked[: settings.top_k]
    heated = normalised([p if token in ranked else 0.0 for token, p in enumerate(heated)])
    kept, total = [], 0.0
    for token in ranked:
        if total >= settings.top_p:
            break
        kept.append(token)
        total += heated[token]
    return normalised([p if token in kept else 0.0 for token, p in enumerate(heated)])


def normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


# Drafters --------------------------------------------------------------------------------------------------


class Scripted(Drafter):
    """Proposes what a function of (context, k) says, and keeps what it was told."""

    name = "scripted"

    def __init__(self, script: Any) -> None:
        self.script = script
        self.verdicts: list[Verdict] = []
        self.released = 0

    def propose(self, context: Sequence[int], k: int) -> Draft:
        draft = self.script(list(context), k)
        return draft if isinstance(draft, Draft) else Draft(list(draft))

    def observe(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def release(self) -> None:
        self.released += 1


def oracle(text: Sequence[int], wrong_by: int = 0, vocab: int = MODEL_VOCAB) -> Scripted:
    """Proposes what `text` (prompt included) holds next, every token moved by `wrong_by`."""
    return Scripted(lambda context, k: [(t + wrong_by) % vocab for t in text[len(context) : len(context) + k]])


def decode(runner: Any, drafter: Drafter, prompt: Sequence[int], settings: Settings, *args: Any, **more: Any) -> Any:
    """`batch.decode` by the rule of the settings, which is the one that `Toy.drafter` gave to the drafter."""
    rule = more.pop("rule", None) or getattr(drafter, "shared_rule", None) or rule_for(settings)
    return batch.decode(Decoding(runner, drafter, prompt, rule, *args, **more))


def plain_text(
    runner: Any, prompt: Sequence[int], settings: Settings, eos_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What the target writes alone."""
    return ids_of(list(decode(runner, NoDrafter(), prompt, replace(settings, k=0, tree=False), eos_ids)))


def copying(text: Sequence[int], vocab_size: int) -> Scripted:
    """Drafts what `text` holds next; in every third place the last token of the draft is wrong."""

    def draft(context: Sequence[int], k: int) -> list[int]:
        ids = list(text[len(context) : len(context) + k])
        if ids and len(context) % 3 == 0:
            ids[-1] = (ids[-1] + 1) % vocab_size
        return ids

    return Scripted(draft)


def texts_drafted_and_not(loaded: Loaded, prompt: Sequence[int], count: int) -> list[tuple[Settings, list[int]]]:
    """What a target writes at temperatures 0 and 0.8, with the settings. It is checked that drafts change no token."""
    became, texts = set(), []
    for temperature in (0.0, 0.8):
        settings = Settings(k=4, temperature=temperature, seed=3, max_new_tokens=count)
        alone = ids_of(list(start(loaded, "none", prompt, settings)))
        assert len(set(alone)) >= 5, "a text that says too little"
        runner = loaded.target_runner(len(prompt) + count)
        events = list(decode(runner, copying([*prompt, *alone], runner.vocab_size), prompt, settings, loaded.eos_ids))
        assert ids_of(events) == alone
        became |= {token.outcome for event in rounds_of(events) for token in event.drafted}
        texts.append((settings, alone))
    assert {DraftOutcome.ACCEPTED, DraftOutcome.REJECTED} <= became
    return texts


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy text of transformers' `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


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


# Everything a preset would load ------------------------------------------------------------------------------


@dataclass
class Toy:
    """What `models.load` returns, as far as the core reads it. Every runner it hands out is kept in `runners`."""

    eos_ids: frozenset[int] = frozenset()
    context: int = 256
    token_bytes: Mapping[str, int] = field(default_factory=lambda: {"target": 0})
    ngram_table: Path | None = None
    skip_layers: int | None = 1
    heads: dict[str, ReadyHead[Any]] = field(default_factory=dict)
    mtp: MtpHead | None = None
    head_formats: dict[str, str] = field(default_factory=dict)
    engine: str = "eager"
    costs: dict[tuple[int, ...], CostModel] = field(default_factory=dict)
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
        )

    def draft_runner(self, capacity: int) -> Any:
        raise NotImplementedError

    def drafter(self, name: str, runner: Any, settings: Settings, rule: Rule | None = None) -> Drafter:
        """A drafter by name, as a race builds it."""
        kind = drafter_class(name)
        reason = kind.unavailable_reason(self.parts)
        assert reason is None, f"give the toys what the drafter {name} needs: {reason}"
        rule = rule or rule_for(settings)
        made = kind.build(self.parts, runner, rule)
        setattr(made, "shared_rule", rule)  # noqa: B010
        return made


@dataclass
class TableToy(Toy):
    """Target, draft model, first layers and n-gram table that know nothing of each other."""

    target: Tensor = field(default_factory=lambda: random_table(1, support=3))
    draft_model: Tensor = field(default_factory=lambda: random_table(2, support=3))
    early: Tensor = field(default_factory=lambda: random_table(3))

    def __post_init__(self) -> None:
        vocab = self.target.shape[-1]
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
        return self.runners[-1]

    def draft_runner(self, capacity: int) -> TableRunner:
        self.draft_runners.append(TableRunner(self.draft_model, capacity))
        return self.draft_runners[-1]


def alike_toy(folder: Path) -> TableToy:
    """A toy whose drafters say much of what its target says."""
    table = random_table(1, support=3)
    mixed = 0.6 * table + 0.4 * random_table(2, support=2)
    ngrams = ngram_file(folder, VOCAB)
    return TableToy(target=table, draft_model=mixed, early=mixed, ngram_table=ngrams, tokenizer=letters_tokenizer())


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


def head_after(toy: Any, name: str, text: Sequence[int], settings: Settings) -> HeadDrafter:
    """A drafter with a head that has read a text, whose last token is pending."""
    runner = toy.target_runner(256)
    drafter = toy.drafter(name, runner, settings)
    assert isinstance(drafter, HeadDrafter)
    runner.prefill(text[:-1])
    drafter.reset(text[:-1])
    return drafter


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens on the path to each node of a tree."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents or (), strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), int(token)))
    return paths


ARCHITECTURES = ("llama", "qwen3", "gpt2")


@cache
def tiny_model(architecture: str, seed: int = 0, layers: int = 3) -> PreTrainedModel:
    """A random transformer in float32, so sure of each token that rounding does not change its greedy text."""
    shape = {"vocab_size": MODEL_VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    wide = {"initializer_range": 0.25, "num_hidden_layers": layers, "max_position_embeddings": 256}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if architecture == "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape, **sizes, **wide))
        elif architecture == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, **sizes, **wide, head_dim=8))
        elif architecture == "smollm3":  # its second layer does not rotate
            model = SmolLM3ForCausalLM(SmolLM3Config(**shape, **sizes, **wide, no_rope_layer_interval=2))
        else:
            heads = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 256, "initializer_range": 0.25}
            model = GPT2LMHeadModel(GPT2Config(**shape, **heads))
    return model.eval()


def model_with_biases(architecture: str) -> PreTrainedModel:
    """A tiny transformer with biases wherever it can have some, and these and the weights of its norms at random."""
    config = copy.deepcopy(tiny_model(architecture).config)
    config.attention_bias = config.mlp_bias = True  # Llama has none by default
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        small = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        assert len(small) > 4 * config.num_hidden_layers
        for parameter in small:
            nn.init.normal_(parameter)
    return model


def recorded(work: Work) -> Work:
    """In place of a capture: every replay leaves its outcome where the first one lay."""
    kept = work()

    def replay() -> Any:
        for old, new in zip(*map(torch.utils._pytree.tree_leaves, (kept, work())), strict=True):
            if old is not None:
                old.copy_(new)
        return kept

    return replay


def cpu_engine(dtype: torch.dtype) -> str:
    """What runs a known model with weights of this type on this machine's CPU."""
    return "native" if library_for(dtype) else "fused"


def native_runner(model: PreTrainedModel, capacity: int, dtype: torch.dtype | None = None) -> NativeRunner:
    """A runner by the library of `native.c`; skips the test where that cannot be had."""
    native = native_model(FusedModel.of(model, dtype))
    if native is None:
        pytest.skip("no gcc, or a CPU that the library is not for")
    return NativeRunner(native, capacity)


ENGINES = ("eager", "fused", "native", "graph")


def makes_runners(engine: str, model: PreTrainedModel) -> Callable[[int], Any]:
    """What makes the runners of an engine for a model. The passes of "graph" are `recorded`, of torch's operations."""
    if engine == "eager":
        return partial(EagerRunner, model)
    if engine == "native":
        return partial(NativeRunner, native_runner(model, 8).together)
    with pytest.MonkeyPatch.context() as patch:  # as on a machine without gcc
        patch.setattr(linear, "library_for", lambda dtype: None)
        fused = FusedModel.of(model)
    if engine == "fused":
        return partial(FusedRunner, fused)
    return partial(GraphRunner, Graphs(fused, ops, recorded, 1))


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


# Tokenizers ------------------------------------------------------------------------------------------------


LETTERS = "abcdefghijklmnopqrstuvwxyz "


def letters_tokenizer(vocab: int = VOCAB, letters: str = LETTERS) -> PreTrainedTokenizerFast:
    """Token i is the i-th letter; texts are the letters in a row."""
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters[:vocab])}, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


SPECIAL = "<|end|>"


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, a few pairs are merged, and there is one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL)


@lru_cache(maxsize=1)
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """In Llama's manner: a few words that carry their leading space, and a token for each byte of all the rest."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("▁h", "i")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


# Events ----------------------------------------------------------------------------------------------------


def ids_of(events: Iterable[Event]) -> list[int]:
    """The emitted token ids."""
    return [token.id for event in events for token in emitted_tokens(event)]


def p_value(found: Mapping[tuple[int, ...], int], true: Mapping[tuple[int, ...], float]) -> float:
    """Of sampled texts, against the probabilities of all, by a chi-square test."""
    assert found.keys() <= true.keys(), "a text was written that cannot be"
    tested = chi_square(np.array([found.get(text, 0) for text in true]), np.array([*true.values()]))
    assert tested is not None
    return tested


def rounds_of(events: Iterable[Event]) -> list[Round]:
    return [event for event in events if isinstance(event, Round)]

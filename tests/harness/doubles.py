"""Doubles small enough to reason about: models given by a table, scripted drafters, tokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
)

from specdemo.decoding import batch, loop
from specdemo.decoding.acceptance import Answer
from specdemo.decoding.drafter import CHAIN, Drafter, DraftOptions, drafted
from specdemo.decoding.events import Event, Round, emitted_tokens
from specdemo.drafters.names import DRAFTERS
from specdemo.engines.passes import alone
from specdemo.engines.runner import ANY_ROWS, Pass, Runner
from specdemo.settings import MAX_NODES
from specdemo.system import device
from specdemo.tokens import Draft, DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.classes import CostModel

VOCAB = 4  # tokens of a table model
MODEL_VOCAB = 61  # tokens of a tiny transformer

PROMPT = (0, 1, 2, 0, 1)  # repeats itself, so that prompt lookup has something to propose


def random_table(seed: int, vocab: int = VOCAB, support: int = VOCAB) -> Tensor:
    """The probabilities of the token after each pair of tokens, [V, V, V] float64; `support` of a row are above 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocab, vocab, vocab, generator=generator, dtype=torch.float64) + 0.05
    order = torch.rand(vocab, vocab, vocab, generator=generator).argsort(-1)
    weights[order >= support] = 0
    return weights / weights.sum(-1, keepdim=True)


class TableRunner(Runner):
    """A runner whose logits are the logarithms of an explicit table, in float64.

    Its cache is the list of tokens it has read, and the logits are looked up in that cache, never in the
    arguments alone: a missing, stale or doubled entry gives the logits of another text. The state of a token in any
    layer is its one-hot vector. `passes` keeps where every pass began and what it read. The logits of its
    `first_layers` are those of the table `early`.
    """

    exact_rows = exact_tree_rows = ANY_ROWS

    def __init__(self, table: Tensor, capacity: int = 256, early: Tensor | None = None) -> None:
        super().__init__(capacity)
        self.table, self.early = table, early
        self.vocab_size = table.shape[-1]
        self.device = torch.device("cpu")
        self.tokens: list[int] = []
        self.passes: list[tuple[int, tuple[int, ...]]] = []
        self.released = 0
        self.begin = 0  # of the last pass
        self.parents: list[int] = []  # of its rows

    @property
    def length(self) -> int:
        return len(self.tokens)

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
        self.hidden_states = one_hot.repeat(1, len(self.captured_layers)) if self.captured_layers else None
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


@dataclass
class Together:
    """Reads the passes of table runners one after the other, and counts them."""

    sizes: list[int] = field(default_factory=list)

    def read(self, passes: Sequence[Pass]) -> list[Tensor]:
        self.sizes.append(len(passes))
        return [each.runner.forward(each.ids, each.parents) for each in passes]


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


# Drafters ------------------------------------------------------------------------------------------------------------


def answering(draft: Draft, accepted: int, last: Token, target_ids: Sequence[int] = ()) -> Answer:
    """The first `accepted` guesses passed, and this token follows them."""
    outcomes = [DraftOutcome.ACCEPTED] * accepted + [DraftOutcome.REJECTED] * (len(draft.token_ids) - accepted)
    parents = draft.parents if draft.tree else [None] * len(outcomes)
    rows = zip(draft.token_ids, outcomes, parents, strict=True)
    guesses = tuple(DraftedToken(int(token), outcome, parent=parent) for token, outcome, parent in rows)
    tokens = [Token(guess.id, TokenKind.ACCEPTED) for guess in guesses[:accepted]]
    return Answer(guesses, (*tokens, last), target_ids)


def accepting(count: int, last: int = 0) -> Answer:
    """A chain of `count` guesses passed, and this token follows them."""
    return answering(Draft([0] * count), count, Token(last, TokenKind.BONUS))


def proposed(drafter: Drafter, context: Sequence[int], k: int, **options: Any) -> Draft:
    """The draft of a drafter whose passes are read by themselves; for `options` see `DraftOptions`."""
    return alone(drafted(drafter.propose(context, k, DraftOptions(**options))))


class Scripted(Drafter):
    """Proposes what a function of (context, k) says, and keeps what it was told."""

    name = "scripted"

    def __init__(self, script: Any) -> None:
        self.script = script
        self.answers: list[Answer] = []
        self.released = 0

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        draft = self.script(list(context), k)
        return draft if isinstance(draft, Draft) else Draft(list(draft))

    def observe(self, answer: Answer) -> None:
        self.answers.append(answer)

    def release(self) -> None:
        self.released += 1


def oracle(text: Sequence[int], wrong_by: int = 0, vocab: int = MODEL_VOCAB) -> Scripted:
    """Proposes what `text` (prompt included) holds next, every token moved by `wrong_by`."""
    return Scripted(lambda context, k: [(t + wrong_by) % vocab for t in text[len(context) : len(context) + k]])


def copying(text: Sequence[int], vocab_size: int) -> Scripted:
    """Drafts what `text` holds next; in every third place the last token of the draft is wrong."""

    def draft(context: Sequence[int], k: int) -> list[int]:
        ids = list(text[len(context) : len(context) + k])
        if ids and len(context) % 3 == 0:
            ids[-1] = (ids[-1] + 1) % vocab_size
        return ids

    return Scripted(draft)


Shape = tuple[list[int], list[int]]  # the tokens of a tree and their parents


def full(vocab: int, rows: int) -> Shape:
    """Every token after every token, as far as there is room."""
    return [node % vocab for node in range(rows)], [node // vocab - 1 for node in range(rows)]


class Planting(Scripted):
    """Proposes the tree that a function of (context, nodes) says."""

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        token_ids, parents = self.script(list(context), k)
        return Draft(token_ids, parents=parents, tree=True)


def random_tree(context: Sequence[int], nodes: int, vocab: int = VOCAB) -> Shape:
    """Another tree for every text; siblings may be the same token, and parents are near the root and far from it."""
    choose = random.Random(str((list(context), nodes)))
    parents = [choose.randrange(-1, node) if choose.random() < 0.5 else node - 1 for node in range(nodes)]
    return [choose.randrange(vocab) for _ in range(nodes)], parents


HOSTILE_TREES: dict[str, Callable[[list[int], int], Shape]] = {
    "one token": lambda context, nodes: ([context[-1]], [-1]),
    "two of the same": lambda context, nodes: ([1, 1, 2, 3, 2], [-1, -1, 0, 1, 1]),
    "all first tokens": lambda context, nodes: ([*range(VOCAB)], [-1] * VOCAB),
    "a chain": lambda context, nodes: ([0, 1, 2, 0, 1], [-1, 0, 1, 2, 3]),
    "a chain with stumps": lambda context, nodes: ([3, 0, 2, 1, 1, 2], [-1, -1, 1, 1, 3, 3]),
    "every text of two": lambda context, nodes: full(VOCAB, VOCAB + VOCAB**2),
    "the most": lambda context, nodes: full(VOCAB, MAX_NODES),
    "any": random_tree,
}


class Doubtful(Scripted):
    """Whose probability of a token is no number."""

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        return replace(super().propose(context, k), q=torch.full((k,), torch.nan))


class Renumbering:
    """Translates by numbers, for a draft model whose token i is the target's token `VOCAB - 1 - i`."""

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        return [VOCAB - 1 - index for index in token_ids]

    def to_target(self, token_ids: Sequence[int], read: Sequence[int], drafted: Sequence[int]) -> list[int]:
        return [VOCAB - 1 - index for index in drafted]


HOSTILE: dict[str, Callable[[list[int], int], Sequence[int]]] = {
    "impossible": lambda context, k: [int(random_table(1, support=3)[context[-2], context[-1]].argmin())] * k,
    "empty": lambda context, k: [],
    "shorter than K": lambda context, k: [context[0]] * (k - 1),
    "now and then": lambda context, k: [1] * (k * (len(context) % 2)),
    "always token 0": lambda context, k: [0] * k,
    "always the last token of the vocabulary": lambda context, k: [VOCAB - 1] * k,
}


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens on the path to each node of a tree."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents or (), strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), int(token)))
    return paths


# Tokenizers ----------------------------------------------------------------------------------------------------------


LETTERS = "abcdefghijklmnopqrstuvwxyz "
SYMBOLS = "".join(map(chr, range(256, 256 + MODEL_VOCAB)))  # one for each token of a tiny transformer


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


# Events --------------------------------------------------------------------------------------------------------------


def ids_of(events: Iterable[Event]) -> list[int]:
    """The emitted token ids."""
    return [token.id for event in events for token in emitted_tokens(event)]


def rounds_of(events: Iterable[Event]) -> list[Round]:
    return [event for event in events if isinstance(event, Round)]


# The clock ---------------------------------------------------------------------------------------------------------


class Clock:
    """Says that passes and drafts took these seconds, one after another."""

    def __init__(self, seed: int) -> None:
        self._random, self._now = random.Random(seed), 0.0

    def perf_counter(self) -> float:
        self._now += self._random.choice((0.01, 0.5, 1.0, 3.0))
        return self._now


def set_clock(patch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    """By which rounds are timed: one for each module that looks at it."""
    for module in (batch, loop, device):
        patch.setattr(module, "time", make())


def draft_in_turn(patch: pytest.MonkeyPatch) -> None:
    """Drafts ahead are prepared before the target verifies: a pass of these targets takes no time."""
    patch.setattr("specdemo.drafters.ahead.DraftingAhead.in_turn", True)


def costs_with(passes: Mapping[int, float]) -> CostModel:
    """That know the seconds of passes, by their tokens."""
    return CostModel(dict(passes))


class KnownCosts(dict[Any, Any]):
    """In place of the costs of a loaded preset: the same for every kind of run, so that nothing is measured. A token of
    a chain costs a share of a pass, if one is given."""

    def __init__(self, passes: Mapping[int, float], drafter: str, share: float = 0.0) -> None:
        super().__init__()
        self.costs = costs = costs_with(passes)
        costs.tried |= {(drafter, tree) for tree in (False, True)}
        for source in (*DRAFTERS, "forced") * 2 if share else ():
            costs.drafts[source, False].learn_cost(1, share)

    def __contains__(self, kind: object) -> bool:
        return True

    def get(self, kind: object, otherwise: Any = None) -> CostModel:
        return self.costs

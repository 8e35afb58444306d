"""N-gram: a smoothed table of which token follows the last few, with back-off (Jelinek & Mercer 1980)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Needs, Proposal
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.rows import WIDTH
from ..engines.runner import Runner
from ..errors import BadInput
from ..formats import reason
from ..tokens import Draft
from .chain import NextLogits, draw_chain
from .tree import Child, grow

PROB_SCALE = 255 * 256  # probabilities are stored as uint16 fractions of this; rows sum to less than 1


@dataclass(frozen=True, slots=True)
class Order:
    """What follows each known context of n tokens: a sparse matrix in CSR form, its rows sorted by key."""

    keys: np.ndarray  # [contexts] int64, see `key_of`
    offsets: np.ndarray  # [contexts + 1] int64: row i is tokens[offsets[i]:offsets[i + 1]]
    tokens: np.ndarray  # [entries] int64
    probs: np.ndarray  # [entries] float32; a row sums to less than 1, the rest belongs to the order below


@dataclass(frozen=True, slots=True)
class NgramTable:
    """P(next token | last few tokens), interpolated: each order leaves its unspent mass to the one below."""

    unigram: np.ndarray  # [V] float32, the floor, positive everywhere
    orders: tuple[Order, ...]  # of contexts of 1, 2, ... tokens: bigrams, trigrams, and so on
    provenance: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)

    def next_token_probs(self, context: Sequence[int]) -> np.ndarray:
        """The distribution of the token after `context`, [V] float32, summing to 1."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for n, order in enumerate(self.orders, start=1):
            if n > len(context):
                break
            key = key_of(context[-n:], self.vocab_size)
            index = int(np.searchsorted(order.keys, key))
            if index == len(order.keys) or order.keys[index] != key:
                break  # a longer context that ends in an unknown one is unknown too
            row = slice(order.offsets[index], order.offsets[index + 1])
            found.append((order.tokens[row], order.probs[row]))
        left = np.float32(1)  # the mass that longer contexts left
        parts = []
        for tokens, probs in reversed(found):
            parts.append((tokens, left * probs))
            left *= 1 - probs.sum()
        mixed: np.ndarray = self.unigram * left  # the only operation on the whole vocabulary
        for tokens, part in parts:
            mixed[tokens] += part
        return mixed


def key_of(context: Sequence[int], vocab_size: int) -> int:
    """The tokens of a context as the digits of one number in base V."""
    key = 0
    for token in context:
        key = key * vocab_size + int(token)
    return key


@lru_cache(maxsize=4)
def load_table(path: Path) -> NgramTable:
    """Read a table written by `tools.train.ngram`."""
    try:
        with safe_open(path, framework="numpy") as file:
            provenance = json.loads(file.metadata()["provenance"])
            names = set(file.keys())
            unigram = file.get_tensor("unigram").astype(np.float32)
            orders: list[Order] = []
            while f"keys{len(orders) + 1}" in names:
                n = len(orders) + 1
                lengths = file.get_tensor(f"lengths{n}").astype(np.int64)
                orders.append(
                    Order(
                        # Stored as differences: between neighbouring keys, and the lengths of the rows.
                        keys=np.cumsum(file.get_tensor(f"keys{n}").astype(np.int64)),
                        offsets=np.concatenate([[0], np.cumsum(lengths)]),
                        tokens=file.get_tensor(f"tokens{n}").astype(np.int64),
                        probs=file.get_tensor(f"probs{n}").astype(np.float32) / PROB_SCALE,
                    )
                )
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"The n-gram table {path.name} cannot be read: {reason(error)}.") from error
    except SafetensorError as error:
        raise BadInput(f"The n-gram table {path.name} is damaged: {reason(error)}.") from error
    return NgramTable(unigram / unigram.sum(), tuple(orders), provenance)


class Ngram(Drafter):
    """Draws each token from the table, given the last few."""

    name = "ngram"

    def __init__(self, table: NgramTable, rule: Rule) -> None:
        self.table, self.rule = table, rule

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return Needs(None if parts.ngram_table is not None else "this preset ships no n-gram table")

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Ngram:
        assert parts.ngram_table is not None
        table = load_table(parts.ngram_table)
        if table.vocab_size != runner.vocab_size:
            raise BadInput(
                f"The n-gram table knows {table.vocab_size} tokens but the target has {runner.vocab_size}: "
                "it was built for another vocabulary."
            )
        return cls(table, rule)

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Proposal:
        stop = options.stop_below
        if options.depth is not None:
            return self._tree(context, k, options.depth, stop)
        return draw_chain(self._next_logits(context), k, self.rule, len(context), stop_below=stop)

    def _tree(self, context: Sequence[int], nodes: int, depth: int, stop_below: float) -> Draft:
        next_logits, nothing = self._next_logits(context), tuple[Tensor, ...]()

        def children(drawn: tuple[Tensor, ...]) -> Iterator[Child[tuple[Tensor, ...]]]:
            position = len(context) + len(drawn)
            tokens, shares = self.rule.likeliest(next_logits(drawn), position, min(nodes, WIDTH))
            for token, share in zip(tokens[0].split(1), shares[0].tolist(), strict=True):
                if share > 0:
                    yield int(token), share, (*drawn, token)

        return grow(nothing, children, nodes, depth, stop_below)

    def _next_logits(self, context: Sequence[int]) -> NextLogits:
        text = list(context[-len(self.table.orders) :])

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            return torch.from_numpy(self.table.next_token_probs([*text, *map(int, drawn)]))[None].log()

        return next_logits

"""Count an n-gram table in text the target wrote; and the bigram table of the classic demonstrations.

Interpolated absolute discounting (Ney, Essen & Kneser 1994): an order gives each continuation it has
seen (count - discount) / total and leaves the rest to the order below. Only what the assistant wrote is
counted as a continuation, since only that is ever drafted; contexts may reach back into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from specdemo.drafters.ngram import PROB_SCALE
from specdemo.errors import BadInput

from .data import ASSISTANT, provenance_of, shard_paths
from .states import conversations

DISCOUNT = 0.4
FEWEST = (1, 2, 3, 3)  # a context of n tokens seen less often than FEWEST[n - 1] is dropped
KEPT = 4  # continuations kept for a context
KEYS = 2**63  # contexts that can be told apart by an int64


def count_shards(shards: Sequence[Path], order: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (context of `order` tokens, continuation) in some shards, as two int64 arrays."""
    contexts, continuations = [], []
    for path in shards:
        shard = load_file(path)
        tokens, (_, place) = shard["tokens"].astype(np.int64), conversations(torch.from_numpy(shard["starts"]))
        usable = (shard["roles"] == ASSISTANT) & (place.numpy() >= order)
        row, column = np.nonzero(usable)
        key = np.zeros(len(row), dtype=np.int64)
        for back in range(order, 0, -1):
            key = key * vocab_size + tokens[row, column - back]
        contexts.append(key)
        continuations.append(tokens[row, column])
    return np.concatenate(contexts), np.concatenate(continuations)


def build_order(contexts: np.ndarray, continuations: np.ndarray, fewest: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The CSR arrays of one order: `keys`, `lengths`, `tokens`, `probs`."""
    keys, context_index, totals = np.unique(contexts, return_inverse=True, return_counts=True)
    pairs, counts = np.unique(context_index * vocab_size + continuations, return_counts=True)
    rows, tokens = pairs // vocab_size, pairs % vocab_size

    by_count = np.lexsort((tokens, -counts, rows))
    rows, tokens, counts = rows[by_count], tokens[by_count], counts[by_count]
    first = np.searchsorted(rows, np.arange(len(keys)))
    rank = np.arange(len(rows)) - first[rows]
    kept = (totals[rows] >= fewest) & (rank < KEPT)
    rows, tokens, counts = rows[kept], tokens[kept], counts[kept]

    probs = (counts - DISCOUNT) / totals[rows]
    lengths = np.bincount(rows, minlength=len(keys))
    return {"keys": keys[lengths > 0], "lengths": lengths[lengths > 0], "tokens": tokens, "probs": probs}


def build_table(
    folders: Sequence[Path], out: Path, provenance: dict[str, Any], log: Callable[[str], None] = lambda _: None
) -> None:
    """Count the training shards of some folders into the table `out`, with its provenance inside and beside it.

    Raises:
        BadInput: a folder holds no training shard, or the text of another target.
    """
    shards, texts = [], []
    for folder in folders:
        found = shard_paths(folder, "train")
        if not found:
            raise BadInput(f"{folder} holds no training text; run `python -m tools.train data` first.")
        shards += found
        texts.append(provenance_of(found[0]))
        if texts[-1].get("preset") != texts[0].get("preset"):
            raise BadInput(f"{folder} was written by {texts[-1].get('preset')}, not by {texts[0].get('preset')}.")
    vocab_size = texts[0]["vocab_size"]
    arrays: dict[str, np.ndarray] = {}
    written = 0
    for n, fewest in enumerate(FEWEST, start=1):
        if vocab_size**n > KEYS:
            break
        contexts, continuations = count_shards(shards, n, vocab_size)
        order = build_order(contexts, continuations, fewest, vocab_size)
        written = max(written, len(continuations))
        log(f"contexts of {n}: {len(order['keys']):,}, continuations {len(order['tokens']):,}")
        small = np.uint16 if vocab_size <= 2**16 else np.uint32
        arrays[f"keys{n}"] = np.diff(order["keys"], prepend=0)
        arrays[f"lengths{n}"] = order["lengths"].astype(np.uint8)
        arrays[f"tokens{n}"] = order["tokens"].astype(small)
        arrays[f"probs{n}"] = np.floor(order["probs"] * PROB_SCALE).astype(np.uint16)
        if n == 1:
            arrays["unigram"] = (np.bincount(continuations, minlength=vocab_size) + 1).astype(np.uint32)
    facts = {
        **provenance,
        "counted_tokens": written,
        "shards": len(shards),
        "discount": DISCOUNT,
        "fewest": FEWEST,
        "kept": KEPT,
        "text": texts,
    }
    _save(arrays, out, facts, indent=2)
    log(f"{out.name}: {out.stat().st_size / 1e6:.1f} MB from {written:,} tokens")


def build_bigrams(tokens: np.ndarray, vocab_size: int, out: Path, provenance: dict[str, Any]) -> None:
    """Write P(b | a) = (count(a b) + 1) / (count(a) + V) as an n-gram table, with its provenance inside and beside it.

    That is an interpolation, which is what such a table holds: count(a b) / (count(a) + V) for the pairs that were
    seen, and the rest, V / (count(a) + V), shared out by a uniform unigram. `tokens` are ids, int64.
    """
    counts = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2).reshape(vocab_size, -1)
    probs = counts / (counts.sum(1, keepdims=True) + vocab_size)
    before, after = np.nonzero(counts)
    keys, lengths = np.unique(before, return_counts=True)
    arrays = {
        "unigram": np.ones(vocab_size, dtype=np.uint32),
        "keys1": np.diff(keys, prepend=0),
        "lengths1": lengths.astype(np.uint8),
        "tokens1": after.astype(np.uint16),
        "probs1": np.floor(probs[before, after] * PROB_SCALE).astype(np.uint16),
    }
    _save(arrays, out, {**provenance, "counted_tokens": len(tokens), "smoothing": "Laplace"}, indent=1)


def _save(arrays: dict[str, np.ndarray], out: Path, facts: dict[str, Any], indent: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, out, metadata={"provenance": json.dumps(facts)})
    out.with_suffix(".json").write_text(json.dumps(facts, indent=indent) + "\n", encoding="utf-8")

"""The bigram table of the classic demonstrations: which token follows which, with Laplace's rule of succession."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ..drafters.ngram import PROB_SCALE


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
    facts = {**provenance, "counted_tokens": len(tokens), "smoothing": "Laplace"}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, out, metadata={"provenance": json.dumps(facts)})
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

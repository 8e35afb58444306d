"""The tokenizer of a model that `converted` wrote, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TOKENIZER = "tokenizer.json"
FILES = TOKENIZER, "tokenizer_config.json"  # but for the chat template


def same_tokenizer(first: str, second: str) -> bool:
    """Whether two folders have the same tokenizer, apart from the chat template."""
    return all(_bytes(Path(first) / name) == _bytes(Path(second) / name) for name in FILES)


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def converted_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, as `from_pretrained` makes it.

    transformers is given the added tokens. Else it parses the whole file for them, vocabulary and merges too, before
    `tokenizers` does so.
    """
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        folder, added_tokens_decoder=_added_tokens(Path(folder) / TOKENIZER)
    )
    return tokenizer


def _added_tokens(file: Path) -> dict[int, dict[str, Any]]:
    following = file.read_text(encoding="utf-8").partition('"added_tokens":')[2]
    tokens, _ = json.JSONDecoder().raw_decode(following.lstrip())
    return {token.pop("id"): token for token in tokens}

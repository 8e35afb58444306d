"""A grammar whose texts can be listed, over the tokens of a table model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from specdemo.decoding.constraint import Constraint

TOKENS = [b"a", b"b", b"ab", b"<end>"]
END = 3
GRAMMAR = "start: /[ab]{1,2}abba[ab]{1,2}/"
XS = ["a", "b", "aa", "ab", "ba", "bb"]
LANGUAGE = {f"{before}abba{after}" for before in XS for after in XS}


class Letters:
    """The tokenizer for llguidance: the longest token first."""

    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, TOKENS, [END]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((token for token in (2, 0, 1) if text.startswith(TOKENS[token])), None)
            ids += [] if found is None else [found]
            text = text[1 if found is None else len(TOKENS[found]) :]
        return ids


@cache
def letters() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Letters()), eos_token=[END])


def constraint_of(grammar: str = GRAMMAR) -> Constraint:
    return Constraint.of(grammar, letters())


def written(text: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in text if token != END).decode()


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """There guesses are drawn without the mask, since it would mean waiting for each."""
    patch.setattr(Constraint, "among", lambda constraint, logits, token_ids=None: logits)


@cache
def may_follow(text: tuple[int, ...]) -> list[bool]:
    """Which tokens the mask allows after a text, asked once and anew."""
    constraint = constraint_of()
    assert constraint.advance(text) == len(text)
    return constraint.allowed(len(TOKENS)).tolist()

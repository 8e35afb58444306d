"""What a JSON schema or a grammar allows next. The library llguidance follows the text; this wraps it.

The target's logits of forbidden tokens become minus infinity, before temperature, top-k and top-p: that is the *masked*
target. A text with a drafter is the masked target's own by the same rules as any text. The mask of a drafted token is
that of the text with the drafted tokens before it, so a forbidden guess has p = 0 and is rejected.

Often only one text can follow, such as `, "age": ` after a name. It is *forced*, and drafted for nothing. Several
tokens may spell it, of which the library allows those that the tokenizer would write, so these have p = 1. Only at the
end of a forced text, where the last token may reach into what follows, several are allowed; what is drafted there is a
guess like any other.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..formats import brief
from ..system.progress import check_stopped
from ..tokens import Draft

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MISSING = "Schemas and grammars need the package llguidance, which is not installed: pip install llguidance."
# JSON is written on one line, as Python's `json.dumps` does. If spaces and line breaks were free, little would be
# forced. A schema with `x-guidance` can say otherwise.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SECONDS, MEMORY = 2, 1 << 30  # what compiling a grammar may take
SHORT, COSTLY = 1_000, ("multipleOf", "allOf", "pattern", "%", "&", "~")  # a short one without these takes little
# What the library calls too complex, and how much of its words a sentence quotes.
TOO_COMPLEX = re.compile("too many|too big|too large|exhausted|unable to determine|; max is ", re.IGNORECASE)
LONGEST = 200
PATTERN = re.compile(r"regex parse error:\n    (.*)\n.*\nerror: (.*)")


def tokenizer_of(tokenizer: Any, rows: int, eos_ids: frozenset[int]) -> LLTokenizer:
    """A tokenizer of transformers as the library reads it, which takes a second.

    Args:
        rows: how many token ids the target can read.
        eos_ids: the tokens that end a text.
    """
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise BadInput(MISSING) from error
    if not eos_ids:
        raise BadInput("This model has no token that ends a text, so its text cannot end where a grammar does.")
    try:
        return from_tokenizer(tokenizer, max(rows, len(tokenizer)), sorted(eos_ids))
    except ValueError as error:
        raise BadInput(f"The tokenizer of this model cannot follow a grammar: {_reason(error)}.") from error


class Constraint:
    """What a grammar allows after a text that grows."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer

    @classmethod
    def of(cls, grammar: str, tokenizer: LLTokenizer) -> Constraint:
        """The constraint of an empty text.

        Args:
            grammar: a JSON schema, which is an object, or a grammar in Lark's format.
        Raises:
            Stopped: whoever waits for it has stopped it.
        """
        from llguidance import LLMatcher

        is_schema = grammar.lstrip().startswith("{")
        what = "JSON schema" if is_schema else "grammar"
        try:
            compiled = (
                LLMatcher.grammar_from_json_schema(json.loads(grammar), defaults=ONE_LINE)  # type: ignore[arg-type]
                if is_schema
                else LLMatcher.grammar_from_lark(grammar)
            )
        except RecursionError as error:
            raise BadInput(f"The {what} cannot be read: it is nested too deeply.") from error
        except ValueError as error:
            raise BadInput(f"The {what} cannot be read: {_reason(error)}.") from error
        if len(compiled) > SHORT or any(word in compiled for word in COSTLY):
            check_compiles(compiled, what, tokenizer)
        constraint = cls(LLMatcher(tokenizer, compiled, log_level=0), tokenizer)
        following = constraint.fork()
        following.advance(constraint.forced())
        following.advance([int(following._mask().argmax())])
        for each in constraint, following:  # some trouble shows only where the text goes on
            if each._matcher.is_error():
                raise BadInput(f"The {what} cannot be used: {_reason(each._matcher.get_error())}.")
        return constraint

    @property
    def finished(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def fork(self) -> Constraint:
        """An independent copy."""
        return Constraint(self._matcher.deep_copy(), self._tokenizer)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Add tokens to the text, up to the first that is forbidden. Returns how many were added."""
        return self._matcher.try_consume_tokens(list(token_ids))

    def allowed(self, vocab_size: int) -> Tensor:
        """Which tokens may follow the text, bool [V]. Those that end it are among them where it is `finished`.

        Raises:
            Stopped: whoever waits for it has stopped it.
        """
        check_stopped()  # a mask can take a second, and a tree has many
        allowed = self._mask()[:vocab_size]
        if self._matcher.is_error():
            raise BadInput(f"The grammar cannot be followed any further: {_reason(self._matcher.get_error())}.")
        if not allowed.any():
            raise BadInput("No token of this model can continue the text as the grammar wants it.")
        if len(allowed) < vocab_size:  # the rest is padding
            allowed = np.pad(allowed, (0, vocab_size - len(allowed)))
        return torch.from_numpy(allowed)

    def _mask(self) -> NDArray[np.bool_]:
        """Which of the library's tokens may follow the text, [V]; none if the matcher is in trouble."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._tokenizer.vocab_size, bitorder="little").view(bool)

    def forced(self) -> list[int]:
        """The tokens of the only text that can follow, as the tokenizer writes it; empty if several texts can.

        If the text has to end after it, a token that ends it comes last.
        """
        following, token_ids = self.fork(), list[int]()
        if text := self._matcher.compute_ff_bytes():
            token_ids = self._tokenizer.tokenize_bytes(text)
            token_ids = token_ids[: following.advance(token_ids)]
        if following._matcher.is_stopped() and following.finished:
            token_ids.append(self._tokenizer.eos_tokens[0])
        return token_ids

    def among(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """A drafter's logits of what follows the text [1, V], minus infinity for what is forbidden.

        Args:
            token_ids: the target's tokens that the columns stand for, int64 [V]; None if they are all of them.
        """
        if token_ids is None:
            allowed = self.allowed(logits.shape[-1])
        else:
            allowed = self.allowed(self._tokenizer.vocab_size)[token_ids]
        return torch.where(allowed, logits, -torch.inf)

    def masked(self, logits: Tensor, draft: Draft) -> Tensor:
        """The logits of a pass over a draft [k + 1, V], minus infinity for what is forbidden after each row.

        After a forbidden guess nothing is tested, and nothing is masked.
        """
        token_ids = draft.token_ids.tolist() if isinstance(draft.token_ids, Tensor) else draft.token_ids
        after: list[Constraint | None] = [self]
        for token, parent in zip(token_ids, draft.parents, strict=True):
            before = after[parent + 1]
            following = before.fork() if before else None
            after.append(following if following and following.advance([token]) else None)
        vocab_size = logits.shape[-1]
        every = torch.ones(vocab_size, dtype=torch.bool)
        allowed = torch.stack([each.allowed(vocab_size) if each else every for each in after])
        return torch.where(allowed.to(logits.device), logits, -torch.inf)


def check_compiles(compiled: str, what: str, tokenizer: LLTokenizer) -> None:
    """Refuse a grammar that does not compile within `SECONDS` and `MEMORY`, by trying it in a process of its own.

    Raises:
        Stopped: whoever waits for it has stopped it.
    """
    ids = range(tokenizer.vocab_size)
    request = {
        "grammar": compiled,
        "tokens": [tokenizer.decode_bytes([token]).decode("latin-1") for token in ids],
        "special": [token for token in ids if tokenizer.is_special_token(token)],
        "eos": tokenizer.eos_tokens,
        "seconds": SECONDS,
        "memory": MEMORY,
    }
    _check_apart(json.dumps(request), what)


@lru_cache(maxsize=1)  # each lane of a race asks
def _check_apart(request: str, what: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("compile_grammar.py"))]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, text=True) as process:
        try:
            assert process.stdin is not None
            with suppress(OSError), process.stdin:  # it may have ended already
                process.stdin.write(request)
            while process.poll() is None:
                check_stopped()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            process.kill()
    if process.returncode:
        raise BadInput(
            f"The {what} cannot be used: compiling it takes too much time or memory. A large multipleOf, patterns that "
            "must hold together, deep nesting and long chains of references do that."
        )


def _reason(error: object) -> str:
    """What the library says of a failure, as a sentence can quote it."""
    text = str(error).partition("\n<state>")[0]
    if found := PATTERN.search(text):
        return f"in the pattern {brief(found[1])}, {found[2]}"
    if text.startswith("NoExtension"):
        return "no text can satisfy it"
    first = " ".join(text.split("\n")[0].split()).replace("Unsatisfiable schema", "no text can satisfy it")
    if "ff_tokens" in first:
        return "only one text can follow somewhere, which never ends or is very long"
    if TOO_COMPLEX.search(first):
        first = f"it is too complex: {first}"
    return (first if len(first) <= LONGEST else f"{first[:LONGEST]}...").rstrip(".:")

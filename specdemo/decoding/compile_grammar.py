"""Find out whether a grammar compiles within a time and a memory: run as a file, by `constraint.check_compiles`.

It imports nothing of this project. JSON on stdin holds the grammar and the tokens; the exit code is 0 where the library
compiled or refused it in time. It is a process of its own because the library has limits for masks, but none for what
`multipleOf` and intersections cost, and overflows the stack, which ends the process, on long chains of references.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from typing import Any

STACK = 3 << 18  # less than any thread has that compiles the grammar afterwards


class Tokens:
    """What the library reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, request: dict[str, Any]) -> None:
        self.tokens = [token.encode("latin-1") for token in request["tokens"]]
        self.special_token_ids, self.eos_token_id = request["special"], request["eos"][0]

    def __call__(self, text: bytes) -> list[int]:
        return []


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    request = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer(TokenizerWrapper(Tokens(request)), eos_token=request["eos"])
    ended = threading.Event()

    def compile_it() -> None:
        LLMatcher(tokenizer, request["grammar"], log_level=0).compute_bitmask()
        ended.set()

    with suppress(ImportError, ValueError, OSError):  # Windows has no such limits, and macOS may refuse
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (request["memory"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    threading.Thread(target=compile_it, daemon=True).start()
    os._exit(0 if ended.wait(request["seconds"]) else 1)


if __name__ == "__main__":
    main()

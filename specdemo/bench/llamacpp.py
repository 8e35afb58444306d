"""llama.cpp: its server on the same GGUF file, in a process of its own, or one at an address.

It gets the same token ids as our methods. Its own timings are used, which contain neither HTTP nor the detokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ..models.loaded import Loaded
from ..models.source import Source
from ..models.store import Progress
from ..racing.stats import Pace
from ..servers.address import Address
from ..servers.client import Client
from ..servers.llamacpp import LlamaCpp, asked_of
from ..studies.greedy import check_tokens
from ..types import BadInput, Settings
from .cases import Case

LLAMA, NGRAM, DRAFTING = "llama.cpp", "llama.cpp-ngram", "llama.cpp-draft"
METHODS = {
    LLAMA: "its server on the same GGUF file, alone and with its own speculation; or =http://..., a server as it is"
}
NGRAM_SIZES, NGRAM_K = (3, 5), 8  # words that are looked up, and how many are drafted then
DRAFT_K = 4  # where no number is given
PYTHON = "SPECDEMO_LLAMACPP_PYTHON"  # another Python that has the package
START_SECONDS, ANSWER_SECONDS = 300, 3600


def unavailable_reason(loaded: Loaded, address: str | None) -> str | None:
    """Why llama.cpp cannot be compared with this preset, in a sentence; None if it can."""
    if address is not None:
        return None
    elsewhere = f"give the address of a server instead, --against {LLAMA}=http://127.0.0.1:8080"
    if not has_gguf(loaded.preset.target):
        return f"{LLAMA} is left out: {loaded.preset.name} was not loaded from a GGUF file; {elsewhere}."
    if PYTHON not in os.environ and importlib.util.find_spec("xllamacpp") is None:
        return f"{LLAMA} is left out: the package xllamacpp is not installed. Install it, or {elsewhere}."
    return None


def has_gguf(source: Source | None) -> bool:
    """Whether a model was loaded from a GGUF file. One that both the hub and the package index have is asked for on the
    hub first, where it is no such file."""
    return source is not None and source.has_gguf


def cases(loaded: Loaded, address: str | None, ks: Sequence[int | str] = ()) -> list[Case]:
    """The server alone, and with each of its own ways to speculate; at an address, the server as it is.

    Args:
        ks: how many tokens the draft model drafts in a round.
    """
    if address is not None:
        return [Case(LLAMA)]
    found = [Case(LLAMA), *(Case(NGRAM, f"ngram-simple {size}", NGRAM_K) for size in NGRAM_SIZES)]
    if has_gguf(loaded.preset.draft_model):
        found += [Case(DRAFTING, "draft-model", k) for k in ks or (DRAFT_K,)]
    return found


class Server:
    """A running server that writes texts.

    Raises:
        BadInput: it cannot be reached, or is no llama.cpp server.
    """

    def __init__(self, address: str, version: str | None = None) -> None:
        self.client = Client(Address.read(address), silent_seconds=ANSWER_SECONDS)  # a whole text comes at once
        try:
            self.dialect = LlamaCpp(self.client)
        except BadInput:
            self.client.close()
            raise
        self.facts = {"version": version or self.dialect.facts["version"], "model": self.dialect.facts["model"]}

    def generate(self, prompt_ids: Sequence[int], settings: Settings) -> dict[str, Any]:
        """One text, as `throughput.bench` keeps it. It is not streamed, so that nothing but the server works."""
        return run_of(self.client.post("/completion", **asked_of(prompt_ids, settings), return_tokens=True))


def run_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A run from an answer of `/completion`.

    The time of the first token is part of the prompt's. A round emits the tokens that passed and one more, which is how
    rounds can be counted; the server does not report how many guesses were tested.

    Raises:
        BadInput: the answer lacks timings.
    """
    try:
        timings = answer["timings"]
        tokens, prompt = int(timings["predicted_n"]), float(timings["prompt_ms"]) / 1000
        seconds = prompt + float(timings["predicted_ms"]) / 1000
        drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
        token_ids = [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput("The server's answer holds no timings: it is no llama.cpp server, or too old a one.") from error
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "prompt_seconds": prompt,
        "tokens_per_second": Pace(tokens, seconds, prompt).tokens_per_second,
        **{"accepted": accepted, "tested": None, "drafted": drafted},
        "rounds": max(tokens - 1 - accepted, 1) if tokens > 1 else 0,
        "draft_cost": None,
        "token_ids": token_ids,
    }


@contextmanager
def servers(
    loaded: Loaded, asked: Sequence[Case], address: str | None, context: int, progress: Progress
) -> Iterator[dict[Case, Server]]:
    """A server for each of the cases that are llama.cpp's, each in a process of its own, ended at the end.

    Args:
        context: the most tokens that a server must hold. Each keeps a cache of this size.

    Raises:
        BadInput: a server cannot be started or reached, or serves another model.
        LoadError: the GGUF file cannot be had.
    """
    ours = [case for case in asked if case.method in (LLAMA, NGRAM, DRAFTING)]
    with ExitStack() as running:
        found: dict[Case, Server] = {}
        for case in ours:
            where, version = (
                (address, None) if address else running.enter_context(started(_asked(loaded, case, context, progress)))
            )
            assert where is not None
            found[case] = Server(where, version)
            running.callback(found[case].client.close)
            check_tokens(loaded, found[case].dialect, loaded.encode("The same tokens?"))
        yield found


def _asked(loaded: Loaded, case: Case, context: int, progress: Progress) -> dict[str, Any]:
    """What `started` is to serve for a case."""

    def gguf(source: Source | None) -> str:
        assert source is not None
        return str(source.found(progress).gguf_path(progress))

    return {
        "gguf": gguf(loaded.preset.target),
        "draft_gguf": gguf(loaded.preset.draft_model) if case.method == DRAFTING else None,
        "ngram": int(str(case.drafter).split()[-1]) if case.method == NGRAM else None,
        "k": case.k,
        "threads": torch.get_num_threads(),
        "context": context,
    }


@contextmanager
def started(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The address and the version of a server in a process of its own, see `llamacpp_server`; it ends with the block.

    Raises:
        BadInput: it does not start.
    """
    command = [os.environ.get(PYTHON, sys.executable), str(Path(__file__).with_name("llamacpp_server.py"))]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(START_SECONDS, process.kill)
        try:
            late.start()
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = next((text for text in process.stdout if text.startswith("{")), None)
            if line is None:
                log.seek(0)
                said = log.read().strip().splitlines() or ["nothing"]
                raise BadInput(f"llama.cpp's server did not start: {said[-1]}")
            late.cancel()
            answer = json.loads(line)
            yield answer["address"], answer["version"]
        except BrokenPipeError as error:
            raise BadInput("llama.cpp's server did not start: its Python ended at once.") from error
        finally:
            late.cancel()
            process.kill()
            process.communicate()

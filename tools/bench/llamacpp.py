"""llama.cpp and others that speak like its server, on the same GGUF file; and OpenVINO.

It gets the same token ids as our methods. Its own timings are used, which contain neither HTTP nor the detokenizer.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import httpx
import numpy as np
import torch

from specdemo.errors import BadInput
from specdemo.models.loaded import Loaded
from specdemo.models.source import Source
from specdemo.models.store import Progress
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.llamacpp import LlamaCpp, body_of
from specdemo.servers.llamacpp_process import START_SECONDS, last_line, started
from specdemo.settings import Settings
from specdemo.studies.greedy import check_tokens

from .cases import DRAFTING, LLAMA, NGRAM, OPENVINO, Case
from .rows import Row, run_of

ANSWER_SECONDS = 3600
_PART = re.compile(r"\{(target|draft_model)\}")


class Server:
    """A running server that writes texts."""

    def __init__(self, address: str, version: str = "") -> None:
        self.client = Client(Address.read(address), silent_seconds=ANSWER_SECONDS)  # a whole text comes at once
        try:
            self.dialect = LlamaCpp(self.client)
        except BadInput:
            self.client.close()
            raise
        self.facts = {"version": version or self.dialect.facts["version"], "model": self.dialect.facts["model"]}

    def generate(self, prompt_ids: Sequence[int], settings: Settings) -> Row:
        """One text. It is not streamed, so that nothing but the server works."""
        body = body_of(prompt_ids, settings)
        if not settings.temperature:
            body["top_k"] = 1  # the fastest way to the likeliest token, and the only one for ik_llama.cpp
        answer = self.client.post("/completion", **body, return_tokens=True)
        if "tokens" not in answer:  # ik_llama.cpp's server sends the text only
            answer |= self.client.post("/tokenize", content=answer.get("content"))
        return answered(answer)


def answered(answer: Mapping[str, Any]) -> Row:
    """A run from an answer of `/completion`.

    The time of the first token is part of the prompt's. A round emits the tokens that passed and one more, which is how
    rounds can be counted; the server does not report how many guesses were tested.
    """
    try:
        timings = answer["timings"]
        tokens = int(timings["predicted_n"])
        prompt, after = (float(timings[name]) / 1000 for name in ("prompt_ms", "predicted_ms"))
        drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
        token_ids = [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput("The server's answer holds no timings: it is no llama.cpp server, or too old a one.") from error
    rounds = max(tokens - 1 - accepted, 1) if tokens > 1 else 0
    return run_of(token_ids, prompt + after, prompt, tokens, accepted=accepted, drafted=drafted, rounds=rounds)


class OpenVino:
    """OpenVINO GenAI on a GGUF file, in this process, on as many threads as torch has."""

    def __init__(self, gguf: str) -> None:
        genai: Any = import_module("openvino_genai")
        self.facts = {"version": f"OpenVINO GenAI {genai.__version__}"}
        self.genai = genai
        self.pipeline = genai.LLMPipeline(gguf, "CPU", INFERENCE_NUM_THREADS=torch.get_num_threads())

    def generate(self, prompt_ids: Sequence[int], settings: Settings) -> Row:
        """One text at temperature 0."""
        tensor: Any = import_module("openvino").Tensor
        ids = np.array([prompt_ids], dtype=np.int64)
        config = self.genai.GenerationConfig(max_new_tokens=settings.max_new_tokens, do_sample=False)
        answer = self.pipeline.generate(self.genai.TokenizedInputs(tensor(ids), tensor(np.ones_like(ids))), config)
        times = answer.perf_metrics
        seconds, prompt = (found.mean / 1000 for found in (times.get_generate_duration(), times.get_ttft()))
        return run_of([int(token) for token in answer.tokens[0]], seconds, prompt)


Writer = Server | OpenVino


@contextmanager
def servers(
    loaded: Loaded,
    asked: Sequence[Case],
    context: int,
    progress: Progress,
    commands: Mapping[Case, list[str]] | None = None,
) -> Iterator[dict[Case, Any]]:
    """What writes the texts of the cases that are not ours, each server in a process of its own, ended at the end.

    Args:
        context: the most tokens that a server must hold. Each keeps a cache of this size.
        commands: of servers that speak like llama.cpp's, see `cases.named_commands`.

    Raises:
        LoadError: the GGUF file cannot be had.
    """
    with ExitStack() as running:
        found: dict[Case, Writer] = {}
        for case in asked:
            if case.method == OPENVINO:
                found[case] = OpenVino(_gguf(loaded, "target", progress))
                continue
            if commands and case in commands:
                words = [_PART.sub(lambda part: _gguf(loaded, part[1], progress), word) for word in commands[case]]
                server = Server(running.enter_context(served(words, context)))
            elif case.method in (LLAMA, NGRAM, DRAFTING):
                server = Server(*running.enter_context(started(_asked(loaded, case, context, progress))))
            else:
                continue
            found[case] = server
            running.callback(server.client.close)
            check_tokens(loaded, server.dialect, loaded.encode("The same tokens?"))
        yield found


def _gguf(loaded: Loaded, part: str, progress: Progress) -> str:
    """The path of the GGUF file of the "target" or the "draft_model"."""
    source: Source | None = getattr(loaded.preset, part)
    if source is None:
        raise BadInput(f"The preset {loaded.preset.name} has no draft model.")
    return str(source.found(progress).gguf_path(progress))


def _asked(loaded: Loaded, case: Case, context: int, progress: Progress) -> dict[str, Any]:
    """What `started` is to serve for a case."""
    return {
        "gguf": _gguf(loaded, "target", progress),
        "draft_gguf": _gguf(loaded, "draft_model", progress) if case.method == DRAFTING else None,
        "ngram": int(str(case.drafter).split()[-1]) if case.method == NGRAM else None,
        "k": case.k,
        "threads": torch.get_num_threads(),
        "context": context,
    }


@contextmanager
def served(command: Sequence[str], context: int) -> Iterator[str]:
    """The address of a server that a command starts; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*command, "--port", str(port), "--ctx-size", str(context), "--parallel", "1"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise BadInput(f"{words[0]} cannot be started: {error.strerror}.") from error
        try:
            address, late = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not _answers(address):
                if process.poll() is not None or time.monotonic() > late:
                    raise BadInput(f"{words[0]} did not start: {last_line(log)}")
                time.sleep(0.2)
            yield address
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a wrapper started
            process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False

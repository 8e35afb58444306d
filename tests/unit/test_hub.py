"""The hub, as far as presets need it, served from a folder: a download with progress, and refusals in words."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from .checkpoints import make_tokenizer, save, tiny

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = tuple[Any, list[Any], float]  # the weights of a model or why not, the stages, seconds slept
REFUSALS = {
    "someone/gated": (403, "GatedRepo"),
    "someone/absent": (404, "RepoNotFound"),
    "someone/tiny@nope": (404, "RevisionNotFound"),
}

# The address of the hub is read when huggingface_hub is imported: only a new process can be given another.
ASK = """
import json, sys, time
from specdemo.models.loaded import load
from specdemo.models.presets import Hub, Preset
slept, sleep = [], time.sleep
time.sleep = lambda seconds: slept.append(seconds) or sleep(seconds)
for repo in map(str.strip, sys.stdin):
    name, _, revision = repo.partition("@")
    stages = []
    slept.clear()
    try:
        preset = Preset("toy", "Toy", "Toy.", Hub(name, revision or None))
        loaded = load(preset, device="cpu", progress=lambda *stage: stages.append(stage))
        answer = loaded.weights["target"]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, stages, sum(slept)]), flush=True)
"""


class HubOfOne(BaseHTTPRequestHandler):
    """Files of `someone/tiny` at one commit; everything else is refused as the hub refuses it."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        for refused in (repo, f"{repo}@{revision}"):
            if refused in REFUSALS:
                status, code = REFUSALS[refused]
                return self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": "refused"})
        file = self.folder / name
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = file.read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        return self.send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Tests are quiet."""


@contextmanager
def serving(folder: Path, kind: type[HubOfOne] = HubOfOne, **more: Any) -> Iterator[str]:
    """The address of a hub whose only model is in a folder."""
    handler = type("Handler", (kind,), {"folder": folder, **more})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def asking(endpoint: str, home: Path, script: str = ASK, **more: str) -> Iterator[Callable[[str], Answer]]:
    """Asks a script in a process that has its hub at `endpoint` and keeps what it downloads in `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **more}
    environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:

        def ask(name: str) -> Answer:
            print(name, file=process.stdin, flush=True)
            assert process.stdout is not None
            answer, stages, slept = json.loads(process.stdout.readline())
            return answer, stages, slept

        yield ask


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Answer], list[Answer]]:
    """What is answered for a model of the hub and for others that it refuses; and while nobody listens at its port any
    more, for one that was downloaded and one that was not."""
    tokenizer, home = make_tokenizer(), tmp_path_factory.mktemp("home")
    folder = save(tiny("llama", len(tokenizer)), tokenizer, home / "tiny")
    with ExitStack() as running:
        with serving(folder) as url:
            ask = running.enter_context(asking(url, home))
            names = "someone/tiny", "someone/gated", "someone/absent", "someone/tiny@nope", "not a name"
            fetched = [ask(name) for name in names]
        return fetched, [ask("someone/tiny"), ask("someone/other")]


UNREACHED = "LoadError: {} could not be downloaded: the model hub cannot be reached. Check the network and try again."


def test_a_hub_model_is_fetched_and_every_refusal_is_a_sentence(answers: Any) -> None:
    (weights, stages, _), *refusals = answers[0]
    assert weights == {"source": "hub", "repo": "someone/tiny", "revision": COMMIT}
    downloads = [fraction for fraction, words in stages if words.startswith("downloading someone/tiny")]
    assert downloads[-1] == 1.0
    assert stages[-1] == [1.0, "ready"]
    gated, absent, nope, nonsense = (answer for answer, *_ in refusals)
    assert gated.startswith("LoadError: someone/gated asks for an agreement first")
    assert "hf auth login" in gated
    assert absent.startswith("LoadError: There is no model someone/absent on the hub")
    assert nope == "LoadError: someone/tiny has no such revision on the hub."
    assert nonsense.startswith("LoadError: There is no model not a name on the hub")


def test_a_hub_that_cannot_be_reached_is_not_tried_again(answers: Any) -> None:
    """The hub's library would try it again for half a minute."""
    answer, stages, slept = answers[1][1]
    assert answer == UNREACHED.format("someone/other")
    assert slept < 1
    assert [words for _, words in stages] == ["looking for someone/other on the hub"]


def test_what_was_downloaded_serves_while_the_hub_cannot_be_reached(answers: Any) -> None:
    weights, stages, slept = answers[1][0]
    assert slept < 1
    assert weights == {"source": "hub", "repo": "someone/tiny", "revision": COMMIT}
    assert stages[-1] == [1.0, "ready"]
    assert not any("downloading" in words for _, words in stages)


def test_a_hub_that_is_not_asked_because_the_machine_is_offline_is_a_sentence(tmp_path: Path) -> None:
    with asking("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1") as ask:
        answer, *_ = ask("someone/tiny")
    assert answer == UNREACHED.format("someone/tiny")

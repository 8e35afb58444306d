"""What the hub tells of a model before its weights are fetched: asked of a stand-in for its HTTP interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from .checkpoints import make_tokenizer, save, tiny, write_gguf
from .test_hub import COMMIT, ROOT, HubOfOne

ASK = """
import dataclasses, json, sys
from specdemo.models.loaded import load
from specdemo.models.presets import preset_of
from specdemo.models.report import report_on
for name in sys.argv[2:]:
    try:
        preset = preset_of(name)
        (told,) = report_on(preset, "float32", "cpu").models
        answer = dataclasses.asdict(dataclasses.replace(told, part=None))
        answer["vocabulary"] = len(answer["vocabulary"])
        if sys.argv[1] == "load":
            answer["held"] = load(preset, "float32", "cpu").held["cpu"]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Hub(HubOfOne):
    """The same, with the facts of `someone/tiny`, which is gated but open to us, and of `someone/pickled`."""

    taken: list[str]

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.taken.append(path)
        if not path.startswith("/api/models/"):
            return super().answer()
        _, _, owner, name, *more = path.strip("/").split("/")
        if more and more[0] != "revision":  # such as the tree of its files
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        repo = f"{owner}/{name}"
        if repo not in ("someone/tiny", "someone/pickled"):
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = sorted(self.folder.iterdir())
        siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
        if repo == "someone/pickled":
            siblings = [{"rfilename": "pytorch_model.bin", "size": 5}]
        facts = {"id": repo, "sha": COMMIT, "gated": "manual", "siblings": siblings, "cardData": {"license": "mit"}}
        return self.send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    tokenizer = make_tokenizer()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path_factory.mktemp("hub") / "tiny")
    write_gguf(folder / "tiny.gguf")
    taken: list[str] = []
    handler = type("Handler", (Hub,), {"folder": folder, "taken": taken})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}", folder=folder, taken=taken)
        server.shutdown()
        thread.join()


def ask(hub: SimpleNamespace, home: Path, what: str, *names: str) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "SPECDEMO_CACHE": str(home / "own")}
    environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")
    command = [sys.executable, "-c", ASK, what, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub_is_asked_for_sizes_licence_and_gate_and_for_no_weights(hub: SimpleNamespace, tmp_path: Path) -> None:
    del hub.taken[:]
    whole, file, absent, pickled, no_file = ask(
        hub,
        tmp_path,
        "look",
        "someone/tiny",
        "someone/tiny:tiny.gguf",
        "someone/absent:x.gguf",
        "someone/pickled:x.gguf",
        "someone/tiny:other.gguf",
    )
    assert isinstance(whole, dict), whole
    assert whole["download"] == (hub.folder / "model.safetensors").stat().st_size
    assert file["download"] == (hub.folder / "tiny.gguf").stat().st_size
    assert (whole["licence"], whole["gated"], file["licence"]) == ("mit", True, "mit")
    assert whole["vocabulary"] == file["vocabulary"] == len(make_tokenizer())
    assert (whole["engine"], whole["weights"]) == (file["engine"], file["weights"])
    assert str(absent).startswith("LoadError: There is no model someone/absent on the hub")
    assert pickled == "LoadError: There is no file x.gguf in someone/pickled on the hub. Its GGUF files: none."
    assert str(no_file).endswith("Its GGUF files: tiny.gguf.")
    assert not any(path.endswith(".safetensors") for path in hub.taken)


def test_models_of_the_hub_load_by_name(hub: SimpleNamespace, tmp_path: Path) -> None:
    whole, file = ask(hub, tmp_path, "load", "someone/tiny", "someone/tiny:tiny.gguf")
    assert isinstance(whole, dict), whole
    assert whole["held"] == file["held"] == whole["weights"]
    before = hashlib.sha256((hub.folder / "tiny.gguf").read_bytes()).hexdigest()[:12]
    assert (tmp_path / "own" / f"tiny-{before}-v1").is_dir()  # converted once

"""The hub, as far as presets need it, served from folders: what it tells of a model, downloads with progress, heads,
and refusals in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from specdemo.models.converted import LAYOUT
from specdemo.models.loaded import load
from specdemo.models.presets import Preset
from specdemo.models.sources import Hub
from specdemo.models.store import LoadError
from tests.harness.files import make_tokenizer, sha256, write_gguf
from tests.harness.models import save, tiny

from ..fakes import published
from ..fakes.hub import COMMIT, Handler
from ..sentences import gist, refuses, tells

ROOT = Path(__file__).resolve().parents[2]
Answer = tuple[Any, list[Any], float]  # what was asked for or why not, the stages, seconds slept

# The address of the hub is read when huggingface_hub is imported: only a new process can be given another.
ASK = """
import json, sys, time
from types import SimpleNamespace
from specdemo.models.loaded import load
from specdemo.models.presets import Preset, preset_of
from specdemo.models.sources import Hub
from specdemo.models.published_heads import fetch_heads, head_format
from specdemo.models.preset_models import find_models
from specdemo.models.sizes import laid_out_bytes
slept, sleep = [], time.sleep
time.sleep = lambda seconds: slept.append(seconds) or sleep(seconds)
text = SimpleNamespace(vocab_size=61, hidden_size=32, num_hidden_layers=6, model_type="llama", rms_norm_eps=1e-5)
target = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
tell = lambda *stage: stages.append(stage)
def fetch(repo):
    name, _, revision = repo.partition("@")
    preset = Preset("toy", "Toy", "Toy.", Hub(name, revision or None))
    return load(preset, "float32", "cpu", tell).weights["target"]
def look(name):
    (model,) = find_models(preset_of(name), "float32", "cpu", fetch=False)
    known = {field: getattr(model, field) for field in ("download", "licence", "gated", "engine")}
    return {**known, "vocabulary": len(model.vocabulary), "weights": laid_out_bytes(model)}
def held(name):
    return load(preset_of(name), "float32", "cpu").held["cpu"]
def heads(names):
    kinds = dict(zip(("eagle", "block"), map(Hub, names.split())))
    preset = Preset("toy", "Toy", "Toy.", Hub("owner/target"), heads=kinds)
    heads, missing = fetch_heads(preset, target, tell)
    files = {kind: [folder.name, sorted(file.name for file in folder.iterdir())] for kind, folder in heads.items()}
    return [files, [*missing.values()]]
def kind(name):
    return head_format(name).name
for asked in map(str.strip, sys.stdin):
    what, _, name = asked.partition(" ")
    stages = []
    slept.clear()
    try:
        answer = {"fetch": fetch, "look": look, "held": held, "heads": heads, "kind": kind}[what](name)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, stages, sum(slept)]), flush=True)
"""


@contextmanager
def asking(endpoint: str, home: Path) -> Iterator[Callable[[str], Answer]]:
    """Asks `ASK` in a process that has its hub at `endpoint` and keeps what it downloads in `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "SPECDEMO_CACHE": str(home / "own")}
    environment |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")
    command, pipe = [sys.executable, "-c", ASK], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:

        def ask(name: str) -> Answer:
            print(name, file=process.stdin, flush=True)
            assert process.stdout is not None
            answer, stages, slept = json.loads(process.stdout.readline())
            return answer, stages, slept

        yield ask


WHILE_IT_ANSWERS = (
    *(
        f"look someone/{name}"
        for name in (
            *("tiny", "tiny:tiny.gguf", "absent:x.gguf", "tiny:other.gguf", "pickled:x.gguf"),
            "tiny:dynamic.gguf",
        )
    ),
    *(f"held someone/{name}" for name in ("tiny", "tiny:tiny.gguf")),
    *(
        f"fetch {name}"
        for name in ("someone/plain", "someone/refused", "someone/absent", "someone/tiny@nope", "not a name")
    ),
    *("kind someone/head", "kind someone/absent", "heads someone/head someone/absent"),
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What is answered; and while nobody listens at its port any more, for what was downloaded and what was not."""
    home, tokenizer, taken = tmp_path_factory.mktemp("hub"), make_tokenizer(), list[str]()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, home / "tiny")
    plain = save(tiny("llama", len(tokenizer)), tokenizer, home / "plain")
    write_gguf(folder / "tiny.gguf")
    write_gguf(folder / "dynamic.gguf", header={"rope.scaling.type": "dynamic"})
    head = published.write(home / "head", *published.eagle3(61), pickle=True)
    folders = {"someone/tiny": folder, "someone/plain": plain, "someone/head": head}
    handler = type("Handler", (Handler,), {"folders": folders, "taken": taken})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with asking(f"http://127.0.0.1:{server.server_port}", home) as ask:
            answers = {asked: ask(asked) for asked in WHILE_IT_ANSWERS}
            server.shutdown()
            thread.join()
            server.server_close()
            cut_off = {
                asked: ask(asked) for asked in ("fetch someone/plain", "fetch someone/other", "heads someone/head")
            }
    results = {asked: answer for asked, (answer, _, _) in answers.items()}
    return SimpleNamespace(home=home, folder=folder, taken=taken, answers=answers, results=results, cut_off=cut_off)


@pytest.mark.slow
def test_the_hub_is_asked_for_sizes_licence_and_gate_and_for_no_weights(hub: SimpleNamespace) -> None:
    whole, file, absent, no_file, pickled, dynamic = [
        answer for asked, answer in hub.results.items() if asked.startswith("look")
    ]
    assert isinstance(whole, dict), whole
    assert whole["download"] == (hub.folder / "model.safetensors").stat().st_size
    assert file["download"] == (hub.folder / "tiny.gguf").stat().st_size
    assert (whole["licence"], whole["gated"], file["licence"]) == ("mit", True, "mit")
    assert whole["vocabulary"] == file["vocabulary"] == len(make_tokenizer())
    assert (whole["engine"], whole["weights"]) == (file["engine"], file["weights"])
    assert tells(str(absent), "LoadError someone/absent")
    assert tells(pickled, "LoadError x.gguf someone/pickled GGUF")
    assert tells(str(no_file), "GGUF dynamic.gguf tiny.gguf")
    assert tells(dynamic, "LoadError someone/tiny:dynamic.gguf llama.rope.scaling.type")
    weights, last_look = (
        [at for at, path in enumerate(hub.taken) if part in path] for part in (".safetensors", "someone/pickled")
    )
    assert weights[0] > last_look[-1]


@pytest.mark.slow
def test_models_of_the_hub_load_by_name(hub: SimpleNamespace) -> None:
    loaded = [hub.results[f"held someone/{name}"] for name in ("tiny", "tiny:tiny.gguf")]
    assert loaded == [hub.results["look someone/tiny"]["weights"]] * 2
    assert (
        hub.home / "own" / f"tiny-{sha256(hub.folder / 'tiny.gguf')[:12]}-float32-v{LAYOUT}"
    ).is_dir()  # converted once


@pytest.mark.slow
def test_a_hub_model_is_fetched_and_every_refusal_is_a_sentence(hub: SimpleNamespace) -> None:
    weights, stages, _ = hub.answers["fetch someone/plain"]
    assert weights == {"source": "hub", "repo": "someone/plain", "revision": COMMIT}
    downloads = [fraction for fraction, words in stages if words.startswith("downloading someone/plain")]
    assert downloads[-1] == 1.0
    assert stages[-1] == [1.0, "ready"]
    gated = hub.results["fetch someone/refused"]
    assert tells(gated, "LoadError someone/refused")
    assert tells(gated, "auth login")
    assert tells(hub.results["fetch someone/absent"], "LoadError someone/absent")
    assert tells(hub.results["fetch someone/tiny@nope"], "LoadError someone/tiny")
    assert tells(hub.results["fetch not a name"], "LoadError name")


UNREACHED = "downloaded: hub reached."


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_not_tried_again(hub: SimpleNamespace) -> None:
    """The hub's library would try it again for half a minute."""
    answer, stages, slept = hub.cut_off["fetch someone/other"]
    assert tells(answer, f"LoadError: someone/other {UNREACHED}")
    assert slept < 1
    assert [*map(gist, [words for _, words in stages])] == ["looking someone/other"]


@pytest.mark.slow
def test_what_was_downloaded_serves_while_the_hub_cannot_be_reached(hub: SimpleNamespace) -> None:
    weights, stages, slept = hub.cut_off["fetch someone/plain"]
    assert slept < 1
    assert weights == {"source": "hub", "repo": "someone/plain", "revision": COMMIT}
    assert stages[-1] == [1.0, "ready"]
    assert not any("downloading" in words for _, words in stages)


def test_a_hub_that_is_not_asked_because_the_machine_is_offline_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with refuses(LoadError, f"someone/nowhere {UNREACHED}"):
        load(Preset("toy", "Toy", "Toy.", Hub("someone/nowhere")), device="cpu")


@pytest.mark.slow
def test_a_head_of_the_hub_is_fetched_once_and_one_that_is_not_there_named(hub: SimpleNamespace) -> None:
    """A pickle, as many are."""
    files = {"eagle": [COMMIT, ["config.json", "pytorch_model.bin"]]}
    assert hub.results["kind someone/head"] == "EAGLE-3"
    assert tells(hub.results["kind someone/absent"], "LoadError someone/absent")
    (fetched, (sentence,)), stages, _ = hub.answers["heads someone/head someone/absent"]
    assert fetched == files
    assert [fraction for fraction, words in stages if words.startswith("downloading")][-1:] == [1.0]
    assert tells(sentence, "someone/absent")
    kept, stages, _ = hub.cut_off["heads someone/head"]
    assert kept == [files, []]
    assert not any("downloading" in words for _, words in stages)

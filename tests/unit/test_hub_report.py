"""What the hub tells of a model before its weights are fetched: asked of a stand-in for its HTTP interface."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from .checkpoints import make_tokenizer, save, tiny, write_gguf
from .test_hub import COMMIT, HubOfOne, asking, serving

ASK = """
import dataclasses, json, sys
from specdemo.models.loaded import load
from specdemo.models.presets import preset_of
from specdemo.models.report import report_on
for asked in map(str.strip, sys.stdin):
    what, _, name = asked.partition(" ")
    try:
        preset = preset_of(name)
        if what == "look":
            (told,) = report_on(preset, "float32", "cpu").models
            answer = dataclasses.asdict(dataclasses.replace(told, part=None))
            answer["vocabulary"] = len(answer["vocabulary"])
        else:
            answer = load(preset, "float32", "cpu").held["cpu"]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, [], 0]), flush=True)
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
def hub(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What is answered for models that are looked at and then for two of them that are loaded."""
    tokenizer = make_tokenizer()
    home = tmp_path_factory.mktemp("hub")
    folder = save(tiny("llama", len(tokenizer)), tokenizer, home / "tiny")
    write_gguf(folder / "tiny.gguf")
    taken: list[str] = []
    names = "tiny", "tiny:tiny.gguf", "absent:x.gguf", "tiny:other.gguf", "pickled:x.gguf"
    asked = *(f"look someone/{name}" for name in names), "load someone/tiny", "load someone/tiny:tiny.gguf"
    with serving(folder, Hub, taken=taken) as url, asking(url, home, ASK, SPECDEMO_CACHE=str(home / "own")) as ask:
        told = [ask(name)[0] for name in asked]
    return SimpleNamespace(home=home, folder=folder, taken=taken, looked=told[:5], loaded=told[5:])


def test_the_hub_is_asked_for_sizes_licence_and_gate_and_for_no_weights(hub: SimpleNamespace) -> None:
    whole, file, absent, no_file, pickled = hub.looked
    assert isinstance(whole, dict), whole
    assert whole["download"] == (hub.folder / "model.safetensors").stat().st_size
    assert file["download"] == (hub.folder / "tiny.gguf").stat().st_size
    assert (whole["licence"], whole["gated"], file["licence"]) == ("mit", True, "mit")
    assert whole["vocabulary"] == file["vocabulary"] == len(make_tokenizer())
    assert (whole["engine"], whole["weights"]) == (file["engine"], file["weights"])
    assert str(absent).startswith("LoadError: There is no model someone/absent on the hub")
    assert pickled == "LoadError: There is no file x.gguf in someone/pickled on the hub. Its GGUF files: none."
    assert str(no_file).endswith("Its GGUF files: tiny.gguf.")
    weights, last_look = (
        [at for at, path in enumerate(hub.taken) if part in path] for part in (".safetensors", "someone/pickled")
    )
    assert weights[0] > last_look[-1]


def test_models_of_the_hub_load_by_name(hub: SimpleNamespace) -> None:
    assert hub.loaded == [hub.looked[0]["weights"]] * 2
    before = hashlib.sha256((hub.folder / "tiny.gguf").read_bytes()).hexdigest()[:12]
    assert (hub.home / "own" / f"tiny-{before}-v1").is_dir()  # converted once

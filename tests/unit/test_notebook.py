"""`from specdemo import race`, and the notebook in docs/."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdemo import race
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.racing.trace import read_trace
from tests.harness.files import make_tokenizer
from tests.harness.models import preset_of, save, tiny

from ..sentences import refuses

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
PRESET = "nanogpt-shakespeare"
MOST_BYTES = 400_000


@pytest.fixture(scope="module")
def found() -> Any:
    return race("To be, or not", preset=PRESET, drafter="ngram", k=4, max_new_tokens=40)


def test_it_returns_the_numbers_the_text_and_the_trace(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert (found.same_text, found.numbers["speculative"]["stats"]["tokens"]) == (True, 40)
    assert found.text == found.numbers["plain"]["text"]
    assert found.speed_up == found.numbers["speed_up"] > 0
    assert found.sentence in repr(found)
    header, entries = read_trace(found.trace.splitlines())
    assert (header["preset"], header["drafter"], len(entries)) == (PRESET, "ngram", len(found.entries))


def test_outside_a_notebook_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    again = race("To be", preset=PRESET, drafter="ngram", k=2, max_new_tokens=8)
    assert capfd.readouterr() == ("", "")
    assert again.request.settings.k == 2


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


def test_its_view_is_one_frame_that_cannot_reach_the_notebook(found: Any) -> None:
    ((tag, attributes),) = Elements(found._repr_html_()).found
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert str(attributes["srcdoc"]).startswith("<!doctype html>")


def test_in_a_notebook_the_texts_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.HTML, display.display = str, lambda html, display_id: handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("specdemo.notebook.BETWEEN", 0)
    found = race("To be", preset=PRESET, drafter="ngram", k=4, max_new_tokens=40)
    assert len(shown) == len(found.entries) + 1
    assert "target alone" in shown[-1]
    texts = [Text(one).text for one in (shown[0], shown[-1])]
    assert len(texts[0]) < len(texts[1])
    assert texts[1].count(found.text) == 2


class Text(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_lanes_race_together() -> None:
    found = race("To be", preset=PRESET, lanes=["ngram:2", "prompt-lookup:4"], max_new_tokens=8)
    assert [*found.outcome.verdicts] == ["ngram:2", "prompt-lookup:4"]


def test_people_guess_in_a_notebook(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"preset": PRESET, "drafter": "you", "max_new_tokens": 40}
    right = found.text[1:7]
    given = race("To be, or not", guesses=[right, "", "qq"], **asked)
    assert (given.same_text, given.text) == (True, found.text)
    assert [given.numbers["speculative"]["stats"][name] for name in ("drafted", "accepted")] == [8, 6]
    shown: list[str] = []

    def typed(before: str) -> str:
        shown.append(before)
        if len(shown) == 3:
            raise EOFError
        return right if len(shown) == 1 else ""

    monkeypatch.setattr("builtins.input", typed)
    same = race("To be, or not", **asked)
    assert same.text == found.text
    assert shown == [f"To be, or not{found.text[:written]}> " for written in (1, 8, 9)]


def test_a_model_that_was_saved_again_is_loaded_again(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    asked: dict[str, Any] = {"preset": str(tmp_path), "raw": True, "dtype": "float32", "max_new_tokens": 8}
    texts = []
    for seed in (0, 1):
        save(tiny("llama", len(tokenizer), seed), tokenizer, tmp_path)
        texts += [race("the cat", **asked) for _ in range(2)]
    of_first, again, of_second, _ = (one.numbers["plain"]["text"] for one in texts)
    assert of_first == again != of_second
    loaded = load(preset_of(tmp_path), "float32", "cpu")
    alone = loaded.model.generate(torch.tensor([loaded.encode("the cat", raw=True)]), max_new_tokens=8, do_sample=False)
    assert loaded.tokenizer.decode(alone[0]).endswith(of_second)


def test_a_path_and_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    folder = save(tiny("llama", 299), make_tokenizer(), tmp_path / "model")
    found = race("To be", preset=folder, drafter="prompt-lookup", k=np.int64(4), seed=np.uint8(7), max_new_tokens=3)
    assert found.request.preset == str(folder)
    assert (found.request.settings.k, found.request.settings.seed) == (4, 7)
    assert found.trace


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"drafter": "nothing"}, BadInput, "drafter 'nothing'"),
        ({"preset": "nothing"}, BadInput, "preset 'nothing'"),
        ({"k": 17}, BadInput, "K 16, 17"),
        ({"k": 4, "lanes": ["ngram:2"]}, BadInput, "drafter k"),
        ({"guesses": ["a"]}, BadInput, "you"),
        ({"tokens": 3}, TypeError, "tokens. ahead,"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], kind: type[Exception], words: str) -> None:
    with refuses(kind, words):
        race("To be", **{"preset": PRESET, **asked})


def shape(notebook: Any) -> list[Any]:
    """What the outputs of each cell are, without what they say."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kinds = [[(out["output_type"], sorted(out.get("data", {}))) for out in cell["outputs"]] for cell in cells]
    return [[cell["execution_count"], kind] for cell, kind in zip(cells, kinds, strict=True)]


def test_the_notebook_in_docs_is_executed_and_small() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    cells = shape(json.loads(text))
    assert [count for count, _ in cells] == [*range(1, len(cells) + 1)]
    assert {kind for _, outputs in cells for kind, _ in outputs} == {"display_data", "execute_result"}


@pytest.mark.slow
@pytest.mark.real
def test_the_notebook_in_docs_runs_anew() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = shape(notebook)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert shape(notebook) == before

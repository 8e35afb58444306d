"""The examples in docstrings are run."""

from __future__ import annotations

from collections.abc import Iterator
from doctest import DocTestFinder, DocTestRunner
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import specdemo
from specdemo.decoding.events import text_of
from specdemo.models.loaded import load
from specdemo.models.presets import find_preset
from specdemo.racing.race import start
from specdemo.racing.request import SPECULATIVE
from specdemo.servers.address import Address
from specdemo.settings import Settings

PACKAGE = Path(specdemo.__file__).parent
EXAMPLES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What an example need not import."""
    loaded = load(find_preset("nanogpt-shakespeare"), device="cpu")
    more = {"find_preset": find_preset, "start": start, "text_of": text_of, "Settings": Settings}
    yield {"loaded": loaded, "SPECULATIVE": SPECULATIVE, **more}
    loaded.release()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_file_are_true(
    name: str, names: dict[str, Any], drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, read = Address.read(drafting[1]), Address.read
    monkeypatch.setattr(Address, "read", lambda text: server if text == "http://127.0.0.1:8080" else read(text))
    runner = DocTestRunner()
    for test in DocTestFinder().find(import_module(name), extraglobs=names):
        runner.run(test)
    assert runner.tries
    assert not runner.failures

"""Settings are one table: a made-up one is written in one line, and is on the command line, in the form, in links, in
the API and in traces. This module, run with `words` or `page`, checks it in a process that has that line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ..sentences import refuses, tells

PROJECT = Path(__file__).parents[2]
LINE = '    patience: float = setting(0.5, "patience", 0, 9, "How long a guess may take.")\n'
TOO_MUCH = "patience 0 9, 9.5."


@pytest.mark.slow
@pytest.mark.parametrize("where", ["words", pytest.param("page", marks=pytest.mark.slow)])
def test_a_setting_of_one_line_is_everywhere(where: str) -> None:
    command, environment = [sys.executable, "-m", __name__, where], {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def add_line() -> None:
    """Import `specdemo.settings` with one line more, before anything else does."""
    path = PROJECT / "specdemo" / "settings.py"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(next(place for place, line in enumerate(lines) if line.startswith("    stop: ")) + 1, LINE)
    settings = sys.modules["specdemo.settings"] = ModuleType("specdemo.settings")
    exec(compile("".join(lines), path, "exec"), settings.__dict__)


def check_command_line() -> None:
    from typer.testing import CliRunner

    from specdemo.cli.main import app
    from specdemo.cli.options import DecodingOptions
    from specdemo.models.presets import DEFAULT_PRESET, find_preset

    said = CliRunner().invoke(app, ["generate", "--help"], terminal_width=120).stdout.split("--patience ")[1]
    assert " ".join(said.split()).startswith("<float> How long a guess may take. [default: 0.5]")
    refused = CliRunner().invoke(app, ["generate", "--prompt", "one", "--patience", "9.5"]).exception
    assert tells(refused, TOO_MUCH)
    asked = DecodingOptions(patience=3.0).request("one", find_preset(DEFAULT_PRESET))
    assert asked.as_dict()["settings"]["patience"] == 3.0


def check_reading() -> None:
    from specdemo.errors import BadInput
    from specdemo.racing.request import read_request
    from specdemo.racing.trace import request_of
    from specdemo.ui.race.form import FIELDS

    assert "patience" in FIELDS
    asked: dict[str, Any] = {"prompt": "one", "preset": "one", "drafter": "none"}
    given = read_request(**asked, patience=3).as_dict()
    assert given["settings"]["patience"] == 3
    assert request_of(given).as_dict() == given
    del given["settings"]["patience"]  # an older trace
    assert request_of(given).as_dict()["settings"]["patience"] == 0.5
    for refused in (
        lambda: read_request(**asked, patience=9.5),
        lambda: request_of({**given, "settings": {"patience": 9.5}}),
    ):
        with refuses(BadInput, TOO_MUCH):
            refused()


def check_page() -> None:
    from gradio_client import Client
    from playwright.sync_api import expect, sync_playwright

    from tools.page import executable

    from ..fakes.engine import Script
    from ..ui.browser import launched, more_settings, run, served, shared

    expect.set_options(timeout=20_000)
    script = Script()
    with served(script) as url, sync_playwright() as playwright:
        Client(url, verbose=False, analytics_enabled=False).predict("one", patience=2, api_name="/compare")
        assert asdict(script.settings[-1])["patience"] == 2
        if executable() is None:
            return
        with launched(playwright) as browser:
            page = browser.new_page(permissions=["clipboard-read", "clipboard-write"])
            page.goto(f"{url}?prompt=one+two&patience=3")
            more_settings(page)
            expect(page.locator("#patience input")).to_have_value("3")
            assert "Patience" in (page.locator("#patience").text_content() or "")
            run(page)
            shared(page, "link")
            query = parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)
    assert query["patience"] == ["3"]
    assert asdict(script.settings[-1])["patience"] == 3


if __name__ == "__main__":
    add_line()
    if sys.argv[1] == "page":
        check_page()
    else:
        check_command_line()
        check_reading()

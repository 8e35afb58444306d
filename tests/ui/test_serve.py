"""`python -m specdemo serve`, launched as a person would, on a preset that needs no download."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from specdemo.types import BadInput
from specdemo.ui.engine import Engine
from specdemo.ui.serve import read_logins

ROOT = Path(__file__).resolve().parents[2]
PRESET = "nanogpt-shakespeare"
STARTING_SECONDS = 60.0


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of a server of its own, once it answers."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "specdemo", "serve", "--preset", PRESET, "--port", str(port), *options]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTING_SECONDS
    try:
        while True:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "begin_loading", lambda engine, preset: None)


@pytest.mark.usefixtures("loads_nothing")
def test_where_others_reach_the_page_without_a_login_nobody_names_models(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[gr.Blocks, dict[str, Any]]] = []
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: served.append((page, options)))
    for host, named in (("127.0.0.1", True), ("0.0.0.0", False)):
        assert command("serve", "--preset", PRESET, "--host", host)[0] == 0
        page, options = served.pop()
        ids = {str(getattr(block, "elem_id", None)) for block in page.blocks.values()}
        assert (options["server_name"], options["auth"]) == (host, None)
        assert "preset" in ids
        assert any(name.startswith("own-") for name in ids) == named
        targets = [page.blocks.get(at) for fn in page.fns.values() for at, _ in fn.targets]
        wired = {str(getattr(target, "elem_id", None)) for target in targets}
        assert any(name.startswith("own-") for name in wired) == named


def test_it_opens_with_the_preset_that_was_asked_for_and_only_those_who_log_in_see_it(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("me:a:secret\n\nyou:another\n")
    with serving("--host", "0.0.0.0", "--auth", str(file)) as url, httpx.Client(base_url=url) as visitor:
        assert visitor.get("/config").status_code == 401
        assert visitor.post("/login", data={"username": "me", "password": "another"}).status_code == 400
        assert visitor.post("/login", data={"username": "me", "password": "a:secret"}).status_code == 200
        parts = {part["props"].get("elem_id"): part["props"] for part in visitor.get("/config").json()["components"]}
        assert parts["preset"]["value"] == PRESET
        assert "own-target" in parts


@pytest.mark.usefixtures("loads_nothing")
def test_a_port_that_is_taken_is_refused_in_a_sentence(command: Any) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, said = command("serve", "--preset", PRESET, "--port", str(port))
    assert (status, len(said.splitlines())) == (2, 1), said
    assert f"port {port} of 127.0.0.1 is taken" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "less than or equal to 65535"),
        (["--preset", "nobody"], "There is no preset called 'nobody'"),
        (["--auth", "/nowhere/logins"], "/nowhere/logins cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(options: list[str], words: str, command: Any) -> None:
    status, _, said = command("serve", *options)
    assert (status, len(said.splitlines())) == (2, 1)
    assert words in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"me:secret\nonly-a-name\n", "Line 2 of .* is not of the form user:password"),
        (b":secret\n", "Line 1 of"),
        (b"me:\n", "Line 1 of"),
        (b"\n\n", "names nobody"),
        (b"\xff\xfe:secret", "cannot be read"),
    ],
)
def test_a_file_of_logins_that_is_none_is_refused_without_its_passwords(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "logins"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=words) as refusal:
        read_logins(file)
    assert not re.search("secret|only-a-name", str(refusal.value))

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

import httpx
import pytest

from specdemo.types import BadInput
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


def test_the_page_opens_with_the_preset_that_was_asked_for() -> None:
    with serving() as url:
        found = httpx.get(f"{url}/config").json()["components"]
        chosen = [part["props"]["value"] for part in found if part["props"].get("elem_id") == "preset"]
        assert chosen == [PRESET]
        assert "own-target" in ids_of(url)


def ids_of(url: str) -> set[str]:
    return {part["props"].get("elem_id") for part in httpx.get(f"{url}/config").json()["components"]}


def test_where_others_reach_the_page_without_a_login_nobody_names_models() -> None:
    with serving("--host", "0.0.0.0") as url:
        assert "preset" in ids_of(url)
        assert not any(str(name).startswith("own-") for name in ids_of(url))
        assert not [part for part in httpx.get(f"{url}/config").json()["dependencies"] if "own" in str(part["targets"])]


def test_with_a_file_of_logins_only_those_who_log_in_see_the_page(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("me:a:secret\n\nyou:another\n")
    with serving("--auth", str(file)) as url, httpx.Client(base_url=url) as visitor:
        assert visitor.get("/config").status_code == 401
        assert visitor.post("/login", data={"username": "me", "password": "another"}).status_code == 400
        assert visitor.post("/login", data={"username": "me", "password": "a:secret"}).status_code == 200
        assert visitor.get("/config").status_code == 200


def test_a_port_that_is_taken_is_refused_in_a_sentence() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "specdemo", "serve", "--preset", PRESET, "--port", str(port)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=STARTING_SECONDS, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"port {port} of 127.0.0.1 is taken" in done.stderr


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

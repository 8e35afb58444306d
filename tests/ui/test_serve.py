"""`specdemo serve`, on a preset that needs no download."""

from __future__ import annotations

import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from specdemo.types import BadInput
from specdemo.ui.engine import Engine
from specdemo.ui.serve import read_logins

from ..sentences import refuses, tells

PRESET = "nanogpt-shakespeare"


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


@pytest.mark.usefixtures("loads_nothing")
def test_it_opens_with_the_preset_that_was_asked_for_and_only_those_who_log_in_see_it(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "logins"
    file.write_text("me:a:secret\n\nyou:another\n")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch, served = gr.Blocks.launch, list[gr.Blocks]()

    def begin(page: gr.Blocks, **options: Any) -> None:
        served.append(page)
        launch(page, prevent_thread_lock=True, **options)

    monkeypatch.setattr(gr.Blocks, "launch", begin)
    options = ["--preset", PRESET, "--host", "0.0.0.0", "--port", str(port), "--auth", str(file)]
    assert command("serve", *options)[0] == 0
    with closing(served[0]), httpx.Client(base_url=f"http://127.0.0.1:{port}") as visitor:
        assert visitor.get("/config").status_code == 401
        assert visitor.post("/login", data={"username": "me", "password": "another"}).status_code == 400
        assert visitor.post("/login", data={"username": "me", "password": "a:secret"}).status_code == 200
        parts = {part["props"].get("elem_id"): part["props"] for part in visitor.get("/config").json()["components"]}
        assert parts["preset"]["value"] == PRESET
        assert "own-target" in parts


@pytest.mark.slow
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
        (["--port", "70000"], "65535"),
        (["--preset", "nobody"], "preset 'nobody'"),
        (["--auth", "/nowhere/logins"], "/nowhere/logins"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(options: list[str], words: str, command: Any) -> None:
    status, _, said = command("serve", *options)
    assert (status, len(said.splitlines())) == (2, 1)
    assert tells(said, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"me:secret\nonly-a-name\n", "2 user:password"),
        (b":secret\n", "Line 1"),
        (b"me:\n", "Line 1"),
        (b"\n\n", "nobody"),
        (b"\xff\xfe:secret", "logins read"),
    ],
)
def test_a_file_of_logins_that_is_none_is_refused_without_its_passwords(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "logins"
    file.write_bytes(content)
    with refuses(BadInput, words) as refusal:
        read_logins(file)
    assert not re.search("secret|only-a-name", str(refusal.value))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "weights"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_models_are_loaded_with_the_weights_that_were_asked_for(
    command: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, weights: str
) -> None:
    """The page's engine loads the preset while the page is served."""
    begun: list[Engine] = []
    monkeypatch.setattr(Engine, "begin_loading", lambda engine, preset: begun.append(engine))
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: None)
    assert command("serve", "--preset", PRESET, "--weights", dtype)[0] == 0
    (engine,) = begun
    loaded = engine.backend.load(engine.presets[PRESET], lambda share, words: None, None)
    assert loaded.environment()["weights_dtype"] == weights
    loaded.release()


def test_a_type_of_weights_that_does_not_exist_is_refused(command: Any) -> None:
    status, _, said = command("serve", "--weights", "int3")
    assert status == 2
    assert tells(said, "'int3' float32")

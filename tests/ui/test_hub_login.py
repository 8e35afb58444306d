"""The login by the hub: whose token asks for a model, and that nothing keeps it. The hub itself is a stand-in."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gradio_client import Client

from specdemo.models import on_hub, preset_models
from specdemo.models.hub_token import asking_with, hub_token, login_is_offered
from specdemo.models.presets import load_presets
from specdemo.models.source import Hub
from specdemo.models.store import LoadError, ignore
from specdemo.racing.trace import PLAIN
from specdemo.ui import hub_login
from specdemo.ui.page import build_page
from tests.harness.ui_classes import Runs

from ..fakes.engine import PRESETS, PROMPTS, Script
from ..fakes.hub import SECRET, Denied, TheHub
from ..sentences import refuses
from .browser import served_engine

pytest.importorskip("itsdangerous")  # of gradio[oauth]
pytestmark = pytest.mark.filterwarnings("ignore:Gradio does not support OAuth")
OF_A_SPACE = {"SPACE_ID": "me/mine", "OAUTH_CLIENT_ID": "a", "OAUTH_CLIENT_SECRET": "b"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> TheHub:
    hub = TheHub()
    monkeypatch.setattr(on_hub, "HfApi", lambda token: hub)
    monkeypatch.setattr(on_hub, "get_session", lambda: hub)
    return hub


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, hub: TheHub) -> Iterator[tuple[str, Script, Runs]]:
    """A page with a preset whose model is gated, and Gradio's own routes of a login that asks nobody."""
    info: dict[str, Any] = {
        "access_token": SECRET,
        "scope": "",
        "expires_at": time.time() + 3600,
        "userinfo": {"preferred_username": "me"},
    }
    monkeypatch.setattr("gradio.oauth._get_mocked_oauth_info", lambda: {**info})
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    script, runs = Script(), Runs()
    script.used = script.engine(hub_login.visitor_token)
    for name in ("gated", "open"):
        script.used.add(replace(PRESETS["other"], name=name, target=Hub(f"owner/{name}")), "me")
    script.begin()
    with served_engine(script.used, PROMPTS, runs=runs, login=True) as url:
        yield url, script, runs


def visitor(url: str, logged_in: bool) -> Client:
    headers = {}
    if logged_in:
        answer = httpx.get(f"{url}login/callback", follow_redirects=False)
        headers["cookie"] = answer.headers["set-cookie"].partition(";")[0]
    return Client(url, headers=headers, verbose=False, analytics_enabled=False)


def compare(client: Client, preset: str) -> Any:
    return client.predict(prompt="one two three", preset=preset, max_new_tokens=4, api_name="/compare")


def holds(thing: Any, text: str, seen: set[int], depth: int = 8) -> bool:
    """Whether a text stands anywhere in what an object of ours holds."""
    if isinstance(thing, (str, bytes)):
        return text in (thing if isinstance(thing, str) else thing.decode(errors="replace"))
    if id(thing) in seen or depth == 0:
        return False
    seen.add(id(thing))
    inside: list[Any] = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    inside += [*getattr(thing, "__dict__", {}).values()]
    inside += [*thing.items()] if isinstance(thing, dict) else []
    inside += [*thing] if isinstance(thing, (list, tuple, set, frozenset)) else []
    return any(holds(one, text, seen, depth - 1) for one in inside)


def test_a_gated_model_is_asked_for_with_the_visitors_token_which_nothing_keeps(
    site: tuple[str, Script, Runs],
    hub: TheHub,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    url, script, runs = site
    caplog.set_level(logging.DEBUG)
    mine = visitor(url, logged_in=True)
    answer = compare(mine, "gated")
    assert answer[PLAIN]["stats"]["tokens"] == 4
    assert script.tokens == [None, SECRET]  # the first is the load at the start
    assert hub.asked == [("owner/gated", SECRET)]
    assert hub_token() is None
    run: Any = next(reversed(runs._runs.values()))
    for place in (script.used, runs, run.messages, run.trace(), answer, script.loads):
        assert not holds(place, SECRET, set())
    assert holds({"a": [SECRET]}, SECRET, set())  # the search does find it
    written = "".join(record.getMessage() + str(record.exc_text) for record in caplog.records)
    assert SECRET not in written + "".join(capfd.readouterr())
    assert SECRET not in httpx.get(f"{url}config").text + httpx.get(f"{url}health").text


@pytest.mark.slow
def test_others_do_not_race_on_what_a_visitor_may_read(site: tuple[str, Script, Runs], hub: TheHub) -> None:
    url, script, _ = site
    mine, other = visitor(url, logged_in=True), visitor(url, logged_in=False)
    compare(mine, "gated")
    with refuses(Exception, "owner/gated agreement"):
        compare(other, "gated")
    assert script.ended_races == 1
    assert compare(other, "scripted")[PLAIN]["stats"]["tokens"] == 4
    assert compare(other, "scripted")[PLAIN]["stats"]["tokens"] == 4
    assert hub.asked == [("owner/gated", SECRET), ("owner/gated", None)]  # nobody asks for what is open
    compare(mine, "gated")
    assert script.tokens == [None, SECRET, None, SECRET]


@pytest.mark.slow
def test_the_hub_is_asked_for_what_is_gated_only_and_not_again_for_minutes(
    site: tuple[str, Script, Runs], hub: TheHub
) -> None:
    url = site[0]
    mine, other = visitor(url, logged_in=True), visitor(url, logged_in=False)
    compare(mine, "open")
    compare(other, "open")
    assert hub.asked == []
    compare(mine, "gated")
    compare(mine, "gated")
    assert hub.asked == [("owner/gated", SECRET)]


def test_what_the_hub_does_not_tell_of_counts_as_gated(monkeypatch: pytest.MonkeyPatch, hub: TheHub) -> None:
    assert [on_hub.is_open(f"owner/{name}") for name in ("open", "gated")] == [True, False]
    monkeypatch.setattr(hub, "model_info", None)
    assert not on_hub.is_open("owner/open")


@pytest.mark.parametrize("status", [429, 503])
def test_where_the_hub_cannot_be_asked_nobody_may_read_what_others_may(hub: TheHub, status: int) -> None:
    hub.status = status
    with asking_with(SECRET), refuses(LoadError, "a/b hub"):
        on_hub.check_access("a/b")


@pytest.mark.parametrize("login", [False, True])
def test_with_a_login_what_is_kept_here_serves_nobody_while_the_hub_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: bool
) -> None:
    """It may be gated, and have been fetched by another visitor."""
    config = tmp_path / "snapshots" / ("0" * 40) / "config.json"

    def fails(*_: Any, **__: Any) -> Any:
        raise httpx.HTTPError("429 Too Many Requests")

    monkeypatch.setattr(on_hub, "get_hf_file_metadata", fails)
    monkeypatch.setattr(on_hub, "get_session", fails)
    monkeypatch.setattr(on_hub, "hf_hub_download", lambda *_, **__: str(config))
    for name, value in OF_A_SPACE.items() if login else ():
        monkeypatch.setenv(name, value)
    asked = [lambda: on_hub.commit_of("a/b", None), lambda: on_hub.download("a/b", "a/b", None, "x.gguf", ignore)]
    for ask, found in zip(asked, [("0" * 40, True), str(config)], strict=True):
        if login:
            with refuses(LoadError, "a/b hub"):
                ask()
        else:
            assert ask() == found


def test_a_login_that_is_over_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def token_of(session: dict[str, Any]) -> str | None:
        request = SimpleNamespace(request=SimpleNamespace(scope={"session": session}))
        waiting = hub_login.LocalContext.request.set(request)
        try:
            return hub_login.visitor_token()
        finally:
            hub_login.LocalContext.request.reset(waiting)

    until = time.time()
    assert token_of({"oauth_info": {"access_token": SECRET, "expires_at": until + 60}}) == SECRET
    assert token_of({"oauth_info": {"access_token": SECRET, "expires_at": until - 60}}) is None
    assert token_of({}) is None
    assert hub_login.visitor_token() is None


def test_what_the_hub_is_asked_with_is_not_in_a_loaded_model() -> None:
    target = load_presets()[0]["nanogpt-shakespeare"].target
    with asking_with(SECRET):
        import torch

        found = preset_models.find_checkpoint(target, torch.float32, lambda *_: None)
        assert found.options["token"] == SECRET
    assert "token" not in found.options
    assert not holds(found, SECRET, set())
    assert SECRET not in str(found.tokenizer.init_kwargs) + found.config.to_json_string()


@pytest.mark.parametrize("missing", ["", *OF_A_SPACE])
def test_a_login_is_offered_where_a_space_has_one(missing: str) -> None:
    assert login_is_offered({name: value for name, value in OF_A_SPACE.items() if name != missing}) == (not missing)


def test_elsewhere_the_page_has_no_button() -> None:
    assert not build_page(Script().engine(), Runs(), PROMPTS).expects_oauth


def test_the_sentence_says_how_to_log_in_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdemo.models.errors import wrap_load_errors

    for variable, words in (("", "`hf auth login`"), ("a", "this page")):
        monkeypatch.setenv("OAUTH_CLIENT_ID", variable)
        with refuses(Exception, words), wrap_load_errors("owner/gated"):
            raise Denied

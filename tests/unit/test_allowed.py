"""What the owner of a Space allows."""

from __future__ import annotations

import pytest

from specdemo.system.allowed import allowed


def test_on_ones_own_machine_all_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    monkeypatch.setenv("SPECDEMO_ALLOW", "a/b")
    assert allowed(servers=True) is allowed(servers=False) is None


@pytest.mark.parametrize("text", ["a/b, http://one:1,c/d https://two", "a/b\nhttp://one:1 c/d,,https://two "])
def test_models_and_servers_are_told_apart(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/space")
    monkeypatch.setenv("SPECDEMO_ALLOW", text)
    assert allowed(servers=False) == ("a/b", "c/d")
    assert allowed(servers=True) == ("http://one:1", "https://two")
    monkeypatch.delenv("SPECDEMO_ALLOW")
    assert allowed(servers=False) == allowed(servers=True) == ()

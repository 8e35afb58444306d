"""Who may use a preset that a visitor's login has loaded: the hub is asked for what not everybody may read."""

from __future__ import annotations

import time
from hashlib import sha256

from ..models.hub_token import asking_with
from ..models.presets import Preset
from ..system.imports import import_quickly

HOLDS_SECONDS = 300.0  # the hub's answer that a visitor may read a model


class Access:
    """Keeps what the loaded preset takes from the hub that not everybody may read, and who may, by hashes of tokens."""

    def __init__(self) -> None:
        self._closed: dict[str, list[str]] = {}
        self._may_read: dict[tuple[bytes, str], float] = {}  # until when

    def loaded(self, preset: Preset, token: str | None) -> None:
        """A preset was loaded, with a visitor's token or None."""
        sources = preset.target, preset.draft_model, *preset.heads.values()
        repos = dict.fromkeys(repo for source in sources if token and (repo := getattr(source, "repo", None)))
        closed = [repo for repo in repos if not import_quickly("specdemo.models.on_hub").is_open(repo)]
        self._closed = {preset.name: closed}

    def check(self, preset: str, token: str | None) -> None:
        """
        Raises:
            LoadError: a visitor may not read a model of the loaded preset, or the hub does not answer.
        """
        visitor, now = sha256((token or "").encode()).digest(), time.monotonic()
        for repo in self._closed.get(preset, ()):
            if self._may_read.get((visitor, repo), 0.0) < now:
                with asking_with(token):
                    import_quickly("specdemo.models.on_hub").check_access(repo)
                known = {key: until for key, until in self._may_read.items() if until > now}
                self._may_read = {**known, (visitor, repo): now + HOLDS_SECONDS}

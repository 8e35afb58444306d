"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdemo.models import Loaded, load

from .checkpoints import full_preset


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A tiny preset that every drafter can be used with."""
    loaded = load(full_preset(tmp_path_factory.mktemp("full")), "float32", "cpu")
    yield loaded
    loaded.release()

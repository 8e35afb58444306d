"""Lists and deletes what was fetched and is kept on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ..errors import BadInput
from ..system.folders import cache_folder
from .store import LEDGER, size_of

KEPT = (".lock", ".so", ".trial", Path(LEDGER).suffix)  # empty, compiled in a second, or a few bytes


@dataclass(frozen=True, slots=True)
class Download:
    """A model or another download at `path`, `size` in bytes. Other programs may use the hub's cache too."""

    name: str
    size: int
    path: Path
    of_hub: bool


def list_cached() -> list[Download]:
    """All downloads: what was converted or comes from the package index, then what comes from the hub."""
    return [*_own(), *_of_hub()]


def delete_cached(name: str) -> Download:
    """Delete a download by its name in `list_cached`."""
    entries = {entry.name: entry for entry in list_cached()}
    if name not in entries:
        raise BadInput(f"Nothing called {name!r} was fetched. There is: {', '.join(entries) or 'nothing'}.")
    entry = entries[name]
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink()
    return entry


def _own() -> Iterator[Download]:
    folder = cache_folder()
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.suffix not in KEPT:
            yield Download(path.name, size_of(path) if path.is_dir() else path.stat().st_size, path, of_hub=False)


def _of_hub() -> Iterator[Download]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            yield Download(repo.repo_id, repo.size_on_disk, Path(repo.repo_path), of_hub=True)

"""The Hugging Face hub: commits, files and facts of a repository. Errors are sentences."""

from __future__ import annotations

import os
from contextlib import suppress
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm
from transformers.utils.hub import extract_commit_hash

from .errors import wrap_load_errors
from .gguf import Header, read_header
from .hub_token import hub_token, login_is_offered
from .store import LoadError, Progress, report_bytes

HUB_SECONDS = 10  # the time limit of the one question whether a model exists
HEADER_BYTES = 2**25  # the part of a GGUF file that is fetched for its header
CONFIG = "config.json"
NOT_ASKED = "The hub could not be asked whether you may read {}. Try again in a minute."


def commit_of(repo: str, revision: str | None) -> tuple[str | None, bool]:
    """The present commit of a revision (None if the repository is a folder), and whether the hub is out of reach.

    The hub is asked once with a timeout, because its library would retry for half a minute. If it cannot be reached,
    earlier downloads are used, except where visitors log in: they may be of what another one may read.
    """
    if os.path.isdir(repo):
        return None, False
    revision = revision or "main"
    with wrap_load_errors(repo):
        try:
            get_hf_file_metadata(hf_hub_url(repo, CONFIG, revision=revision), timeout=HUB_SECONDS, token=hub_token())
            reached = True
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
            raise
        except Exception:  # networks fail in many ways
            reached = False
        if not reached and login_is_offered(os.environ):
            raise LoadError(NOT_ASKED.format(repo))
        config = hf_hub_download(repo, CONFIG, revision=revision, local_files_only=not reached, token=hub_token())
    return extract_commit_hash(config, None), not reached


def config_of(repo: str, revision: str | None) -> Path:
    """The path of a repository's configuration, in a folder named after its commit."""
    commit, unreached = commit_of(repo, revision)
    with wrap_load_errors(repo):
        config = file_of(repo, commit, CONFIG, local_files_only=unreached)
    assert config is not None, "commit_of has fetched it"
    return config


def file_of(name_or_path: str, revision: str | None, name: str, **options: Any) -> Path | None:
    """The path of a file in a folder or repository, downloaded if needed; None if it does not exist."""
    if os.path.isdir(name_or_path):
        path = Path(name_or_path) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name_or_path, name, revision=revision, token=hub_token(), **options))
    except LocalEntryNotFoundError:  # a subclass of the next error: the hub cannot be reached
        raise
    except EntryNotFoundError:
        return None


def download(what: object, repo: str, revision: str | None, file: str, progress: Progress) -> str:
    """The path of a file in a repository, downloaded if needed.

    Raises:
        LoadError: it cannot be downloaded.
    """
    if login_is_offered(os.environ):
        check_access(repo)
    with wrap_load_errors(what):
        return hf_hub_download(
            repo, file, revision=revision, token=hub_token(), tqdm_class=download_bar(what, progress)
        )


def download_bar(what: object, progress: Progress) -> type[tqdm]:
    """A progress bar for the hub's downloads that reports to `progress` instead of the terminal."""

    class Bar(tqdm):
        monitor_interval = 0  # no thread that redraws the bar

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self.unit == "B" and self.total:  # other bars count files
                report_bytes(progress, what, self.n, self.total)
            return drawn

    return Bar


def info_of(repo: str, revision: str | None) -> Any:
    """What the hub tells of a repository."""
    with wrap_load_errors(repo):
        return HfApi(token=hub_token()).model_info(repo, revision=revision, files_metadata=True, timeout=HUB_SECONDS)


def check_access(repo: str) -> None:
    """Ask the hub whether whoever asks may read a repository.

    Raises:
        LoadError: not so, or the hub does not answer.
    """
    with wrap_load_errors(repo):
        try:
            url, headers = f"{ENDPOINT}/api/models/{repo}/auth-check", build_hf_headers(token=hub_token())
            hf_raise_for_status(get_session().get(url, headers=headers, timeout=HUB_SECONDS))
        except (RepositoryNotFoundError, HFValidationError):  # or gated, which is a kind of the first
            raise
        except Exception as error:
            raise LoadError(NOT_ASKED.format(repo)) from error


def is_open(repo: str) -> bool:
    """Whether anybody may read a repository. One that the hub does not tell of counts as closed."""
    with suppress(Exception):  # networks fail in many ways
        return not HfApi(token=False).model_info(repo, timeout=HUB_SECONDS).gated
    return False


def sizes_in(info: Any) -> dict[str, int | None]:
    """The bytes of the files of a repository, by their names."""
    return {one.rfilename: one.size for one in info.siblings or ()}


def header_of(repo: str, revision: str | None, file: str) -> Header:
    """The header of a GGUF file in a repository.

    Raises:
        LoadError: access to the file is denied.
    """
    url = hf_hub_url(repo, file, revision=revision)
    headers = {**build_hf_headers(token=hub_token()), "Range": f"bytes=0-{HEADER_BYTES - 1}"}
    with get_session().stream("GET", url, headers=headers, timeout=HUB_SECONDS, follow_redirects=True) as answer:
        if answer.status_code >= 400:
            raise LoadError(f"There is no file {file} in {repo} on the hub, or it may not be read.")
        content = b""
        for block in answer.iter_bytes():
            content += block
            if len(content) >= HEADER_BYTES:
                break
    return read_header(BytesIO(content))

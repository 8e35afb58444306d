"""Sentences about what went wrong when a model was loaded or run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import BadInput, NotFinite
from ..formats import reason
from .store import LoadError, is_disk_full


def explain(error: BaseException) -> str | None:
    """A sentence about a failure that a person can do something about; None for a bug."""
    if isinstance(error, (BadInput, LoadError, NotFinite)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "The GPU has too little free memory: lower max new tokens, shorten the prompt, choose a smaller preset, "
            "or run on the CPU."
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "not enough memory" in str(error):
        return "The computer has too little free memory: lower max new tokens or choose a smaller preset."
    if is_disk_full(error):
        return "The disk is full: free some space and try again."
    return None


@contextmanager
def wrap_load_errors(source: object) -> Iterator[None]:
    """Turn errors within this context into a `LoadError` whose message is a sentence about `source`.

    Raises:
        LoadError: anything but bad input went wrong.
    """
    try:
        yield
    except (BadInput, LoadError):
        raise
    except Exception as error:
        sentence = explain(error) or _hub_trouble(source, error)
        if sentence is None and "trust_remote_code" in str(error):
            sentence = f"{source} needs code from its own repository, which is never run here."
        if sentence is None:
            sentence = f"{source} cannot be loaded: {reason(error)}."
        raise LoadError(sentence) from error


def _hub_trouble(source: object, error: BaseException) -> str | None:
    log_in = "sign in on this page" if os.environ.get("OAUTH_CLIENT_ID") else "run `hf auth login`"
    for cause in causes(error):
        if isinstance(cause, GatedRepoError):
            return (
                f"{source} asks for an agreement first: accept its licence on its page on the hub, "
                f"{log_in}, and try again."
            )
        if isinstance(cause, (RepositoryNotFoundError, HFValidationError)):
            return f"There is no model {source} on the hub, or it is private: then {log_in} first."
        if isinstance(cause, RevisionNotFoundError):
            return f"{source} has no such revision on the hub."
        if isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)):
            return (
                f"{source} could not be downloaded: the model hub cannot be reached. Check the network and try again."
            )
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

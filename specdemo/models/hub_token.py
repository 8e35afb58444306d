"""The token for requests to the hub.

By default it is that of the hub's own library: of `hf auth login`, or of the variable `HF_TOKEN`. On a Space with a
login it is the visitor's, for the time of one load or request. The token is held in a context variable only, so nothing
stores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_token: ContextVar[str | None] = ContextVar("hub_token", default=None)


def login_is_offered(environment: Mapping[str, str]) -> bool:
    """Whether this is a Space that lets visitors log in: `hf_oauth: true` in the header of its README sets these."""
    return all(environment.get(name) for name in ("SPACE_ID", "OAUTH_CLIENT_ID", "OAUTH_CLIENT_SECRET"))


def hub_token() -> str | None:
    """The visitor's token; None stands for that of the library."""
    return _token.get()


@contextmanager
def asking_with(token: str | None) -> Iterator[None]:
    """Within this context the hub is asked with this token."""
    setting = _token.set(token)
    try:
        yield
    finally:
        _token.reset(setting)

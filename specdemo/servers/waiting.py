"""Connections that can be given up while a server says nothing, such as in a long prefill."""

from __future__ import annotations

import time
from typing import Any

import httpcore
import httpx

from ..system.progress import check_stopped

LOOK_SECONDS = 0.2  # between two looks at whether the work was stopped


class _Stream(httpcore.NetworkStream):
    """A connection whose reads wait in short turns."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises: Stopped: the work was stopped. httpcore.ReadTimeout: nothing came in `timeout` seconds."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            check_stopped()
            left = until - time.monotonic()
            try:
                return self._stream.read(max_bytes, max(0.001, min(LOOK_SECONDS, left)))
            except httpcore.ReadTimeout:
                if left <= LOOK_SECONDS:
                    raise

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def start_tls(self, *args: Any, **named: Any) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(*args, **named))


class _Backend(httpcore.SyncBackend):
    def connect_tcp(self, *args: Any, **named: Any) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(*args, **named))


class Transport(httpx.HTTPTransport):
    """The transport of httpx with such connections."""

    def __init__(self) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        self._pool = httpcore.ConnectionPool(context, max_connections=None, network_backend=_Backend())

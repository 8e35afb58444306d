"""A network that can be cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Network:
    """What lies between a browser and the server: while it is `cut`, no heartbeat passes, and those there were end."""

    def __init__(self, server: str) -> None:
        self.server = urlsplit(server)
        self.cut = False
        self.beats: set[socket.socket] = set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection((str(self.server.hostname), int(self.server.port or 80)))
                for pipe in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pipe, args=pipe, daemon=True).start()

    def _pipe(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if asks and data.startswith(b"GET /gradio_api/heartbeat/"):
                    self.beats.add(source)
                    if self.cut:
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        self.cut = True
        for beat in self.beats:
            with suppress(OSError):
                beat.shutdown(socket.SHUT_RDWR)

"""Which servers may be asked, and what their names resolve to.

On one's own machine every address may be asked. A public Space must not become a proxy into the network that it runs
in: there only the addresses in `SPECDEMO_ALLOW` may be asked, see `system.allowed`. Each name is resolved once and the
result kept, so it does no harm if the name leads elsewhere later.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import BadInput
from ..system.allowed import allowed

PORTS = {"http": 80, "https": 443}
MAX_ADDRESS = 300  # characters
_pinned: dict[tuple[str, int], str] = {}
_pinning = threading.Lock()


@dataclass(frozen=True, slots=True)
class Address:
    """A server as a person names it; `pinned` is the IP address of its name, if that is kept."""

    scheme: str
    host: str
    port: int
    pinned: str | None = None

    @classmethod
    def read(cls, text: str) -> Address:
        """Read an address such as http://127.0.0.1:8080, which may end in `/v1`."""
        wrong = "A server's address looks like http://127.0.0.1:8080"
        if len(text) > MAX_ADDRESS:
            raise BadInput(f"{wrong}: at most {MAX_ADDRESS} characters.")
        try:
            parts = urlsplit(text.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            raise BadInput(f"{wrong}.") from None
        if parts.username is not None or parts.password is not None:
            raise BadInput(
                f"{wrong}: put the key in SPECDEMO_SERVER_KEY or SPECDEMO_BASELINE_KEY, not here."
            )  # nor is it shown
        if parts.scheme not in PORTS or not host or not _is_name(host) or parts.path.rstrip("/") not in ("", "/v1"):
            raise BadInput(f"{wrong}.")
        if parts.query or parts.fragment:
            raise BadInput(f"{wrong}, with nothing after the port.")
        address = cls(parts.scheme, host, PORTS[parts.scheme] if port is None else port)
        names = allowed(servers=True)
        return address if names is None else address.pinned_if_in(names)

    def pinned_if_in(self, names: Sequence[str]) -> Address:
        """This address with its name resolved for good."""
        entries = (entry.rstrip("/").lower() for entry in names)
        if str(self) not in {entry if _has_port(entry) else f"{entry}:{PORTS.get(self.scheme)}" for entry in entries}:
            raise BadInput(
                "This Space asks only the servers that its owner allows, and this address is not among them."
            )
        with _pinning:
            where = self.host, self.port
            if where not in _pinned:
                _pinned[where] = self._resolved()
            return Address(self.scheme, self.host, self.port, _pinned[where])

    def _resolved(self) -> str:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            raise BadInput(f"There is no server called {self.host}.") from None
        ip = str(found[0][4][0])
        # An IP address says where it leads. The name of a server elsewhere must not lead into this network.
        if ip != self.host and self.host != "localhost" and not ipaddress.ip_address(ip.partition("%")[0]).is_global:
            raise BadInput(f"The name {self.host} leads into a private network, which this Space does not ask.")
        return ip

    def __str__(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    @property
    def netloc(self) -> str:
        """The address in the head of a request, without the default port."""
        return _bracketed(self.host) + (f":{self.port}" if self.port != PORTS[self.scheme] else "")

    @property
    def url(self) -> str:
        """Where requests go: to the pinned IP address if there is one."""
        return f"{self.scheme}://{_bracketed(self.pinned or self.host)}:{self.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_name(host: str) -> bool:
    return host.isascii() and all(c.isalnum() or c in "-._:%" for c in host)


def _has_port(entry: str) -> bool:
    try:
        return urlsplit(entry).port is not None
    except ValueError:
        return True  # not an address, so no address equals it

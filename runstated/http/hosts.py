"""Under which names the daemon may be asked over HTTP.

A page of another site reaches a local port under that site's name (DNS rebinding): so only names that are known to be
ours are answered. The port does not matter: it may be mapped, and a page cannot choose the name.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LOCAL = ("localhost", "127.0.0.1", "::1")
HANDSHAKE_STEPS_MAX = 10


class Hosts:
    """``bound``: the address that is listened on; ``more``: names that were configured or are in the certificate."""

    def __init__(self, bound: str, more: Iterable[str]) -> None:
        self._names = frozenset(name.lower().strip("[]").rstrip(".") for name in (*LOCAL, bound, *more) if name)
        self._any_address = bound in ("0.0.0.0", "::")

    def has(self, header: str) -> bool:
        """Whether a `Host` header names us."""
        name = _without_port(header.strip().lower())
        return name in self._names or (self._any_address and _is_address(name)) or self._has_wildcard(name)

    def _has_wildcard(self, name: str) -> bool:
        """A certificate may be one of `*.example.org`."""
        first, _, rest = name.partition(".")
        return bool(first and rest) and f"*.{rest}" in self._names

    def __str__(self) -> str:
        return ", ".join(sorted(self._names))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).rstrip(".")


def _is_address(name: str) -> bool:
    """Whether a host is spelt as an address: no name that somebody else could point at us."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def names_in(certificate: Path, key: Path) -> tuple[str, ...]:
    """The names that a certificate (PEM) is for; none of one that is not valid now, as its clients will say.

    The standard library tells the names of a peer's certificate only: so it is shown to ourselves, in memory.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is trusted by itself, whoever has signed it
    try:
        server.load_cert_chain(certificate, key)
        client.load_verify_locations(certificate)
        shown = _shown(server, client)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        log.warning("the names in the certificate %s cannot be read: %s", certificate, error)
        return ()
    return tuple(str(name) for _, name in shown.get("subjectAltName", ()))


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What the client sees of the server's certificate. Raises SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(HANDSHAKE_STEPS_MAX):
        is_done = True
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
        if is_done:
            return asking.getpeercert() or {}
    raise ssl.SSLError("the handshake does not end")

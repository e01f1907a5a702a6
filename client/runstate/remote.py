"""A daemon on another machine, or one reached by a port: TCP, with or without TLS.

TLS is spoken by a thread of its own, between the network and a pair of local sockets: what the rest of the client sees
is a plain socket, which one thread may read while another writes. An object of OpenSSL allows neither that nor a send
that does not block.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from . import errors, threads
from .autostart import DENIED, denied, not_an_address, unavailable

if TYPE_CHECKING:
    import ssl

CA_VARIABLE = "RUNSTATE_CA_FILE"
PROBE_S = 2.0  # to find out whether a port expects TLS
CHUNK_BYTES = 64 * 1024
KEEPALIVE_S, KEEPALIVE_PROBES = 15, 4  # a daemon that vanished without a word is found after a minute or so


def dial(address: str, deadline: float) -> socket.socket:
    """A connected socket. Raises ConfigError for an address that is none, UnavailableError."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise not_an_address(address)
    try:
        connected = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
    except OSError as error:
        if error.errno in DENIED:
            raise unavailable(denied(f"connecting to {address}", error, None)) from error
        raise unavailable(f"cannot connect to {address}: {error.strerror or error}") from error
    _keep_alive(connected)
    if parts.scheme == "tls":
        return _tunnel(connected, host, address)
    connected.settimeout(None)
    return connected


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a frame is a whole request: do not hold it back
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": KEEPALIVE_S, "TCP_KEEPINTVL": KEEPALIVE_S, "TCP_KEEPCNT": KEEPALIVE_PROBES}
    for name, value in values.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _tunnel(connected: socket.socket, host: str, address: str) -> socket.socket:
    """The local end of a TLS connection. Raises ConfigError when the daemon is not who it should be."""
    import ssl

    named = os.environ.get(CA_VARIABLE, "").strip() or None
    try:
        secured = ssl.create_default_context(cafile=named).wrap_socket(connected, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        connected.close()
        raise errors.ConfigError(
            f"the certificate of {address} is not trusted ({error.verify_message}): set {CA_VARIABLE} to the file of"
            " the authority that made it, or of the certificate itself"
        ) from error
    except OSError as error:
        connected.close()
        if named is not None and not os.path.exists(named):
            raise errors.ConfigError(f"{CA_VARIABLE}: the file {named} does not exist") from error
        raise unavailable(f"no TLS connection to {address}: {error.strerror or error}") from error
    secured.setblocking(False)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _open.add(secured)
    _open.add(theirs)
    why_not = threads.start(threading.Thread(target=_pump, args=(secured, theirs), name="runstate-tls", daemon=True))
    if why_not:
        for end in (secured, ours, theirs):
            end.close()
        raise unavailable(why_not)
    return ours


def speaks_tls(address: str) -> bool:
    """Whether a handshake succeeds there, whoever it is."""
    import ssl
    from urllib.parse import urlsplit

    parts = urlsplit(address)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PROBE_S) as plain:
            context.wrap_socket(plain, server_hostname=parts.hostname).close()
    except (OSError, ValueError):
        return False
    return True


def _pump(secured: ssl.SSLSocket, local: socket.socket) -> None:
    """Carries bytes both ways until either side ends."""
    try:
        out, back = bytearray(), bytearray()
        while _step(secured, local, out, back):
            poll = select.poll()
            poll.register(secured, (select.POLLIN if not back else 0) | (select.POLLOUT if out else 0))
            poll.register(local, (select.POLLIN if not out else 0) | (select.POLLOUT if back else 0))
            poll.poll()
    except (OSError, ValueError):
        pass  # the connection has ended; whoever reads the local end sees it
    finally:
        for end in (local, secured):
            end.close()


def _step(secured: ssl.SSLSocket, local: socket.socket, out: bytearray, back: bytearray) -> bool:
    """Moves what can be moved now; False when a side has ended."""
    import ssl

    while True:
        moved = False
        for source, held in ((local, out), (secured, back)):
            if not held:
                try:
                    data = source.recv(CHUNK_BYTES)
                    if not data:
                        return False
                    held += data
                    moved = True
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
        for target, held in ((secured, out), (local, back)):
            if held:
                try:
                    del held[: target.send(held)]
                    moved = True
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
        if not moved:
            return True


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forked() -> None:
    """A child must not keep the connection of its parent open."""
    for end in list(_open):
        socket.close(end.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

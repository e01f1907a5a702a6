"""Listening beyond the Unix socket: a TCP socket, its TLS, and what each accepted connection gets."""

import errno
import os
import resource
import socket
import ssl
from pathlib import Path

from runstated.settings import KEEPALIVE_PROBES, KEEPALIVE_S, LISTEN_BACKLOG, Endpoint


class CannotListen(Exception):
    """The address or the certificate cannot be used; the message is for the user."""


def bind(endpoint: Endpoint) -> socket.socket:
    """A listening socket: who connects from now on is served once the daemon is ready. Raises CannotListen."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(f"cannot listen on {endpoint}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        told = "another program listens there" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise CannotListen(f"cannot listen on {endpoint}: {told}") from error
    sock.setblocking(False)
    return sock


def bound_to(sock: socket.socket) -> Endpoint:
    """Where a socket is bound in fact: with the port that the kernel chose."""
    host, port, *_ = sock.getsockname()
    return Endpoint(host, port)


def tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server's side of TLS; None without a certificate. Raises CannotListen."""
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise CannotListen(f"cannot use the certificate {certificate} with the key {key}: {error}") from error
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal."""
    raise ValueError("the key is protected by a password; a daemon can only use one that is not")


def descriptors_left(sock: socket.socket) -> int:
    """How many descriptors are left above that of a socket just accepted: the kernel gives the lowest that is free."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - sock.fileno()


def keep_alive(sock: socket.socket) -> None:
    """Frames go out at once; a peer that has vanished is found."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * KEEPALIVE_PROBES * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""Accepts over TCP, for clients of the wire and of HTTP: a stranger, who has not shown a key, has no claim to a place.

    accepted --(TLS handshake)--> stranger --a good key--> known, one of its key's places
                                     +-- one stranger too many: who has been one for longest gives way

So whoever opens connections without a key takes places from others of that kind only, and one key does not take all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from runstated.settings import (
    HELLO_MS,
    REMOTE_CONNECTIONS_MAX,
    REMOTE_CONNECTIONS_OF_KEY_MAX,
    STRANGERS_MAX,
)

log = logging.getLogger(__name__)

ACCEPTED_IN_ONE_TURN = 64
QUIET_S = 1.0
PAUSE_S = 1.0  # without descriptors: until the next try
SHORT_OF_SOMETHING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Peer = tuple[Any, ...]  # an address; of IPv6 the host and the port are enough


class QuietLog:
    """What strangers make us say, at most one line a second: they must not push everything else out of the log."""

    def __init__(self, to: logging.Logger) -> None:
        self._to = to
        self._loop = asyncio.get_running_loop()
        self._quiet_until = 0.0
        self._unsaid = 0

    def warning(self, message: str, *arguments: object) -> None:
        now = self._loop.time()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last line of this kind)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + QUIET_S, 0
        self._to.warning(message + "%s", *arguments, more)


class Acceptor:
    """One listening socket. ``factory`` makes the protocol of a connection. All methods belong to the loop's thread."""

    def __init__(
        self, sock: socket.socket, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock = sock
        self._factory = factory
        self._tls = tls
        self._strangers: dict[Peer, asyncio.Task[asyncio.Transport]] = {}  # the longest first
        self._known: dict[Peer, str] = {}  # the key of each
        self._of_key: dict[str, int] = {}
        self._is_short = self._is_closed = False
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accepts nobody any more; the socket stays open. Handshakes under way end, connections stay."""
        self._is_closed = True
        for stranger in self._strangers.values():
            stranger.cancel()  # where it is in a handshake, that would hold up the drain
        self._loop.remove_reader(self.sock)

    def admit(self, peer: Peer, key: str) -> str | None:
        """The connection has shown a good key. None, or why there is no place for it."""
        peer = peer[:2]
        if peer in self._known:
            return None
        if len(self._known) >= REMOTE_CONNECTIONS_MAX:
            return f"there are {REMOTE_CONNECTIONS_MAX} connections already, which is the most this daemon serves"
        if self._of_key.get(key, 0) >= REMOTE_CONNECTIONS_OF_KEY_MAX:
            return f"the key {key} has {REMOTE_CONNECTIONS_OF_KEY_MAX} connections already, which is the most it may"
        self._strangers.pop(peer, None)
        self._known[peer] = key
        self._of_key[key] = self._of_key.get(key, 0) + 1
        return None

    def lost(self, peer: Peer) -> None:
        """The connection has ended."""
        peer = peer[:2]
        self._strangers.pop(peer, None)
        key = self._known.pop(peer, None)
        if key is not None:
            left = self._of_key.pop(key) - 1
            if left:
                self._of_key[key] = left

    # ------------------------------------------------------------------ accepting

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self.sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_IN_ONE_TURN):
            try:
                accepted, peer = self.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in SHORT_OF_SOMETHING:
                    self._pause(error)
                    return
                continue  # it has gone already
            accepted.setblocking(False)
            self._welcome(accepted, peer[:2])

    def _pause(self, error: OSError) -> None:
        if not self._is_short:
            log.warning("nobody can be accepted over TCP for a moment: %s", error.strerror)
        self._is_short = True
        self._loop.remove_reader(self.sock)
        self._loop.call_later(PAUSE_S, self._resume)

    def _welcome(self, accepted: socket.socket, peer: Peer) -> None:
        self._is_short = False
        while len(self._strangers) >= STRANGERS_MAX:
            longest = next(iter(self._strangers))
            _give_way(self._strangers.pop(longest))
        task = self._loop.create_task(self._connect(accepted))
        self._strangers[peer] = task
        task.add_done_callback(lambda task: self._connected(peer, accepted, task))

    async def _connect(self, accepted: socket.socket) -> asyncio.Transport:
        limit: dict[str, Any] = {} if self._tls is None else {"ssl_handshake_timeout": HELLO_MS / 1000}
        transport, _ = await self._loop.connect_accepted_socket(self._factory, accepted, ssl=self._tls, **limit)
        return transport

    def _connected(self, peer: Peer, accepted: socket.socket, task: asyncio.Task[asyncio.Transport]) -> None:
        """A handshake that failed is nobody's news: whoever has tried it sees it."""
        if task.cancelled() or task.exception() is not None:
            self._strangers.pop(peer, None)
            accepted.close()  # also of a task that was cancelled before it began


def _give_way(stranger: asyncio.Task[asyncio.Transport]) -> None:
    if not stranger.done():
        stranger.cancel()  # in its handshake
    elif not stranger.cancelled() and stranger.exception() is None:
        stranger.result().abort()

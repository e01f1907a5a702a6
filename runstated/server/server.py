"""Sockets: accept, frame, decode, hand over, encode. Knows no verb but those of the connection itself."""

import asyncio
import logging
import os
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from runstate import framing, wire
from runstated.domain.access import Access
from runstated.engine import faults
from runstated.engine.engine import Engine
from runstated.host import processes
from runstated.host.clock import Timer
from runstated.server import listening, overview
from runstated.server.accepting import Acceptor, QuietLog
from runstated.server.sessions import HelloRefused, Origin, Sessions, Transport
from runstated.settings import (
    CONNECTIONS_PER_PROCESS_MAX,
    DESCRIPTORS_KEPT,
    DESCRIPTORS_OWN,
    END_MS,
    FRAMES_PER_TURN,
    HELLO_BYTES_MAX,
    HELLO_MS,
    LISTEN_BACKLOG,
    LOOK_MS,
)

log = logging.getLogger(__name__)

BEHIND_BYTES = 1024 * 1024  # a client with more than this unread is not told of holds that it makes up
TOKENS_PER_FRAME = 4  # of a beat, that cost the daemon as much as another frame
UNSENT_BYTES_MAX = 64 * 1024 * 1024  # a client that does not read its replies is cut off here


class Server:
    """The listener of the Unix socket and, if it is wanted, of a TCP socket."""

    def __init__(self, engine: Engine, *, version: str, socket_path: str, inherited: tuple[str, ...] = ()) -> None:
        self.engine = engine
        self.sessions = Sessions(engine, version, os.getpid())
        self.connections: set[Connection] = set()
        self.connections_of: dict[int, int] = {}
        self.all_gone = asyncio.Event()
        self.may_serve: Callable[[], bool] = lambda: True  # asked before each new connection is served
        self._overview = overview.Overview(
            engine, self.sessions, version=version, socket_path=socket_path, inherited=inherited
        )
        self._servers: list[asyncio.Server] = []
        self.acceptor: Acceptor | None = None  # over TCP
        self.log_of_strangers = QuietLog(log)

    async def listen(
        self, sock: socket.socket, tcp: socket.socket | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Accepts on bound sockets, after the sessions of the daemon's last life have been looked at."""
        self.engine.overview(self._overview.complete)
        await self.sessions.restore(self.engine.known)
        loop = asyncio.get_running_loop()
        # From Python 3.13 a server removes its socket file when it closes: that is the business of who made the socket.
        keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._servers.append(
            await loop.create_unix_server(partial(Connection, self), sock=sock, backlog=LISTEN_BACKLOG, **keep)
        )
        if tcp is not None:
            self.acceptor = Acceptor(tcp, partial(Connection, self, "tcp"), tls)
        self.sessions.listening()

    async def drain(self) -> None:
        """Accepts nobody any more, tells the clients to reconnect, waits until all that was submitted is committed."""
        for server in self._servers:
            server.close()
        if self.acceptor is not None:
            self.acceptor.close()
            self.acceptor.sock.close()
        for connection in self.connections:
            connection.stop_reading()  # what comes from now on is for the next daemon: there must be an end to it
        self.sessions.drain()
        await self.engine.settle()
        self.all_gone.clear()
        for connection in list(self.connections):
            connection.end()
        if self.connections:
            await self.all_gone.wait()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server, over: Transport = "unix") -> None:
        self._server = server
        self._over = over
        self._received = 0  # bytes before the hello
        self._peer: Any = None  # the address of a client over TCP
        self._engine = server.engine
        self._splitter = framing.Splitter()
        self._transport: asyncio.Transport | None = None
        self._session: str | None = None
        self._access = Access()
        self._pid = 0
        self._hello_timer: Timer | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._frames: deque[tuple[int, bytes]] = deque()  # that have come and wait for their turn
        self._left = 0  # frames of the present turn
        self._is_paused = self._is_stopped = False
        self._may_only_look = False  # it has one of the last descriptors
        self._quiet_until = 0.0

    # ------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._server.connections.add(self)
        if self._over == "tcp":
            self._made_over_tcp()
            return
        peer = processes.peer(self._transport.get_extra_info("socket"))
        self._pid = peer.pid
        count = self._server.connections_of.get(peer.pid, 0) + 1
        self._server.connections_of[peer.pid] = count
        if peer.uid not in (0, os.getuid()):  # also a uid that the system does not tell
            self._fail(0, "FORBIDDEN", f"this daemon belongs to the user {os.getuid()}, not to {peer.uid}")
        elif peer.pid and count > CONNECTIONS_PER_PROCESS_MAX:
            self._fail(0, "UNAVAILABLE", f"process {peer.pid} has more than {CONNECTIONS_PER_PROCESS_MAX} connections")
        else:
            self._await_hello()

    def _made_over_tcp(self) -> None:
        assert self._transport is not None, "it was made a moment ago"
        listening.keep_alive(self._transport.get_extra_info("socket"))
        self._peer = self._transport.get_extra_info("peername")
        self._await_hello()

    def _await_hello(self) -> None:
        if not self._server.may_serve():
            stops = "this daemon is about to stop: files of its state directory were taken away"
            self._fail(0, "UNAVAILABLE", stops, retryable=True)
            return
        assert self._transport is not None, "it was made a moment ago"
        left = listening.descriptors_left(self._transport.get_extra_info("socket"))
        self._may_only_look = left <= DESCRIPTORS_KEPT
        if left <= DESCRIPTORS_OWN or (self._may_only_look and self._over == "tcp"):
            self._fail(0, "UNAVAILABLE", SHORT, retryable=True)
            return
        self._hello_timer = self._engine.after(LOOK_MS if self._may_only_look else HELLO_MS, self._no_hello)

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.connections.discard(self)
        if not server.connections:
            server.all_gone.set()
        if self._over == "unix":
            left = server.connections_of.pop(self._pid, 1) - 1
            if left:
                server.connections_of[self._pid] = left
        elif server.acceptor is not None:
            server.acceptor.lost(self._peer)
        for timer in (self._hello_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        if self._session is not None:
            server.sessions.lost(self._session, self)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._session is None and self._over == "tcp":
            self._received += len(data)
            if self._received > HELLO_BYTES_MAX:
                self._fail(0, "VALIDATION_FAILED", f"more than {HELLO_BYTES_MAX} bytes came before the hello")
                return
        try:
            frames = self._splitter.feed(data)
        except framing.FrameError as error:
            self._fail(0, "VALIDATION_FAILED", str(error))
            return
        self._frames.extend(frames)
        if not self._is_paused:
            self._go_on()

    def _go_on(self) -> None:
        """Some of the frames that have come. While there are more, the connection is read no further: others have their
        turn, and a session that sends faster than it is served fills its own socket."""
        self._is_paused = False
        self._left = FRAMES_PER_TURN
        while self._left > 0:
            self._left -= 1
            if self._transport is None or self._transport.is_closing():
                self._frames.clear()
            if not self._frames:
                break
            self._frame(*self._frames.popleft())
            if self._session is not None and self._engine.pressure.is_high(self._session):
                break
        if self._transport is None or self._transport.is_closing() or self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        if self._session is not None and self._engine.pressure.is_high(self._session):
            self._pause()
            self._engine.pressure.when_relieved(self._session, lambda: loop.call_soon(self._go_on))
        elif self._frames:
            self._pause()
            loop.call_soon(self._go_on)
        elif not self._transport.is_reading():
            self._transport.resume_reading()

    def _pause(self) -> None:
        assert self._transport is not None, "it was looked at a moment ago"
        self._is_paused = True
        if self._transport.is_reading():
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """What is not sent yet has passed UNSENT_BYTES_MAX."""
        if self._transport is not None:
            log.warning("process %d does not read its replies: the connection is closed", self._pid)
            self._transport.abort()

    # ------------------------------------------------------------------ frames

    def _frame(self, request_id: int, body: bytes) -> None:
        try:
            self._take(request_id, body)
        except Exception as fault:  # ours, and no reason to leave the client without an answer
            self.send(request_id, faults.encode(faults.reply(fault)))

    def _take(self, request_id: int, body: bytes) -> None:
        if request_id > REQUEST_ID_MAX or (self._session is None and not request_id):
            self._fail(request_id, "VALIDATION_FAILED", f"a request id is 1 to {REQUEST_ID_MAX}; 0 wants no reply")
            return
        try:
            request: wire.Request[Any] = wire.decode_request(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if self._session is None:
                self._fail(request_id, "VALIDATION_FAILED", "the first frame must be a hello", f": {error}")
            else:
                self._complain("process %d sent a request that is not valid", self._pid)
                self._error(request_id, "VALIDATION_FAILED", f"the request is not valid: {error}")
            return
        kind = type(request)
        if self._session is None:
            if kind is wire.Hello:
                self._hello(request_id, cast(wire.Hello, request))
            else:
                self._fail(request_id, "VALIDATION_FAILED", "the first frame must be a hello")
        elif self._may_only_look and kind not in (wire.StatusGet, wire.Bye):
            self._fail(request_id, "UNAVAILABLE", SHORT, retryable=True)
        elif kind in _OF_THE_CONNECTION:
            self._connection_verb(request_id, request)
        elif request_id or not isinstance(request, wire.WaitingRequest):
            self._engine.ask(self._session, self._access, request_id, request)
        else:
            self._complain("process %d sent a request that may wait under id 0", self._pid)
            self._error(0, "VALIDATION_FAILED", "a request that may wait needs an id of its own")

    def _connection_verb(self, request_id: int, request: wire.Request[Any]) -> None:
        assert self._session is not None, "only after the hello"
        if isinstance(request, wire.Beat):
            self._left -= len(request.tokens) // TOKENS_PER_FRAME
            is_behind = self._transport is not None and self._transport.get_write_buffer_size() > BEHIND_BYTES
            self._engine.beat(self._session, request.tokens, is_told=not is_behind)
        elif isinstance(request, wire.Cancel):
            self._engine.cancel(self._session, request.call)
        elif isinstance(request, wire.Nested):
            self._engine.nest(self._session, request)
        elif isinstance(request, wire.Ack):
            self._engine.acknowledge(self._session, request.calls)
        elif isinstance(request, wire.Bye):
            session, self._session = self._session, None
            self._server.sessions.bye(session)
            self.send(request_id, _OK) if request_id else None
            self.end()
            return
        else:
            self._error(request_id, "VALIDATION_FAILED", "this connection has said hello already")
            return
        if request_id:
            self.send(request_id, _OK)

    def _hello(self, request_id: int, hello: wire.Hello) -> None:
        try:
            origin = Origin(self._pid, None, None) if self._may_only_look else self._origin()
        except OSError as error:
            self._fail(request_id, "UNAVAILABLE", f"{SHORT}: {error}", retryable=True)
            return
        try:
            access = self._access_of(hello)
            self._session = self._server.sessions.hello(self, request_id, hello, origin, access)
        except HelloRefused as refused:
            if origin.pidfd is not None:
                os.close(origin.pidfd)
            if self._may_only_look:  # a session that is back, whose process we did not look at
                self._fail(request_id, "UNAVAILABLE", SHORT, retryable=True)
            else:
                self._fail(request_id, refused.code, str(refused))
            return
        self._access = access
        if self._hello_timer is not None and not self._may_only_look:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _access_of(self, hello: wire.Hello) -> Access:
        """What the client may do. Raises HelloRefused."""
        if self._over == "unix":
            return Access(space=hello.space)  # who may open the socket may do everything
        keyring = self._engine.keyring
        access = keyring.find(hello.key or "")
        if access is None:
            raise HelloRefused("UNAUTHENTICATED", keyring.refusal(hello.key))
        if access.space != hello.space:
            raise HelloRefused(
                "FORBIDDEN",
                f"the key {access.key} works in the space {access.space!r}, not in {hello.space!r}:"
                " set RUNSTATE_SPACE_ID",
            )
        assert self._server.acceptor is not None, "it has accepted this connection"
        no_place = self._server.acceptor.admit(self._peer, access.key)
        if no_place is not None:
            raise HelloRefused("UNAVAILABLE", no_place)
        return access

    def _origin(self) -> Origin:
        """Who is at the other end. Raises OSError when there are no descriptors left to watch a process with."""
        assert self._transport is not None, "a frame came over it"
        if self._over == "tcp":
            return Origin(0, None, None, "tcp")
        if not self._pid:
            return Origin(0, None, None)
        pidfd = processes.open_pidfd(self._transport.get_extra_info("socket"), self._pid)
        process = None
        try:
            process = processes.of(self._pid, pidfd)
        finally:
            if process is None and pidfd is not None:
                os.close(pidfd)  # it has just died, or is not visible: the connection's end decides
        return Origin(self._pid, process, pidfd if process is not None else None)

    def _no_hello(self) -> None:
        if self._session is None:
            self._fail(0, "VALIDATION_FAILED", "no hello came in time")
        else:
            self.end()  # the descriptor is needed

    # ------------------------------------------------------------------ out

    def send(self, request_id: int, body: bytes) -> None:
        """Sends one frame; one that is too large becomes an error."""
        if self._transport is not None:
            try:
                frame = framing.pack(request_id, body)
            except framing.FrameError as error:
                frame = framing.pack(request_id, wire.encode(wire.Error(code="INTERNAL", message=str(error))))
            self._transport.write(frame)

    def end(self) -> None:
        """Closes the connection, once what was sent is on its way; a client that does not read has END_MS for it."""
        if self._transport is not None and self._end_timer is None:
            self._transport.close()
            self._end_timer = asyncio.get_running_loop().call_later(END_MS / 1000, self._transport.abort)

    def stop_reading(self) -> None:
        """What has come and had no turn yet is sent again to the next daemon."""
        self._is_stopped = True
        self._frames.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _complain(self, message: str, *arguments: object) -> None:
        """A line in the log, at most one in a second for each connection."""
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + 1
            log.info(message, *arguments)

    def _error(self, request_id: int, code: str, message: str, *, retryable: bool = False) -> None:
        self.send(request_id, wire.encode(wire.Error(code=code, message=message, retryable=retryable)))

    def _fail(self, request_id: int, code: str, message: str, detail: str = "", *, retryable: bool = False) -> None:
        """``detail``: for the client only, since it may quote what a stranger has sent."""
        if self._over == "unix":
            log.warning("a connection of process %d is closed: %s", self._pid, message)
        else:
            self._server.log_of_strangers.warning("a connection over TCP is closed: %s", message)
        self._error(request_id, code, message + detail, retryable=retryable)
        self.end()


REQUEST_ID_MAX = 2**63 - 1
SHORT = "the daemon is short of descriptors: it has too many clients, or a limit of open files that is too low"
_OF_THE_CONNECTION = frozenset((wire.Hello, wire.Beat, wire.Cancel, wire.Nested, wire.Ack, wire.Bye))
_OK = wire.encode(wire.Ok())

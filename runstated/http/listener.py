"""The HTTP listener: uvicorn in the daemon's own loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runstated.engine.engine import Engine
from runstated.host.clock import Timer
from runstated.http.app import App
from runstated.http.gateway import Gateway
from runstated.http.hosts import Hosts, names_in
from runstated.server import listening
from runstated.server.accepting import Acceptor, QuietLog
from runstated.server.sessions import Sessions
from runstated.settings import DESCRIPTORS_KEPT, LISTEN_BACKLOG, Endpoint

log = logging.getLogger(__name__)
uvicorn_log = logging.getLogger("uvicorn.error")

HEAD_MS = 10_000  # a connection that has not sent the head of a request by now is closed
KEEP_ALIVE_S = 75
CLOSE_S = 2  # answers that are on their way when the daemon stops
CONNECTIONS_MAX = 10_000


class Server(uvicorn.Server):
    """The daemon has its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Protocol(H11Protocol):
    """uvicorn waits for ever for the head of a first request; a slow client must not keep a descriptor."""

    may_serve: Callable[[], bool]
    after: Callable[[int, Callable[[], object]], Timer]
    gone: Callable[[Any], None]
    _head_timer: Timer | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self.may_serve():
            transport.close()  # our lock or socket was taken away: another daemon may serve by now
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            listening.keep_alive(sock)
            if listening.descriptors_left(sock) <= DESCRIPTORS_KEPT:
                transport.close()
                return
        self._head_timer = self.after(HEAD_MS, self._too_slow)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return  # no head yet, or between two requests, where uvicorn itself has a timer
        if self._head_timer is not None:
            self._head_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport is not None and not self.transport.is_closing():
            self._head_timer = self.after(KEEP_ALIVE_S * 1000 + HEAD_MS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self.client is not None:
            self.gone(self.client)
        super().connection_lost(exc)

    def _too_slow(self) -> None:
        if self.transport is not None and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


def _protocol(config: uvicorn.Config, server: Server) -> asyncio.BaseProtocol:
    """What uvicorn makes for each connection that it accepts itself."""
    protocol: asyncio.BaseProtocol = config.http_protocol_class(  # type: ignore[call-arg]
        config=config, server_state=server.server_state, app_state={}
    )
    return protocol


class Quiet(logging.Filter):
    """What uvicorn warns of is what strangers send."""

    def __init__(self) -> None:
        super().__init__()
        self._log_of_strangers = QuietLog(log)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            self._log_of_strangers.warning("%s", record.getMessage())
        return record.levelno != logging.WARNING


class HttpListener:
    """A listener on a bound socket."""

    def __init__(self, acceptor: Acceptor, gateway: Gateway, server: Server, task: asyncio.Task[None]) -> None:
        self._acceptor, self._gateway, self._server, self._task = acceptor, gateway, server, task
        self._quiet = Quiet()
        uvicorn_log.addFilter(self._quiet)

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        engine: Engine,
        sessions: Sessions,
        *,
        version: str,
        may_serve: Callable[[], bool],
        hosts: Iterable[str],
        certificate: Path | None,
        key: Path | None,
    ) -> HttpListener:
        """Returns when it accepts. ``hosts``: names under which it may be asked, beside those in the certificate."""
        gateway = Gateway(engine, sessions)
        bound: Endpoint = listening.bound_to(sock)
        names = names_in(certificate, key) if certificate is not None and key is not None else ()
        app = App(gateway, Hosts(bound.host, (*hosts, *names)), version)
        guards = {
            "may_serve": staticmethod(may_serve),
            "after": staticmethod(engine.after),
            "gone": staticmethod(lambda peer: acceptor.lost(peer)),
        }
        config = uvicorn.Config(
            app,
            http=type("GuardedProtocol", (Protocol,), guards),
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=LISTEN_BACKLOG,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_version=ssl.PROTOCOL_TLS_SERVER,
        )
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[]), name="http")
        while not server.started:
            if task.done():
                task.result()
                raise listening.CannotListen(f"the HTTP listener on {bound} has ended at once")
            await asyncio.sleep(0.01)
        # The socket stays ours to the end of the process: who comes after the acceptor was closed waits for the next
        # daemon instead of being refused.
        acceptor = Acceptor(sock, partial(_protocol, config, server), config.ssl)
        app.admit = acceptor.admit
        return cls(acceptor, gateway, server, task)

    async def close(self) -> None:
        """Tells those who wait to send the same again, and accepts nobody any more."""
        self._gateway.close()
        self._acceptor.close()
        self._server.should_exit = True
        await self._task
        uvicorn_log.removeFilter(self._quiet)

"""Who may have a place over TCP: strangers few and in turn, those with a key as many as their key may have."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from runstated.server import accepting, listening
from runstated.server.accepting import Acceptor, QuietLog
from runstated.settings import Endpoint

PATIENCE_S = 30


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "STRANGERS_MAX", 2)
    monkeypatch.setattr(accepting, "REMOTE_CONNECTIONS_MAX", 5)
    monkeypatch.setattr(accepting, "REMOTE_CONNECTIONS_OF_KEY_MAX", 3)


class Echo(asyncio.Protocol):
    """Takes what it is sent for a key, but for a question mark."""

    acceptor: Acceptor
    open: ClassVar[dict[Echo, None]] = {}

    def connection_made(self, transport: Any) -> None:
        self.open[self] = None
        self.transport = transport
        self.peer = transport.get_extra_info("peername")

    def data_received(self, data: bytes) -> None:
        no_place = self.acceptor.admit(self.peer, data.decode()) if data != b"?" else None
        self.transport.write(b"no" if no_place else b"ok")

    def connection_lost(self, exc: Exception | None) -> None:
        self.acceptor.lost(self.peer)
        del self.open[self]


class Client:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = socket.create_connection(sock.getsockname()[:2])
        self.sock.setblocking(False)

    async def says(self, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.sock, data)
        return await self.hears()

    async def hears(self) -> bytes:
        """b"" when it was cut off."""
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 100), PATIENCE_S)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self.sock.close()


@asynccontextmanager
async def listener() -> AsyncIterator[tuple[socket.socket, Acceptor]]:
    sock = listening.bind(Endpoint("127.0.0.1", 0))
    acceptor = Acceptor(sock, Echo)
    Echo.acceptor = acceptor
    try:
        yield sock, acceptor
    finally:
        acceptor.close()
        sock.close()
        for each in list(Echo.open):
            each.transport.abort()
        while Echo.open:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def test_the_oldest_stranger_makes_room_for_a_newer_one_and_who_has_a_key_stays() -> None:
    async def work() -> None:
        async with listener() as (sock, _):
            known = Client(sock)
            assert await known.says(b"key") == b"ok"
            strangers = [Client(sock) for _ in range(3)]
            assert await strangers[2].says(b"?") == b"ok"
            assert await strangers[0].hears() == b""
            late = Client(sock)
            assert await late.says(b"key") == b"ok", "a flood of strangers leaves a place for who has a key"
            assert await strangers[1].hears() == b""
            assert await known.says(b"?") == b"ok"
            for each in (known, late, *strangers):
                each.close()

    run(work())


def test_one_key_does_not_take_the_places_of_all_others() -> None:
    async def work() -> None:
        async with listener() as (sock, _):
            clients = []
            said = []
            for key in (b"a", b"a", b"a", b"a", b"b", b"b", b"b"):
                clients.append(Client(sock))
                said.append(await clients[-1].says(key))
            assert said == [b"ok", b"ok", b"ok", b"no", b"ok", b"ok", b"no"], "three of one key, five in all"
            clients[0].close()
            assert await clients[1].says(b"?") == b"ok", "a turn of the loop later: the end was seen"
            clients.append(Client(sock))
            assert await clients[-1].says(b"a") == b"ok"
            for each in clients:
                each.close()

    run(work())


def test_a_closed_acceptor_accepts_nobody_and_leaves_the_socket_open() -> None:
    async def work() -> None:
        async with listener() as (sock, acceptor):
            acceptor.close()
            waits = Client(sock)
            heard = asyncio.ensure_future(waits.says(b"?"))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not heard.done()
            Echo.acceptor = Acceptor(sock, Echo)
            assert await heard == b"ok"
            Echo.acceptor.close()
            waits.close()

    run(work())


def test_what_strangers_make_us_say_is_counted_and_not_said_each_time(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        quiet = QuietLog(logging.getLogger("strangers"))
        for n in range(100):
            quiet.warning("closed: %d", n)
        quiet._quiet_until = 0.0
        quiet.warning("closed: %d", 100)

    with caplog.at_level(logging.WARNING):
        run(work())
    assert [record.getMessage() for record in caplog.records] == [
        "closed: 0",
        "closed: 100 (99 more since the last line of this kind)",
    ]

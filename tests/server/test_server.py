"""The listeners: who says nothing is not listened to for ever."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from runstate import framing, wire
from runstated import settings
from runstated.server import server
from runstated.settings import HELLO_MS
from tests.engines import life, play


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x10\x00" + b"x" * 100])
def test_a_hello_over_tcp_that_takes_too_long_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(tmp_path / "sock"))
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            made = server.Server(it.engine, version="test", socket_path="sock")
            await made.listen(local, tcp)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            while not made.connections:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0)
            it.clock.stall(10 * HELLO_MS)
            await it.pass_ms(HELLO_MS - 1)
            assert made.connections, "what the daemon slept is not the client's"
            await it.pass_ms(1)
            said = await reader.read()  # up to the end of the connection
            ((request_id, body),) = framing.Splitter().feed(said)
            error = wire.decode_reply(body)
            assert isinstance(error, wire.Error)
            assert (request_id, error.message) == (0, "no hello came in time")
            assert not made.connections
            assert not made.connections_of
            writer.close()
            await made.drain()

    play(story())


async def _said_hello(path: Path, session: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    hello = wire.Hello(protocol=1, protocol_min=1, session=session, worker=session)
    writer.write(framing.pack(1, wire.encode(hello)))
    ((_, body),) = framing.Splitter().feed(await reader.read(65_536))
    assert isinstance(wire.decode_reply(body), wire.Welcome)
    return reader, writer


@pytest.mark.parametrize(
    ("request_", "other"),
    [
        (wire.encode(wire.RunsJoin(name="flood")), wire.RunsJoin(name="mine")),
        (wire.encode(wire.RunsGet(run="r1")), wire.RunsJoin(name="mine")),
        (b"\x81\xa4verb\xa4nope", wire.Beat(tokens=())),
    ],
    ids=["runs.join", "runs.get", "unknown"],
)
def test_a_connection_that_floods_fills_its_own_socket_and_holds_up_nobody(
    tmp_path: Path, request_: bytes, other: wire.Request[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "sock"
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(path))
    sent, answered = 5_000, []

    async def listen(reader: asyncio.StreamReader, begun: asyncio.Event) -> None:
        splitter = framing.Splitter()
        while len(answered) < sent:
            answered.extend(request_id for request_id, _ in splitter.feed(await reader.read(65_536)))
            begun.set()

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            made = server.Server(it.engine, version="test", socket_path=str(path))
            await made.listen(local)
            loud_reader, loud = await _said_hello(path, "loud")
            reader, writer = await _said_hello(path, "quiet")
            begun = asyncio.Event()
            listening = asyncio.create_task(listen(loud_reader, begun))
            loud.write(b"".join(framing.pack(2 + number, request_) for number in range(sent)))
            await begun.wait()
            writer.write(framing.pack(2, wire.encode(other)))
            await reader.read(65_536)
            assert len(answered) < 1_000, "those who came later were served first"
            await listening
            assert sorted(answered) == list(range(2, 2 + sent))
            for each in (loud, writer):
                each.close()
            await made.drain()

    play(story())
    assert len([line for line in caplog.messages if "not valid" in line]) <= 10


def test_a_request_of_the_connection_that_fails_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(session: str, tokens: object) -> None:
        raise ValueError("a fault of ours")

    path = tmp_path / "sock"
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(path))

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            monkeypatch.setattr(it.engine, "beat", fails)
            made = server.Server(it.engine, version="test", socket_path=str(path))
            await made.listen(local)
            reader, writer = await _said_hello(path, "a")
            for request in (wire.Beat(tokens=(1,)), wire.Ack(calls=())):
                writer.write(framing.pack(2, wire.encode(request)))
            splitter, replies = framing.Splitter(), []
            while len(replies) < 2:
                replies += [wire.decode_reply(body) for _, body in splitter.feed(await reader.read(65_536))]
            assert [getattr(reply, "code", "OK") for reply in replies] == ["INTERNAL", "OK"]
            writer.close()
            await made.drain()

    play(story())


def test_with_the_last_descriptors_only_the_status_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sock"
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(path))
    left = settings.DESCRIPTORS_KEPT + 1
    monkeypatch.setattr(server.listening, "descriptors_left", lambda _: left)

    async def answers(session: str, request: wire.Request[Any]) -> tuple[Any, bool]:
        """The reply to the request, and whether the connection is closed then."""
        reader, writer = await asyncio.open_unix_connection(str(path))
        hello = wire.Hello(protocol=1, protocol_min=1, session=session, worker=session)
        writer.write(framing.pack(1, wire.encode(hello)) + framing.pack(2, wire.encode(request)))
        splitter, reply = framing.Splitter(), None
        while reply is None or isinstance(reply, wire.Welcome):
            for _, body in splitter.feed(await reader.read(65_536)):
                reply = wire.decode_reply(body)
                if not isinstance(reply, wire.Welcome):
                    break
        try:
            closed = await asyncio.wait_for(reader.read(1), 0.05) == b""
        except asyncio.TimeoutError:
            closed = False
        except ConnectionError:
            closed = True
        writer.close()
        return reply, closed

    async def story() -> None:
        nonlocal left
        async with life(tmp_path / "db") as it:
            made = server.Server(it.engine, version="test", socket_path=str(path))
            await made.listen(local)
            assert isinstance((await answers("a", wire.RunsJoin(name="r")))[0], wire.RunView)
            left = settings.DESCRIPTORS_KEPT
            reply, closed = await answers("b", wire.StatusGet())
            assert (type(reply), closed) == (wire.StatusView, False)
            for session in ("c", "a"):  # a new one, and one that is back
                reply, closed = await answers(session, wire.RunsJoin(name="r"))
                assert (reply.code, reply.retryable, closed) == ("UNAVAILABLE", True, True)
                assert "short of descriptors" in reply.message
            left = settings.DESCRIPTORS_OWN
            reply, closed = await answers("d", wire.StatusGet())
            assert (reply.code, closed) == ("UNAVAILABLE", True)
            await made.drain()

    play(story())


def test_a_client_that_does_not_read_holds_up_the_end_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "END_MS", 100)
    path = tmp_path / "sock"
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(path))

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            made = server.Server(it.engine, version="test", socket_path=str(path))
            await made.listen(local)
            _, writer = await _said_hello(path, "deaf")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            (connection,) = made.connections
            connection.send(2, b"x" * 4_000_000)  # far more than the sockets hold
            await made.drain()
            assert not made.connections
            writer.close()

    play(story())

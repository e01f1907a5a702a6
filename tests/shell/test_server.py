"""The listeners: who says nothing is not listened to for ever."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from runstate import framing, wire
from runstated import server
from tests.engines import life, play

HELLO_MS = 100


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x10\x00" + b"x" * 100])
def test_a_hello_over_tcp_that_takes_too_long_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "HELLO_MS", HELLO_MS)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(tmp_path / "sock"))
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            made = server.Server(it.engine, version="test", socket_path="sock")
            await made.listen(local, tcp)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = asyncio.get_running_loop().time()
            writer.write(sent)
            said = await reader.read()  # up to the end of the connection
            assert asyncio.get_running_loop().time() - began >= HELLO_MS / 1000 * 0.9
            ((request_id, body),) = framing.Splitter().feed(said)
            error = wire.decode_reply(body)
            assert isinstance(error, wire.Error)
            assert (request_id, error.message) == (0, "no hello came in time")
            assert not made.connections
            assert not made.connections_of
            writer.close()
            await made.drain()

    play(story())

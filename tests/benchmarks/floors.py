"""What the machine can do without us: an echo server on the same framing, and SQLite's own commit."""

import asyncio
import os
import socket
import sqlite3
import sys
from pathlib import Path

from runstate import framing


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.splitter = framing.Splitter()

    def data_received(self, data: bytes) -> None:
        for request_id, body in self.splitter.feed(data):
            self.transport.write(framing.pack(request_id, body))


def serve_echo(path: str) -> None:
    """Echoes frames on a Unix socket until the process is ended."""
    import uvloop

    async def main() -> None:
        server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
        print("ready", flush=True)
        await server.serve_forever()

    uvloop.run(main())


class EchoClient:
    """A blocking client: one frame out, one frame in."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.splitter = framing.Splitter()
        self.body = b"x" * 60  # about a `once.acquire`

    def echo(self) -> None:
        self.sock.sendall(framing.pack(1, self.body))
        while not self.splitter.feed(self.sock.recv(65536)):
            pass


class Commits:
    """One-row commits with synchronous=FULL in WAL mode."""

    def __init__(self, directory: Path) -> None:
        self.connection = sqlite3.connect(directory / f"floor-{os.getpid()}.db", isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("CREATE TABLE IF NOT EXISTS t (a INTEGER)")

    def commit(self) -> None:
        self.connection.execute("INSERT INTO t VALUES (1)")


if __name__ == "__main__":
    serve_echo(sys.argv[1])

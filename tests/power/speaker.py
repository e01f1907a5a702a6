"""A client of the wire (client/PROTOCOL.md) that connects again and repeats only when it is asked to.

Unlike the library, it survives a power cut as a machine of its own would, and knows which of its requests is open.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tests.daemons import PATIENCE_S

Message = dict[str, Any]
HEAD = struct.Struct(">IQ")
PAUSE_S = 0.02


class CutOff(Exception):
    """The connection has ended: whether the open request had an effect is not known."""


class Refused(Exception):
    """An error that is an answer. ``code``: see PROTOCOL.md."""

    def __init__(self, reply: Message) -> None:
        super().__init__(f"{reply['code']}: {reply['message']}")
        self.code: str = reply["code"]


class Speaker:
    """One session, one request at a time."""

    def __init__(self, connect: Callable[[], socket.socket], worker: str, **hello: Any) -> None:
        self._connect = connect
        self._socket: socket.socket | None = None
        self._hello = {"session": os.urandom(8).hex(), "worker": worker, "pid": os.getpid(), **hello}
        self._last_id = 0
        self._rest = b""
        self.runs: list[str] = []
        self.open: tuple[int, Message] | None = None  # the request that has no answer yet
        self.answered = 0  # the id of the last request that was answered
        self.lost: list[int] = []  # tokens of which the daemon says that they are gone

    def connect(self) -> Message:
        """Says hello, as a new session or the old one; the welcome."""
        self._rest = b""
        self.close()
        self._socket = self._connect()
        self._socket.settimeout(PATIENCE_S)
        hello = {"verb": "hello", "protocol": 1, "protocol_min": 1, **self._hello, "runs": self.runs}
        return self._ask(self._next_id(), hello)

    def join(self, name: str) -> str:
        run: str = self.call("runs.join", name=name)["run"]
        self.runs.append(run)
        return run

    def call(self, verb: str, **fields: Any) -> Message:
        """The answer. Raises Refused and CutOff; after that ``repeat`` asks again."""
        self.open = (self._next_id(), {"verb": verb, **fields})
        return self._finish()

    def repeat(self) -> Message:
        """The answer to what was open when the connection ended. Raises Refused and CutOff."""
        assert self.open is not None
        self.open[1]["again"] = True
        return self._finish()

    def ask_again(self, number: int, message: Message) -> Message:
        """The answer to a request that has had one, once more. Raises CutOff; an error is an answer."""
        return self._ask(number, {**message, "again": True})

    def _finish(self) -> Message:
        assert self.open is not None
        number, message = self.open
        while True:
            reply = self._ask(number, message)
            if reply["reply"] != "error":
                break
            if not reply.get("retryable"):
                self.open = None
                raise Refused(reply)
            time.sleep(PAUSE_S)  # as PROTOCOL.md asks: it is sent once more, after a pause
            message["again"] = True
        self.open, self.answered = None, number
        return reply

    def post(self, verb: str, **fields: Any) -> None:
        """Sends what nobody answers."""
        self._send(0, {"verb": verb, **fields})

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _ask(self, number: int, message: Message) -> Message:
        self._send(number, message)
        while True:
            found, reply = self._receive()
            if found == number:
                return reply
            if reply.get("push") == "lease.lost":
                self.lost.append(reply["token"])
            elif reply.get("push") == "parked" and self.open is not None and reply["call"] == self.open[0]:
                self.open[1].update(ticket=reply["ticket"], proof=reply.get("proof", 0))

    def _send(self, number: int, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        assert self._socket is not None
        try:
            self._socket.sendall(HEAD.pack(len(body) + 8, number) + body)
        except OSError:
            pass  # what has arrived before is read first

    def _receive(self) -> tuple[int, Message]:
        assert self._socket is not None
        while True:
            if len(self._rest) >= HEAD.size:
                length, number = HEAD.unpack_from(self._rest)
                if len(self._rest) >= 4 + length:
                    body = self._rest[HEAD.size : 4 + length]
                    self._rest = self._rest[4 + length :]
                    return number, msgspec.msgpack.decode(body)
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                raise
            except OSError:
                data = b""
            if not data:
                self.close()
                raise CutOff
            self._rest += data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

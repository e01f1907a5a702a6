"""PROTOCOL.md is enough: a small client written from it alone talks to a real daemon.

The client imports nothing of ours, not even a msgpack library: frames, messages, sessions and repeats are done here, in
the simplest way, as somebody would do it in another language.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import PATIENCE_S, Home

# ---------------------------------------------------------------------------------------------------- msgpack


def packed(value: Any) -> bytes:
    """Always the widest form, to see that the daemon takes any width."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return b"\xdb" + struct.pack(">I", len(text)) + text
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
    pairs = b"".join(packed(key) + packed(content) for key, content in value.items())
    return b"\xdf" + struct.pack(">I", len(value)) + pairs


NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
LENGTHS = {0xD9: ("s", ">B"), 0xDA: ("s", ">H"), 0xDB: ("s", ">I")}
LENGTHS |= {0xDC: ("a", ">H"), 0xDD: ("a", ">I"), 0xDE: ("m", ">H"), 0xDF: ("m", ">I")}


class Unpacker:
    """Reads one value."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def value(self) -> Any:
        head = self.number(">B")
        if head < 0x80:
            return head
        if head < 0xC0:
            kind, length = ("m", head & 15) if head < 0x90 else ("a", head & 15) if head < 0xA0 else ("s", head & 31)
        elif head in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[head]
        elif head in NUMBERS:
            return self.number(NUMBERS[head])
        else:
            kind, form = LENGTHS[head]
            length = self.number(form)
        if kind == "s":
            self.at += length
            return self.data[self.at - length : self.at].decode()
        if kind == "a":
            return [self.value() for _ in range(length)]
        return {self.value(): self.value() for _ in range(length)}


# ---------------------------------------------------------------------------------------------------- the client


class Client:
    """One session. Blocks for each reply; what comes meanwhile is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = os.urandom(8).hex()
        self.runs: list[str] = []
        self.pushes: list[dict[str, Any]] = []
        self.replies: dict[int, dict[str, Any]] = {}
        self.open: dict[int, dict[str, Any]] = {}
        self.last_id = 0
        self.welcome = self.connect()

    def connect(self) -> dict[str, Any]:
        self.rest = b""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(self.path))
        hello = {"verb": "hello", "protocol": 1, "protocol_min": 1, "session": self.session, "worker": "tiny"}
        self.welcome = self.call({**hello, "pid": os.getpid(), "runs": self.runs})
        for request_id, request in self.open.items():
            self.send(request_id, {**request, "again": True})
        return self.welcome

    def send(self, request_id: int, message: dict[str, Any]) -> None:
        body = packed(message)
        self.socket.sendall(struct.pack(">IQ", len(body) + 8, request_id) + body)

    def post(self, message: dict[str, Any]) -> None:
        self.send(0, message)

    def ask(self, message: dict[str, Any]) -> int:
        """Sends a request; its id, for ``reply``."""
        self.last_id += 1
        if message.get("verb") != "hello":
            self.open[self.last_id] = message
        self.send(self.last_id, message)
        return self.last_id

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.reply(self.ask(message))

    def reply(self, request_id: int) -> dict[str, Any]:
        while request_id not in self.replies:
            assert self.read(), "the connection has ended"
        self.open.pop(request_id, None)
        return self.replies.pop(request_id)

    def push(self, kind: str) -> dict[str, Any]:
        """The next push of a kind; others before it are dropped."""
        while True:
            while self.pushes:
                push = self.pushes.pop(0)
                if push["push"] == kind:
                    return push
            assert self.read(), "the connection has ended"

    def read(self) -> bool:
        """Reads what is there; False at the end of the connection."""
        data = self.socket.recv(65_536)
        self.rest += data
        while len(self.rest) >= 12:
            length, request_id = struct.unpack_from(">IQ", self.rest)
            if len(self.rest) < 4 + length:
                break
            message = Unpacker(self.rest[12 : 4 + length]).value()
            self.rest = self.rest[4 + length :]
            if request_id:
                self.replies[request_id] = message
            else:
                self.pushes.append(message)
                if message.get("push") == "parked" and message["call"] in self.open:
                    self.open[message["call"]] |= {"ticket": message["ticket"], "proof": message.get("proof", 0)}
        return bool(data)

    def read_to_the_end(self) -> None:
        while self.read():
            pass

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    place = Home(tmp_path / "state")
    answer = place.run("start")
    assert answer.returncode == 0, answer.stderr
    yield place
    place.close()


@pytest.fixture
def join(home: Home) -> Iterator[Callable[[], Client]]:
    """Makes clients that have joined the run ``tiny``."""
    clients: list[Client] = []

    def make() -> Client:
        client = Client(home.socket)
        clients.append(client)
        client.runs = [client.call({"verb": "runs.join", "name": "tiny"})["run"]]
        return client

    yield make
    for client in clients:
        client.close()


def acquire(client: Client, key: str, **more: Any) -> dict[str, Any]:
    return {"verb": "once.acquire", "run": client.runs[0], "key": key, **more}


def complete(client: Client, key: str, token: int, result: str) -> dict[str, Any]:
    return {"verb": "once.complete", "run": client.runs[0], "key": key, "token": token, "result": result}


# ---------------------------------------------------------------------------------------------------- stories


def test_a_once_key_has_one_runner_and_one_result(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    assert a.welcome["protocol"] == 1 and "resumed" not in a.welcome
    granted = a.call(acquire(a, "k"))
    assert (granted["reply"], granted["attempt"]) == ("once.granted", 1)
    waits = b.ask(acquire(b, "k"))
    assert b.push("parked")["behind"] == [granted["token"]]
    assert b.call(acquire(b, "k", wait_ms=0)) == {"reply": "once.held"}
    a.post({"verb": "beat", "tokens": [granted["token"]]})
    done = {"reply": "once.done", "result": '{"x": 1}'}
    for _ in range(2):  # a repeat is answered alike
        assert a.call(complete(a, "k", granted["token"], '{"x": 1}')) == done
    assert b.reply(waits) == done
    assert a.call(complete(a, "k", granted["token"] + 1, "2"))["code"] == "LEASE_LOST"


def test_a_key_that_failed_as_often_as_it_may_has_failed_for_good(join: Callable[[], Client]) -> None:
    a = join()
    for attempt in (1, 2):
        granted = a.call(acquire(a, "k"))
        assert granted["attempt"] == attempt
        fail = {"verb": "once.fail", "run": a.runs[0], "key": "k", "token": granted["token"], "error": "E: no"}
        failed = a.call({**fail, "attempts": 2})
        assert failed == {"reply": "once.fail_counted", "attempts": attempt, "failed": attempt == 2}
        a.post({"verb": "ack", "calls": [a.last_id]})
    assert a.call(acquire(a, "k")) == {"reply": "once.failed", "attempts": 2, "error": "E: no"}


def test_a_job_goes_from_producer_to_worker_and_back(join: Callable[[], Client]) -> None:
    producer, worker = join(), join()
    send = {"verb": "queues.send", "run": producer.runs[0], "queue": "q", "key": "1", "input": "21"}
    assert producer.call(send)["code"] == "NOT_FOUND"
    assert worker.call({"verb": "queues.declare", "queue": "q", "attempts": 5})["attempts"] == 5
    assert producer.call({**send, "attempts": 4})["code"] == "CONFLICT"
    admit = worker.ask({"verb": "queues.admit", "queues": [{"run": worker.runs[0], "queue": "q", "places": 3}]})
    worker.push("parked")
    job = producer.call(send)["job"]
    assert producer.call(send)["job"] == job
    waits = producer.ask({"verb": "queues.result", "job": job})
    (given,) = worker.reply(admit)["jobs"]
    assert (given["job"], given["input"], given["attempt"], given["run_name"]) == (job, "21", 1, "tiny")
    outcome = {"verb": "queues.complete", "job": job, "token": given["token"], "result": "42"}
    assert worker.call(outcome)["state"] == "succeeded"
    assert producer.reply(waits) == {"reply": "job", "job": job, "state": "succeeded", "attempt": 1, "result": "42"}


def test_a_lost_connection_loses_neither_holds_nor_waits(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    token = a.call(acquire(a, "k"))["token"]
    waits = b.ask(acquire(b, "k"))
    b.push("parked")
    for client in (a, b):
        client.close()
        assert client.connect()["resumed"] is True
    assert a.call(complete(a, "k", token, "1"))["reply"] == "once.done"
    assert b.reply(waits)["result"] == "1"


def test_a_grant_that_was_sent_twice_is_one_grant(join: Callable[[], Client]) -> None:
    a = join()
    request_id = a.ask(acquire(a, "k"))
    granted = a.reply(request_id)
    a.open[request_id] = acquire(a, "k")  # as if the reply had been lost with the connection
    a.close()
    a.connect()
    assert a.reply(request_id) == granted


def test_a_restart_of_the_daemon_keeps_session_hold_and_place(home: Home, join: Callable[[], Client]) -> None:
    a, b = join(), join()
    token = a.call(acquire(a, "k"))["token"]
    waits = b.ask(acquire(b, "k"))
    b.push("parked")
    assert home.run("restart").returncode == 0
    for client in (a, b):
        client.push("reconnect")
        client.read_to_the_end()
        client.close()
        assert client.connect()["resumed"] is True
    assert b.push("parked")["behind"] == [token]
    assert a.call(complete(a, "k", token, "1"))["reply"] == "once.done"
    assert b.reply(waits)["result"] == "1"


def test_what_bye_gives_back_goes_to_the_next_in_line(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    a.call(acquire(a, "k"))
    waits = b.ask(acquire(b, "k"))
    b.push("parked")
    assert a.call({"verb": "bye"}) == {"reply": "ok"}
    a.read_to_the_end()
    granted = b.reply(waits)
    assert (granted["reply"], granted["attempt"]) == ("once.granted", 1)
    assert b.call({"verb": "leases.release", "token": granted["token"]})["held"] is True
    b.post({"verb": "beat", "tokens": [granted["token"]]})
    assert b.push("lease.lost")["token"] == granted["token"]


def test_cancel_gives_back_what_the_request_got(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    request_id = a.ask(acquire(a, "k"))
    a.reply(request_id)
    assert a.call({"verb": "cancel", "call": request_id}) == {"reply": "ok"}
    assert b.call(acquire(b, "k", wait_ms=0))["reply"] == "once.granted"


def test_a_wait_that_would_close_a_circle_is_refused(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    x, y = a.call(acquire(a, "x"))["token"], b.call(acquire(b, "y"))["token"]
    a.ask(acquire(a, "y", within=[x]))
    a.push("parked")
    assert b.call(acquire(b, "x", within=[y]))["code"] == "DEADLOCK"


def test_the_end_of_a_run_is_pushed_and_refuses_what_waits(join: Callable[[], Client]) -> None:
    a, b = join(), join()
    a.call(acquire(a, "k"))
    waits = b.ask(acquire(b, "k"))
    b.push("parked")
    run = a.runs[0]
    assert a.call({"verb": "runs.end", "run": run, "state": "finished"})["state"] == "finished"
    refused = b.reply(waits)
    assert (refused["code"], refused["run"]) == ("SCOPE_CANCELLED", run)
    assert b.push("run.ended")["state"] == "finished"
    b.close()
    assert [ended["run"] for ended in b.connect()["ended"]] == [run]


def test_what_is_not_valid_is_refused_and_harms_nobody(home: Home, join: Callable[[], Client]) -> None:
    a = join()
    for wrong in (
        {"verb": "no.such.verb"},
        {"no": "verb"},
        {"verb": "runs.join"},
        acquire(a, "k", lease_ms=4_999),
        acquire(a, "k", lease_ms=30_000.0),
        acquire(a, "k" * 513),
        {"verb": "hello", "protocol": 1, "protocol_min": 1, "session": "x", "worker": "again"},
    ):
        assert a.call(wrong)["code"] == "VALIDATION_FAILED", wrong
    a.open.clear()
    assert a.call(acquire(a, "k", unknown_field=1))["reply"] == "once.granted"
    a.socket.sendall(struct.pack(">IQ", 8 * 1024 * 1024 + 1, 1))
    a.read_to_the_end()
    assert a.pushes[-1]["code"] == "VALIDATION_FAILED"
    assert join().welcome["reply"] == "welcome"


def test_a_first_frame_that_is_no_hello_ends_the_connection(home: Home) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.settimeout(PATIENCE_S)
        connected.connect(str(home.socket))
        body = packed({"verb": "status.get"})
        connected.sendall(struct.pack(">IQ", len(body) + 8, 7) + body)
        said = b""
        while data := connected.recv(65_536):
            said += data
    assert struct.unpack_from(">Q", said, 4) == (7,)
    assert Unpacker(said[12:]).value()["code"] == "VALIDATION_FAILED"


def test_versions_that_do_not_meet_are_refused(home: Home) -> None:
    client = Client(home.socket)
    client.close()
    client.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.socket.connect(str(home.socket))
    hello = {"verb": "hello", "protocol": 9, "protocol_min": 9, "session": "new", "worker": "tiny"}
    assert client.call(hello)["code"] == "PROTOCOL"
    client.read_to_the_end()
    client.close()

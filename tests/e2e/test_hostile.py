"""Clients that do not keep to the protocol: they get an error or are cut off, and nobody else is harmed."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runstate import framing, wire
from tests.e2e.support import Daemon, Program, Raw, eventually

GOOD = """
@runstate.once
def work(n):
    return n
asked = threading.Event()
def listen():
    while hear():
        asked.set()
threading.Thread(target=listen, daemon=True).start()
n = 0
while True:
    n += 1
    assert work(n) == n
    if asked.is_set():
        asked.clear()
        say("unharmed")
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Program]]:
    """A daemon with somebody in it who works all the time, and must not notice anything."""
    place = Daemon(tmp_path_factory.mktemp("daemon"))
    try:
        place.start()
        yield place, place.program(GOOD)
    finally:
        place.close()


@pytest.fixture
def daemon(good: tuple[Daemon, Program]) -> Iterator[Daemon]:
    place, program = good
    yield place
    program.say("?")
    program.expect("unharmed")


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(100),
    "noise": bytes(range(255, -1, -1)) * 40,
    "a length above the limit": struct.pack(">IQ", framing.FRAME_BYTES_MAX + 1, 1),
    "a length too short for an id": struct.pack(">I", 7) + bytes(8),
    "no msgpack": framing.pack(1, b"\xc1\xc1\xc1"),
    "an unknown verb": framing.pack(1, msgspec.msgpack.encode({"verb": "sudo"})),
    "not a map": framing.pack(1, msgspec.msgpack.encode([1, 2, 3])),
    "an empty body": framing.pack(1, b""),
    "deep nesting": framing.pack(1, b"\x91" * 100_000 + b"\xc0"),
    "a request before the hello": framing.pack(1, wire.encode(wire.RunsJoin(name="x"))),
    "a request id above the limit": framing.pack(2**63, wire.encode(wire.RunsJoin(name="x"))),
    "a hello that wants no reply": framing.pack(
        0, wire.encode(wire.Hello(protocol=1, protocol_min=1, session="raw", worker="raw"))
    ),
}
ONLY_AT_THE_START = ("http", "zeros", "noise", "a request before the hello", "a hello that wants no reply")


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_instead_of_a_hello_ends_the_connection(daemon: Daemon, what: str) -> None:
    with Raw(daemon.socket) as raw:
        raw.socket.sendall(GARBAGE[what])
        answer = raw.receive()
        assert answer is not None
        assert isinstance(answer[1], wire.Error)
        assert answer[1].code == "VALIDATION_FAILED"
        assert raw.is_closed()
    assert f"process {os.getpid()} is closed" in daemon.output


@pytest.mark.parametrize("what", [what for what in GARBAGE if what not in ONLY_AT_THE_START])
def test_a_bad_frame_after_the_hello_is_answered(daemon: Daemon, what: str) -> None:
    with Raw(daemon.socket) as raw:
        raw.hello()
        raw.socket.sendall(GARBAGE[what])
        answer = raw.receive()
        assert answer is not None
        assert answer[1].code == "VALIDATION_FAILED"
        if what.startswith(("a length", "a request id")):
            assert raw.is_closed(), "nobody knows where the next frame would begin"
        else:
            assert isinstance(raw.ask(wire.RunsJoin(name="x")), wire.RunView)


def test_half_a_frame_and_then_silence(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw, Raw(daemon.socket) as other:
        raw.hello(worker="half")
        frame = framing.pack(7, wire.encode(wire.RunsJoin(name="x")))
        raw.socket.sendall(frame[:9])
        other.hello(session="other")
        assert isinstance(other.ask(wire.RunsJoin(name="x")), wire.RunView)
        for byte in frame[9:]:
            raw.socket.sendall(bytes([byte]))
        assert isinstance(raw.reply(7), wire.RunView)
        raw.socket.sendall(frame[:20])
    eventually(lambda: not any(w.worker == "half" and w.connected for w in daemon.status().workers))


@pytest.mark.parametrize(("protocol", "lowest", "fine"), [(99, 1, True), (99, 99, False), (0, 0, False), (1, 0, True)])
def test_a_hello_of_another_version(daemon: Daemon, protocol: int, lowest: int, fine: bool) -> None:
    with Raw(daemon.socket) as raw:
        answer = raw.hello(protocol=protocol, protocol_min=lowest)
        if fine:
            assert answer.protocol == wire.PROTOCOL
        else:
            assert answer.code == "PROTOCOL"
            assert "install matching versions" in answer.message
            assert raw.is_closed()


def test_unknown_fields_of_a_newer_client_are_ignored(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        hello = {"verb": "hello", "protocol": 2, "protocol_min": 1, "session": "s", "worker": "w", "colour": "blue"}
        raw.socket.sendall(framing.pack(1, msgspec.msgpack.encode(hello)))
        assert isinstance(raw.reply(1), wire.Welcome)


def test_a_second_hello_is_refused_and_the_first_stays(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.hello()
        assert raw.hello(session="another").code == "VALIDATION_FAILED"
        assert isinstance(raw.ask(wire.RunsJoin(name="x")), wire.RunView)


def test_a_session_belongs_to_its_process_and_its_space(daemon: Daemon) -> None:
    with Raw(daemon.socket) as mine:
        mine.hello(session="mine")
        thief = daemon.program(
            """
from pathlib import Path
from tests.e2e.support import Raw
with Raw(Path(sys.argv[1])) as raw:
    answer = raw.hello(session="mine")
    say(answer.code, answer.message)
""",
            daemon.socket,
        )
        assert thief.ends_well() == ["CONFLICT the session mine belongs to another process"]
        with Raw(daemon.socket) as other_space:
            assert not other_space.hello(session="mine", space="b").resumed, "another session of the same id"
        assert isinstance(mine.ask(wire.RunsJoin(name="x")), wire.RunView)
        with Raw(daemon.socket) as newer:
            assert newer.hello(session="mine").resumed
            assert mine.is_closed(), "the newer connection of one process replaces the older"
            assert isinstance(newer.ask(wire.RunsJoin(name="x")), wire.RunView)


def test_what_belongs_to_other_sessions_cannot_be_taken_or_given(daemon: Daemon) -> None:
    with Raw(daemon.socket) as holder, Raw(daemon.socket) as thief:
        holder.hello(session="holder")
        thief.hello(session="thief")
        run = holder.ask(wire.RunsJoin(name="x")).run
        token = holder.ask(wire.OnceAcquire(run=run, key="k")).token
        assert thief.ask(wire.Release(token=2**62)) == wire.Released(held=False)
        thief.send(wire.Beat(tokens=(token, 2**62)), 0)
        thief.send(wire.Cancel(call=2), 0)
        for guess in range(1, 40):
            assert thief.ask(wire.Release(token=guess)) == wire.Released(held=False)
            complete = thief.ask(wire.OnceComplete(run=run, key="k", token=guess, result="2"))
            assert complete.code == "LEASE_LOST"
        assert holder.ask(wire.OnceComplete(run=run, key="k", token=token, result="1")) == wire.OnceDone(result="1")


def test_numbers_at_the_edge(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.hello(session="edge")
        run = raw.ask(wire.RunsJoin(name="edge")).run
        for body in (
            {"verb": "runs.join", "name": "x" * 257},
            {"verb": "runs.join", "name": ""},
            {"verb": "runs.join", "name": 7},
            {"verb": "runs.join", "name": "x", "deadline_ms": -1},
            {"verb": "runs.join", "name": "x", "deadline_ms": 2**64 - 1},
            {"verb": "once.acquire", "run": run, "key": "k", "lease_ms": 1},
            {"verb": "once.acquire", "run": run, "key": "k", "wait_ms": 2**63},
            {"verb": "once.acquire", "run": run, "key": "k", "within": [0]},
            {"verb": "once.complete", "run": run, "key": "k", "token": 2**64 - 1, "result": "1"},
            {"verb": "leases.release", "token": 2**64 - 1},
            {"verb": "once.complete", "run": run, "key": "k", "token": 1, "result": "x" * 65_537},
            {"verb": "queues.send", "run": run, "queue": "q", "key": "k", "input": "x" * 65_537, "attempts": 1},
        ):
            raw.socket.sendall(framing.pack(77, msgspec.msgpack.encode(body)))
            answer = raw.reply(77)
            assert isinstance(answer, wire.Error), (body, answer)
            assert answer.code in ("VALIDATION_FAILED", "LEASE_LOST", "RESULT_TOO_LARGE"), (body, answer)
        assert raw.ask(wire.OnceAcquire(run=run, key="k")).attempt == 1
    assert "Traceback" not in daemon.output


def test_too_many_connections_of_one_process_are_refused(daemon: Daemon) -> None:
    program = daemon.program(
        """
from pathlib import Path
from tests.e2e.support import Raw
raws = [Raw(Path(sys.argv[1])) for _ in range(300)]
refused = [raw for raw in raws[256:] if raw.receive()[1].code == "UNAVAILABLE" and raw.is_closed()]
say(len(refused))
first = raws[0].hello(session="first")
say(type(first).__name__)
for raw in raws: raw.socket.close()
hear()
with Raw(Path(sys.argv[1])) as raw:
    say(type(raw.hello(session="again")).__name__)
""",
        daemon.socket,
    )
    program.expect("44", "Welcome")
    program.say()
    assert program.ends_well() == ["Welcome"]


def test_made_up_holds_do_not_pile_up_unread(daemon: Daemon) -> None:
    beats, tokens = 400, wire.LISTED_MAX
    with Raw(daemon.socket) as raw:
        raw.hello(session="beats")
        for first in range(beats):
            raw.send(wire.Beat(tokens=tuple(range(10**9 + first * tokens, 10**9 + (first + 1) * tokens))), 0)
        raw.ask(wire.RunsJoin(name="beats"))  # all that had not come out of the socket by now is told
        told = sum(isinstance(push, wire.LeaseLost) for push in raw.pushes)
        assert 0 < told < beats * tokens / 4
        raw.ask(wire.RunsJoin(name="beats"))
        raw.pushes.clear()
        raw.send(wire.Beat(tokens=(7,)), 0)
        raw.ask(wire.RunsJoin(name="beats"))
        assert raw.pushes == [wire.LeaseLost(token=7, reason="the lease is gone")]


def test_a_client_that_does_not_read_is_cut_off(daemon: Daemon) -> None:
    """It asks for 80 MB of results, all of which the daemon would have to keep for it."""
    with Raw(daemon.socket) as raw, Raw(daemon.socket) as other:
        raw.hello(session="flood")
        other.hello(session="other")
        run = raw.ask(wire.RunsJoin(name="flood")).run
        token = raw.ask(wire.OnceAcquire(run=run, key="k")).token
        raw.ask(wire.OnceComplete(run=run, key="k", token=token, result='"' + "x" * 65_000 + '"'))
        ask = wire.encode(wire.OnceAcquire(run=run, key="k"))
        try:
            for number in range(1, 1_500):
                raw.socket.sendall(framing.pack(1_000 + number, ask))
        except OSError:
            pass  # cut off while it still asks
        assert isinstance(other.ask(wire.RunsGet(run=run)), wire.RunView)
        eventually(lambda: "does not read its replies" in daemon.output)
        assert raw.is_closed()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(daemon: Daemon) -> None:
    temporary = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
    for place in (daemon.directory, *daemon.directory.parents, daemon.state_dir):
        if place.stat().st_uid == 0 and temporary in place.parents:
            place.chmod(0o711)
    daemon.socket.chmod(0o777)
    program = daemon.program(
        """
from pathlib import Path
from tests.e2e.support import Raw
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with Raw(Path(sys.argv[1])) as raw:
    number, answer = raw.receive()
    say(number, answer.code, raw.is_closed())
runstate.configure(base_url="unix://" + sys.argv[1])
say(name(runstate.run_id))
""",
        daemon.socket,
    )
    assert program.ends_well() == ["0 FORBIDDEN True", "AuthError FORBIDDEN"]

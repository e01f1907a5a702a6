"""Real processes for tests: a daemon that can be killed, stopped and restarted, and programs that talk over pipes.

Nothing here sleeps and hopes: a test waits for a line that a program says, for a file, or for what the daemon's own
status shows. ``PATIENCE_S`` is a limit for hanging, never a measure of speed. Every process is ended by its pid.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runstate import framing, wire
from tests.daemons import PATIENCE_S, Home
from tests.e2e.nursery import Forked, Nursery

# What every program starts with. ``say`` and ``effect`` are one write each, so that lines of many processes and threads
# never mix, and what a killed process had said is never half a line.
PREAMBLE = """\
import asyncio, json, os, random, signal, sys, threading, time
import runstate
from runstate import errors

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the test is over
    return line.strip()

def effect(*words):
    file = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (" ".join(map(str, words)) + "\\n").encode())
    os.close(file)

def name(call, *args, **kwargs):
    # The result of a call as text, or what it raised.
    try:
        return repr(call(*args, **kwargs))
    except BaseException as error:
        return f"{type(error).__name__} {getattr(error, 'code', '')}"
"""


_nurseries: list[Nursery] = []


def nursery() -> Nursery:
    """One for the whole test run; it ends with it."""
    if not _nurseries:
        _nurseries.append(Nursery())
        atexit.register(_nurseries[0].close)
    return _nurseries[0]


def eventually(look: Callable[[], Any], what: str = "") -> Any:
    """Looks again and again until what it sees is true; that."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"never true: {what or look}"
        time.sleep(0.005)


class Program:
    """A Python program in a process of its own. Its stderr goes to a file, which a failing test shows."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, stderr: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._stderr = stderr
        self._heard = b""

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, *, within_s: float = PATIENCE_S) -> str:
        """The next line that it says; "" when it has ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"pid {self.pid} says nothing; so far on stderr:\n{self.errors()}"
            piece = os.read(self.process.stdout.fileno(), 65_536)
            if not piece:
                break
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def expect(self, *lines: str) -> None:
        for line in lines:
            heard = self.hear()
            assert heard == line, f"said {heard!r} instead of {line!r}; stderr:\n{self.errors()}"

    def hear_all(self) -> list[str]:
        """The lines until its end."""
        lines = []
        while line := self.hear():
            lines.append(line)
        return lines

    def has_said(self) -> bool:
        """Whether a line can be heard without waiting."""
        return b"\n" in self._heard or bool(select.select([self.process.stdout], [], [], 0)[0])

    def errors(self) -> str:
        return self._stderr.read_text(errors="replace")[-4_000:]

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> int:
        """Waits for its end; the exit code. What it still says is thrown away."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.hear_all()
        return self.process.wait(PATIENCE_S)

    def ends_well(self) -> list[str]:
        """Waits for its end, which must be a good one; the lines it still said."""
        lines = self.hear_all()
        code = self.process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}; said {lines}; stderr:\n{self.errors()}"
        return lines

    def errors_at_the_end(self) -> str:
        """Waits for its end; what it said on stderr."""
        self.hear_all()
        self.process.wait(PATIENCE_S)
        return self.errors()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # something was left to be told to it


class Daemon(Home):
    """One daemon with its own state, and the programs that use it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "state")
        self.directory = directory
        self.effects_file = directory / "effects"
        self.environ["EFFECTS"] = str(self.effects_file)
        self.environ["PYTHONUNBUFFERED"] = "1"
        self.space = "default"
        self.is_shared = False
        self._looker: Raw | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.programs: list[Program] = []

    # ------------------------------------------------------------------ the daemon

    @property
    def pid(self) -> int:
        """The daemon that runs now: ours, or one that a client was quicker to start."""
        return self.running().pid

    @property
    def output(self) -> str:
        path = self.directory / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Starts it in the foreground, as a child of the test, unless a client has been quicker."""
        if self.process is not None:
            self.process.wait(PATIENCE_S)  # it has ended, by a command or by our own hand
        self.stopped.unlink(missing_ok=True)
        with open(self.directory / "daemon.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command("start", "--foreground", "--state-dir", str(self.state_dir)),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._is_decided, "our daemon has the lock, or has found that a client's has it")
        eventually(self.answers, "the daemon answers")

    def _is_decided(self) -> bool:
        # Undecided, it could still become the daemon after the next kill, when nobody expects it.
        assert self.process is not None
        return self.process.poll() is not None or getattr(self.holder(), "pid", 0) == self.process.pid

    def answers(self) -> bool:
        """Whether it takes a connection: for a moment the lock of a new daemon still has the text of the one before."""
        try:
            self.knock().socket.close()
        except OSError:
            return False
        return self.wait_until_listening().socket != ""

    def kill(self) -> None:
        """SIGKILL: nothing is drained, nothing is said."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and waits for its end in good order."""
        code = self._end(signal.SIGTERM)
        assert code in (0, None), self.output

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.terminate()
        self.start()

    def _end(self, number: int) -> int | None:
        """Ends the daemon that runs now; its exit code if it is our child."""
        before = self.wait_until_listening()
        os.kill(before.pid, number)
        if self.process is not None and self.process.pid == before.pid:
            return self.process.wait(PATIENCE_S)
        eventually(lambda: (holder := self.holder()) is None or holder.birth != before.birth, "it ends")
        return None

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def without_writes(self) -> Iterator[None]:
        """The daemon can write to no file meanwhile, as on a full disk."""
        pid = self.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """No daemon runs meanwhile."""
        self.terminate()
        yield
        self.start()

    def close(self) -> None:
        self.end_programs()
        self._look_no_more()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        super().close()

    def fresh(self, space: str) -> None:
        """The same daemon, with nothing of what earlier tests did to be seen."""
        self.end_programs()
        self._look_no_more()
        self.is_shared = True
        self.space = self.environ["RUNSTATE_SPACE_ID"] = space
        self.effects_file = self.directory / f"effects-{space}"
        self.environ["EFFECTS"] = str(self.effects_file)

    # ------------------------------------------------------------------ programs

    def end_programs(self) -> None:
        while self.programs:
            self.programs.pop().close()

    def program(self, source: str, *arguments: object, fresh: bool = False, **environ: str) -> Program:
        """Starts a Python program. ``fresh``: with an interpreter of its own, that has imported nothing yet."""
        given = [str(argument) for argument in arguments]
        if fresh:
            return self.command_program(sys.executable, "-c", PREAMBLE + source, *given, **environ)
        stderr = self._stderr()
        with open(stderr, "wb") as file:
            forked = nursery().start(PREAMBLE + source, given, {**self.environ, **environ}, file.fileno())
        return self._kept(forked, stderr)

    def command_program(self, *command: str, cwd: Path | None = None, **environ: str) -> Program:
        """Starts a command as it would be in a shell."""
        stderr = self._stderr()
        with open(stderr, "wb") as file:
            process = subprocess.Popen(
                command,
                env={**self.environ, **environ},
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )
        return self._kept(process, stderr)

    def _stderr(self) -> Path:
        return self.directory / f"stderr-{os.urandom(4).hex()}"

    def _kept(self, process: subprocess.Popen[bytes] | Forked, stderr: Path) -> Program:
        self.programs.append(Program(process, stderr))
        return self.programs[-1]

    def effects(self) -> list[str]:
        """What the programs have done to the world, in that order."""
        return self.effects_file.read_text().splitlines() if self.effects_file.exists() else []

    # ------------------------------------------------------------------ looking

    def knock(self) -> Raw:
        return Raw(self.socket)

    def status(self) -> wire.StatusView:
        """A shared daemon is looked at over one connection. One that may be restarted is looked at by passers-by: it
        would wait for a session that it knows."""
        looker = self._looker
        if looker is None:
            looker = self.knock()
            looker.hello(session=f"look-{os.urandom(4).hex()}", space=self.space)
            self._looker = looker if self.is_shared else None
        seen: wire.StatusView = looker.ask(wire.StatusGet(limit=1_000))
        if not self.is_shared:
            looker.ask(wire.Bye())
            looker.socket.close()
        return seen

    def _look_no_more(self) -> None:
        if self._looker is not None:
            self._looker.socket.close()
            self._looker = None

    def holdings(self) -> list[wire.Holding]:
        return [holding for worker in self.status().workers for holding in worker.holdings]

    def waits(self, count: int) -> list[wire.WaitView]:
        """What waits, once it is so many calls."""
        return eventually(lambda: (w := list(self.status().waits)) if len(self.status().waits) == count else None)

    def nothing_is_left(self) -> None:
        """Waits until nothing is held and nobody waits."""
        eventually(lambda: not self.holdings() and not self.status().waits, "nothing held, nobody waiting")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Asks the database of a daemon that has ended."""
        import sqlite3

        assert self.holder() is None, "only the daemon opens the file while it runs"
        connection = sqlite3.connect(self.state_dir / "runstate.db")
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()


@contextlib.contextmanager
def running(directory: Path, **environ: str) -> Iterator[Daemon]:
    """A daemon that runs, with a state of its own."""
    place = Daemon(directory)
    place.environ.update(environ)
    try:
        place.start()
        yield place
    finally:
        place.close()


class Raw:
    """A client that does only what it is told: for frames that no good client sends."""

    def __init__(self, place: Path | socket.socket) -> None:
        """``place``: a Unix socket's path, or a socket that is connected."""
        is_path = isinstance(place, Path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if is_path else place
        self.socket.settimeout(PATIENCE_S)
        try:
            if is_path:
                self.socket.connect(str(place))
        except BaseException:
            self.socket.close()
            raise
        self.pushes: list[wire.Push] = []
        self._splitter = framing.Splitter()
        self._frames: list[tuple[int, bytes]] = []
        self._ids = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, request: wire.Request[Any], request_id: int | None = None) -> int:
        if request_id is None:
            self._ids += 1
            request_id = self._ids
        self.socket.sendall(framing.pack(request_id, wire.encode(request)))
        return request_id

    def receive(self) -> tuple[int, Any] | None:
        """The next frame, decoded; None at the end of the connection."""
        while not self._frames:
            data = self.socket.recv(65_536)
            if not data:
                return None
            self._frames = self._splitter.feed(data)
        request_id, body = self._frames.pop(0)
        if request_id == 0:
            try:
                return 0, wire.decode_push(body)
            except Exception:
                return 0, wire.decode_reply(body)
        return request_id, wire.decode_reply(body)

    def reply(self, request_id: int) -> Any:
        """The reply to a request; pushes that come before are kept."""
        while True:
            got = self.receive()
            assert got is not None, "the connection ended"
            if got[0] == request_id:
                return got[1]
            if got[0] == 0 and isinstance(got[1], wire.Push):
                self.pushes.append(got[1])

    def ask(self, request: wire.Request[Any]) -> Any:
        return self.reply(self.send(request))

    def hello(self, **fields: Any) -> Any:
        given = {"protocol": 1, "protocol_min": 1, "session": "raw-raw-raw-raw-", "worker": "raw", **fields}
        return self.ask(wire.Hello(**given))

    def is_closed(self) -> bool:
        """Waits for the daemon to end the connection; what it says before is thrown away."""
        try:
            while self.receive() is not None:
                pass
        except ConnectionError:
            pass
        return True

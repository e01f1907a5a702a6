"""Starts test programs by forking a process that has imported everything already: 5 ms each instead of 200.

    test ── a datagram (source, arguments, environment) and four descriptors ──> nursery ── fork ──> program
    test <── its pid; later, on the fourth descriptor, its exit code ──────────── waits for it

Each program is a process of its own from its first statement; the nursery itself never talks to a daemon. It has no
thread, no signal handler and no event loop, and ends when the test run closes its socket.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import BinaryIO

DATAGRAM_BYTES = 200_000

# ---------------------------------------------------------------------------------------------------- the nursery


def main(control: socket.socket) -> tuple[str, list[str]]:
    """Forks until the socket ends; returns in each child, with its source and arguments."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, where to tell its exit code)
    while True:
        poll = select.poll()
        for descriptor in (control.fileno(), *children):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        for pidfd in ready:
            if pidfd in children:
                pid, status = children.pop(pidfd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                try:
                    os.write(status, str(code).encode())
                except BrokenPipeError:
                    pass  # nobody wants to know
                os.close(status)
                os.close(pidfd)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, DATAGRAM_BYTES, 4)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            for descriptor in [each for pidfd, (_, status) in children.items() for each in (pidfd, status)]:
                os.close(descriptor)
            return _become(json.loads(data), descriptors, control)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        children[os.pidfd_open(pid)] = (pid, descriptors[3])
        control.send(str(pid).encode())


def _become(request: dict[str, object], descriptors: list[int], control: socket.socket) -> tuple[str, list[str]]:
    control.close()
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    return request["source"], request["argv"]  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------------- for tests


class Nursery:
    """The other end, in the test run."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * DATAGRAM_BYTES)
        with theirs:
            environ = {name: value for name, value in os.environ.items() if not name.startswith("RUNSTATE")}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environ
            )

    def start(self, source: str, argv: list[str], environ: dict[str, str], stderr: int) -> Forked:
        stdin, stdout, status = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps({"source": source, "argv": argv, "environ": environ}).encode()
        theirs = [stdin[0], stdout[1], stderr, status[1]]
        try:
            socket.send_fds(self._control, [request], theirs)
            pid = int(self._control.recv(100))
        finally:
            for descriptor in (stdin[0], stdout[1], status[1]):
                os.close(descriptor)
        return Forked(pid, os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb"), status[0])

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Forked:
    """What tests use of a ``subprocess.Popen``."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO, status: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        said = os.read(self._status, 100)
        os.close(self._status)
        self.returncode = int(said) if said else -255  # the nursery itself is gone


if __name__ == "__main__":
    import threading

    import runstate.connection
    import runstate.serving  # noqa: F401 (brings asyncio)
    from runstate import loading

    loading.load()
    # Programs may use `tests.e2e.support`, also where the tests stand apart from what is installed.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    while threading.active_count() > 1:
        time.sleep(0.001)  # for the thread that imports: a fork must not find it
    source, arguments = main(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["-c", *arguments]
    # A module of its own, in the place of this one: what the program defines goes when its interpreter is torn down.
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    exec(compile(source, "<program>", "exec"), program.__dict__)

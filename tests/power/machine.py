"""A machine with a daemon on a disk that can lose its power."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from pathlib import Path

from tests.daemons import PATIENCE_S, Home
from tests.power.disk import LUCKS, Cut, Disk
from tests.power.speaker import Speaker

TRIES_S = 0.005


class Machine:
    """``start`` the daemon, ``cut`` the power, and again."""

    def __init__(self, place: Path, library: Path) -> None:
        self.place = place
        self.home = Home(place / "state")
        self.home.state_dir.mkdir(mode=0o700)
        self.disk = Disk(self.home.state_dir, library, place)
        self.output = place / "output"
        self.tcp_port = self.http_port = 0
        self.options: list[str] = []  # of the daemon
        self._daemon: subprocess.Popen[bytes] | None = None
        self._saved = place / "saved"

    @property
    def boot(self) -> int:
        """How often it was switched on."""
        return self.disk.boots

    def start(self, fail: str = "", end: int | None = None, slow_ms: int = 0) -> bool:
        """Switches it on; whether the daemon listens. It ends before, by itself, only with ``end``, see shim.c."""
        return self._run(self.disk.power_on(fail, end, slow_ms), may_end=end is not None)

    def start_again(self) -> None:
        """Kills the daemon and starts another one, while the power stays on."""
        self._kill()
        self.disk.settle()
        self._run(self.disk.go_on(), may_end=False)

    def _run(self, environ: dict[str, str], *, may_end: bool) -> bool:
        doors = "--tcp", f"127.0.0.1:{self.tcp_port}", "--http", f"127.0.0.1:{self.http_port}"
        command = self.home.command("start", "--foreground", *doors, *self.options)
        all_of_it = {**self.home.environ, **environ}
        with self.output.open("ab") as output:
            self._daemon = subprocess.Popen(
                command, env=all_of_it, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            holder = self.home.holder()
            if holder is not None and holder.pid == self._daemon.pid and holder.socket and holder.tcp and holder.http:
                self.tcp_port, self.http_port = (int(at.rpartition(":")[2]) for at in (holder.tcp, holder.http))
                return True
            if self._daemon.poll() is not None:
                assert may_end and self._daemon.returncode == -signal.SIGKILL, self.said()
                return False
            time.sleep(TRIES_S)
        raise AssertionError(f"the daemon does not listen: {self.said()}")

    def stop(self, within_s: float) -> None:
        """Tells the daemon to end, and waits as long for it, or until it has ended."""
        assert self._daemon is not None
        self._daemon.terminate()
        try:
            assert self._daemon.wait(within_s) == 0, self.said()
        except subprocess.TimeoutExpired:
            pass

    def cut(self, rng: random.Random, lucks: tuple[float, ...] = LUCKS) -> Cut:
        """Ends the daemon and leaves on the disk what had to arrive there, and what happened to."""
        self._kill()
        self.home.socket.unlink(missing_ok=True)
        self.disk.save(self._saved)
        cut = self.disk.cut(rng, lucks)
        self._check_integrity()
        return cut

    def _kill(self) -> None:
        assert self._daemon is not None
        assert self._daemon.poll() in (None, 0, -signal.SIGKILL), f"the daemon has ended by itself: {self.said()}"
        self._daemon.kill()
        self._daemon.wait()

    def database_changed_ns(self) -> int:
        """When something was written into the database itself."""
        return (self.home.state_dir / "runstate.db").stat().st_mtime_ns

    def _check_integrity(self) -> None:
        """SQLite's own opinion, of a copy: who looks at a database with a log changes both."""
        copy = self.place / "copy"
        self.disk.save(copy)
        connection = sqlite3.connect(copy / "runstate.db")
        try:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        finally:
            connection.close()
            shutil.rmtree(copy)

    def said(self) -> str:
        """The end of what the daemon has to say."""
        return self.output.read_text()[-3_000:]

    def local(self, worker: str, **hello: str) -> Speaker:
        """A session over the Unix socket; it is not connected yet."""

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(PATIENCE_S)
            sock.connect(str(self.home.socket))
            return sock

        return Speaker(connect, worker, **hello)

    def remote(self, worker: str, secret: str) -> Speaker:
        """A session over TCP: it survives a cut."""
        return Speaker(lambda: socket.create_connection(("127.0.0.1", self.tcp_port), PATIENCE_S), worker, key=secret)

    def close(self) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.kill()
            self._daemon.wait()
        self.home.close()

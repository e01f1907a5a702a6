"""A place for one real daemon per test: its own state directory, and nothing left running at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runstate import paths, presence

PATIENCE_S = 60  # a limit for hanging, never a measure of speed


class Home:
    """One state directory with the environment that leads to it, and the daemon that runs in it."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.lock = state_dir / paths.LOCK_NAME
        self.socket = paths.fit(state_dir / paths.SOCKET_NAME)
        self.log = state_dir / paths.LOG_NAME
        self.stopped = state_dir / paths.STOPPED_NAME
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RUNSTATE", "CODEX_"))}
        self.environ = {
            **kept,
            "RUNSTATED_STATE_DIR": str(state_dir),
            "RUNSTATED_CONFIG": str(state_dir.parent / "no-such-file.toml"),
        }
        Path(self.environ["RUNSTATED_CONFIG"]).write_text("")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "runstated", *arguments]

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`runstated ARGUMENTS`, to its end."""
        return self.python(*self.command(*arguments)[1:], **environ)

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def popen(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env={**self.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def holder(self) -> presence.LockInfo | None:
        return presence.inspect(self.lock)

    def running(self) -> presence.LockInfo:
        """The daemon that must be there."""
        holder = self.holder()
        assert holder is not None, "no daemon runs"
        return holder

    def wait_until_listening(self) -> presence.LockInfo:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            holder = self.holder()
            if holder is not None and holder.socket:
                return holder
            time.sleep(0.01)
        raise AssertionError(f"the daemon does not listen; its log: {self.read_log()}")

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.holder() is not None:
            assert time.monotonic() < deadline, f"the daemon does not end; its log: {self.read_log()}"
            time.sleep(0.01)

    def read_log(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def close(self) -> None:
        """End the daemon, if one is left, by the pid in its own lock file."""
        holder = self.holder()
        if holder is not None and holder.pid not in (0, os.getpid()):
            os.kill(holder.pid, signal.SIGKILL)
            self.wait_until_gone()
        self.socket.unlink(missing_ok=True)

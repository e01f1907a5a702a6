"""The processes of `runstate demo`: a private daemon if none runs, the workers, and that neither stays behind."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from runstate import paths, presence, spawn

from .demo_facts import Event, Kill

PATIENCE_S = 90.0  # for each step: a limit for what hangs, generous because machines of CI are slow
END_S = 15.0  # for a daemon to drain, which takes it milliseconds
LOG_LINES = 15
PR_SET_PDEATHSIG = 1  # of Linux, for prctl


class DemoFailed(click.ClickException):
    """The demo could not be played to its end."""

    def show(self, file: object = None) -> None:
        click.echo(f"runstate demo: {self.message}", err=True)


def _end_with_parent() -> None:
    """In the new process: the kernel ends it when the demo is killed and can end nothing any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class PrivateDaemon:
    """A daemon with a state directory of its own. In the foreground, as our child: so it can be waited for."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory / "state"
        self.socket = paths.fit(self.state_dir / paths.SOCKET_NAME)
        self._log = directory / "daemon.log"
        config = directory / "runstated.toml"
        config.touch()  # empty: the user's own may name another socket
        kept = {name: value for name, value in spawn.environment().items() if not name.startswith("RUNSTATED_")}
        options = ["--state-dir", str(self.state_dir), "--socket", str(self.socket), "--config", str(config)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*spawn.python_command(), "start", "--foreground", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=kept,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends everything in order
                preexec_fn=_end_with_parent if sys.platform.startswith("linux") else None,
            )

    def wait_until_it_listens(self) -> None:
        """Raises DemoFailed when it does not come up."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            holder = presence.inspect(self.state_dir / paths.LOCK_NAME)
            if holder is not None and holder.socket:
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the daemon did not start{_tail(self._log)}")
            time.sleep(0.01)

    def end(self) -> None:
        """Ends it in good order, by force if need be."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Worker:
    """One worker process, and a thread that hands on what it says."""

    def __init__(self, directory: Path, environ: dict[str, str], said: queue.SimpleQueue[Event]) -> None:
        with (directory / "workers.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runstate_cli.demo_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env=environ,
                text=True,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._reader.start()

    def _listen(self, said: queue.SimpleQueue[Event]) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        for line in self.process.stdout:
            try:
                data = json.loads(line)
                said.put(Event(data.pop("event"), data.pop("at"), data.pop("pid"), data))
            except (ValueError, KeyError):
                continue  # the half line of a worker that was killed while it wrote
        said.put(Event("ended", time.monotonic(), self.pid, {}))

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; whoever waits for it is told by "ended"

    def end(self, patience_s: float) -> int:
        """Gone and waited for, by force when the time is over; its exit code."""
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None, "it is a pipe"
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        return code


class Crew:
    """All workers, and everything they have said so far."""

    def __init__(self, directory: Path, environ: dict[str, str], number: int) -> None:
        self.events: list[Event] = []
        self._began = time.monotonic()
        self._log = directory / "workers.log"
        self._said: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._killed: set[int] = set()
        self._may_leave = False
        self.workers: list[Worker] = []
        try:
            for _ in range(number):
                self.workers.append(Worker(directory, environ, self._said))
        except BaseException:
            self.end()
            raise

    def age_s(self, at: float) -> float:
        """A point in time, in seconds since the first worker was started."""
        return at - self._began

    def tell(self, command: str) -> None:
        """Tells all that are left."""
        for worker in self.workers:
            if worker.pid not in self._killed:
                worker.tell(command)

    def wait_for(self, what: str, done: Callable[[Sequence[Event]], bool]) -> None:
        """Takes in what the workers say until ``done``. Raises DemoFailed when one dies or the time is over."""
        deadline = time.monotonic() + PATIENCE_S
        while not done(self.events):
            try:
                event = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"waited {PATIENCE_S:g} s in vain for {what}{_tail(self._log)}") from None
            self.events.append(event)
            if event.name == "ended" and event.pid not in self._killed and not self._may_leave:
                raise DemoFailed(f"worker {event.pid} died unexpectedly{_tail(self._log)}")

    def kill(self, pid: int) -> Kill:
        """SIGKILL to one of ours, which has not been waited for, so that the number is still its own."""
        self._killed.add(pid)
        killed = Kill(pid, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        return killed

    def let_leave(self) -> None:
        """From here on a worker may end by itself."""
        self._may_leave = True

    def end(self, patience_s: float = 0) -> list[int]:
        """No worker is left; the exit codes."""
        return [worker.end(patience_s) for worker in self.workers]


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Where the private daemon and the logs of this demo live. Under TMPDIR, gone at the end."""
    return tempfile.TemporaryDirectory(prefix="runstate-demo-", ignore_cleanup_errors=True)


def import_path() -> str:
    """PYTHONPATH for the workers: what this process could import, they can."""
    searched = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    known = {os.path.realpath(place) for place in searched}
    here = str(Path(__file__).resolve().parents[1])
    ours = [place for place in (here, *spawn.import_directories()) if os.path.realpath(place) not in known]
    inherited = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return os.pathsep.join(dict.fromkeys([*ours, *inherited]))


def _tail(log: Path) -> str:
    """The end of a log, ready to be put behind a message."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return ""
    return ". It said:" + "".join(f"\n    {line}" for line in lines) if lines else ""

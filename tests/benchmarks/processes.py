"""The processes of a benchmark: servers, and crews of load that work when they are told."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE_S = 60
START_S = 0.3  # for a server of others that says nothing when it is ready

# PYTHONDONTWRITEBYTECODE would make every start compile every module again.
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if key != "PYTHONDONTWRITEBYTECODE" and not key.startswith("RUNSTATE")
}

Process = subprocess.Popen  # of str


class Crew:
    """Processes that all do what a line tells them, at the same time, and answer with one JSON value each."""

    def __init__(self, commands: Sequence[Sequence[str]], **environment: str) -> None:
        self.processes = [start(command, **environment) for command in commands]
        for process in self.processes:
            hear_ready(process)

    def ask(self, line: str) -> list:
        """The answers of all processes to ``line``."""
        for process in self.processes:
            say(process, line)
        return [json.loads(hear(process)) for process in self.processes]

    def rate(self, seconds: float) -> float:
        """Cycles a second of all processes together."""
        return sum(answer["cycles"] / answer["seconds"] for answer in self.ask(f"cycles {seconds}"))

    def stop(self) -> None:
        for process in self.processes:
            end(process)


def load(kind: str, address: str, count: int = 1, **environment: str) -> Crew:
    """A crew of load.py, in our own environment."""
    script = [sys.executable, str(HERE / "load.py"), kind, address]
    return Crew([[*script, f"{n}-{time.time_ns()}"] for n in range(count)], **environment)


def start(command: Sequence[str], log: Path | None = None, **environment: str) -> Process:
    errors = None if log is None else log.open("ab")
    return subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**ENVIRONMENT, **environment},
    )


def say(process: Process, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: Process) -> str:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait()}")
    return line.strip()


def hear_ready(process: Process) -> None:
    line = hear(process)
    if line != "ready":
        raise RuntimeError(f"{process.args} said {line!r}")


def end(process: Process) -> None:
    """Asks for the end, and does not wait long for it."""
    process.stdin.close()
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def wait_for(is_there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} does not come up")
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------- our servers


@contextlib.contextmanager
def echo_server(directory: Path) -> Iterator[str]:
    """The floor of every request: the socket of a server that echoes our frames."""
    path = str(directory / "echo.sock")
    process = start([sys.executable, HERE / "floors.py", path])
    try:
        hear_ready(process)
        yield path
    finally:
        end(process)


class Daemon:
    """A daemon of our own, with a state directory of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.socket = str(state_dir / "runstated.sock")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "runstated", *arguments, "--state-dir", str(self.state_dir)]

    def start(self) -> float:
        """Starts it; milliseconds until it answered."""
        return timed_ms(self.command("start"))

    def stop(self) -> None:
        timed_ms(self.command("stop"))

    @property
    def pid(self) -> int:
        return int(json.loads((self.state_dir / "runstated.lock").read_text())["pid"])


@contextlib.contextmanager
def daemon(state_dir: Path) -> Iterator[Daemon]:
    served = Daemon(state_dir)
    served.start()
    try:
        yield served
    finally:
        served.stop()


def timed_ms(command: Sequence[str], **environment: str) -> float:
    """Milliseconds that a command takes. Raises CalledProcessError when it fails."""
    began = time.perf_counter()
    environment = {**ENVIRONMENT, **environment}
    # Not where there may be another runstated: -m takes that of the working directory first.
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, cwd="/")
    return (time.perf_counter() - began) * 1000


# ---------------------------------------------------------------------------------------------------- what they cost


def cpu_s(pid: int) -> float:
    """Seconds of CPU of all threads so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def switches(pid: int) -> int:
    """Voluntary context switches of all threads: how often they have waited for something."""
    lines = (line for task in Path(f"/proc/{pid}/task").iterdir() for line in (task / "status").read_text().split("\n"))
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

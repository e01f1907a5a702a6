"""`runstate status` and a real daemon with real processes."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runstate
from tests.daemons import PATIENCE_S, Home

CALLER = """
import sys, runstate
@runstate.once
def research(company):
    print("started", flush=True)
    sys.stdin.read()
    return company
print("calls", flush=True)
research("acme")
"""

WORKER = """
import runstate
@runstate.queue("double", attempts=4)
def double(input): return 2 * input
double.send(21)
print("serves", flush=True)
runstate.serve()
"""

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits another process")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A daemon that runs."""
    place = Home(tmp_path / "state")
    answer = place.run("start")
    assert answer.returncode == 0, answer.stderr
    yield place
    place.close()


@pytest.fixture
def processes(home: Home) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(home.popen(sys.executable, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def status(home: Home, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return home.python("-m", "runstate_cli", "status", *arguments, **environ)


def view(home: Home, *arguments: str, **environ: str) -> dict[str, Any]:
    answer = status(home, "--json", *arguments, **environ)
    assert (answer.returncode, answer.stderr) == (0, "")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def view_with(home: Home, there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first view in which it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not there(found := view(home)):
        assert time.monotonic() < deadline, f"it never came to this: {found}"
    return found


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next line, if one comes within the time a test has."""
    assert process.stdout is not None
    return process.stdout.readline()


# --- what it shows ---


def test_it_shows_who_holds_a_key_and_who_waits_behind_whom(
    home: Home, processes: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = processes("-c", CALLER)
    assert [line_of(holder), line_of(holder)] == ["calls\n", "started\n"]
    waiter = processes("-c", CALLER)
    found = view_with(home, lambda found: len(found["waits"]) == 1)
    (run,) = found["runs"]
    assert (run["name"], run["state"]) == ("default", "active")
    (held,) = [holding for worker in found["workers"] for holding in worker["holdings"]]
    assert (held["kind"], held["run"]) == ("once", run["run"])
    assert held["name"].startswith("research:")
    assert len(held["name"]) == len("research:") + 32
    assert held["since_ms"] <= found["daemon"]["now_ms"] < held["until_ms"]
    (wait,) = found["waits"]
    assert (wait["pid"], wait["kind"], wait["name"], wait["ahead"]) == (waiter.pid, "once", held["name"], 0)
    assert [f"(pid {holder.pid})" in each for each in wait["behind"]] == [True]
    text = status(home).stdout
    assert max(len(line) for line in text.splitlines() if str(home.state_dir) not in line) <= 80  # paths stay whole
    assert f"{held['name'][:17]}~" in text
    assert held["name"] not in text
    assert text.count(f"-{holder.pid}") >= 3  # as a worker, as a holder, and as the one who is waited for


def test_it_shows_queues_with_their_counts_and_idle_workers(
    home: Home, processes: Callable[..., subprocess.Popen[str]]
) -> None:
    worker = processes("-c", WORKER)
    assert line_of(worker) == "serves\n"
    found = view_with(home, lambda found: bool(found["waits"]) and found["queues"][0]["counts"] == {"succeeded": 1})
    assert found["queues"] == [{"queue": "double", "attempts": 4, "counts": {"succeeded": 1}}]
    assert found["waits"][0]["pid"] == worker.pid
    assert "work in double" in status(home).stdout


def test_it_shows_the_daemon_and_not_itself(home: Home) -> None:
    found = view(home)
    daemon = found["daemon"]
    assert daemon["pid"] == home.running().pid
    assert (daemon["version"], daemon["socket"]) == (runstate.__version__, str(home.socket))
    assert daemon["database_bytes"] > 0
    assert (daemon["sessions"], daemon["trouble"], found["workers"], found["more"]) == (0, None, [], [])


def test_another_space_is_another_picture(home: Home, processes: Callable[..., subprocess.Popen[str]]) -> None:
    holder = processes("-c", CALLER)
    assert [line_of(holder), line_of(holder)] == ["calls\n", "started\n"]
    assert view(home)["runs"] != []
    assert view(home, "--space", "elsewhere")["runs"] == view(home, RUNSTATE_SPACE_ID="elsewhere")["runs"] == []


def test_lists_are_cut_at_the_limit_and_it_says_so(home: Home, processes: Callable[..., subprocess.Popen[str]]) -> None:
    for _ in range(2):
        assert line_of(processes("-c", CALLER)) == "calls\n"
    view_with(home, lambda found: len(found["workers"]) == 2)
    answer = status(home, "--limit", "1")
    assert "There are more workers than shown" in answer.stdout


@linux_only
def test_a_daemon_that_cannot_write_can_still_be_looked_at(home: Home) -> None:
    made = home.python("-c", "import runstate; runstate.setup(slots={'gpu': {'max': 2}})")
    assert made.returncode == 0, made.stderr
    pid = home.running().pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    found = view_with(home, lambda found: found["daemon"]["trouble"] is not None)
    assert f"TROUBLE: writes fail ({found['daemon']['trouble']})" in " ".join(status(home).stdout.split())
    shown = home.python("-m", "runstate_cli", "slots", "show", "gpu", "--json")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "cannot write to its database" in shown.stderr
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    view_with(home, lambda found: found["daemon"]["trouble"] is None)


# --- which daemon, and none ---


def test_it_never_starts_a_daemon(tmp_path: Path) -> None:
    absent = Home(tmp_path / "absent")
    answer = status(absent)
    assert (answer.returncode, answer.stdout) == (3, "")
    assert answer.stderr.startswith("runstate: runstated is not running")
    assert not absent.state_dir.exists()


def test_it_says_that_the_daemon_was_stopped_on_purpose(home: Home) -> None:
    home.run("stop")
    answer = status(home)
    assert answer.returncode == 3
    assert "it was stopped with `runstated stop`: run `runstated start`" in answer.stderr


def test_the_address_in_the_environment_goes_first(home: Home, tmp_path: Path) -> None:
    absent = Home(tmp_path / "absent")
    found = view(absent, RUNSTATE_BASE_URL=f"unix://{home.socket}")
    assert found["daemon"]["pid"] == home.running().pid


# --- how it is shown ---


def test_on_a_terminal_it_is_styled_unless_no_color_says_otherwise(home: Home) -> None:
    assert "\x1b[1m" in on_a_terminal(home, "status")
    assert "\x1b" not in on_a_terminal(home, "status", NO_COLOR="1")
    assert "\x1b" not in status(home).stdout


def test_watch_in_a_pipe_prints_again_and_again_and_survives_a_restart(
    home: Home, processes: Callable[..., subprocess.Popen[str]]
) -> None:
    watch = processes("-m", "runstate_cli", "status", "--watch", "--json")
    first = json.loads(line_of(watch))["daemon"]["pid"]
    assert json.loads(line_of(watch))["daemon"]["pid"] == first
    assert home.run("restart").returncode == 0
    second = home.running().pid
    while not (line := line_of(watch)).startswith("{") or json.loads(line)["daemon"]["pid"] != second:
        assert line, "it ended"
    watch.send_signal(signal.SIGINT)
    said, _ = watch.communicate(timeout=PATIENCE_S)
    assert watch.returncode == 0
    assert "Traceback" not in said


def test_watch_on_a_terminal_is_left_with_ctrl_c(home: Home) -> None:
    text = on_a_terminal(home, "status", "--watch", interrupt_after="sessions")
    assert "\x1b[?1049h" in text  # a screen of its own ...
    assert text.rstrip().endswith("\x1b[?25h\x1b[?1049l")  # ... and the terminal as it was at the end
    assert "Traceback" not in text


def on_a_terminal(home: Home, *arguments: str, interrupt_after: str | None = None, **environ: str) -> str:
    """What a terminal gets to see; exit code 0."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "runstate_cli", *arguments],
        env={**home.environ, "TERM": "xterm", **environ},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], PATIENCE_S)[0]:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # Linux: the other side is closed
                break
            if not piece:
                break
            seen += piece
            if interrupt_after is not None and interrupt_after.encode() in seen:
                process.send_signal(signal.SIGINT)
                interrupt_after = None
        assert process.wait(PATIENCE_S) == 0, seen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return seen.decode()

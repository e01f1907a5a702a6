"""`runstate demo`, played for real: what it says, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import Home

DEMO_S = 240  # a limit for hanging: it takes four seconds where nothing else runs
COMMAND = ("-m", "runstate_cli", "demo")

pytestmark = pytest.mark.timeout(300)
linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for children in /proc")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """No daemon; temporary files of the demo go to a directory of their own."""
    place = Home(tmp_path / "state")
    (tmp_path / "tmp").mkdir()
    place.environ["TMPDIR"] = str(tmp_path / "tmp")
    yield place
    place.close()


def demo(home: Home, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *COMMAND],
        env={**home.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
    )


def number(text: str, what: str) -> str:
    """The measured value in the table's row."""
    match = re.search(rf"^{re.escape(what)} +(\S+)", text, re.MULTILINE)
    assert match is not None, text
    return match[1]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEMO_S
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def start(home: Home) -> subprocess.Popen[str]:
    """A demo whose workers are up."""
    process = home.popen(sys.executable, *COMMAND)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("workers"):
        assert line, "it ended"
    return process


def test_it_measures_checks_and_leaves_nothing_behind(home: Home) -> None:
    answer = demo(home)
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stdout
    text = answer.stdout
    assert "All numbers are right" in text
    assert number(text, "once: times it ran to the end") == "1"
    assert number(text, "once: callers that got the result") == "10"
    assert number(text, "queue: jobs done") == "40"
    assert number(text, "queue: attempt that finished the killed job") == "2"
    assert 0 < float(number(text, "once: kill -9 to the next holder's start")) < 5000
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert list(Path(home.environ["TMPDIR"]).iterdir()) == []
    assert not home.state_dir.exists()
    daemon = re.search(r"started for the demo \(pid (\d+)\)", text)
    assert daemon is not None
    assert is_gone(int(daemon[1]))


def test_it_uses_the_daemon_that_runs_and_leaves_it_as_it_was(home: Home) -> None:
    home.run("start")
    before = home.running()
    answer = demo(home, RUNSTATE_RUN="mine")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"yours: unix://{home.socket}, in the run demo-" in answer.stdout
    assert home.running() == before
    seen = json.loads(home.python("-m", "runstate_cli", "status", "--json").stdout)
    assert seen["runs"] == []
    assert [worker for worker in seen["workers"] if worker["holdings"]] == []


def test_an_address_where_nobody_listens_is_no_reason_to_start_another_daemon(home: Home) -> None:
    answer = demo(home, RUNSTATE_BASE_URL=f"unix://{home.socket}")
    assert answer.returncode == 3
    assert "nothing listens on" in answer.stderr


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_leaves_nothing_behind(home: Home, number: signal.Signals) -> None:
    process = start(home)
    left = children(process.pid)
    assert len(left) == 1 + 10
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEMO_S)
    assert process.returncode == 128 + number
    assert "interrupted, cleaning up" in said
    assert "Traceback" not in said
    assert all(is_gone(pid) for pid in left)
    assert list(Path(home.environ["TMPDIR"]).iterdir()) == []


@linux_only
def test_a_worker_that_dies_by_itself_is_a_failure_that_is_said(home: Home) -> None:
    process = start(home)
    left = children(process.pid)
    os.kill(left[-1], signal.SIGKILL)  # the last one that was started: not yet waited for, so the number is its own
    said, _ = process.communicate(timeout=DEMO_S)
    assert process.returncode == 1
    assert re.search(r"runstate demo: worker \d+ died unexpectedly|WRONG: ", said)
    assert all(is_gone(pid) for pid in left)


@linux_only
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_outlives_a_demo_that_was_killed(home: Home, is_there: bool) -> None:
    if is_there:
        home.run("start")
    process = start(home)
    left = children(process.pid)
    assert len(left) == 10 + (not is_there)
    process.kill()
    process.communicate()
    wait_until_gone(left)

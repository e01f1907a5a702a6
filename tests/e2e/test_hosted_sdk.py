"""The published SDK, unmodified, in a Python without ours (it has our import name), against the HTTP listener."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.daemons import PATIENCE_S
from tests.e2e.support import Daemon

SDK = "runstate-sdk==0.3.0"
INSTALL_S = 300

PROGRAM = """
import os, threading, time
import runstate
assert os.path.dirname(os.path.dirname(runstate.__file__)) == os.environ["PYTHONPATH"], runstate.__file__
from runstate import Runstate

def caught(call, *args):
    try:
        return call(*args)
    except runstate.RunstateError as error:
        return f"{type(error).__name__}: {error}"

def together(count, call, *args):
    threads = [threading.Thread(target=call, args=args) for _ in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

client = Runstate(run="job", worker="one")
"""

NOUNS = (
    PROGRAM
    + """
ran, got = [], []

@client.once
def compute(x):
    ran.append(x)
    time.sleep(0.2)
    return {"x": x, "pi": 0.30000000000000004, "text": "\\u00e9\\u2028\\U0001f600"}

together(4, lambda: got.append(compute(1)))
print("once", len(ran), got == [{"x": 1, "pi": 0.30000000000000004, "text": "\\u00e9\\u2028\\U0001f600"}] * 4)

@client.once(attempts=2)
def bad():
    raise ValueError("always")

for _ in range(2):
    try:
        bad()
    except ValueError:
        pass
    except runstate.OnceFailedError as error:
        last = error
print("failed", "always" in str(last), last.attempts, caught(bad))

inside, peak = [], []

@client.slots("browser", max=2)
def browse():
    inside.append(1)
    peak.append(len(inside))
    time.sleep(0.05)
    inside.pop()

together(6, browse)
print("slots", max(peak))

@client.limit("rpm", max=3, per="24h", timeout="1s")
def call():
    return "called"

print("limit", [caught(call).partition(":")[0] for _ in range(4)])

@client.budget("usd", limit="1.00", reserve="0.40", cost=lambda cost: cost)
def spend(cost):
    return cost

print("budget", spend("0.30"), spend("0.70"), caught(spend, "0.10").partition(":")[0])

def handle(document):
    if document == 99:
        raise ValueError("cannot review doc 99")
    return document * 2

review = client.queue("review", handle, attempts=2)
worker = threading.Thread(target=client.serve)
worker.start()
print("queue", review(3), review.send(4).id == review.send(4).id, review.send(4).result())
print(caught(review, 99))
print("gather", review.gather([1, 2, 3]), review.gather([1, 99, 5], need=2))

def took(call, *args):
    began = time.monotonic()
    call(*args)
    return time.monotonic() - began

print("sleep", took(client.sleep, "nap", "1s") >= 0.9, client.sleep("nap", "1h"))
other = Runstate(run="job", worker="two")
meeting = threading.Thread(target=other.together, args=("meet", 2))
meeting.start()
client.together("meet", 2)
meeting.join()
child = client.child("part")
print("child", child.run_id() != client.run_id())
print("status", client.status().run.state)
other.stop()
worker.join()
print("served", caught(compute, 2))
print([event.type for event, _ in zip(client.events(types=["scope.cancelled"]), range(1))])
"""
)
SAID = [
    "once 1 True",
    "failed True 2 OnceFailedError: ValueError: always",
    "slots 2",
    "limit ['called', 'called', 'called', 'TimeoutError']",
    "budget 0.30 0.70 BudgetExceededError",
    "queue 6 True 8",
    "TaskFailedError: ValueError: cannot review doc 99",
    "gather [2, 4, 6] [2, 10]",
    "sleep True None",
    "child True",
    "status running",
    "served StoppedError: the run 'job' was stopped",
    "['scope.cancelled']",
]

PRODUCER = PROGRAM + "print(client.queue('ours')(21)); print(client.once(name='shared')(lambda x: 'mine')(7))"
WORKER = """
rs = runstate.run("job")
say(rs.once(name="shared")(lambda x: {"by": "us", "x": x})(7))
rs.serve(queues=[rs.queue("ours", lambda x: x * 2)])
"""


class Hosted:
    """A daemon with HTTP, and a Python that has the published SDK."""

    def __init__(self, sdk: str, daemon: Daemon) -> None:
        self.daemon = daemon
        made = daemon.python("-m", "runstate_cli", "keys", "create", "--json")
        assert made.returncode == 0, made.stderr
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": sdk,
            "RUNSTATE_BASE_URL": f"http://{daemon.running().http.rpartition('/')[2]}",
            "RUNSTATE_API_KEY": json.loads(made.stdout)["secret"],
            "RUNSTATE_SPACE_ID": "default",
        }

    def start(self, program: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            env=self.environ,
            cwd=self.daemon.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> list[str]:
    """What a program said, which must end well."""
    try:
        said, told = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, told[-4_000:]
    return said.splitlines()


@pytest.fixture(scope="module")
def sdk() -> Iterator[str]:
    """Where the published SDK and all that it needs are: on a disk, as a file system in memory may refuse to run it."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--target",
            directory,
            SDK,
        ]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        assert installed.returncode == 0, installed.stderr
        yield directory


@pytest.fixture
def hosted(sdk: str, no_daemon: Daemon) -> Iterator[Hosted]:
    no_daemon.environ["RUNSTATED_HTTP"] = "127.0.0.1:0"
    no_daemon.start()
    yield Hosted(sdk, no_daemon)


@pytest.mark.timeout(INSTALL_S + 120)
def test_a_program_that_uses_every_noun(hosted: Hosted) -> None:
    assert ended(hosted.start(NOUNS)) == SAID


@pytest.mark.timeout(INSTALL_S + 120)
def test_its_programs_and_ours_share_queues_and_results(hosted: Hosted) -> None:
    worker = hosted.daemon.program(WORKER)
    worker.expect("{'by': 'us', 'x': 7}")
    assert ended(hosted.start(PRODUCER)) == ["42", "{'by': 'us', 'x': 7}"]


WAITS = PROGRAM + "print('ready', flush=True); print(client.queue('later')(5))"
LATER = "rs = runstate.run('job'); rs.serve(queues=[rs.queue('later', lambda x: x + 1)])"


@pytest.mark.timeout(INSTALL_S + 120)
def test_a_restart_of_the_daemon_under_a_waiting_program_is_no_error_for_it(hosted: Hosted) -> None:
    port = hosted.environ["RUNSTATE_BASE_URL"].rpartition(":")[2]
    hosted.daemon.environ["RUNSTATED_HTTP"] = f"127.0.0.1:{port}"
    hosted.daemon.terminate()
    hosted.daemon.start()
    declared = hosted.daemon.program(LATER)
    process = hosted.start(WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    hosted.daemon.kill()
    hosted.daemon.start()
    assert ended(process) == ["6"]
    declared.kill()

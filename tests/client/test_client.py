"""``Runstate`` and the module: names, lazy beginnings, texts."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import runstate
from tests.e2e.support import Daemon


def test_making_a_client_reads_nothing_and_connects_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSTATE_BASE_URL", "http://wrong")
    client = runstate.Runstate(api_key="k", space_id="s", run="r", worker="w", timeout="soon", retries=-1)
    assert repr(client) == "<Runstate run=r>"
    assert repr(client.child()) == "<Runstate run=(child run)>"
    with pytest.raises(runstate.ConfigError):
        client.run_id()


def test_every_blocking_verb_has_its_twin_with_the_same_signature() -> None:
    client = runstate.Runstate()
    for name in ("run_id", "stop", "finish", "serve"):
        plain, twin = getattr(client, name), getattr(client, "a" + name)
        assert inspect.signature(plain) == inspect.signature(twin)
        assert inspect.iscoroutinefunction(twin)
    for name in ("send", "send_many", "result"):
        kind = runstate.Job if name == "result" else runstate.Queue
        assert (
            inspect.signature(getattr(kind, name)).parameters == inspect.signature(getattr(kind, "a" + name)).parameters
        )


def test_the_functions_of_the_module_are_those_of_one_client_and_stay_so(daemon: Daemon) -> None:
    said = daemon.program(
        """
assert all(hasattr(runstate, each) for each in runstate.__all__)
@runstate.queue("q")
def handle(input): pass
over = threading.Event(); over.set()
for _ in range(2):
    runstate.serve(signal=over)
    asyncio.run(runstate.aserve(signal=over))
for each in ("configure", "run", "child", "run_id", "once", "queue", "serve", "aserve", "stop", "finish", "context"):
    assert callable(getattr(runstate, each)), each
from runstate import *
say(once is runstate.once, type(RunInfo), TimeoutError is runstate.TimeoutError)
""",
        fresh=True,
    ).ends_well()
    assert said == ["True <class 'type'> True"]


def test_the_import_brings_neither_asyncio_nor_msgspec() -> None:
    code = "import sys, runstate; print(sorted({'asyncio', 'msgspec', 'subprocess'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:  # the packages are found through site
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_the_worker_label_and_the_command_are_shown(daemon: Daemon) -> None:
    program = daemon.program(
        """
runstate.configure(worker="painter")
@runstate.once
def work():
    say("works"); hear()
work()
""",
        "an argument",
    )
    program.expect("works")
    [worker] = [worker for worker in daemon.status().workers if worker.holdings]
    assert (worker.worker, worker.pid, worker.command) == ("painter", program.pid, "-c an argument")
    assert worker.holdings[0].name.startswith("work:")

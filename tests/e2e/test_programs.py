"""The programs of the documentation, copied out and started from several shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons import PATIENCE_S
from tests.e2e.support import Daemon, Program

ONCE = """\
import time

import runstate


@runstate.once
def research(company: str) -> dict:
    print(f"researching {company}...", flush=True)
    time.sleep(SLOW)  # slow work
    return {"company": company, "summary": f"{company} makes widgets"}


print(research("acme"))
"""
JOBS = """\
import runstate


@runstate.queue("double")
def double(input: dict) -> dict:
    return {"doubled": input["n"] * 2}
"""
WORKER = """\
import runstate

import jobs  # noqa: F401  (defines the queue)

print("worker ready", flush=True)
runstate.serve()  # handles jobs until Ctrl-C
"""
PRODUCER = """\
from jobs import double

print(double({"n": 21}))  # submits the job and waits for the result
"""
RESULT = "{'company': 'acme', 'summary': 'acme makes widgets'}"


@pytest.fixture
def desk(no_daemon: Daemon, tmp_path: Path) -> Daemon:
    """No daemon, no environment but where it would be; the programs in a directory."""
    files = {"once.py": ONCE.replace("SLOW", "0.5"), "jobs.py": JOBS, "worker.py": WORKER, "producer.py": PRODUCER}
    for file, source in files.items():
        (tmp_path / file).write_text(source)
    return no_daemon


def shell(desk: Daemon, file: str) -> Program:
    source = (
        f"import runpy, sys; sys.path.insert(0, {str(desk.directory)!r}); runpy.run_path({file!r}, run_name='__main__')"
    )
    return desk.program(source.replace(repr(file), repr(str(desk.directory / file))), preamble="")


def test_once_from_two_terminals_runs_once_and_prints_twice(desk: Daemon) -> None:
    terminals = [shell(desk, "once.py") for _ in range(2)]
    said = sorted((terminal.ends_well() for terminal in terminals), key=len)
    assert said == [[RESULT], ["researching acme...", RESULT]]
    assert shell(desk, "once.py").ends_well() == [RESULT], "the third comes back at once"


def test_the_output_of_a_script_that_started_the_daemon_can_be_captured(desk: Daemon) -> None:
    answer = subprocess.run(
        f'out=$("{sys.executable}" once.py) && echo "got: $out"',
        shell=True,
        cwd=desk.directory,
        env=desk.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (answer.stdout, answer.stderr) == (f"got: researching acme...\n{RESULT}\n", "")
    assert desk.running().pid


def test_worker_and_producer_of_the_quickstart(desk: Daemon) -> None:
    worker = shell(desk, "worker.py")
    worker.expect("worker ready")
    assert shell(desk, "producer.py").ends_well() == ["{'doubled': 42}"]
    worker.send_signal(2)
    assert worker.ends_well() == []
    # Once more: the finished job stays the answer of the run, without any worker.
    assert shell(desk, "producer.py").ends_well() == ["{'doubled': 42}"]


def test_a_producer_that_comes_before_its_worker_waits_for_it(desk: Daemon) -> None:
    producer = shell(desk, "producer.py")
    desk.wait_until_listening()
    desk.waits(1)
    worker = shell(desk, "worker.py")
    assert producer.ends_well() == ["{'doubled': 42}"]
    worker.send_signal(15)
    assert worker.ends_well() == ["worker ready"]


WITH_ATTEMPTS = """
@runstate.once(attempts=5)
def research_company(name: str) -> dict:
    raise ValueError("always")

for _ in range(6):
    try:
        research_company("acme")
    except runstate.OnceFailedError as err:
        say(f"gave up after {err.attempts} attempts: {err}")
    except ValueError as err:
        say("its own", err)
"""


def test_the_retries_of_the_documentation(daemon: Daemon) -> None:
    gave_up = "gave up after 5 attempts: ValueError: always"
    assert daemon.program(WITH_ATTEMPTS).ends_well() == ["its own always"] * 4 + [gave_up] * 2


RESEARCH = """
calls = []
@runstate.queue("research", attempts=5, lease="60s", concurrency=4, key=lambda input: input["company"])
def research(input: dict) -> dict:
    say("works on", input["company"])
    return {"report": input["company"], "attempt": runstate.context().attempt}

@runstate.once(name="keyed", key=lambda company, http: company)
def keyed(company, http):
    effect("keyed", company)
    return company.upper()
"""


def test_the_producers_of_the_documentation(daemon: Daemon) -> None:
    worker = daemon.program(RESEARCH + "say('ready'); runstate.serve(); say('left')")
    worker.expect("ready")
    producer = daemon.program(
        RESEARCH
        + """
say(research({"company": "acme"}))
job = research.send({"company": "globex"})
say(job.result() == asyncio.run(job.aresult()), job.id == research.send({"company": "globex", "at": 1}).id)
async def main():
    job = await research.asend({"company": "initech"})
    say(await job.aresult(), await research.acall({"company": "initech"}))
asyncio.run(main())
say(keyed("acme", object()), keyed("acme", object()))
"""
    )
    assert producer.ends_well() == [
        "{'report': 'acme', 'attempt': 1}",
        "True True",
        "{'report': 'initech', 'attempt': 1} {'report': 'initech', 'attempt': 1}",
        "ACME ACME",
    ]
    assert daemon.effects() == ["keyed acme"]
    worker.send_signal(15)
    assert worker.ends_well() == ["works on acme", "works on globex", "works on initech", "left"]

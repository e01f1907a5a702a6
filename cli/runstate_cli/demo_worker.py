"""One worker of `runstate demo`: a process of its own that does what it is told and says what it does.

It reads commands, one a line, from standard input, and writes events, one JSON object a line, to standard output. The
times in them are of CLOCK_MONOTONIC, which all processes of a machine share. When its input ends, so does the worker:
whatever becomes of the demo, no worker is left behind.

Two pieces of work are made to be killed in their middle: the `once` function does not end before the command "finish",
which comes after the kill, and the first delivery of job 0 does not end at all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import runstate

QUEUE = "runstate-demo"
COMPANY = "acme"
WORK_S = 0.2  # what the `once` function takes after "finish"
JOB_S = 0.02
LONG_JOB = 0
GATE_S = 120.0  # a worker that is neither told nor killed by then fails

_output = threading.Lock()
_commands = {name: threading.Event() for name in ("once", "serve", "finish")}


def say(event: str, **more: object) -> None:
    """Reports an event, with its time. Handlers run in threads, hence the lock."""
    line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **more})
    with _output:
        print(line, flush=True)


def _obey() -> None:
    """Takes commands until the input ends, and the process with it."""
    for line in sys.stdin:
        _commands[line.strip()].set()
    os._exit(1)


def _wait_for(command: str) -> None:
    if not _commands[command].wait(GATE_S):
        raise TimeoutError(f"the command {command} did not come within {GATE_S:g} s")


@runstate.once
def research(company: str) -> dict[str, object]:
    """The work that everybody wants and one does."""
    say("once.started", company=company)
    _wait_for("finish")
    time.sleep(WORK_S)
    say("once.ended")
    return {"company": company, "by": os.getpid()}


@runstate.queue(QUEUE)
def work(job: dict[str, int]) -> dict[str, int]:
    """One job."""
    context = runstate.context()
    attempt = context.attempt if context else 0
    number = job["number"]
    say("job.started", number=number, attempt=attempt)
    if number == LONG_JOB and attempt == 1:
        time.sleep(GATE_S)
        raise TimeoutError("nobody killed this worker")
    time.sleep(JOB_S)
    say("job.ended", number=number, attempt=attempt)
    return {"number": number, "attempt": attempt, "by": os.getpid()}


def main() -> None:
    """Ready, once, serve until the run is over."""
    threading.Thread(target=_obey, name="commands", daemon=True).start()
    run = runstate.run_id()
    say("ready", run=run)
    _wait_for("once")
    say("once.called")
    say("once.returned", result=research(COMPANY))
    _wait_for("serve")
    say("serving")
    runstate.serve()
    say("left")


if __name__ == "__main__":
    main()

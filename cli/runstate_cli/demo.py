"""`runstate demo`: ten processes share work, two are killed, and what happened is measured and checked."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import render

if TYPE_CHECKING:
    import runstate

    from .demo_facts import Facts, Kill
    from .demo_processes import Crew

WRONG_EXIT = 1
BEFORE_KILL_S = 0.3  # by now everybody else waits, and the work is seen to be in its middle
RESULT_S = 60  # a limit for what hangs


@click.command("demo")
def command() -> None:
    """Watch ten processes share work while two of them are killed.

    Starts ten worker processes, has them call the same `once` function and work off a queue, kills the process that
    runs the function and one in the middle of a job with SIGKILL, and prints what it measured. Exit code 1 when a
    number is not what it should be.

    It uses your daemon if it runs (in a run of its own, which it stops at the end), else a private one in a temporary
    directory. Nothing stays behind that was not there before.
    """
    import runstate

    from .demo_processes import DemoFailed

    began = time.monotonic()
    with _ending_in_order() as cleanup:
        try:
            facts = _play(cleanup)
        except runstate.RunstateError as error:
            raise DemoFailed(str(error)) from error
    _report(facts, time.monotonic() - began)


def say(topic: str, text: str) -> None:
    """A line of the story."""
    click.echo(f"{topic:<9}{text}")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------- the story


def _play(cleanup: contextlib.ExitStack) -> Facts:
    """Starts everything, plays both acts, stops the run; what was measured."""
    from . import demo_facts, demo_processes

    directory = Path(cleanup.enter_context(demo_processes.temporary_directory()))
    environ = _daemon(directory, cleanup)
    client = _client(environ, cleanup)
    began = time.monotonic()
    crew = demo_processes.Crew(directory, environ, demo_facts.WORKERS)
    cleanup.callback(crew.end)
    crew.wait_for("the workers", lambda events: _count(events, "ready") == demo_facts.WORKERS)
    say("workers", f"{demo_facts.WORKERS} processes are up after {time.monotonic() - began:.1f} s")
    once_kill = _act_once(crew)
    job_kill, results = _act_queue(crew, client)
    own_result = _ask_again(client)
    _act_stop(crew, client)
    return demo_facts.gather(
        crew.events,
        once_kill=once_kill,
        job_kill=job_kill,
        own_result=own_result,
        results=results,
        exit_codes=crew.end(demo_processes.END_S),
    )


def _daemon(directory: Path, cleanup: contextlib.ExitStack) -> dict[str, str]:
    """The environment that leads the workers to the daemon that runs, or to one that is started here."""
    from . import demo_processes, look

    environ = {**os.environ, "PYTHONPATH": demo_processes.import_path(), "RUNSTATE_AUTOSTART": "0"}
    environ["RUNSTATE_RUN"] = f"demo-{os.urandom(4).hex()}"
    try:
        found = look.reach()
    except look.NotRunning:
        if look.setting(look.URL_VARIABLE):
            raise  # it was named, so it is meant
    else:
        with found:
            environ[look.URL_VARIABLE] = look.setting(look.URL_VARIABLE) or f"unix://{found.getpeername()}"
        say("daemon", f"yours: {environ[look.URL_VARIABLE]}, in the run {environ['RUNSTATE_RUN']}")
        return environ
    daemon = demo_processes.PrivateDaemon(directory)
    cleanup.callback(daemon.end)
    daemon.wait_until_it_listens()
    say("daemon", f"none was running: a private one is started for the demo (pid {daemon.process.pid})")
    for variable in (look.SPACE_VARIABLE, look.KEY_VARIABLE):
        environ.pop(variable, None)
    return {**environ, look.URL_VARIABLE: f"unix://{daemon.socket}"}


def _client(environ: dict[str, str], cleanup: contextlib.ExitStack) -> runstate.Runstate:
    """The demo's own client; it stops the run whatever happens."""
    import runstate

    client = runstate.Runstate(
        base_url=environ["RUNSTATE_BASE_URL"],
        space_id=environ.get("RUNSTATE_SPACE_ID") or "default",
        run=environ["RUNSTATE_RUN"],
        worker="demo",
        timeout="10s",
    )

    def stop() -> None:
        with contextlib.suppress(runstate.RunstateError):  # the daemon is gone, and so are its runs' processes
            client.stop()

    cleanup.callback(stop)
    return client


def _act_once(crew: Crew) -> Kill:
    """All call one function; who runs it is killed; another one runs it to its end."""
    from .demo_facts import WORKERS

    crew.tell("once")
    crew.wait_for("the once function", lambda events: _count(events, "once.called") == WORKERS and _starts(events) == 1)
    holder = next(event.pid for event in crew.events if event.name == "once.started")
    say("once", f"all {WORKERS} called research('acme'): process {holder} runs it, the others wait for its result")
    time.sleep(BEFORE_KILL_S)
    killed = crew.kill(holder)
    say("", f"kill -9 {holder}, in mid-work, {crew.age_s(killed.at):.3f} s after the start")
    crew.wait_for("somebody to take over", lambda events: _starts(events) >= 2)
    heir = [event for event in crew.events if event.name == "once.started"][1]
    say("", f"process {heir.pid} took over {(heir.at - killed.at) * 1000:.1f} ms after the kill")
    crew.tell("finish")
    crew.wait_for("the result", lambda events: _count(events, "once.returned") == WORKERS - 1)
    say(
        "", f"it ran to the end {_times(_count(crew.events, 'once.ended'))}; all {WORKERS - 1} that live got its result"
    )
    return killed


def _act_queue(crew: Crew, client: runstate.Runstate) -> tuple[Kill, list[dict[str, int]]]:
    """Jobs for the workers that are left; one is killed in the middle of a job. The kill, and the jobs' results."""
    from .demo_facts import JOBS, LONG_JOB, WORKERS
    from .demo_worker import QUEUE

    crew.tell("serve")
    crew.wait_for("the workers to serve", lambda events: _count(events, "serving") == WORKERS - 1)
    jobs = [client.queue(QUEUE, attempts=5).send({"number": number}) for number in range(JOBS)]
    say("queue", f"{JOBS} jobs sent to {WORKERS - 1} workers")
    crew.wait_for("job 0 to start", lambda events: _deliveries(events, LONG_JOB) >= 1)
    victim = next(e.pid for e in crew.events if e.name == "job.started" and e.data["number"] == LONG_JOB)
    time.sleep(BEFORE_KILL_S)
    killed = crew.kill(victim)
    say("", f"kill -9 {victim}, in the middle of job {LONG_JOB}, {crew.age_s(killed.at):.3f} s after the start")
    crew.wait_for("job 0 to start again", lambda events: _deliveries(events, LONG_JOB) >= 2)
    again = [e for e in crew.events if e.name == "job.started" and e.data["number"] == LONG_JOB][1]
    took_ms = (again.at - killed.at) * 1000
    say("", f"process {again.pid} started it again {took_ms:.1f} ms after the kill, as attempt {again.data['attempt']}")
    results = [job.result(timeout=f"{RESULT_S}s") for job in jobs]
    say("", f"{len(results)} of {JOBS} jobs are done")
    return killed, results


def _ask_again(client: runstate.Runstate) -> Any:
    """Asks for what is recorded, with a function that must not run."""
    from .demo_worker import COMPANY

    def research(company: str) -> dict[str, object]:
        return {"company": company, "by": os.getpid()}

    return client.once(research)(COMPANY)


def _act_stop(crew: Crew, client: runstate.Runstate) -> None:
    """The run is stopped; every worker hears of it and leaves."""
    crew.let_leave()
    began = time.monotonic()
    client.stop()
    crew.wait_for("the workers to leave", lambda events: _count(events, "ended") == len(crew.workers))
    left = [event for event in crew.events if event.name == "left"]
    took_ms = (max((event.at for event in left), default=began) - began) * 1000
    say("stop", f"the run is stopped: {len(left)} workers were told and left within {took_ms:.0f} ms")


def _count(events: Any, name: str) -> int:
    return sum(event.name == name for event in events)


def _starts(events: Any) -> int:
    return _count(events, "once.started")


def _deliveries(events: Any, number: int) -> int:
    return sum(event.name == "job.started" and event.data["number"] == number for event in events)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


# ---------------------------------------------------------------------------------------------------- the end


def _report(facts: Facts, took_s: float) -> None:
    """The numbers; exit code 1 when one is wrong."""
    from . import demo_facts

    click.echo()
    columns: list[str | render.Column] = [
        "MEASURED",
        render.Column("FOUND", right=True),
        render.Column("RIGHT IS", True),
    ]
    render.show(render.table(columns, demo_facts.rows(facts), render.width()))
    click.echo()
    sentences = demo_facts.wrong(facts)
    for sentence in sentences:
        click.echo(f"WRONG: {sentence}", err=True)
    if sentences:
        sys.exit(WRONG_EXIT)
    click.echo(f"All numbers are right ({took_s:.1f} s). `runstate status` shows such things as they happen.")


@contextlib.contextmanager
def _ending_in_order() -> Iterator[contextlib.ExitStack]:
    """Everything that is put on the stack is undone: after success, after errors, after Ctrl-C, SIGTERM or a closed
    terminal. While it is undone, which takes seconds at most, further signals are not heard."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays nohup
    before = {number: signal.signal(number, _interrupt) for number in heard}
    stack = contextlib.ExitStack()
    try:
        yield stack
    except _Interrupted as interrupted:
        click.echo("runstate demo: interrupted, cleaning up", err=True)
        raise SystemExit(128 + interrupted.number) from None
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
        try:
            stack.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Interrupted(BaseException):
    """A signal that says: enough."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _: object) -> None:
    raise _Interrupted(number)

"""A process that cannot start a thread (its container is at a limit) holds nothing that it could not renew."""

from __future__ import annotations

import threading

import pytest

from runstate import threads
from tests.e2e.support import Daemon, eventually

HUGE = "threading.stack_size(1 << 46)"  # more than there is, so that no thread can be started


def test_nothing_is_held_that_could_not_be_renewed(daemon: Daemon) -> None:
    setup = daemon.program("""runstate.setup(slots={"s": {"max": 1}}, budgets={"b": {"limit": 10}})""")
    assert setup.ends_well() == []
    program = daemon.program(
        f"""
import asyncio, threading
{HUGE}
@runstate.once
def once(): return 1
@runstate.budget("b", reserve=1)
def spend(): return 1
@runstate.queue("q")
def handle(x): return 1
def slots():
    with runstate.slots("s"): return 1
async def aslots():
    async with runstate.slots("s"): return 1
def events(): return next(runstate.events())
calls = [once, spend, slots, lambda: asyncio.run(aslots()), events, lambda: runstate.serve(signal=threading.Event())]
say(*[name(call) for call in calls])
say(runstate.run_id() != "")
hear()
threading.stack_size(0)
say(*[call() for call in calls[:-2]])
"""
    )
    program.expect(" ".join(["UnavailableError UNAVAILABLE"] * 6))
    program.expect("True")
    daemon.nothing_is_left()
    program.say()
    assert program.ends_well() == ["1 1 1 1"]


def test_a_thread_for_which_nobody_reads_any_more_is_told(daemon: Daemon) -> None:
    """The first caller reads for both; when it has its answer, a reader thread would have to go on."""
    program = daemon.program(
        f"""
import threading
go = [threading.Event(), threading.Event()]
def arrive(n):
    go[n].wait()
    say(name(runstate.together, str(n), 2))
callers = [threading.Thread(target=arrive, args=(n,)) for n in range(2)]
for each in callers: each.start()
{HUGE}
go[0].set()
hear()
go[1].set()
"""
    )
    daemon.waits(1)
    program.say()
    daemon.waits(2)
    assert daemon.program("""runstate.together("0", 2)""").ends_well() == []
    assert sorted(program.ends_well()) == ["None", "UnavailableError UNAVAILABLE"]


def test_a_job_whose_handler_gets_no_thread_goes_back_uncounted(daemon: Daemon) -> None:
    worker = daemon.program(
        f"""
import threading
stop = threading.Event()
@runstate.queue("q", attempts=1)
def handle(x): return runstate.context().attempt
with runstate.slots("mine", max=1):  # so that all threads but the handler's are there
    serving = threading.Thread(target=lambda: runstate.serve(signal=stop))
    serving.start()
    hear()
    {HUGE}
    say("short"); hear()
    threading.stack_size(0)
    hear()
    stop.set()
    serving.join()
"""
    )
    daemon.waits(1)
    worker.say()
    worker.expect("short")
    producer = daemon.program("""say(runstate.queue("q", attempts=1)({"n": 1}))""")
    eventually(lambda: "goes back" in worker.errors(), "the worker's log says so")
    worker.say()
    assert producer.ends_well() == ["1"]
    worker.say()
    assert worker.ends_well() == []


def test_starting_says_why_not() -> None:
    def fails(message: str) -> threading.Thread:
        thread = threading.Thread()

        def start() -> None:
            raise RuntimeError(message)

        thread.start = start  # type: ignore[method-assign]
        return thread

    assert threads.start(threading.Thread(target=lambda: None)) == ""
    assert threads.start(fails("can't start new thread")) == threads.LIMIT
    assert threads.start(fails("can't create new thread at interpreter shutdown")) == threads.SHUTDOWN


@pytest.mark.parametrize("lease", ["5s", "10m"])
def test_what_is_held_at_the_end_of_the_interpreter_gets_one_long_lease(daemon: Daemon, lease: str) -> None:
    """No thread can be started then that would renew it, and the process is gone soon."""
    program = daemon.program(
        f"""
from runstate import threads
threads.start = lambda thread: threads.SHUTDOWN
with runstate.slots("s", max=1, lease="{lease}"):
    say("inside"); hear()
"""
    )
    program.expect("inside")
    (holding,) = eventually(daemon.holdings)
    eventually(lambda: daemon.holdings()[0].until_ms >= holding.since_ms + 599_000)
    program.say()
    assert program.ends_well() == []

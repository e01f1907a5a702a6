"""A process that cannot start a thread (its container is at a limit) holds nothing that it could not renew."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from runstate import loading, nesting, threads, wire
from runstate.calls import Call
from runstate.connection import Connection
from runstate.greeting import Address
from runstate.holds import Heart, Holds
from runstate.nesting import Nesting
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


def text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def interrupts(
    call: Callable[[], object], *codes: CodeType, meanwhile: Callable[[], object] = lambda: 0
) -> Iterator[str]:
    """Calls it again and again, with an interrupt before the first line of this code, before the second, ...; where."""
    for number in itertools.count(1):
        seen: list[str] = []

        def trace(frame: FrameType, event: str, _: object, seen: list[str] = seen, number: int = number) -> Any:
            if frame.f_code not in codes:
                return None
            # A `with` comes once more on the way out, where Python itself looks for no signal.
            if event == "line" and not (text(frame).startswith("with ") and text(frame) in seen):
                seen.append(text(frame))
                if len(seen) == number:
                    meanwhile()
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if len(seen) < number:
            return
        yield f"an interrupt at {seen[-1]!r}"


def test_an_interrupt_in_the_start_of_the_heartbeat_leaves_one_that_beats() -> None:
    made: list[tuple[Heart, Holds, list[int]]] = []

    def start() -> None:
        holds, beaten = Holds(), list[int]()
        made.append((Heart(holds, beaten.extend), holds, beaten))
        made[-1][0].start()

    for interrupt in interrupts(start, Heart.start.__code__):
        heart, holds, beaten = made[-1]
        heart.start()
        hold = holds.add(7, "r", 30, None)
        eventually(lambda beaten=beaten: 7 in beaten, interrupt)
        hold.settle()
    for heart, _, _ in made:
        heart.stop()


@pytest.fixture
def running() -> Callable[[str], int]:
    """How many threads of a name run that the test has begun: other tests may have left some of theirs."""
    before = set(threading.enumerate())
    return lambda name: sum(thread.name == name for thread in threading.enumerate() if thread not in before)


def test_an_interrupt_in_the_start_of_the_reader_leaves_one_that_reads(running: Callable[[str], int]) -> None:
    made: list[Connection] = []

    def start() -> None:
        made.append(Connection(Address(url="unix:///none", space="s", key=None, worker=None, timeout_s=1, retries=0)))
        made[-1]._start_threads()

    codes = (Connection._start_threads.__code__, Connection._start_reader.__code__)
    for interrupt in interrupts(start, *codes):
        made[-1]._start_threads()
        eventually(lambda: running("runstate-reader") == 1, interrupt)
        made[-1].close()
        eventually(lambda: running("runstate-reader") == 0, interrupt)
    made[-1].close()


def test_an_interrupt_in_the_start_of_the_looks_leaves_one_that_looks(
    monkeypatch: pytest.MonkeyPatch, running: Callable[[str], int]
) -> None:
    monkeypatch.setattr(nesting, "PAUSE_S", 0.001)
    call = Call(1, wire.OnceAcquire(run="r", key="k"), lambda: True, None)
    watching: list[Nesting] = []

    def watch() -> None:
        watching.append(Nesting({}, lambda told: None))
        watching[-1].watch(call)

    for interrupt in interrupts(watch, Nesting.watch.__code__):
        watching[-1].watch(call)
        eventually(lambda: not watching[-1]._watched, interrupt)
    eventually(lambda: running("runstate-nesting") == 0)


def test_an_interrupt_in_the_start_of_the_import_is_no_matter_to_others() -> None:
    loading.load()
    others: list[threading.Thread] = []

    def begin() -> None:
        others.append(threading.Thread(target=loading.load, daemon=True))
        others[-1].start()
        while others[-1].is_alive() and not waits(others[-1]):
            pass

    def waits(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and ("waiter.acquire" in text(frame) or "with _starting" in text(frame))

    def load() -> None:
        loading._done.clear()
        loading._forked()  # as if nothing was imported yet
        loading.load()

    for interrupt in interrupts(load, loading.load.__code__, meanwhile=begin):
        others[-1].join(10)
        assert not others[-1].is_alive(), interrupt

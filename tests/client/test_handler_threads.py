"""Plain handlers run in threads that are kept, whatever interrupts the thread that hands them their work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runstate.handler_threads import HandlerThreads
from tests.client.test_threads import interrupts
from tests.e2e.support import Daemon, eventually

NAME = "runstate-tested"


def running() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def noting(notes: list[int], told: threading.Event) -> Callable[[], Callable[[], object]]:
    def work() -> Callable[[], object]:
        notes.append(threading.get_ident())
        return told.set

    return work


def ran(handlers: HandlerThreads, notes: list[int]) -> bool:
    """Runs one more, and waits until that is told."""
    told = threading.Event()
    assert handlers.run(noting(notes, told)) == ""
    return told.wait(20)


def test_work_one_after_the_other_runs_in_one_thread_that_ends_in_the_end() -> None:
    handlers, notes = HandlerThreads(NAME), list[int]()
    assert all(ran(handlers, notes) for _ in range(50))
    assert len(set(notes)) == running() == 1
    handlers.close()
    eventually(lambda: running() == 0)


def test_there_are_as_many_threads_as_ran_at_once_and_dropping_them_ends_all() -> None:
    handlers, go, notes = HandlerThreads(NAME), threading.Barrier(4), list[int]()

    def work() -> Callable[[], object]:
        go.wait(20)
        notes.append(1)
        return lambda: None

    for _ in range(3):
        handlers.run(work)
    assert running() == 3
    go.wait(20)
    eventually(lambda: len(notes) == 3)
    del handlers
    eventually(lambda: running() == 0)


def test_what_ran_is_not_kept_by_the_thread() -> None:
    import weakref

    class Held:
        pass

    handlers, held = HandlerThreads(NAME), Held()
    gone, told = weakref.ref(held), threading.Event()

    def work(held: Held = held) -> Callable[[], object]:
        return told.set

    handlers.run(work)
    assert told.wait(20)
    del work, held
    eventually(lambda: gone() is None)
    handlers.close()
    eventually(lambda: running() == 0)


def test_an_interrupt_loses_no_thread_and_no_later_work() -> None:
    made: list[HandlerThreads] = []
    done: list[int] = []

    def run() -> None:
        made.append(HandlerThreads(NAME))
        ran(made[-1], done)
        made[-1].run(noting(done, threading.Event()))
        made[-1].close()

    codes = (HandlerThreads.run.__code__, HandlerThreads.close.__code__)
    for interrupt in interrupts(run, *codes):
        assert ran(made[-1], done), interrupt
        made.pop().close()
        eventually(lambda: running() == 0, interrupt)


def test_jobs_of_one_place_share_a_thread_but_no_context(daemon: Daemon) -> None:
    worker = daemon.program(
        """
import contextvars
mark = contextvars.ContextVar("mark", default="none")
@runstate.queue("q")
def handle(n):
    before = mark.get()
    mark.set(str(n))
    return [before, runstate.context().key, threading.get_ident()]
runstate.serve()
say(sum(thread.name == "runstate-q" for thread in threading.enumerate()) <= 1)
"""
    )
    daemon.waits(1)
    said = daemon.program(
        """
q = runstate.queue("q")
found = [q(n) for n in range(5)]
say({before for before, _, _ in found}, len({key for _, key, _ in found}), len({ident for _, _, ident in found}))
"""
    ).ends_well()
    assert said == ["{'none'} 5 1"]
    worker.send_signal(15)
    assert worker.ends_well() == ["True"]

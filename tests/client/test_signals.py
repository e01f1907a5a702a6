"""Signals: set once, seen by everybody, in threads and event loops, without leaks and without locks."""

import asyncio
import copy
import gc
import pickle
import signal as os_signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runstate import signals
from runstate.errors import ConfigError, StoppedError
from runstate.signals import Combined, Signal, watching

LONG = 30.0  # seconds; no test waits this long unless it fails

KINDS = [Signal, lambda: Combined(Signal()), lambda: Combined(Combined(Signal()), Signal())]
kinds = pytest.mark.parametrize("make", KINDS, ids=["Signal", "Combined", "nested"])


def registered(signal):
    return len(signal._callbacks)


def until(condition):
    """Waits for something another thread is about to do."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


# One signal


@kinds
def test_a_new_signal_is_not_set(make):
    signal = make()
    assert (signal.is_set(), bool(signal), signal.reason) == (False, False, None)


@kinds
def test_a_set_signal_has_the_first_reason(make):
    signal, reason = make(), StoppedError()
    signal._set(reason)
    signal._set(ValueError("later"))
    assert (signal.is_set(), bool(signal)) == (True, True)
    assert signal.reason is reason


def test_a_signal_can_be_set_without_a_reason():
    signal = Signal()
    signal._set()
    signal._set(ValueError("later"))
    assert signal.is_set() and signal.reason is None


def test_the_repr_tells_the_class_and_the_state():
    signal, both = Signal(), Combined()
    assert (repr(signal), repr(both)) == ("<Signal set=False>", "<Combined set=False>")
    signal._set()
    assert repr(signal) == "<Signal set=True>"


@kinds
def test_a_callback_is_called_once_when_the_signal_is_set(make):
    signal, calls = make(), []
    signal.add_callback(lambda: calls.append(signal.is_set()))
    assert calls == []
    signal._set()
    signal._set()
    assert calls == [True]


@kinds
def test_a_callback_of_a_set_signal_is_called_at_once(make):
    signal, calls = make(), []
    signal._set()
    remove = signal.add_callback(lambda: calls.append(threading.current_thread()))
    assert calls == [threading.current_thread()]
    remove()


@kinds
def test_a_removed_callback_is_not_called(make):
    signal, calls = make(), []
    remove = signal.add_callback(lambda: calls.append(1))
    signal.add_callback(lambda: calls.append(2))
    remove()
    remove()
    signal._set()
    assert calls == [2]


@kinds
def test_callbacks_run_in_the_order_they_were_added(make):
    signal, calls = make(), []
    for number in range(10):
        signal.add_callback(lambda number=number: calls.append(number))
    signal._set()
    assert calls == list(range(10))


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit])
@kinds
def test_what_a_callback_raises_is_swallowed_and_the_others_run(make, error):
    signal, calls = make(), []

    def bad():
        raise error

    signal.add_callback(bad)
    signal.add_callback(lambda: calls.append(1))
    signal._set()
    signal.add_callback(bad)
    assert calls == [1]


@kinds
def test_ctrl_c_in_a_callback_is_raised_after_the_others_ran(make):
    signal, calls = make(), []

    def interrupt():
        raise KeyboardInterrupt

    signal.add_callback(interrupt)
    signal.add_callback(lambda: calls.append(1))
    with pytest.raises(KeyboardInterrupt):
        signal._set()
    assert calls == [1] and signal.is_set()


@kinds
def test_a_callback_may_add_and_remove_callbacks(make):
    signal, calls = make(), []
    removers = []
    signal.add_callback(lambda: signal.add_callback(lambda: calls.append("inner")))
    signal.add_callback(lambda: removers[0]())
    removers.append(signal.add_callback(lambda: calls.append("removed")))
    signal._set()
    assert calls == ["inner"]


def test_a_copy_is_the_signal_itself_and_pickling_is_refused():
    signal = Signal()
    assert copy.copy(signal) is copy.deepcopy(signal) is signal
    with pytest.raises(TypeError, match="process"):
        pickle.dumps(signal)


@kinds
def test_every_callback_is_called_exactly_once_when_threads_add_and_set_at_the_same_time(make):
    for _ in range(50):
        signal, calls, barrier = make(), [], threading.Barrier(4)

        def add(signal=signal, calls=calls, barrier=barrier):
            barrier.wait()
            for number in range(20):
                signal.add_callback(lambda number=number: calls.append(number))

        def set_it(signal=signal, barrier=barrier):
            barrier.wait()
            signal._set()

        threads = [threading.Thread(target=target) for target in (add, add, set_it, set_it)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(calls) == sorted([*range(20), *range(20)])
        assert registered(signal) == 0


@pytest.mark.skipif(not hasattr(os_signal, "setitimer"), reason="needs POSIX timers")
@kinds
def test_a_signal_may_be_set_from_a_signal_handler_of_the_waiting_thread(make):
    signal = make()
    before = os_signal.signal(os_signal.SIGALRM, lambda *_: signal._set(StoppedError()))
    try:
        os_signal.setitimer(os_signal.ITIMER_REAL, 0.01)
        assert signal.wait(LONG) is True
    finally:
        os_signal.signal(os_signal.SIGALRM, before)


# Waiting in plain code


@kinds
def test_waiting_for_a_set_signal_returns_at_once(make):
    signal = make()
    signal._set()
    assert signal.wait() is True
    assert signal.wait(0) is True
    assert registered(signal) == 0


@pytest.mark.parametrize("timeout", [0, 0.001, "1ms", -1, -0.5])
@kinds
def test_a_wait_that_runs_out_gives_false_and_leaves_nothing(make, timeout):
    signal = make()
    assert signal.wait(timeout) is False
    assert registered(signal) == 0


@pytest.mark.parametrize("timeout", [None, LONG, "30s", 1e300])
@kinds
def test_a_blocked_wait_ends_when_another_thread_sets_the_signal(make, timeout):
    signal, results = make(), []
    threads = [threading.Thread(target=lambda: results.append(signal.wait(timeout))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: registered(signal) == 3)
    signal._set()
    for thread in threads:
        thread.join(LONG)
    assert results == [True] * 3
    assert registered(signal) == 0


def test_a_timeout_is_in_seconds_never_negative_and_fits_every_timer():
    limits = [signals._limit(timeout) for timeout in (None, -1, -0.5, 0, 1.5, "1500ms", 1e300)]
    assert limits == [None, 0, 0, 0, 1.5, 1.5, 100 * 365 * 86_400]
    assert limits[-1] < threading.TIMEOUT_MAX


@pytest.mark.parametrize("timeout", ["soon", float("nan"), True, [1]])
def test_a_timeout_that_is_no_duration_is_refused(timeout):
    with pytest.raises(ConfigError, match="timeout is"):
        Signal().wait(timeout)


# Waiting in an event loop


@kinds
def test_a_wait_in_a_loop_is_awaited_and_the_loop_goes_on(make):
    async def main():
        signal = make()
        waits = [asyncio.ensure_future(signal.wait(timeout)) for timeout in (None, LONG, "30s", 1e300)]
        await asyncio.sleep(0)  # one turn of the loop: every wait has begun
        assert registered(signal) == 4
        threads = threading.active_count()
        setter = threading.Thread(target=signal._set)
        setter.start()
        assert await asyncio.gather(*waits) == [True] * 4
        setter.join()
        assert threads == threading.active_count() == before
        assert registered(signal) == 0
        assert await signal.wait() is True

    before = threading.active_count()
    asyncio.run(main(), debug=True)


@kinds
def test_a_wait_in_a_loop_that_runs_out_gives_false(make):
    async def main():
        signal = make()
        assert [await signal.wait(timeout) for timeout in (0, 0.001, "1ms", -1)] == [False] * 4
        assert registered(signal) == 0

    asyncio.run(main())


@kinds
def test_a_cancelled_wait_leaves_nothing(make):
    async def main():
        signal = make()
        task = asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)  # one turn of the loop: the wait has begun
        assert registered(signal) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert registered(signal) == 0

    asyncio.run(main())


def test_one_signal_ends_waits_in_several_loops_and_threads():
    signal, results = Signal(), []
    waiters = [threading.Thread(target=lambda: results.append(asyncio.run(waiting(signal)))) for _ in range(3)]
    waiters.append(threading.Thread(target=lambda: results.append(signal.wait(LONG))))
    for thread in waiters:
        thread.start()
    until(lambda: registered(signal) == 4)
    signal._set()
    for thread in waiters:
        thread.join(LONG)
    assert results == [True] * 4


async def waiting(signal):
    return await signal.wait(LONG)


def test_a_closed_loop_does_not_disturb_the_setter():
    signal, calls = Signal(), []
    loop = asyncio.new_event_loop()
    wait = waiting(signal)
    task = loop.create_task(wait)
    loop.run_until_complete(asyncio.sleep(0))
    assert registered(signal) == 1
    loop.close()
    signal.add_callback(lambda: calls.append(1))
    signal._set()
    assert calls == [1]
    task._log_destroy_pending = False  # the task was left behind on purpose
    wait.close()


def test_importing_signals_does_not_import_asyncio_and_waiting_works_without_it():
    code = (
        "import sys; from runstate.signals import *; s = Signal(); assert not s.wait(0.001); s._set(); assert s.wait();"
        "assert 'asyncio' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Several signals as one


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.booleans())
def test_a_combined_signal_has_the_reason_of_what_was_set_first(order, watched):
    parts = [Signal() for _ in range(3)]
    both, calls = Combined(*parts), []
    if watched:
        both.add_callback(lambda: calls.append(both.reason))
    reasons = [ValueError(number) for number in range(4)]
    for number in order:
        [*parts, both][number]._set(reasons[number])
    assert both.is_set()
    assert both.reason is reasons[order[0]]
    assert calls == ([reasons[order[0]]] if watched else [])
    assert [registered(part) for part in parts] == [0, 0, 0]


def test_setting_a_combined_signal_leaves_its_parts_alone():
    part = Signal()
    both = Combined(part)
    both._set(ValueError())
    assert not part.is_set()


def test_the_reason_of_a_combined_signal_never_changes():
    first, second = Signal(), Signal()
    both = Combined(first, second)
    reason = ValueError("second")
    second._set(reason)
    assert both.reason is reason
    first._outcomes.append(signals._Outcome(-1, ValueError("an older one that is seen late")))
    assert both.reason is reason


def test_a_combined_signal_registers_with_its_parts_only_while_it_is_watched():
    part, other = Signal(), Signal()
    both = Combined(part, other)
    assert registered(part) == 0
    remove = both.add_callback(lambda: None)
    assert both.wait(0.001) is False
    assert (registered(part), registered(other)) == (1, 1)
    remove()
    assert (registered(part), registered(other)) == (0, 0)
    both.add_callback(lambda: None)
    other._set()
    assert registered(part) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_adding_a_callback_when_a_part_is_set_leaves_nothing_with_the_others(which):
    parts, calls = [Signal(), Signal()], []
    parts[which]._set()
    both = Combined(*parts)
    both.add_callback(lambda: calls.append(1))
    assert calls == [1]
    assert [registered(part) for part in parts] == [0, 0]


def test_closing_a_combined_signal_forgets_its_callbacks_but_not_its_state():
    part, calls = Signal(), []
    both = Combined(part)
    both.add_callback(lambda: calls.append(1))
    both.close()
    assert registered(part) == registered(both) == 0
    part._set()
    assert calls == [] and both.is_set()


def test_a_long_lived_part_does_not_keep_a_combined_signal_alive():
    part = Signal()
    both = Combined(part)
    both.wait(0.001)
    both.add_callback(lambda: None)()
    gone = weakref.ref(both)
    del both
    gc.collect()
    assert gone() is None


def test_no_link_is_left_when_parts_are_set_while_callbacks_are_added():
    for _ in range(200):
        parts, calls, barrier = [Signal(), Signal()], [], threading.Barrier(2)
        both = Combined(*parts)

        def set_it(parts=parts, barrier=barrier):
            barrier.wait()
            parts[1]._set()

        setter = threading.Thread(target=set_it)
        setter.start()
        barrier.wait()
        for number in range(5):
            both.add_callback(lambda number=number, calls=calls: calls.append(number))
        setter.join()
        assert sorted(calls) == list(range(5))
        assert registered(parts[0]) == registered(both) == len(both._links) == 0


# Signals of others


class Broken:
    def is_set(self):
        raise ValueError("broken")


class Later:
    """Set from the third time it is asked."""

    def __init__(self):
        self.asked = 0

    def is_set(self):
        self.asked += 1
        return self.asked > 2


def test_our_own_signal_is_given_as_it_is():
    signal = Signal()
    with watching(signal) as seen:
        assert seen is signal

    async def main():
        async with watching(signal) as seen:
            assert seen is signal

    asyncio.run(main())


def test_no_signal_gives_one_that_is_not_set():
    with watching(None) as seen:
        assert isinstance(seen, Signal) and not seen.is_set()


@pytest.mark.parametrize("thing", [object(), 5, "x", threading.Event, Signal, lambda: True])
def test_what_has_no_is_set_is_refused(thing):
    with pytest.raises(ConfigError, match="signal is"):
        watching(thing)


@pytest.mark.parametrize("make", [threading.Event, Later])
def test_a_foreign_signal_is_seen_from_plain_code(make):
    foreign = make()
    with watching(foreign) as seen:
        assert not seen.is_set()
        if isinstance(foreign, threading.Event):
            foreign.set()
        assert seen.wait(LONG) is True
        assert seen.reason is None


@pytest.mark.parametrize("make", [threading.Event, asyncio.Event, Later])
def test_a_foreign_signal_is_seen_in_a_loop_without_a_thread(make):
    async def main():
        foreign = make()
        before = threading.active_count()
        async with watching(foreign) as seen:
            assert not seen.is_set()
            if hasattr(foreign, "set"):
                foreign.set()
            assert await seen.wait(LONG) is True
            assert threading.active_count() == before

    asyncio.run(main())


def test_a_foreign_signal_that_is_set_already_is_seen_at_once():
    foreign = threading.Event()
    foreign.set()
    with watching(foreign) as seen:
        assert seen.is_set()

    async def main():
        async with watching(foreign) as seen:
            assert seen.is_set()

    asyncio.run(main())


def test_a_foreign_signal_that_cannot_be_asked_counts_as_set_with_the_error_as_reason():
    with watching(Broken()) as seen:
        assert isinstance(seen.reason, ValueError)

    async def main():
        async with watching(Broken()) as seen:
            assert isinstance(seen.reason, ValueError)

    asyncio.run(main())


def test_the_thread_ends_with_the_block_also_when_it_raises():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), watching(threading.Event()):
        assert threading.active_count() == before + 1
        raise ZeroDivisionError
    assert threading.active_count() == before


def test_nothing_is_asked_any_more_after_the_block_in_a_loop():
    async def main():
        async with watching(threading.Event()) as _:
            assert len(pending()) == 1
        assert pending() == []

    def pending():
        return [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]

    asyncio.run(main())


def test_the_running_loop_is_found_in_its_own_thread_only():
    async def main():
        assert signals.running_loop() is asyncio.get_running_loop()
        found = []
        thread = threading.Thread(target=lambda: found.append(signals.running_loop()))
        thread.start()
        thread.join()
        assert found == [None]

    assert signals.running_loop() is None
    asyncio.run(main())

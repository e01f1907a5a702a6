"""The only reader of time in the daemon, and the alarms that wake it. Times are whole milliseconds.

Three clocks, and which one answers which question:

    wall     Unix time. It can be set, forwards and backwards. What a calendar means: deadlines, `sleep`, windows.
    steady   Never set, and stands still while the machine is suspended. When an event loop's timer should fire.
    lease    Steady time in which the daemon could do its duty. How long a holder has been silent, a caller has waited.

The lease clock leaves out what the daemon overslept (stopped, paused with its virtual machine, starved) and the time in
which writes failed: then a holder's heartbeat could not be heard, so silence proves nothing. It never goes back.

Two alarms, one for each kind of deadline. Neither wakes the process while nothing is pending.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import heapq
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

PULSE_MS = 500
"""How often the lease clock is looked at while something is pending on it. A pause may begin at any moment between two
looks, so this is also how much longer a wait may last by it."""

ASLEEP_MS = 1_000
"""A look as late as this is proof of sleep. A busy loop, a collection of garbage or a slow disk cost tens of
milliseconds; a heartbeat comes every third of a lease, which is seconds. A shorter pause costs nobody a lease."""

LOOK_MS = 15_000
"""How often a pending wall deadline is looked at where the kernel cannot wake us when the clock is set: a machine that
resumes, or whose clock is put forward, is noticed within this time, at two wake-ups per idle half minute."""

SLEW_MS = 50
"""How far the wall clock may drift from the lease clock (rounding, NTP that slews it) before a time of the one is
spelled anew in the other: so one end of a lease is told as one wall time, however often it is asked for."""

WALL_MS_MAX = 9_000_000_000_000
"""The latest wall time an alarm is set to, in the year 2255: nanoseconds of later years do not fit 64 bits."""

SPANS_KEPT = 16
"""How many spans taken out of the lease clock are remembered, to count what two observers report once. They report
within seconds of each other; 16 spans are much more than that needs."""


class Alarm(Protocol):
    """A one-shot timer of the event loop, kept for the life of its owner and armed again and again."""

    def arm(self, at_ms: int | None) -> None:
        """Ring at `at_ms` instead of any earlier plan; None: do not ring. The same plan again costs nothing."""

    def close(self) -> None:
        """Do not ring any more, whatever is armed later."""


class Clock:
    """The time of this machine. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._skipped_ms = 0
        self._spans: list[tuple[int, int]] = []  # steady times taken out: disjoint, the newest last
        self._frozen_at_ms: int | None = None
        self._lease_ms = 0  # the latest lease time anyone was told
        self._pending = 0  # alarms that are armed: each of them looks every PULSE_MS
        self._seen_ms = 0  # steady time of the last look
        self._woke_ms = -1
        self._epoch_ms: int | None = None  # what `lease_epoch_ms` told last

    def wall_ms(self) -> int:
        """Unix time. May jump either way."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """Time since some moment of this boot, without the time in suspend. Never goes back.

        That is CLOCK_MONOTONIC on Linux, and on macOS mach_absolute_time (CLOCK_UPTIME_RAW): macOS lets its
        CLOCK_MONOTONIC run on in sleep. Python's `monotonic` is the right one on both.
        """
        return time.monotonic_ns() // 1_000_000

    def lease_ms(self) -> int:
        """Steady time minus all that was taken out. Never goes back; comparable within one life of the daemon only."""
        with self._lock:
            return self._lease(self.steady_ms())

    def lease_epoch_ms(self) -> int:
        """What to add to a lease time to tell it as a wall time. Changes only when the two clocks part by more than
        `SLEW_MS`: the wall clock was set, or time was taken out of the lease clock."""
        with self._lock:
            epoch_ms = self.wall_ms() - self._lease(self.steady_ms())
            if self._epoch_ms is None or abs(epoch_ms - self._epoch_ms) > SLEW_MS:
                self._epoch_ms = epoch_ms
            return self._epoch_ms

    def woke_ms(self) -> int:
        """The lease time at which the daemon woke from its last sleep; -1 before the first."""
        with self._lock:
            self._lease(self.steady_ms())
            return self._woke_ms

    def pending(self, more: int) -> None:
        """So many alarms more (or less) are armed, and will look at the lease clock each PULSE_MS."""
        with self._lock:
            if not self._pending:
                self._seen_ms = self.steady_ms()
            self._pending += more

    def skip(self, ms: int) -> int:
        """Take the last `ms` milliseconds out of the lease clock, and return how many of them were still in it.

        Time that was taken out before (by another observer of the same pause, or by a freeze) is not taken twice.
        Lease times already told stay true: the clock stands until it has caught up with them.
        """
        with self._lock:
            now_ms = self.steady_ms()
            taken_ms = self._take(now_ms - ms, now_ms)
            self._woke_ms = self._lease(now_ms)
            return taken_ms

    def freeze(self) -> None:
        """Let the lease clock stand until `thaw`. A second freeze changes nothing."""
        with self._lock:
            if self._frozen_at_ms is None:
                self._frozen_at_ms = self.steady_ms()

    def thaw(self) -> None:
        """Let the lease clock go on from where it stands. One thaw ends any number of freezes."""
        with self._lock:
            self._lease(self.steady_ms())
            self._frozen_at_ms = None

    def lease_alarm(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> Alarm:
        """An alarm on the lease clock: see `LeaseAlarm`. Alarms come from the clock so that a test's rings them."""
        return LeaseAlarm(loop, self, on_due)

    def wall_alarm(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> Alarm:
        """An alarm in wall time: see `WallAlarm`."""
        return WallAlarm(loop, self, on_due)

    def _lease(self, now_ms: int) -> int:
        """Looks at the lease clock; what it shows."""
        if self._frozen_at_ms is not None:
            self._take(self._frozen_at_ms, now_ms)
        seen_ms, self._seen_ms = self._seen_ms, now_ms
        has_slept = self._pending > 0 and now_ms - seen_ms > ASLEEP_MS
        if has_slept:
            self._take(seen_ms, now_ms)
        self._lease_ms = max(self._lease_ms, now_ms - self._skipped_ms)
        if has_slept:
            self._woke_ms = self._lease_ms
        return self._lease_ms

    def _take(self, start_ms: int, now_ms: int) -> int:
        """Add the span from `start_ms` to now to the spans taken out, and return how much of it was new."""
        if start_ms >= now_ms:
            return 0
        new_ms = now_ms - start_ms
        while self._spans and self._spans[-1][1] >= start_ms:
            first_ms, last_ms = self._spans.pop()
            new_ms -= last_ms - max(first_ms, start_ms)
            start_ms = min(first_ms, start_ms)
        self._spans = [*self._spans[1 - SPANS_KEPT :], (start_ms, now_ms)]
        self._skipped_ms += new_ms
        return new_ms


class LeaseAlarm:
    """Rings when the lease clock shows a time: `on_due()`, on the loop, never early. While it is armed it looks at the
    clock each `PULSE_MS`, by which the clock learns that the daemon was awake."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._on_due = on_due
        self._at_ms: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def arm(self, at_ms: int | None) -> None:
        if self._closed or at_ms == self._at_ms:
            return
        self._clock.pending((at_ms is not None) - (self._at_ms is not None))
        self._at_ms = at_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_ms is not None:
            self._wait(at_ms)

    def close(self) -> None:
        self.arm(None)
        self._closed = True

    def _wait(self, at_ms: int, at_least_ms: int = 0) -> None:
        now_ms = self._clock.lease_ms()
        ms = min(max(0, at_least_ms, at_ms - now_ms), PULSE_MS)
        self._timer = self._loop.call_later(ms / 1000, self._look, at_ms, now_ms, ms)

    def _look(self, at_ms: int, seen_ms: int, waited_ms: int) -> None:
        now_ms = self._clock.lease_ms()
        if now_ms < at_ms:
            self._wait(at_ms, 2 * waited_ms if now_ms == seen_ms else 0)  # a clock that stands may do so for long
        else:
            self.arm(None)
            self._on_due()


class Timers:
    """Calls that are due when the lease clock shows a time; any number, on one alarm."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._clock = clock
        self._alarm = clock.lease_alarm(loop, self._ring)
        self._due: list[Timer] = []  # a heap
        self._cancelled = 0  # at most so many of them

    def after(self, ms: int, work: Callable[[], object]) -> Timer:
        """Calls `work`, which must not raise, when `ms` of lease time have passed."""
        timer = Timer(self, self._clock.lease_ms() + ms, work)
        heapq.heappush(self._due, timer)
        self._arm()
        return timer

    def close(self) -> None:
        """Nothing is called any more."""
        self._alarm.close()

    def _arm(self) -> None:
        if 2 * self._cancelled > len(self._due):
            self._due = [timer for timer in self._due if not timer.is_cancelled]
            heapq.heapify(self._due)
            self._cancelled = 0
        while self._due and self._due[0].is_cancelled:
            heapq.heappop(self._due)
        self._alarm.arm(self._due[0].at_ms if self._due else None)

    def _ring(self) -> None:
        now_ms = self._clock.lease_ms()
        due = []
        while self._due and self._due[0].at_ms <= now_ms:
            due.append(heapq.heappop(self._due))
        for timer in due:
            if not timer.is_cancelled:
                timer.work()
        self._arm()


class Timer:
    """One of these calls."""

    __slots__ = ("_timers", "at_ms", "is_cancelled", "work")

    def __init__(self, timers: Timers, at_ms: int, work: Callable[[], object]) -> None:
        self._timers = timers
        self.at_ms = at_ms
        self.work = work
        self.is_cancelled = False

    def __lt__(self, other: Timer) -> bool:
        return self.at_ms < other.at_ms

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self._timers._cancelled += 1
            self._timers._arm()


class WallAlarm:
    """Rings at a wall time, and whenever the wall clock is set or the machine resumes: `on_due()`, on the loop.

    It says "look what is due", not "this is due": whoever is called arms it again. The kernel does the waiting
    (timerfd, absolute, cancelled when the clock is set). Where it cannot, the clock is looked at every `LOOK_MS` while
    the alarm is armed.

    Raises OSError (EMFILE, ENFILE, ENOMEM) when the descriptor cannot be had now.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._on_due = on_due
        self._at_ms: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._fd = timerfd_open()
        if self._fd is not None:
            try:
                loop.add_reader(self._fd, self._on_readable)
            except BaseException:
                os.close(self._fd)
                raise

    def arm(self, at_ms: int | None) -> None:
        if self._closed or at_ms == self._at_ms:
            return
        self._at_ms = at_ms
        if self._fd is None:
            self._plan_look()
        elif not timerfd_set(self._fd, at_ms):
            self._loop.call_soon(self._on_clock_set)

    def close(self) -> None:
        if self._closed:
            return
        self.arm(None)
        self._closed = True
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _on_readable(self) -> None:
        if self._fd is None:
            return
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # armed anew after the loop had seen it ring
        except OSError as error:
            if error.errno != errno.ECANCELED:  # that one: the clock was set, so look again
                raise
        self._ring()

    def _on_clock_set(self) -> None:
        if self._at_ms is not None:
            self._ring()

    def _ring(self) -> None:
        # Disarmed first: a timer that has fired would still be readable at the next setting of the clock.
        self.arm(None)
        self._on_due()

    def _plan_look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._at_ms is not None:
            left_ms = max(0, self._at_ms - self._clock.wall_ms())
            self._timer = self._loop.call_later(min(left_ms, LOOK_MS) / 1000, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._at_ms is not None and self._clock.wall_ms() >= self._at_ms:
            self._ring()
        else:
            self._plan_look()


# What follows is Linux's timerfd: from Python 3.13 in `os`, before that in the C library.

_ABSOLUTE, _CANCEL_ON_SET = 1, 2  # TFD_TIMER_ABSTIME, TFD_TIMER_CANCEL_ON_SET: the same on every architecture
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def timerfd_open() -> int | None:
    """A disarmed timer on the wall clock, non-blocking and closed on exec. None where the system has none.

    Raises OSError when it has them, but no descriptor is free.
    """
    if sys.platform != "linux":
        return None
    flags = os.O_NONBLOCK | os.O_CLOEXEC  # the values of TFD_NONBLOCK and TFD_CLOEXEC
    try:
        if hasattr(os, "timerfd_create"):
            return int(os.timerfd_create(time.CLOCK_REALTIME, flags=flags))
        libc = _libc()
        return int(_checked(libc.timerfd_create(time.CLOCK_REALTIME, flags)))
    except (AttributeError, ImportError):
        return None  # a C library without it, a Python without ctypes
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None  # a sandbox or a kernel without it


def timerfd_set(fd: int, at_ms: int | None) -> bool:
    """Set the timer to a wall time, or disarm it. False: it is set, but the clock was set since it was last looked at.

    A disarmed timer does not hear of the setting of the clock either.
    """
    at_ns = 0 if at_ms is None else max(1, min(at_ms, WALL_MS_MAX) * 1_000_000)  # 0 would disarm
    flags = 0 if at_ms is None else _ABSOLUTE | _CANCEL_ON_SET
    try:
        if hasattr(os, "timerfd_settime_ns"):
            os.timerfd_settime_ns(fd, flags=flags, initial=at_ns)
        else:
            _set_by_libc(fd, flags, at_ns)
    except OSError as error:
        if error.errno != errno.ECANCELED:
            raise
        return False
    return True


def _set_by_libc(fd: int, flags: int, at_ns: int) -> None:
    import ctypes

    # struct itimerspec: interval (0, fires once) and value, each of seconds and nanoseconds
    spec = (ctypes.c_long * 4)(0, 0, *divmod(at_ns, 1_000_000_000))
    _checked(_libc().timerfd_settime(fd, flags, ctypes.byref(spec), None))


@functools.cache
def _libc() -> Any:
    import ctypes  # here: it costs milliseconds at start-up, and Python 3.13 does without

    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    import ctypes

    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

"""A clock that goes only when a test tells it to. Its alarms ring from the calls that move it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runstated.host.clock import Alarm, Clock


class ManualClock(Clock):
    """Wall and steady time are moved apart by hand; the lease clock follows from them by the daemon's own rules.

    Time that passes stops at every alarm on its way and rings it on time, in the caller's thread.
    """

    def __init__(self, wall_ms: int = 1_700_000_000_000, steady_ms: int = 1_000_000) -> None:
        super().__init__()
        self._wall = wall_ms
        self._steady = steady_ms
        self._lease_alarms: list[ManualAlarm] = []
        self._wall_alarms: list[ManualAlarm] = []
        self.pending(1)  # as if an alarm were armed all the time: a stall is noticed

    def wall_ms(self) -> int:
        return self._wall

    def steady_ms(self) -> int:
        return self._steady

    def pass_ms(self, ms: int) -> None:
        """Ordinary time, in which the lease clock is looked at: both clocks go on, alarms ring at their moment."""
        end = self._steady + ms
        while True:
            waits = [left for alarm in self._alarms() if (left := alarm.left_ms()) is not None and left > 0]
            self._move(min([end - self._steady, *waits]))
            self._seen_ms = self._steady
            for alarm in self._alarms():
                alarm.ring_if_due()
            if self._steady >= end:
                return

    def stall(self, ms: int) -> None:
        """The daemon does not run (stopped, paused, starved) while both clocks go on: nobody looks at them."""
        self._move(ms)
        for alarm in self._alarms():
            alarm.ring_if_due()

    def jump_wall(self, ms: int) -> None:
        """Someone sets the wall clock, forwards or backwards: every armed wall alarm rings."""
        self._wall += ms
        for alarm in list(self._wall_alarms):
            alarm.ring()

    def suspend(self, ms: int) -> None:
        """The machine sleeps and resumes: only the wall clock has gone on, every armed wall alarm rings."""
        self.jump_wall(ms)

    def next_alarm_ms(self) -> int | None:
        """How long until the next alarm rings in ordinary time; None while none is armed."""
        return min((left for alarm in self._alarms() if (left := alarm.left_ms()) is not None), default=None)

    def lease_alarm(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> Alarm:
        alarm = ManualAlarm(loop, self.lease_ms, on_due)
        self._lease_alarms.append(alarm)
        return alarm

    def wall_alarm(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> Alarm:
        alarm = ManualAlarm(loop, self.wall_ms, on_due)
        self._wall_alarms.append(alarm)
        return alarm

    def _alarms(self) -> list[ManualAlarm]:
        return [*self._lease_alarms, *self._wall_alarms]

    def _move(self, ms: int) -> None:
        self._wall += ms
        self._steady += ms


class ManualAlarm:
    """An alarm of a ManualClock. One that is armed for the past rings in the loop's next turn, as a real one does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_ms: Callable[[], int], on_due: Callable[[], None]) -> None:
        self.at_ms: int | None = None
        self._loop = loop
        self._now_ms = now_ms
        self._on_due = on_due
        self._closed = False

    def arm(self, at_ms: int | None) -> None:
        if self._closed or at_ms == self.at_ms:
            return
        self.at_ms = at_ms
        if at_ms is not None and at_ms <= self._now_ms():
            self._loop.call_soon(self.ring_if_due)

    def close(self) -> None:
        self.arm(None)
        self._closed = True

    def left_ms(self) -> int | None:
        return None if self.at_ms is None else max(0, self.at_ms - self._now_ms())

    def ring_if_due(self) -> None:
        if self.left_ms() == 0:
            self.ring()

    def ring(self) -> None:
        if self.at_ms is not None:
            self.at_ms = None
            self._on_due()

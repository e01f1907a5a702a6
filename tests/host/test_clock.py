from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from runstated.host import clock as clock_module
from runstated.host.clock import ASLEEP_MS, Alarm, Clock, LeaseAlarm, Timers, WallAlarm
from tests.clock import ManualClock

PATIENCE_S = 30
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
needs_timerfd = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = LOOPS[request.param]()
    yield loop
    loop.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall_ms=1_700_000_000_000, steady_ms=1_000_000)


def run(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[object]) -> None:
    async def patiently() -> None:
        await asyncio.wait_for(awaitable, PATIENCE_S)

    loop.run_until_complete(patiently())


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()


def wakeups_within(loop: asyncio.AbstractEventLoop, seconds: float) -> int:
    """How often the loop's thread leaves its wait (voluntary context switches) while nothing is asked of it."""

    async def idle() -> int:
        before = switches()
        await asyncio.sleep(seconds)
        return switches() - before

    return loop.run_until_complete(idle())


def switches() -> int:
    with open(f"/proc/self/task/{threading.get_native_id()}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))


# The machine's own clock


def test_wall_and_steady_time_go_on_together() -> None:
    clock = Clock()
    wall, steady, lease = clock.wall_ms(), clock.steady_ms(), clock.lease_ms()
    assert abs(wall - time.time() * 1000) < 5_000
    while clock.steady_ms() < steady + 20:
        pass
    assert clock.wall_ms() > wall
    assert clock.lease_ms() >= lease + 20


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux's names of the clocks")
def test_steady_time_is_the_clock_that_stands_still_in_suspend() -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000_000
    steady = Clock().steady_ms()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000_000
    assert before <= steady <= after


def test_the_lease_clock_never_goes_back_for_threads_that_read_while_another_skips_and_freezes() -> None:
    clock = Clock()
    went_back: list[tuple[int, int]] = []
    done = threading.Event()

    def read() -> None:
        last = clock.lease_ms()
        while not done.is_set():
            now = clock.lease_ms()
            if now < last:
                went_back.append((last, now))
            last = now

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for round_ in range(2_000):
        clock.skip(round_ % 7)
        clock.freeze()
        clock.thaw()
    done.set()
    for reader in readers:
        reader.join(PATIENCE_S)
    assert went_back == []


# The lease clock


def test_leases_stand_still_in_suspend_while_the_wall_clock_goes_on(clock: ManualClock) -> None:
    lease, wall = clock.lease_ms(), clock.wall_ms()
    clock.suspend(3_600_000)
    assert clock.lease_ms() == lease
    assert clock.wall_ms() == wall + 3_600_000


def test_setting_the_wall_clock_does_not_touch_leases(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.jump_wall(-86_400_000)
    clock.pass_ms(10)
    assert clock.lease_ms() == lease + 10


def test_the_end_of_a_lease_is_told_as_one_wall_time() -> None:
    clock = Clock()
    end_ns = time.monotonic_ns() + 20_000_000  # whole milliseconds of two clocks: rounded apart most of the time
    told = {clock.lease_epoch_ms()}
    while time.monotonic_ns() < end_ns:
        told.add(clock.lease_epoch_ms())
    assert len(told) == 1


def test_a_wall_clock_that_drifts_moves_no_end_and_one_that_is_set_moves_all(clock: ManualClock) -> None:
    assert clock.lease_epoch_ms() + clock.lease_ms() == clock.wall_ms()
    before_ms = clock.lease_epoch_ms()
    clock.jump_wall(clock_module.SLEW_MS)
    assert clock.lease_epoch_ms() == before_ms
    clock.jump_wall(3_600_000)
    assert clock.lease_epoch_ms() + clock.lease_ms() == clock.wall_ms()


def test_skipped_time_is_missing_from_the_lease_clock(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.pass_ms(5_000)
    assert clock.skip(4_000) == 4_000
    assert clock.lease_ms() == lease + 1_000


def test_a_lease_time_already_told_stays_and_the_clock_stands_until_it_has_caught_up(clock: ManualClock) -> None:
    clock.pass_ms(5_000)
    told = clock.lease_ms()
    clock.skip(4_000)
    assert clock.lease_ms() == told
    clock.pass_ms(4_000)
    assert clock.lease_ms() == told
    clock.pass_ms(1)
    assert clock.lease_ms() == told + 1


def test_what_was_slept_is_taken_out_from_the_last_look_on(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    assert clock.woke_ms() == -1
    clock.pass_ms(100)
    clock.stall(10_000)
    assert clock.lease_ms() == clock.lease_ms() == clock.woke_ms() == lease + 100
    clock.pass_ms(7)
    assert (clock.lease_ms(), clock.woke_ms()) == (lease + 107, lease + 100)


def test_one_pause_that_two_observers_report_is_taken_out_once(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.stall(10_000)
    assert clock.lease_ms() == lease
    clock.pass_ms(100)
    assert clock.skip(10_100) == 100
    assert clock.lease_ms() == lease


def test_a_look_that_is_a_little_late_takes_nothing_out(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.stall(ASLEEP_MS)
    assert clock.lease_ms() == lease + ASLEEP_MS
    assert clock.woke_ms() == -1


def test_where_nothing_is_pending_nobody_had_to_look(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.pending(-1)
    clock.stall(60_000)
    assert clock.lease_ms() == lease + 60_000
    clock.stall(60_000)
    clock.pending(1)
    assert clock.lease_ms() == lease + 120_000
    clock.stall(60_000)
    assert clock.lease_ms() == lease + 120_000
    assert clock.woke_ms() == lease + 120_000


def test_the_lease_clock_stands_while_it_is_frozen_and_goes_on_from_there(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.freeze()
    clock.pass_ms(60_000)
    assert clock.lease_ms() == lease
    clock.freeze()
    clock.pass_ms(60_000)
    clock.thaw()
    assert clock.lease_ms() == lease
    clock.pass_ms(7)
    clock.thaw()
    assert clock.lease_ms() == lease + 7


def test_a_second_freeze_does_not_give_back_the_time_since_the_first(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.freeze()
    clock.pass_ms(60_000)
    clock.freeze()
    clock.pass_ms(60_000)
    clock.thaw()
    clock.pass_ms(1)
    assert clock.lease_ms() == lease + 1


def test_a_pause_while_the_clock_is_frozen_is_not_taken_out_twice(clock: ManualClock) -> None:
    lease = clock.lease_ms()
    clock.pass_ms(1_000)
    clock.freeze()
    clock.stall(10_000)
    clock.thaw()
    clock.skip(500)
    assert clock.lease_ms() == lease + 1_000


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.integers(0, 50)),
            st.tuples(st.just("skip"), st.integers(0, 120)),
            st.tuples(st.sampled_from(["freeze", "thaw", "suspend"]), st.just(5)),
        ),
        max_size=15,  # fewer than SPANS_KEPT: beyond that the oldest spans are forgotten
    )
)
def test_the_lease_clock_is_the_count_of_steady_milliseconds_that_nobody_took_out(steps: list[tuple[str, int]]) -> None:
    clock = ManualClock(steady_ms=1_000)
    alive = [True] * 1_000  # one entry per steady millisecond
    frozen = False
    told: list[int] = []
    for step, ms in steps:
        if step == "pass":
            clock.pass_ms(ms)
            alive += [not frozen] * ms
        elif step == "skip":
            clock.skip(ms)
            alive[len(alive) - ms :] = [False] * ms
        elif step == "suspend":
            clock.suspend(ms)
        else:
            getattr(clock, step)()
            frozen = step == "freeze"
        told.append(max([sum(alive), *told]))
        assert clock.lease_ms() == told[-1]


# Alarms on real loops


def test_a_lease_alarm_rings_at_its_time(loop: asyncio.AbstractEventLoop) -> None:
    clock = Clock()

    async def story() -> None:
        rung: asyncio.Future[int] = loop.create_future()
        alarm = LeaseAlarm(loop, clock, lambda: rung.set_result(clock.lease_ms()))
        at = clock.lease_ms() + 40
        alarm.arm(at)
        alarm.arm(at)
        assert await rung >= at
        assert clock._pending == 0

    run(loop, story())


def test_a_lease_alarm_armed_for_the_past_rings_at_once(loop: asyncio.AbstractEventLoop) -> None:
    clock = Clock()

    async def story() -> None:
        rung = asyncio.Event()
        LeaseAlarm(loop, clock, rung.set).arm(clock.lease_ms() - 60_000)
        await rung.wait()
        assert clock.woke_ms() == -1

    run(loop, story())


def test_a_blocked_loop_has_slept_while_an_alarm_is_armed(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "PULSE_MS", 20)
    monkeypatch.setattr(clock_module, "ASLEEP_MS", 60)
    clock = Clock()

    async def story() -> None:
        rung = asyncio.Event()
        started, steady = clock.lease_ms(), clock.steady_ms()
        LeaseAlarm(loop, clock, rung.set).arm(started + 100)
        await asyncio.sleep(0.05)
        busy_until = clock.steady_ms() + 300
        while clock.steady_ms() < busy_until:
            pass
        await rung.wait()
        assert clock.steady_ms() - steady >= 350
        assert clock.woke_ms() < started + 100, "it slept before its time had come, and that time is not lost"
        assert clock.lease_ms() - started <= clock.steady_ms() - steady - 250

    run(loop, story())


def test_an_alarm_on_a_clock_that_stands_looks_at_it_seldom(loop: asyncio.AbstractEventLoop) -> None:
    clock = Clock()

    async def story() -> None:
        rung = asyncio.Event()
        alarm = LeaseAlarm(loop, clock, rung.set)
        clock.freeze()
        alarm.arm(clock.lease_ms() + 2)
        before = switches()
        await asyncio.sleep(0.4)
        assert switches() - before < 40, "not every two milliseconds"
        assert not rung.is_set()
        clock.thaw()
        await rung.wait()

    run(loop, story())


def test_timers_ring_in_order_and_not_when_they_are_cancelled(clock: ManualClock) -> None:
    loop = asyncio.new_event_loop()
    timers = Timers(loop, clock)
    rung: list[int] = []
    kept = [timers.after(ms, lambda ms=ms: rung.append(ms)) for ms in (300, 100, 200)]
    dropped = [timers.after(ms, lambda: rung.append(0)) for ms in range(50, 450)]
    for timer in dropped:
        timer.cancel()
        timer.cancel()
    assert len(timers._due) <= 2 * len(kept), "what was cancelled leaves nothing behind"
    clock.pass_ms(250)
    assert rung == [100, 200]
    kept[0].cancel()
    clock.pass_ms(250)
    assert rung == [100, 200]
    assert clock.next_alarm_ms() is None
    timers.close()
    loop.close()


@pytest.mark.parametrize("kind", ["lease", "wall", "wall without timerfd"])
def test_an_alarm_rings_once_per_arming_and_can_be_moved_and_taken_back(
    loop: asyncio.AbstractEventLoop, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "wall without timerfd":
        monkeypatch.setattr(clock_module, "timerfd_open", lambda: None)
    clock = Clock()

    async def story() -> None:
        rings: list[int] = []
        rung = asyncio.Event()

        def on_due() -> None:
            rings.append(now())
            rung.set()

        alarm: Alarm
        now: Callable[[], int]
        if kind == "lease":
            alarm, now = clock.lease_alarm(loop, on_due), clock.lease_ms
        else:
            alarm, now = clock.wall_alarm(loop, on_due), clock.wall_ms

        alarm.arm(now() + 86_400_000)
        soon = now() + 30
        alarm.arm(soon)  # earlier
        await rung.wait()
        rung.clear()
        assert len(rings) == 1
        assert rings[0] >= soon

        past = now() - 5_000
        for _ in range(2):  # at once, and the same plan again is a new one once it has rung
            alarm.arm(past)
            await rung.wait()
            rung.clear()

        alarm.arm(now() + 10)
        alarm.arm(None)
        alarm.arm(now() + 10)
        later = now() + 60
        alarm.arm(later)  # later: the earlier plans are gone
        await rung.wait()
        assert len(rings) == 4
        assert rings[3] >= later

        alarm.arm(0)
        alarm.close()
        alarm.arm(0)
        alarm.close()
        await asyncio.sleep(0.05)  # nothing may come: only real time can show that
        assert len(rings) == 4

    run(loop, story())


@pytest.mark.parametrize("at", [0, 10**15, 2**62])
def test_a_wall_alarm_takes_any_time(loop: asyncio.AbstractEventLoop, at: int) -> None:
    async def story() -> None:
        rung = asyncio.Event()
        alarm = WallAlarm(loop, Clock(), rung.set)
        alarm.arm(at)
        if at == 0:
            await rung.wait()
        else:
            await asyncio.sleep(0.02)
            assert not rung.is_set()
        alarm.close()

    run(loop, story())


@needs_timerfd
def test_alarms_that_are_not_armed_or_not_due_do_not_wake_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    """But for the pulse of one that is armed on the lease clock."""
    clock = Clock()

    async def arm() -> list[Alarm]:
        alarms = [clock.wall_alarm(loop, lambda: rung.append(0)), clock.wall_alarm(loop, lambda: rung.append(0))]
        alarms += [clock.lease_alarm(loop, lambda: rung.append(0)), clock.lease_alarm(loop, lambda: rung.append(0))]
        alarms[1].arm(clock.wall_ms() + 3_600_000)
        alarms[3].arm(clock.lease_ms() + 3_600_000)
        return alarms

    rung: list[object] = []
    without = wakeups_within(loop, 0.5)
    alarms = loop.run_until_complete(arm())
    assert wakeups_within(loop, 0.5) <= without + 2
    for alarm in alarms:
        alarm.close()


@needs_timerfd
def test_a_wall_alarm_gives_its_descriptor_back(loop: asyncio.AbstractEventLoop) -> None:
    async def story() -> None:
        before = open_descriptors()
        for _ in range(50):
            alarm = WallAlarm(loop, Clock(), lambda: None)
            alarm.arm(Clock().wall_ms() + 60_000)
            assert len(open_descriptors()) == len(before) + 1
            alarm.close()
        assert open_descriptors() == before

    run(loop, story())


@needs_timerfd
def test_the_timer_of_a_wall_alarm_is_cancelled_when_the_clock_is_set_and_otherwise_deaf() -> None:
    fd = clock_module.timerfd_open()
    assert fd is not None
    try:
        assert not os.get_inheritable(fd)
        assert clock_module.timerfd_set(fd, 4_000_000_000_000)
        with open(f"/proc/self/fdinfo/{fd}") as info:
            lines = dict(line.split(":", 1) for line in info.read().splitlines())
        assert lines["clockid"].strip() == str(time.CLOCK_REALTIME)
        assert lines["settime flags"].strip() == "03"  # absolute, cancel on set
        assert clock_module.timerfd_set(fd, None)
        with pytest.raises(BlockingIOError):
            os.read(fd, 8)
    finally:
        os.close(fd)


@needs_timerfd
def test_a_wall_alarm_looks_again_when_the_clock_is_set_while_it_waits(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[str] = []
    alarm = WallAlarm(loop, Clock(), lambda: rings.append("look"))
    alarm.arm(4_000_000_000_000)

    def cancelled(fd: int, size: int) -> bytes:
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", cancelled)
        alarm._on_readable()
    assert rings == ["look"]
    alarm._on_readable()  # nothing to read: seen by the loop, but armed anew since
    assert rings == ["look"]
    alarm.close()
    alarm._on_readable()
    assert rings == ["look"]


@needs_timerfd
def test_a_wall_alarm_looks_again_when_the_clock_was_set_just_before_it_was_armed(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = clock_module.timerfd_set
    answers = [False, True, True, False, True]
    monkeypatch.setattr(clock_module, "timerfd_set", lambda fd, at: really(fd, at) and answers.pop(0))
    rings: list[str] = []

    async def story() -> None:
        alarm = WallAlarm(loop, Clock(), lambda: rings.append("look"))
        alarm.arm(4_000_000_000_000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rings == ["look"]
        alarm.arm(None)
        alarm.arm(3_000_000_000_000)
        alarm.arm(4_000_000_000_000)
        alarm.arm(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rings == ["look"]
        alarm.close()

    run(loop, story())


@needs_timerfd
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_where_the_kernel_has_no_timerfd_the_clock_is_looked_at_only_while_a_deadline_is_pending(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_timerfd(monkeypatch, number)
    monkeypatch.setattr(clock_module, "LOOK_MS", 20)
    looks = 0
    enough = asyncio.Event()

    class Counting(ManualClock):
        def wall_ms(self) -> int:
            nonlocal looks
            looks += 1
            if looks == 3:
                enough.set()
            return super().wall_ms()

    clock = Counting()

    async def story() -> None:
        rung = asyncio.Event()
        alarm = WallAlarm(loop, clock, rung.set)
        await asyncio.sleep(0.1)
        assert looks == 0
        alarm.arm(ManualClock().wall_ms() + 3_600_000)
        await enough.wait()
        assert not rung.is_set()
        clock.jump_wall(3_600_000)
        await rung.wait()
        seen = looks
        await asyncio.sleep(0.1)
        assert looks == seen
        alarm.close()

    run(loop, story())


@needs_timerfd
def test_running_out_of_descriptors_is_not_mistaken_for_a_kernel_without_timerfd(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_timerfd(monkeypatch, errno.EMFILE)
    with pytest.raises(OSError) as caught:
        WallAlarm(loop, Clock(), lambda: None)
    assert caught.value.errno == errno.EMFILE


def refuse_timerfd(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    if hasattr(os, "timerfd_create"):
        monkeypatch.setattr(os, "timerfd_create", refuse)
    else:
        monkeypatch.setattr(clock_module, "_checked", refuse)


# The manual clock


def test_manual_time_rings_every_alarm_on_its_way_at_its_moment(clock: ManualClock) -> None:
    loop = asyncio.new_event_loop()
    rings: list[tuple[str, int]] = []
    start, wall = clock.steady_ms(), clock.wall_ms()

    def again() -> None:
        rings.append(("lease", clock.steady_ms() - start))
        if len(rings) < 4:
            lease.arm(clock.lease_ms() + 100)

    lease = clock.lease_alarm(loop, again)
    by_wall = clock.wall_alarm(loop, lambda: rings.append(("wall", clock.steady_ms() - start)))
    lease.arm(clock.lease_ms() + 100)
    by_wall.arm(wall + 150)
    assert clock.next_alarm_ms() == 100
    clock.pass_ms(1_000)
    assert rings == [("lease", 100), ("wall", 150), ("lease", 200), ("lease", 300)]
    assert clock.next_alarm_ms() is None
    assert clock.steady_ms() - start == clock.wall_ms() - wall == 1_000
    loop.close()


def test_a_manual_stall_is_no_lease_time_and_a_manual_suspend_rings_only_the_wall_alarms(clock: ManualClock) -> None:
    loop = asyncio.new_event_loop()
    rung: list[int] = []
    looks: list[int] = []
    start = clock.steady_ms()
    lease = clock.lease_alarm(loop, lambda: rung.append(clock.steady_ms() - start))
    wall = clock.wall_alarm(loop, lambda: looks.append(clock.wall_ms()))
    lease.arm(clock.lease_ms() + 1_000)
    wall.arm(clock.wall_ms() + 86_400_000)
    clock.suspend(5_000)
    assert (rung, len(looks)) == ([], 1)
    clock.stall(5_000)
    assert rung == []
    clock.pass_ms(1_000)
    assert rung == [6_000]
    clock.jump_wall(-5_000)
    assert len(looks) == 1
    loop.close()

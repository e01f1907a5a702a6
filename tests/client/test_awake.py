"""A caller's time-out counts the time in which its process was awake."""

from __future__ import annotations

import asyncio

import pytest

from runstate import awake, wire
from runstate.calls import Call, Gate, Timer, patience


class Clock:
    """Stands for the module ``time``, and goes when the test says so."""

    now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    monkeypatch.setattr(awake, "_slept_s", 0.0)
    monkeypatch.setattr(awake, "_woke_s", 0.0)
    return clock


def test_patience_is_waited_for_in_steps(clock: Clock) -> None:
    left = awake.Patience(1.2)
    steps = []
    while step := left.step():
        steps.append(round(step, 6))
        clock.now_s += step
    assert steps == [0.5, 0.5, 0.2]
    assert left.step() == 0
    assert awake.Patience(None).step() is None
    assert awake.Patience(0).step() == 0


def test_what_was_slept_is_taken_out_once_for_all_who_wait(clock: Clock) -> None:
    began = awake.now_s()
    waiting = [awake.Patience(2.0) for _ in range(3)]
    clock.now_s += 0.4
    assert [left.step() for left in waiting] == [0.5] * 3
    clock.now_s += 60.0
    for left in waiting:
        left.look()
    assert awake.now_s() - began == pytest.approx(0.4)
    clock.now_s += 1.0
    assert waiting[0].step() == 0.5
    clock.now_s += 0.5
    assert waiting[0].step() == pytest.approx(0.1)


def test_a_step_that_is_a_little_late_and_other_work_are_no_sleep(clock: Clock) -> None:
    left = awake.Patience(60.0)
    clock.now_s += awake.ASLEEP_S
    left.look()
    clock.now_s += 30.0
    left.resume()
    left.look()
    assert awake.now_s() == clock.now_s
    endless = awake.Patience(None)
    clock.now_s += 30.0
    endless.look()
    assert awake.now_s() == clock.now_s, "who waits without end takes no steps"


def test_a_repeat_gets_what_is_left_of_the_wait_without_what_was_slept(clock: Clock) -> None:
    call = Call(1, wire.OnceAcquire(run="r", key="k", wait_ms=10_000), lambda: True, None)
    call.body()
    left = patience(call, 30.0)
    clock.now_s += 3.0
    left.resume()
    left.step()
    clock.now_s += 600.0
    left.look()
    assert wire.decode_request(call.body()).wait_ms == 7_000


def test_tasks_are_awaited_for_their_time_without_what_was_slept(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "PULSE_S", 0.01)

    async def work() -> str:
        clock.now_s += 600.0
        await asyncio.sleep(0.03)
        return "done"

    async def story() -> None:
        task, endless = asyncio.ensure_future(work()), asyncio.ensure_future(asyncio.Event().wait())
        await awake.wait([task], 30.0)
        assert task.done()
        asyncio.get_running_loop().call_later(0.02, lambda: setattr(clock, "now_s", clock.now_s + 1.0))
        await awake.wait([endless, task], 0.5)
        assert not endless.done()
        endless.cancel()

    asyncio.run(story())


def test_a_gate_that_was_opened_is_open_though_the_time_is_over() -> None:
    gate = Gate()
    assert not gate.wait(awake.Patience(0))
    gate.open()
    assert gate.wait(awake.Patience(0))


def test_a_timer_expires_once_and_not_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "PULSE_S", 0.01)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        expired: list[str] = []
        done = asyncio.Event()
        dropped = Timer(loop, awake.Patience(0.03), lambda: expired.append("dropped"))
        Timer(loop, awake.Patience(None), lambda: expired.append("endless"))
        Timer(loop, awake.Patience(0.05), lambda: (expired.append("in time"), done.set()))
        dropped.cancel()
        await done.wait()
        await asyncio.sleep(0.02)
        assert expired == ["in time"]

    asyncio.run(story())

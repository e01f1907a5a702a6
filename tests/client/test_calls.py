"""A request under way: what a repeat says, who is woken, and that one outcome counts."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from runstate import calls, errors, framing, wire
from runstate.awake import Patience
from runstate.calls import Answer, Call, Gate, future_waker
from runstate.holds import Holds


def call(request: wire.Request[object]) -> tuple[Call, Gate]:
    gate = Gate()
    return Call(7, request, gate.open, None), gate


def test_a_repeat_says_so_with_its_ticket_and_the_time_that_is_left() -> None:
    made, _ = call(wire.QueuesResult(job="j", wait_ms=60_000))
    first = wire.decode_request(made.body())
    assert (first.again, first.ticket, first.wait_ms) == (False, 0, 60_000)
    made.ticket = 99
    time.sleep(0.002)
    again = wire.decode_request(made.body())
    assert (again.again, again.ticket) == (True, 99)
    assert 0 < again.wait_ms < 60_000


@pytest.mark.parametrize("wait_ms", [None, 0])
def test_a_wait_without_a_limit_or_without_any_wait_stays_so(wait_ms: int | None) -> None:
    made, _ = call(wire.QueuesResult(job="j", wait_ms=wait_ms))
    made.body()
    assert wire.decode_request(made.body()).wait_ms == wait_ms


def test_a_wait_whose_time_is_over_is_asked_for_one_more_moment() -> None:
    made, _ = call(wire.QueuesResult(job="j", wait_ms=1))
    made.body()
    time.sleep(0.003)
    assert wire.decode_request(made.body()).wait_ms == 1


def test_the_first_outcome_counts() -> None:
    made, gate = call(wire.RunsGet(run="r"))
    assert not gate.wait(Patience(0))
    made.finish(Answer(wire.Ok(), {}))
    made.finish(None, errors.RunstateError("late"))
    assert made.done
    assert gate.wait(Patience(0))
    assert isinstance(made.outcome().reply, wire.Ok)


def test_a_failed_call_raises() -> None:
    made, _ = call(wire.RunsGet(run="r"))
    made.finish(None, errors.ConfigError("wrong"))
    with pytest.raises(errors.ConfigError):
        made.outcome()


def test_a_gate_opens_for_one_and_may_be_opened_twice() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    assert gate.wait(None)
    assert not gate.wait(Patience(0.001))
    assert not gate.wait(Patience(-5))
    threading.Timer(0.01, gate.open).start()
    assert gate.wait(Patience(30))


def test_a_future_is_woken_from_any_thread_and_a_closed_loop_says_so() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        wake = future_waker(loop, future)
        threading.Thread(target=wake).start()
        await asyncio.wait_for(future, 30)
        assert wake()
        cancelled: asyncio.Future[None] = loop.create_future()
        cancelled.cancel()
        assert future_waker(loop, cancelled)()
        await asyncio.sleep(0)
        wakers.append(wake)

    wakers: list[object] = []
    asyncio.run(main())
    assert wakers[0]() is False  # type: ignore[operator]


def test_what_came_for_a_loop_that_is_closed_is_given_back() -> None:
    holds = Holds()
    hold = holds.add(5, "r", 30_000, None)
    made = Call(1, wire.OnceAcquire(run="r", key="k"), lambda: False, None)
    made.finish(Answer(wire.OnceGranted(token=5, attempt=1), {5: hold}))
    assert holds.take_given() == [5]


def test_pauses_between_tries_double_up_to_a_bound_however_many_tries_there_are() -> None:
    ask = wire.RunsGet(run="r")
    assert list(calls.pauses_s(ask, 3)) == [0.1, 0.2, 0.4, None]
    many = list(calls.pauses_s(ask, 2_000))
    assert (len(many), many[-2:]) == (2_001, [calls.PAUSE_S_MAX, None])


def test_who_waits_for_jobs_tries_for_as_long_as_the_wait_may_last() -> None:
    assert list(calls.pauses_s(wire.QueuesResult(job="j", wait_ms=1_000), 0)) == [0.1, 0.2, 0.4, 0.8, None]
    endless = calls.pauses_s(wire.GroupsEnded(run="r"), 0)
    assert [next(endless) for _ in range(100)][-1] == calls.PAUSE_S_MAX


@pytest.mark.parametrize("count", [0, 1, wire.LISTED_MAX, 2 * wire.LISTED_MAX + 1])
def test_a_long_list_of_numbers_goes_in_several_messages(count: int) -> None:
    numbers = tuple(range(1, count + 1))
    frames = framing.Splitter().feed(calls.beats(numbers)) if count else []
    sent = [wire.decode_request(body) for _, body in frames]
    assert tuple(token for beat in sent for token in beat.tokens) == numbers
    assert all(len(beat.tokens) <= wire.LISTED_MAX for beat in sent)
    assert calls.acks([]) == b""

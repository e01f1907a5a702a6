"""Replies and refusals, where an interrupt (the caller that reads may be the main thread) comes in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from runstate import errors, wire
from runstate.calls import Call, Gate
from runstate.holds import Holds
from runstate.inbox import Inbox, Runs
from runstate.news import News

DOWN = errors.UnavailableError("down", code="UNAVAILABLE")


def inbox_of(*calls: Call) -> Inbox:
    holds = Holds()
    inbox = Inbox(threading.RLock(), holds, Runs(), News(holds), lambda: "", lambda *_: None)
    inbox.calls.update({call.request_id: call for call in calls})
    return inbox


def interrupted_once(wake: Callable[[], bool] = lambda: True) -> Callable[[], bool]:
    """Wakes the caller, but for the first time."""
    left = [KeyboardInterrupt()]

    def interrupted() -> bool:
        if left:
            raise left.pop()
        return wake()

    return interrupted


def test_an_interrupt_while_all_calls_fail_leaves_the_others_open() -> None:
    gate = Gate()
    first = Call(1, wire.RunsGet(run="r"), interrupted_once(), None)
    second = Call(2, wire.RunsGet(run="r"), gate.open, None)
    inbox = inbox_of(first, second)
    with pytest.raises(KeyboardInterrupt):
        inbox.fail(DOWN)
    assert list(inbox.calls.values()) == [first, second], "so that somebody reads for them"
    inbox.fail(DOWN)
    assert inbox.calls == {}
    assert gate.wait(None)
    with pytest.raises(errors.UnavailableError, match="down"):
        second.outcome()


def test_an_interrupt_while_a_blocking_call_is_refused_leaves_it_open() -> None:
    loop = asyncio.new_event_loop()
    try:
        call = Call(1, wire.SlotsAcquire(run="r", pool="p", lease_ms=1000), interrupted_once(), loop)
        call.blocking = True
        inbox = inbox_of(call)
        held = inbox._holds.add(7, "r", 1000, loop)
        parked = wire.Parked(call=1, ticket=1, proof=1, behind=(held.token,))
        with pytest.raises(KeyboardInterrupt):
            inbox.pushed(parked)
        assert 1 in inbox.calls
        assert not call.done
        inbox.pushed(parked)
        assert isinstance(call.error, errors.ConfigError)
    finally:
        loop.close()


def test_the_next_try_of_a_call_stays_open_when_its_caller_was_faster() -> None:
    def again() -> bool:
        inbox.calls[1] = following
        return True

    call, following = (Call(1, wire.RunsGet(run="r"), wake, None) for wake in (again, lambda: True))
    inbox = inbox_of(call)
    inbox.frame(1, wire.encode(wire.Error(code="UNAVAILABLE", message="busy", retryable=True)))
    assert call.done
    assert inbox.calls == {1: following}

"""Outcomes without a daemon: what is owed, and when it is offered."""

from __future__ import annotations

import asyncio
import itertools
from math import inf

import pytest

from runstate import errors, wire
from runstate.calls import Answer, Call
from runstate.holds import Holds
from runstate.outcomes import Outcomes
from runstate.steps import Deliver

ENDS = wire.RunsEnd(run="r", state="stopped")


class Threads:
    """A connection that needs a thread for each offer."""

    def __init__(self) -> None:
        self.are_there = False
        self.offered: list[Call] = []
        self.outcomes = Outcomes(Holds(), itertools.count(1), self.start, lambda call, left: self.start(call), 0.0)

    def start(self, call: Call) -> bool:
        self.offered.append(call)
        if not self.are_there:
            raise errors.UnavailableError("no thread", code="UNAVAILABLE")
        return False


def test_an_offer_for_which_no_thread_can_be_started_is_made_again() -> None:
    threads = Threads()
    outcomes = threads.outcomes
    with pytest.raises(errors.UnavailableError, match="no thread"):
        outcomes.deliver(Deliver(ENDS, None))
    for offers in (2, 3):
        outcomes.hurry()
        assert 0 < outcomes.offer() < inf, "the heartbeat goes on, and looks again"
        assert len(threads.offered) == offers
    threads.are_there = True
    outcomes.hurry()
    assert outcomes.offer() == inf
    assert [call.request_id for call in threads.offered] == [1] * 4
    threads.offered[-1].finish(Answer(wire.Ok(), {}))
    assert not outcomes


def test_who_waits_for_ever_waits_also_where_no_thread_can_be_started() -> None:
    threads = Threads()

    async def main() -> None:
        recording = asyncio.ensure_future(threads.outcomes.adeliver(Deliver(ENDS, None), for_ever=True))
        await asyncio.sleep(0)
        assert not recording.done()
        threads.are_there = True
        threads.outcomes.hurry()
        threads.outcomes.offer()
        threads.offered[-1].finish(Answer(wire.Ok(), {}))
        assert (await recording).reply == wire.Ok()

    asyncio.run(main())


def test_who_has_left_is_not_told_that_it_takes_longer() -> None:
    """Its loop may be closed: to call into that would end the thread that reads for everybody."""
    threads = Threads()
    threads.are_there = True
    loop = asyncio.new_event_loop()

    def late() -> None:
        loop.call_soon_threadsafe(print)

    async def main() -> None:
        await asyncio.wait_for(threads.outcomes.adeliver(Deliver(ENDS, None, late=late), for_ever=True), 0.01)

    with pytest.raises(asyncio.TimeoutError):
        loop.run_until_complete(main())
    loop.close()
    threads.offered[-1].finish(None, errors.UnavailableError("away", code="UNAVAILABLE"))
    assert threads.outcomes, "it is owed all the same"

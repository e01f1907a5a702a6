"""Outcomes: what was produced here is offered to the daemon until it is taken, or until its hold is lost.

    owed --offered--> taken     the hold has ended with it
     ^ |-------------> refused  for good: the hold is lost, or whoever waits says what becomes of it
     | v
    pausing                     the daemon cannot write, or is away: offered again after 0.1 s, doubling to 2 s

An outcome is a result, a failure, a cost, the release of a slot. While it is owed the heartbeat renews its hold and
nobody gives the hold back. It keeps its request id, so it counts once however often it is sent. Callers wait for it as
long as their ``timeout`` allows; it is offered for as long as the process lives, by the heartbeat's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from . import awake, errors, wire
from .calls import Answer, Call, Gate, future_waker
from .signals import running_loop

if TYPE_CHECKING:
    import asyncio

    from .holds import Heart, Hold, Holds
    from .steps import Deliver

R = TypeVar("R")

OFFER_S_MIN = 0.1  # between two offers of one outcome ...
OFFER_S_MAX = 2.0  # ... doubling up to this


class Outcome:
    """One outcome. ``due``: when it is to be offered again; infinity while an offer is under way."""

    __slots__ = (
        "again",
        "answer",
        "call",
        "due",
        "error",
        "hold",
        "late",
        "patient",
        "pause",
        "refused",
        "request",
        "request_id",
        "wake",
    )

    def __init__(self, request_id: int, deliver: Deliver, wake: Callable[[], bool]) -> None:
        self.request_id = request_id
        self.request: wire.Request[Any] = deliver.request
        self.hold: Hold | None = deliver.hold
        self.wake: Callable[[], bool] | None = wake  # None: nobody waits any more
        self.patient = deliver.patient
        self.late = deliver.late
        self.call: Call | None = None  # the offer that is under way
        self.again = False
        self.due = inf
        self.pause = OFFER_S_MIN
        self.refused: errors.UnavailableError | None = None  # why it was not taken so far
        self.answer: Answer[Any] | None = None
        self.error: BaseException | None = None

    def taken(self) -> Answer[Any]:
        """The daemon's answer. Raises the lasting refusal, or UnavailableError while it is still owed."""
        if self.answer is not None:
            return self.answer
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # its traceback refers to us
        verb = type(self.request).__struct_config__.tag
        cause = "runstated did not answer in time" if self.refused is None else self.refused.message
        raise errors.UnavailableError(
            f"{verb} is not recorded yet: {cause}; it is offered again for as long as this process lives",
            code="UNAVAILABLE",
        ) from self.refused


class Outcomes:
    """All that a session owes."""

    def __init__(
        self,
        holds: Holds,
        ids: Iterator[int],
        start: Callable[[Call], bool],
        start_and_read: Callable[[Call, awake.Patience], None],
        timeout_s: float,
    ) -> None:
        self.heart: Heart | None = None  # that calls ``offer``
        self._owed: dict[int, Outcome] = {}
        self._holds = holds
        self._ids = ids
        self._start = start
        self._start_and_read = start_and_read
        self._timeout_s = timeout_s

    def __bool__(self) -> bool:
        return bool(self._owed)

    def deliver(self, deliver: Deliver) -> Answer[Any]:
        """Offers an outcome and waits until it is taken, in plain code, for the client's ``timeout``; see
        ``Outcome.taken``."""
        gate = Gate()
        outcome = Outcome(next(self._ids), deliver, gate.open)
        left = awake.Patience(self._timeout_s)
        try:
            self._owe(outcome)
            call = self._call(outcome, running_loop())
            call.blocking = True
            self._start_and_read(call, left)
            gate.wait(left)
            return outcome.taken()
        finally:
            self._leave(outcome)

    async def adeliver(self, deliver: Deliver, *, for_ever: bool = False) -> Answer[Any]:
        """The same in a coroutine. ``for_ever``: until it is taken or refused for good."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        outcome = Outcome(next(self._ids), deliver, future_waker(loop, future))
        try:
            self._owe(outcome)
            self._offer(outcome, loop)
            await asyncio.wait((future,), timeout=None if for_ever else self._timeout_s)
            return outcome.taken()
        finally:
            self._leave(outcome)

    def _owe(self, outcome: Outcome) -> None:
        hold = outcome.hold
        if hold is not None and hold.pid != os.getpid():
            raise errors.LeaseLostError(
                f"this process was forked while process {hold.pid} held the work: its outcome does not count",
                code="LEASE_LOST",
            )
        self._owed[outcome.request_id] = outcome
        if hold is not None:
            hold.is_owed = True
        elif self.heart is not None:
            self.heart.start()

    def _leave(self, outcome: Outcome) -> None:
        """Nobody waits for it any more."""
        outcome.wake = outcome.late = None
        if outcome.request_id in self._owed and outcome.due == inf:
            outcome.due = time.monotonic() + outcome.pause  # the offer may have been interrupted half-way
            self._holds.wake()

    def _call(self, outcome: Outcome, loop: asyncio.AbstractEventLoop | None) -> Call:
        call = Call(outcome.request_id, outcome.request, partial(self._arrived, outcome), loop)
        call.again, call.is_offer = outcome.again, True
        outcome.call, outcome.again, outcome.due = call, True, inf
        return call

    def _offer(self, outcome: Outcome, loop: asyncio.AbstractEventLoop | None) -> None:
        """An offer that cannot be begun (no thread is to be had that would read) is one that was not taken."""
        call = self._call(outcome, loop)
        try:
            self._start(call)
        except errors.UnavailableError as error:
            call.finish(None, error)

    def _arrived(self, outcome: Outcome) -> bool:
        """What came of an offer. Twice for one, where an interrupt came in between."""
        call, hold, wake, late = outcome.call, outcome.hold, outcome.wake, outcome.late
        if call is None or (call.answer is None and call.error is None):
            return True  # of an offer that was interrupted, and made again
        if isinstance(call.error, errors.UnavailableError):
            is_first, outcome.refused = outcome.refused is None, call.error
            outcome.due = time.monotonic() + outcome.pause
            outcome.pause = min(OFFER_S_MAX, outcome.pause * 2)
            self._holds.wake()
            if is_first and late is not None:
                late()
            if wake is not None and not outcome.patient:
                wake()
        else:
            outcome.answer, outcome.error = call.answer, call.error
            if hold is not None:
                hold.is_owed = False
                if call.error is None or wake is None or _is_lost(call.error):
                    hold.settle()
            self._owed.pop(outcome.request_id, None)
            if wake is not None:
                wake()
        outcome.call = None  # it refers to us, too
        return True

    def hurry(self) -> None:
        """The daemon is back: what pauses is offered now."""
        for outcome in list(self._owed.values()):
            if outcome.due < inf:
                outcome.due, outcome.pause = 0.0, OFFER_S_MIN
        self._holds.wake()

    def offer(self) -> float:
        """For the heartbeat: offers what is due; when to look again."""
        for outcome in list(self._owed.values()):
            if outcome.due <= time.monotonic():
                self._offer(outcome, None)
        return min((outcome.due for outcome in list(self._owed.values())), default=inf)


def _is_lost(error: BaseException) -> bool:
    """Whether a refusal says that the hold is gone, or that nothing can come of it any more."""
    return isinstance(error, errors.LeaseLostError | errors.StoppedError) or (
        isinstance(error, errors.RunstateError) and error.code == "NOT_FOUND"
    )

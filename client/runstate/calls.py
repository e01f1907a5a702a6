"""A request under way, and how its caller waits: a thread on a lock, a coroutine on a future of its own loop.

Neither way polls. A lock's ``acquire`` can be interrupted by Ctrl-C; a future's loop may have been closed meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from . import awake, errors, framing, wire
from .holds import Hold

if TYPE_CHECKING:
    import asyncio

R = TypeVar("R")
PAUSE_S_MAX = 5.0


class Answer(Generic[R]):
    """A reply and the holds that came with it, by token. Whoever drops a hold gives it back."""

    __slots__ = ("holds", "reply")

    def __init__(self, reply: R, holds: dict[int, Hold]) -> None:
        self.reply = reply
        self.holds = holds


class Call:
    """One request: sent, sent again after a lost connection, answered once."""

    __slots__ = (
        "_wake",
        "again",
        "answer",
        "blocking",
        "done",
        "error",
        "is_offer",
        "loop",
        "proof",
        "request",
        "request_id",
        "ticket",
        "until",
    )

    def __init__(
        self,
        request_id: int,
        request: wire.Request[Any],
        wake: Callable[[], bool],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.loop = loop  # the loop whose task waits for the answer or, of a blocking call, that runs in its thread
        self.blocking = False
        self.ticket = self.proof = 0
        self.is_offer = False  # of an outcome: nobody's time-out ends it
        self.again = False
        self.until: float | None = None  # by awake.now_s()
        if isinstance(request, wire.WaitingRequest) and request.wait_ms:
            self.until = awake.now_s() + request.wait_ms / 1000
        self.answer: Answer[Any] | None = None
        self.error: BaseException | None = None
        self.done = False  # the outcome is there
        self._wake = wake

    def body(self) -> bytes:
        """The encoded request; on a repeat with its arrival number and what is left of its time."""
        request = self.request
        if self.again:
            changes: dict[str, Any] = {"again": True}
            if isinstance(request, wire.WaitingRequest):
                changes |= {"ticket": self.ticket, "proof": self.proof}
                if self.until is not None:
                    changes["wait_ms"] = max(1, int((self.until - awake.now_s()) * 1000))
            request = msgspec.structs.replace(request, **changes)
        self.again = True
        return wire.encode(request)

    def finish(self, answer: Answer[Any] | None, error: BaseException | None = None) -> None:
        """Hands the outcome to the caller; the first one counts."""
        if self.done:
            return
        # In this order: an interrupt in between leaves a call that can be finished once more.
        self.answer, self.error = answer, error
        if not self._wake():
            # Its loop is closed: nobody will ever look. But somebody may refer to its task, so nothing is dropped.
            for hold in answer.holds.values() if answer is not None else ():
                hold.release()
        self.done = True

    def outcome(self) -> Answer[Any]:
        """The answer, once the caller was woken. Raises what the call failed with."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None, "a finished call has an answer or an error"
        answer, self.answer = self.answer, None
        return answer


class Gate:
    """Where one thread waits for one call."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> bool:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is open
        return True

    def wait(self, patience: awake.Patience | None) -> bool:
        """Whether it was opened in time."""
        seconds = None if patience is None else patience.step()
        if patience is None or seconds is None:
            return self._lock.acquire()
        while not self._lock.acquire(timeout=seconds):
            if not seconds:
                return False
            seconds = patience.step() or 0.0
        patience.look()
        return True


class Timer:
    """Calls ``expire`` on a loop when somebody's patience is over."""

    __slots__ = ("_expire", "_handle", "_loop", "_patience")

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: awake.Patience, expire: Callable[[], object]) -> None:
        self._loop, self._patience, self._expire = loop, patience, expire
        self._handle: asyncio.TimerHandle | None = None
        self._step()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._patience.look()

    def _step(self) -> None:
        seconds = self._patience.step()
        if seconds == 0:
            self._expire()
        elif seconds is not None:
            self._handle = self._loop.call_later(seconds, self._step)


def future_waker(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], bool]:
    """Resolves a future of a loop from any thread; False when the loop is closed, and with it the wait."""

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> bool:
        try:
            loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            return False
        return True

    return wake


def patience(call: Call, timeout_s: float) -> awake.Patience:
    """How long to wait for the answer: without a limit only where the caller has set none."""
    if call.until is not None:
        return awake.Patience(max(0.0, call.until - awake.now_s()) + timeout_s)
    is_endless = isinstance(call.request, wire.WaitingRequest) and call.request.wait_ms is None
    return awake.Patience(None if is_endless else timeout_s)


def no_answer(request: wire.Request[Any], timeout_s: float) -> errors.UnavailableError:
    """The error for an answer that has not come in time."""
    verb = type(request).__struct_config__.tag
    return errors.UnavailableError(
        f"runstated did not answer {verb} within {timeout_s:g} s: `runstate status` shows whether it can write or"
        " hangs",
        code="UNAVAILABLE",
    )


def unavailable(error: BaseException) -> errors.RunstateError:
    """The error for a connection that failed."""
    if isinstance(error, errors.RunstateError):
        return error
    return errors.UnavailableError(f"the connection to runstated failed: {error}", code="UNAVAILABLE")


def copied(error: BaseException) -> BaseException:
    """An error of its own for each caller: tracebacks must not pile up on one object."""
    if isinstance(error, errors.RunstateError):
        copied = errors.map_error(error.code, error.status, error.message)
        return copied if type(copied) is type(error) else error
    return unavailable(error)


def pauses_s(request: wire.Request[Any], retries: int) -> Iterator[float | None]:
    """The pauses between tries: 0.1 s, doubling up to PAUSE_S_MAX; None after the last.

    Who waits for jobs has done all that there is to do: a daemon that cannot write now is asked again for as long as
    the wait may last."""
    left_s = 0.0
    if isinstance(request, wire.QueuesResult | wire.GroupsEnded):
        left_s = inf if request.wait_ms is None else request.wait_ms / 1000
    pause = 0.1
    while retries > 0 or left_s > 0:
        yield pause
        retries, left_s = retries - 1, left_s - pause
        pause = min(PAUSE_S_MAX, pause * 2)
    yield None


def beats(tokens: tuple[int, ...]) -> bytes:
    """The frames that renew these leases; none for none."""
    return _in_parts(tokens, lambda part: wire.Beat(tokens=part))


def acks(calls: list[int]) -> bytes:
    """The frames that say that the replies to these calls have come."""
    return _in_parts(tuple(calls), lambda part: wire.Ack(calls=part))


def _in_parts(numbers: tuple[int, ...], listing: Callable[[tuple[int, ...]], wire.Request[Any]]) -> bytes:
    """The frames of a message that lists numbers, which may be several."""
    starts = range(0, len(numbers), wire.LISTED_MAX)
    parts = (listing(numbers[start : start + wire.LISTED_MAX]) for start in starts)
    return b"".join(framing.pack(0, wire.encode(part)) for part in parts)

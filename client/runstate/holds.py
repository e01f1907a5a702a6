"""Holds: a token lives in a handle, and the heartbeat renews exactly the handles that still exist.

A hold that is dropped gives its token back. The finaliser may run in any thread, in the middle of anything, so it takes
no lock: it puts the token on a list and rings for the heartbeat; the next frame that goes out takes the list along.

The heartbeat is a thread of its own, so that neither a busy event loop nor a long computation stops it. It beats at a
third of the shortest lease, and not at all while nothing is held.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from . import threads, wire
from .signals import Signal

if TYPE_CHECKING:
    import asyncio

    from .connection import Connection
    from .errors import RunstateError


class Hold:
    """What this process holds under a token. ``signal`` is set when it is lost, with the error as reason."""

    __slots__ = ("__weakref__", "_holds", "is_owed", "lease_ms", "loop", "pid", "run", "session", "signal", "token")

    def __init__(
        self, holds: Holds, token: int, run: str | None, lease_ms: int, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._holds: Holds | None = None
        self.session = holds.session
        self.is_owed = False  # its outcome is on its way, and ends it
        self.token = token
        self.run = run
        self.lease_ms = lease_ms
        self.loop = loop  # whose task holds it: a blocking call in that loop's thread must not wait for it
        self.pid = os.getpid()
        self.signal = Signal()
        self._holds = holds  # last: one that is only half made, by an interrupt, has nothing to give back

    def settle(self) -> None:
        """The hold has ended with an outcome that was recorded: nothing to renew, nothing to give back."""
        holds, self._holds = self._holds, None
        if holds is not None:
            holds.forget(self.token)

    def release(self) -> None:
        """Gives it back, without an outcome and without waiting. Does nothing when it has ended already, or when its
        outcome is owed."""
        if self.is_owed:
            return
        holds, self._holds = self._holds, None
        if holds is not None:
            holds.forget(self.token)
            holds.give_back(self.token)

    def lose(self, error: RunstateError) -> None:
        """The daemon says that it is gone."""
        self.signal._set(error)  # first: an interrupt in between must not swallow the news
        holds, self._holds = self._holds, None
        if holds is not None:
            holds.forget(self.token)

    def __del__(self) -> None:
        holds = getattr(self, "_holds", None)
        if holds is not None and self.pid == os.getpid():
            holds.give_back(self.token)


class Bell:
    """Wakes one waiting thread. Ringing takes no lock and never waits, so finalisers and signal handlers may."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it rings already

    def wait(self, timeout: float | None) -> bool:
        """Whether it rang in time; it is silent after that."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)


class Holds:
    """All holds of one session."""

    def __init__(self, session: Connection | None = None) -> None:
        self.session = session
        self.given: deque[int] = deque()  # tokens to give back with the next frame
        self._live: dict[int, weakref.ref[Hold]] = {}
        self._changed = Bell()
        self._beaten: float | None = None  # when the heartbeat last beat, or began to; None while nothing is held
        self._next_beat = 0.0  # when it is due again; infinity while nothing is held

    def add(self, token: int, run: str | None, lease_ms: int, loop: asyncio.AbstractEventLoop | None) -> Hold:
        hold = None if token not in self._live else self.get(token)
        if hold is not None:  # the same answer once more: a second handle would give the token back when it goes
            return hold
        hold = Hold(self, token, run, lease_ms, loop)
        self._live[token] = weakref.ref(hold)
        if time.monotonic() + lease_ms / 3000 < self._next_beat:
            self._changed.ring()  # seldom: most holds are over before the heartbeat would look at them
        return hold

    def forget(self, token: int) -> None:
        self._live.pop(token, None)

    def give_back(self, token: int) -> None:
        self.given.append(token)
        self._changed.ring()

    def get(self, token: int) -> Hold | None:
        found = self._live.get(token)
        return None if found is None else found()

    def live(self) -> list[Hold]:
        """The holds whose handles still exist."""
        return [hold for ref in list(self._live.values()) if (hold := ref()) is not None]

    def __bool__(self) -> bool:
        """Whether anything is held (or was dropped a moment ago)."""
        return bool(self._live)

    def tokens(self) -> tuple[int, ...]:
        return tuple(hold.token for hold in self.live())

    def take_given(self) -> list[int]:
        """The tokens to give back now."""
        tokens = []
        while self.given:
            token = self.given.popleft()
            self._live.pop(token, None)
            tokens.append(token)
        return tokens

    def wait(self, until: float = inf) -> bool:
        """For the heartbeat: waits until the next beat is due, until something changed, or until ``until``. True: a
        beat is due."""
        self._next_beat = inf  # first: a hold that is added from here on wakes us
        now = time.monotonic()
        shortest_s = min((hold.lease_ms / 3000 for hold in self.live()), default=None)
        if shortest_s is None:
            self._beaten = None
        else:
            self._beaten = now if self._beaten is None else self._beaten
            self._next_beat = self._beaten + shortest_s
        first = min(self._next_beat, until)
        self._changed.wait(None if first == inf else max(0.0, first - now))
        now = time.monotonic()
        if now < self._next_beat:
            return False
        self._beaten = now
        return True

    def wake(self) -> None:
        """For the heartbeat: there is something to send."""
        self._changed.ring()


class Heart:
    """The heartbeat's thread, started with the first hold. ``offer`` does what else is due; gives the next time."""

    def __init__(
        self, holds: Holds, beat: Callable[[tuple[int, ...]], None], offer: Callable[[], float] = lambda: inf
    ) -> None:
        self._holds = holds
        self._beat = beat
        self._offer = offer
        self.thread: threading.Thread | None = None

    def start(self) -> str:
        """Makes sure that it runs; why it does not, if it cannot. Of two begun at once the last stays."""
        if self.thread is None:
            thread = threading.Thread(target=self._live, name="runstate-heartbeat", daemon=True)
            try:
                self.thread = thread
                why_not = threads.start(thread)
                if why_not:
                    self.thread = None
            except BaseException:
                self.thread = None  # it may run already: it will see that it is not wanted
                raise
            return why_not
        return ""

    def stop(self) -> None:
        """Ends the thread; without a lock and without waiting."""
        self.thread = None
        self._holds.wake()

    def _live(self) -> None:
        while self.thread is threading.current_thread():
            due = self._holds.wait(self._offer())
            self._beat(self._holds.tokens() if due else ())
        self._holds.wake()  # whoever has taken our place: we may have heard what was rung for that one


GRANTING = frozenset(
    (wire.OnceGranted, wire.JobsGranted, wire.SlotsGranted, wire.BudgetReserved)
)  # the replies that bring holds


def granted(
    holds: Holds, request: wire.Request[Any], reply: wire.Reply, loop: asyncio.AbstractEventLoop | None
) -> dict[int, Hold]:
    """The holds that a reply brings, by token."""
    if isinstance(reply, wire.OnceGranted) and isinstance(request, wire.OnceAcquire):
        return {reply.token: holds.add(reply.token, request.run, request.lease_ms, loop)}
    if isinstance(reply, wire.JobsGranted) and isinstance(request, wire.QueuesAdmit):
        return {
            job.token: holds.add(job.token, job.run, request.queues[job.source].lease_ms, loop) for job in reply.jobs
        }
    if isinstance(reply, wire.SlotsGranted) and isinstance(request, wire.SlotsAcquire):
        return {reply.token: holds.add(reply.token, request.run, request.lease_ms, loop)}
    if isinstance(reply, wire.BudgetReserved) and isinstance(request, wire.BudgetsReserve):
        return {reply.token: holds.add(reply.token, request.run, wire.SETTLE_BY_MS, loop)}
    return {}

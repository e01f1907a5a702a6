"""What arrives on a session: replies go to their calls, pushes to the holds and runs that they are about.

An interrupt (the caller that reads may be the main thread) can come anywhere in here. It ends the connection, all that
is open is sent again, and so what was half done is done once more: every step may be repeated.

A blocking call in the thread of an event loop must not wait for what a task of that loop holds: the loop could never
let go of it. Both orders are looked at: the task holds it when the call is parked; it gets it while the call waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from . import errors, greeting, threads, wire
from .calls import Answer, Call, copied
from .holds import GRANTING, Hold, Holds, granted

if TYPE_CHECKING:
    import threading

    from .news import News

log = logging.getLogger(__name__)

_NO_HOLDS: dict[int, Hold] = {}


class RunWatch:
    """A run that this session has joined: told when it ends. ``is_owned``: it ends with this session."""

    def __init__(self, run: str, ended: Callable[[errors.StoppedError], None], *, is_owned: bool = False) -> None:
        self.run = run
        self.ended = ended
        self.is_owned = is_owned


class Runs:
    """The runs that a session has joined, for as long as somebody keeps their watches."""

    def __init__(self) -> None:
        self.owned: weakref.WeakSet[RunWatch] = weakref.WeakSet()
        self._watches: weakref.WeakValueDictionary[str, RunWatch] = weakref.WeakValueDictionary()

    def add(self, watch: RunWatch) -> None:
        self._watches[watch.run] = watch
        if watch.is_owned:
            self.owned.add(watch)

    def add_all(self, watches: Iterable[RunWatch]) -> None:
        """Before the session begins: those that another one has joined. It owns none of them."""
        for watch in watches:
            self._watches[watch.run] = watch

    def all(self) -> list[RunWatch]:
        return list(self._watches.values())

    def get(self, run: str) -> RunWatch | None:
        return self._watches.get(run)

    def ids(self) -> list[str]:
        return list(self._watches.keys())

    def forget(self, run: str) -> RunWatch | None:
        watch = self._watches.pop(run, None)
        if watch is not None:
            self.owned.discard(watch)
        return watch


class Inbox:
    """See the module. ``calls``: those that are open, by request id."""

    def __init__(
        self,
        lock: threading.RLock,
        holds: Holds,
        runs: Runs,
        news: News,
        start_threads: Callable[[], str],
        say: Callable[..., None],
    ) -> None:
        self.calls: dict[int, Call] = {}
        self._lock = lock
        self._holds = holds
        self._runs = runs
        self._start_threads = start_threads
        self._say = say
        self._news = news

    def frame(self, request_id: int, body: bytes) -> None:
        """One frame of the daemon."""
        if request_id == 0:
            try:
                self.pushed(wire.decode_push(body))
            except msgspec.ValidationError:
                pass  # an error about the connection as a whole: it ends next; or a push of a newer daemon
            return
        reply = wire.decode_reply(body)
        with self._lock:
            call = self.calls.get(request_id)
            if call is None:
                return  # its caller has gone; the daemon was told
            if reply.kept and call.request.replayed and type(reply) not in GRANTING:
                self._news.acks.append(request_id)
        if isinstance(reply, wire.Error):
            self._finish(call, None, greeting.refused(reply))
            return
        holds = _NO_HOLDS
        if type(reply) in GRANTING:
            # Of whom the hold is: the loop that must go on before it can end. A blocking function in the loop's thread
            # ends before that goes on, but a ``with`` block of slots in a coroutine may await inside of it.
            keeper = None if call.blocking and type(reply) is not wire.SlotsGranted else call.loop
            holds = granted(self._holds, call.request, reply, keeper)
        if holds:
            why_not = self._start_threads()
            refused = self._give_back(holds.values(), why_not) if why_not else None
            if refused is not None:
                self._finish(call, None, refused)
                return
            if not call.blocking and call.loop is not None:
                self._refuse_blocked(call, reply)
        self._finish(call, Answer(reply, holds))

    def _finish(self, call: Call, answer: Answer[Any] | None, error: BaseException | None = None) -> None:
        """The call stays open until its caller is told: after an interrupt in between somebody tells it again."""
        call.finish(answer, error)
        with self._lock:
            if self.calls.get(call.request_id) is call:  # not the next try under its id
                del self.calls[call.request_id]

    def fail(self, error: BaseException) -> None:
        """Nobody will answer what is open."""
        for call in list(self.calls.values()):
            self._finish(call, None, copied(error))

    def _give_back(self, holds: Iterable[Hold], why_not: str) -> errors.UnavailableError | None:
        """Where no thread is to be had that would renew what was granted, it goes back; why, for the caller."""
        if why_not == threads.LIMIT:
            for hold in holds:
                hold.release()
            self._say()
            return errors.UnavailableError(why_not, code="UNAVAILABLE")
        # This process ends soon, of which the daemon is told; until then one long lease will do.
        short = [hold.token for hold in holds if hold.lease_ms < wire.LEASE_MS_MAX]
        self._say(*(wire.Renew(token=token, lease_ms=wire.LEASE_MS_MAX) for token in short))
        return None

    def pushed(self, push: wire.AnyPush) -> None:
        """One push, or what the welcome said of a run that had ended."""
        if isinstance(push, wire.Parked):
            self._parked(push)
        elif isinstance(push, wire.LeaseLost):
            hold = self._holds.get(push.token)
            if hold is not None:
                if not hold.is_owed:  # else the answer to its outcome says it, or that it was ended by just that
                    log.warning("lost the hold %d in the run %s: %s", hold.token, hold.run, push.reason)
                hold.lose(errors.LeaseLostError(f"the hold on the work is lost: {push.reason}", code="LEASE_LOST"))
        elif isinstance(push, wire.RunEnded):
            code = "DEADLINE_EXCEEDED" if push.state == "expired" else "SCOPE_CANCELLED"
            error = errors.StoppedError(push.message, code=code, status=errors.STATUSES[code])
            for hold in self._holds.live():
                if hold.run == push.run:
                    hold.signal._set(error)
            watch = self._runs.get(push.run)
            if watch is not None:
                watch.ended(error)
            self._runs.forget(push.run)
        # Reconnect: the daemon closes the connection next; whoever reads does the rest.

    # ------------------------------------------------------------------ blocking calls in an event loop's thread

    def _parked(self, push: wire.Parked) -> None:
        """A call waits. One of several holders that can go on is enough to end a wait, so all must be in its way."""
        call = self.calls.get(push.call)
        if call is None:
            return
        call.ticket, call.proof = push.ticket, push.proof
        if not call.blocking or call.loop is None:
            return
        request = call.request
        if isinstance(request, wire.GroupsEnded):
            behind = [hold for hold in self._holds.live() if hold.run == request.run and hold.loop is not None]
            stuck = any(hold.loop is call.loop for hold in behind)
        else:
            found = [self._holds.get(token) for token in push.behind]
            stuck = bool(found) and all(hold is not None and hold.loop is call.loop for hold in found)
        if stuck:
            self._refuse_blocking(call)

    def _refuse_blocked(self, given: Call, reply: wire.Reply) -> None:
        """Something was given to a task of a loop: a blocking call in the loop's thread must not wait for it."""
        for call in list(self.calls.values()):
            if call.blocking and call.loop is given.loop and _waits_for(call.request, given.request, reply):
                self._refuse_blocking(call)

    def _refuse_blocking(self, call: Call) -> None:
        """The caller abandons it, as it does every call that raises."""
        call.finish(
            None,
            errors.ConfigError(
                "this blocking call would wait for a task of the event loop that it blocks: use the async form"
                " (await ...) here, or make the call in a thread"
            ),
        )


def _waits_for(waiting: wire.Request[Any], given: wire.Request[Any], reply: wire.Reply) -> bool:
    """Whether a request waits for what another one was just given."""
    if isinstance(reply, wire.JobsGranted):
        if isinstance(waiting, wire.QueuesResult):
            return any(job.job == waiting.job for job in reply.jobs)
        return isinstance(waiting, wire.GroupsEnded) and any(job.run == waiting.run for job in reply.jobs)
    if isinstance(waiting, wire.OnceAcquire) and isinstance(given, wire.OnceAcquire):
        return (waiting.run, waiting.key) == (given.run, given.key)
    return (
        isinstance(waiting, wire.SlotsAcquire) and isinstance(given, wire.SlotsAcquire) and waiting.pool == given.pool
    )

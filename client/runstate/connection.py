"""The session: one connection to the daemon, shared by the threads and event loops of one process.

    callers ── register the call, write its frame under a lock ──> stream ──> daemon
    a caller that is alone reads its own reply; else the reader thread hands replies out by request id <──┘ (turns.py)
    heartbeat thread ── renews what is held

A lost connection is not a death: what is open is sent again under the same ids, and the session is resumed.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from . import absence, awake, calls, errors, framing, greeting, wire
from .calls import Answer, Call, Gate, Timer, future_waker, no_answer, patience
from .everywhere import everywhere
from .greeting import Address
from .holds import Heart, Holds
from .inbox import Inbox, Runs, RunWatch
from .nesting import Nesting
from .news import News
from .outcomes import Outcomes
from .signals import running_loop
from .stream import Stream
from .turns import Turns

if TYPE_CHECKING:
    import asyncio
    import socket

log = logging.getLogger(__name__)

R = TypeVar("R")


class Connection(Turns):
    """See the module. ``call`` blocks, ``acall`` does not; both from any thread."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._reset()
        everywhere.add(self)

    def _reset(self) -> None:
        """The state of a session that has not begun: when made, and in a child after fork."""
        self.pid = os.getpid()
        self.session = os.urandom(8).hex()
        self.holds = Holds(self)
        self._news = News(self.holds)
        self._lock = threading.RLock()  # never entered twice: see ``_check``
        self._stream: Stream | None = None
        self._was_lost = False  # with something open: worth trying for longer to get it back
        self._absence = absence.Absence(self.address.is_remote)
        self._begin_turns()
        self._is_retired = False
        self._owes = False  # some of the news could not be sent
        self._ids = itertools.count(1)
        self.runs = Runs()
        self.outcomes = Outcomes(self.holds, self._ids, self._offer, self._deliver, self.address.timeout_s)
        self._heart = self.outcomes.heart = Heart(self.holds, self._beat, self.outcomes.offer)
        self._inbox = Inbox(self._lock, self.holds, self.runs, self._news, self._start_threads, self._say)
        self._calls = self._inbox.calls
        self._nesting = Nesting(self._calls, self._nested)

    # ------------------------------------------------------------------ calls

    def call(self, request: wire.Request[R]) -> Answer[R]:
        """Sends a request and waits for its reply, in plain code.

        Raises the mapped error of the daemon's refusal, UnavailableError when the daemon cannot be reached or does not
        answer, and whatever interrupts the wait; then the daemon is told that nobody waits any more.
        """
        call: Call | None = None
        pauses: Iterator[float | None] | None = None
        try:
            while True:
                gate = Gate()
                loop = running_loop() if "asyncio" in sys.modules else None
                call = self._new_call(request, gate.open, loop, call)
                call.blocking = True
                left = patience(call, self.address.timeout_s)
                if self._start(call):
                    self._read_for(call, left)
                if not call.done and not gate.wait(left):
                    raise no_answer(request, self.address.timeout_s)
                try:
                    return call.outcome()
                except errors.UnavailableError as error:
                    pauses = pauses or calls.pauses_s(request, self.address.retries)
                    pause = next(pauses)
                    if pause is None or not error.may_retry:
                        raise
                time.sleep(pause)
        except BaseException:
            if call is not None:
                self._abandon(call)
            raise

    async def acall(self, request: wire.Request[R]) -> Answer[R]:
        """The same in a coroutine; a cancelled task leaves the connection usable."""
        import asyncio

        loop = asyncio.get_running_loop()
        call: Call | None = None
        try:
            for pause in calls.pauses_s(request, self.address.retries):
                future: asyncio.Future[None] = loop.create_future()
                call = self._new_call(request, future_waker(loop, future), loop, call)
                timer = Timer(loop, patience(call, self.address.timeout_s), partial(self._expire, call))
                try:
                    self._start(call)
                    await future
                finally:
                    timer.cancel()
                try:
                    return call.outcome()
                except errors.UnavailableError as error:
                    if pause is None or not error.may_retry:
                        raise
                await asyncio.sleep(pause)
        except BaseException:
            if call is not None:
                self._abandon(call)
            raise
        raise AssertionError("the last try returns or raises")

    def watch(self, watch: RunWatch) -> None:
        """``watch.ended`` is called when its run ends, for as long as the object lives."""
        self.runs.add(watch)
        if watch.is_owned:
            with self._lock:
                self._wake_if_needed()

    def _expire(self, call: Call) -> None:
        self._abandon(call)
        call.finish(None, no_answer(call.request, self.address.timeout_s))

    def _new_call(
        self,
        request: wire.Request[Any],
        wake: Callable[[], bool],
        loop: asyncio.AbstractEventLoop | None,
        before: Call | None,
    ) -> Call:
        """``before``: the same request, tried before, whose outcome is not known."""
        self._check()
        call = Call(next(self._ids) if before is None else before.request_id, request, wake, loop)
        if before is not None:
            call.again, call.ticket, call.proof, call.until = True, before.ticket, before.proof, before.until
        if isinstance(request, wire.WaitingRequest) and request.inherited:
            self._nesting.watch(call)
        return call

    def _check(self) -> None:
        """Raises UnavailableError where a call would wait for itself."""
        if self.pid != os.getpid():
            self.after_fork()  # a fork that Python did not see
        if self._lock._is_owned() or threading.get_ident() == self._reader_thread:  # type: ignore[attr-defined]
            # A signal handler or a finaliser of the user's has interrupted this thread while it was sending, or the
            # reader thread (where the callbacks of signals run, too): nobody would read the answer.
            raise errors.UnavailableError(
                "this call interrupts the thread that is sending or reading for others: make it again, or in another"
                " thread",
                code="UNAVAILABLE",
            )

    def _offer(self, call: Call) -> bool:
        self._check()
        return self._start(call)

    def _deliver(self, call: Call, left: awake.Patience) -> None:
        """Offers an outcome, and reads until it is answered if that is the caller's turn."""
        try:
            if self._offer(call):
                self._read_for(call, left)
        except BaseException:
            self._pass_turn(call)  # once more: the interrupt may have come before that was done
            raise

    def _start(self, call: Call) -> bool:
        """Registers the call and sends it. True: it is the caller's turn to read."""
        with self._lock:
            if self._turn_of == threading.get_ident():
                self._end_own_turn()
            self._calls[call.request_id] = call
            stream = self._stream
            if stream is not None:
                if call.again:
                    body = call.body()
                else:
                    call.again, body = True, wire.encode(call.request)
                frame = framing.pack(call.request_id, body)
                if self._news.acks or self.holds.given:
                    frame = self._news.before(frame)
                if not stream.write(frame):
                    self._drop(stream)  # it ended while nobody looked
                    self._was_lost = len(self._calls) > 1 or bool(self.holds)
            may_read = call.blocking and self._stream is not None and (self._turn is None or self._may_displace())
            if self._turn is None and not may_read:
                why_not = self._wake_reader()
                if why_not and not call.blocking:
                    raise errors.UnavailableError(why_not, code="UNAVAILABLE")
                may_read = bool(why_not)
            if may_read:
                self._reads += 1
                self._turn, self._turn_of = call, threading.get_ident()
            return may_read

    def _abandon(self, call: Call) -> None:
        """Nobody waits for this call any more. Nothing is said of one that has its answer, unless that left in doubt
        what came of it."""
        with self._lock:
            waiting = self._calls.pop(call.request_id, None)
            answer, call.answer = call.answer, None
            for hold in answer.holds.values() if answer else ():
                hold.release()
            if self._turn is call:
                self._turn, self._turn_of = None, 0
            in_doubt = isinstance(call.error, errors.UnavailableError) and call.error.may_retry
            if waiting is not None or in_doubt:
                self._send_news(self._news.one_way(wire.Cancel(call=call.request_id)))
            self._wake_if_needed()

    def _nested(self, request: wire.Nested) -> None:
        """Lost with the connection: a call that is sent again says how it stands then."""
        with self._lock:
            if self._stream is not None and not self._stream.write(framing.pack(0, wire.encode(request))):
                self._drop(self._stream)

    def _send_news(self, frame: bytes) -> None:
        """Sends what wants no answer, now or on the next connection (with the lock held)."""
        if self._stream is not None and not self._stream.write(frame):
            self._drop(self._stream)
        if self._stream is None:
            self._owes = True

    # ------------------------------------------------------------------ connecting

    def _connect(self) -> Stream:
        """A connection that has said hello and on which everything open has been sent.

        Raises RunstateError: at once for a first connection, after ``timeout`` for one that was lost. Where nobody
        waits and nothing is held, no daemon is started: there is only something to tell or to hear.
        """
        return greeting.reach(
            self.address,
            self._greet,
            is_wanted=lambda: bool(self._calls or self.holds.live()),
            was_there=lambda: self._was_lost,
            may_start=lambda: self._absence.may_start(list(self._calls.values()), is_holding=bool(self.holds.live())),
        )

    def _greet(self, connected: socket.socket, deadline: float) -> Stream:
        runs = [*(hold.run for hold in self.holds.live() if hold.run), *reversed(self.runs.ids())]
        hello = greeting.hello(self.address, self.session, runs)
        welcome, splitter, frames = greeting.greet(connected, hello, next(self._ids), deadline)
        for request_id, body in frames:
            self._inbox.frame(request_id, body)
        with self._lock:
            stream = self._stream = Stream(connected, splitter, self._lock)
            was_lost = self._was_lost
            self._was_lost = self._owes = False
            self._absence.is_over()
            self.outcomes.hurry()
            for done in [call for call in self._calls.values() if call.done]:
                del self._calls[done.request_id]  # it was answered, and then an interrupt came
            open_calls = [call for _, call in sorted(self._calls.items())]
            again = self._news.recent() + b"".join(framing.pack(call.request_id, call.body()) for call in open_calls)
            stream.write(self._news.before(again + calls.beats(self.holds.tokens())))
        if was_lost:
            log.warning("the connection to runstated was lost; it is back")
        for ended in welcome.ended:
            self._inbox.pushed(ended)
        return stream

    def _give_up(self, error: BaseException) -> None:
        """The daemon cannot be reached: every open call fails. What is held stays held."""
        with self._lock:
            if self._stream is not None:
                self._drop(self._stream)
            self._turn, self._turn_of = None, 0
            self._was_lost = self._owes = False
        self._inbox.fail(error)
        self._absence.befalls(self.holds.live(), error)

    # ------------------------------------------------------------------ heartbeat

    def _beat(self, tokens: tuple[int, ...]) -> None:
        """Sends a beat for the tokens (none: only what else there is to say)."""
        with self._lock:
            beat = calls.beats(tokens)
            if not (beat or self._news):
                return
            if self._stream is None:
                self._owes = True  # the next connection takes it along
            else:
                self._send_news(self._news.before(beat))
            self._wake_if_needed()

    def _start_threads(self) -> str:
        """Makes sure that what is held is renewed, and that its loss is heard of; why not, where no thread is to be
        had."""
        with self._lock:
            if self._heart.thread is not None and self._reader is not None:
                return ""
            return self._heart.start() or self._start_reader()[1]

    def _say(self, *requests: wire.Request[Any]) -> None:
        """Sends what wants no answer, with all else that is to be said."""
        with self._lock:
            self._send_news(self._news.before(b"".join(map(self._news.one_way, requests))))

    # ------------------------------------------------------------------ the end

    def retire(self) -> None:
        """Its clients are gone: the session ends, as soon as nothing in it is open."""
        self._is_retired = True
        if not self._calls and not self.holds and not self.outcomes:
            self.close()

    def close(self) -> None:
        """Ends the session in good order, without waiting and without a lock: also at exit, also in a finaliser.

        While an outcome is owed there is no good order: to give its hold back would say that nothing was done or spent.
        So only what else is held is given back, and the daemon sees a process die.
        """
        stream = self._stream
        if stream is not None and self.pid == os.getpid():
            last: list[wire.Request[Any]] = [wire.Bye()]
            if self.outcomes:
                last = [wire.Release(token=hold.token) for hold in self.holds.live() if not hold.is_owed]
            stream.write_now(b"".join(framing.pack(0, wire.encode(request)) for request in last))
            if self._turn is None:  # nobody reads, so nobody would see its end
                self._stream = None
                stream.cut()  # after what was written
                if not self._is_polling:
                    stream.close()
        self.runs.owned = weakref.WeakSet()
        self._heart.stop()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.open()  # it sees that it is not wanted any more

    def after_fork(self) -> None:
        """In a child: the copy of the descriptor is closed, and nothing is inherited but what runs are joined."""
        stream, runs = self._stream, self.runs.all()
        self._reset()
        self.runs.add_all(runs)
        if stream is not None:
            stream.close()

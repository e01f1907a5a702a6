"""Who reads what the daemon sends: a caller its own reply, or the reader thread for all.

One of them has the turn (``_turn``). A blocking call that is the only one takes it: that saves two changes of thread,
which cost more than the daemon's answer. The reader thread has it while anybody else waits; it also connects, and
connects again. When nothing is open nobody reads.

    sleeps at its gate <──nothing is held, nobody reads── watches ──held, nobody reads──> polls and reads
           └───────────────────woken────────────────────>    <─────────displaced─────────────┘

While something is held somebody must hear of its loss. Callers hear of it, too, so the reader thread is not woken for
every grant: it looks every WATCH_S (``_is_watching``), and takes the turn when nobody has read since its last look.
While it polls (``_is_polling``) a caller may displace it: it sees that when it wakes up, and reads nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from . import absence, awake, errors, threads
from .calls import Call, Gate
from .holds import Holds
from .inbox import Inbox, Runs
from .outcomes import Outcomes
from .stream import Stream

WATCH_S = 0.01  # between two looks of the reader thread while calls come and go, or something is held


class Turns(ABC):
    """The reading half of a connection, which adds connecting and writing."""

    holds: Holds
    runs: Runs
    outcomes: Outcomes
    _absence: absence.Absence
    _calls: dict[int, Call]
    _inbox: Inbox
    _is_retired: bool
    _lock: threading.RLock
    _owes: bool
    _stream: Stream | None
    _was_lost: bool

    def _begin_turns(self) -> None:
        """The state of a session that has not begun."""
        self._turn: Call | Gate | None = None  # who reads: a caller, or the reader thread that waits at this gate
        self._turn_of = 0  # the thread of the caller that has the turn
        self._reader_thread = 0
        self._is_watching = False  # the reader thread will look by itself, within WATCH_S
        self._is_polling = False  # it has the turn, or had it, and has read nothing yet
        self._reads = self._reads_seen = 0  # turns that callers have had; those when the reader thread last looked
        self._reader: Gate | None = None  # opened when the reader thread has got the turn

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _connect(self) -> Stream: ...

    @abstractmethod
    def _give_up(self, error: BaseException) -> None: ...

    # ------------------------------------------------------------------ callers

    def _may_displace(self) -> bool:
        """Whether the reader thread reads for nobody but the one call that is open, and has not begun to (with the lock
        held)."""
        return self._is_polling and self._turn is self._reader and len(self._calls) == 1

    def _read_for(self, call: Call, left: awake.Patience) -> None:
        """The caller's turn: reads until its call is answered, then passes the turn on."""
        stream = self._stream
        try:
            while not call.done:
                mine, stream = stream, self._stream
                if self._turn is not call:  # lost to a call of a signal handler, see ``_end_own_turn``
                    if mine is not None and mine is not stream:
                        mine.close()
                    break
                if stream is None:  # only where no thread can be started
                    stream = self._connect()
                    left.resume()
                seconds = left.step()
                if seconds == 0:
                    break
                frames = stream.take() if stream.wait(seconds) else []
                if frames is None:
                    self._lose(stream)
                    break
                for request_id, body in frames:
                    self._inbox.frame(request_id, body)
        except errors.RunstateError as error:
            self._give_up(error)
            return
        except BaseException:
            if stream is not None:
                stream.cut()  # bytes may have been lost between the socket and us
            raise
        finally:
            self._pass_turn(call)

    def _pass_turn(self, call: Call) -> None:
        with self._lock:
            if self._turn is call:
                self._turn, self._turn_of = None, 0
            if self._calls or self._owes or self._is_retired or not self._is_watching:
                self._wake_if_needed()

    def _end_own_turn(self) -> None:
        """A signal handler of the user's makes a call while this thread reads for another one, further down its stack,
        and cannot go on. So that read is ended, and the reader thread takes over for both."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._absence.begins()
            stream.cut()  # that read closes it: until then its descriptor must not be another one's
        self._was_lost = True
        self._turn, self._turn_of = None, 0

    def _lose(self, stream: Stream) -> None:
        """The connection has ended under something that is open."""
        with self._lock:
            if self._stream is stream:
                self._drop(stream)
                self._was_lost = True
            else:
                stream.close()

    def _drop(self, stream: Stream) -> None:
        self._stream = None
        self._absence.begins()
        stream.cut()
        if not self._is_polling:  # else the reader thread closes it, lest it polls a descriptor that is another one's
            stream.close()

    # ------------------------------------------------------------------ passing the turn

    def _wake_if_needed(self) -> None:
        """With the lock held: gives the turn to the reader thread if nobody has it and somebody waits; lets it watch if
        something is held."""
        if self._turn is None:
            if self._calls or self._owes:
                why_not = self._wake_reader()
                if why_not:  # those who wait for others to read would wait in vain
                    self._inbox.fail(errors.UnavailableError(why_not, code="UNAVAILABLE"))
            elif self.holds or self.runs.owned:
                self._let_watch()
            elif self._is_retired and not self.outcomes:
                self.close()

    def _let_watch(self) -> None:
        """With the lock held: sees to it that the reader thread looks from time to time. Where it polls, and has not
        yet noticed that it was displaced, it has the turn again."""
        if self._is_polling and self._reader is not None:
            self._turn = self._reader
        elif not self._is_watching:
            gate, why_not = self._start_reader()
            gate.open()
            self._is_watching = not why_not

    def _wake_reader(self) -> str:
        """Gives the turn to the reader thread (with the lock held); why not, where no thread can be started.

        It is woken first: an interrupt in between leaves a turn that nobody has, not one that nobody takes.
        """
        gate, why_not = self._start_reader()
        if not why_not:
            gate.open()
            self._turn = gate
        return why_not

    def _start_reader(self) -> tuple[Gate, str]:
        """The gate at which the reader thread waits (with the lock held); why not, where it cannot be started."""
        gate = self._reader  # `close` of another thread takes it away without the lock
        if gate is not None:
            return gate, ""
        gate = Gate()
        why_not = threads.start(threading.Thread(target=self._live, args=(gate,), name="runstate-reader", daemon=True))
        if not why_not:
            self._reader = gate  # last: one whose start was interrupted sees that it is not wanted
        return gate, why_not

    # ------------------------------------------------------------------ the reader thread

    def _live(self, gate: Gate) -> None:
        """The reader thread. While something is held it looks again and again for a daemon that is away."""
        while self._is_reader(gate):
            self._reader_thread = threading.get_ident()
            try:
                while self._is_needed(gate):
                    self._read_on(gate, self._stream or self._connect())
                pause = awake.Patience(WATCH_S) if self._is_watching else None
            except BaseException as error:
                self._give_up(error)
                if not isinstance(error, Exception):
                    raise
                pause = awake.Patience(absence.LOOK_S) if self.holds else None
            gate.wait(pause)

    def _is_reader(self, gate: Gate) -> bool:
        with self._lock:  # until whoever wakes us is through with it, or was interrupted in it
            if self._reader is not gate and self._turn is gate:
                self._turn = None  # closed before we began to read: nobody else would see the end
                if self._stream is not None:
                    self._drop(self._stream)
                self._wake_if_needed()
            return self._reader is gate

    def _is_needed(self, gate: Gate) -> bool:
        """Whether it is the reader thread's turn, and it has something to read for; if not, its turn is over."""
        with self._lock:
            self._is_polling = self._is_watching = False
            is_quiet, self._reads_seen = self._reads == self._reads_seen, self._reads
            if self._turn is None and (self._calls or self._owes or (is_quiet and self._is_held())):
                self._turn = gate
            if self._turn is gate:
                if self._calls or self._owes or self._is_held():
                    return True
                self._turn = None
                self._wake_if_needed()
            # Not while a caller has the turn for longer: it wakes us when it passes it on.
            self._is_watching = not is_quiet
            return False

    def _is_held(self) -> bool:
        return bool(self.holds or self.runs.owned)

    def _read_on(self, gate: Gate, stream: Stream) -> None:
        """Reads until the connection ends, nothing has been open for a while, or a caller has taken the turn."""
        while True:
            self._is_polling = True
            is_open = bool(self._calls) or self._is_held()
            is_there = stream.wait(None if is_open else WATCH_S)
            with self._lock:
                self._is_polling = False
                if stream is not self._stream:
                    stream.close()
                if self._turn is not gate or not (is_there or self._calls or self._is_held()):
                    return
            frames = stream.take() if is_there else []
            if frames is None:
                self._lose(stream)
                return
            for request_id, body in frames:
                self._inbox.frame(request_id, body)

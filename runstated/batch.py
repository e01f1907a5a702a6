"""One batch: what was waiting, in one transaction. Synchronous; runs on the database's thread (in tests on any).

    BEGIN
      for each entry: SAVEPOINT, the verb, RELEASE (or ROLLBACK TO, if it was refused)
                      then the lines that it woke: their heads are run again, each in a savepoint of its own
    COMMIT   -> only now do replies go out and does the memory count

Any SQLite error may have ended the whole transaction (SQLITE_FULL, IOERR and INTERRUPT do): ``in_transaction`` tells.
Then nothing of the batch counts, in the file or in memory, and ``Lost`` names the entry at fault.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, TypeAlias

import msgspec

from runstate import wire
from runstated import circles, counters, dispatch, faults, replies, tickets
from runstated.clock import Clock
from runstated.domain import keys, leases, queues, runs, sessions
from runstated.lines import Memory
from runstated.settings import BATCH_VERBS_MS
from runstated.store.files import BATCH
from runstated.store.tx import Access, Caller, Parked, Refusal, TooMany, Tx
from runstated.waits import EVENTS, WATCH, Call, CallKey, Topic

log = logging.getLogger(__name__)

BEHIND_MAX = 16
HOLD_UP_NOBODY = frozenset(("budget", EVENTS, WATCH))  # lines in which all are looked at when they are woken
_no_caller = Caller()


class Lost(Exception):
    """The transaction is gone. ``index``: the entry at fault, None when it was BEGIN or COMMIT. ``in_commit``: nobody
    knows whether it took place."""

    def __init__(self, index: int | None, cause: sqlite3.Error, *, in_commit: bool = False) -> None:
        super().__init__(str(cause))
        self.index = index
        self.cause = cause
        self.in_commit = in_commit


# ---------------------------------------------------------------------------------------------------- entries


@dataclass(slots=True, eq=False)
class Ask:
    """A request of a session. ``arrived``: on the lease clock."""

    session: str
    access: Access
    request_id: int
    request: wire.Request[Any]
    ticket: int
    arrived: int

    @property
    def key(self) -> CallKey:
        return (self.session, self.request_id)


@dataclass(slots=True, eq=False)
class Opened:
    """A connection said hello."""

    row: sessions.Session
    request_id: int
    runs: tuple[str, ...]
    welcome: wire.Welcome


@dataclass(slots=True, eq=False)
class Ended:
    """A session is gone. ``how``: died or released."""

    session: str
    how: str


@dataclass(slots=True, eq=False)
class Away:
    """A session has lost its connection (or, ``away`` False, is back)."""

    session: str
    away: bool


@dataclass(slots=True, eq=False)
class Cancelled:
    """The caller of a request has gone."""

    session: str
    request_id: int


@dataclass(slots=True, eq=False)
class Nested:
    """A call is made inside of other holds from now on."""

    session: str
    request: wire.Nested


@dataclass(slots=True, eq=False)
class Acked:
    """Kept replies have arrived."""

    session: str
    request_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Tick:
    """Time has passed."""


@dataclass(slots=True, eq=False)
class Reread:
    """The outcome of a COMMIT is not known."""


Entry: TypeAlias = Ask | Opened | Ended | Away | Cancelled | Nested | Acked | Tick | Reread


# ---------------------------------------------------------------------------------------------------- the batch


class Executor:
    """Runs batches against one memory."""

    def __init__(self, memory: Memory, clock: Clock, instance: str) -> None:
        self.memory = memory
        self.clock = clock
        self.instance = instance
        self._woke_ms = clock.woke_ms()
        self._connection: sqlite3.Connection | None = None
        self._tx: Tx | None = None

    def run(self, connection: sqlite3.Connection, entries: Sequence[Entry]) -> int:
        """Runs and commits the first so many entries; how many. The memory's logs then hold what is to be sent.

        Raises Lost when nothing was committed.
        """
        tx = self._begin(connection)
        changes = connection.total_changes
        ends = perf_counter_ns() + BATCH_VERBS_MS * 1_000_000
        done = 0
        try:
            for entry in entries:
                self._entry(tx, entry)
                done += 1
                if perf_counter_ns() > ends:
                    break
        except sqlite3.Error as error:
            self._take_back(connection)
            raise Lost(done, error) from error
        except BaseException:
            self._take_back(connection)
            raise
        try:
            if self.memory.counters_changed or connection.total_changes != changes:
                self.memory.count(BATCH)
            counters.write(connection, self.memory)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._take_back(connection)
            raise Lost(None, error, in_commit=True) from error
        self.memory.commit()
        return done

    def _begin(self, connection: sqlite3.Connection) -> Tx:
        if self._tx is None or self._connection is not connection:
            self._connection = connection
            self._tx = Tx(connection, self.memory, self.instance)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise Lost(None, error) from error
        return self._tx

    def _take_back(self, connection: sqlite3.Connection) -> None:
        self.memory.rollback()
        self.memory.requeue()
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.warning("rolling back failed: %s", error)

    # ------------------------------------------------------------------ entries

    def _entry(self, tx: Tx, entry: Entry) -> None:
        memory = self.memory
        tx.now_ms, tx.lease_ms = self.clock.wall_ms(), self.clock.lease_ms()
        tx.lease_epoch_ms = self.clock.lease_epoch_ms()
        tx.caller = _no_caller
        tx.woken.clear()
        memory.left.clear()
        memory.overtaken.clear()
        memory.suspects.clear()
        if isinstance(entry, Ask):
            self._guarded(tx, replies.refusable(entry.key, entry.request), lambda: self._ask(tx, entry))
        elif isinstance(entry, Tick):
            self._tick(tx)
        elif isinstance(entry, Reread):
            self._reread(tx)
        else:
            # What the daemon itself has to do is never refused. If the disk fails, it is kept for a later batch. Any
            # other failure is a fault of ours or a damaged row, and it stays in one piece: the savepoint is taken back,
            # the fault is logged, and whoever said hello is told.
            key = (entry.row.session, entry.request_id) if isinstance(entry, Opened) else None
            self._guarded(tx, key, lambda: self._own(tx, entry), is_own=True)
        self._serve_lines(tx)

    def _guarded(self, tx: Tx, key: CallKey | None, work: Any, *, is_own: bool = False) -> None:
        """Runs ``work`` in a savepoint; a refusal or a fault takes it back and becomes the answer to ``key``; but not
        the disk's, where the work is the daemon's own and is kept."""
        mark = self.memory.mark()
        woken = len(tx.woken)
        tx.run("SAVEPOINT entry")
        try:
            work()
        except Exception as fault:
            if faults.is_of_disk(fault) and (is_own or key is None or not self._in_transaction()):
                raise
            error = faults.reply(fault)
        else:
            tx.run("RELEASE entry")
            return
        self.memory.rollback(mark)
        del tx.woken[woken:]
        tx.run("ROLLBACK TO entry")
        tx.run("RELEASE entry")
        if key is not None:
            self.memory.leave(key)
            self.memory.replies.append(([key], error))

    def _in_transaction(self) -> bool:
        return self._connection is not None and self._connection.in_transaction

    # ------------------------------------------------------------------ requests

    def _ask(self, tx: Tx, ask: Ask) -> None:
        memory = self.memory
        request = ask.request
        if ask.session not in memory.sessions and not request.gives:
            # Its session ended while this stood in a queue, and nothing must be given to the dead.
            ended = wire.Error(code="UNAVAILABLE", message="the session has ended", retryable=True)
            memory.replies.append(([ask.key], ended))
            return
        if request.again:
            if ask.key in memory.calls:
                self._nest(tx, ask.key, request)  # it still waits
                return
            kept = replies.kept(tx, ask.key, request)
            if kept is not None:
                memory.replies.append(([ask.key], kept))
                return
        rank = 1
        if isinstance(request, wire.WaitingRequest) and (request.within or request.inherited):
            inside = self._inside(ask.session, request)
            request = msgspec.structs.replace(request, **inside)
            rank = 0 if any(inside.values()) else 1
        tx.caller = Caller(ask.session, ask.access, ask.request_id, rank, ask.ticket)
        answer = dispatch.answer(tx, request)
        if isinstance(answer, Parked):
            assert isinstance(request, wire.WaitingRequest), "only a request that may wait is parked"
            until = None if request.wait_ms is None else ask.arrived + request.wait_ms
            call = Call(
                session=ask.session,
                access=ask.access,
                request_id=ask.request_id,
                request=request,
                rank=rank,
                ticket=ask.ticket,
                since_ms=tx.now_ms,
                until=until,
                late=answer.late,
                over=answer.over,
                lines=answer.lines,
                signals=answer.signals,
                aside=answer.aside,
                ages=answer.ages,
                stands=answer.stands,
            )
            self._park(tx, call)
        else:
            self._answer(tx, ask.key, request, answer)

    def _inside(self, session: str, request: wire.WaitingRequest[Any] | wire.Nested) -> dict[str, tuple[int, ...]]:
        """The holds that a call is made in. To name those of others must neither put it before others nor make a circle
        with them."""
        return {
            name: tuple(token for token in getattr(request, name) if self.memory.is_own(session, token))
            for name in ("within", "inherited")
        }

    def _nest(self, tx: Tx, key: CallKey, nested: wire.Request[Any]) -> None:
        call = self.memory.calls.get(key)
        if call is not None and isinstance(nested, wire.WaitingRequest | wire.Nested):
            request = msgspec.structs.replace(call.request, **self._inside(key[0], nested))
            if request != call.request:
                self._guarded(tx, key, lambda: self._park(tx, replace(call, request=request)))

    def _answer(self, tx: Tx, key: CallKey, request: wire.Request[Any], answer: wire.Reply | Refusal) -> None:
        reply = answer.reply() if isinstance(answer, Refusal) else answer
        self.memory.replies.append(([key], reply))
        replies.keep(tx, key, request, reply)

    def _park(self, tx: Tx, call: Call) -> None:
        memory = self.memory
        if call.until is not None and call.until <= tx.lease_ms:
            self._late(tx, call)
            return
        if call.key not in memory.calls and memory.awaiting(call.session) >= wire.WAITING_MAX:
            raise TooMany(f"{wire.WAITING_MAX} calls of this session wait already, which is the most that may")
        circle = circles.closed_by(tx, memory, call)
        if circle is not None:
            raise circles.Deadlock(circle)
        old = memory.calls.get(call.key)
        if old is None or old.ages != call.ages:
            memory.suspects.update(dict.fromkeys(call.stands))
        memory.park(call)
        behind = tuple(hold.token for hold in memory.holders(call)[:BEHIND_MAX])
        memory.pushes.append((call.session, tickets.parked(memory.counters, call, behind)))

    def _late(self, tx: Tx, call: Call) -> None:
        """The time of its wait is over."""
        self.memory.leave(call.key)
        reply = call.late if isinstance(call.late, wire.Reply) else call.late(tx)
        self.memory.replies.append(([call.key], reply))

    # ------------------------------------------------------------------ lines

    def _serve_lines(self, tx: Tx) -> None:
        """Runs again, by age, those who stand in a line that was woken; up to the first that stays in it."""
        memory = self.memory
        waiting: dict[Topic, None] = {}
        while True:
            woken = [*(line for line in memory.left if line[0] not in HOLD_UP_NOBODY), *tx.woken]
            waiting.update(dict.fromkeys(woken))
            waiting.update(dict.fromkeys(behind for line in woken for behind in queues.lines_behind(line)))
            memory.left.clear()
            tx.woken.clear()
            if not waiting:
                overtaken = [memory.calls[key] for key in memory.overtaken if key in memory.calls]
                memory.overtaken.clear()
                if not (overtaken or memory.suspects):
                    return
                if not overtaken:
                    self._guarded(tx, None, lambda: self._look_at_suspects(tx))
                for call in sorted(overtaken, key=lambda call: call.place):
                    if not call.away and memory.calls.get(call.key) is call:
                        self._guarded(tx, call.key, lambda call=call: self._again(tx, call))
                continue
            line = next(iter(waiting))
            del waiting[line]
            went_back = False
            for call in memory.line(line):
                if call.away or memory.calls.get(call.key) is not call:
                    continue
                place = call.place_in(line)
                self._guarded(tx, call.key, lambda call=call: self._again(tx, call))
                now = memory.calls.get(call.key)
                if now is not None and line in now.lines and line[0] not in HOLD_UP_NOBODY:
                    if now.place_in(line) <= place:
                        break
                    went_back = True  # it stood there for another job before, and may have held up itself
            if line in memory.left:
                waiting.update(dict.fromkeys(queues.lines_behind(line)))
                memory.left[:] = [other for other in memory.left if other != line]
            if went_back:
                waiting[line] = None

    def _again(self, tx: Tx, call: Call) -> None:
        memory = self.memory
        tx.caller = Caller(call.session, call.access, call.request_id, call.rank, call.ticket)
        answer = dispatch.answer(tx, call.request)
        if not isinstance(answer, Parked):
            memory.leave(call.key)
            self._answer(tx, call.key, call.request, answer)
            return
        stands = replace(  # a new one: the memory may have to go back to how it stood before
            call,
            late=answer.late,
            over=answer.over,
            lines=answer.lines,
            signals=answer.signals,
            aside=answer.aside,
            ages=answer.ages,
            stands=answer.stands,
        )
        self._park(tx, stands)

    def _look_at_suspects(self, tx: Tx) -> None:
        """Refuses a wait that has become one without end; looked for once more when it is gone."""
        memory = self.memory
        held = {token for topic in memory.suspects for token in memory.held(topic)}
        calls = {call.key: call for token in held for call in memory.inside(token)}
        found = circles.standing(tx, memory, calls.values())
        if found is None:
            memory.suspects.clear()
        else:
            call, circle = found
            memory.leave(call.key)
            memory.replies.append(([call.key], circles.Deadlock(circle).reply()))

    # ------------------------------------------------------------------ what the daemon does by itself

    def _own(self, tx: Tx, entry: Entry) -> None:
        memory = self.memory
        if isinstance(entry, Opened):
            self._opened(tx, entry)
        elif isinstance(entry, Ended):
            memory.close(entry.session)
            sessions.end(tx, entry.session, entry.how)
        elif isinstance(entry, Away):
            memory.set_away(entry.session, entry.away)
            # Those behind a call that is passed over from now on may be content with less than it wants. And a call
            # that is not passed over any more has missed what has woken its lines meanwhile.
            calls = memory.of_session(entry.session)
            tx.woken += [line for call in calls for line in call.lines if line[0] not in HOLD_UP_NOBODY]
            if not entry.away:
                memory.overtaken.update((call.key, None) for call in calls)
        elif isinstance(entry, Cancelled):
            if memory.leave((entry.session, entry.request_id)) is None:
                sessions.give_back(tx, entry.session, entry.request_id)
        elif isinstance(entry, Nested):
            self._nest(tx, (entry.session, entry.request.call), entry.request)
        elif isinstance(entry, Acked):
            replies.forget(tx, entry.session, entry.request_ids)

    def _opened(self, tx: Tx, entry: Opened) -> None:
        row = entry.row
        sessions.open_session(tx, row)
        self.memory.open(row.session, row.space, row.process)
        tx.caller = Caller(row.session, Access(space=row.space))
        ended = sessions.rejoin(tx, entry.runs)
        welcome = msgspec.structs.replace(entry.welcome, ended=ended)
        self.memory.replies.append(([(row.session, entry.request_id)], welcome))

    def _tick(self, tx: Tx) -> None:
        """Each thing that is due is guarded by itself: a fault of ours in one must not hold up the others."""
        memory = self.memory
        woke_ms = self.clock.woke_ms()
        if woke_ms != self._woke_ms:
            self._woke_ms = woke_ms
            memory.spare(woke_ms)
        for token in memory.lapsed(tx.lease_ms):
            self._guarded(tx, None, lambda token=token: sessions.lapse(tx, token))
        for call in memory.late(tx.lease_ms):
            self._guarded(tx, call.key, lambda call=call: self._late(tx, call))
        if memory.take_due(tx.now_ms, tx.lease_ms):
            for tick in dispatch.TICKS:
                self._guarded(tx, None, lambda tick=tick: self._tick_noun(tx, tick))

    def _tick_noun(self, tx: Tx, tick: Callable[[Tx], int | None]) -> None:
        due = tick(tx)
        if due is not None:
            tx.due(due)

    def _reread(self, tx: Tx) -> None:
        """Nobody knows whether the last COMMIT took place: the file is asked what lives, what waits, what is over."""
        memory = self.memory
        tx.set_keys(keys.stored(tx))
        live = {lease.token: lease for lease in leases.all_live(tx)}
        for token in [token for token in memory.holds if token not in live]:
            memory.let_go(token)
        for token, lease in live.items():
            if token not in memory.holds:
                memory.hold(token, lease.session, lease.length_ms, lease.topic, tx.lease_ms)
        for token, subject in leases.all_units(tx):
            memory.hold_also(token, subject)
        known = {row.session for row in sessions.get_all(tx)}
        for session in [session for session in memory.sessions if session not in known]:
            memory.close(session)
        runs.tell_ended(tx, memory.subscribed())
        for call in sorted(memory.calls.values(), key=lambda call: call.place):
            if memory.calls.get(call.key) is call:
                self._guarded(tx, call.key, lambda call=call: self._reread_call(tx, call))
        memory.due(tx.now_ms)

    def _reread_call(self, tx: Tx, call: Call) -> None:
        kept = replies.kept(tx, call.key, call.request)
        if kept is not None:
            self.memory.leave(call.key)
            self.memory.replies.append(([call.key], kept))
        elif not (call.away and call.lines):
            self._again(tx, call)

"""``Tx``: all that the domain sees of a database, of time and of those who wait.

A verb is ``verb(tx, request) -> reply``. It reads no clock, makes no random number and touches no socket: time, ids
and the caller come from here. What a verb changes in memory (who waits, which leases live) is recorded so that it can
be taken back with its savepoint.
"""

import secrets
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runstate import wire
from runstated.access import OWNER
from runstated.access import Access as Access
from runstated.access import StoredKey as StoredKey
from runstated.lines import Memory
from runstated.waits import EVENTS, Call, Opening, Settled, Topic

EVENTS_LOOK_EACH = 1_000  # events between two looks at whether the oldest are to go

Value = Any
Row = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a verb runs: a session and its request, or (the default) the daemon itself."""

    session: str = ""
    access: Access = OWNER
    request_id: int = 0
    rank: int = 1
    ticket: int = 0

    @property
    def space(self) -> str:
        return self.access.space


@dataclass(frozen=True, slots=True)
class Parked:
    """A verb's answer when it cannot answer yet. What it wrote stays; a second run of it must leave that alone.

    ``lines``: served by age, one after the other, by running the verb again. ``signals``: answered all at once with
    the value that settled them. ``late``: the reply when the wait is over, or what tells it then. ``aside``: it stands
    in some of its lines only because it has there what it wants, so whoever comes to stand before it makes it look
    again. ``ages``: by whose age it stands in a line, if not by its own: that of the job for which it stands there, and
    ``stands``: what that job needs.
    ``over``: tells the reply when its run ends, for a wait that the end of the run does not refuse.
    """

    lines: tuple[Topic, ...]
    signals: tuple[Topic, ...]
    late: "wire.Reply | Callable[[Tx], wire.Reply]"
    aside: bool = False
    ages: Mapping[Topic, int] = field(default_factory=dict)
    stands: Mapping[Topic, Any] = field(default_factory=dict)
    over: "Callable[[Tx], wire.Reply] | None" = None


def must(holds: bool, why: str) -> None:
    """An assertion that ``python -O`` keeps, for what would be recorded twice or wrongly if it did not hold."""
    if not holds:
        raise AssertionError(why)


class Refusal(Exception):
    """The caller's fault. ``says`` is the default message, ``code`` the stable name on the wire.

    Raised, it takes back all that the verb wrote; returned, it is the answer and what the verb wrote stays.
    """

    code = "VALIDATION_FAILED"
    says = ""

    def __init__(self, message: str | None = None, *, run: str | None = None) -> None:
        super().__init__(message or self.says or self.code)
        self.run = run

    def reply(self) -> wire.Error:
        return wire.Error(code=self.code, message=str(self), run=self.run)


class ValidationFailed(Refusal):
    """The request is not valid."""


class NotFound(Refusal):
    """There is no such thing."""

    code = "NOT_FOUND"


class Conflict(Refusal):
    """It exists already, and differs."""

    code = "CONFLICT"


class Forbidden(Refusal):
    """The key does not allow this."""

    code = "FORBIDDEN"


class TooMany(Refusal):
    """One session holds or awaits more than it may."""

    code = "UNAVAILABLE"


class Tx:
    """One transaction, and the part of the daemon's memory that changes with it.

    ``now_ms`` is wall time (what a calendar means), ``lease_ms`` the lease clock (leases and waits), which shows
    ``lease_epoch_ms`` less; all are read once for each entry of a batch.
    """

    def __init__(self, connection: sqlite3.Connection, memory: Memory, instance: str) -> None:
        self._execute = connection.execute
        self._memory = memory
        self._instance = instance
        self.now_ms = 0
        self.lease_ms = 0
        self.lease_epoch_ms = 0
        self.caller = Caller()
        self.woken: list[Topic] = []

    def need(self, permission: str, purpose: str) -> None:
        """Raises Forbidden unless the caller has the permission. ``purpose``: what it is needed for, as in "create"."""
        access = self.caller.access
        if not access.may(permission):
            raise Forbidden(f"the key {access.key} lacks the permission {permission}, which is needed to {purpose}")

    # -- the database

    def one(self, sql: str, **params: Value) -> Row | None:
        """The first row, or None."""
        row: Row | None = self._execute(sql, params).fetchone()
        return row

    def all(self, sql: str, **params: Value) -> list[Row]:
        """All rows."""
        return self._execute(sql, params).fetchall()

    def run(self, sql: str, **params: Value) -> int:
        """Runs a statement; how many rows it changed."""
        return self._execute(sql, params).rowcount

    def next(self, counter: str) -> int:
        """The next number of a counter; a number is never given twice, though some may be skipped."""
        return self._memory.count(counter)

    def last(self, counter: str) -> int:
        """The number that a counter has given last."""
        return self._memory.counters.get(counter, 0)

    def new_id(self, prefix: str) -> str:
        """A new id such as ``r12-4f9a``: the suffix tells databases apart, for clients that outlive a deleted one."""
        return f"{prefix}{self._memory.count(prefix)}-{self._instance}"

    def is_own_id(self, prefix: str, text: str) -> bool:
        """Whether a text has the form of this database's ids."""
        number = text.removeprefix(prefix).removesuffix(f"-{self._instance}")
        return text == f"{prefix}{number}-{self._instance}" and number.isascii() and number.isdigit()

    def random_text(self) -> str:
        """256 random bits as text, for a secret."""
        return secrets.token_urlsafe(32)

    def secret(self) -> str:
        """64 random bits as hexadecimal digits, for a hold."""
        return secrets.token_hex(8)

    def set_keys(self, keys: tuple[StoredKey, ...]) -> None:
        """The keys have changed: these are all, from the commit on."""
        self._memory.keys.append(keys)

    def emit(self, event: str, run: str, data: dict[str, Value]) -> None:
        """Records an event of a run."""
        self._execute(
            "INSERT INTO events (event, run, type, at_ms, data) VALUES (:event, :run, :type, :at_ms, :data)",
            {
                "event": self._memory.count("event"),
                "run": run,
                "type": event,
                "at_ms": self.now_ms,
                "data": msgspec.json.encode(data).decode(),
            },
        )
        if self.is_nth(("event", ""), EVENTS_LOOK_EACH):
            self.due(self.now_ms)
        if self._memory.listeners:
            row = self.one("SELECT path FROM runs WHERE run = :run", run=run)
            if row is not None:
                self.woken += [(EVENTS, each) for each in row[0].strip("/").split("/")]

    # -- those who wait

    def wake(self, line: Topic) -> None:
        """Something that this line waits for has become free: its head is looked at before the transaction ends."""
        self.woken.append(line)

    def answer(self, signal: Topic, reply: wire.Reply, push: wire.Push | None = None) -> None:
        """Everyone who waits for ``signal`` gets ``reply``; sessions that subscribed to it get ``push``."""
        self._memory.answer(signal, reply, push)

    def suspect(self, line: Topic) -> None:
        """Something begins to wait for this without a call of its own (a job for its slots): those who hold it may
        wait for that."""
        self._memory.suspects[line] = None

    def ahead(self, line: Topic, age: int | None = None) -> bool:
        """Whether somebody stands in the line before this caller (``age``: before a job for which it asks)."""
        return self._memory.ahead(line, self.caller, age)

    def awaited(self, kind: str) -> list[Topic]:
        """The lines of a kind in which anybody stands."""
        return self._memory.awaited(kind)

    def is_awaited(self, line: Topic) -> bool:
        """Whether anybody stands in the line."""
        return self._memory.is_awaited(line)

    def due(self, at_ms: int) -> None:
        """At this wall time there is something for a noun's ``tick``."""
        self._memory.due(at_ms)

    def is_nth(self, what: tuple[str, str], n: int) -> bool:
        """Whether this is the n-th, 2n-th ... time in this life of the daemon, for what is looked at now and then."""
        return self._memory.is_nth(what, n)

    def due_steady(self, at_lease_ms: int) -> None:
        """The same, on the lease clock."""
        self._memory.due_steady(at_lease_ms)

    def is_aside(self, line: Topic) -> bool:
        """Whether anybody stands in the line who has there what it wants."""
        return self._memory.is_aside(line)

    def opened(self, window: str) -> Opening:
        """When a limit's window opened; if that is not known (after a restart), when the daemon started."""
        return self._memory.windows.get(window, self._memory.began)

    def open_window(self, window: str) -> None:
        """A limit's window opens now. Not undone: an opening that did not take place only lengthens the present one."""
        self._memory.windows[window] = Opening(self.lease_ms, self.now_ms)

    def answer_over(self, signal: Topic, reply: wire.Reply, push: wire.Push) -> None:
        """The same when a run has ended; calls that have a reply of their own for that get it."""
        for call in self._memory.waiting_for(signal):
            if call.over is not None:
                self._memory.answer_one(call, call.over(self))
        self._memory.answer(signal, reply, push)

    def subscribe(self, signal: Topic) -> None:
        """The caller's session wants the push that comes with ``signal``."""
        self._memory.subscribe(signal, self.caller.session)

    def push(self, session: str, push: wire.Push) -> None:
        """Tells a session something after the commit; lost if it is away."""
        self._memory.pushes.append((session, push))

    def waiting(self, line: Topic) -> int:
        """How many stand in the line (for display)."""
        return self._memory.length(line)

    def calls(self) -> list[Call]:
        """All that wait (for display)."""
        return list(self._memory.calls.values())

    # -- live leases

    def expires_ms(self, token: int) -> int | None:
        """When a lease lapses unless it is renewed, as an estimate in wall time (for display)."""
        hold = self._memory.holds.get(token)
        return None if hold is None else self.lease_epoch_ms + hold.expires

    def hold(self, token: int, session: str, length_ms: int, subject: Topic) -> None:
        """A lease begins: it lapses ``length_ms`` after now, on the lease clock, unless it is renewed.

        Raises TooMany.
        """
        if self._memory.holding(session) >= wire.HELD_MAX:
            raise TooMany(f"this session holds {wire.HELD_MAX} leases already, which is the most one may have")
        self._memory.hold(token, session, length_ms, subject, self.lease_ms)

    def hold_also(self, token: int, subject: Topic) -> None:
        """Something more goes with a lease."""
        self._memory.hold_also(token, subject)

    def renew(self, token: int, length_ms: int) -> None:
        """A lease gets ``length_ms`` from now on."""
        self._memory.renew(token, length_ms, self.lease_ms)

    def let_go(self, token: int) -> None:
        """A lease has ended."""
        run = self._memory.looked_after.get(token)
        if run is not None:
            self.revisit(run)
        self._memory.let_go(token)

    def look_after(self, token: int, run: str) -> None:
        """When this lease ends, the run is revisited."""
        self._memory.looked_after[token] = run

    def revisit(self, run: str) -> None:
        """A ``tick`` is to look at this run, at once."""
        self._memory.revisit[run] = None
        self.due(self.now_ms)

    def take_revisits(self, many: int) -> list[str]:
        """The next runs to look at. If there are more, another ``tick`` is due."""
        taken = self._memory.take_revisits(many)
        if self._memory.revisit:
            self.due(self.now_ms)
        return taken

    # -- the cache of settled results

    def settled(self, run: str, key: str, deadline_ms: int | None, result: wire.OnceDone) -> None:
        """The result of a once key, until its run ends: to be given from memory after the commit."""
        self._memory.settled.append((Settled(self.caller.space, run, key), deadline_ms, result))

    def keeps_for(self, caller: str, ms: int) -> None:
        """How long a caller's replies are kept, by what had to go before its day was over."""
        self._memory.keeps_for[caller] = ms

    def forget_run(self, run: str) -> None:
        """The settled results of a run are no answers any more."""
        self._memory.forgotten_runs.append(run)

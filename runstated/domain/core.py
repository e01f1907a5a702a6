"""``Core``: one space in memory, and all that a verb sees of it, of time and of those who wait.

A verb is ``verb(core, request) -> reply``. It looks, refuses, changes, tells: a refusal that is raised means that
nothing was changed. It reads no clock and makes no random number: time, ids and the caller come from here.

    find / live ──> objects ── changed by the verb ──> put / remove: *noted* ──> the turn's commit: *written*
                       └─ no longer live: leaves memory when that is *durable* (evicted)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import msgspec

from runstate import wire
from runstated.domain.answers import NOBODY, Caller, Forbidden, Missing
from runstated.domain.holds import Holds, Lease
from runstated.domain.lines import Lines
from runstated.domain.numbers import Numbers
from runstated.domain.tables import Row, Table
from runstated.domain.waits import EVENTS, LIMIT, Call, Opening, Settled, Topic

T = TypeVar("T")
Notes = dict[Table[Any], dict[Hashable, Row | None]]  # None: the row is to go


@dataclass(slots=True, eq=False)
class Event:
    """One event. ``data``: JSON text. ``path``: of its run, see runs.py."""

    event: int
    space: str
    run: str
    path: str
    type: str
    at_ms: int
    data: str


RING_MAX = 2_000  # events that stay in memory for those who follow
EVENTS_TABLE = Table("events", Event, key=("event",), appended=True)
_to_text = msgspec.json.Encoder().encode


class Core:
    """See the module. ``now_ms`` is wall time (what a calendar means), ``lease_ms`` the lease clock (leases and waits),
    which shows ``lease_epoch_ms`` less; all are set before each verb."""

    def __init__(self, space: str, numbers: Numbers, began: Opening) -> None:
        self.space = space
        self.numbers = numbers
        self.lines = Lines()
        self.holds = Holds()
        self.caller: Caller = NOBODY
        self.now_ms, self.lease_ms, self.lease_epoch_ms = began.wall_ms, began.lease_ms, 0
        self.began = began  # when this life of the daemon began
        self.process_of: dict[str, str] = {}  # of the sessions that are open, "" where the kernel does not tell
        self.worker_of: dict[str, str] = {}  # their labels
        self.unnamed: list[int] = []  # sets of needs that leases have ceased to name
        self.windows: dict[str, Opening] = {}  # when the windows of limits opened
        self.woken: list[Topic] = []
        self.notes: Notes = {}
        self.noted = 0  # how often anything was changed, ever
        self.must_sync = False  # what the turn has to say waits for the disk, whatever it is
        self.wary_age = 0  # jobs older than this were there when the machine's power was cut
        self.leaving: list[tuple[Table[Any], Any]] = []  # objects that leave memory when the turn is durable
        self.durable: list[Callable[[], object]] = []  # to be called then
        self.settled: list[tuple[Settled, int | None, wire.OnceDone]] = []
        self.forgotten_runs: list[str] = []
        self.ring: deque[Event] = deque(maxlen=RING_MAX)  # the newest events of the space ...
        self.ring_first = numbers.last.get("event", 0) + 1  # ... all from this number on
        self.due_ms: int | None = None
        self.due_lease_ms: int | None = None
        self.revisit: dict[str, None] = {}  # runs that a tick looks at; a stale entry costs one look
        self.looked_after: dict[int, str] = {}  # token -> a run to revisit when it has ended
        self.emptied: dict[str, None] = {}  # runs in which nothing is held any more
        self.ended: list[str] = []  # runs that have ended in this entry ...
        self.clearing: list[str] = []  # ... and those whose objects are to leave memory
        self._live: dict[Table[Any], dict[Any, Any]] = {}
        self._fetched: dict[tuple[Table[Any], tuple[str, ...], Hashable], Any] = {}
        self._indexes: dict[type, Any] = {}
        self._of_run: dict[str, dict[tuple[Table[Any], Hashable], Any]] = {}

    def need(self, permission: str, purpose: str) -> None:
        """Raises Forbidden unless the caller has the permission. ``purpose``: what it is needed for, as in "create"."""
        access = self.caller.access
        if not access.may(permission):
            raise Forbidden(f"the key {access.key} lacks the permission {permission}, which is needed to {purpose}")

    # ------------------------------------------------------------------ objects

    def live(self, table: Table[T]) -> dict[Any, T]:
        """The objects of a table that are in memory, by key. Changed by ``put`` and ``remove`` only."""
        found = self._live.get(table)
        if found is None:
            found = self._live[table] = {}
        return found

    def index(self, kind: type[T]) -> T:
        """A noun's own look-up tables beside its objects: made when first asked for. They can be recomputed from the
        objects, and tests do so."""
        found = self._indexes.get(kind)
        if found is None:
            found = self._indexes[kind] = kind()
        return found

    def find(self, table: Table[T], key: Hashable) -> T | None:
        """The object with that key, in memory or on disk; None if there is none. Raises Missing."""
        found = self.live(table).get(key)
        return found if found is not None else self.fetched(table, table.key, key)

    def fetched(self, table: Table[T], columns: tuple[str, ...], value: Hashable) -> T | None:
        """An object that is not in memory, by its key or by one of the table's ``asked_by``; None if there is none.
        It stays out of memory unless it is ``put``. Raises Missing, unless it was fetched for this request."""
        try:
            return self._fetched[table, columns, value]  # type: ignore[no-any-return]
        except KeyError:
            raise Missing(table, columns, value) from None

    def fetched_each(self, table: Table[T], columns: tuple[str, ...], values: Iterable[Hashable]) -> list[T]:
        """Those that there are of several objects that are not in memory. Raises Missing once for all of them."""
        known = [(value, (table, columns, value)) for value in values]
        absent = [value for value, place in known if place not in self._fetched]
        if absent:
            raise Missing(table, columns, absent[0], tuple(absent[1:]))
        return [found for _, place in known if (found := self._fetched[place]) is not None]

    def supply(self, missing: Missing, thing: Any) -> None:
        """What was missing, or None, for the request that asked for it."""
        self._fetched[missing.table, missing.columns, missing.value] = thing

    def forget_supplied(self) -> None:
        """The next request is looked at."""
        if self._fetched:
            self._fetched.clear()

    def put(self, table: Table[T], thing: T) -> None:
        """Notes the object as it is now: it is new, or has changed. One that is not live any more leaves memory when
        this is durable."""
        self._note(table, table.key_of(thing), table.checked_row(thing))
        self.keep(table, thing)
        if not table.is_live(thing):
            self.leaving.append((table, thing))

    def remove(self, table: Table[T], thing: T) -> None:
        """Notes that the object is no more."""
        self._note(table, table.key_of(thing), None)
        self.drop(table, thing)

    def keep(self, table: Table[T], thing: T) -> None:
        """The object is in memory from now on, as it is on disk."""
        self.noted += 1
        key = table.key_of(thing)
        live = self.live(table)
        if table.run is not None and key not in live:
            self._of_run.setdefault(getattr(thing, table.run), {})[table, key] = thing
        live[key] = thing

    def drop(self, table: Table[T], thing: T) -> None:
        """The object leaves memory."""
        self.noted += 1
        key = table.key_of(thing)
        self.live(table).pop(key, None)
        if table.run is not None:
            run = getattr(thing, table.run)
            things = self._of_run.get(run)
            if things is not None:
                things.pop((table, key), None)
                if not things:
                    del self._of_run[run]

    def things_of_run(self, run: str, many: int) -> list[tuple[Table[Any], Any]]:
        """The objects in memory that belong to a run, at most ``many``."""
        return [(table, thing) for (table, _), thing in islice(self._of_run.get(run, {}).items(), many)]

    def append(self, table: Table[T], thing: T) -> None:
        """Notes a row of an append table."""
        self._note(table, table.key_of(thing), table.checked_row(thing))

    def forget(self, table: Table[Any], key: Hashable) -> None:
        """Notes that a row goes, of something that is over; what is in memory stays."""
        if key not in self.live(table):
            self._note(table, key, None)

    def rewrite(self, table: Table[T], thing: T) -> None:
        """Notes how the row of something that is over is now; it stays out of memory."""
        self._note(table, table.key_of(thing), table.checked_row(thing))

    def _note(self, table: Table[Any], key: Hashable, row: Row | None) -> None:
        rows = self.notes.get(table)
        if rows is None:
            rows = self.notes[table] = {}
        rows[key] = row
        self.noted += 1

    def when_durable(self, work: Callable[[], object]) -> None:
        """Calls ``work`` when all that is noted by now is on disk."""
        self.durable.append(work)

    # ------------------------------------------------------------------ numbers

    def next(self, counter: str) -> int:
        """The next number of a counter."""
        return self.numbers.next(counter)

    def new_id(self, prefix: str) -> str:
        """A new id such as ``r12-4f9a``: the suffix tells databases apart, for clients that outlive a deleted one."""
        return f"{prefix}{self.numbers.next(prefix)}-{self.numbers.instance}"

    def is_own_id(self, prefix: str, text: str) -> bool:
        """Whether a text has the form of this database's ids."""
        number = text.removeprefix(prefix).removesuffix(f"-{self.numbers.instance}")
        return text == f"{prefix}{number}-{self.numbers.instance}" and number.isascii() and number.isdigit()

    # ------------------------------------------------------------------ telling

    def emit(self, event: str, run: str, path: str, data: dict[str, Any]) -> None:
        """Records an event of a run. ``path``: that of the run."""
        told = Event(self.numbers.next("event"), self.space, run, path, event, self.now_ms, _to_text(data).decode())
        self.append(EVENTS_TABLE, told)
        if len(self.ring) == RING_MAX:
            self.ring_first = self.ring[0].event + 1
        self.ring.append(told)
        self.numbers.oldest_event = self.numbers.oldest_event or told.event
        if self.lines.listeners:
            self.woken += [(EVENTS, each) for each in path.strip("/").split("/")]

    def wake(self, line: Topic) -> None:
        """Something that this line waits for has become free: its head is looked at before the turn goes on."""
        if line[0] == LIMIT:
            self.lines.stands.look_from(line)
        else:
            self.woken.append(line)

    def answer(self, signal: Topic, reply: wire.Reply, push: wire.Push | None = None) -> None:
        """Everyone who waits for ``signal`` gets ``reply``; sessions that subscribed to it get ``push``."""
        self.lines.answer(signal, reply, push)

    def answer_over(self, signal: Topic, reply: wire.Reply, push: wire.Push) -> None:
        """The same when a run has ended; calls that have a reply of their own for that get it."""
        for call in self.lines.waiting_for(signal):
            if call.over is not None:
                self.lines.answer_one(call, call.over(self))
        self.lines.answer(signal, reply, push)

    def subscribe(self, signal: Topic) -> None:
        """The caller's session wants the push that comes with ``signal``."""
        self.lines.subscribe(signal, self.caller.session)

    def push(self, session: str, push: wire.Push) -> None:
        """Tells a session something after the commit; lost if it is away."""
        self.lines.pushes.append((session, push))

    # ------------------------------------------------------------------ those who wait

    def suspect(self, line: Topic) -> None:
        """Something begins to wait for this without a call of its own (a job for its slots): those who hold it may
        wait for that."""
        self.lines.suspects[line] = None

    def ahead(self, line: Topic, age: int | None = None) -> bool:
        """Whether somebody stands in the line before this caller (``age``: before a job for which it asks)."""
        return self.lines.ahead(line, self.caller, age)

    def waiting(self, line: Topic) -> int:
        """How many stand in the line (for display)."""
        return self.lines.length(line)

    def calls(self) -> list[Call]:
        """All that wait (for display)."""
        return list(self.lines.calls.values())

    def holders(self, call: Call) -> list[Lease]:
        """The leases that keep a call waiting, as far as they are known."""
        topics = dict.fromkeys((*call.lines, *call.signals))
        return [lease for topic in topics for lease in self.holds.of_topic(topic)]

    # ------------------------------------------------------------------ time

    def due(self, at_ms: int) -> None:
        """At this wall time there is something for a noun's ``tick``. Too early does no harm."""
        if self.due_ms is None or at_ms < self.due_ms:
            self.due_ms = at_ms

    def due_steady(self, at_lease_ms: int) -> None:
        """The same, on the lease clock."""
        if self.due_lease_ms is None or at_lease_ms < self.due_lease_ms:
            self.due_lease_ms = at_lease_ms

    def take_due(self) -> bool:
        """Whether there is something for the nouns' ticks; if so, they are to name the next time."""
        is_due = self.due_ms is not None and self.due_ms <= self.now_ms
        if not is_due and (self.due_lease_ms is None or self.due_lease_ms > self.lease_ms):
            return False
        self.due_ms = self.due_lease_ms = None
        return True

    def next_lease(self) -> int | None:
        """When, on the lease clock, the next lease, wait or noun may be due."""
        times = (self.holds.next_lapse(), self.lines.next_late(), self.due_lease_ms)
        return min((at for at in times if at is not None), default=None)

    def opened(self, window: str) -> Opening:
        """When a limit's window opened; if that is not known (after a restart), when the daemon started."""
        return self.windows.get(window, self.began)

    def open_window(self, window: str) -> None:
        """A limit's window opens now."""
        self.windows[window] = Opening(self.lease_ms, self.now_ms)

    # ------------------------------------------------------------------ runs to look at

    def look_after(self, lease: Lease, run: str) -> None:
        """When this lease ends, the run is revisited."""
        self.looked_after[lease.token] = run

    def revisit_run(self, run: str) -> None:
        """A ``tick`` is to look at this run, at once."""
        self.revisit[run] = None
        self.due(self.now_ms)

    def take_revisits(self, many: int) -> list[str]:
        """The next runs to look at. If there are more, another ``tick`` is due."""
        taken = list(islice(self.revisit, many))
        for run in taken:
            del self.revisit[run]
        if self.revisit:
            self.due(self.now_ms)
        return taken

    # ------------------------------------------------------------------ the cache of settled results

    def settle(self, run: str, key: str, deadline_ms: int | None, result: wire.OnceDone) -> None:
        """The result of a once key, until its run ends: to be given from memory when it is durable."""
        self.settled.append((Settled(self.space, run, key), deadline_ms, result))

    def forget_run(self, run: str) -> None:
        """The settled results of a run are no answers any more."""
        self.forgotten_runs.append(run)

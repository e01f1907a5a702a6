"""The rules without sockets: real objects, real turns, a real database, and a clock that goes when the test says so.

A script reads like a story:

    a, b = h.session("a"), h.session("b")
    got = a.ask(wire.OnceAcquire(run=run, key="k"))       # answered: the reply
    waits = b.waits(wire.OnceAcquire(run=run, key="k"))   # not answered: a handle, whose ``reply`` comes later
    h.pass_ms(3_000)                                      # time passes; what becomes due is done when it is due
    a.beat(got.token)
"""

from __future__ import annotations

import functools
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from runstate import wire
from runstated.domain import keys, limits, needs, nouns, sessions, slots
from runstated.domain.access import Access
from runstated.domain.answers import Caller, Missing, Parked
from runstated.domain.core import Core
from runstated.domain.numbers import Numbers
from runstated.domain.waits import Call, Opening, StandPlace, Topic
from runstated.engine.cache import Cache
from runstated.engine.entries import Acked, Ask, Away, Cancelled, Ended, Entry, Opened, Tick
from runstated.engine.retention import Retention
from runstated.engine.spaces import Spaces
from runstated.engine.turns import Said, Turns
from runstated.store import old, schema
from runstated.store.database import Database
from tests.clock import ManualClock
from tests.compare import check_same

INSTANCE = "test"
TICKS_MAX = 10_000  # more of them without time passing is a tick that never gets done


def nothing(sql: str) -> None:
    """No fault."""


class Connection(sqlite3.Connection):
    """Remembers the statements it was given, as they were written. ``before`` and ``after`` see each of them and may
    raise instead of the database."""

    statements: ClassVar[set[str]] = set()
    before: Callable[[str], None] = staticmethod(nothing)
    after: Callable[[str], None] = staticmethod(nothing)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:  # type: ignore[override]
        self.statements.add(sql)
        self.before(sql)
        cursor = super().execute(sql, *parameters)
        self.after(sql)
        return cursor

    def executemany(self, sql: str, parameters: Any) -> sqlite3.Cursor:
        self.statements.add(sql)
        self.before(sql)
        cursor = super().executemany(sql, parameters)
        self.after(sql)
        return cursor


class Request:
    """One request that was sent, and what came back."""

    def __init__(self, client: Client, request_id: int, request: wire.Request[Any]) -> None:
        self.client = client
        self.id = request_id
        self.request = request
        self.replies: list[wire.Reply] = []

    @property
    def reply(self) -> Any:
        """The only reply; None while it waits."""
        assert len(self.replies) <= 1, f"answered {len(self.replies)} times"
        return self.replies[0] if self.replies else None

    @property
    def ticket(self) -> int:
        tickets = [push.ticket for push in self.client.pushes if isinstance(push, wire.Parked) and push.call == self.id]
        return tickets[-1] if tickets else 0

    def repeat(self, **changes: Any) -> Request:
        """Sends it again under its id, as a client does that has lost its connection."""
        if isinstance(self.request, wire.WaitingRequest):
            changes.setdefault("ticket", self.ticket)
        again = Request(self.client, self.id, msgspec.structs.replace(self.request, again=True, **changes))
        self.client.open[self.id] = again
        self.client.h.run(self.client.entry(again))
        return again

    def cancel(self) -> None:
        self.client.h.run(Cancelled(self.client.name, self.id))

    def ack(self) -> None:
        self.client.h.run(Acked(self.client.name, (self.id,)))


class Client:
    """One session."""

    def __init__(self, h: Harness, name: str, access: Access, process: str = "") -> None:
        self.h = h
        self.name = name
        self.access = access
        self.process = process
        self.open: dict[int, Request] = {}
        self.pushes: list[wire.Push] = []
        self.ended: tuple[wire.RunEnded, ...] = ()
        self.pid = 100 + len(h.clients)
        self._next = 0

    def hello(self, runs: tuple[str, ...] = ()) -> Client:
        row = sessions.Session(
            self.name,
            self.access.space,
            f"worker-{self.name}",
            self.process,
            self.pid,
            "python x",
            self.access.key,
        )
        welcome = wire.Welcome(protocol=1, version="test", pid=1)
        asked = self.request(wire.Hello(protocol=1, protocol_min=1, session=self.name, worker=""))
        self.h.run(Opened(row, asked.id, runs, welcome))
        self.ended = asked.reply.ended
        return self

    def request(self, request: wire.Request[Any]) -> Request:
        self._next += 1
        self.open[self._next] = Request(self, self._next, request)
        return self.open[self._next]

    def entry(self, request: Request) -> Ask:
        ticket = self.h.ticket()
        asked = request.request
        if isinstance(asked, wire.WaitingRequest) and asked.again and asked.ticket:
            ticket = min(ticket, asked.ticket)
        return Ask(self.name, self.access, request.id, asked, ticket, self.h.clock.lease_ms())

    def submit(self, request: wire.Request[Any]) -> Request:
        """Sends a request, whatever comes of it."""
        asked = self.request(request)
        self.h.run(self.entry(asked))
        return asked

    def ask(self, request: wire.Request[Any]) -> Any:
        """The reply of a request that is answered at once."""
        reply = self.submit(request).reply
        assert reply is not None, f"{request} waits"
        return reply

    def waits(self, request: wire.Request[Any]) -> Request:
        """A request that has to wait."""
        asked = self.submit(request)
        assert asked.reply is None, f"answered at once: {asked.reply}"
        return asked

    def refused(self, code: str, request: wire.Request[Any]) -> wire.Error:
        """The refusal of a request, which must have this code."""
        reply = self.ask(request)
        assert isinstance(reply, wire.Error), reply
        assert reply.code == code, reply
        return reply

    def beat(self, *tokens: int) -> list[bool]:
        holds = self.h.core(self.access.space).holds
        return [holds.beat(self.name, token, self.h.clock.lease_ms()) for token in tokens]

    def lose(self) -> None:
        """The connection is lost."""
        self.h.run(Away(self.name, True))

    def resume(self) -> None:
        self.hello()
        self.h.run(Away(self.name, False))

    def die(self) -> None:
        self.h.run(Ended(self.name, "died"))

    def bye(self) -> None:
        self.h.run(Ended(self.name, "released"))

    def told(self, kind: type) -> list[Any]:
        return [push for push in self.pushes if isinstance(push, kind)]


@functools.cache
def _new_database() -> sqlite3.Connection:
    """What every new database is: copied, which takes a tenth of the time that its making does."""
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=Connection)
    schema.migrate(connection)
    return connection


class Harness:
    """A daemon without an event loop."""

    def __init__(self, path: str | Path = ":memory:") -> None:
        self.clock = ManualClock()
        self.connection: Any = sqlite3.connect(
            path, isolation_level=None, cached_statements=512, factory=Connection, check_same_thread=False
        )
        weakref.finalize(self, self.connection.close)  # in whatever thread; Python 3.13 warns of one left open
        if not self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            _new_database().backup(self.connection)
        schema.migrate(self.connection)  # one from before
        self.clients: dict[str, Client] = {}
        self.cache = Cache()
        self._tickets = 0
        self.start()

    def start(self) -> None:
        """As after a start of the daemon: memory is what the database says."""
        self.database = Database(self.connection)
        self.spaces = self.loaded()
        self.database.batch = self.database.last_batch()
        self.turns = Turns(self.spaces, self.clock, self.fetch)
        self.retention = Retention(self.spaces, lambda look: look(self.connection))
        self.turns.tidy(self.retention)
        self.retention.counted(*old.count_events(self.connection))

    def loaded(self) -> Spaces:
        """What a start would have in memory now."""
        numbers = Numbers(INSTANCE)
        spaces = Spaces(numbers, Opening(self.clock.lease_ms(), self.clock.wall_ms()))
        spaces.load(self.database)
        numbers.make_secrets()
        return spaces

    def fetch(self, missing: Missing) -> Any:
        row = self.database.read(missing.table, missing.columns, missing.value)
        return None if row is None else missing.table.made(row)

    def core(self, space: str = "default") -> Core:
        return self.spaces.of(space)

    def close(self) -> None:
        self.connection.close()

    def session(
        self,
        name: str,
        space: str = "default",
        runs: tuple[str, ...] = (),
        access: Access | None = None,
        process: str = "",
    ) -> Client:
        access = access or Access(space=space)
        if access.key and access.key not in self.spaces.of(keys.SPACE).live(keys.KEYS):
            self.spaces.of(keys.SPACE).put(keys.KEYS, keys.Key(access.key, access.space, "", "", "", 0))
        self.clients[name] = Client(self, name, access, process)
        return self.clients[name].hello(runs)

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    # ------------------------------------------------------------------ batches

    def run(self, *entries: Entry) -> None:
        """Runs the entries in as few turns as that takes, each with its commit."""
        rest = list(entries)
        while rest:
            rest = rest[self.turns.run(rest) :]
            self.commit()
            self.deliver(self.turns.durable())

    def commit(self) -> None:
        self.database.commit(self.turns.take_batch())

    def deliver(self, said: Said) -> None:
        """What the engine does after a commit."""
        for settled, deadline_ms, result in said.settled:
            self.cache.put(settled, deadline_ms, wire.encode(result))
        for run in said.forgotten_runs:
            self.cache.drop(run)
        for session, push in said.pushes:
            if session in self.clients:
                self.clients[session].pushes.append(_over_the_wire(push, wire.decode_push))
        answers = [(asked.key, asked.listing.then(self.database.list(asked.listing))) for asked in said.listings]
        for calls, reply in [*said.replies, *(([key], reply) for key, reply in answers)]:
            for session, request_id in calls:
                if session in self.clients:
                    request = self.clients[session].open[request_id]
                    request.replies.append(_over_the_wire(reply, wire.decode_reply))

    # ------------------------------------------------------------------ time

    def pass_ms(self, ms: int) -> None:
        """Time passes; what becomes due on the way is done on time."""
        end = self.clock.steady_ms() + ms
        while True:
            self.tick_if_due()
            left = end - self.clock.steady_ms()
            if not left:
                return
            due = self._due_in_ms()
            self.clock.pass_ms(left if due is None else min(left, max(1, due)))

    def stall(self, ms: int, arrived: Callable[[], object] = lambda: None) -> None:
        """The daemon does not run for a while; alarms that were due ring late. What has arrived is read before it acts
        on them."""
        self.clock.stall(ms)
        arrived()
        self.tick_if_due()

    def suspend(self, ms: int) -> None:
        """The machine sleeps and resumes."""
        self.clock.suspend(ms)
        self.tick_if_due()

    def tick(self) -> None:
        self.run(Tick())

    def tick_if_due(self) -> None:
        for _ in range(TICKS_MAX):
            due = self._due_in_ms()
            if due is None or due > 0:
                return
            self.tick()
        raise AssertionError("a tick is due again and again")

    def _due_in_ms(self) -> int | None:
        steady = [at - self.clock.lease_ms() for core in self.spaces if (at := core.next_lease()) is not None]
        wall = [core.due_ms - self.clock.wall_ms() for core in self.spaces if core.due_ms is not None]
        return min([*steady, *wall], default=None)

    # ------------------------------------------------------------------ looking

    def rows(self, sql: str, **params: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self.connection.execute(sql, params).fetchall()
        return found

    def value(self, sql: str, **params: Any) -> Any:
        return self.rows(sql, **params)[0][0]

    def opened(self, limit: str) -> int:
        """When, on the lease clock, the window of a limit (its id) opened."""
        return self.core().windows[limit].lease_ms

    def counted(self) -> dict[tuple[str, str, str], int]:
        """The counts that are kept, without zeros."""
        rows = self.rows("SELECT run, queue, state, jobs FROM job_counts WHERE jobs <> 0")
        return {(run, queue, state): jobs for run, queue, state, jobs in rows}

    def recounted(self) -> dict[tuple[str, str, str], int]:
        rows = self.rows("SELECT run, queue, state, count(*) FROM jobs GROUP BY run, queue, state")
        return {(run, queue, state): jobs for run, queue, state, jobs in rows}

    def held(self) -> dict[int, int]:
        """The leases that live, and when, on the lease clock, they lapse."""
        return {token: lease.expires for core in self.spaces for token, lease in core.holds.of_token.items()}

    def events(self, run: str) -> list[str]:
        return [kind for (kind,) in self.rows("SELECT type FROM events WHERE run = :run ORDER BY event", run=run)]

    def check(self) -> None:
        """What must be true between two turns, whatever happened."""
        self.check_state()
        self.check_nobody_was_forgotten()

    def check_state(self) -> None:
        """The same while a tick is due that has not been done."""
        check_same(self.spaces, self.loaded())
        assert self.counted() == self.recounted()
        for core in self.spaces:
            check_lines(core)
        check_resources(self)
        self.check_nobody_waits_in_vain()

    def check_nobody_was_forgotten(self) -> None:
        """Whoever waits and is there would have to wait if it asked again now: no wake-up was lost. (Asked of what a
        start would have, so that nothing is changed by the question.)"""
        for core in self.spaces:
            for call in core.calls():
                if not call.away:
                    self._check_would_wait(core, call)

    def _check_would_wait(self, core: Core, call: Call) -> None:
        noted = {table: dict(rows) for table, rows in core.notes.items()}
        assert not noted, "asked between two turns"
        copy = self.loaded().of(core.space)
        copy.lines, copy.windows = core.lines, dict(core.windows)
        copy.ring, copy.ring_first = core.ring, core.ring_first
        copy.now_ms, copy.lease_ms = self.clock.wall_ms(), self.clock.lease_ms()
        copy.caller = Caller(call.session, call.access, call.request_id, call.rank, call.ticket, call.request)
        left, overtaken, suspects = list(core.lines.left), dict(core.lines.overtaken), dict(core.lines.suspects)
        replies, pushes = list(core.lines.replies), list(core.lines.pushes)
        while True:
            try:
                answer = nouns.VERBS[type(call.request)](copy, call.request)
                break
            except Missing as missing:
                for each in missing.each():
                    copy.supply(each, self.fetch(each))
        core.lines.left, core.lines.overtaken, core.lines.suspects = left, overtaken, suspects
        core.lines.replies, core.lines.pushes = replies, pushes
        while core.lines.stands.next() is not None:
            pass  # windows that are over have begun anew in the copy only
        assert isinstance(answer, Parked), f"{call} waits beside {answer}"

    def check_nobody_waits_in_vain(self) -> None:
        """Nobody who is there waits beside an open key, a ready job, a finished job or in a run that is over."""
        for core in self.spaces:
            for call in core.calls():
                if not call.away:
                    self._check_waits_for_something(call)

    def _check_waits_for_something(self, call: Call) -> None:
        request = call.request
        if isinstance(request, wire.OnceAcquire | wire.OnceGet):
            held = "SELECT count(*) FROM leases WHERE kind = 'once' AND run = :r AND subject = :k"
            assert self.value(held, r=request.run, k=request.key), f"{call} waits beside a key that nobody holds"
        elif isinstance(request, wire.QueuesResult):
            (state,) = self.rows("SELECT state FROM jobs WHERE job = :job", job=request.job)[0]
            assert state in ("ready", "delayed", "reserved", "running"), f"{call} waits for a job that is {state}"
        elif isinstance(request, wire.QueuesAdmit):
            for wanted in request.queues:
                free = [age for age, _, wants in self.heads(call.space, wanted) if not wants]
                assert not free, f"{call} waits beside ready jobs of the ages {free}"
        elif isinstance(request, wire.TimersSleep):
            fired = self.value("SELECT fired FROM timers WHERE run = :r AND name = :n", r=request.run, n=request.name)
            assert not fired, f"{call} sleeps although its timer has fired"
        elif isinstance(request, wire.BarriersArrive):
            row = "SELECT released FROM barriers WHERE run = :r AND name = :n"
            assert not self.value(row, r=request.run, n=request.name), f"{call} waits at an open barrier"
        elif isinstance(request, wire.GroupsEnded):
            last = self.value("SELECT coalesce(max(finish), 0) FROM jobs WHERE run = :r", r=request.run)
            assert last <= request.after, f"{call} waits for a job that has ended"

    def is_over(self, run: str) -> bool:
        """By the clock."""
        over = "SELECT count(*) FROM runs WHERE run = :run AND (state <> 'active' OR deadline_ms <= :now)"
        return bool(self.value(over, run=run, now=self.clock.wall_ms()))

    def heads(self, space: str, wanted: wire.AdmitFrom) -> list[tuple[int, int, needs.Wants]]:
        """The oldest ready job of each set of needs that a worker of the run may take: its age, its number and what it
        wants."""
        rows = self.rows(
            "SELECT jobs.age, jobs.job, jobs.needs, queues.needs FROM jobs JOIN runs ON runs.run = jobs.run"
            " JOIN queues ON queues.space = jobs.space AND queues.queue = jobs.queue"
            " WHERE jobs.space = :space AND jobs.queue = :queue AND jobs.state = 'ready' AND runs.state = 'active'"
            " AND runs.path LIKE :path AND (runs.deadline_ms IS NULL OR runs.deadline_ms > :now)",
            space=space,
            queue=wanted.queue,
            path=f"%/{wanted.run}/%" if wanted.below else f"%/{wanted.run}/",
            now=self.clock.wall_ms(),
        )
        oldest: dict[int, tuple[int, int, int]] = {}
        for age, number, needed, of_queue in sorted((age, int(job[1:].split("-")[0]), *row) for age, job, *row in rows):
            oldest.setdefault(needed, (age, number, needed or of_queue))
        return [(age, number, needs.get(self.core(space), needed)) for age, number, needed in oldest.values()]


def _over_the_wire(message: Any, decode: Any) -> Any:
    """As the client sees it; a message that cannot be sent and read back is a fault."""
    seen = decode(wire.encode(message))
    assert seen == message
    return seen


# ---------------------------------------------------------------------------------------------------- who waits


def check_lines(core: Core) -> None:
    """The indexes say the same as the calls they are made from, and keep nothing else."""
    state = core.lines
    lines: dict[Any, list[Any]] = {}
    aside: dict[Any, set[Any]] = {}
    signals: dict[Any, set[Any]] = {}
    inside: dict[int, set[Any]] = {}
    by_session: dict[str, set[Any]] = {}
    for key, call in state.calls.items():
        assert key == call.key
        by_session.setdefault(call.session, set()).add(key)
        assert call.session in state.sessions, "a call of nobody"
        assert call.away == state.sessions[call.session]
        for line in call.lines:
            lines.setdefault(line, []).append(call.place_in(line))
            if call.aside:
                aside.setdefault(line, set()).add(key)
        for signal in call.signals:
            signals.setdefault(signal, set()).add(key)
        for token in call.request.within:
            inside.setdefault(token, set()).add(key)
    assert state._lines == {line: sorted(places) for line, places in lines.items()}
    assert _as_sets(state._aside) == aside
    assert _as_sets(state._signals) == signals
    assert _as_sets(state._inside) == inside
    assert _as_sets(state._by_session) == by_session
    turned: dict[str, set[Any]] = {}
    for signal, sessions_ in state._subscribers.items():
        for session in sessions_:
            turned.setdefault(session, set()).add(signal)
    assert _as_sets(state._subscriptions) == turned
    timed = {(call.until, key) for key, call in state.calls.items() if call.until is not None}
    assert timed <= set(state._lates), "a wait that never ends"


def _as_sets(index: dict[Any, Iterable[Any]]) -> dict[Any, set[Any]]:
    return {key: set(members) for key, members in index.items()}


# ---------------------------------------------------------------------------------------------------- what is shared


def check_resources(h: Harness) -> None:
    """Never over, the books add up, and nobody waits beside what they could have."""
    for core in h.spaces:
        for pool in core.live(slots.POOLS).values():
            assert 0 <= pool.used <= pool.max, f"{pool.used} of {pool.max}"
    is_whole = h.value("SELECT count(*) FROM ledger") == h.spaces.numbers.last.get("ledger", 0)  # nothing was tidied
    for budget, limit, spent, reserved in h.rows("SELECT id, limit_minor, spent_minor, reserved_minor FROM budgets"):
        sums = (
            "SELECT coalesce(sum(left_minor), 0), coalesce(sum(charged_minor), 0) FROM reservations WHERE budget = :b"
        )
        ((left, charged),) = h.rows(sums, b=budget)
        ledger = "SELECT change_minor, balance_minor FROM ledger WHERE budget = :b ORDER BY entry"
        rows = h.rows(ledger, b=budget)
        balance = limit
        assert left == reserved
        assert charged == spent if is_whole else charged <= spent
        assert all(0 <= after <= limit for _, after in rows)
        if is_whole:
            for change, after in rows:
                balance += change
                assert after == balance, "each row carries the balance after it"
            assert balance == limit - spent - reserved
    check_wants(h)


def check_wants(h: Harness) -> None:
    """One pass by age over all that wait for shared things: none of them could go on."""
    free: dict[Topic, int] = {}
    for pool, most in h.rows("SELECT id, max FROM pools"):
        used = sum(core.live(slots.POOLS)[pool].used for core in h.spaces if pool in core.live(slots.POOLS))
        free["slots", "", pool] = most - used
    free |= {("limit", "", limit): most - used for limit, most, used in h.rows("SELECT id, max, used FROM limits")}
    money = "SELECT id, limit_minor - spent_minor - reserved_minor FROM budgets"
    free |= {("budget", "", budget): left for budget, left in h.rows(money)}
    left = {limits.line(each.id): limits.left_ms(core, each) for core in h.spaces for each in _limits(core)}
    blocked: set[Topic] = set()  # pools
    asides: dict[Topic, dict[int, int]] = {line: {} for line in left}  # units by the number of the job
    for place, call, wants in sorted(_wants(h), key=lambda each: each[0]):
        number = place[2]
        if any(line[0] == "budget" and free[line] < units for line, units in wants.items()):
            continue
        mine = [line for line in wants if line[0] == "limit"]
        lacks = [
            line
            for line in mine
            if free[line] - sum(units for other, units in asides[line].items() if other != number) < wants[line]
        ]
        if lacks:
            mine = [line for line in mine if left[line] > max(left[other] for other in lacks)]
        else:
            short = {ln for ln, n in wants.items() if ln[0] == "slots" and (free[ln] < n or ln in blocked)}
            assert short, f"{call} could go on at {place}: it wants {wants} of {free}, behind {blocked} and {asides}"
            blocked |= {line for line in short if line in call.lines}
        stands = {line: stand for line, stands in call.at.items() for stand in stands if stand.number == number}
        if not stands:
            continue  # another worker, who is before this one in the line of the queue, stands for the job
        for line in mine:
            asides[line][number] = wants[line]
        assert {line for line, stand in stands.items() if stand.aside} == set(mine), f"{call} at {place}, {left}"


def _limits(core: Core) -> Iterable[limits.Limit]:
    return core.live(limits.LIMITS).values()


def _wants(h: Harness) -> Iterator[tuple[StandPlace, Call, dict[Topic, int]]]:
    """What each waiting call wants, and each oldest ready job of each set of needs for which a worker waits."""
    for call in [call for core in h.spaces for call in core.calls()]:
        request = call.request
        if call.away:
            continue
        if isinstance(request, wire.SlotsAcquire | wire.LimitsTake) and not h.is_over(request.run):
            (line,) = call.lines
            yield (call.rank, call.ticket, 0, call.key), call, {line: request.units}
        elif isinstance(request, wire.QueuesAdmit):
            for wanted in request.queues:
                for age, number, wants in h.heads(call.space, wanted):
                    lines = {("slots", "", name): units for name, units in wants.slots}
                    lines |= {("limit", "", name): units for name, units in wants.limits}
                    lines |= {("budget", "", name): minor for name, minor in wants.budgets}
                    yield (1, age, number, call.key), call, lines

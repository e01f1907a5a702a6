"""The rules without sockets: real schema, real memory, real batches, and a clock that goes when the test says so.

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
from runstated import dispatch
from runstated.batch import Acked, Ask, Away, Cancelled, Ended, Entry, Executor, Opened, Tick
from runstated.cache import Cache
from runstated.domain import leases, needs, sessions
from runstated.engine import Engine
from runstated.lines import Memory
from runstated.store import schema
from runstated.store.sqlite import Store
from runstated.store.tx import Access, Caller, Parked, Tx
from runstated.waits import Call, Topic
from tests.clock import ManualClock

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
        return [self.h.memory.beat(self.name, token, self.h.clock.lease_ms()) for token in tokens]

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
        if path == ":memory:":
            _new_database().backup(self.connection)
        schema.migrate(self.connection)
        self.clients: dict[str, Client] = {}
        self.cache = Cache()
        self._tickets = 0
        self.start()

    def start(self) -> None:
        """As after a start of the daemon: the memory is what the file says."""
        engine = Engine(Store(Path("unused"), "full"), self.clock)
        engine._load(self.connection)
        self.memory: Memory = engine.memory
        self.memory.due(self.clock.wall_ms())
        self.executor = Executor(self.memory, self.clock, INSTANCE)

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
        if access.key:
            self.connection.execute(
                "INSERT INTO keys (id, space, name, permissions, hash, created_ms)"
                " VALUES (:id, :space, '', '', '', 0) ON CONFLICT DO NOTHING",
                {"id": access.key, "space": access.space},
            )
        self.clients[name] = Client(self, name, access, process)
        return self.clients[name].hello(runs)

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    # ------------------------------------------------------------------ batches

    def run(self, *entries: Entry) -> None:
        """Runs the entries in as few transactions as the executor needs."""
        rest = list(entries)
        while rest:
            rest = rest[self.executor.run(self.connection, rest) :]
            self.deliver()

    def deliver(self) -> None:
        """What the engine does after a commit."""
        memory = self.memory
        for settled, deadline_ms, result in memory.settled:
            self.cache.put(settled, deadline_ms, wire.encode(result))
        for run in memory.forgotten_runs:
            self.cache.drop(run)
        for session, push in memory.pushes:
            if session in self.clients:
                self.clients[session].pushes.append(_over_the_wire(push, wire.decode_push))
        for keys, reply in memory.replies:
            for session, request_id in keys:
                if session in self.clients:
                    request = self.clients[session].open[request_id]
                    request.replies.append(_over_the_wire(reply, wire.decode_reply))
        for logged in (memory.settled, memory.forgotten_runs, memory.replies, memory.pushes, memory.keys):
            logged.clear()

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
        steady, wall = self.memory.next_steady(), self.memory.due_ms
        times = [] if steady is None else [steady - self.clock.lease_ms()]
        times += [] if wall is None else [wall - self.clock.wall_ms()]
        return min(times, default=None)

    # ------------------------------------------------------------------ looking

    def rows(self, sql: str, **params: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self.connection.execute(sql, params).fetchall()
        return found

    def value(self, sql: str, **params: Any) -> Any:
        return self.rows(sql, **params)[0][0]

    def events(self, run: str) -> list[str]:
        return [kind for (kind,) in self.rows("SELECT type FROM events WHERE run = :run ORDER BY event", run=run)]

    def tx(self, client: Client | None = None) -> Tx:
        """A Tx outside any batch, for rules that are no verbs."""
        tx = Tx(self.connection, self.memory, INSTANCE)
        tx.now_ms, tx.lease_ms = self.clock.wall_ms(), self.clock.lease_ms()
        if client is not None:
            tx.caller = Caller(client.name, client.access)
        return tx

    def held(self) -> dict[int, int]:
        """The leases that live, and when, on the lease clock, they lapse."""
        return {token: hold.expires for token, hold in self.memory.holds.items()}

    def opened(self, limit: str) -> int:
        """When, on the lease clock, the window of a limit (its id) opened."""
        return self.memory.windows[limit].lease_ms

    def counted(self) -> dict[tuple[str, str, str], int]:
        """The counts that are kept, without zeros."""
        rows = self.rows("SELECT run, queue, state, jobs FROM job_counts WHERE jobs <> 0")
        return {(run, queue, state): jobs for run, queue, state, jobs in rows}

    def recounted(self) -> dict[tuple[str, str, str], int]:
        rows = self.rows("SELECT run, queue, state, count(*) FROM jobs GROUP BY run, queue, state")
        return {(run, queue, state): jobs for run, queue, state, jobs in rows}

    def check(self) -> None:
        """What must be true between two batches, whatever happened."""
        self.check_state()
        self.check_nobody_was_forgotten()

    def check_state(self) -> None:
        """The same while a tick is due that has not been done."""
        check_memory(self.memory)
        assert self.counted() == self.recounted()
        self.check_leases()
        check_resources(self)
        self.check_nobody_waits_in_vain()

    def check_leases(self) -> None:
        rows = self.rows("SELECT token, session, length_ms, kind, run, subject FROM leases")
        assert {row[0]: (row[1], row[2], leases.topic(row[3], row[5], row[4])) for row in rows} == {
            hold.token: (hold.session, hold.length_ms, hold.subject) for hold in self.memory.holds.values()
        }
        units = {(hold.token, other) for hold in self.memory.holds.values() for other in hold.others}
        units |= {(hold.token, hold.subject) for hold in self.memory.holds.values() if hold.subject[0] == "slots"}
        assert units == set(leases.all_units(self.tx()))
        held = self.rows("SELECT run, key FROM once_keys WHERE state = 'held'")
        keys = [(run, subject) for _, _, _, kind, run, subject in rows if kind == "once"]
        assert len(keys) == len(set(keys)), "two hold one key"
        over = "SELECT run FROM runs WHERE state = 'active' AND (deadline_ms IS NULL OR deadline_ms > :now)"
        active = {run for (run,) in self.rows(over, now=self.clock.wall_ms())}
        assert {key for key in held if key[0] in active} == {key for key in keys if key[0] in active}
        running = self.rows("SELECT job, run, token FROM jobs WHERE state = 'running'")
        jobs = {(subject, run, token) for token, _, _, kind, run, subject in rows if kind == "job"}
        assert {job for job in running if job[1] in active} == {job for job in jobs if job[1] in active}
        for token, session in self.rows("SELECT token, session FROM leases"):
            assert self.value("SELECT count(*) FROM sessions WHERE session = :s", s=session), f"{token} of nobody"

    def check_nobody_was_forgotten(self) -> None:
        """Whoever waits and is there would have to wait if it asked again now: no wake-up was lost."""
        memory = self.memory
        for call in list(memory.calls.values()):
            if call.away:
                continue
            windows, due = dict(memory.windows), (memory.due_ms, memory.due_lease_ms)
            tx, mark = self.tx(), memory.mark()
            tx.caller = Caller(call.session, call.access, call.request_id, call.rank, call.ticket)
            tx.run("SAVEPOINT asked_again")
            try:
                answer = dispatch.answer(tx, call.request)
            finally:
                tx.run("ROLLBACK TO asked_again")
                tx.run("RELEASE asked_again")
                memory.rollback(mark)
                memory.windows = windows
                memory.due_ms, memory.due_lease_ms = due
                memory.suspects.clear()
            assert isinstance(answer, Parked), f"{call} waits beside {answer}"

    def check_nobody_waits_in_vain(self) -> None:
        """Nobody who is there waits beside an open key, a ready job, a finished job or in a run that is over."""
        for call in self.memory.calls.values():
            if not call.away:
                self._check_waits_for_something(call)

    def _check_waits_for_something(self, call: Call) -> None:
        request = call.request
        now = self.clock.wall_ms()
        over = "SELECT count(*) FROM runs WHERE run = :run AND (state <> 'active' OR deadline_ms <= :now)"
        if isinstance(request, wire.OnceAcquire | wire.OnceGet):
            state = self.rows("SELECT state FROM once_keys WHERE run = :r AND key = :k", r=request.run, k=request.key)
            assert state == [("held",)], f"{call} waits beside a key that is {state}"
            assert not self.value(over, run=request.run, now=now) or self.memory.due_ms is not None
        elif isinstance(request, wire.QueuesResult):
            (state,) = self.rows("SELECT state FROM jobs WHERE job = :job", job=request.job)[0]
            assert state in ("ready", "delayed", "running"), f"{call} waits for a job that is {state}"
        elif isinstance(request, wire.QueuesAdmit):
            for wanted in request.queues:
                free = [age for age, wants in self.heads(call.space, wanted) if not wants]
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

    def heads(self, space: str, wanted: wire.AdmitFrom) -> list[tuple[int, needs.Wants]]:
        """The oldest ready job of each set of needs that a worker of the run may take: its age and what it wants."""
        rows = self.rows(
            "SELECT min(jobs.age), jobs.needs, queues.needs FROM jobs JOIN runs ON runs.run = jobs.run"
            " JOIN queues ON queues.space = jobs.space AND queues.queue = jobs.queue"
            " WHERE jobs.space = :space AND jobs.queue = :queue AND jobs.state = 'ready' AND runs.state = 'active'"
            " AND runs.path LIKE :path AND (runs.deadline_ms IS NULL OR runs.deadline_ms > :now) GROUP BY jobs.needs",
            space=space,
            queue=wanted.queue,
            path=f"%/{wanted.run}/%" if wanted.below else f"%/{wanted.run}/",
            now=self.clock.wall_ms(),
        )
        return [(age, needs.get(self.tx(), number or of_queue)) for age, number, of_queue in rows]


def _over_the_wire(message: Any, decode: Any) -> Any:
    """As the client sees it; a message that cannot be sent and read back is a fault."""
    seen = decode(wire.encode(message))
    assert seen == message
    return seen


# ---------------------------------------------------------------------------------------------------- the memory


def snapshot(memory: Memory) -> dict[str, Any]:
    """All of the memory that a transaction may change, as plain values. Counters and ``due_ms`` may run ahead."""
    return {
        "sessions": dict(memory.sessions),
        "calls": {
            key: (id(call), call.away, call.lines, call.signals, dict(call.ages)) for key, call in memory.calls.items()
        },
        "holds": {token: (id(hold), hold.expires, list(hold.others)) for token, hold in memory.holds.items()},
        "left": list(memory.left),
        "replies": list(memory.replies),
        "pushes": list(memory.pushes),
        "settled": list(memory.settled),
        "forgotten_runs": list(memory.forgotten_runs),
        "lines": {line: list(places) for line, places in memory._lines.items()},
        **{
            name: {key: set(members) for key, members in getattr(memory, name).items()}
            for name in ("_aside", "_signals", "_subscribers", "_subscriptions", "_held", "_inside", "_by_session")
        },
    }


def check_memory(memory: Memory) -> None:
    """The indexes say the same as the calls and holds they are made from, and keep nothing else."""
    lines: dict[Any, list[Any]] = {}
    aside: dict[Any, set[Any]] = {}
    signals: dict[Any, set[Any]] = {}
    inside: dict[int, set[Any]] = {}
    by_session: dict[str, set[Any]] = {}
    for key, call in memory.calls.items():
        assert key == call.key
        by_session.setdefault(call.session, set()).add(key)
        assert call.session in memory.sessions, "a call of nobody"
        assert call.away == memory.sessions[call.session]
        for line in call.lines:
            lines.setdefault(line, []).append(call.place_in(line))
            if call.aside:
                aside.setdefault(line, set()).add(key)
        for signal in call.signals:
            signals.setdefault(signal, set()).add(key)
        for token in call.request.within:
            inside.setdefault(token, set()).add(key)
    assert memory._lines == {line: sorted(places) for line, places in lines.items()}
    assert _as_sets(memory._aside) == aside
    assert _as_sets(memory._signals) == signals
    assert _as_sets(memory._inside) == inside
    assert _as_sets(memory._by_session) == by_session
    held: dict[Any, set[int]] = {}
    for token, hold in memory.holds.items():
        for subject in (hold.subject, *hold.others):
            held.setdefault(subject, set()).add(token)
    assert _as_sets(memory._held) == held
    turned: dict[str, set[Any]] = {}
    for signal, sessions_ in memory._subscribers.items():
        for session in sessions_:
            turned.setdefault(session, set()).add(signal)
    assert _as_sets(memory._subscriptions) == turned
    queued = {token: at for at, token in sorted(memory._lapses, reverse=True)}
    assert all(queued[token] <= hold.expires for token, hold in memory.holds.items()), "a lease that never lapses"
    timed = {(call.until, key) for key, call in memory.calls.items() if call.until is not None}
    assert timed <= set(memory._lates), "a wait that never ends"


def _as_sets(index: dict[Any, Iterable[Any]]) -> dict[Any, set[Any]]:
    return {key: set(members) for key, members in index.items()}


# ---------------------------------------------------------------------------------------------------- what is shared


def check_resources(h: Harness) -> None:
    """Never over, the books add up, and nobody waits beside what they could have."""
    over = (
        "SELECT pools.id FROM pools JOIN units ON units.pool = pools.id GROUP BY pools.id, max HAVING sum(units) > max"
    )
    assert not h.rows(over)
    assert not h.rows("SELECT token FROM units WHERE token NOT IN (SELECT token FROM leases)"), "units of nobody"
    is_whole = h.value("SELECT count(*) FROM ledger") == h.memory.counters.get("ledger", 0)  # nothing was tidied
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
    check_lines(h)


def check_lines(h: Harness) -> None:
    """One pass by age over all that wait for shared things: none of them could go on."""
    free: dict[Topic, int] = {}
    for pool, most in h.rows("SELECT id, max FROM pools"):
        used = h.value("SELECT coalesce(sum(units), 0) FROM units WHERE pool = :pool", pool=pool)
        free["slots", "", pool] = most - used
    free |= {("limit", "", limit): most - used for limit, most, used in h.rows("SELECT id, max, used FROM limits")}
    money = "SELECT id, limit_minor - spent_minor - reserved_minor FROM budgets"
    free |= {("budget", "", budget): left for budget, left in h.rows(money)}
    blocked: set[Topic] = set()
    for place, call, wants in sorted(_wants(h), key=lambda each: each[0]):
        short = {line for line, units in wants.items() if line[0] == "budget" and free[line] < units}
        aside: set[Topic] = set()
        for kind in ("limit", "slots"):
            if not short:
                short = {ln for ln, n in wants.items() if ln[0] == kind and (free[ln] < n or ln in blocked)}
                aside = {line for line in wants if line[0] == "limit"} if short and kind == "slots" else set()
        assert short, f"{call} could go on at {place}: it wants {wants} of {free}, behind {blocked}"
        blocked |= {line for line in short | aside if line[0] != "budget" and line in call.lines}


def _wants(h: Harness) -> Iterator[tuple[tuple[int, int, Any], Call, dict[Topic, int]]]:
    """What each waiting call wants, and each oldest ready job of each set of needs for which a worker waits."""
    for call in h.memory.calls.values():
        request = call.request
        if call.away:
            continue
        if isinstance(request, wire.SlotsAcquire | wire.LimitsTake) and not h.is_over(request.run):
            (line,) = call.lines
            yield call.place, call, {line: request.units}
        elif isinstance(request, wire.QueuesAdmit):
            for wanted in request.queues:
                for age, wants in h.heads(call.space, wanted):
                    lines = {("slots", "", name): units for name, units in wants.slots}
                    lines |= {("limit", "", name): units for name, units in wants.limits}
                    lines |= {("budget", "", name): minor for name, minor in wants.budgets}
                    yield (1, age, call.key), call, lines

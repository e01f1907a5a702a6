"""The n-th statement fails, for n = 1, 2, 3, ... until none fails; the disk is full; the file cannot be opened."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.engine import engine
from runstated.engine import entries as batch
from runstated.engine.entries import Acked, Ask, Away, Cancelled, Ended, Entry, Lost, Reread, Tick
from tests.disks import disk, fill_up
from tests.engines import Life, life, play
from tests.harness import Client, Harness, Request, nothing

LEASE_MS = 30_000


# ------------------------------------------------------------------ a story with every verb


class Faulty(Harness):
    """Fails at one statement, and does what the engine and the clients do then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.fail_at = 0
        self.kind = ""
        self.failed = ""

    def arm(self, kind: str, fail_at: int) -> None:
        self.kind, self.fail_at = kind, fail_at
        self.connection.before = self.before
        self.connection.after = self.after

    def before(self, sql: str) -> None:
        self.seen += 1
        if self.kind != "after the commit":
            self.maybe_fail(sql)

    def after(self, sql: str) -> None:
        if self.kind == "after the commit" and sql == "COMMIT":
            self.maybe_fail(sql)

    def maybe_fail(self, sql: str) -> None:
        if self.failed or self.seen < self.fail_at:
            return
        self.failed = sql
        if self.kind == "transaction gone" and self.connection.in_transaction:
            sqlite3.Connection.execute(self.connection, "ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    def run(self, *entries: Entry) -> None:
        try:
            super().run(*entries)
        except Lost as lost:
            assert not self.memory.replies and not self.memory.pushes, "nothing may be said of a batch that is lost"
            if self.kind != "after the commit":
                is_due = any(isinstance(entry, Tick) for entry in entries)  # a run that is over was not ended yet
                self.check_state() if is_due else self.check()
            again = [
                Ask(
                    entry.session,
                    entry.access,
                    entry.request_id,
                    msgspec.structs.replace(entry.request, again=True),
                    entry.ticket,
                    entry.arrived,
                )
                if isinstance(entry, Ask)
                else entry
                for entry in entries
            ]
            doubt = [Reread()] if lost.index is None else []
            super().run(*doubt, *again)


def answered(request: Request) -> Any:
    """The reply, after one more attempt if it was told to try again."""
    if isinstance(request.reply, wire.Error) and request.reply.retryable:
        assert request.reply.code == "UNAVAILABLE"
        return request.repeat().reply
    return request.reply


def ask(client: Client, request: wire.Request[Any]) -> Any:
    reply = answered(client.submit(request))
    assert reply is not None
    return reply


def start(client: Client, request: wire.Request[Any]) -> Request:
    """A request that may wait."""
    asked = client.submit(request)
    return asked.repeat() if isinstance(asked.reply, wire.Error) and asked.reply.retryable else asked


def story(h: Faulty) -> list[Any]:
    """Every verb and every entry; what everybody was told, without tokens."""
    a, b, c = h.session("a"), h.session("b"), h.session("c")
    said: list[Any] = []
    run = ask(a, wire.RunsJoin(name="job")).run
    made = ask(a, wire.KeysCreate(space="other", permissions=("work",)))  # not told: its secret is random
    ask(a, wire.KeysRevoke(key=made.id))
    ask(a, wire.KeysList())
    below = ask(a, wire.RunsChild(parent=run, name="below", deadline_ms=h.clock.wall_ms() + 90_000)).run
    # once: a result for all, a failure, a death, a lapse, a cancel
    acquire = wire.OnceAcquire(run=run, key="k")
    token = ask(a, acquire).token
    waits = [start(b, acquire), start(c, acquire)]
    said.append(ask(a, wire.OnceComplete(run=run, key="k", token=token, result="1")))
    said += [answered(request) for request in waits]
    failing = wire.OnceAcquire(run=run, key="fails")
    token = ask(a, failing).token
    ask(c, wire.Renew(token=token, lease_ms=LEASE_MS))
    said.append(ask(c, wire.OnceGet(run=run, key="fails", wait_ms=0)))
    waits = [start(b, failing), start(c, failing)]
    said.append(ask(a, wire.OnceFail(run=run, key="fails", token=token, error="E")))
    b.die()
    said.append(answered(waits[1]).attempt)
    b = h.session("b2")
    lapsing = wire.OnceAcquire(run=below, key="lapses")
    ask(a, lapsing)
    waits = [start(b, lapsing)]
    h.pass_ms(LEASE_MS)
    waits[0] = waits[0] if waits[0].reply is None or not isinstance(waits[0].reply, wire.Error) else waits[0].repeat()
    said.append(waits[0].reply.attempt)
    waits[0].cancel()
    # queues: all outcomes
    said.append(ask(a, wire.QueuesDeclare(queue="q", attempts=2)))
    jobs = [ask(a, wire.QueuesSend(run=run, queue="q", key=str(n), input="1")).job for n in range(4)]
    jobs.append(ask(a, wire.QueuesSend(run=below, queue="q", key="below", input="1", attempts=2)).job)
    results = [start(a, wire.QueuesResult(job=job)) for job in jobs]
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=4),))
    one, two, three, four = ask(c, admit).jobs
    idle = start(b, wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),)))
    said.append([grant.attempt for grant in idle.reply.jobs])
    said.append(ask(c, wire.QueuesComplete(job=one.job, token=one.token, result='"r"')))
    said.append(ask(c, wire.QueuesFail(job=two.job, token=two.token, error="E: 1", retry=True)).state)
    said.append(ask(c, wire.QueuesFail(job=three.job, token=three.token, error="E: 2", retry=False)).state)
    said.append(ask(c, wire.Release(token=four.token)))
    h.pass_ms(2_000)
    idle = start(b, admit)
    said.append(sorted((grant.job, grant.attempt) for grant in idle.reply.jobs))
    h.run(Acked("b2", (idle.id,)), Away("c", True), Away("c", False), Cancelled("c", 999))
    b.die()
    said.append([result.reply and result.reply.state for result in results])
    said.append(sorted((row.key, row.attempt) for row in ask(c, admit).jobs))
    h.run(Ended("c", "released"))
    said += shared_things(h, a, run)
    said.append(ask(a, wire.StatusGet()).queues)
    h.pass_ms(90_000)
    said.append(ask(a, wire.RunsGet(run=below)).state)
    said.append(ask(a, wire.RunsEnd(run=run, state="finished")).state)
    h.pass_ms(11 * 60_000)
    return said


def shared_things(h: Faulty, a: Client, run: str) -> list[Any]:
    """Limits, slots, budgets, needs, groups, timers, barriers, events."""
    said: list[Any] = []
    d, e = h.session("d"), h.session("e")
    h.pass_ms(60_000 - h.clock.wall_ms() % 60_000)
    said.append(ask(a, wire.LimitsDeclare(limit="api", max=2, per_seconds=60)))
    said.append(ask(a, wire.SlotsDeclare(pool="gpu", max=2)))
    said.append(ask(a, wire.BudgetsDeclare(budget="llm", limit_minor=100)))
    ask(d, wire.LimitsTake(run=run, limit="api", units=2))
    token = ask(d, wire.SlotsAcquire(run=run, pool="gpu", units=2, lease_ms=wire.LEASE_MS_MAX)).token
    waits = [
        start(e, wire.LimitsTake(run=run, limit="api")),
        start(e, wire.SlotsAcquire(run=run, pool="gpu", lease_ms=wire.LEASE_MS_MAX)),
        start(e, wire.TimersSleep(run=run, name="t", after_ms=59_000)),
        start(e, wire.BarriersArrive(run=run, name="b", count=2, worker="e")),
    ]
    said.append([ask(a, wire.LimitsGet(limit="api")).waiting, ask(a, wire.SlotsGet(pool="gpu")).holders])
    said.append(ask(a, wire.BarriersDeclare(run=run, name="b", count=2)))
    ask(d, wire.BarriersArrive(run=run, name="b", count=2, worker="d"))
    said.append(ask(a, wire.BarriersGet(run=run, name="b")))
    ask(d, wire.Release(token=token))
    # A job with three needs, blocked by a limit; served by the next window.
    needs = wire.Needs(
        slots=(wire.UnitsNeeded(name="gpu"),),
        limits=(wire.UnitsNeeded(name="api"),),
        budgets=(wire.MoneyNeeded(name="llm", reserve_minor=40),),
    )
    ask(a, wire.QueuesDeclare(queue="shared", attempts=2, needs=needs))
    group = ask(a, wire.GroupsSubmit(run=run, queue="shared", members=(wire.NewJob(key="1", input="1"),)))
    ended = start(a, wire.GroupsEnded(run=group.run))
    heard = start(a, wire.EventsWait(run=run, after=ask(a, wire.EventsRead(run=run, limit=500)).cursor))
    wanted = wire.AdmitFrom(run=run, queue="shared", lease_ms=wire.LEASE_MS_MAX)
    admit = start(d, wire.QueuesAdmit(queues=(wanted,)))
    h.pass_ms(60_000)
    (grant,) = answered(admit).jobs
    costs = {grant.reservations[0]: 25}
    said.append(ask(d, wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs=costs)))
    said.append([type(answered(request)).__name__ for request in (*waits, ended, heard)])
    said.append(ask(a, wire.TimersAck(run=run, name="t")))
    # Money: settled in parts, over what is left, released, left behind by the dead.
    held = [ask(d, wire.BudgetsReserve(run=run, budget="llm", amount_minor=n)) for n in (10, 20, 30)]
    settle = wire.BudgetsSettle(reservation=held[0].reservation, cost_minor=5, work_key="1", keep_rest=True)
    said.append([ask(d, settle), ask(d, settle)])
    said.append(ask(d, wire.BudgetsRelease(reservation=held[1].reservation)))
    d.die()
    shown = {"reservation": held[2].reservation, "secret": held[2].secret}
    said.append(ask(a, wire.BudgetsSettle(**shown, cost_minor=500, work_key="1")))
    said.append(ask(a, wire.BudgetsGet(budget="llm")))
    said.append([(view.worker, view.holding) for view in ask(a, wire.RunsStatus(run=run)).workers])
    return said


def left(h: Harness) -> dict[str, list[tuple[Any, ...]]]:
    """What is in the file, without numbers that a failure may skip."""
    columns = {
        "runs": "run, state, tidied",
        "once_keys": "key, state, failures, takeovers, result",
        "jobs": "key, state, attempt, result, reason",
        "leases": "kind, subject, session",
        "sessions": "session",
        "events": "type, run",
        "job_counts": "queue, state, jobs",
        "limits": "name, used",
        "units": "pool, units",
        "budgets": "name, spent_minor, reserved_minor",
        "reservations": "state, left_minor, charged_minor",
        "ledger": "kind, change_minor, balance_minor",
        "timers": "name, fired",
        "barriers": "name, released",
    }
    return {table: sorted(h.rows(f"SELECT {names} FROM {table}")) for table, names in columns.items()}


@dataclass(frozen=True)
class Undisturbed:
    """The story without a failure."""

    said: list[Any]
    state: dict[str, list[tuple[Any, ...]]]
    statements: int
    some: tuple[int, ...]
    commits: tuple[int, ...]


def some(places: dict[str, list[int]]) -> list[int]:
    """Where to fail: each kind of statement in the first and the last transaction that has it. For all, take all."""
    return sorted({at for known in places.values() for at in (known[0], known[-1])})


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    h = Faulty()
    h.arm("none", 10**9)
    commits: list[int] = []
    places: dict[str, list[int]] = {}  # of each kind of statement, one in each transaction

    def after(sql: str) -> None:
        known = places.setdefault(sql, [])
        if not known or known[-1] <= max(commits, default=0):
            known.append(h.seen)
        if sql == "COMMIT":
            commits.append(h.seen)

    h.connection.after = after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "BATCH_VERBS_MS", 60_000)  # as in the stories with a failure, on a slow machine, too
        said = story(h)
    statements = h.seen
    h.connection.before = h.connection.after = nothing
    state = left(h)
    h.close()
    return Undisturbed(said, state, statements, tuple(some(places)), tuple(commits))


def check_one_failure(undisturbed: Undisturbed, kind: str, at: int) -> bool:
    """Plays the story with one failure; False when it was over before."""
    h = Faulty()
    h.arm(kind, at)
    try:
        said, state = story(h), None
        h.connection.before = h.connection.after = nothing
        state = left(h)
        expected = dict(undisturbed.state)
        if kind == "transaction alive":
            # Who was handed a key in the statement that failed has to ask again, and another may have got it first.
            del state["events"], expected["events"]
        assert without_ids(said) == without_ids(undisturbed.said)
        assert without_ids(state) == without_ids(expected)
        h.check()
    except BaseException:
        print(f"{kind}: statement {at} failed: {h.failed}")
        raise
    finally:
        h.close()
    return bool(h.failed)


def test_whatever_statement_fails_nothing_is_lost_or_done_twice(
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch, "BATCH_VERBS_MS", 60_000)
    caplog.set_level(logging.CRITICAL)
    kinds = itertools.cycle(("transaction alive", "transaction gone"))
    for at, kind in zip(undisturbed.some, kinds, strict=False):
        assert check_one_failure(undisturbed, kind, at), at
    assert not check_one_failure(undisturbed, "transaction gone", undisturbed.statements + 1)


def test_whatever_commit_is_told_to_have_failed_nothing_is_lost_or_done_twice(
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch, "BATCH_VERBS_MS", 60_000)
    caplog.set_level(logging.CRITICAL)
    for at in undisturbed.commits:
        assert check_one_failure(undisturbed, "after the commit", at), at


def without_ids(value: Any) -> Any:
    """Ids differ when a number was skipped: compared are their order and what they are of."""
    names: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return plain(msgspec.to_builtins(value))
        if isinstance(value, dict):
            return {plain(key): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, str) and value.endswith("-test"):
            return names.setdefault(value, f"{value[0]}#{len(names)}")
        return value

    return plain(value)


def test_the_story_knows_every_verb() -> None:
    from runstated.domain import nouns as dispatch

    text = Path(__file__).read_text()
    missing = [kind.__name__ for kind in dispatch.VERBS if f"wire.{kind.__name__}(" not in text]
    assert not missing


# ------------------------------------------------------------------ the engine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETRY_S_MIN", 0.001)
    monkeypatch.setattr(engine, "RETRY_S_MAX", 0.01)


class Fault:
    """Makes statements of a store's writer fail."""

    def __init__(self, matches: Callable[[str], bool], times: int, *, rolls_back: bool = False) -> None:
        self.matches, self.times, self.rolls_back = matches, times, rolls_back
        self.failed = 0

    def __call__(self, sql: str) -> None:
        if self.matches(sql) and self.failed < self.times:
            self.failed += 1
            raise sqlite3.OperationalError("disk I/O error")


@pytest.fixture
def faulty_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Every connection of the store asks these before and after each statement."""
    import aiosqlite

    from tests.harness import Connection

    connect = aiosqlite.connect
    monkeypatch.setattr(aiosqlite, "connect", lambda *args, **more: connect(*args, factory=Connection, **more))
    hooks: dict[str, Any] = {"before": nothing, "after": nothing}
    monkeypatch.setattr(Connection, "before", lambda self, sql: hooks["before"](sql))
    monkeypatch.setattr(Connection, "after", lambda self, sql: hooks["after"](sql))
    yield hooks
    hooks.update(before=nothing, after=nothing)


async def until(true: Callable[[], Any]) -> None:
    # The engine tells nobody when it has recovered.
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_fails_is_told_as_retryable_and_a_retry_gets_the_same(
    tmp_path: Path, quick: None, faulty_connections: dict[str, Any], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:
            for name in "abc":
                await life_.session(name)
            run = await life_.run_id()
            first = await life_.ask("a", wire.OnceAcquire(run=run, key="first"))
            waits = life_.submit("b", wire.OnceAcquire(run=run, key="first"))
            await life_.engine.settle()
            faulty_connections[when] = fault = Fault(lambda sql: sql == "COMMIT", 1)
            request = wire.OnceAcquire(run=run, key="k")
            key = life_.submit("a", request)
            done = life_.submit("a", wire.OnceComplete(run=run, key="first", token=first.token, result="1"))
            for refused in (key, done):
                reply = await life_.answer(refused)
                assert (reply.code, reply.retryable) == ("UNAVAILABLE", True)
            assert fault.failed == 1
            life_.die("c")
            await until(lambda: life_.engine.trouble is None)
            await life_.engine.settle()
            granted = await life_.again(key, msgspec.structs.replace(request, again=True))
            assert isinstance(granted, wire.OnceGranted)
            assert await life_.again(key, msgspec.structs.replace(request, again=True)) == granted
            if when == "before":
                complete = wire.OnceComplete(run=run, key="first", token=first.token, result="1", again=True)
                await life_.ask("a", complete)
            assert await life_.answer(waits) == wire.OnceDone(result="1")
            await life_.engine.settle()
            leases = await life_.engine.store.read(lambda c: c.execute("SELECT token FROM leases").fetchall())
            assert [(token,) for token in life_.engine.memory.holds] == leases == [(granted.token,)]
            assert list(life_.engine.memory.sessions) == ["a", "b"]

    play(run())
    assert [record.message for record in caplog.records if record.name == "runstated.engine.engine"] == [
        "writes fail: disk I/O error",
        "writes work again",
    ]


def test_a_statement_that_ends_the_transaction_refuses_its_request_and_no_other(
    tmp_path: Path, quick: None, faulty_connections: dict[str, Any]
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:
            await life_.session("a")
            run = await life_.run_id()
            hit: list[sqlite3.Connection] = []

            def verb_fails(connection: sqlite3.Connection) -> None:
                hit.append(connection)

            await life_.engine.store.write(verb_fails)

            def before(sql: str) -> None:
                if sql.startswith("INSERT INTO once_keys") and len(life_.engine.memory.holds) == 3 and len(hit) == 1:
                    hit.append(hit[0])
                    sqlite3.Connection.execute(hit[0], "ROLLBACK")
                    raise sqlite3.OperationalError("disk I/O error")

            faulty_connections["before"] = before
            keys = [life_.submit("a", wire.OnceAcquire(run=run, key=str(n))) for n in range(6)]
            replies = [await life_.answer(key) for key in keys]
            assert [type(reply).__name__ for reply in replies] == ["OnceGranted"] * 2 + ["Error"] + ["OnceGranted"] * 3
            assert replies[2].retryable
            await until(lambda: life_.engine.trouble is None)
            assert len(life_.engine.memory.holds) == 5

    play(run())


def test_what_the_daemon_itself_has_to_do_is_kept_in_its_order_until_a_batch_commits(
    tmp_path: Path, quick: None, faulty_connections: dict[str, Any]
) -> None:
    async def tell() -> None:
        async with life(tmp_path / "db") as life_:
            for name in "abc":
                await life_.session(name)
            run = await life_.run_id()
            for name in "ab":
                await life_.ask(name, wire.OnceAcquire(run=run, key=name))
            waits = [life_.submit("c", wire.OnceAcquire(run=run, key=key)) for key in "ab"]
            await life_.engine.settle()
            fault = faulty_connections["before"] = Fault(lambda sql: sql == "COMMIT", 4)
            life_.die("a")
            life_.engine.submit(Away("c", True))
            await until(lambda: fault.failed >= 2)
            life_.engine.submit(Away("c", False))
            await until(lambda: life_.engine.trouble is None)
            await life_.engine.settle()
            assert fault.failed == 4
            assert isinstance(await life_.answer(waits[0]), wire.OnceGranted)
            assert life_.engine.memory.sessions == {"b": False, "c": False}
            await life_.pass_ms(LEASE_MS - 1)
            life_.engine.beat("c", [hold.token for hold in life_.engine.memory.holds.values() if hold.session == "c"])
            fault = faulty_connections["before"] = Fault(lambda sql: sql == "COMMIT", 3)
            await life_.pass_ms(1)
            await until(lambda: fault.failed == 3 and life_.engine.trouble is None)
            await life_.engine.settle()
            assert isinstance(await life_.answer(waits[1]), wire.OnceGranted)

    play(tell())


def test_a_deadline_that_came_while_writes_failed_is_kept(
    tmp_path: Path, quick: None, faulty_connections: dict[str, Any]
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:
            await life_.session("a")
            deadline = life_.clock.wall_ms() + 1_000
            await life_.ask("a", wire.RunsJoin(name="short", deadline_ms=deadline))
            fault = faulty_connections["before"] = Fault(lambda sql: sql == "COMMIT", 1)
            await life_.pass_ms(1_000)
            await until(lambda: fault.failed == 1 and life_.engine.trouble is None)
            await life_.engine.settle()
            assert [push.state for push in life_.told("a", wire.RunEnded)] == ["expired"]

    play(run())


def test_leases_stand_while_writes_fail(tmp_path: Path, quick: None, faulty_connections: dict[str, Any]) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:
            await life_.session("a")
            run = await life_.run_id()
            token = (await life_.ask("a", wire.OnceAcquire(run=run, key="k"))).token
            faulty_connections["before"] = Fault(lambda sql: sql == "COMMIT", 10**9)
            assert (await life_.ask("a", wire.RunsJoin(name="x"))).code == "UNAVAILABLE"
            life_.clock.pass_ms(10 * LEASE_MS)
            faulty_connections["before"] = nothing
            await until(lambda: life_.engine.trouble is None)
            await life_.engine.settle()
            assert token in life_.engine.memory.holds
            await life_.pass_ms(LEASE_MS)
            assert token not in life_.engine.memory.holds

    play(run())


# ------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "4m") as directory:
        yield directory


def test_a_full_disk_refuses_writes_and_the_daemon_recovers_by_itself(
    small_disk: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(small_disk / "db") as life_:
            ballast = small_disk / "ballast"
            ballast.write_bytes(b"x" * 1_000_000)
            more = small_disk / "more"
            await full_disk(life_, lambda: fill_up(more), lambda: make_room(ballast, more))

    play(run())
    check_log(caplog)


def test_a_database_that_may_not_grow_refuses_writes_and_recovers_by_itself(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:

            async def set_limit(pages: str) -> None:
                await life_.engine.store.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())

            (pages,) = await life_.engine.store.write(lambda c: c.execute("PRAGMA page_count").fetchone())
            await set_limit(str(pages + 200))
            await full_disk(life_, lambda: None, lambda: set_limit("1000000"))

    play(run())
    check_log(caplog)


async def full_disk(life_: Life, fill: Callable[[], object], make_room: Callable[[], Awaitable[None] | None]) -> None:
    await life_.session("a")
    run = await life_.run_id()
    token = (await life_.ask("a", wire.OnceAcquire(run=run, key="k"))).token
    sent = []
    for number in itertools.count():
        send = wire.QueuesSend(run=run, queue="q", key=str(number), input='"' + "x" * 60_000 + '"', attempts=3)
        reply = await life_.ask("a", send)
        if isinstance(reply, wire.Error):
            break
        sent.append(reply.job)
    assert (reply.code, reply.retryable) == ("UNAVAILABLE", True)
    assert "cannot write to its database" in reply.message
    fill()
    life_.clock.pass_ms(10 * LEASE_MS)
    for _ in range(3):
        assert (await life_.ask("a", send)).code == "UNAVAILABLE"
    seen = await life_.ask("a", wire.StatusGet())
    assert seen.queues[0].counts == {"ready": len(sent)}
    room = make_room()
    if room is not None:
        await room
    await until(lambda: life_.engine.trouble is None)
    assert token in life_.engine.memory.holds
    assert (await life_.ask("a", send)).state == "ready"
    rows = await life_.engine.store.read(lambda c: c.execute("SELECT job FROM jobs ORDER BY age").fetchall())
    assert [job for (job,) in rows[:-1]] == sent


def make_room(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    said = [record.message for record in caplog.records if record.name == "runstated.engine.engine"]
    assert len([line for line in said if line.startswith("writes fail")]) <= 3, "a storm of one error"
    assert said[-1] == "writes work again"


def test_a_file_that_cannot_be_opened_again_is_tried_until_it_can(
    tmp_path: Path, quick: None, faulty_connections: dict[str, Any]
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as life_:
            await life_.session("a")
            run = await life_.run_id()
            faulty_connections["before"] = fault = Fault(lambda sql: sql == "COMMIT" or "busy_timeout" in sql, 5)
            assert (await life_.ask("a", wire.OnceAcquire(run=run, key="k"))).code == "UNAVAILABLE"
            await until(lambda: life_.engine.trouble is None)
            assert fault.failed == 5
            assert isinstance(await life_.ask("a", wire.OnceAcquire(run=run, key="k")), wire.OnceGranted)

    play(run())

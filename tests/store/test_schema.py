from __future__ import annotations

import ast
import gzip
import logging
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlglot

from runstate import wire
from runstated.domain import leases, replies, tidy
from runstated.domain.access import Access
from runstated.store import schema
from tests.faults.test_sqlite_faults import Faulty, story
from tests.harness import Client, Connection, Harness

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE = Path(schema.__file__).parents[1]
VERBS = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ")


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    yield connection
    connection.close()


def tables(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]


# ------------------------------------------------------------------ migrations


def test_a_new_file_gets_the_id_the_version_and_all_tables(connection: sqlite3.Connection) -> None:
    schema.migrate(connection)
    assert connection.execute("PRAGMA application_id").fetchone() == (int.from_bytes(b"RUNS", "big"),)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    assert tables(connection) == [
        "arrivals", "barriers", "budgets", "counters", "events", "job_counts", "jobs", "keys", "leases", "ledger",
        "limits", "needs", "once_keys", "pools", "queues", "replies", "reservations", "runs", "sessions", "timers",
        "units",
    ]  # fmt: skip


def test_a_second_migration_changes_nothing(connection: sqlite3.Connection) -> None:
    schema.migrate(connection)
    before = connection.execute("PRAGMA schema_version").fetchone()
    schema.migrate(connection)
    assert connection.execute("PRAGMA schema_version").fetchone() == before


def test_a_newer_file_is_refused_with_both_versions(connection: sqlite3.Connection) -> None:
    schema.migrate(connection)
    connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    with pytest.raises(schema.NewerFile, match=rf"version {schema.VERSION + 1}, this runstated knows {schema.VERSION}"):
        schema.migrate(connection)


@pytest.mark.parametrize("setup", ["CREATE TABLE users (name TEXT)", "PRAGMA application_id = 1"])
def test_the_file_of_another_program_is_refused_and_not_changed(connection: sqlite3.Connection, setup: str) -> None:
    connection.execute(setup)
    before = (tables(connection), connection.execute("PRAGMA application_id").fetchone())
    with pytest.raises(schema.ForeignFile):
        schema.migrate(connection)
    assert (tables(connection), connection.execute("PRAGMA application_id").fetchone()) == before


def test_steps_are_taken_one_by_one_and_a_failing_one_leaves_no_half(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema.migrate(connection)
    steps = (*schema.MIGRATIONS, ("CREATE TABLE more (x BIGINT);",), ("CREATE TABLE last (x BIGINT); BROKEN;",))
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    monkeypatch.setattr(schema, "VERSION", len(steps))
    with pytest.raises(sqlite3.OperationalError):
        schema.migrate(connection)
    connection.execute("ROLLBACK")
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION - 1,)
    assert "more" in tables(connection)
    assert "last" not in tables(connection)


def test_a_crash_before_the_first_table_leaves_a_file_that_can_be_migrated(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    schema.migrate(connection)
    assert tables(connection)


# ------------------------------------------------------------------ an old file


@pytest.mark.parametrize("version", [1, 2, 7, 8])
def test_a_database_of_an_older_version_loads_and_says_what_it_said(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((GOLDEN / f"v{version}.db.gz").read_bytes()))
    h = Harness(path)
    try:
        h.check()
        a = h.session("unix/7:default//a")  # as the session "a" is called since version 8
        seen = a.ask(wire.StatusGet())
        assert sorted((run.name, run.state) for run in seen.runs) == [("below", "active"), ("job", "active")]
        assert [holding.name for holding in seen.workers[0].holdings] == ["held", "running"]
        counts = {"succeeded": 1, "failed": 1, "delayed": 1, "running": 1, "ready": 1}
        assert seen.queues == (wire.QueueView(queue="q", attempts=3, counts=counts),)
        run = a.ask(wire.RunsJoin(name="job")).run
        assert a.ask(wire.OnceAcquire(run=run, key="done")) == wire.OnceDone(result='{"é": 1}')
        assert a.ask(wire.OnceAcquire(run=run, key="failed")) == wire.OnceFailed(attempts=1, error="E: no")
        assert a.ask(wire.OnceAcquire(run=run, key="open")).attempt == 2
        (held,) = h.rows("SELECT token FROM leases WHERE subject = 'held'")[0]
        assert a.beat(held) == [True]
        job = a.ask(wire.QueuesSend(run=run, queue="q", key="succeeded", input="1"))
        assert (job.state, job.result) == ("succeeded", '"out"')
        h.pass_ms(2_000)
        again = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=9),)))
        assert sorted((grant.key, grant.attempt) for grant in again.jobs) == [("delayed", 2), ("ready", 1)]
        use_what_is_new(h.session("new"), run)
        tokens = [token for (token,) in h.rows("SELECT token FROM leases")]
        assert len(tokens) == len(set(tokens))
        h.check()
    finally:
        h.close()


def use_what_is_new(a: Client, run: str) -> None:
    """The nouns of version 2, in a file that was made without them: also for a queue and jobs from before."""
    a.ask(wire.SlotsDeclare(pool="gpu", max=1))
    needs = wire.Needs(slots=(wire.UnitsNeeded(name="gpu"),), budgets=(wire.MoneyNeeded(name="llm", reserve_minor=5),))
    a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=10))
    a.ask(wire.QueuesDeclare(queue="q", needs=needs))
    members = (wire.NewJob(key="new", input="1"),)
    group = a.ask(wire.GroupsSubmit(run=run, queue="q", members=members))
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))
    (grant,) = a.ask(admit).jobs
    assert (grant.run, len(grant.reservations)) == (group.run, 1)
    waits = a.waits(wire.SlotsAcquire(run=run, pool="gpu"))
    a.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs={grant.reservations[0]: 3}))
    assert isinstance(waits.reply, wire.SlotsGranted)
    assert [view.job for view in a.ask(wire.GroupsEnded(run=group.run)).jobs] == [grant.job]
    assert a.ask(wire.BudgetsGet(budget="llm")).spent_minor == 3
    assert a.ask(wire.LimitsTake(run=run, limit="api", max=1, per_seconds=60)) == wire.LimitTaken()
    assert a.ask(wire.TimersSleep(run=run, name="t", after_ms=0)).fired
    assert a.ask(wire.BarriersArrive(run=run, name="b", count=1, worker="w")).released
    assert "task.submitted" in [event.type for event in a.ask(wire.EventsRead(run=run)).events]


@pytest.mark.parametrize("version", [1, 2, 7, 8])
def test_a_database_of_an_older_version_is_migrated_in_one_go(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress((GOLDEN / f"v{version}.db.gz").read_bytes()))
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    jobs = "SELECT job, state, attempt, age FROM jobs ORDER BY job"
    before = connection.execute(jobs).fetchall()
    schema.migrate(connection)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    assert connection.execute(jobs).fetchall() == before
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    schema.migrate(fresh)
    for name in tables(fresh):
        shape = f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{name}') ORDER BY cid"
        assert connection.execute(shape).fetchall() == fresh.execute(shape).fetchall(), name
    connection.close()
    fresh.close()


def test_sessions_of_before_version_8_keep_what_they_hold_under_their_new_names(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:7])
        before.setattr(schema, "VERSION", 7)
        schema.migrate(connection)
    far = f"http-{'c' * 24}"  # a caller over HTTP, and what it was called with a label
    opened = [
        ("near", "a:b/", "", "unix"),
        ("far", "s", "k1-test", "tcp"),
        (f"{far}.{'d' * 24}", "s", "k1-test", "http"),
    ]
    for token, (session, space, key, transport) in enumerate(opened):
        connection.execute(
            "INSERT INTO sessions (session, space, worker, process, pid, command, opened_ms, key, transport)"
            " VALUES (?, ?, '', '', 1, '', 0, ?, ?)",
            (session, space, key, transport),
        )
        connection.execute("INSERT INTO leases VALUES (?, 'budget', 'm', 'r', ?, 1, 1, 1)", (token, session))
        connection.execute("INSERT INTO reservations VALUES (?, 'm', 'r', ?, 'active', 1, 0, 1)", (f"b{token}", token))
        connection.execute("INSERT INTO replies VALUES (?, 1, '', '', NULL)", (session,))
        connection.execute(
            "INSERT INTO runs (run, space, path, state, owner, created_ms) VALUES (?, '', ?, 'active', ?, 0)",
            (f"r{token}", f"/r{token}/", session),
        )
    connection.execute("INSERT INTO replies VALUES (?, 1, '', '', 5)", (far,))
    connection.execute("INSERT INTO replies VALUES ('ended', 1, '', '', 5)")
    schema.migrate(connection)
    names = [Access(space, key=key).session_name(over, name.rpartition(".")[2]) for name, space, key, over in opened]
    for column, table, key in (
        ("session", "leases", "token"), ("session", "reservations", "token"), ("owner", "runs", "run"),
        ("session", "sessions", "rowid"),
    ):  # fmt: skip
        assert [name for (name,) in connection.execute(f"SELECT {column} FROM {table} ORDER BY {key}")] == names, table
    kept = {name for (name,) in connection.execute("SELECT session FROM replies")}
    assert kept == {*names, leases.caller_of(names[2]), "ended"}


# ------------------------------------------------------------------ portable SQL


@pytest.fixture(scope="module")
def executed() -> set[str]:
    """Every statement that a story with every verb executes, and some rare ones."""
    logging.disable(logging.CRITICAL)
    Connection.statements.clear()
    h = Faulty()
    story(h)
    a, b = h.session("x"), h.session("y", access=Access(key="k1"))
    run = a.ask(wire.RunsJoin(name="rare")).run
    a.ask(wire.RunsJoin(name="rare", deadline_ms=4_000_000_000_000))
    asked = a.submit(wire.RunsChild(parent=run))
    asked.repeat()
    token = b.ask(wire.OnceAcquire(run=run, key="k")).token
    for _ in range(2):
        b.ask(wire.OnceComplete(run=run, key="k", token=token, result="1"))
    b.ask(wire.QueuesComplete(job="j999-test", token=token, result="1"))
    token = b.ask(wire.OnceAcquire(run=run, key="renewed")).token
    b.ask(wire.Renew(token=token, lease_ms=60_000))
    b.ask(wire.OnceGet(run=run, key="k"))
    b.ask(wire.TimersSleep(run=run, name="t", after_ms=0))
    b.ask(wire.TimersAck(run=run, name="t"))
    b.ask(wire.BarriersDeclare(run=run, name="b", count=2))
    b.ask(wire.BarriersGet(run=run, name="b"))
    b.ask(wire.BudgetsGet(budget="llm", reservations=9))
    b.ask(wire.RunsJoin(name="rare", deadline_ms=wire.LATEST_MS))
    b.ask(wire.RunsChild(parent=run, keep=True))
    held = b.ask(wire.SlotsAcquire(run=run, pool="circle", max=1)).token
    group = b.ask(wire.GroupsSubmit(run=run, queue="circle", attempts=1, members=(wire.NewJob(key="1", input="1"),)))
    b.ask(wire.QueuesDeclare(queue="circle", needs=wire.Needs(slots=(wire.UnitsNeeded(name="circle"),))))
    b.refused("DEADLOCK", wire.GroupsEnded(run=group.run, within=(held,)))
    b.ask(wire.StatusGet())
    b.ask(wire.RunsStatus(run=run))
    money = wire.BudgetsReserve(run=run, budget="assumed", amount_minor=1, limit_minor=1)
    reservation = h.session("dies").ask(money).reservation
    h.clients["dies"].die()
    h.session("dies").ask(wire.BudgetsRelease(reservation=reservation))
    a.die()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replies, "LOOK_EACH", 1)
        patch.setattr(replies, "KEPT_MAX", 1)
        b.ask(wire.RunsJoin(name="rare", keep=True))
        patch.setattr(tidy, "EVENTS_KEPT", 1)
        patch.setattr(tidy, "EVENTS_IN_ONE_STEP", 1)
        h.memory.due(h.clock.wall_ms())
        h.pass_ms(0)
        h.pass_ms(2 * tidy.MONEY_KEPT_MS)
    h.close()
    logging.disable(logging.NOTSET)
    return {sql for sql in Connection.statements if not sql.startswith(("PRAGMA", "CREATE"))}


def test_every_statement_of_the_schema_is_postgresql_too() -> None:
    for statement in schema.statements():
        (parsed,) = sqlglot.parse(statement, read="postgres")
        assert parsed is not None
        assert parsed.key in ("create", "alter", "insert", "update", "drop"), statement


def test_every_statement_executed_is_postgresql_too(executed: set[str]) -> None:
    assert len(executed) > 60
    for sql in executed:
        if sql.startswith(("BEGIN", "SAVEPOINT", "ROLLBACK", "RELEASE", "COMMIT")):
            continue
        (parsed,) = sqlglot.parse(sql, read="postgres", error_level=sqlglot.ErrorLevel.RAISE)
        assert parsed is not None
        assert parsed.key in ("select", "insert", "update", "delete", "alter", "drop"), sql
        assert "?" not in sql, "parameters are named"


# Statements that look through a table on purpose. Everything else that a request, a tick or the end of a session
# executes finds its rows by an index.
LOOKED_THROUGH = {
    "SELECT id, space, name, permissions, created_ms, revoked_ms FROM keys": "all keys, for `keys.list`",
    "SELECT id, space, permissions, hash, revoked_ms FROM keys": "all keys, when one changes",
    "SELECT session, worker, pid, command FROM sessions": "who is there, for `status`: on the reader",
    "SELECT count(*) FROM sqlite_master": "the tables, at the start of the daemon",
    "SELECT counter, value FROM counters": "at the start of the daemon",
    "SELECT session, space, worker, process": "all sessions, at the start of the daemon",
    "SELECT token, kind, subject, run, session, request, length_ms, granted_ms FROM leases ORDER": "at the start",
    "SELECT token, pool FROM units": "at the start of the daemon",
    "SELECT count(*) FROM keys": "when a key is made",
}


def test_no_statement_looks_through_a_table(executed: set[str], connection: sqlite3.Connection) -> None:
    """Nor sorts more than it gives: what holds up everybody must not grow with what is stored."""
    schema.migrate(connection)
    found = {}
    of_schema = {statement.removesuffix(";") for statement in schema.statements()}
    for sql in executed - of_schema:
        if sql.startswith(VERBS) or sql.startswith("WITH"):
            names = dict.fromkeys(re.findall(r":(\w+)", sql), 0)
            plan = [step for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {sql}", names)]
            scans = [step for step in plan if re.match("SCAN (?!CONSTANT ROW|places)", step) or "AUTOMATIC" in step]
            is_bounded = "LIMIT" in sql and not any("TEMP B-TREE" in step for step in plan)
            if scans and not is_bounded:
                found[sql] = plan
    unexpected = {sql: plan for sql, plan in found.items() if not sql.startswith(tuple(LOOKED_THROUGH))}
    assert not unexpected
    unused = [sql for sql in LOOKED_THROUGH if not any(each.startswith(sql) for each in found)]
    assert not unused, "one that is not needed any more goes"


def test_every_statement_in_the_source_was_executed(executed: set[str]) -> None:
    """So that none is left out of the test above."""
    beginnings: list[str] = []
    for path in [
        *sorted((SOURCE / "domain").glob("*.py")),
        SOURCE / "batch.py",
        SOURCE / "replies.py",
        SOURCE / "store" / "tx.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.values[0] if isinstance(node, ast.JoinedStr) else node
            if isinstance(text, ast.Constant) and str(text.value).startswith(VERBS):
                beginnings.append(str(text.value))
    assert len(beginnings) > 60
    missing = [each for each in beginnings if not any(sql.startswith(each) for sql in executed)]
    assert not missing


def test_tables_use_only_types_that_both_databases_have() -> None:
    types = {
        column.kind.sql()
        for statement in schema.statements()
        for parsed in sqlglot.parse(statement, read="postgres")
        if parsed is not None
        for column in parsed.find_all(sqlglot.exp.ColumnDef)
        if column.kind is not None
    }
    assert types <= {"TEXT", "BIGINT", "INT"}


@pytest.mark.parametrize("version", [1, 2, 7, 8])
def test_the_golden_file_is_small_and_was_closed_in_good_order(tmp_path: Path, version: int) -> None:
    packed = GOLDEN / f"v{version}.db.gz"
    assert packed.stat().st_size < 20_000
    with gzip.open(packed) as source, (tmp_path / "db").open("wb") as target:
        shutil.copyfileobj(source, target)
    connection = sqlite3.connect(tmp_path / "db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    connection.close()

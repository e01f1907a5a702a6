from __future__ import annotations

import gzip
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstate import wire
from runstated.domain import replies
from runstated.domain.access import Access
from runstated.store import schema
from tests.harness import Client, Harness

VERSIONS = (1, 2, 7, 8, 9)  # of the golden files
GOLDEN = Path(__file__).parents[1] / "golden"


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

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE last (x BIGINT)")
        connection.execute("BROKEN")

    steps = (*schema.STEPS, lambda connection: connection.execute("CREATE TABLE more (x BIGINT)"), broken)
    monkeypatch.setattr(schema, "STEPS", steps)
    monkeypatch.setattr(schema, "VERSION", len(steps))
    with pytest.raises(sqlite3.OperationalError):
        schema.migrate(connection)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION - 1,)
    assert "more" in tables(connection)
    assert "last" not in tables(connection)


def test_a_crash_before_the_first_table_leaves_a_file_that_can_be_migrated(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    schema.migrate(connection)
    assert tables(connection)


# ------------------------------------------------------------------ an old file


@pytest.mark.parametrize("version", VERSIONS)
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


@pytest.mark.parametrize("version", VERSIONS)
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
    assert shape(connection) == shape(fresh)
    connection.close()
    fresh.close()


def shape(connection: sqlite3.Connection) -> list[str]:
    """All tables and indexes as they were made."""
    made = "SELECT sql FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY name"
    return [" ".join(sql.split()) for (sql,) in connection.execute(made)]


def test_sessions_of_before_version_8_keep_what_they_hold_under_their_new_names(
    connection: sqlite3.Connection,
) -> None:
    for step in schema.STEPS[:7]:
        step(connection)
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 7")
    far = f"http-{'c' * 24}"  # a caller over HTTP, and what it was called with a label
    opened = [
        ("near", "a:b/", "", "unix"),
        ("far", "s", "k1-test", "tcp"),
        (f"{far}.{'d' * 24}", "s", "k1-test", "http"),
    ]
    for token, (session, space, key, transport) in enumerate(opened):
        connection.execute(
            "INSERT INTO sessions (session, space, worker, process, pid, command, opened_ms, key, transport)"
            " VALUES (?, ?, '', '', 1, '', ?, ?, ?)",
            (session, space, token, key, transport),
        )
        connection.execute("INSERT INTO leases VALUES (?, 'budget', 'm', ?, ?, 1, 1, 1)", (token, f"r{token}", session))
        connection.execute("INSERT INTO reservations VALUES (?, 'm', 'r', ?, 'active', 1, 0, 1)", (f"b{token}", token))
        connection.execute("INSERT INTO replies VALUES (?, 1, '', '', NULL)", (session,))
        connection.execute(
            "INSERT INTO runs (run, space, path, state, owner, created_ms) VALUES (?, '', ?, 'active', ?, 0)",
            (f"r{token}", f"/r{token}/", session),
        )
    connection.execute("INSERT INTO replies VALUES (?, 1, '', '', 5)", (far,))
    connection.execute("INSERT INTO replies VALUES ('ended', 1, '', '', 5)")
    connection.execute("INSERT INTO budgets VALUES ('m', 's', 'm', 'USD', 2, 100, 0, 3)")
    schema.migrate(connection)
    names = [Access(space, key=key).session_name(over, name.rpartition(".")[2]) for name, space, key, over in opened]
    for column, table, key in (
        ("session", "leases", "token"), ("session", "reservations", "token"), ("owner", "runs", "run"),
        ("session", "sessions", "opened_ms"),
    ):  # fmt: skip
        assert [name for (name,) in connection.execute(f"SELECT {column} FROM {table} ORDER BY {key}")] == names, table
    kept = dict(connection.execute("SELECT session, space FROM replies"))
    spaces = [space for _, space, _, _ in opened]
    assert kept == dict(zip(names, spaces, strict=True)) | {replies.caller_of(names[2]): "s", "ended": ""}


def version_8(connection: sqlite3.Connection) -> None:
    """As the last engine in SQL left a new file."""
    for step in schema.STEPS[:8]:
        step(connection)
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 8")


def test_what_running_jobs_have_taken_is_what_they_took_and_not_what_their_queue_needs_now(
    connection: sqlite3.Connection,
) -> None:
    version_8(connection)
    one, two = '{"slots":[["p",1]]}', '{"slots":[["p",2]],"limits":[["l",1]]}'
    connection.executescript(
        f"""
        INSERT INTO counters VALUES ('needs', 2);
        INSERT INTO needs VALUES (1, '{one}'), (2, '{two}');
        INSERT INTO pools VALUES ('p', 's', 'p', 9);
        INSERT INTO runs (run, space, path, state, created_ms) VALUES ('r', 's', '/r/', 'active', 0);
        INSERT INTO queues VALUES ('s', 'q', 3, 2), ('s', 'plain', 3, 0);
        """
    )
    taken = {
        "same": ("q", 0, {"p": 2}),
        "before": ("q", 0, {"p": 1}),
        "own": ("plain", 1, {"p": 1}),
        "none": ("plain", 0, {}),
    }
    for token, (job, (queue, needs, units)) in enumerate(taken.items(), 1):
        connection.execute(
            "INSERT INTO jobs (job, space, queue, run, key, state, needs, age, input, created_ms)"
            " VALUES (?, 's', ?, 'r', ?, 'running', ?, 0, '1', 0)",
            (job, queue, job, needs),
        )
        connection.execute("INSERT INTO leases VALUES (?, 'job', ?, 'r', 'a', 1, 1, 1, '')", (token, job))
        for pool, number in units.items():
            connection.execute("INSERT INTO units VALUES (?, ?, ?)", (token, pool, number))
    connection.execute("INSERT INTO leases VALUES (9, 'slots', 'p', 'r', 'a', 2, 1, 1, '')")
    connection.execute("INSERT INTO units VALUES (9, 'p', 3)")
    schema.migrate(connection)
    found = connection.execute(
        "SELECT subject, units, leases.needs, needs.text FROM leases LEFT JOIN needs ON needs.needs = leases.needs"
        " ORDER BY token"
    ).fetchall()
    new = '{"slots":[["p",1]],"limits":[],"budgets":[]}'
    assert found == [
        ("same", 0, 2, two),
        ("before", 0, 3, new),
        ("own", 0, 1, one),
        ("none", 0, 0, None),
        ("p", 3, 0, None),
    ]
    assert connection.execute("SELECT value FROM counters WHERE counter = 'needs'").fetchone() == (3,)


def test_what_is_left_of_runs_that_are_gone_stays(connection: sqlite3.Connection) -> None:
    version_8(connection)
    connection.executescript(
        """
        INSERT INTO budgets VALUES ('m', 's', 'm', 'USD', 2, 100, 5, 0);
        INSERT INTO reservations VALUES ('b', 'm', 'gone', 7, 'settled', 0, 5, 1, 'a', '', 5, 0, 8);
        INSERT INTO ledger VALUES (1, 'm', 'b', 'reserve', NULL, -5, 95, 1);
        INSERT INTO events VALUES (1, 'gone', 'scope.ended', 3, '{}');
        """
    )
    schema.migrate(connection)
    assert connection.execute("SELECT event, space, run, path FROM events").fetchall() == [(1, "", "gone", "/gone/")]
    seen = connection.execute("SELECT reservation, space, path, state, is_held, ended_ms FROM reservations").fetchall()
    assert seen == [("b", "s", "/gone/", "settled", 0, 8)]
    assert connection.execute("SELECT entry, space, balance_minor FROM ledger").fetchall() == [(1, "s", 95)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_file_is_small_and_was_closed_in_good_order(tmp_path: Path, version: int) -> None:
    packed = GOLDEN / f"v{version}.db.gz"
    assert packed.stat().st_size < 20_000
    with gzip.open(packed) as source, (tmp_path / "db").open("wb") as target:
        shutil.copyfileobj(source, target)
    connection = sqlite3.connect(tmp_path / "db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    connection.close()

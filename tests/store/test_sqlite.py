from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import aiosqlite
import pytest

from runstated.domain.queues import QUEUES
from runstated.store import schema, sqlite
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed
from runstated.store.errors import is_trouble
from runstated.store.sqlite import Store, StoreError
from tests.disks import disk, fill_up
from tests.engines import play


def pragma(name: str) -> Callable[[sqlite3.Connection], Any]:
    return lambda connection: connection.execute(f"PRAGMA {name}").fetchone()[0]


def insert(connection: sqlite3.Connection, counter: str, value: int = 1) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO counters VALUES (:counter, :value)", {"counter": counter, "value": value})
    connection.execute("COMMIT")


def count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM counters WHERE counter LIKE 'x%'").fetchone()[0])


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------ settings in force


@pytest.mark.parametrize(("sync", "level"), [("full", 2), ("normal", 1)])
def test_a_new_file_has_all_settings_before_its_first_table(tmp_path: Path, sync: Any, level: int) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db", sync)
        expected = {
            "application_id": schema.APPLICATION_ID,
            "user_version": schema.VERSION,
            "auto_vacuum": 2,
            "journal_mode": "wal",
            "synchronous": level,
            "wal_autocheckpoint": 0,
            "journal_size_limit": sqlite.WAL_CHECKPOINT_BYTES,
            "busy_timeout": sqlite.BUSY_MS,
            "foreign_keys": 0,
        }
        assert {name: await store.write(pragma(name)) for name in expected} == expected
        await store.reopen()
        assert {name: await store.write(pragma(name)) for name in expected} == expected
        await store.close()

    play(run())


def test_the_reader_cannot_write(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            await store.run_read(lambda connection: connection.execute("DELETE FROM counters"))
        assert await store.run_read(count) == 0
        await store.close()

    play(run())


def test_a_reader_sees_one_moment_and_never_what_is_not_committed(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        seen: list[int] = []
        looked, written = threading.Event(), threading.Event()

        def look(connection: sqlite3.Connection) -> None:
            seen.append(count(connection))
            looked.set()
            assert written.wait(30)
            seen.append(count(connection))

        async def write() -> None:
            await asyncio.to_thread(looked.wait, 30)
            await store.write(lambda connection: insert(connection, "x"))
            written.set()

        await asyncio.gather(store.run_read(look), write())
        assert seen == [0, 0]
        assert await store.run_read(count) == 1
        await store.close()

    play(run())


def test_a_failing_read_leaves_no_transaction_behind(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")

        def fails(connection: sqlite3.Connection) -> None:
            raise ValueError("a fault of ours")

        with pytest.raises(ValueError, match="ours"):
            await store.run_read(fails)
        await store.write(lambda connection: insert(connection, "x"))
        assert await store.run_read(count) == 1
        await store.close()

    play(run())


def test_the_name_of_a_database_stays_and_two_databases_differ(tmp_path: Path) -> None:
    async def run() -> None:
        names = []
        for path in ("one", "one", "two", "three", "four"):
            store = await Store.open(tmp_path / path)
            names.append(store.instance)
            await store.close()
        assert names[0] == names[1]
        assert len(set(names)) > 2

    play(run())


def test_closing_folds_the_log_into_the_file(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        await store.write(lambda connection: insert(connection, "x"))
        assert store.wal_bytes() > 0
        assert store.database_bytes() > 0
        await store.close()
        assert files(tmp_path) == ["db"]
        with pytest.raises(sqlite3.OperationalError, match="closed"):
            await store.run_read(count)

    play(run())


def test_sizes_of_files_that_are_not_there_are_zero(tmp_path: Path) -> None:
    store = Store(tmp_path / "none", "full")
    assert (store.wal_bytes(), store.database_bytes()) == (0, 0)


# ------------------------------------------------------------------ files that are refused


def refused(path: Path, match: str) -> None:
    before = digest(path)

    async def run() -> None:
        with pytest.raises(StoreError, match=match) as error:
            await Store.open(path)
        assert str(path) in str(error.value)

    play(run())
    assert digest(path) == before, "it was changed"
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_a_newer_file_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "db"
    connection = sqlite3.connect(path, isolation_level=None)
    schema.migrate(connection)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    refused(path, "version 99, this runstated knows")


def test_the_database_of_another_program_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.close()
    refused(path, "another program")


def test_a_file_that_is_no_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_text("This is a letter to my grandmother. " * 100)
    refused(path, "not a database")


def test_a_damaged_file_is_refused_and_told(tmp_path: Path) -> None:
    path = tmp_path / "db"

    async def fill() -> None:
        store = await Store.open(path)
        for number in range(200):
            await store.write(lambda connection, number=number: insert(connection, f"x{number}" * 20))
        await store.close()

    play(fill())
    content = bytearray(path.read_bytes())
    half = len(content) // 2 // 4096 * 4096
    content[half : half + 8192] = b"\xa5" * 8192
    path.write_bytes(content)

    async def run() -> None:
        with pytest.raises(StoreError, match=r"damaged|malformed"):
            await Store.open(path)

    play(run())


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(StoreError, match="unable to open"):
            await Store.open(tmp_path / "none" / "db")

    play(run())


# ------------------------------------------------------------------ upgrades


def put_old_database(path: Path) -> bytes:
    path.write_bytes(gzip.decompress((Path(__file__).parents[1] / "golden/v2.db.gz").read_bytes()))
    return path.read_bytes()


@pytest.mark.parametrize("backup", [True, False])
def test_a_database_is_saved_before_its_upgrade_and_only_then(tmp_path: Path, backup: bool) -> None:
    path = tmp_path / "db"
    before = put_old_database(path)

    async def run() -> None:
        for _ in range(2):
            store = await Store.open(path, backup=backup)
            assert await store.write(pragma("user_version")) == schema.VERSION
            await store.close()

    play(run())
    assert sorted(files(tmp_path)) == (["db", "db.v2"] if backup else ["db"])
    if backup:
        assert dump(path.with_name("db.v2")) == dump_of(before, tmp_path / "again")


def test_without_room_for_a_backup_the_upgrade_is_refused(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "1m") as directory:
        path, ballast = directory / "db", directory / "ballast"
        put_old_database(path)
        fill_up(ballast)
        os.truncate(ballast, ballast.stat().st_size - 60_000)  # enough for SQLite itself

        async def run() -> None:
            with pytest.raises(StoreError, match=r"needs 0\.\d MiB .* are free: .* start once with --no-backup"):
                await Store.open(path)

        play(run())
        assert version_of(path) == 2
        assert sorted(files(directory)) == ["ballast", "db"]


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(pragma("user_version")(connection))
    finally:
        connection.close()


def dump(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


def dump_of(content: bytes, path: Path) -> list[str]:
    path.write_bytes(content)
    return dump(path)


# ------------------------------------------------------------------ what it stands on


def test_aiosqlite_can_run_a_function_on_its_thread(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        threads = {await store.write(lambda connection: threading.get_ident()) for _ in range(3)}
        assert len(threads) == 1
        assert threads.isdisjoint({threading.get_ident()})
        assert await store.run_read(lambda connection: threading.get_ident()) not in threads
        await store.close()

    assert callable(aiosqlite.Connection._execute)
    play(run())


def test_an_aiosqlite_without_that_call_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(aiosqlite.Connection, "_execute")
    with pytest.raises(StoreError, match=aiosqlite.__version__):
        sqlite.check()


def test_a_sqlite_that_is_too_old_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(StoreError, match=r"needs 3\.35"):
        sqlite.check()


def test_a_store_is_reopened_after_its_connection_was_given_up(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        await store.write(lambda connection: connection.execute("BEGIN IMMEDIATE") and None)
        await store.reopen()
        await store.reopen()
        await store.write(lambda connection: insert(connection, "x"))
        assert await store.run_read(count) == 1
        await store.close()

    play(run())


def test_the_index_of_the_wal_stays_when_the_writer_is_given_up_before_any_read(tmp_path: Path) -> None:
    """A new one needs room: on a full disk nothing could be read any more."""

    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        index = tmp_path / "db-shm"
        before = index.stat().st_ino
        await store.reopen()
        after = index.stat().st_ino if index.exists() else None
        found = await store.run_read(count)
        await store.close()
        assert (after, found) == (before, 0)

    play(run())


def test_two_writes_after_a_lost_connection_open_one(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        await store.reopen()
        threads = await asyncio.gather(*(store.write(lambda connection: threading.get_ident()) for _ in range(3)))
        assert len(set(threads)) == 1
        await store.close()

    before = set(threading.enumerate())
    play(run())
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # its connection is closed: it is on its way out
        assert not thread.is_alive(), "a thread is left that would keep the process alive"


# ------------------------------------------------------------------ commits


def queue(name: str) -> Batch:
    return Batch({QUEUES: {("s", name): ("s", name, 3, 0)}})


def queues(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [name for (name,) in connection.execute("SELECT queue FROM queues ORDER BY queue")]
    finally:
        connection.close()


def test_a_commit_is_on_disk_when_it_returns_wherever_it_is_made(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        first = store.batch
        store.commit(queue("a"))
        store.commit(queue("b"), durable=False)
        await store.commit_aside(queue("c"))
        await store.commit_aside(queue("d"), durable=False)
        assert await store.write(pragma("synchronous")) == 1
        store.commit(Batch())
        assert await store.write(pragma("synchronous")) == 2
        assert store.batch == first + 5
        assert queues(tmp_path / "db") == ["a", "b", "c", "d"]
        assert store.read(QUEUES, ("space", "queue"), ("s", "c")) == ("s", "c", 3, 0)
        await store.close()

    play(run())


def test_with_the_setting_normal_no_commit_waits_for_the_disk(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db", "normal")
        for durable in (True, False, True):
            store.commit(queue("a"), durable=durable)
            assert await store.write(pragma("synchronous")) == 1
        await store.close()

    play(run())


class Faulty(sqlite3.Connection):
    """Says before each statement what it is; that may raise instead."""

    before: ClassVar[Callable[[str], object]] = staticmethod(lambda sql: None)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:  # type: ignore[override]
        Faulty.before(sql)
        return super().execute(sql, *parameters)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    connect = aiosqlite.connect
    monkeypatch.setattr(aiosqlite, "connect", lambda *args, **more: connect(*args, factory=Faulty, **more))
    yield Faulty
    Faulty.before = staticmethod(lambda sql: None)


class Failing:
    """Fails at statements that begin so, the first ``times``; remembers all."""

    def __init__(self, *beginnings: str, times: int = 1, says: str = "disk I/O error") -> None:
        self.beginnings, self.times, self.says = beginnings, times, says
        self.seen: list[str] = []

    def __call__(self, sql: str) -> None:
        self.seen.append(sql)
        if self.times and sql.startswith(self.beginnings):
            self.times -= 1
            raise sqlite3.OperationalError(self.says)


@pytest.mark.parametrize("at", ["BEGIN", "INSERT OR REPLACE INTO queues", "INSERT OR REPLACE INTO counters", "COMMIT"])
def test_a_commit_that_failed_left_nothing_and_is_made_again(tmp_path: Path, faulty: type[Faulty], at: str) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        store.commit(queue("a"))
        before = store.batch
        faulty.before = Failing(at)
        with pytest.raises(CommitFailed) as failed:
            store.commit(queue("b"))
        assert (failed.value.took_place, store.batch) == (False, before)
        assert queues(tmp_path / "db") == ["a"]
        await store.commit_again(queue("b"))
        store.commit(queue("c"))
        assert (queues(tmp_path / "db"), store.batch) == (["a", "b", "c"], before + 2)
        await store.close()

    play(run())


def test_after_a_failed_sync_the_log_is_emptied_before_anything_is_written_to_it(
    tmp_path: Path, faulty: type[Faulty]
) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        faulty.before = Failing("COMMIT")
        with pytest.raises(CommitFailed):
            store.commit(queue("a"))
        written = Failing("INSERT OR REPLACE INTO queues", times=2)
        faulty.before = written
        with pytest.raises(CommitFailed, match="could not be copied"):
            store.commit(queue("a"))
        assert written.seen == [], "nothing was tried"
        for _ in range(2):  # the log is empty now, and the guard looks at it
            with pytest.raises(CommitFailed):
                await store.commit_again(queue("a"))
            assert store.wal_bytes() == 0
            assert store.files.lost() is None
        await store.commit_again(queue("a"))
        assert "PRAGMA wal_checkpoint(TRUNCATE)" in written.seen
        assert queues(tmp_path / "db") == ["a"]
        os.truncate(tmp_path / "db-wal", 0)
        assert store.files.lost() is not None, "only we may empty it"
        await store.close()

    play(run())


def test_a_log_that_somebody_reads_is_not_written_to_after_a_failed_sync(
    tmp_path: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_MS", 1)

    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        store.commit(queue("a"))
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        other.execute("BEGIN")
        count(other)
        faulty.before = Failing("COMMIT")
        with pytest.raises(CommitFailed):
            store.commit(queue("b"))
        size = store.wal_bytes()
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="somebody reads it"):
                await store.commit_again(queue("b"))
        assert (store.wal_bytes(), queues(tmp_path / "db")) == (size, ["a"])
        other.execute("ROLLBACK")
        other.close()
        await store.commit_again(queue("b"))
        assert queues(tmp_path / "db") == ["a", "b"]
        await store.close()

    play(run())


@pytest.mark.parametrize("work", [Store.checkpoint, Store.shrink])
def test_a_checkpoint_that_failed_may_have_failed_at_a_sync_of_the_log(
    tmp_path: Path, faulty: type[Faulty], work: Callable[[Store], Any]
) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        faulty.before = Failing("PRAGMA wal_checkpoint", "PRAGMA freelist_count")
        with pytest.raises(sqlite3.OperationalError):
            await work(store)
        with pytest.raises(CommitFailed) as failed:
            store.commit(queue("a"))
        assert is_trouble(failed.value.cause)
        await store.commit_again(queue("a"))
        store.commit(queue("b"))
        assert queues(tmp_path / "db") == ["a", "b"]
        await store.close()

    play(run())


def test_a_connection_that_is_of_no_use_any_more_is_replaced(tmp_path: Path, faulty: type[Faulty]) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        store.commit(queue("a"))
        before = store.batch
        faulty.before = Failing("INSERT OR REPLACE INTO queues", "ROLLBACK", times=2)
        with pytest.raises(CommitFailed) as failed:
            store.commit(queue("b"))
        assert failed.value.took_place is None
        await store.commit_again(queue("b"))
        assert (queues(tmp_path / "db"), store.batch) == (["a", "b"], before + 1)
        await store.close()

    play(run())


def test_what_a_commit_did_that_failed_after_it_is_seen(tmp_path: Path, faulty: type[Faulty]) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        before = store.batch

        def commits_and_fails(sql: str) -> None:
            if sql == "COMMIT":
                sqlite3.Connection.execute(store.database.connection, sql)
                raise sqlite3.OperationalError("disk I/O error")

        faulty.before = commits_and_fails
        with pytest.raises(CommitFailed) as failed:
            store.commit(queue("a"))
        faulty.before = Failing()
        assert (failed.value.took_place, store.batch) == (True, before + 1)
        await store.commit_again(queue("a"))  # does no harm
        assert (queues(tmp_path / "db"), store.batch) == (["a"], before + 2)
        await store.close()

    play(run())


def test_commits_go_aside_after_a_slow_one_and_while_the_writer_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(sqlite, "perf_counter", lambda: now[0])

    async def run() -> None:
        store = await Store.open(tmp_path / "db")
        assert not store.is_slow()
        begun, done = threading.Event(), threading.Event()

        def work(connection: sqlite3.Connection) -> None:
            begun.set()
            assert done.wait(30)

        busy = asyncio.create_task(store.write(work))
        await asyncio.to_thread(begun.wait, 30)
        assert store.is_slow()
        done.set()
        await busy
        assert not store.is_slow()
        for took, aside in ((0.004, False), (0.021, True)):
            monkeypatch.setattr(sqlite, "perf_counter", lambda took=took: now.append(now.pop() + took) or now[0])
            store.commit(Batch())
            monkeypatch.setattr(sqlite, "perf_counter", lambda: now[0])
            assert store.is_slow() == aside
        now[0] += sqlite.SLOW_FOR_S + 1
        assert not store.is_slow()
        await store.close()

    play(run())


def test_commits_go_aside_while_more_than_one_in_a_hundred_takes_long(tmp_path: Path) -> None:
    store = Store(tmp_path / "none", "full")
    for _ in range(sqlite.SYNCS_LOOKED_AT // 100):
        store._count(sqlite.SLOW_S)
    assert not store.is_slow()
    store._count(sqlite.SLOW_S)
    for _ in range(sqlite.SYNCS_LOOKED_AT - 12):
        store._count(0.0001)
        assert store.is_slow()
    store._count(0.0001)
    assert store.is_slow(), "all of the long ones are still among the latest"
    store._count(0.0001)
    assert not store.is_slow()


# ------------------------------------------------------------------ free pages


def leave_free_pages(connection: sqlite3.Connection) -> None:
    """Some 2,000 of them."""
    connection.execute("CREATE TABLE big (x)")
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)"
    connection.execute(f"{numbers} INSERT INTO big SELECT zeroblob(3900) FROM n")
    connection.execute("DROP TABLE big")


def test_free_pages_are_given_back_in_small_steps_but_for_some(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db", "normal")
        await store.write(leave_free_pages)
        counts = [await store.write(pragma("freelist_count"))]
        while await store.shrink():
            counts.append(await store.write(pragma("freelist_count")))
        assert counts[0] > 2_000
        steps = [before - after for before, after in itertools.pairwise(counts)]
        assert set(steps[:-1]) == {sqlite.PAGES_SHRUNK}
        assert counts[-1] == sqlite.PAGES_KEPT_MIN
        await store.checkpoint()
        assert store.database_bytes() < 2 * sqlite.PAGES_KEPT_MIN * 4096
        await store.close()

    play(run())


# ------------------------------------------------------------------ the log


def test_the_log_is_bounded_while_somebody_always_reads_and_writes(tmp_path: Path) -> None:
    bound = 256 * 1024

    async def run() -> None:
        store = await Store.open(tmp_path / "db", "normal")
        done = False

        async def read() -> None:
            while not done:
                await store.run_read(count)

        async def write() -> int:
            largest = 0
            for number in range(120):
                await store.write(lambda connection, number=number: insert(connection, "x" + f"{number:06}" * 8_000))
                largest = max(largest, store.wal_bytes())
                if store.wal_bytes() > bound:
                    await store.checkpoint()
            return largest

        readers = [asyncio.create_task(read()) for _ in range(3)]
        largest = await write()
        done = True
        await asyncio.gather(*readers)
        assert largest < 4 * bound
        assert store.database_bytes() > 4 * 1024 * 1024
        await store.close()

    play(run())


def test_a_long_read_holds_up_nobody_and_the_log_starts_anew_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_MS", 600_000)  # who waited for the reader would wait for ever

    async def run() -> None:
        store = await Store.open(tmp_path / "db", "normal")
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        other.execute("BEGIN")
        count(other)
        for number in range(10):
            await store.write(lambda connection, number=number: insert(connection, "x" + f"{number:06}" * 8_000))
            await store.checkpoint()
        held = store.wal_bytes()
        assert held > 400 * 1024, "what the reader needs stays"
        assert await store.write(pragma("busy_timeout")) == 600_000
        other.execute("ROLLBACK")
        other.close()
        await store.checkpoint()
        for number in range(5):
            await store.write(lambda connection, number=number: insert(connection, f"x-after{number}"))
        assert store.wal_bytes() == held, "written from its start again"
        await store.close()

    play(run())


def test_room_that_the_system_does_not_tell_is_no_trouble(tmp_path: Path) -> None:
    assert sqlite.free_bytes(tmp_path / "gone") == sqlite.ROOM_UNKNOWN

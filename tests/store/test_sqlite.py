from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from runstated.store import schema, sqlite
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
    return int(connection.execute("SELECT count(*) FROM counters WHERE counter NOT LIKE 'instance:%'").fetchone()[0])


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
            await store.read(lambda connection: connection.execute("DELETE FROM counters"))
        assert await store.read(count) == 0
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

        await asyncio.gather(store.read(look), write())
        assert seen == [0, 0]
        assert await store.read(count) == 1
        await store.close()

    play(run())


def test_a_failing_read_leaves_no_transaction_behind(tmp_path: Path) -> None:
    async def run() -> None:
        store = await Store.open(tmp_path / "db")

        def fails(connection: sqlite3.Connection) -> None:
            raise ValueError("a fault of ours")

        with pytest.raises(ValueError, match="ours"):
            await store.read(fails)
        await store.write(lambda connection: insert(connection, "x"))
        assert await store.read(count) == 1
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
            await store.read(count)

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
        assert await store.read(lambda connection: threading.get_ident()) not in threads
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
        assert await store.read(count) == 1
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
        found = await store.read(count)
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
                await store.read(count)

        async def write() -> int:
            largest = 0
            for number in range(120):
                await store.write(lambda connection, number=number: insert(connection, f"{number:06}" * 8_000))
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
            await store.write(lambda connection, number=number: insert(connection, f"{number:06}" * 8_000))
            await store.checkpoint()
        held = store.wal_bytes()
        assert held > 400 * 1024, "what the reader needs stays"
        assert await store.write(pragma("busy_timeout")) == 600_000
        other.execute("ROLLBACK")
        other.close()
        await store.checkpoint()
        for number in range(5):
            await store.write(lambda connection, number=number: insert(connection, f"after{number}"))
        assert store.wal_bytes() == held, "written from its start again"
        await store.close()

    play(run())


def test_room_that_the_system_does_not_tell_is_no_trouble(tmp_path: Path) -> None:
    assert sqlite.free_bytes(tmp_path / "gone") == sqlite.ROOM_UNKNOWN

"""Copies of the database: one moment of it, checked before they count."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstated.store import backup, schema
from runstated.store.backup import BackupError


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    """One that a connection has open, as a daemon does, with some of it in the WAL."""
    path = tmp_path / "state" / "runstate.db"
    path.parent.mkdir()
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "wal_autocheckpoint = 0"):
        connection.execute(f"PRAGMA {pragma}").fetchone()
    schema.migrate(connection)
    yield path
    connection.close()


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_commit_of_another_connection_does_not_make_the_copy_start_anew(database: Path, tmp_path: Path) -> None:
    writer = sqlite3.connect(database, isolation_level=None)
    left: list[int] = []

    def step(status: int, remaining: int, total: int) -> None:
        left.append(remaining)
        if len(left) <= 3:
            writer.execute("INSERT INTO counters VALUES (?, 1)", (f"c{len(left)}",))

    with backup.reading(database) as source, contextlib.closing(sqlite3.connect(tmp_path / "copy")) as copy:
        source.backup(copy, pages=4, progress=step)
        assert copy.execute("SELECT count(*) FROM counters WHERE counter LIKE 'c_'").fetchone() == (0,)
    writer.close()
    assert len(left) > 5
    assert left == sorted(left, reverse=True)


def test_a_backup_is_a_private_file_of_one_moment_while_others_write(database: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved.db"
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("INSERT INTO events VALUES (0, 's', 'r', '/r/', 't', 1, zeroblob(3000000))")
        number = 0
        while not done.is_set():
            number += 1
            connection.execute("BEGIN IMMEDIATE")
            for counter in ("one", "two"):
                connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (counter, number))
            connection.execute("COMMIT")
            begun.set()
        connection.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(30)
        backup.save(database, target, force=False)
    finally:
        done.set()
        writer.join()
    ((one,), (two,)) = rows(target, "SELECT value FROM counters WHERE counter IN ('one', 'two')")
    assert one == two
    assert rows(target, "PRAGMA user_version") == [(schema.VERSION,)]
    assert rows(target, "PRAGMA auto_vacuum") == [(2,)]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved.db", "state"]


def test_an_existing_file_is_replaced_only_with_force_and_the_daemons_own_never(database: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved.db"
    target.write_text("precious")
    with pytest.raises(BackupError, match="--force"):
        backup.save(database, target, force=False)
    assert target.read_text() == "precious"
    backup.save(database, target, force=True)
    assert rows(target, "PRAGMA user_version") == [(schema.VERSION,)]
    for name in (database.name, f"{database.name}-wal", "runstated.lock"):
        with pytest.raises(BackupError, match="another name"):
            backup.save(database, database.with_name(name), force=True)
    with pytest.raises(BackupError, match="another name"):
        backup.save(database, tmp_path, force=True)
    backup.save(database, database.with_name("saved.db"), force=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("PRAGMA user_version = 99", "version 99"),
        ("PRAGMA application_id = 7", "another program"),
        ("UPDATE sqlite_master SET rootpage = 2 WHERE name = 'runs'", "damaged|malformed"),
    ],
)
def test_what_is_no_sound_database_of_ours_is_no_backup(
    database: Path, tmp_path: Path, change: str, match: str
) -> None:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(change)
    connection.close()
    target = tmp_path / "saved.db"
    target.write_text("the backup before")
    with pytest.raises(BackupError, match=match):
        backup.save(database, target, force=True)
    assert target.read_text() == "the backup before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved.db", "state"]


def test_without_a_database_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="no database"):
        backup.save(tmp_path / "runstate.db", tmp_path / "saved.db", force=False)
    assert list(tmp_path.iterdir()) == []

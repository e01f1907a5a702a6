"""Copies of the database, by SQLite's backup API: one moment of it, checked before it counts.

    database ──one read transaction, some pages at a time──> FILE.part ──integrity, version──> FILE

The copy is made on a connection of its own, mostly in a process of its own. Its read transaction pins the moment that
is copied: else each commit of the daemon would make the copy start anew, for ever on a busy one. The writer waits for
nothing; only the WAL does not start anew before the copy is done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from runstated.store import schema
from runstated.store.files import log_of

PAGES_COPIED = 256  # in one step, 1 MiB: between two of them a Ctrl-C is heard
MIB = 1024 * 1024


class BackupError(Exception):
    """There is no backup; the message says why. Nothing is left of it."""


def save(database: Path, target: Path, *, force: bool) -> None:
    """Backs the database up into a new file of mode 0600; ``force``: also over an existing one.

    Raises BackupError, OSError, sqlite3.Error.
    """
    if not database.exists():
        raise BackupError(f"there is no database at {database}")
    if target.is_dir() or _is_of(target, database):
        raise BackupError(f"{target} is in the way: choose another name")
    if target.exists() and not force:
        raise BackupError(f"{target} exists: choose another name, or say --force to replace it")
    with part_of(target) as part, reading(database) as source:
        copy(source, part)
        os.replace(part, target)
        sync_directory(target.parent)


def before_upgrade(database: Path, version: int) -> Path:
    """Backs up a database that is about to be migrated from ``version``; where. Raises BackupError without room."""
    target = database.with_name(f"{database.name}.v{version}")
    needed = sum(path.stat().st_size for path in (database, log_of(database)) if path.exists())
    free = shutil.disk_usage(database.parent).free
    if free < needed:
        raise BackupError(
            f"its upgrade from version {version} to {schema.VERSION} begins with a backup, which needs {_mib(needed)}"
            f" in {database.parent}, where {_mib(free)} are free: make room, or start once with --no-backup"
        )
    save(database, target, force=True)
    return target


def copy(source: sqlite3.Connection, target: Path) -> None:
    """What a connection sees, as a new file that is on disk when this returns. Raises BackupError when the copy is
    damaged, of another program or of a newer runstated."""
    with open(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "rb") as file:
        with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as connection:
            # A step at a time goes to the disk, so that no commit of the daemon waits behind all of it.
            source.backup(connection, pages=PAGES_COPIED, progress=lambda *_: os.fsync(file.fileno()))
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()  # one file, without a log beside it
            check(connection)
        os.fsync(file.fileno())


@contextlib.contextmanager
def reading(database: Path) -> Iterator[sqlite3.Connection]:
    """A connection that sees one moment of a database and changes nothing: not even a log that a crash has left is
    copied into the file."""
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # only now does the transaction begin
        yield connection


def check(connection: sqlite3.Connection) -> None:
    """Raises BackupError unless it is a sound database of ours, of a version that we know."""
    try:
        (word,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        application, _ = schema.identify(connection)
    except (sqlite3.DatabaseError, schema.NewerFile, schema.ForeignFile) as error:
        raise BackupError(str(error)) from error
    if word != "ok":
        raise BackupError(f"the copy is damaged, and so is what it was made from: {word}")
    if application != schema.APPLICATION_ID:
        raise BackupError("the file is empty")


@contextlib.contextmanager
def part_of(target: Path) -> Iterator[Path]:
    """A name beside ``target`` for what is not done yet; nothing is left there."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        for path in (part, part.with_name(f"{part.name}-journal")):
            path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Names that were changed in it are on disk when this returns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_of(target: Path, database: Path) -> bool:
    """Whether a name is one of the files that the daemon works with."""
    if target.parent.resolve() != database.parent.resolve():
        return False
    return target.name in (database.name, f"{database.name}-wal", f"{database.name}-shm") or (
        target.name.startswith("runstated.")
    )


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"

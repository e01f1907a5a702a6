"""The SQLite file: one writer, one reader, WAL. The only file that knows aiosqlite.

Commits and reads by key run where they are called, in the loop's thread: a hop to another thread and back costs more
than they do. Only while the disk is slow do commits go to the writer's thread. Long reads, checkpoints and backups are
always on other threads; a lock keeps a checkpoint and a commit on the one writer apart. aiosqlite has no public call
for "run this function on the connection's thread"; ``_execute`` is it, and ``check`` makes sure that it is there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import aiosqlite

from runstated.domain.answers import Listing
from runstated.domain.tables import Row, Table
from runstated.settings import (
    DISK_KEPT_BYTES,
    PAGES_KEPT_MIN,
    PAGES_KEPT_SHARE,
    PAGES_SHRUNK,
    WAL_BYTES_MIN,
    WAL_CHECKPOINT_BYTES,
    WAL_SHARE,
)
from runstated.store import files, schema
from runstated.store.backup import BackupError, before_upgrade
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed, Database
from runstated.store.errors import IOERR

log = logging.getLogger(__name__)
T = TypeVar("T")

VERSION_MIN = (3, 35)  # RETURNING
PAGES_CACHED_KIB = 16 * 1024
CHECKED_PAGES_MAX = 8_192  # 32 MiB: a larger file is not checked whole at start, it would take seconds
RESTART_MS = 10  # how long the writer waits for readers when the WAL is to start anew
PAGES_MAX = 2**32 - 2  # SQLite's own
SYNCS_LOOKED_AT = 1_000
SLOW_S = 0.005  # the disk is slow when one sync in a hundred takes this ...
VERY_SLOW_S = 0.020  # ... or one has taken this in the last ...
SLOW_FOR_S = 60.0  # ... so many seconds
BUSY_MS = 5_000  # nobody else writes; a backup may hold the file for a moment


class StoreError(Exception):
    """The database cannot be opened; the message says which file and why."""


class Store:
    """An open database file. ``write`` and ``run_read`` run a function on the thread of their connection."""

    def __init__(self, path: Path, sync: Literal["full", "normal"]) -> None:
        self.path = path
        self.sync = sync
        self.instance = ""
        self.id = ""
        self.files = files.Files(path)
        self.folds: Callable[[], None] = lambda: None  # told before a checkpoint
        self.database: Database  # of the writer
        self._lock = threading.Lock()  # one at a time on the writer
        self._syncs: deque[bool] = deque(maxlen=SYNCS_LOOKED_AT)  # whether each took SLOW_S
        self._slow_syncs = 0
        self._slow_until_s = 0.0
        self._is_log_suspect = False  # a sync of it has failed
        self._is_writer_lost = False  # its connection has failed in a way that only a new one gets out of
        self._writer: aiosqlite.Connection | None = None
        self._reader: aiosqlite.Connection | None = None
        self._keeper: aiosqlite.Connection | None = None
        self._opening = asyncio.Lock()
        self._is_bounded = False

    @classmethod
    async def open(
        cls, path: Path, sync: Literal["full", "normal"] = "full", *, new_id: str = "", backup: bool = True
    ) -> Store:
        """Opens or creates the file, checks it and brings it to the present schema; ``backup``: saving it before.
        ``new_id``: for a database that has no id yet.

        Raises StoreError when the file is damaged, foreign, newer than this program, or cannot be written.
        """
        check()
        store = cls(path, sync)
        try:
            # A path that cannot be opened is found out here: aiosqlite's thread would say so to a loop that has ended.
            sqlite3.connect(path).close()
            await store._open_writer()
            if backup:
                await store._save_before_upgrade()
            number = int(new_id or files.make_id(), 16)
            store.instance, store.id = await store.write(lambda connection: _prepare(connection, number))
            store.database.batch = store.database.last_batch()
            store._reader = await _connect(path, _read_only)
            store._keeper = await _connect(path, _keep)
            store.files = files.Files(path)
        except (sqlite3.Error, schema.NewerFile, schema.ForeignFile, BackupError) as error:
            await store.close()
            raise StoreError(f"cannot open the database {path}: {error}") from error
        return store

    # ------------------------------------------------------------------ commits

    @property
    def batch(self) -> int:
        """The number of the last commit."""
        return self.database.batch

    def commit(self, batch: Batch, *, durable: bool = True) -> None:
        """Writes a batch, in the caller's thread; see Database.commit. Raises CommitFailed."""
        began_s = perf_counter()
        with self._lock:
            self._commit(batch, durable)
        if durable:
            self._count(perf_counter() - began_s)

    async def commit_aside(self, batch: Batch, *, durable: bool = True) -> None:
        """The same on the writer's thread. Raises CommitFailed."""
        await _on_thread(self._writer, lambda _: self.commit(batch, durable=durable))

    def _commit(self, batch: Batch, durable: bool = True) -> None:
        if self._is_log_suspect:
            raise CommitFailed(sqlite3.OperationalError("disk I/O error: the log could not be copied"), False)
        try:
            self.database.commit(batch, durable=durable)
        except CommitFailed as failed:
            self._suspect(failed.cause)
            self._is_writer_lost |= failed.took_place is None
            raise

    async def commit_again(self, batch: Batch) -> None:
        """Writes all that is owed after a commit has failed. After a failed sync nothing is appended to that log: what
        it covered may be lost although a later sync succeeds, and would hide all that follows. So the log is copied
        into the file first, and begins anew. It waits for those who read, and fails where one goes on for long.

        Raises CommitFailed, sqlite3.Error.
        """
        if self._is_writer_lost:
            await self.reopen()
        await self._need_writer()
        if self._is_log_suspect:
            self.folds()
        self.files.copying(True)
        try:
            await _on_thread(self._writer, lambda _: self._commit_again(batch))
        finally:
            self.files.copying(False)

    def _commit_again(self, batch: Batch) -> None:
        with self._lock:
            connection = self.database.connection
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self.database.batch = self.database.last_batch()
            if self._is_log_suspect:
                self.files.is_log_empty = True  # by us, until something is written
                if not _checkpoint(connection, "TRUNCATE"):
                    raise sqlite3.OperationalError("the log cannot be copied: somebody reads it")
                self._is_log_suspect = False
            self._commit(batch)
            self.files.is_log_empty = False

    def _suspect(self, error: BaseException) -> None:
        """It may have been a sync of the log that failed."""
        code: int = getattr(error, "sqlite_errorcode", IOERR) & 0xFF  # told from Python 3.11 on
        self._is_log_suspect |= code == IOERR

    def is_slow(self) -> bool:
        """Whether commits are to go to the writer's thread, so that the loop does not wait for the disk, nor for what
        that thread does with the writer now."""
        if self._slow_until_s and perf_counter() > self._slow_until_s:
            self._slow_until_s = 0.0
        return bool(self._slow_until_s) or self._slow_syncs * 100 > SYNCS_LOOKED_AT or self._lock.locked()

    def _count(self, took_s: float) -> None:
        is_slow = took_s >= SLOW_S
        if len(self._syncs) == SYNCS_LOOKED_AT:
            self._slow_syncs -= self._syncs[0]
        self._syncs.append(is_slow)
        self._slow_syncs += is_slow
        if took_s >= VERY_SLOW_S:
            self._slow_until_s = perf_counter() + SLOW_FOR_S

    # ------------------------------------------------------------------ reads

    def read(self, table: Table[Any], columns: tuple[str, ...], value: Hashable) -> Row | None:
        """The row with that key, in the caller's thread. Raises sqlite3.Error."""
        with self._lock:
            return self.database.read(table, columns, value)

    def look(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a function that reads little, in the caller's thread. Raises sqlite3.Error."""
        with self._lock:
            return function(self.database.connection)

    async def list(self, asked: Listing) -> list[Any]:
        """The objects that a listing names, read on the reader's thread. Raises sqlite3.Error."""
        return await self.run_read(lambda connection: Database(connection).list(asked))

    async def write(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Runs ``function`` on the writer's thread; it begins and ends its own transaction.

        Raises sqlite3.OperationalError when the file cannot be opened again after an earlier failure.
        """
        await self._need_writer()
        return await _on_thread(self._writer, lambda connection: self._alone(connection, function))

    def _alone(self, connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            return function(connection)

    async def run_read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Runs ``function`` in one short read transaction on the reader's thread."""
        return await _on_thread(self._reader, lambda connection: _in_transaction(connection, function))

    # ------------------------------------------------------------------ upkeep

    async def checkpoint(self) -> bool:
        """Copies the WAL into the file, on a connection of its own, so that the writer goes on meanwhile. False when
        the WAL does not start anew, because somebody reads for longer than we wait.

        The WAL starts anew only when all of it was copied, and a busy writer is always a few pages ahead: so the
        writer itself copies those last few, which takes it no longer than a commit. That is what bounds the WAL.
        """
        self.folds()
        self.files.copying(True)
        try:
            await _on_thread(self._keeper, lambda connection: _checkpoint(connection, "PASSIVE"))
            return await self.write(self._restart_log)
        except sqlite3.Error as error:
            self._suspect(error)
            raise
        finally:
            self.files.copying(False)

    async def fold(self) -> bool:
        """Copies what is in the WAL into the file; whether that was all of it: nobody is waited for. The writer does
        it: it has the WAL open, and another connection would look for that by its name."""
        return await self.write(lambda connection: _checkpoint(connection, "PASSIVE"))

    async def shrink(self) -> bool:
        """Gives a few of the free pages back, if there are more than are kept; whether there are more to come. The file
        itself gets smaller with the next checkpoint."""
        try:
            return await self.write(_shrink)
        except sqlite3.Error as error:
            self._suspect(error)
            raise

    def is_log_long(self) -> bool:
        """Whether the WAL should be copied into the file: when that is worth it, and before it takes the room that the
        copy needs."""
        size = self.wal_bytes()
        return size > WAL_BYTES_MIN and size > self._log_bytes_max()

    def is_disk_small(self) -> bool:
        """Whether the WAL has to be kept shorter than is best, for the room that is left."""
        return self._log_bytes_max() < WAL_CHECKPOINT_BYTES

    def _log_bytes_max(self) -> int:
        room = free_bytes(self.path.parent) + self.wal_bytes()
        return max(WAL_BYTES_MIN, min(WAL_CHECKPOINT_BYTES, room // WAL_SHARE))

    def _restart_log(self, connection: sqlite3.Connection) -> bool:
        # The WAL keeps its size, which is faster than to let it grow again; on a small disk a part of it, so that a
        # restart, which deletes it, has room for its own.
        kept = WAL_BYTES_MIN // 2 if self.is_disk_small() else WAL_CHECKPOINT_BYTES
        connection.execute(f"PRAGMA journal_size_limit = {kept}").fetchone()
        # Our own reads are over in milliseconds. Nobody waits for a backup that reads for longer: it is tried again.
        connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}")
        try:
            is_anew = _checkpoint(connection, "RESTART")
        finally:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        self._bound(connection)
        return is_anew

    def _bound(self, connection: sqlite3.Connection) -> None:
        """On a small disk the file may grow only as far as leaves room for the WAL, where each new page stands first:
        so the copy always fits, SQLite refuses a statement instead of a COMMIT, and what needs no new page works on."""
        pages, was_bounded, self._is_bounded = PAGES_MAX, self._is_bounded, self.is_disk_small()
        if not self._is_bounded and not was_bounded:
            return
        if self._is_bounded:
            growth = (free_bytes(self.path.parent) - DISK_KEPT_BYTES) // 2
            pages = max(1, (self.database_bytes() + growth) // _pragma(connection, "page_size"))
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()  # SQLite takes no less than there are

    def wal_bytes(self) -> int:
        """Size of the WAL file."""
        return _size(files.log_of(self.path))

    def database_bytes(self) -> int:
        """Size of the database file."""
        return _size(self.path)

    async def reopen(self) -> None:
        """Gives up the writer's connection; whoever needs one next opens it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await _close(writer)

    async def close(self) -> None:
        """Closes all connections; the last one folds the WAL into the file."""
        for connection in (self._keeper, self._reader, self._writer):
            if connection is not None:
                await _close(connection)
        self._keeper = self._reader = self._writer = None

    async def _save_before_upgrade(self) -> None:
        _, version = await self.write(schema.identify)
        if 0 < version < schema.VERSION:
            saved = await asyncio.to_thread(before_upgrade, self.path, version)
            log.info("the database of version %d was saved in %s before its upgrade", version, saved)

    async def _need_writer(self) -> None:
        async with self._opening:  # an upkeep and a retry must not open two
            if self._writer is None:
                await self._open_writer()

    async def _open_writer(self) -> None:
        def settings(connection: sqlite3.Connection) -> None:
            schema.identify(connection)  # before anything of it is changed
            _pragmas(connection)
            connection.execute(f"PRAGMA synchronous = {self.sync}")
            self._is_bounded = False  # a new connection
            self._bound(connection)

        self._writer = await _connect(self.path, settings)
        raw: sqlite3.Connection = self._writer._conn
        known = getattr(self, "database", None)
        self.database = Database(raw, is_synced=self.sync == "full")
        self.database.batch = known.batch if known is not None else 0
        self._is_writer_lost = False


def check() -> None:
    """Refuses a SQLite or an aiosqlite that cannot do what we need.

    Raises StoreError naming the version.
    """
    if sqlite3.sqlite_version_info < VERSION_MIN:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: runstated needs 3.35 or newer")
    if not callable(getattr(aiosqlite.Connection, "_execute", None)):
        raise StoreError(
            f"aiosqlite {aiosqlite.__version__} has no way to run a function on its thread: install another version"
        )


async def _connect(path: Path, settings: Callable[[sqlite3.Connection], object]) -> aiosqlite.Connection:
    # cached_statements: every verb's SQL is prepared once and stays so.
    connection = await aiosqlite.connect(path, isolation_level=None, cached_statements=512, check_same_thread=False)
    try:
        await _on_thread(connection, settings)
    except BaseException:
        await _close(connection)
        raise
    return connection


async def _on_thread(connection: aiosqlite.Connection | None, function: Callable[[sqlite3.Connection], T]) -> T:
    if connection is None:
        raise sqlite3.OperationalError("the database is closed")
    result: T = await connection._execute(function, connection._conn)  # type: ignore[no-untyped-call]
    return result


async def _close(connection: aiosqlite.Connection) -> None:
    try:
        await connection.close()
    except sqlite3.Error as error:
        log.warning("closing a database connection failed: %s", error)


def _pragmas(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts only before the first table
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = OFF")  # no constraint of ours spans tables
    connection.execute(f"PRAGMA cache_size = -{PAGES_CACHED_KIB}")
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # done by ``Store.checkpoint``, beside the writer
    connection.execute(f"PRAGMA journal_size_limit = {WAL_CHECKPOINT_BYTES}")


def _read_only(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    connection.execute("PRAGMA query_only = ON")
    # A first read joins the WAL. Else the writer's connection, given up on a full disk, is the last one in it and takes
    # its index file along; a new index needs room, so that nothing could be looked at until the disk has some again.
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _keep(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    connection.execute("PRAGMA wal_autocheckpoint = 0")


def _checkpoint(connection: sqlite3.Connection, mode: str) -> bool:
    """Whether all was copied, with nobody in the way."""
    is_busy, pages, copied = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return not is_busy and pages == copied


def _shrink(connection: sqlite3.Connection) -> bool:
    kept = max(PAGES_KEPT_MIN, _pragma(connection, "page_count") // PAGES_KEPT_SHARE)
    surplus = _pragma(connection, "freelist_count") - kept
    if surplus > 0:
        # A script runs it to its end: ``execute`` takes a statement without columns for done after its first step.
        connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, PAGES_SHRUNK)})")
    return surplus > 0


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


def _in_transaction(connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute("BEGIN")
    try:
        return function(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _prepare(connection: sqlite3.Connection, number: int) -> tuple[str, str]:
    """Checks the file, migrates it, and gives this database's own short name and its id, made of ``number`` if it has
    none yet."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if pages <= CHECKED_PAGES_MAX:
        (word,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if word != "ok":
            raise sqlite3.DatabaseError(f"it is damaged ({word}): put it aside or restore a backup")
    schema.migrate(connection)
    connection.execute("BEGIN IMMEDIATE")
    name = schema.instance(connection) or secrets.token_hex(2)
    id = files.give_id(connection, name, number, again=False)
    connection.execute("COMMIT")
    return name, id


ROOM_UNKNOWN = 2**50


def free_bytes(directory: Path) -> int:
    """The room that we may use on the disk of a directory; without a bound where the system does not tell."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return ROOM_UNKNOWN


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

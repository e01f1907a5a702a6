"""One connection to the database, and what a store does on it: batches, reads by key, loads, lists. Synchronous."""

from __future__ import annotations

import sqlite3
from collections.abc import Hashable, Iterator
from typing import Any

from runstated.domain.answers import Listing
from runstated.domain.tables import Row, Table
from runstated.store import sql
from runstated.store.batch import Batch
from runstated.store.files import BATCH

COUNTERS = "CREATE TABLE counters (counter TEXT NOT NULL PRIMARY KEY, value BIGINT NOT NULL) WITHOUT ROWID"
NUMBER = "INSERT OR REPLACE INTO counters (counter, value) VALUES (?, ?)"


FAILURES = (sqlite3.Error, MemoryError)  # the latter is Python's word for SQLite's NOMEM


class CommitFailed(Exception):
    """A batch was not written. ``took_place``: False when nothing of it is on disk; True when all of it is, and only
    the answer was lost; None when nobody knows. To write it once more does no harm in any case: rows are replaced by
    their keys."""

    def __init__(self, cause: sqlite3.Error | MemoryError, took_place: bool | None) -> None:
        super().__init__(str(cause) or "out of memory")
        self.cause = cause
        self.took_place = took_place


class Database:
    """See the module. ``batch``: the number of the last commit."""

    def __init__(self, connection: sqlite3.Connection, *, is_synced: bool = True) -> None:
        self.connection = connection
        self.batch = 0
        self._syncs = is_synced  # whether a commit waits for the disk at all: see the setting ``sync``
        self._is_synced = is_synced

    def commit(self, batch: Batch, *, durable: bool = True) -> None:
        """Writes a batch; ``durable``: and waits until it is on disk. Each writes a number of its own, so that none is
        empty: its sync covers all before it. Raises CommitFailed."""
        connection, in_commit = self.connection, False
        try:
            if self._syncs and durable != self._is_synced:
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_synced = durable
            connection.execute("BEGIN IMMEDIATE")
            self._write(batch)
            connection.execute(NUMBER, (BATCH, self.batch + 1))
            in_commit = True
            connection.execute("COMMIT")
        except FAILURES as error:
            took_place = self._took_place() if in_commit else self._rolled_back()
            self.batch += took_place is True
            raise CommitFailed(error, took_place) from error
        self.batch += 1

    def _write(self, batch: Batch) -> None:
        connection = self.connection
        for table, rows in batch.rows.items():
            gone = [key if isinstance(key, tuple) else (key,) for key, row in rows.items() if row is None]
            if gone:
                connection.executemany(sql.of(table).remove, gone)
        for table, rows in batch.rows.items():
            kept = [row for row in rows.values() if row is not None]
            if len(kept) == 1:
                connection.execute(sql.of(table).put, kept[0])
            elif kept:
                connection.executemany(sql.of(table).put, kept)
        if batch.numbers:
            connection.executemany(NUMBER, batch.numbers.items())

    def _rolled_back(self) -> bool | None:
        """False: nothing was committed; None where even that cannot be made sure of."""
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except FAILURES:
            return None  # the connection is of no use any more; a new one sees what is on disk
        return False

    def _took_place(self) -> bool | None:
        """Whether a COMMIT that failed took place."""
        if self._rolled_back() is None:
            return None
        try:
            return self.last_batch() == self.batch + 1
        except FAILURES:
            return None

    # ------------------------------------------------------------------ reading

    def last_batch(self) -> int:
        """The number of the last commit on disk."""
        row = self.connection.execute("SELECT value FROM counters WHERE counter = ?", (BATCH,)).fetchone()
        return int(row[0]) if row else 0

    def read(self, table: Table[Any], columns: tuple[str, ...], value: Hashable) -> Row | None:
        """The row with that key, or with that other unique key."""
        values = value if isinstance(value, tuple) else (value,)
        row: Row | None = self.connection.execute(sql.read(table, columns), values).fetchone()
        return row

    def load(self, table: Table[Any]) -> Iterator[Row]:
        """The rows of live objects, in the order of their keys."""
        yield from self.connection.execute(sql.of(table).load)

    def list(self, asked: Listing) -> list[Any]:
        """The objects that a listing names."""
        statement, values = sql.listing(asked)
        return [asked.table.made(row) for row in self.connection.execute(statement, values)]

    def numbers(self) -> dict[str, int]:
        """The counters."""
        found = dict(self.connection.execute("SELECT counter, value FROM counters WHERE counter NOT LIKE 'instance:%'"))
        found.pop(BATCH, None)
        return found

    def oldest_event(self) -> int:
        """The number of the first event that is kept; 0 where there is none."""
        (first,) = self.connection.execute("SELECT min(event) FROM events").fetchone()
        return first or 0

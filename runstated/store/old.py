"""What is old on disk: the keys of rows that may go, oldest first and never many. Nothing is removed here."""

from __future__ import annotations

import sqlite3
from collections.abc import Hashable, Iterator
from typing import Any

from runstated.domain.core import EVENTS_TABLE
from runstated.domain.money import LEDGER, RESERVATIONS
from runstated.domain.replies import REPLIES
from runstated.domain.runs import RUNS
from runstated.domain.tables import Row, Table

ENDED = f"""SELECT {", ".join(column.name for column in RUNS.columns)} FROM {RUNS.name}
    WHERE tidied = 0 AND ended_ms IS NOT NULL ORDER BY ended_ms LIMIT ?"""
# Something in them may be held for as long as its holder beats: those are passed over, and hold up nobody.
TIDIED = f"""SELECT run, space FROM {RUNS.name}
    WHERE tidied = 1 AND ended_ms IS NOT NULL AND ended_ms < ?
    AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.run = runs.run) ORDER BY ended_ms LIMIT ?"""
OLD_RESERVATIONS = f"""SELECT reservation, space, ended_ms FROM {RESERVATIONS.name}
    WHERE ended_ms IS NOT NULL AND is_held = 0 ORDER BY ended_ms LIMIT ?"""
LEDGER_OF = f"SELECT entry FROM {LEDGER.name} WHERE reservation = ? ORDER BY entry LIMIT ?"
OLD_EVENTS = f"SELECT event, at_ms FROM {EVENTS_TABLE.name} ORDER BY event LIMIT ?"
EVENTS = f"SELECT count(*), coalesce(max(event), 0) FROM {EVENTS_TABLE.name}"
OLD_REPLIES = f"""SELECT session, space, request, until_ms FROM {REPLIES.name}
    WHERE until_ms IS NOT NULL ORDER BY until_ms LIMIT ?"""
REPLIES_OF = f"""SELECT count(*), coalesce(sum(bytes), 0) FROM {REPLIES.name}
    WHERE session = ? AND until_ms IS NOT NULL"""
OLD_REPLIES_OF = f"""SELECT space, request, until_ms FROM {REPLIES.name}
    WHERE session = ? AND until_ms IS NOT NULL ORDER BY until_ms LIMIT ?"""


def ended_runs(connection: sqlite3.Connection, many: int) -> Iterator[Row]:
    """The rows of runs that have ended, of which something else may be left."""
    return connection.execute(ENDED, (many,))


def of_run(connection: sqlite3.Connection, table: Table[Any], run: str, many: int) -> list[Hashable]:
    """The keys of a table's rows that belong to a run."""
    names = ", ".join(table.key)
    found = connection.execute(f"SELECT {names} FROM {table.name} WHERE {table.run} = ? LIMIT ?", (run, many))
    return [row if len(row) > 1 else row[0] for row in found]


def tidied_runs(connection: sqlite3.Connection, before_ms: int, many: int) -> list[tuple[str, str]]:
    """Runs, each with its space, that have ended before, of which nothing else is left."""
    return connection.execute(TIDIED, (before_ms, many)).fetchall()


def reservations(connection: sqlite3.Connection, many: int) -> Iterator[tuple[str, str, int]]:
    """Reservations that have ended: each with its space, and when."""
    return connection.execute(OLD_RESERVATIONS, (many,))


def ledger_of(connection: sqlite3.Connection, reservation: str, many: int) -> list[int]:
    return [entry for (entry,) in connection.execute(LEDGER_OF, (reservation, many))]


def events(connection: sqlite3.Connection, many: int) -> list[tuple[int, int]]:
    """The numbers of the oldest events, and their times."""
    return connection.execute(OLD_EVENTS, (many,)).fetchall()


def count_events(connection: sqlite3.Connection) -> tuple[int, int]:
    """How many events there are, and the number of the newest; 0 where there is none. Reads them all."""
    number, newest = connection.execute(EVENTS).fetchone()
    return number, newest


def replies(connection: sqlite3.Connection, many: int) -> Iterator[tuple[str, str, int, int]]:
    """Replies that are kept for a day: caller, space, request, until when."""
    return connection.execute(OLD_REPLIES, (many,))


def size_of_replies(connection: sqlite3.Connection, caller: str) -> tuple[int, int]:
    """How many of them a caller has, and their characters."""
    number, size = connection.execute(REPLIES_OF, (caller,)).fetchone()
    return number, size


def replies_of(connection: sqlite3.Connection, caller: str, many: int) -> list[tuple[str, int, int]]:
    """The oldest of a caller's: space, request, until when."""
    return connection.execute(OLD_REPLIES_OF, (caller, many)).fetchall()

"""The version of a file, and how an older one becomes a newer one.

Versions 1 to 8 are those of the engine in SQL: ``history``. From version 9 on the tables are those that the nouns
declare. A step that has been released is never changed; a change is a new one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from runstated.domain import nouns
from runstated.domain.tables import Table
from runstated.store import history, sql, to_version_9
from runstated.store.database import COUNTERS

APPLICATION_ID = 0x52554E53  # "RUNS", so that `file` and we can tell our database from another

# SQLite's own spelling of two things that the portable text says in general.
_SHORT_ROWS = tuple(
    f"CREATE TABLE {table}"
    for table in ("counters", "replies", "queue_counts", "job_counts", "queue_needs", "units", "arrivals", "once_keys")
)

Step = Callable[[sqlite3.Connection], None]


class NewerFile(Exception):
    """The database was written by a newer runstated; nothing was changed."""


class ForeignFile(Exception):
    """The file is a database of another program; nothing was changed."""


def _as_released(script: str) -> Step:
    def run(connection: sqlite3.Connection) -> None:
        for statement in script.split(";"):
            if statement.strip():
                connection.execute(_for_sqlite(statement))

    return run


def _for_sqlite(statement: str) -> str:
    statement = statement.strip().replace("BIGINT NOT NULL PRIMARY KEY", "INTEGER NOT NULL PRIMARY KEY")
    return f"{statement} WITHOUT ROWID" if statement.startswith(_SHORT_ROWS) else statement


STEPS: tuple[Step, ...] = (*map(_as_released, history.VERSIONS), to_version_9.run)
VERSION = len(STEPS)


def create(connection: sqlite3.Connection, tables: tuple[Table[Any], ...] = nouns.TABLES) -> None:
    """Makes the tables of a new database."""
    connection.execute(COUNTERS)
    for table in tables:
        for statement in sql.create(table):
            connection.execute(statement)


def identify(connection: sqlite3.Connection) -> tuple[int, int]:
    """The file's application id and version, 0 and 0 for a new one. Changes nothing.

    Raises NewerFile or ForeignFile.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (tables or application):
        raise ForeignFile("the file is the database of another program")
    if version > VERSION:
        raise NewerFile(
            f"the database has version {version}, this runstated knows {VERSION}: install the newer runstated again"
        )
    return application, version


def instance(connection: sqlite3.Connection) -> str | None:
    """This database's own short name; None in a new one."""
    row = connection.execute("SELECT counter FROM counters WHERE counter LIKE 'instance:%'").fetchone()
    return row[0].partition(":")[2] if row else None


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the file to ``VERSION``, each step in a transaction of its own.

    Raises NewerFile or ForeignFile, before anything is changed.
    """
    application, version = identify(connection)
    if application != APPLICATION_ID:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    if version == 0:
        _in_transaction(connection, create, VERSION)
        return
    for step in range(version, VERSION):
        _in_transaction(connection, STEPS[step], step + 1)


def _in_transaction(connection: sqlite3.Connection, step: Step, version: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        step(connection)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise

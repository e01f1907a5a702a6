"""The tables, and how an older file becomes a newer one.

Each noun states its own tables (``SCHEMA`` in its file). ``MIGRATIONS`` is the ordered history: entry n brings a file
from version n to n + 1. A statement that has been released is never changed; a change is a new entry.
"""

import sqlite3

from runstated.domain import (
    barriers,
    budgets,
    jobs,
    keys,
    leases,
    limits,
    needs,
    once,
    queues,
    runs,
    sessions,
    slots,
    timers,
)

APPLICATION_ID = 0x52554E53  # "RUNS", so that `file` and we can tell our database from another

SCHEMA = """
CREATE TABLE counters (
    counter TEXT NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL CHECK (value > 0)
);
CREATE TABLE events (
    event BIGINT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    type TEXT NOT NULL,
    at_ms BIGINT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_of_run ON events (run, event);
CREATE TABLE replies (
    session TEXT NOT NULL,
    request BIGINT NOT NULL,
    fingerprint TEXT NOT NULL,
    reply TEXT NOT NULL,
    PRIMARY KEY (session, request)
);
"""

# Replies that are kept for a time of their own, for callers without a connection.
REPLIES_KEPT = """
ALTER TABLE replies ADD COLUMN until_ms BIGINT;
CREATE INDEX replies_due ON replies (until_ms) WHERE until_ms IS NOT NULL;
"""

# Events are read by their numbers only.
EVENTS_WITHOUT_INDEX = """
DROP INDEX events_of_run;
"""

# Each caller's replies are bounded by themselves.
REPLIES_OF_CALLER = """
ALTER TABLE replies ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
CREATE INDEX replies_of_caller ON replies (session, until_ms, bytes) WHERE until_ms IS NOT NULL;
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (SCHEMA, sessions.SCHEMA, leases.SCHEMA, runs.SCHEMA, once.SCHEMA, queues.SCHEMA),
    (
        leases.UNITS,
        runs.SCHEMA_2,
        queues.SCHEMA_2,
        needs.SCHEMA,
        limits.SCHEMA,
        slots.SCHEMA,
        budgets.SCHEMA,
        timers.SCHEMA,
        barriers.SCHEMA,
    ),
    (sessions.SCHEMA_3, keys.SCHEMA),
    # Tidying in small steps.
    (runs.SCHEMA_TIDIED,),
    (REPLIES_KEPT, timers.SCHEMA_ACKED),
    (queues.SCHEMA_TIDIED,),
    (EVENTS_WITHOUT_INDEX,),
    (
        runs.SCHEMA_8,
        leases.SCHEMA_8,
        queues.SCHEMA_8,
        limits.SCHEMA_8,
        sessions.SCHEMA_8,
        budgets.SCHEMA_8,
        REPLIES_OF_CALLER,
        once.SCHEMA_TRACEBACK,
        jobs.SCHEMA_TRACEBACK,
        jobs.SCHEMA_COUNTS,
    ),
)
VERSION = len(MIGRATIONS)


class NewerFile(Exception):
    """The database was written by a newer runstated; nothing was changed."""


class ForeignFile(Exception):
    """The file is a database of another program; nothing was changed."""


def statements() -> list[str]:
    """Every statement of the schema, one by one."""
    return [
        statement.strip() + ";"
        for scripts in MIGRATIONS
        for script in scripts
        for statement in script.split(";")
        if statement.strip()
    ]


# SQLite's own spelling of two things that the portable text says in general. Both save an index, and with it a page to
# write in nearly every batch: a 64-bit integer key is the row's own place if it is spelt INTEGER, and a table of short
# rows can be kept in its key's order.
_SHORT_ROWS = tuple(
    f"CREATE TABLE {table}"
    for table in ("counters", "replies", "queue_counts", "job_counts", "queue_needs", "units", "arrivals", "once_keys")
)


def for_sqlite(statement: str) -> str:
    """A statement of the schema as SQLite is to have it."""
    statement = statement.strip().replace("BIGINT NOT NULL PRIMARY KEY", "INTEGER NOT NULL PRIMARY KEY")
    return f"{statement} WITHOUT ROWID" if statement.startswith(_SHORT_ROWS) else statement


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
    for step in range(version, VERSION):
        connection.execute("BEGIN IMMEDIATE")
        for script in MIGRATIONS[step]:
            for statement in script.split(";"):
                if statement.strip():
                    connection.execute(for_sqlite(statement))
        connection.execute(f"PRAGMA user_version = {step + 1}")
        connection.execute("COMMIT")

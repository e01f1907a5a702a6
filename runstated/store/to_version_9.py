"""From version 8, the last of the engine in SQL, to version 9: each row says itself in which space it is, what is held
is told by leases alone, and live tables have no second unique index."""

from __future__ import annotations

import sqlite3

from runstated.domain import nouns
from runstated.store import sql

TABLES = (
    "keys", "sessions", "runs", "leases", "replies", "once_keys", "queues", "needs", "jobs", "job_counts", "limits",
    "pools", "budgets", "reservations", "ledger", "timers", "barriers", "arrivals", "events",
)  # fmt: skip

# Of each new table: what its columns are made from, and of which rows. ``old_`` are the tables as they were.
COPIES = {
    "keys": "SELECT id, space, name, permissions, hash, created_ms, revoked_ms FROM old_keys",
    "sessions": "SELECT session, space, worker, process, pid, command, key, transport, opened_ms FROM old_sessions",
    "runs": "SELECT run, space, name, parent, path, state, deadline_ms, owner, created_ms, ended_ms, is_group, tidied"
    " FROM old_runs",
    "leases": "SELECT token, r.space, kind, subject, l.run, session, request, length_ms, granted_ms,"
    " CASE kind WHEN 'slots' THEN coalesce((SELECT units FROM old_units WHERE old_units.token = l.token"
    " AND old_units.pool = l.subject), 0) ELSE 0 END,"
    " CASE kind WHEN 'job' THEN coalesce((SELECT CASE WHEN j.needs = 0 THEN q.needs ELSE j.needs END FROM old_jobs AS j"
    " JOIN old_queues AS q ON q.space = j.space AND q.queue = j.queue WHERE j.job = l.subject), 0) ELSE 0 END,"
    " '', proof FROM old_leases AS l JOIN old_runs AS r ON r.run = l.run",
    "replies": "SELECT p.session, request, coalesce(s.space, ''), fingerprint, reply, until_ms, bytes"
    " FROM old_replies AS p LEFT JOIN old_sessions AS s ON s.session = p.session"
    " WHERE until_ms IS NOT NULL OR s.session IS NOT NULL",
    "once_keys": "SELECT run, key, CASE state WHEN 'held' THEN 'open' ELSE state END, failures, takeovers, result,"
    " error, traceback, token FROM old_once_keys WHERE state IN ('done', 'failed') OR failures > 0 OR takeovers > 0",
    "queues": "SELECT space, queue, attempts, needs FROM old_queues",
    "jobs": "SELECT job, space, queue, run, key, state, attempt, needs, age, input, created_ms, due_ms, result, reason,"
    " traceback, token, ended_ms, finish FROM old_jobs",
    "job_counts": "SELECT run, queue, state, jobs, coalesce((SELECT max(finish) FROM old_jobs AS j WHERE j.run = c.run"
    " AND j.queue = c.queue AND j.state = c.state), 0) FROM old_job_counts AS c",
    "limits": "SELECT id, space, name, max, per_seconds, window_ms, used FROM old_limits",
    "pools": "SELECT id, space, name, max FROM old_pools",
    "budgets": "SELECT id, space, name, currency, scale, limit_minor, spent_minor, reserved_minor FROM old_budgets",
    "reservations": "SELECT reservation, b.space, budget, v.run, coalesce(r.path, '/' || v.run || '/'), token, v.state,"
    " left_minor, amount_minor, settle_by_ms, session, proof, charged_minor, assumed_minor, v.ended_ms,"
    " v.state = 'active' OR EXISTS (SELECT 1 FROM old_leases WHERE old_leases.token = v.token)"
    " FROM old_reservations AS v JOIN old_budgets AS b ON b.id = v.budget LEFT JOIN old_runs AS r ON r.run = v.run",
    "ledger": "SELECT entry, b.space, budget, reservation, kind, work_key, change_minor, balance_minor, at_ms"
    " FROM old_ledger AS l JOIN old_budgets AS b ON b.id = l.budget",
    "timers": "SELECT run, name, fire_ms, fired, acked FROM old_timers",
    "barriers": "SELECT run, name, target, released, (SELECT count(*) FROM old_arrivals AS a WHERE a.run = b.run"
    " AND a.name = b.name) FROM old_barriers AS b",
    "arrivals": "SELECT a.run, a.name, worker, released FROM old_arrivals AS a JOIN old_barriers AS b"
    " ON b.run = a.run AND b.name = a.name",
    "events": "SELECT event, coalesce(r.space, ''), e.run, coalesce(r.path, '/' || e.run || '/'), type, at_ms, data"
    " FROM old_events AS e LEFT JOIN old_runs AS r ON r.run = e.run",
}
# Who names a set of needs, and in which space.
NAMED = (
    "SELECT needs, space FROM old_queues WHERE needs > 0 UNION SELECT needs, space FROM old_jobs WHERE needs > 0"
    " ORDER BY needs, space"
)


def run(connection: sqlite3.Connection) -> None:
    """All tables of the nouns are made anew; nothing of what they say is lost."""
    for (index,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND sql NOT NULL"
    ).fetchall():
        connection.execute(f"DROP INDEX {index}")
    for table in (*TABLES, "units"):
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    declared = {table.name: table for table in nouns.TABLES}
    for name in TABLES:
        for statement in sql.create(declared[name]):
            connection.execute(statement)
    _share_no_needs(connection)
    for name, rows in COPIES.items():
        connection.execute(f"INSERT INTO {name} {rows}")
    for table in (*TABLES, "units"):
        connection.execute(f"DROP TABLE old_{table}")


def _share_no_needs(connection: sqlite3.Connection) -> None:
    """A set of needs is of one space now: one that several name (there is such a set: no needs at all) is copied."""
    texts = dict(connection.execute("SELECT needs, wants FROM old_needs").fetchall())
    taken: set[int] = set()
    last = max(texts, default=0)
    for needs, space in connection.execute(NAMED).fetchall():
        number = needs
        if needs in taken:
            number = last = last + 1
            for table in ("old_queues", "old_jobs"):
                connection.execute(
                    f"UPDATE {table} SET needs = ? WHERE needs = ? AND space = ?", (number, needs, space)
                )
        taken.add(needs)
        connection.execute("INSERT INTO needs (needs, space, text) VALUES (?, ?, ?)", (number, space, texts[needs]))
    connection.execute("UPDATE counters SET value = max(value, ?) WHERE counter = 'needs'", (last,))

"""From version 8, the last of the engine in SQL, to version 9: each row says itself in which space it is, what is held
is told by leases alone, and live tables have no second unique index."""

from __future__ import annotations

import json
import sqlite3

from runstated.domain import nouns
from runstated.store import sql
from runstated.store.database import COUNTERS

TABLES = (
    "keys", "sessions", "runs", "leases", "replies", "once_keys", "queues", "needs", "jobs", "job_counts", "limits",
    "pools", "budgets", "reservations", "ledger", "timers", "barriers", "arrivals", "events",
)  # fmt: skip

OTHERS = ("counters", "units")

# The space in the name of a session or a caller, see ``Access.session_name``; "" where there is none.
NAME = "substr(p.session, instr(p.session, '/') + 1)"
SPACE = f"substr({NAME}, instr({NAME}, ':') + 1, CAST({NAME} AS INTEGER))"

# Of each new table: what its columns are made from, and of which rows. ``old_`` are the tables as they were.
COPIES = {
    "keys": "SELECT id, space, name, permissions, hash, created_ms, revoked_ms FROM old_keys",
    "sessions": "SELECT session, space, worker, process, pid, command, key, transport, opened_ms FROM old_sessions",
    "runs": "SELECT run, space, name, parent, path, state, deadline_ms, owner, created_ms, ended_ms, is_group, tidied"
    " FROM old_runs",
    "leases": "SELECT token, r.space, kind, subject, l.run, session, request, length_ms, granted_ms,"
    " CASE kind WHEN 'slots' THEN coalesce((SELECT units FROM old_units WHERE old_units.token = l.token"
    " AND old_units.pool = l.subject), 0) ELSE 0 END,"
    " coalesce((SELECT t.needs FROM old_taken AS t WHERE t.token = l.token), 0),"
    " '', proof FROM old_leases AS l JOIN old_runs AS r ON r.run = l.run",
    "replies": f"SELECT p.session, request, {SPACE}, fingerprint, reply, until_ms, bytes"
    " FROM old_replies AS p LEFT JOIN old_sessions AS s ON s.session = p.session"
    " WHERE until_ms IS NOT NULL OR s.session IS NOT NULL",
    "once_keys": "SELECT run, key, CASE state WHEN 'held' THEN 'open' ELSE state END, failures, takeovers, result,"
    " error, traceback, token FROM old_once_keys WHERE state IN ('done', 'failed') OR failures > 0 OR takeovers > 0",
    "queues": "SELECT space, queue, attempts, needs FROM old_queues",
    "jobs": "SELECT job, space, queue, run, key, state, attempt, needs, age, input, created_ms, due_ms, result, reason,"
    " traceback, token, ended_ms, finish FROM old_jobs",
    "job_counts": "SELECT c.run, c.queue, c.state, c.jobs, coalesce(f.finish, 0) FROM old_job_counts AS c LEFT JOIN"
    " (SELECT run, queue, state, max(finish) AS finish FROM old_jobs GROUP BY run, queue, state) AS f"
    " ON f.run = c.run AND f.queue = c.queue AND f.state = c.state",
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
# What the jobs that run have taken: the set that they would take now, and the units that they took then.
RUNNING = (
    "SELECT l.token, j.space, CASE WHEN j.needs = 0 THEN q.needs ELSE j.needs END FROM old_leases AS l"
    " JOIN old_jobs AS j ON j.job = l.subject JOIN old_queues AS q ON q.space = j.space AND q.queue = j.queue"
    " WHERE l.kind = 'job' ORDER BY l.token"
)
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
    for table in (*TABLES, *OTHERS):
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    connection.execute(COUNTERS)
    connection.execute("INSERT INTO counters (counter, value) SELECT counter, value FROM old_counters")
    declared = {table.name: table for table in nouns.TABLES}
    for name in TABLES:
        for statement in sql.create(declared[name]):
            connection.execute(statement)
    _share_no_needs(connection)
    _note_taken(connection)
    for name, rows in COPIES.items():
        connection.execute(f"INSERT INTO {name} {rows}")
    for table in (*TABLES, *OTHERS, "taken"):
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


def _note_taken(connection: sqlite3.Connection) -> None:
    """A lease tells by its set of needs which units its job has. Where the needs of the queue were declared anew since,
    it names a set of its own, of just the units that it holds."""
    connection.execute("CREATE TABLE old_taken (token BIGINT NOT NULL, needs BIGINT NOT NULL)")
    texts = dict(connection.execute("SELECT needs, text FROM needs").fetchall())
    for token, space, needs in connection.execute(RUNNING).fetchall():
        held = connection.execute(
            "SELECT pool, units FROM old_units WHERE token = ? ORDER BY pool", (token,)
        ).fetchall()
        if sorted(tuple(each) for each in json.loads(texts.get(needs, "{}")).get("slots", ())) != held:
            ((last,),) = connection.execute("SELECT coalesce(max(needs), 0) FROM needs")
            needs = last + 1
            text = json.dumps({"slots": held, "limits": [], "budgets": []}, separators=(",", ":"))
            connection.execute("INSERT INTO needs (needs, space, text) VALUES (?, ?, ?)", (needs, space, text))
            connection.execute("UPDATE counters SET value = max(value, ?) WHERE counter = 'needs'", (needs,))
        connection.execute("INSERT INTO old_taken (token, needs) VALUES (?, ?)", (token, needs))

"""Every version of the schema before the engine in memory, as it was released: a file of any of them is brought to the
last of these first. Never changed.
"""

# ruff: noqa: E501

from __future__ import annotations

VERSIONS: tuple[str, ...] = (
    """
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
CREATE TABLE sessions (
    session TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    worker TEXT NOT NULL,
    process TEXT NOT NULL,
    pid INTEGER NOT NULL,
    command TEXT NOT NULL,
    opened_ms BIGINT NOT NULL
);
CREATE TABLE leases (
    token BIGINT NOT NULL PRIMARY KEY,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    run TEXT NOT NULL,
    session TEXT NOT NULL,
    request BIGINT NOT NULL,
    length_ms BIGINT NOT NULL CHECK (length_ms > 0),
    granted_ms BIGINT NOT NULL
);
CREATE INDEX leases_of_session ON leases (session, request);
CREATE TABLE runs (
    run TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT,
    parent TEXT,
    path TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'stopped', 'finished', 'expired')),
    deadline_ms BIGINT,
    owner TEXT,
    created_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    tidied INTEGER NOT NULL DEFAULT 0,
    CHECK ((state = 'active') = (ended_ms IS NULL))
);
CREATE UNIQUE INDEX runs_by_path ON runs (path);
CREATE UNIQUE INDEX runs_by_name ON runs (space, name) WHERE parent IS NULL AND state = 'active';
CREATE INDEX runs_by_deadline ON runs (deadline_ms) WHERE state = 'active' AND deadline_ms IS NOT NULL;
CREATE INDEX runs_by_owner ON runs (owner) WHERE state = 'active' AND owner IS NOT NULL;
CREATE INDEX runs_untidied ON runs (ended_ms) WHERE state <> 'active' AND tidied = 0;
CREATE INDEX runs_active ON runs (space, created_ms) WHERE state = 'active';
CREATE TABLE once_keys (
    run TEXT NOT NULL,
    key TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'held', 'done', 'failed')),
    failures INTEGER NOT NULL DEFAULT 0,
    takeovers INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    error TEXT,
    token BIGINT,
    PRIMARY KEY (run, key),
    CHECK ((state = 'done') = (result IS NOT NULL)),
    CHECK (state <> 'failed' OR failures > 0)
);
CREATE TABLE queues (
    space TEXT NOT NULL,
    queue TEXT NOT NULL,
    attempts INTEGER NOT NULL CHECK (attempts BETWEEN 1 AND 100),
    PRIMARY KEY (space, queue)
);
CREATE TABLE queue_counts (
    space TEXT NOT NULL,
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    jobs BIGINT NOT NULL,
    PRIMARY KEY (space, queue, state)
);
CREATE TABLE jobs (
    job TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    queue TEXT NOT NULL,
    run TEXT NOT NULL,
    key TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ready', 'delayed', 'running', 'succeeded', 'failed')),
    attempt INTEGER NOT NULL DEFAULT 0,
    needs BIGINT NOT NULL DEFAULT 0,
    age BIGINT NOT NULL,
    due_ms BIGINT,
    input TEXT NOT NULL,
    result TEXT,
    reason TEXT,
    token BIGINT,
    created_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    CHECK ((state = 'delayed') = (due_ms IS NOT NULL)),
    CHECK ((state = 'succeeded') = (result IS NOT NULL)),
    CHECK ((state IN ('succeeded', 'failed')) = (ended_ms IS NOT NULL))
);
CREATE UNIQUE INDEX jobs_by_key ON jobs (run, queue, key);
CREATE INDEX jobs_ready ON jobs (queue, run, needs, age) WHERE state = 'ready';
CREATE INDEX jobs_due ON jobs (due_ms) WHERE state = 'delayed';
""",
    """
CREATE TABLE units (
    token BIGINT NOT NULL,
    pool TEXT NOT NULL,
    units BIGINT NOT NULL CHECK (units > 0),
    PRIMARY KEY (token, pool)
);
CREATE INDEX units_of_pool ON units (pool);
ALTER TABLE runs ADD COLUMN is_group INTEGER NOT NULL DEFAULT 0;
ALTER TABLE queues ADD COLUMN needs BIGINT NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN finish BIGINT;
CREATE INDEX jobs_by_finish ON jobs (run, finish) WHERE finish IS NOT NULL;
CREATE TABLE queue_needs (
    space TEXT NOT NULL,
    queue TEXT NOT NULL,
    needs BIGINT NOT NULL,
    PRIMARY KEY (space, queue, needs)
);
INSERT INTO queue_needs (space, queue, needs) SELECT space, queue, 0 FROM queues;
CREATE TABLE needs (
    needs BIGINT NOT NULL PRIMARY KEY,
    wants TEXT NOT NULL
);
CREATE UNIQUE INDEX needs_by_wants ON needs (wants);
CREATE TABLE limits (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    max BIGINT NOT NULL CHECK (max > 0),
    per_seconds BIGINT NOT NULL CHECK (per_seconds BETWEEN 1 AND 86400),
    window_ms BIGINT NOT NULL DEFAULT 0,
    used BIGINT NOT NULL DEFAULT 0 CHECK (used BETWEEN 0 AND max)
);
CREATE UNIQUE INDEX limits_by_name ON limits (space, name);
CREATE INDEX limits_used ON limits (id) WHERE used > 0;
CREATE TABLE pools (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    max BIGINT NOT NULL CHECK (max > 0)
);
CREATE UNIQUE INDEX pools_by_name ON pools (space, name);
CREATE TABLE budgets (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    currency TEXT NOT NULL,
    scale INTEGER NOT NULL CHECK (scale BETWEEN 0 AND 9),
    limit_minor BIGINT NOT NULL CHECK (limit_minor > 0),
    spent_minor BIGINT NOT NULL DEFAULT 0 CHECK (spent_minor >= 0),
    reserved_minor BIGINT NOT NULL DEFAULT 0 CHECK (reserved_minor >= 0),
    CHECK (spent_minor + reserved_minor <= limit_minor)
);
CREATE UNIQUE INDEX budgets_by_name ON budgets (space, name);
CREATE TABLE reservations (
    reservation TEXT NOT NULL PRIMARY KEY,
    budget TEXT NOT NULL,
    run TEXT NOT NULL,
    token BIGINT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'settled', 'released')),
    left_minor BIGINT NOT NULL CHECK (left_minor >= 0),
    charged_minor BIGINT NOT NULL DEFAULT 0 CHECK (charged_minor >= 0),
    settle_by_ms BIGINT NOT NULL,
    CHECK (state = 'active' OR left_minor = 0)
);
CREATE INDEX reservations_by_token ON reservations (token) WHERE state = 'active';
CREATE INDEX reservations_due ON reservations (settle_by_ms) WHERE state = 'active';
CREATE TABLE ledger (
    entry BIGINT NOT NULL PRIMARY KEY,
    budget TEXT NOT NULL,
    reservation TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('reserve', 'release', 'charge', 'overrun')),
    work_key TEXT,
    change_minor BIGINT NOT NULL,
    balance_minor BIGINT NOT NULL,
    at_ms BIGINT NOT NULL
);
CREATE UNIQUE INDEX ledger_by_work ON ledger (reservation, work_key) WHERE work_key IS NOT NULL;
CREATE TABLE timers (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    fire_ms BIGINT NOT NULL,
    fired INTEGER NOT NULL DEFAULT 0 CHECK (fired IN (0, 1)),
    PRIMARY KEY (run, name)
);
CREATE INDEX timers_due ON timers (fire_ms) WHERE fired = 0;
CREATE TABLE barriers (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    target BIGINT NOT NULL CHECK (target > 0),
    released INTEGER NOT NULL DEFAULT 0 CHECK (released IN (0, 1)),
    PRIMARY KEY (run, name)
);
CREATE TABLE arrivals (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    worker TEXT NOT NULL,
    PRIMARY KEY (run, name, worker)
);
""",
    """
ALTER TABLE sessions ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN transport TEXT NOT NULL DEFAULT 'unix';
CREATE TABLE keys (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    permissions TEXT NOT NULL,
    hash TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    revoked_ms BIGINT
);
""",
    """
CREATE INDEX runs_tidied ON runs (ended_ms) WHERE state <> 'active' AND tidied = 1;
""",
    """
ALTER TABLE replies ADD COLUMN until_ms BIGINT;
CREATE INDEX replies_due ON replies (until_ms) WHERE until_ms IS NOT NULL;
ALTER TABLE timers ADD COLUMN acked INTEGER NOT NULL DEFAULT 0;
""",
    """
CREATE INDEX jobs_by_needs ON jobs (needs, queue) WHERE needs > 0;
""",
    """
DROP INDEX events_of_run;
""",
    """
CREATE INDEX runs_active_by_path ON runs (path) WHERE state = 'active';
CREATE INDEX leases_by_run ON leases (run);
DROP INDEX units_of_pool;
CREATE INDEX units_by_pool ON units (pool, units);
ALTER TABLE leases ADD COLUMN proof TEXT NOT NULL DEFAULT '';
DROP TABLE queue_needs;
CREATE INDEX queues_by_needs ON queues (needs) WHERE needs > 0;
DROP INDEX limits_used;
UPDATE leases SET session = coalesce(
    (SELECT transport || '/' || length(space) || ':' || space || '/' || key || '/' || CASE transport WHEN 'http' THEN substr(sessions.session, 31) ELSE sessions.session END FROM sessions WHERE sessions.session = leases.session), session);
UPDATE runs SET owner = coalesce((SELECT transport || '/' || length(space) || ':' || space || '/' || key || '/' || CASE transport WHEN 'http' THEN substr(sessions.session, 31) ELSE sessions.session END FROM sessions WHERE sessions.session = runs.owner), owner);
UPDATE replies SET session = coalesce(
    (SELECT transport || '/' || length(space) || ':' || space || '/' || key || '/' || CASE transport WHEN 'http' THEN substr(sessions.session, 31) ELSE sessions.session END FROM sessions WHERE sessions.session = replies.session),
    (SELECT 'http/' || length(space) || ':' || space || '/' || key FROM sessions
        WHERE transport = 'http' AND substr(sessions.session, 1, 29) = replies.session LIMIT 1),
    session);
UPDATE sessions SET session = transport || '/' || length(space) || ':' || space || '/' || key || '/' || CASE transport WHEN 'http' THEN substr(sessions.session, 31) ELSE sessions.session END;
CREATE INDEX reservations_of_budget ON reservations (budget, settle_by_ms);
ALTER TABLE reservations ADD COLUMN session TEXT NOT NULL DEFAULT '';
ALTER TABLE reservations ADD COLUMN proof TEXT NOT NULL DEFAULT '';
UPDATE reservations SET session = coalesce(
    (SELECT leases.session FROM leases WHERE leases.token = reservations.token), '');
ALTER TABLE reservations ADD COLUMN amount_minor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE reservations ADD COLUMN assumed_minor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE reservations ADD COLUMN ended_ms BIGINT;
DROP INDEX ledger_by_work;
CREATE UNIQUE INDEX ledger_of_reservation ON ledger (reservation, work_key);
UPDATE reservations SET amount_minor = coalesce((SELECT -change_minor FROM ledger
    WHERE ledger.reservation = reservations.reservation AND ledger.kind = 'reserve'), left_minor),
    ended_ms = CASE WHEN state <> 'active' THEN coalesce((SELECT max(at_ms) FROM ledger
    WHERE ledger.reservation = reservations.reservation), settle_by_ms) END;
CREATE INDEX reservations_ended ON reservations (ended_ms) WHERE ended_ms IS NOT NULL;
DROP INDEX reservations_by_token;
CREATE INDEX reservations_of_token ON reservations (token);
ALTER TABLE replies ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
CREATE INDEX replies_of_caller ON replies (session, until_ms, bytes) WHERE until_ms IS NOT NULL;
ALTER TABLE once_keys ADD COLUMN traceback TEXT;
ALTER TABLE jobs ADD COLUMN traceback TEXT;
DROP TABLE queue_counts;
CREATE TABLE job_counts (
    run TEXT NOT NULL,
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    jobs BIGINT NOT NULL,
    PRIMARY KEY (run, queue, state)
);
INSERT INTO job_counts (run, queue, state, jobs)
    SELECT run, queue, state, count(*) FROM jobs GROUP BY run, queue, state;
""",
)

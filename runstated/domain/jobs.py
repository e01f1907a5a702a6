"""Jobs: their rows, the counts of them by state, and what is told of them. The rules are in queues.py."""

import zlib
from dataclasses import dataclass

from runstate import wire
from runstated.domain import leases, runs
from runstated.store.tx import Tx, must
from runstated.waits import Topic

# Version 8: where a handler has failed.
SCHEMA_TRACEBACK = """
ALTER TABLE jobs ADD COLUMN traceback TEXT;
"""

# Version 8: counts by run, so that jobs of ended runs are not counted.
SCHEMA_COUNTS = """
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
"""

KIND = "job"
BACKOFF_MS_MIN = 500
BACKOFF_MS_MAX = 30_000

COLUMNS = "job, space, queue, run, key, state, attempt, input, result, reason, token, traceback"


@dataclass(frozen=True, slots=True)
class Job:
    """A row, as far as the rules need it."""

    job: str
    space: str
    queue: str
    run: str
    key: str
    state: str
    attempt: int
    input: str
    result: str | None
    reason: str | None
    token: int | None
    traceback: str | None


def signal(job: Job) -> Topic:
    return leases.topic(KIND, job.job, job.run)


def row(tx: Tx, job: str, space: str | None = None) -> Job | None:
    """The job; whatever its space, for what the daemon does on its own."""
    row = tx.one(f"SELECT {COLUMNS} FROM jobs WHERE job = :job", job=job)
    found = Job(*row) if row else None
    return found if found and space in (None, found.space) else None


def heads(tx: Tx, queue: str, paths: tuple[str, str]) -> list[tuple[int, str, int]]:
    """The oldest ready job of each set of needs in the active runs between two paths: its age, run and set, oldest
    first. One look into the index for each run, and for each set that ready jobs of the run have."""
    low, high = paths
    rows = tx.all(
        "WITH RECURSIVE places (run, needs) AS ("
        "SELECT runs.run, (SELECT min(jobs.needs) FROM jobs WHERE jobs.queue = :queue AND jobs.run = runs.run"
        " AND jobs.state = 'ready') FROM runs WHERE runs.path >= :low AND runs.path < :high AND runs.state = 'active'"
        " AND (runs.deadline_ms IS NULL OR runs.deadline_ms > :now)"
        " UNION ALL SELECT places.run, (SELECT min(jobs.needs) FROM jobs WHERE jobs.queue = :queue"
        " AND jobs.run = places.run AND jobs.state = 'ready' AND jobs.needs > places.needs)"
        " FROM places WHERE places.needs IS NOT NULL)"
        " SELECT (SELECT min(jobs.age) FROM jobs WHERE jobs.queue = :queue AND jobs.run = places.run"
        " AND jobs.needs = places.needs AND jobs.state = 'ready'), places.run, places.needs"
        " FROM places WHERE places.needs IS NOT NULL",
        queue=queue,
        low=low,
        high=high,
        now=tx.now_ms,
    )
    oldest: dict[int, tuple[int, str, int]] = {}
    for age, run, number in sorted(rows):
        oldest.setdefault(number, (age, run, number))
    return list(oldest.values())


def needs_and_age(tx: Tx, job: Job) -> tuple[int, int]:
    """The number of the set that a job needs, its queue's if it names none, and its age."""
    row = tx.one(
        "SELECT CASE WHEN jobs.needs = 0 THEN queues.needs ELSE jobs.needs END, jobs.age FROM jobs JOIN queues"
        " ON queues.space = jobs.space AND queues.queue = jobs.queue WHERE jobs.job = :job",
        job=job.job,
    )
    assert row is not None, "a job that was read has a row, and a queue"
    return row[0], row[1]


def attempts(tx: Tx, job: Job) -> int:
    """How often a job is tried."""
    row = tx.one(
        "SELECT attempts FROM queues WHERE space = :space AND queue = :queue", space=job.space, queue=job.queue
    )
    assert row is not None, "a job's queue exists"
    return int(row[0])


def of_run(tx: Tx, run: str, many: int) -> list[str]:
    """The jobs of a run, at most ``many``."""
    return [job for (job,) in tx.all("SELECT job FROM jobs WHERE run = :run LIMIT :many", run=run, many=many)]


def move(
    tx: Tx,
    job: Job,
    state: str,
    *,
    attempt: int | None = None,
    token: int | None = None,
    due_ms: int | None = None,
    reason: str | None = None,
    traceback: str | None = None,
    ended_ms: int | None = None,
    counted: bool = True,
) -> None:
    changed = tx.run(
        "UPDATE jobs SET state = :state, attempt = :attempt, token = :token, due_ms = :due_ms, reason = :reason,"
        " traceback = :traceback, ended_ms = :ended_ms WHERE job = :job AND state = :before",
        job=job.job,
        before=job.state,
        state=state,
        attempt=job.attempt if attempt is None else attempt,
        token=job.token if token is None else token,
        due_ms=due_ms,
        reason=reason,
        traceback=traceback,
        ended_ms=ended_ms,
    )
    must(changed == 1, "a job is moved from the state it was read in")
    if counted:
        count(tx, job.run, job.queue, job.state, state)


def count(tx: Tx, run: str, queue: str, before: str | None, after: str | None) -> None:
    """Keeps the counts by state, which are for display only."""
    for state, change in ((before, -1), (after, 1)):
        if state is not None:
            tx.run(
                "INSERT INTO job_counts (run, queue, state, jobs) VALUES (:run, :queue, :state, :change)"
                " ON CONFLICT (run, queue, state) DO UPDATE SET jobs = job_counts.jobs + :change",
                run=run,
                queue=queue,
                state=state,
                change=change,
            )


def view(job: Job) -> wire.JobView:
    return wire.JobView(
        job=job.job,
        state=job.state,
        attempt=job.attempt,
        result=job.result,
        reason=job.reason,
        traceback=job.traceback,
    )


def seen(tx: Tx, job: Job) -> wire.JobView:
    """The job as it is for those who ask: what its run's end has cut off is cancelled."""
    if job.state in ("succeeded", "failed") or runs.refusal(runs.get_any(tx, job.run), tx.now_ms) is None:
        return view(job)
    return cut_off(job)


def cut_off(job: Job) -> wire.JobView:
    """A job whose run has ended before it has."""
    return wire.JobView(job=job.job, state="cancelled", attempt=job.attempt, reason="scope_cancelled")


def ended_since(tx: Tx, run: str, after: int) -> list[tuple[int, wire.JobView]]:
    """The jobs of a group that have ended since a cursor, in that order: (cursor, job)."""
    rows = tx.all(
        f"SELECT finish, {COLUMNS} FROM jobs WHERE run = :run AND finish > :after ORDER BY finish",
        run=run,
        after=after,
    )
    return [(row[0], view(Job(*row[1:]))) for row in rows]


def backoff_ms(job: str, attempt: int) -> int:
    """The pause after a failed attempt: doubling from half a second to 30 s, with up to 25 % of jitter either way.

    The jitter comes from the job's id and attempt, so that a batch of jobs that failed together does not return
    together, and a replay gives the same times.
    """
    pause = min(BACKOFF_MS_MAX, BACKOFF_MS_MIN * 2 ** min(attempt - 1, 10))
    share = zlib.crc32(f"{job}/{attempt}".encode()) / 0xFFFFFFFF
    return int(max(BACKOFF_MS_MIN, min(BACKOFF_MS_MAX, pause * (0.75 + share / 2))))


def emit(tx: Tx, event: str, run: str, job: str, key: str, queue: str, **more: object) -> None:
    data = {"scopeId": run, "taskId": job, "taskKey": key, "queue": queue, **more}
    tx.emit(event, run, data)

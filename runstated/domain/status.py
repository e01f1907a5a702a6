"""Status: what the daemon knows, for people. Reads only, and never more than ``limit`` rows of anything."""

from typing import Any

from runstate import wire
from runstated.domain import runs
from runstated.store.tx import Tx

ROWS_MAX = 10_000  # leases in one run; a reader must not keep its transaction for long
HOLDINGS_PER_ENTRY = 10  # a worker rarely holds more; the list of workers stays readable
RESOURCES = {"slots": "pools", "limit": "limits", "budget": "budgets"}  # kinds of lines named by an id: their tables


def look(tx: Tx, request: wire.StatusGet) -> wire.StatusView:
    """The part of the status that is in the database; ``daemon`` and ``waits`` are filled in by who knows them."""
    limit = request.limit
    holding: dict[str, list[wire.Holding]] = {}
    for session, held in holdings(tx, limit * HOLDINGS_PER_ENTRY):
        holding.setdefault(session, []).append(held)
    views = [
        wire.WorkerView(
            session=session,
            worker=worker,
            pid=pid,
            command=command,
            connected=False,
            holdings=tuple(holding.get(session, ())),
        )
        for session, worker, pid, command in workers(tx, limit + 1)
    ]
    found_runs, found_queues = active_runs(tx, limit + 1), queues(tx, limit + 1)
    lists = {"runs": found_runs, "workers": views, "queues": found_queues}
    return wire.StatusView(
        runs=found_runs[:limit],
        workers=tuple(views[:limit]),
        queues=found_queues[:limit],
        names=names_awaited(tx, limit),
        more=tuple(name for name, entries in lists.items() if len(entries) > limit),
    )


def active_runs(tx: Tx, limit: int) -> tuple[wire.RunView, ...]:
    """The youngest active runs."""
    rows = tx.all(
        f"SELECT {runs.COLUMNS} FROM runs WHERE space = :space AND state = 'active'"
        " AND (deadline_ms IS NULL OR deadline_ms > :now) ORDER BY created_ms DESC LIMIT :limit",
        space=tx.caller.space,
        now=tx.now_ms,
        limit=limit,
    )
    return tuple(runs.view(runs.Run(*row), tx.now_ms) for row in rows)


def holdings(tx: Tx, limit: int) -> list[tuple[str, wire.Holding]]:
    """Who holds what: (session, holding), oldest first. A job is shown by its key, slots and budgets by their names."""
    rows = tx.all(
        "SELECT leases.session, leases.token, leases.kind, leases.subject, leases.granted_ms, leases.run,"
        " coalesce(jobs.key, pools.name, budgets.name) FROM leases JOIN runs ON runs.run = leases.run"
        " LEFT JOIN jobs ON leases.kind = 'job' AND jobs.job = leases.subject"
        " LEFT JOIN pools ON leases.kind = 'slots' AND pools.id = leases.subject"
        " LEFT JOIN budgets ON leases.kind = 'budget' AND budgets.id = leases.subject"
        " WHERE runs.space = :space ORDER BY leases.token LIMIT :limit",
        space=tx.caller.space,
        limit=limit,
    )
    return [
        (session, wire.Holding(token=token, kind=kind, name=name or subject, run=run, since_ms=since))
        for session, token, kind, subject, since, run, name in rows
    ]


def names_awaited(tx: Tx, limit: int) -> dict[str, str]:
    """The names of the limits, slots and budgets in whose lines calls of the space stand, by id."""
    lines = {line for call in tx.calls() if call.space == tx.caller.space for line in call.lines}
    found = {}
    for kind, *_, resource in sorted(line for line in lines if line[0] in RESOURCES)[:limit]:
        row = tx.one(f"SELECT name FROM {RESOURCES[kind]} WHERE id = :id", id=resource)
        if row is not None:
            found[resource] = row[0]
    return found


def workers(tx: Tx, limit: int) -> list[tuple[str, str, int, str]]:
    """The sessions: (session, worker label, pid, command line)."""
    rows = tx.all(
        "SELECT session, worker, pid, command FROM sessions WHERE space = :space ORDER BY opened_ms LIMIT :limit",
        space=tx.caller.space,
        limit=limit,
    )
    is_owner = not tx.caller.access.key  # a command line may say more than a key should see
    return [(session, worker, pid, command if is_owner else "") for session, worker, pid, command in rows]


def queues(tx: Tx, limit: int) -> tuple[wire.QueueView, ...]:
    """The queues, with how many of their jobs are in which state: those of active runs."""
    rows = tx.all(
        "SELECT queue, attempts FROM queues WHERE space = :space ORDER BY queue LIMIT :limit",
        space=tx.caller.space,
        limit=limit,
    )
    counts: dict[str, dict[str, int]] = {}
    for queue, state, jobs in tx.all(
        "SELECT job_counts.queue, job_counts.state, sum(job_counts.jobs) FROM job_counts"
        " JOIN runs ON runs.run = job_counts.run WHERE runs.space = :space AND runs.state = 'active'"
        " AND (runs.deadline_ms IS NULL OR runs.deadline_ms > :now) AND job_counts.jobs > 0"
        " GROUP BY job_counts.queue, job_counts.state",
        space=tx.caller.space,
        now=tx.now_ms,
    ):
        counts.setdefault(queue, {})[state] = jobs
    return tuple(
        wire.QueueView(queue=queue, attempts=attempts, counts=counts.get(queue, {})) for queue, attempts in rows
    )


def look_run(tx: Tx, request: wire.RunsStatus) -> wire.RunStatusView:
    """A run, the workers that hold work in it or below, and what waits there."""
    run = runs.get(tx, request.run)
    low, high = runs.below(run.path)
    rows = tx.all(
        "SELECT sessions.worker, leases.token, coalesce(jobs.key, pools.name, leases.subject) FROM leases"
        " JOIN runs ON runs.run = leases.run JOIN sessions ON sessions.session = leases.session"
        " LEFT JOIN jobs ON leases.kind = 'job' AND jobs.job = leases.subject"
        " LEFT JOIN pools ON leases.kind = 'slots' AND pools.id = leases.subject"
        " WHERE leases.kind <> 'budget' AND runs.path >= :low AND runs.path < :high ORDER BY leases.token LIMIT :many",
        low=low,
        high=high,
        many=ROWS_MAX,
    )
    held: dict[str, list[tuple[str, int | None]]] = {}
    for worker, token, name in rows:
        held.setdefault(worker, []).append((name, tx.expires_ms(token)))
    below = {name for (name,) in tx.all("SELECT run FROM runs WHERE path >= :low AND path < :high", low=low, high=high)}
    return wire.RunStatusView(
        run=runs.view(run, tx.now_ms),
        workers=tuple(
            wire.HolderView(
                worker=worker,
                holding=len(holds),
                lease_expires_ms=min((at for _, at in holds if at is not None), default=None),
                names=tuple(name for name, _ in holds),
            )
            for worker, holds in held.items()
        ),
        waiting=tuple(view for call in tx.calls() if (view := _waiting(call.request, below)) is not None),
    )


def _waiting(request: wire.WaitingRequest[Any], runs_below: set[str]) -> wire.WaitingView | None:
    """What a call waits for, if it waits in one of these runs."""
    if isinstance(request, wire.SlotsAcquire) and request.run in runs_below:
        return wire.WaitingView(kind="slots", name=request.pool, units=request.units)
    if isinstance(request, wire.LimitsTake) and request.run in runs_below:
        return wire.WaitingView(kind="limit", name=request.limit, units=request.units)
    if isinstance(request, (wire.OnceAcquire, wire.OnceGet)) and request.run in runs_below:
        return wire.WaitingView(kind="once", name=request.key)
    return None

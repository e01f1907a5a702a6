"""Status: what the daemon knows, for people. Reads memory only, and never more than ``limit`` of anything."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from typing import Any

from runstate import wire
from runstated.domain import budgets, jobs, limits, money, runs, slots
from runstated.domain.core import Core
from runstated.domain.holds import LEASES, Lease
from runstated.domain.jobs import JOBS
from runstated.domain.queues import QUEUES
from runstated.domain.runs import RUNS, Run
from runstated.domain.sessions import SESSIONS, Session
from runstated.domain.tables import Table

ROWS_MAX = 10_000  # leases in one run
HOLDINGS_PER_ENTRY = 10  # a worker rarely holds more; the list of workers stays readable
RESOURCES: dict[str, Table[Any]] = {  # kinds of lines named by an id
    slots.KIND: slots.POOLS,
    limits.KIND: limits.LIMITS,
    budgets.KIND: money.BUDGETS,
}


def look(core: Core, request: wire.StatusGet) -> wire.StatusView:
    """The part of the status that a space knows; ``daemon`` and ``waits`` are filled in by who knows them."""
    limit = request.limit
    held: dict[str, list[Lease]] = {}
    for lease in islice(core.live(LEASES).values(), limit * HOLDINGS_PER_ENTRY):  # the oldest first
        held.setdefault(lease.session, []).append(lease)
    workers = [_worker(core, session, held.get(session.session, [])) for session in _sessions(core, limit + 1)]
    found_runs, found_queues = _active_runs(core, limit + 1), _queues(core, limit + 1)
    lists: dict[str, tuple[Any, ...]] = {"runs": found_runs, "workers": tuple(workers), "queues": found_queues}
    return wire.StatusView(
        runs=found_runs[:limit],
        workers=tuple(workers[:limit]),
        queues=found_queues[:limit],
        names=names_awaited(core, limit),
        more=tuple(name for name, entries in lists.items() if len(entries) > limit),
    )


def _active_runs(core: Core, limit: int) -> tuple[wire.RunView, ...]:
    """The youngest active runs."""
    active = (run for run in reversed(core.live(RUNS).values()) if runs.refusal(run, core.now_ms) is None)
    return tuple(runs.view(run, core.now_ms) for run in islice(active, limit))


def _sessions(core: Core, limit: int) -> list[Session]:
    """The sessions, oldest first."""
    return nsmallest(limit, core.live(SESSIONS).values(), key=lambda session: session.opened_ms)


def _worker(core: Core, session: Session, held: list[Lease]) -> wire.WorkerView:
    is_owner = not core.caller.access.key  # a command line may say more than a key should see
    return wire.WorkerView(
        session=session.session,
        worker=session.worker,
        pid=session.pid,
        command=session.command if is_owner else "",
        connected=False,
        holdings=tuple(
            wire.Holding(
                token=lease.token,
                kind=lease.kind,
                name=name_of(core, lease),
                run=lease.run,
                since_ms=lease.granted_ms,
            )
            for lease in held
        ),
    )


def name_of(core: Core, lease: Lease) -> str:
    """What is held, in the user's words: a job by its key, slots and budgets by their names."""
    job = core.live(JOBS).get(lease.subject) if lease.kind == jobs.KIND else None
    if job is not None:
        return job.key
    table = RESOURCES.get(lease.kind)
    thing = core.live(table).get(lease.subject) if table is not None else None
    return thing.name if thing is not None else lease.subject


def names_awaited(core: Core, limit: int) -> dict[str, str]:
    """The names of the limits, slots and budgets in whose lines calls stand, by id."""
    lines = {line for call in core.calls() for line in call.lines if line[0] in RESOURCES}
    return {line[-1]: core.live(RESOURCES[line[0]])[line[-1]].name for line in sorted(lines)[:limit]}


def _queues(core: Core, limit: int) -> tuple[wire.QueueView, ...]:
    """The queues, with how many of their jobs are in which state: those of active runs."""
    counts: dict[str, dict[str, int]] = {}
    for run in core.live(RUNS).values():
        if runs.refusal(run, core.now_ms) is None:
            for count in jobs.counts_of(core, run.run):
                if count.jobs > 0:
                    of_queue = counts.setdefault(count.queue, {})
                    state = jobs.shown_state(count.state)
                    of_queue[state] = of_queue.get(state, 0) + count.jobs
    found = nsmallest(limit, core.live(QUEUES).values(), key=lambda queue: queue.queue)
    return tuple(
        wire.QueueView(queue=queue.queue, attempts=queue.attempts, counts=counts.get(queue.queue, {}))
        for queue in found
    )


def look_run(core: Core, request: wire.RunsStatus) -> wire.RunStatusView:
    """A run, the workers that hold work in it or below, and what waits there."""
    run = runs.get(core, request.run)
    held: dict[str, list[Lease]] = {}
    for lease in _leases_below(core, run):
        held.setdefault(core.worker_of.get(lease.session, ""), []).append(lease)
    return wire.RunStatusView(
        run=runs.view(run, core.now_ms),
        workers=tuple(
            wire.HolderView(
                worker=worker,
                holding=len(of_worker),
                lease_expires_ms=min(core.lease_epoch_ms + lease.expires for lease in of_worker),
                names=tuple(name_of(core, lease) for lease in of_worker),
            )
            for worker, of_worker in held.items()
        ),
        waiting=tuple(view for call in core.calls() if (view := _waiting(core, call.request, run)) is not None),
    )


def _leases_below(core: Core, run: Run) -> Iterable[Lease]:
    """What is held in a run and below it, oldest first."""
    found = (lease for each in runs.tree(run) for lease in core.holds.of_run(each.run) if lease.kind != budgets.KIND)
    return nsmallest(ROWS_MAX, found, key=lambda lease: lease.token)


def _waiting(core: Core, request: wire.WaitingRequest[Any], run: Run) -> wire.WaitingView | None:
    """What a call waits for, if it waits in that run or below it."""
    if not isinstance(request, wire.SlotsAcquire | wire.LimitsTake | wire.OnceAcquire | wire.OnceGet):
        return None
    found = core.live(RUNS).get(request.run)
    if found is None or not found.path.startswith(run.path):
        return None
    if isinstance(request, wire.SlotsAcquire):
        return wire.WaitingView(kind="slots", name=request.pool, units=request.units)
    if isinstance(request, wire.LimitsTake):
        return wire.WaitingView(kind="limit", name=request.limit, units=request.units)
    return wire.WaitingView(kind="once", name=request.key)

"""Jobs taken ahead: a worker of short handlers holds jobs that it has not begun, so that it need not ask for each.

    ready --admitted ahead--> reserved --started, completed, failed--> a delivery, which counts as an attempt
      ^                          |
      +--given back, lapse, death: no attempt is counted

To all but its holder a reserved job is ready. Nobody takes it from them, as they may be beginning it: where somebody
else waits for it, they are asked to give it back (``jobs.return``), and answer for each by ``queues.started`` or its
release. Only jobs without needs are taken ahead, and only while no other worker waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from runstate import wire
from runstated.domain import jobs, leases, runs
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.jobs import JOBS, Job
from runstated.domain.runs import RUNS, Run
from runstated.domain.waits import Topic


def started(core: Core, request: wire.QueuesStarted) -> wire.Ok:
    """Jobs of the caller that were taken ahead are begun: deliveries from now on. A repeat changes nothing."""
    for token in request.tokens:
        lease = leases.find(core, token, "")
        job = None if lease is None else of_lease(core, lease)
        if job is not None and job.state == "reserved":
            job.attempt += 1
            jobs.move(core, job, "running", reason=job.reason)
    return wire.Ok()


def of_lease(core: Core, lease: Lease) -> Job | None:
    """The job that a lease holds, while its run is active."""
    job = core.live(JOBS).get(lease.subject) if lease.kind == jobs.KIND else None
    run = None if job is None else core.live(RUNS).get(job.run)
    if job is None or run is None or job.token != lease.token or runs.refusal(run, core.now_ms) is not None:
        return None
    return job


def is_free(core: Core, lines: Iterable[Topic]) -> bool:
    """Whether nobody but the caller waits in these lines."""
    mine = (core.caller.session, core.caller.request_id)
    awaited = [line for line in lines if core.lines.is_awaited(line)]
    return all(call.away or call.key == mine for line in awaited for call in core.lines.line(line))


def reserve(core: Core, job: Job, lease_ms: int) -> Lease:
    """The caller holds the job, which it has not begun."""
    lease = leases.grant(core, jobs.KIND, job.job, job.run, lease_ms)
    job.token = lease.token
    jobs.move(core, job, "reserved", reason=job.reason)
    return lease


def ask_back(core: Core, run: Run, queue: str, many: int, *, below: bool) -> None:
    """A worker of this run waits for so many jobs: the holders of those that were taken ahead last are asked for
    them."""
    for job in reversed(jobs.reserved(core, queue)):
        where = core.live(RUNS).get(job.run)
        if many <= 0:
            return
        lease = core.holds.of_token.get(job.token or 0)
        is_own = lease is None or lease.session == core.caller.session
        if where is not None and not is_own and (run.run in runs.above(where) if below else run is where):
            ask_back_one(core, job)
            many -= 1


def ask_back_one(core: Core, job: Job) -> None:
    """Somebody waits for this job, which may be taken ahead."""
    lease = core.holds.of_token.get(job.token or 0)
    if job.state == "reserved" and lease is not None and not job.is_asked_back:
        job.is_asked_back = True
        core.push(lease.session, wire.JobsReturn(tokens=(lease.token,)))


def came_back(core: Core, session: str) -> None:
    """A session has its connection again: it may not have heard what it was asked for."""
    held = [lease for lease in core.holds.of_session(session) if lease.kind == jobs.KIND]
    found = [(lease.token, core.live(JOBS).get(lease.subject)) for lease in held]
    tokens = [token for token, job in found if job is not None and job.state == "reserved" and job.is_asked_back]
    for start in range(0, len(tokens), wire.LISTED_MAX):
        core.push(session, wire.JobsReturn(tokens=tuple(tokens[start : start + wire.LISTED_MAX])))

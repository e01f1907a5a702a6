"""Admission: which jobs a worker is given, as it asks for them.

What its queues are, and what becomes of a job, is said in queues.py; jobs that are taken ahead: ahead.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import ahead, budgets, jobs, leases, needs, queues, runs
from runstated.domain.answers import Parked, Refusal
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.jobs import Job
from runstated.domain.runs import Run
from runstated.domain.waits import StandPlace, Topic

GRANTED_BYTES_MAX = 4 * 1024 * 1024  # inputs in one reply: half of what a frame may be
GRANTED_JOBS_MAX = 50  # jobs in one reply


@dataclass(slots=True)
class Admission:
    """The jobs that a worker is given by one request."""

    grants: list[wire.JobGrant] = field(default_factory=list)
    bytes: int = 0  # of their inputs

    def is_full(self, core: Core, job: Job) -> bool:
        """Whether the job must wait until the worker comes back for more."""
        self.bytes += len(job.input.encode())
        is_large = self.bytes > GRANTED_BYTES_MAX or len(self.grants) >= GRANTED_JOBS_MAX
        return bool(self.grants) and (is_large or leases.too_many(core) is not None)

    def told(self) -> wire.JobsGranted:
        """They were taken oldest first, from whatever source, and are told source by source."""
        return wire.JobsGranted(jobs=tuple(sorted(self.grants, key=lambda grant: grant.source)))


def admit(core: Core, request: wire.QueuesAdmit) -> wire.JobsGranted | Refusal | Parked:
    """Up to the free places of each queue, oldest jobs first; waits while there are none. Where no place is free it
    gives what may be taken ahead, and does not wait."""
    sources = [_source_of(core, wanted, number) for number, wanted in enumerate(request.queues)]
    taken = Admission()
    blocked = needs.Blocked()
    while (found := _next(core, sources, blocked)) is not None:
        source, job = found
        too_many = leases.too_many(core)
        if too_many is not None and not taken.grants:
            return too_many
        if taken.is_full(core, job):
            return taken.told()  # the worker comes back for more
        taken.grants.append(_start(core, job, source.wanted.lease_ms, source.number))
        source.places -= 1
    for source in sources:
        _take_ahead(core, source, taken)
    if taken.grants or not any(wanted.places for wanted in request.queues):
        return taken.told()
    for source in sources:
        wanted = source.wanted
        ahead.ask_back(core, source.run, wanted.queue, wanted.places, below=wanted.below)
    signals = tuple(dict.fromkeys(runs.signal(wanted.run) for wanted in request.queues))
    return Parked(
        lines=tuple(dict.fromkeys((*(source.line for source in sources), *blocked.ages))),
        signals=signals,
        late=wire.JobsGranted(),
        aside=blocked.aside,
        ages=blocked.ages,
        stands=blocked.wants,
        at=blocked.at(),
    )


def granted(core: Core, request: wire.QueuesAdmit, held: list[Lease]) -> wire.JobsGranted:
    """What a worker was told that still holds these jobs. Raises Missing."""
    told = Admission()
    for lease in held:
        job = jobs.find(core, lease.subject)  # None: it was tidied with its run
        if job is not None:
            reservations = tuple(each.reservation for each in budgets.of_token(core, lease.token))
            told.grants.append(_grant(core, job, lease, _source(core, request, job), reservations))
    return told.told()


# ---------------------------------------------------------------------------------------------------- helpers


@dataclass(slots=True)
class Source:
    """Where a worker takes jobs from. ``places``: how many more it takes; ``number``: of the source in its request."""

    wanted: wire.AdmitFrom
    number: int
    run: Run
    line: Topic
    places: int


def _source_of(core: Core, wanted: wire.AdmitFrom, number: int) -> Source:
    run = runs.active(core, wanted.run)
    behind = not wanted.below and core.ahead(
        queues.line(wanted.queue, run.run)
    )  # it was woken before those of that line
    own = queues.line(wanted.queue, run.run, below=wanted.below)
    return Source(wanted, number, run, own, 0 if behind else wanted.places)


def _next(core: Core, sources: list[Source], blocked: needs.Blocked) -> tuple[Source, Job] | None:
    """The oldest ready job that has all it needs. Of each set of needs only the oldest job is looked at: what it lacks,
    the younger ones lack too."""
    heads = [
        (source, job)
        for source in sources
        if source.places
        for job in jobs.heads(core, source.wanted.queue, source.run.run, below=source.wanted.below)
    ]
    if len(sources) > 1:
        heads.sort(key=lambda head: (head[1].age, jobs.number(head[1])))
    for source, job in heads:
        wants = needs.get(core, queues.needs_of(core, job))
        if not wants or not needs.lacking(core, wants, _place(core, job), blocked):
            return source, job
        blocked.stand(runs.watch(job.run), job.age)
        if job.needs == needs.OF_QUEUE:
            blocked.stand(needs.watch(core.space, job.queue), job.age)
    return None


def _place(core: Core, job: Job) -> StandPlace:
    return needs.place(core, job.age, jobs.number(job))


def _start(core: Core, job: Job, lease_ms: int, source: int) -> wire.JobGrant:
    number = queues.needs_of(core, job)
    needs.name(core, number)
    lease = leases.grant(core, jobs.KIND, job.job, job.run, lease_ms, needs=number)
    core.must_sync |= job.age < core.wary_age  # one that ends its machine must not be attempt 1 for ever
    core.subscribe(runs.signal(job.run))  # the job may be of a child run, which the worker has not joined
    reason = job.reason
    job.token = lease.token
    job.attempt += 1
    jobs.move(core, job, "running", reason=reason)
    return _grant(core, job, lease, source, needs.take(core, needs.get(core, number), lease, _place(core, job)))


def _grant(core: Core, job: Job, lease: Lease, source: int, reservations: tuple[str, ...]) -> wire.JobGrant:
    return wire.JobGrant(
        token=lease.token,
        job=job.job,
        run=job.run,
        run_name=runs.in_memory(core, job.run).name,
        key=job.key,
        input=job.input,
        attempt=job.attempt + (job.state == "reserved"),
        source=source,
        reason=job.reason,
        reservations=reservations,
        secret=leases.secret_of(core, lease),
        ahead=job.state == "reserved",
    )


def _take_ahead(core: Core, source: Source, taken: Admission) -> None:
    """Adds jobs that the worker will begin later, while nobody else waits for them."""
    wanted = source.wanted
    for _ in range(wanted.ahead):
        heads = jobs.heads(core, wanted.queue, source.run.run, below=wanted.below)
        job = next((head for head in heads if not needs.get(core, queues.needs_of(core, head))), None)
        if job is None or leases.too_many(core) is not None or taken.is_full(core, job):
            return
        if not ahead.is_free(core, queues.lines_of(job.queue, runs.in_memory(core, job.run))):
            return
        lease = ahead.reserve(core, job, wanted.lease_ms)
        core.subscribe(runs.signal(job.run))
        taken.grants.append(_grant(core, job, lease, source.number, ()))


def _source(core: Core, request: wire.QueuesAdmit, job: Job) -> int:
    """Which of the request's queues a job was taken from."""
    above = runs.above(runs.in_memory(core, job.run))
    for source, wanted in enumerate(request.queues):
        if wanted.queue == job.queue and (wanted.run in above if wanted.below else wanted.run == job.run):
            return source
    return 0

"""Jobs: what they are, which of them are ready, the counts of them by state. The rules are in queues.py."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from runstate import wire
from runstated.domain import needs, runs
from runstated.domain.answers import must
from runstated.domain.core import Core
from runstated.domain.holds import topic
from runstated.domain.ready import Ready
from runstated.domain.runs import RUNS, Run
from runstated.domain.tables import UNSTORED, Index, Live, Table
from runstated.domain.waits import Topic

KIND = "job"
BACKOFF_MS_MIN = 500
BACKOFF_MS_MAX = 30_000
WAITING = ("ready", "delayed", "reserved", "running")


@dataclass(slots=True, eq=False)
class Job:
    """A job. ``state``: ready, delayed, reserved (see ahead.py), running, succeeded or failed. ``needs``: the number of
    its set (0: what its queue says). ``age``: the arrival number of the request that sent it. ``token``: of its latest
    delivery.
    ``finish``: where it stands among all jobs that have ended."""

    job: str
    space: str
    queue: str
    run: str
    key: str
    state: str
    attempt: int
    needs: int
    age: int
    input: str
    created_ms: int
    due_ms: int | None = None
    result: str | None = None
    reason: str | None = None
    traceback: str | None = None
    token: int | None = None
    ended_ms: int | None = None
    finish: int | None = None
    is_asked_back: bool = field(default=False, metadata=UNSTORED)  # of a reserved one


@dataclass(slots=True, eq=False)
class Count:
    """How many jobs of a queue in a run are in a state; ``finish``: of the one that has come to it last."""

    run: str
    queue: str
    state: str
    jobs: int = 0
    finish: int = 0


JOBS = Table(
    "jobs",
    Job,
    key=("job",),
    live=Live("state", WAITING),
    run="run",
    asked_by=(("run", "queue", "key"),),
    indexes=(Index("jobs_by_finish", ("run", "finish"), not_null="finish"),),
)
COUNTS = Table("job_counts", Count, key=("run", "queue", "state"), run="run")


@dataclass(slots=True)
class OfRun:
    """The jobs of an active run that are in memory, by queue and key; the counts, by queue and state; how many open
    jobs name each set of needs."""

    of_key: dict[tuple[str, str], Job] = field(default_factory=dict)
    counts: dict[tuple[str, str], Count] = field(default_factory=dict)
    naming: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class JustEnded:
    """Jobs of a run that are still in memory, in the order in which they have ended: all since ``after``."""

    after: int
    jobs: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Jobs:
    """The look-up tables."""

    of_run: dict[str, OfRun] = field(default_factory=dict)
    ready: Ready[Job] = field(default_factory=Ready)
    reserved: dict[str, dict[str, Job]] = field(default_factory=dict)  # by queue and id, in the order of reservation
    due: list[tuple[int, int, Job]] = field(default_factory=list)  # heap of (due, number, job)
    just_ended: dict[str, JustEnded] = field(default_factory=dict)  # by run; until they are durable


def signal(job: Job) -> Topic:
    """Those who wait for the job's end."""
    return topic(KIND, job.job, job.run)


def find(core: Core, job: str) -> Job | None:
    """The job, if there is one in this space. Raises Missing."""
    found = core.find(JOBS, job)
    return found if found is not None and found.space == core.space else None


def of_key(core: Core, run: Run, queue: str, key: str) -> Job | None:
    """The job of that key in the run. Raises Missing."""
    found = _of(core, run.run).of_key.get((queue, key))
    if found is not None or not run.has_rows:
        return found
    return core.fetched(JOBS, ("run", "queue", "key"), (run.run, queue, key))


def of_keys(core: Core, run: Run, queue: str, keys: Iterable[str]) -> dict[str, Job]:
    """The jobs that there are of these keys in the run, by key. Raises Missing, once for all of them."""
    known = _of(core, run.run).of_key
    found = {key: known.get((queue, key)) for key in keys}
    if run.has_rows:
        absent = [(run.run, queue, key) for key, job in found.items() if job is None]
        found |= {job.key: job for job in core.fetched_each(JOBS, ("run", "queue", "key"), absent)}
    return {key: job for key, job in found.items() if job is not None}


# ---------------------------------------------------------------------------------------------------- which are ready


def heads(core: Core, queue: str, run: str, *, below: bool) -> list[Job]:
    """The oldest ready job of each set of needs in a run, and in those below it where ``below``; oldest first."""

    def is_over(name: str) -> bool:
        found = core.live(RUNS).get(name)
        return found is None or runs.refusal(found, core.now_ms) is not None

    return core.index(Jobs).ready.heads(queue, run, below=below, is_over=is_over)


def _put_in(core: Core, job: Job) -> None:
    """The job is ready."""
    above = runs.above(runs.in_memory(core, job.run))
    core.index(Jobs).ready.add(above, job.queue, job.needs, (job.age, number(job)), job)


def _take_out(core: Core, job: Job) -> None:
    """The job starts."""
    taken = core.index(Jobs).ready.take(job.run, job.queue, job.needs)
    must(taken is job, "the oldest job starts first")


def reserved(core: Core, queue: str) -> list[Job]:
    """The jobs of a queue that are taken ahead, the last one last."""
    return list(core.index(Jobs).reserved.get(queue, {}).values())


def reserved_in(core: Core, run: str) -> list[Job]:
    """The jobs of a run that are taken ahead."""
    return [job for of_queue in core.index(Jobs).reserved.values() for job in of_queue.values() if job.run == run]


def _forget_reserved(core: Core, job: Job) -> None:
    job.is_asked_back = False
    of_queue = core.index(Jobs).reserved[job.queue]
    del of_queue[job.job]
    if not of_queue:
        del core.index(Jobs).reserved[job.queue]


def number(job: Job) -> int:
    """What is before the suffix of its id: orders those that were sent by one request."""
    return int(job.job[1:].partition("-")[0])


# ---------------------------------------------------------------------------------------------------- states


def add(core: Core, run: Run, new: Sequence[Job]) -> None:
    """New jobs of one queue and set of needs, ready."""
    first, known, above = new[0], _of(core, run.run), runs.above(run)
    ready = core.index(Jobs).ready
    for job in new:
        core.put(JOBS, job)
        known.of_key[job.queue, job.key] = job
        ready.add(above, job.queue, job.needs, (job.age, number(job)), job)
    known.naming[first.needs] = known.naming.get(first.needs, 0) + len(new)
    _count(core, first, "ready", len(new))


def move(core: Core, job: Job, state: str, *, due_ms: int | None = None, reason: str | None = None) -> None:
    """The job comes to another state, after all else of it was changed."""
    before, job.state, job.due_ms, job.reason = job.state, state, due_ms, reason
    if before == "ready":
        _take_out(core, job)
    elif before == "reserved":
        _forget_reserved(core, job)
    if state in ("succeeded", "failed"):
        _end(core, job)
    elif state == "ready":
        _put_in(core, job)
    elif state == "reserved":
        core.index(Jobs).reserved.setdefault(job.queue, {})[job.job] = job
    elif due_ms is not None:
        heapq.heappush(core.index(Jobs).due, (due_ms, number(job), job))
    _count(core, job, before, -1)
    _count(core, job, state, 1)
    core.put(JOBS, job)


def take_due(core: Core) -> Job | None:
    """The next delayed job whose pause is over."""
    due = core.index(Jobs).due
    while due and due[0][0] <= core.now_ms:
        due_ms, _, job = heapq.heappop(due)
        if job.due_ms == due_ms and core.live(JOBS).get(job.job) is job:
            return job
    return None


def next_due(core: Core) -> int | None:
    """When the next pause may be over."""
    due = core.index(Jobs).due
    return due[0][0] if due else None


def _end(core: Core, job: Job) -> None:
    just_ended = core.index(Jobs).just_ended
    if not just_ended:
        core.when_durable(lambda: _forget_ended(core))
    if job.run not in just_ended:
        just_ended[job.run] = JustEnded(last_finish(core, job.run))
    job.ended_ms, job.finish = core.now_ms, core.next("finish")
    just_ended[job.run].jobs.append(job)
    naming = _of(core, job.run).naming
    naming[job.needs] -= 1
    if not naming[job.needs]:
        del naming[job.needs]
    needs.forget(core, job.needs)


def _forget_ended(core: Core) -> None:
    """They leave memory."""
    index = core.index(Jobs)
    for run, ended in index.just_ended.items():
        known = index.of_run.get(run) or OfRun()
        for job in ended.jobs:
            known.of_key.pop((job.queue, job.key), None)
    index.just_ended.clear()


def ended_after(core: Core, run: str, after: int) -> list[Job] | None:
    """The jobs of a run that have ended after that finish number; None where some of them are on disk only."""
    found = core.index(Jobs).just_ended.get(run)
    if found is None or after < found.after:
        return None
    return [job for job in found.jobs if (job.finish or 0) > after]


def _count(core: Core, job: Job, state: str, change: int) -> None:
    """Keeps the counts by state."""
    counts = _of(core, job.run).counts
    count = counts.get((job.queue, state))
    if count is None:
        count = counts[job.queue, state] = Count(job.run, job.queue, state)
    count.jobs += change
    if change > 0 and job.finish is not None:
        count.finish = job.finish
    core.put(COUNTS, count)


# ---------------------------------------------------------------------------------------------------- memory


def load(core: Core) -> None:
    """After the objects were loaded: the look-up tables."""
    for count in core.live(COUNTS).values():
        _of(core, count.run).counts[count.queue, count.state] = count
    for job in core.live(JOBS).values():
        known = _of(core, job.run)
        known.of_key[job.queue, job.key] = job
        known.naming[job.needs] = known.naming.get(job.needs, 0) + 1
        needs.name(core, job.needs)
        if job.state == "ready":
            _put_in(core, job)
        elif job.state == "reserved":
            core.index(Jobs).reserved.setdefault(job.queue, {})[job.job] = job
        elif job.due_ms is not None:
            heapq.heappush(core.index(Jobs).due, (job.due_ms, number(job), job))


def run_ended(core: Core, run: str) -> None:
    """In a run that is over jobs are found by their ids only."""
    index = core.index(Jobs)
    index.ready.forget(run)
    for job in reserved_in(core, run):
        _forget_reserved(core, job)
    known = core.index(Jobs).of_run.pop(run, None)
    if known is not None:
        for number, jobs in known.naming.items():
            needs.forget(core, number, jobs)


def _of(core: Core, run: str) -> OfRun:
    of_run = core.index(Jobs).of_run
    known = of_run.get(run)
    if known is None:
        known = of_run[run] = OfRun()
    return known


# ---------------------------------------------------------------------------------------------------- what is told


def shown_state(state: str) -> str:
    """What others are told: a job that is taken ahead is ready."""
    return "ready" if state == "reserved" else state


def view(job: Job) -> wire.JobView:
    return wire.JobView(
        job=job.job,
        state=shown_state(job.state),
        attempt=job.attempt,
        result=job.result,
        reason=None if job.state == "running" else job.reason,  # then it is that of the delivery before
        traceback=job.traceback,
    )


def seen(job: Job, run: Run, now_ms: int) -> wire.JobView:
    """The job as it is for those who ask: what its run's end has cut off is cancelled."""
    if job.state in ("succeeded", "failed") or runs.refusal(run, now_ms) is None:
        return view(job)
    return cut_off(job)


def cut_off(job: Job) -> wire.JobView:
    """A job whose run has ended before it has."""
    return wire.JobView(job=job.job, state="cancelled", attempt=job.attempt, reason="scope_cancelled")


def last_finish(core: Core, run: str) -> int:
    """The finish number of the job of an active run that has ended last; 0 if none has."""
    return max((count.finish for count in counts_of(core, run)), default=0)


def counts_of(core: Core, run: str) -> list[Count]:
    """The counts of an active run."""
    known = core.index(Jobs).of_run.get(run)
    return [] if known is None else list(known.counts.values())


def of_run(core: Core, run: str, many: int) -> list[Job]:
    """The open jobs of an active run, at most ``many``."""
    known = core.index(Jobs).of_run.get(run)
    return [] if known is None else list(islice((job for job in known.of_key.values() if job.state in WAITING), many))


def backoff_ms(job: str, attempt: int) -> int:
    """The pause after a failed attempt: doubling from half a second to 30 s, with up to 25 % of jitter either way.

    The jitter comes from the job's id and attempt, so that a batch of jobs that failed together does not return
    together, and a replay gives the same times.
    """
    pause = min(BACKOFF_MS_MAX, BACKOFF_MS_MIN * 2 ** min(attempt - 1, 10))
    share = zlib.crc32(f"{job}/{attempt}".encode()) / 0xFFFFFFFF
    return int(max(BACKOFF_MS_MIN, min(BACKOFF_MS_MAX, pause * (0.75 + share / 2))))


def emit(core: Core, event: str, run: Run, job: Job, **more: object) -> None:
    data = {"scopeId": run.run, "taskId": job.job, "taskKey": job.key, "queue": job.queue, **more}
    core.emit(event, run.run, run.path, data)

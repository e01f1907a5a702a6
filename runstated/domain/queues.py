"""Queues: work handed to worker processes.

    send --> ready --admit--> running --complete----------------------> succeeded
              ^  ^              |---fail, attempts left--> delayed
              |  +--due---------|-----------------------------+
              |                 |---fail, attempts used up, no retry---> failed
              |                 |---lapse, death, attempts used up-----> failed
              +-----------------+---lapse, death, attempts left
              +-----------------+---given back (not counted)
    ready | delayed | running --its run ends--> cancelled (read through the run's state)

A queue belongs to the space, a job to a run. Delivery n has ``attempt`` n, and a delivery that ends by death counts, so
a job that kills its workers ends. The same key in a run is the same job, finished or failed too. Workers stand in the
lines (queue, run) of their queues; a job that becomes ready wakes the line of its own run and of each run above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from runstate import wire
from runstated.domain import ahead, budgets, jobs, leases, needs, payloads, runs
from runstated.domain.answers import Conflict, NotFound, Parked, Refusal, ValidationFailed
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.jobs import JOBS, Job
from runstated.domain.runs import RUNS, Run
from runstated.domain.tables import Table
from runstated.domain.waits import Topic

KIND = jobs.KIND
DUE_IN_ONE_STEP = 200


@dataclass(slots=True, eq=False)
class Queue:
    """A queue. ``needs``: the set that its workers have declared last."""

    space: str
    queue: str
    attempts: int
    needs: int = 0


QUEUES = Table("queues", Queue, key=("space", "queue"))


def line(queue: str, run: str, *, below: bool = True) -> Topic:
    """Where workers stand who take jobs of ``queue`` from ``run`` and, or not, all under it."""
    return ("queue", run, queue) if below else ("queue", run, queue, "alone")


def lines_of(queue: str, run: Run) -> list[Topic]:
    """Where workers stand who may take a job of this queue and run."""
    return [line(queue, run.run, below=False), *(line(queue, each) for each in runs.above(run))]


def lines_behind(line: Topic) -> tuple[Topic, ...]:
    """Lines whose members let those of this line go first: they look again when somebody has left it."""
    return ((*line, "alone"),) if line[0] == "queue" and len(line) == 3 else ()


def group_line(run: str) -> Topic:
    """Where the caller of a group stands until one more of its jobs has ended."""
    return ("group", run)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(core: Core, request: wire.QueuesDeclare) -> wire.QueueView:
    """Creates or verifies a queue; without ``attempts`` it must exist."""
    queue = plan_declare(core, request.queue, request.attempts)
    wanted = None
    if request.needs is not None:
        core.need("work", f"say what the jobs of the queue {request.queue} need")
        wanted = needs.plan(core, request.needs, request.queue)
    do_declare(core, queue)
    if wanted is not None:
        before, queue.needs = queue.needs, needs.do(core, wanted)
        core.put(QUEUES, queue)
        needs.forget(core, before)
        needs.suspect(core, queue.needs)
        for job in jobs.reserved(core, request.queue):
            ahead.ask_back_one(core, job)  # it may need something now
        core.wake(needs.watch(core.space, request.queue))
    return wire.QueueView(queue=queue.queue, attempts=queue.attempts)


def send(core: Core, request: wire.QueuesSend) -> wire.JobView:
    """The job of this key: a new one, or the one there is, whatever has become of it."""
    payloads.check("input", request.input)
    run = runs.active(core, request.run)
    queue = plan_declare(core, request.queue, request.attempts)
    known = jobs.of_key(core, run, request.queue, request.key)
    if known is not None:
        return jobs.view(known)
    wanted = needs.plan(core, request.needs, request.queue)
    do_declare(core, queue)
    (job,) = do_send(core, run, request.queue, {request.key: request.input}, wanted).values()
    return wire.JobView(job=job.job, state="ready")


def send_many(core: Core, request: wire.QueuesSendMany) -> wire.JobsSent:
    """The jobs of these keys: new ones, or those that there are."""
    for member in request.members:
        payloads.check("input", member.input)
    run = runs.active(core, request.run)
    queue = plan_declare(core, request.queue, request.attempts)
    inputs = unique(request.members)
    sent = jobs.of_keys(core, run, request.queue, inputs)
    new = {key: input for key, input in inputs.items() if key not in sent}
    if new:
        wanted = needs.plan(core, request.needs, request.queue)
        do_declare(core, queue)
        sent |= do_send(core, run, request.queue, new, wanted)
    return wire.JobsSent(jobs=tuple(sent[member.key].job for member in request.members))


def unique(members: Iterable[wire.NewJob]) -> dict[str, str]:
    """The inputs by key, each the first of its key."""
    inputs: dict[str, str] = {}
    for member in members:
        inputs.setdefault(member.key, member.input)
    return inputs


def do_send(core: Core, run: Run, queue: str, inputs: Mapping[str, str], wanted: str) -> dict[str, Job]:
    """New jobs, after all was looked at. ``inputs``: by key; ``wanted``: their planned needs."""
    number, age, now = needs.do(core, wanted, len(inputs)), core.caller.ticket, core.now_ms
    sent = {
        key: Job(core.new_id("j"), core.space, queue, run.run, key, "ready", 0, number, age, input, now)
        for key, input in inputs.items()
    }
    jobs.add(core, run, list(sent.values()))
    for job in sent.values():
        jobs.emit(core, "task.submitted", run, job)
    _wake(core, queue, run)
    return sent


def result(core: Core, request: wire.QueuesResult) -> wire.JobView | Parked:
    """The job once it has ended; a job whose run is over counts as cancelled, for who waits and who asks later."""
    job = jobs.find(core, request.job)
    if job is None:
        raise NotFound(f"job {request.job} not found")
    runs.get(core, job.run)
    view = _seen(job, core)
    if view.state not in jobs.WAITING:
        return view
    if request.within:  # the caller may be what its holder does before
        ahead.ask_back_one(core, job)
    lacks = [] if view.state == "running" else needs.held_up_by(core, needs_of(core, job))
    return Parked(
        lines=(),
        signals=(jobs.signal(job), runs.signal(job.run), *lacks),
        late=partial(_seen, job),
        over=partial(_cut_off, job),
    )


def complete(core: Core, request: wire.QueuesComplete) -> wire.JobView | Refusal:
    """Records the result; a repeat by the token that did so is answered alike."""
    payloads.check("result", request.result)
    job, lease = _held(core, request)
    if job is None:
        return _tidied(core, request, lease)
    if lease is None and job.state == "succeeded" and job.token == request.token:
        return jobs.view(job)
    refused = _not_held(core, job, lease)
    if lease is None:
        raise refused or AssertionError("without a lease there is a refusal")
    leases.drop(core, lease)
    if refused is not None:
        _end_money(core, request, lease)
        return refused
    if not request.keep_reserved:
        budgets.pay(core, lease, request.costs)
    else:
        budgets.lease_ended(core, lease)
    job.attempt += job.state == "reserved"
    job.result = request.result
    jobs.move(core, job, "succeeded")
    return _ended(core, job, "task.succeeded")


def fail(core: Core, request: wire.QueuesFail) -> wire.JobView | Refusal:
    """Counts a failure: tried again after a pause, or failed for good."""
    job, lease = _held(core, request)
    if job is None:
        return _tidied(core, request, lease)
    refused = _not_held(core, job, lease)
    if lease is None:
        raise refused or AssertionError("without a lease there is a refusal")
    leases.drop(core, lease)
    budgets.gone(core, lease, "released")
    if refused is not None:
        return refused
    job.attempt += job.state == "reserved"
    reason = f"handler_error: {request.error}"
    if not request.retry or job.attempt >= _queue(core, job).attempts:
        job.traceback = request.traceback
        return _failed(core, job, reason)
    due = core.now_ms + jobs.backoff_ms(job.job, job.attempt)
    jobs.move(core, job, "delayed", due_ms=due, reason=reason)
    needs.suspect(core, needs_of(core, job))
    core.due(due)
    jobs.emit(core, "task.retried", _run(core, job), job, reason=reason, attempt=job.attempt)
    return wire.JobView(job=job.job, state="delayed", attempt=job.attempt, reason=reason)


# ---------------------------------------------------------------------------------------------------- leases, time


def gone(core: Core, lease: Lease, how: str) -> None:
    """A delivery ended without an outcome (``how``: lapsed, died, released): the job is ready for the next worker at
    once, or has failed if that was its last attempt. A job that was given back has not used an attempt."""
    budgets.gone(core, lease, how)
    job = core.live(JOBS).get(lease.subject)
    if job is None or job.state not in ("running", "reserved") or job.token != lease.token:
        return
    run = _run(core, job)
    if runs.refusal(run, core.now_ms) is not None:
        return  # cancelled with its run; tidied with it
    if job.state == "reserved":
        jobs.move(core, job, "ready", reason=job.reason)
        _wake(core, job.queue, run)
        return
    if how != "released" and job.attempt >= _queue(core, job).attempts:
        _failed(core, job, _without_outcome(how))
        return
    job.attempt -= how == "released"
    jobs.move(core, job, "ready", reason=None if how == "released" else _without_outcome(how))
    needs.suspect(core, needs_of(core, job))
    _wake(core, job.queue, run)


def tick(core: Core) -> int | None:
    """Delayed jobs whose pause is over become ready; when to look again."""
    for _ in range(DUE_IN_ONE_STEP):
        job = jobs.take_due(core)
        if job is None:
            break
        run = core.live(RUNS).get(job.run)
        if run is not None and run.state == "active":
            jobs.move(core, job, "ready", reason=job.reason)
            _wake(core, job.queue, run)
    return jobs.next_due(core)


def load(core: Core) -> None:
    """After the objects were loaded: which sets of needs the queues name."""
    for queue in core.live(QUEUES).values():
        needs.name(core, queue.needs)


# ---------------------------------------------------------------------------------------------------- helpers


def plan_declare(core: Core, name: str, attempts: int | None) -> Queue:
    """The queue; a new one where ``attempts`` are given and there is none. Raises NotFound, Forbidden or Conflict."""
    found = core.live(QUEUES).get((core.space, name))
    if found is None:
        if attempts is None:
            raise NotFound(f"queue {name} not found")
        core.need("resource_config", f"create the queue {name}")
        return Queue(core.space, name, attempts)
    if attempts is not None and attempts != found.attempts:
        raise Conflict(f"queue {name} exists with attempts={found.attempts}, this process declares attempts={attempts}")
    return found


def do_declare(core: Core, queue: Queue) -> None:
    """Keeps a queue that is new."""
    if (queue.space, queue.queue) not in core.live(QUEUES):
        core.put(QUEUES, queue)


def _cut_off(job: Job, core: Core) -> wire.JobView:
    return jobs.cut_off(job)


def _seen(job: Job, core: Core) -> wire.JobView:
    return jobs.seen(job, runs.get(core, job.run), core.now_ms)


def needs_of(core: Core, job: Job) -> int:
    """The number of the set that a job needs: its queue's if it names none."""
    return job.needs or _queue(core, job).needs


def _queue(core: Core, job: Job) -> Queue:
    return core.live(QUEUES)[job.space, job.queue]


def _run(core: Core, job: Job) -> Run:
    return runs.in_memory(core, job.run)


def _held(core: Core, request: wire.QueuesComplete | wire.QueuesFail) -> tuple[Job | None, Lease | None]:
    """The job and the caller's hold on it, each if there is one. Raises Missing, ValidationFailed for the token of
    something else."""
    lease = leases.find(core, request.token, request.secret)
    job = jobs.find(core, request.job)
    if job is not None:
        runs.get(core, job.run)
    if job is not None and lease is not None and (lease.kind, lease.subject) != (KIND, job.job):
        raise ValidationFailed(f"the token {lease.token} is not one of job {job.job}")  # it stays held
    return job, lease


def _tidied(core: Core, request: wire.QueuesComplete | wire.QueuesFail, lease: Lease | None) -> NotFound:
    """The job went with its run. Who still worked on it lets go now of what was held for it."""
    if lease is not None and (lease.kind, lease.subject) == (KIND, request.job):
        leases.drop(core, lease)
        _end_money(core, request, lease)
    return NotFound(f"job {request.job} not found")


def _without_outcome(how: str) -> str:
    return "worker_died" if how == "died" else "lease_expired"


def _end_money(core: Core, request: wire.QueuesComplete | wire.QueuesFail, lease: Lease) -> None:
    """Of a delivery whose outcome does not count any more: if it has come to a result, it has cost all the same."""
    if isinstance(request, wire.QueuesComplete) and not request.keep_reserved:
        budgets.pay(core, lease, request.costs)
    else:
        budgets.gone(core, lease, "released")


def _not_held(core: Core, job: Job, lease: Lease | None) -> Refusal | None:
    """Why the lease can end nothing: it is gone, or the job's run is over (never a run's refusal: a worker also
    serves child runs, and must not take the end of one for the end of its own)."""
    if lease is None:
        return leases.LeaseGone(f"the hold on job {job.job} is gone: another worker may have taken it over")
    if runs.refusal(runs.get(core, job.run), core.now_ms) is not None:
        return leases.LeaseGone(f"the hold on job {job.job} is gone: its run is over")
    return None


def _failed(core: Core, job: Job, reason: str) -> wire.JobView:
    jobs.move(core, job, "failed", reason=reason)
    return _ended(core, job, "task.failed", reason=reason, attempts=job.attempt)


def _ended(core: Core, job: Job, event: str, **more: object) -> wire.JobView:
    view = jobs.view(job)
    core.answer(jobs.signal(job), view)
    core.wake(group_line(job.run))
    jobs.emit(core, event, _run(core, job), job, **more)
    return view


def _wake(core: Core, queue: str, run: Run) -> None:
    for each in lines_of(queue, run):
        core.wake(each)

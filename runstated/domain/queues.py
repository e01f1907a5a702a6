"""Queues and jobs: work handed to worker processes.

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

from runstate import wire
from runstated.domain import budgets, jobs, leases, needs, payloads, runs
from runstated.store.tx import Conflict, NotFound, Parked, Refusal, Tx, ValidationFailed
from runstated.waits import Topic

SCHEMA = """
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
"""

# Version 2: what jobs need, and the order in which they end.
SCHEMA_2 = """
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
"""

# Which sets of needs are still named.
SCHEMA_TIDIED = """
CREATE INDEX jobs_by_needs ON jobs (needs, queue) WHERE needs > 0;
"""

# The sets of needs that matter are those of ready jobs, and their index lists them.
SCHEMA_8 = """
DROP TABLE queue_needs;
CREATE INDEX queues_by_needs ON queues (needs) WHERE needs > 0;
"""

KIND = jobs.KIND
DUE_IN_ONE_STEP = 200
GRANTED_BYTES_MAX = 4 * 1024 * 1024  # inputs in one reply: half of what a frame may be
GRANTED_JOBS_MAX = 50  # jobs in one reply: some 10 ms of the writer's time


def line(queue: str, run: str, *, below: bool = True) -> Topic:
    """Where workers stand who take jobs of ``queue`` from ``run`` and, or not, all under it."""
    return ("queue", run, queue) if below else ("queue", run, queue, "alone")


def lines_behind(line: Topic) -> tuple[Topic, ...]:
    """Lines whose members let those of this line go first: they look again when somebody has left it."""
    return ((*line, "alone"),) if line[0] == "queue" and len(line) == 3 else ()


def group_line(run: str) -> Topic:
    """Where the caller of a group stands until one more of its jobs has ended."""
    return ("group", run)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(tx: Tx, request: wire.QueuesDeclare) -> wire.QueueView:
    """Creates or verifies a queue; without ``attempts`` it must exist."""
    attempts = _declared(tx, request.queue, request.attempts)
    if request.needs is not None:
        tx.need("work", f"say what the jobs of the queue {request.queue} need")
        before = _needs_of_queue(tx, tx.caller.space, request.queue)
        number = needs.number(tx, request.needs, request.queue)
        tx.run(
            "UPDATE queues SET needs = :needs WHERE space = :space AND queue = :queue",
            needs=number,
            space=tx.caller.space,
            queue=request.queue,
        )
        needs.forget(tx, before)
        needs.suspect(tx, number)
        tx.wake(needs.watch(tx.caller.space, request.queue))
    return wire.QueueView(queue=request.queue, attempts=attempts)


def send(tx: Tx, request: wire.QueuesSend) -> wire.JobView:
    """The job of this key: a new one, or the one there is, whatever has become of it."""
    payloads.check("input", request.input)
    run = runs.active(tx, request.run)
    _declared(tx, request.queue, request.attempts)
    known = tx.one(
        f"SELECT {jobs.COLUMNS} FROM jobs WHERE run = :run AND queue = :queue AND key = :key",
        run=run.run,
        queue=request.queue,
        key=request.key,
    )
    if known is not None:
        return jobs.view(jobs.Job(*known))
    job = tx.new_id("j")
    wanted = needs.OF_QUEUE if request.needs is None else needs.number(tx, request.needs, request.queue)
    tx.run(
        "INSERT INTO jobs (job, space, queue, run, key, state, needs, age, input, created_ms)"
        " VALUES (:job, :space, :queue, :run, :key, 'ready', :needs, :age, :input, :now)",
        job=job,
        space=run.space,
        queue=request.queue,
        run=run.run,
        key=request.key,
        needs=wanted,
        age=tx.caller.ticket,
        input=request.input,
        now=tx.now_ms,
    )
    jobs.count(tx, run.run, request.queue, None, "ready")
    jobs.emit(tx, "task.submitted", run.run, job, request.key, request.queue)
    _wake(tx, request.queue, run)
    return wire.JobView(job=job, state="ready")


def result(tx: Tx, request: wire.QueuesResult) -> wire.JobView | Parked:
    """The job once it has ended; a job whose run is over counts as cancelled, for who waits and who asks later."""
    job = _get(tx, request.job)
    view = jobs.seen(tx, job)
    if view.state not in ("ready", "delayed", "running"):
        return view
    lacks = [] if view.state == "running" else needs.held_up_by(tx, jobs.needs_and_age(tx, job)[0])
    return Parked(
        lines=(),
        signals=(jobs.signal(job), runs.signal(job.run), *lacks),
        late=lambda tx: jobs.seen(tx, jobs.row(tx, job.job) or job),
        over=lambda tx: jobs.cut_off(jobs.row(tx, job.job) or job),
    )


def admit(tx: Tx, request: wire.QueuesAdmit) -> wire.JobsGranted | Parked:
    """Up to the free places of each queue, oldest jobs first; waits while there are none."""
    grants: list[wire.JobGrant] = []
    lines: list[Topic] = []
    blocked = needs.Blocked()
    size = 0
    for source, wanted in enumerate(request.queues):
        run = runs.active(tx, wanted.run)
        lines.append(line(wanted.queue, run.run, below=wanted.below))
        behind = not wanted.below and tx.ahead(line(wanted.queue, run.run))  # it was woken before those of that line
        for _ in range(0 if behind else wanted.places):
            found = _next(tx, wanted.queue, run, blocked, below=wanted.below)
            if found is None:
                break
            job, wants = found
            size += len(job.input.encode())
            if grants and (size > GRANTED_BYTES_MAX or len(grants) >= GRANTED_JOBS_MAX):
                return wire.JobsGranted(jobs=tuple(grants))  # the worker comes back for more
            grants.append(_start(tx, job, wants, wanted.lease_ms, source))
    if grants:
        return wire.JobsGranted(jobs=tuple(grants))
    signals = tuple(dict.fromkeys(runs.signal(wanted.run) for wanted in request.queues))
    return Parked(
        lines=tuple(dict.fromkeys((*lines, *blocked.ages))),
        signals=signals,
        late=wire.JobsGranted(),
        aside=blocked.aside,
        ages=blocked.ages,
        stands=blocked.wants,
    )


def complete(tx: Tx, request: wire.QueuesComplete) -> wire.JobView | Refusal:
    """Records the result; a repeat by the token that did so is answered alike."""
    payloads.check("result", request.result)
    job = jobs.row(tx, request.job, tx.caller.space)
    if job is None:
        return _tidied(tx, request)
    lease = leases.end(tx, request.token, request.secret)
    if lease is None and job.state == "succeeded" and job.token == request.token:
        return jobs.view(job)
    refused = _not_held(tx, job, lease)
    if refused is not None:
        _end_money(tx, request, lease)
        return refused
    if not request.keep_reserved:
        budgets.pay(tx, request.token, request.costs)
    row = tx.one(
        "UPDATE jobs SET state = 'succeeded', result = :result, ended_ms = :now, finish = :finish"
        f" WHERE job = :job AND token = :token AND state = 'running' RETURNING {jobs.COLUMNS}",
        job=job.job,
        token=request.token,
        result=request.result,
        now=tx.now_ms,
        finish=tx.next("finish"),
    )
    assert row is not None, "who holds the lease holds the job"
    return _ended(tx, jobs.Job(*row), "task.succeeded")


def fail(tx: Tx, request: wire.QueuesFail) -> wire.JobView | Refusal:
    """Counts a failure: tried again after a pause, or failed for good."""
    job = jobs.row(tx, request.job, tx.caller.space)
    if job is None:
        return _tidied(tx, request)
    lease = leases.end(tx, request.token, request.secret)
    refused = _not_held(tx, job, lease)
    _void(tx, lease)
    if refused is not None:
        return refused
    reason = f"handler_error: {request.error}"
    if not request.retry or job.attempt >= jobs.attempts(tx, job):
        return _failed(tx, job, reason, request.traceback)
    due = tx.now_ms + jobs.backoff_ms(job.job, job.attempt)
    jobs.move(tx, job, "delayed", due_ms=due, reason=reason)
    needs.suspect(tx, jobs.needs_and_age(tx, job)[0])
    tx.due(due)
    jobs.emit(tx, "task.retried", job.run, job.job, job.key, job.queue, reason=reason, attempt=job.attempt)
    return wire.JobView(job=job.job, state="delayed", attempt=job.attempt, reason=reason)


# ---------------------------------------------------------------------------------------------------- leases, time


def gone(tx: Tx, lease: leases.Lease, how: str) -> None:
    """A delivery ended without an outcome (``how``: lapsed, died, released): the job is ready for the next worker at
    once, or has failed if that was its last attempt. A job that was given back has not used an attempt."""
    budgets.gone(tx, lease, how)
    job = jobs.row(tx, lease.subject)
    if job is None or job.state != "running" or job.token != lease.token:
        return
    run = runs.get_any(tx, job.run)
    if runs.refusal(run, tx.now_ms) is not None:
        return  # cancelled with its run; tidied with it
    if how != "released" and job.attempt >= jobs.attempts(tx, job):
        _failed(tx, job, _without_outcome(how))
        return
    ended = None if how == "released" else _without_outcome(how)
    jobs.move(tx, job, "ready", attempt=job.attempt - (how == "released"), reason=ended)
    needs.suspect(tx, jobs.needs_and_age(tx, job)[0])
    _wake(tx, job.queue, run)


def tick(tx: Tx) -> int | None:
    """Delayed jobs whose pause is over become ready; when to look again."""
    rows = tx.all(
        f"SELECT {jobs.COLUMNS} FROM jobs WHERE state = 'delayed' AND due_ms <= :now ORDER BY due_ms LIMIT :many",
        now=tx.now_ms,
        many=DUE_IN_ONE_STEP,
    )
    for row in rows:
        job = jobs.Job(*row)
        jobs.move(tx, job, "ready", reason=job.reason)
        run = runs.get_any(tx, job.run)
        if runs.refusal(run, tx.now_ms) is None:
            _wake(tx, job.queue, run)
    first = tx.one("SELECT due_ms FROM jobs WHERE state = 'delayed' ORDER BY due_ms LIMIT 1")
    return first[0] if first else None


def tidy(tx: Tx, run: str, many: int) -> int:
    """Removes the jobs of an ended run that nobody works on, at most ``many``; how many went.

    A job that was cut off is kept a while as the answer to those who still ask for it: it goes with the run's row.
    """
    rows = tx.all(
        "DELETE FROM jobs WHERE job IN (SELECT job FROM jobs WHERE run = :run LIMIT :many)"
        " RETURNING queue, state, needs",
        run=run,
        many=many,
    )
    for queue, state, _ in rows:
        jobs.count(tx, run, queue, state, None)
    if len(rows) < many:
        tx.run("DELETE FROM job_counts WHERE run = :run", run=run)
    for number in {number for *_, number in rows}:
        needs.forget(tx, number)
    return len(rows)


# ---------------------------------------------------------------------------------------------------- helpers


def _declared(tx: Tx, queue: str, attempts: int | None) -> int:
    """The queue's attempts; creates it when they are given. Raises NotFound or Conflict."""
    space = tx.caller.space
    row = tx.one("SELECT attempts FROM queues WHERE space = :space AND queue = :queue", space=space, queue=queue)
    if row is None:
        if attempts is None:
            raise NotFound(f"queue {queue} not found")
        tx.need("resource_config", f"create the queue {queue}")
        tx.run(
            "INSERT INTO queues (space, queue, attempts) VALUES (:space, :queue, :attempts)",
            space=space,
            queue=queue,
            attempts=attempts,
        )
        return attempts
    found: int = row[0]
    if attempts is not None and attempts != found:
        raise Conflict(f"queue {queue} exists with attempts={found}, this process declares attempts={attempts}")
    return found


def _get(tx: Tx, job: str) -> jobs.Job:
    found = jobs.row(tx, job, tx.caller.space)
    if found is None:
        raise NotFound(f"job {job} not found")
    return found


def _tidied(tx: Tx, request: wire.QueuesComplete | wire.QueuesFail) -> NotFound:
    """The job went with its run. Who still worked on it lets go now of what was held for it."""
    lease = leases.find(tx, request.token, request.secret)
    if lease is not None and (lease.kind, lease.subject) == (KIND, request.job):
        _end_money(tx, request, leases.drop(tx, request.token))
    return NotFound(f"job {request.job} not found")


def _next(
    tx: Tx, queue: str, run: runs.Run, blocked: needs.Blocked, *, below: bool
) -> tuple[jobs.Job, needs.Wants] | None:
    """The oldest ready job that has all it needs. Of each set of needs only the oldest job is looked at: what it lacks,
    the younger ones lack too."""
    heads = jobs.heads(tx, queue, runs.below(run.path) if below else runs.alone(run.path))
    for age, where, number in heads:
        effective = _needs_of_queue(tx, run.space, queue) if number == needs.OF_QUEUE else number
        wants = needs.get(tx, effective)
        if wants and needs.lacking(tx, wants, age, blocked):
            blocked.stand(runs.watch(where), age)
            if number == needs.OF_QUEUE:
                blocked.stand(needs.watch(run.space, queue), age)
            continue
        row = tx.one(
            f"SELECT {jobs.COLUMNS} FROM jobs WHERE queue = :queue AND run = :run AND needs = :needs"
            " AND state = 'ready' AND age = :age",
            queue=queue,
            run=where,
            needs=number,
            age=age,
        )
        assert row is not None, "it was found a statement ago"
        return jobs.Job(*row), wants
    return None


def _needs_of_queue(tx: Tx, space: str, queue: str) -> int:
    """The number of the set that the queue's workers have declared last."""
    row = tx.one("SELECT needs FROM queues WHERE space = :space AND queue = :queue", space=space, queue=queue)
    assert row is not None, "a job's queue exists"
    return int(row[0])


def _start(tx: Tx, job: jobs.Job, wants: needs.Wants, lease_ms: int, source: int) -> wire.JobGrant:
    token, secret = leases.grant(tx, KIND, job.job, job.run, lease_ms)
    tx.subscribe(runs.signal(job.run))  # the job may be of a child run, which the worker has not joined
    jobs.move(tx, job, "running", token=token, attempt=job.attempt + 1)
    name = tx.one("SELECT name FROM runs WHERE run = :run", run=job.run)
    return wire.JobGrant(
        token=token,
        job=job.job,
        run=job.run,
        run_name=name[0] if name else None,
        key=job.key,
        input=job.input,
        attempt=job.attempt + 1,
        source=source,
        reason=job.reason,
        reservations=needs.take(tx, wants, job.run, token),
        secret=secret,
    )


def _without_outcome(how: str) -> str:
    return "worker_died" if how == "died" else "lease_expired"


def _end_money(tx: Tx, request: wire.QueuesComplete | wire.QueuesFail, lease: leases.Lease | None) -> None:
    """Of a delivery whose outcome does not count any more: if it has come to a result, it has cost all the same."""
    if lease is not None and isinstance(request, wire.QueuesComplete) and not request.keep_reserved:
        budgets.pay(tx, lease.token, request.costs)
    else:
        _void(tx, lease)


def _void(tx: Tx, lease: leases.Lease | None) -> None:
    """A delivery that ends without a result costs nothing."""
    if lease is not None:
        budgets.gone(tx, lease, "released")


def _not_held(tx: Tx, job: jobs.Job, lease: leases.Lease | None) -> Refusal | None:
    """Why the lease can end nothing: it is gone, or the job's run is over (never a run's refusal: a worker also
    serves child runs, and must not take the end of one for the end of its own)."""
    if lease is not None and (lease.kind, lease.subject) != (KIND, job.job):
        raise ValidationFailed(f"the token {lease.token} is not one of job {job.job}")  # raised: it stays held
    if lease is None:
        return leases.LeaseGone(f"the hold on job {job.job} is gone: another worker may have taken it over")
    if runs.refusal(runs.get(tx, job.run), tx.now_ms) is not None:
        return leases.LeaseGone(f"the hold on job {job.job} is gone: its run is over")
    return None


def _failed(tx: Tx, job: jobs.Job, reason: str, traceback: str | None = None) -> wire.JobView:
    jobs.move(tx, job, "failed", reason=reason, traceback=traceback, ended_ms=tx.now_ms, counted=False)
    tx.run("UPDATE jobs SET finish = :finish WHERE job = :job", finish=tx.next("finish"), job=job.job)
    failed = jobs.row(tx, job.job)
    assert failed is not None, "it was there a statement ago"
    return _ended(tx, failed, "task.failed", reason=reason, attempts=job.attempt)


def _ended(tx: Tx, job: jobs.Job, event: str, **more: object) -> wire.JobView:
    jobs.count(tx, job.run, job.queue, "running", job.state)
    view = jobs.view(job)
    tx.answer(jobs.signal(job), view)
    tx.wake(group_line(job.run))
    jobs.emit(tx, event, job.run, job.job, job.key, job.queue, **more)
    return view


def _wake(tx: Tx, queue: str, run: runs.Run) -> None:
    tx.wake(line(queue, run.run, below=False))
    for each in runs.above(run):
        tx.wake(line(queue, each))

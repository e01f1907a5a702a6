"""Queues and jobs, which this API calls mailboxes, tasks and messages (a task's delivery, under the same id)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from runstate import wire
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import (
    ErrorText,
    Holder,
    LeaseSeconds,
    Requirements,
    TokenText,
    WaitMs,
    checked_id,
    name_in,
    needs,
    null,
    queue_of,
)
from runstated.http.holds import Renew, Renewed, renewed
from runstated.http.names import compact, from_token, to_id, to_reservation, to_token

Members = Annotated[int, Meta(ge=1, le=100)]
ATTEMPTS = 5  # of a queue whose creator does not say
STATES = {"ready": "QUEUED", "delayed": "QUEUED"}
TaskState = Annotated[str, Meta(extra_json_schema={"enum": ["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]})]


class Declare(Body, frozen=True):
    """Without attempts it must exist; other attempts than its own: CONFLICT. Requirements replace those there are."""

    max_attempts: wire.Attempts | None = None
    requirements: Requirements | None = None


class Create(Body, frozen=True):
    """Of a queue `mode` changes nothing; a bound on what may wait there is not."""

    name: wire.Name
    mode: Literal["WORK", "INBOX"] = "WORK"
    max_attempts: wire.Attempts = ATTEMPTS
    backlog_limit: None = None


class Mailbox(Answer, frozen=True):
    id: str
    name: str
    max_attempts: int
    mode: str = "WORK"


class Submit(Body, frozen=True):
    """`deadline` and `workLimit` are refused: a job ends with its run and not before, and nobody counts the others."""

    scope_id: wire.Id
    mailbox_id: str
    task_key: wire.Key
    input: msgspec.Raw = msgspec.field(default_factory=null)
    requirements: Requirements | None = None
    deadline: None = None
    work_limit: None = None


class Put(Body, frozen=True):
    """`workKey`: which messages are the same; none: this one is like no other."""

    scope_id: wire.Id
    payload: msgspec.Raw = msgspec.field(default_factory=null)
    work_key: wire.Key | None = None
    deadline: None = None


class Receive(Body, frozen=True):
    scope_id: wire.Id
    holder: Holder = ""
    holder_session: Holder = ""
    lease_seconds: LeaseSeconds = 30
    wait_ms: WaitMs = 0


class Message(Answer, frozen=True):
    id: str
    payload: msgspec.Raw
    attempt: int
    scope_id: str


class Received(Answer, frozen=True):
    message: Message
    token: str


class Task(Answer, frozen=True):
    task_id: str
    state: TaskState


class Look(Body, frozen=True):
    wait_ms: WaitMs = 0


class TaskView(Answer, frozen=True):
    """`state`: QUEUED, RUNNING, SUCCEEDED, FAILED or CANCELLED; `outcome`: what the handler returned."""

    id: str
    state: TaskState
    attempt: int
    outcome: msgspec.Raw
    outcome_reason: str | None


class Admit(Body, frozen=True):
    scope_id: wire.Id
    mailbox_id: str
    holder: Holder = ""
    holder_session: Holder = ""
    lease_seconds: LeaseSeconds = 30
    wait_ms: WaitMs = 0
    include_descendants: bool = False


class Delivery(Answer, frozen=True):
    """A job to be done. `attempt`: deliveries so far, with this one."""

    message_id: str
    task_id: str
    task_key: str
    token: str
    payload: msgspec.Raw
    attempt: int
    reservations: tuple[str, ...]
    lease_expires_at: str
    grants: tuple[str, ...] = ()
    consumptions: tuple[str, ...] = ()


class Result(msgspec.Struct, rename="camel", frozen=True):
    payload: msgspec.Raw = msgspec.field(default_factory=null)


class Complete(Body, frozen=True):
    token: TokenText
    result: Result | None = None


class Nack(Body, frozen=True):
    token: TokenText
    retry: bool = True
    error: ErrorText = ""


def state(job: wire.JobView) -> str:
    return STATES.get(job.state, job.state.upper())


def view(job: wire.JobView) -> TaskView:
    outcome = null() if job.result is None else msgspec.Raw(job.result.encode())
    ended = job.state in ("succeeded", "failed", "cancelled")
    return TaskView(
        id=job.job,
        state=state(job),
        attempt=job.attempt,
        outcome=outcome,
        outcome_reason=job.reason if ended else None,
    )


def mailbox(queue: wire.QueueView, mode: str = "WORK") -> Mailbox:
    return Mailbox(id=to_id("q", queue.queue), name=queue.queue, max_attempts=queue.attempts, mode=mode)


@endpoint("PUT", "/mailboxes/by-name/{name}", Mailbox, Declare)
async def declare(call: Call) -> Mailbox:
    """Looks up, verifies or creates a queue."""
    body, name = call.body, name_in(call.path["name"])
    request = wire.QueuesDeclare(queue=name, attempts=body.max_attempts, needs=needs(body.requirements))
    return mailbox(await call.ask(request))


@endpoint("POST", "/mailboxes", Mailbox, Create, status=201)
async def create(call: Call) -> Mailbox:
    """Creates a queue, or verifies the one that exists: CONFLICT for other attempts."""
    request = wire.QueuesDeclare(queue=call.body.name, attempts=call.body.max_attempts)
    return mailbox(await call.ask(request), call.body.mode)


@endpoint("POST", "/tasks", Task, Submit, status=201)
async def submit(call: Call) -> Task:
    """Submits a job; the same key in the same run is the same job, whatever has become of it."""
    body = call.body
    job = await call.ask(
        wire.QueuesSend(
            run=body.scope_id,
            queue=queue_of(body.mailbox_id),
            key=body.task_key,
            input=compact(body.input),
            needs=needs(body.requirements),
        )
    )
    return Task(task_id=job.job, state=state(job))


@endpoint("GET", "/tasks/{taskId}", TaskView, Look)
async def look(call: Call) -> TaskView:
    """A job, also of a run that has ended; waits until it has ended."""
    job = checked_id(call.path["taskId"], "task")
    return view(await call.ask(wire.QueuesResult(job=job, wait_ms=call.body.wait_ms)))


@endpoint("POST", "/tasks/{taskId}/join", TaskView)
@endpoint("POST", "/tasks/{taskId}/detach", TaskView)
async def subscribe(call: Call) -> TaskView:
    """A job. It does not matter who follows it: one that nobody follows is done, too."""
    return view(await call.ask(wire.QueuesResult(job=checked_id(call.path["taskId"], "task"), wait_ms=0)))


@endpoint("POST", "/mailboxes/{mailboxId}/messages", Message, Put, status=201)
async def put(call: Call) -> Message:
    """Submits a job whose outcome nobody asks for."""
    body, text = call.body, compact(call.body.payload)
    key = body.work_key or call.own_name("message")
    queue = queue_of(call.path["mailboxId"])
    job = await call.ask(wire.QueuesSend(run=body.scope_id, queue=queue, key=key, input=text))
    return Message(id=job.job, payload=msgspec.Raw(text.encode()), attempt=job.attempt, scope_id=body.scope_id)


@endpoint("POST", "/mailboxes/{mailboxId}/recv", Received, Receive, empty=True)
async def receive(call: Call) -> Received | None:
    """The oldest job of this run that has all it needs; 204 when the wait is over."""
    grant = await _admitted(call, call.path["mailboxId"], below=False)
    if grant is None:
        return None
    payload = msgspec.Raw(grant.input.encode())
    message = Message(id=grant.job, payload=payload, attempt=grant.attempt, scope_id=grant.run)
    return Received(message=message, token=to_token(grant.token, grant.secret))


@endpoint("POST", "/tasks/admit", Delivery, Admit, empty=True)
async def admit(call: Call) -> Delivery | None:
    """The oldest job that has all it needs; 204 when the wait is over."""
    body = call.body
    grant = await _admitted(call, body.mailbox_id, below=body.include_descendants)
    if grant is None:
        return None
    return Delivery(
        message_id=grant.job,
        task_id=grant.job,
        task_key=grant.key,
        token=to_token(grant.token, grant.secret),
        payload=msgspec.Raw(grant.input.encode()),
        attempt=grant.attempt,
        reservations=tuple(to_reservation(each, grant.secret) for each in grant.reservations),
        lease_expires_at=call.lease_ends(grant.token),
    )


async def _admitted(call: Call, mailbox_id: str, *, below: bool) -> wire.JobGrant | None:
    body, queue = call.body, queue_of(mailbox_id)
    # Our own workers may wait for a queue that is yet to come; here a mailbox must exist.
    await call.gateway.ask(call.access, "", wire.QueuesDeclare(queue=queue))
    wanted = wire.AdmitFrom(run=body.scope_id, queue=queue, lease_ms=body.lease_seconds * 1000, below=below)
    reply: wire.JobsGranted = await call.ask(
        wire.QueuesAdmit(queues=(wanted,), wait_ms=body.wait_ms), worker=body.holder
    )
    return reply.jobs[0] if reply.jobs else None


@endpoint("POST", "/messages/{messageId}/renew", Renewed, Renew)
async def renew(call: Call) -> Renewed:
    """Renews the delivery, with the slots that go with it."""
    return await renewed(call)


@endpoint("POST", "/messages/{messageId}/complete", Task, Complete)
async def complete(call: Call) -> Task:
    """Records the result; what is reserved stays so, to be settled next."""
    body = call.body
    token, secret = from_token(body.token)
    result = body.result or Result()
    request = wire.QueuesComplete(
        job=checked_id(call.path["messageId"], "message"),
        token=token,
        secret=secret,
        result=compact(result.payload),
        keep_reserved=True,
    )
    return await _outcome(call, request)


@endpoint("POST", "/messages/{messageId}/nack", Task, Nack)
async def nack(call: Call) -> Task:
    """Counts a failure: tried again after a pause, or failed for good."""
    body = call.body
    token, secret = from_token(body.token)
    request = wire.QueuesFail(
        job=checked_id(call.path["messageId"], "message"),
        token=token,
        secret=secret,
        error=body.error,
        retry=body.retry,
    )
    return await _outcome(call, request)


async def _outcome(call: Call, request: wire.QueuesComplete | wire.QueuesFail) -> Task:
    job = await call.ask(request)
    return Task(task_id=job.job, state=state(job))


class CreateGroup(Body, frozen=True):
    """`condition`, `threshold` and `expectedMembers` are for the caller's own counting."""

    mailbox_id: str
    parent_scope_id: wire.Id
    condition: Literal["ALL_TERMINAL", "FIRST_ACCEPTED", "N_ACCEPTED"] = "ALL_TERMINAL"
    expected_members: Members | None = None
    threshold: Members | None = None


class Group(Answer, frozen=True):
    group_id: str
    scope_id: str


class Member(Body, frozen=True):
    task_key: wire.Key
    input: msgspec.Raw = msgspec.field(default_factory=null)
    requirements: Requirements | None = None


class Taken(Answer, frozen=True):
    """It was noted."""


@endpoint("POST", "/task-groups", Group, CreateGroup, status=201)
async def create_group(call: Call) -> Group:
    """A run of its own, below the parent, for the jobs of a `gather`."""
    body = call.body
    queue = queue_of(body.mailbox_id)
    group = await call.ask(wire.GroupsSubmit(run=body.parent_scope_id, queue=queue, owned=False))
    return Group(group_id=f"{group.run}_{body.mailbox_id}", scope_id=group.run)


@endpoint("POST", "/task-groups/{groupId}/tasks", Task, Member, status=201)
async def add_member(call: Call) -> Task:
    """One more job of the group."""
    body = call.body
    run, _, mailbox = call.path["groupId"].partition("_")
    request = wire.QueuesSend(
        run=checked_id(run, "group"),
        queue=queue_of(mailbox),
        key=body.task_key,
        input=compact(body.input),
        needs=needs(body.requirements),
    )
    try:
        job = await call.ask(request)
    except ApiError as error:
        if error.code in ("SCOPE_CANCELLED", "DEADLINE_EXCEEDED") and await _parent_is_active(call, run):
            raise ApiError("CONFLICT", "the group has ended") from error  # never "your run is over": it is not
        raise
    return Task(task_id=job.job, state=state(job))


async def _parent_is_active(call: Call, run: str) -> bool:
    group = await call.ask(wire.RunsGet(run=run))
    parent = None if group.parent is None else await call.ask(wire.RunsGet(run=group.parent))
    return parent is not None and parent.state == "active"


@endpoint("POST", "/task-groups/{groupId}/tasks/{taskId}/accept", Taken)
async def accept(call: Call) -> Taken:
    """The caller has accepted a member's result."""
    return Taken()


@endpoint("POST", "/task-groups/{groupId}/tasks/{taskId}/reject", Taken)
async def reject(call: Call) -> Taken:
    """The caller has not accepted it."""
    return Taken()

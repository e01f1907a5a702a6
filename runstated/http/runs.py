"""Runs, which this API calls scopes."""

from __future__ import annotations

from runstate import wire
from runstated.http.call import Answer, Body, Call, Nothing, endpoint
from runstated.http.fields import Moment, checked_id, name_in
from runstated.http.names import to_iso, to_ms

STATES = {"active": "ACTIVE", "stopped": "CANCELLED", "finished": "COMPLETED", "expired": "EXPIRED"}


class Scope(Answer, frozen=True):
    """A run. `storedState` and `effective` are the same here: both go by the clock."""

    id: str
    name: str | None
    parent_id: str | None
    stored_state: str
    effective: str
    deadline: str | None
    created_at: str


class Join(Body, frozen=True):
    """The deadline is set if the run has none yet."""

    deadline: Moment | None = None


class CreateScope(Body, frozen=True):
    """A child run; without a parent a root run of that name, or of a name of its own."""

    parent_id: wire.Id | None = None
    name: wire.Name | None = None
    deadline: Moment | None = None


class Worker(Answer, frozen=True):
    """What a worker holds in a run."""

    holder: str
    keys: tuple[str, ...]
    earliest_lease_expiry: str | None


class Waiting(Answer, frozen=True):
    """A call that waits for slots."""

    permit: str
    units: int


class RunStatus(Answer, frozen=True):
    """Who holds something in a run or below it, and who waits for slots there."""

    root_scope_id: str
    workers: tuple[Worker, ...]
    waiting: tuple[Waiting, ...]


def view(run: wire.RunView) -> Scope:
    state = STATES[run.state]
    return Scope(
        id=run.run,
        name=run.name,
        parent_id=run.parent,
        stored_state=state,
        effective=state,
        deadline=None if run.deadline_ms is None else to_iso(run.deadline_ms),
        created_at=to_iso(run.created_ms),
    )


@endpoint("PUT", "/runs/{name}", Scope, Join)
async def join(call: Call) -> Scope:
    """Joins the active run of that name, or creates it."""
    deadline = call.body.deadline
    deadline_ms = None if deadline is None else to_ms("deadline", deadline)
    return view(await call.ask(wire.RunsJoin(name=name_in(call.path["name"]), deadline_ms=deadline_ms)))


@endpoint("POST", "/scopes", Scope, CreateScope, status=201)
async def create(call: Call) -> Scope:
    """Creates a child run."""
    body = call.body
    deadline_ms = None if body.deadline is None else to_ms("deadline", body.deadline)
    if body.parent_id is None:
        name = body.name or call.own_name("scope")
        return view(await call.ask(wire.RunsJoin(name=name, deadline_ms=deadline_ms)))
    return view(
        await call.ask(
            wire.RunsChild(parent=body.parent_id, name=body.name, deadline_ms=deadline_ms, owned=False),
        )
    )


@endpoint("GET", "/scopes/{scopeId}", Scope)
async def look(call: Call) -> Scope:
    """A run, also after its end."""
    return view(await call.ask(wire.RunsGet(run=checked_id(call.path["scopeId"], "run"))))


@endpoint("POST", "/scopes/{scopeId}/cancel", Scope, Nothing)
async def cancel(call: Call) -> Scope:
    """Stops a run and all below it; one that has ended stays as it is."""
    return view(await call.ask(wire.RunsEnd(run=checked_id(call.path["scopeId"], "run"), state="stopped")))


@endpoint("POST", "/scopes/{scopeId}/complete", Scope, Nothing)
async def complete(call: Call) -> Scope:
    """Finishes a run and all below it; one that has ended stays as it is."""
    return view(await call.ask(wire.RunsEnd(run=checked_id(call.path["scopeId"], "run"), state="finished")))


@endpoint("GET", "/ops/runs/{scopeId}", RunStatus)
async def status(call: Call) -> RunStatus:
    """Who holds something in a run, and who waits for slots there; needs the permission `usage`."""
    found = await call.ask(wire.RunsStatus(run=checked_id(call.path["scopeId"], "run")))
    return RunStatus(
        root_scope_id=found.run.run,
        workers=tuple(
            Worker(
                holder=worker.worker,
                keys=worker.names,
                earliest_lease_expiry=None if worker.lease_expires_ms is None else to_iso(worker.lease_expires_ms),
            )
            for worker in found.workers
        ),
        waiting=tuple(Waiting(permit=one.name, units=one.units) for one in found.waiting if one.kind == "slots"),
    )

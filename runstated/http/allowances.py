"""Limits, which this API calls allowances, and the calls that wait for them."""

from __future__ import annotations

from runstate import wire
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.fields import Holder, TtlSeconds, name_in
from runstated.http.names import from_id, to_id
from runstated.http.waiting import WaiterState


class Sizes(Body, frozen=True):
    """Without sizes it must exist; other sizes than its own: CONFLICT."""

    units_limit: wire.Units | None = None
    window_seconds: wire.WindowSeconds | None = None


class Allowance(Answer, frozen=True):
    id: str
    name: str
    units_limit: int
    window_seconds: int
    remaining: int


class Wait(Body, frozen=True):
    scope_id: wire.Id
    units: wire.Units = 1
    holder: Holder = ""
    ttl_seconds: TtlSeconds = 3_600


def view(limit: wire.LimitView) -> Allowance:
    return Allowance(
        id=to_id("l", limit.limit),
        name=limit.limit,
        units_limit=limit.max,
        window_seconds=limit.per_seconds,
        remaining=limit.max - limit.used,
    )


@endpoint("PUT", "/allowances/by-name/{name}", Allowance, Sizes)
async def declare(call: Call) -> Allowance:
    """Looks up, verifies or creates a limit."""
    body = call.body
    request = wire.LimitsDeclare(
        limit=name_in(call.path["name"]), max=body.units_limit, per_seconds=body.window_seconds
    )
    return view(await call.ask(request))


@endpoint("GET", "/allowances/{allowanceId}", Allowance)
async def look(call: Call) -> Allowance:
    """A limit, and what is left of its present window."""
    (name,) = from_id("l", "allowance", call.path["allowanceId"])
    return view(await call.ask(wire.LimitsGet(limit=name)))


@endpoint("POST", "/allowances/{allowanceId}/wait", WaiterState, Wait)
async def wait(call: Call) -> WaiterState:
    """Takes units, or stands in line for them."""
    body = call.body
    (name,) = from_id("l", "allowance", call.path["allowanceId"])
    request, request_id = call.prepare(
        wire.LimitsTake(run=body.scope_id, limit=name, units=body.units, wait_ms=body.ttl_seconds * 1000)
    )
    assert isinstance(request, wire.LimitsTake)
    waiter = await call.waiters.start(call.access, body.holder, body.scope_id, request, request_id)
    return WaiterState(waiter_id=waiter.id, state=waiter.state)

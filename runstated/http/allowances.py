"""Limits, which this API calls allowances, and the calls that wait for them."""

from __future__ import annotations

from runstate import wire
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import Holder, TtlSeconds
from runstated.http.names import from_id, to_id
from runstated.http.waiters import limit_wanted
from runstated.http.waiting import WaiterState, state_of


class Sizes(Body, frozen=True):
    """Without sizes it must exist; other sizes than its own: CONFLICT."""

    units_limit: wire.Units | None = None
    window_seconds: wire.WindowSeconds | None = None


class Create(Body, frozen=True):
    name: wire.Name
    units_limit: wire.Units
    window_seconds: wire.WindowSeconds


class Consume(Body, frozen=True):
    scope_id: wire.Id
    units: wire.Units = 1
    holder: Holder = ""


class Consumption(Answer, frozen=True):
    consumption_id: str
    units: int
    remaining: int


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
@endpoint("POST", "/allowances", Allowance, Create, status=201)
async def declare(call: Call) -> Allowance:
    """Looks up, verifies or creates a limit."""
    body = call.body
    if (body.units_limit is None) != (body.window_seconds is None):
        raise ApiError("VALIDATION_FAILED", "unitsLimit and windowSeconds go together")
    return view(
        await call.ask(wire.LimitsDeclare(limit=call.named(), max=body.units_limit, per_seconds=body.window_seconds))
    )


@endpoint("GET", "/allowances/{allowanceId}", Allowance)
async def look(call: Call) -> Allowance:
    """A limit, and what is left of its present window."""
    (name,) = from_id("l", "allowance", call.path["allowanceId"])
    return view(await call.ask(wire.LimitsGet(limit=name)))


@endpoint("POST", "/allowances/{allowanceId}/consume", Consumption, Consume)
async def consume(call: Call) -> Consumption:
    """Takes units without waiting: ALLOWANCE_EXHAUSTED when there are none, or when others wait for them."""
    body = call.body
    (name,) = from_id("l", "allowance", call.path["allowanceId"])
    take = wire.LimitsTake(run=body.scope_id, limit=name, units=body.units, wait_ms=0)
    reply = await call.ask(take, worker=body.holder)
    if isinstance(reply, wire.LimitBusy):
        limit = await call.ask(wire.LimitsGet(limit=name))
        left_s = limit.per_seconds - call.now_ms() // 1000 % limit.per_seconds
        raise ApiError(
            "ALLOWANCE_EXHAUSTED",
            f"the limit {name} has no {body.units} units left in this window, which ends in {left_s} s",
            retry_after_s=left_s,
        )
    limit = await call.ask(wire.LimitsGet(limit=name))
    return Consumption(consumption_id=call.own_name("use"), units=body.units, remaining=limit.max - limit.used)


@endpoint("POST", "/allowances/{allowanceId}/wait", WaiterState, Wait)
async def wait(call: Call) -> WaiterState:
    """Takes units, or stands in line for them."""
    body = call.body
    (name,) = from_id("l", "allowance", call.path["allowanceId"])
    request, request_id = call.prepare_waiter(limit_wanted(body.scope_id, name, body.units, body.ttl_seconds))
    assert isinstance(request, wire.LimitsTake)
    waiter = await call.waiters.start(call.access, body.holder, request, request_id)
    return state_of(waiter)

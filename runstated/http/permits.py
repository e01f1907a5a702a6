"""Slots, which this API calls permits, the calls that wait for them, and what is held of them: grants."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from runstate import wire
from runstated.http.call import Answer, Body, Call, Done, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import Holder, LeaseSeconds, TokenText
from runstated.http.holds import Renew, Renewed, renewed
from runstated.http.names import from_id, from_token, to_id, to_token
from runstated.http.waiters import slots_wanted
from runstated.http.waiting import WaiterState, state_of

NOT_THEIRS = "the slots are not the waiter's yet, or not any more"


class Size(Body, frozen=True):
    """Without a size they must exist; another size than their own: CONFLICT."""

    units: wire.Units | None = None


class Create(Body, frozen=True):
    name: wire.Name
    units: wire.Units


class Permit(Answer, frozen=True):
    """`units` and `unitsTotal` are the same, as different SDKs call it."""

    id: str
    name: str
    units: int
    units_total: int


class Acquire(Body, frozen=True):
    scope_id: wire.Id
    units: wire.Units = 1
    holder: Holder = ""
    holder_session: Holder = ""
    lease_seconds: LeaseSeconds = 30
    waiter_id: Annotated[str, Meta(max_length=4_000)] | None = None


class Wait(Body, frozen=True):
    scope_id: wire.Id
    units: wire.Units = 1
    holder: Holder = ""


class Grant(Answer, frozen=True):
    grant_id: str
    token: str


class Release(Body, frozen=True):
    token: TokenText


@endpoint("PUT", "/permits/by-name/{name}", Permit, Size)
@endpoint("POST", "/permits", Permit, Create, status=201)
async def declare(call: Call) -> Permit:
    """Looks up, verifies or creates slots."""
    pool = await call.ask(wire.SlotsDeclare(pool=call.named(), max=call.body.units))
    return Permit(id=to_id("p", pool.pool), name=pool.pool, units=pool.max, units_total=pool.max)


@endpoint("POST", "/permits/{permitId}/acquire", Grant, Acquire)
async def acquire(call: Call) -> Grant:
    """Takes units without waiting, or claims those that were promised to a waiter: CAPACITY_UNAVAILABLE when there are
    none, or when others wait for them."""
    body = call.body
    (name,) = from_id("p", "permit", call.path["permitId"])
    lease_ms = body.lease_seconds * 1000
    if body.waiter_id is not None:
        held = await _claim(call, body.waiter_id, name, lease_ms)
    else:
        request = wire.SlotsAcquire(run=body.scope_id, pool=name, units=body.units, lease_ms=lease_ms, wait_ms=0)
        reply = await call.ask(request, worker=body.holder)
        if isinstance(reply, wire.SlotsBusy):
            raise ApiError("CAPACITY_UNAVAILABLE", f"slots {name} are taken")
        held = reply.token, reply.secret
    token = to_token(*held)
    return Grant(grant_id=token, token=token)


async def _claim(call: Call, waiter_id: str, pool: str, lease_ms: int) -> tuple[int, str]:
    key = call.idempotency_key
    try:
        waiter = await call.waiters.find(call.access, waiter_id)
    except ApiError as error:
        if error.code != "NOT_FOUND":
            raise
        raise ApiError("CAPACITY_UNAVAILABLE", NOT_THEIRS) from error
    asked = waiter.pending.request
    if not isinstance(asked, wire.SlotsAcquire) or asked.pool != pool:
        raise ApiError("CAPACITY_UNAVAILABLE", f"the waiter does not wait for the slots {pool}")
    is_mine = waiter.state == "CLAIMED" and key is not None and waiter.claim == key
    if waiter.state != "SIGNALED" and not is_mine:
        raise ApiError("CAPACITY_UNAVAILABLE", NOT_THEIRS)
    await call.ask(wire.Renew(token=waiter.token, secret=waiter.secret, lease_ms=lease_ms))
    waiter.state, waiter.claim = "CLAIMED", key
    return waiter.token, waiter.secret


@endpoint("POST", "/permits/{permitId}/wait", WaiterState, Wait)
async def wait(call: Call) -> WaiterState:
    """Stands in line; the units are promised when it is its turn, for five seconds."""
    body = call.body
    (name,) = from_id("p", "permit", call.path["permitId"])
    request, request_id = call.prepare_waiter(slots_wanted(body.scope_id, name, body.units))
    assert isinstance(request, wire.SlotsAcquire)
    waiter = await call.waiters.start(call.access, body.holder, request, request_id)
    return state_of(waiter)


@endpoint("POST", "/grants/{grantId}/renew", Renewed, Renew)
async def renew(call: Call) -> Renewed:
    """Renews the hold."""
    _check_grant(call)
    return await renewed(call)


@endpoint("POST", "/grants/{grantId}/release", Done, Release)
async def release(call: Call) -> Done:
    """Gives the units back; they are free before this is answered."""
    _check_grant(call)
    token, secret = from_token(call.body.token)
    reply = await call.ask(wire.Release(token=token, secret=secret))
    if not reply.held:
        raise ApiError("STALE_CLAIM", "the grant was released before, or its lease has lapsed")
    return Done()


def _check_grant(call: Call) -> None:
    if call.path["grantId"] != call.body.token:
        raise ApiError("STALE_CLAIM", "the token is not one of this grant")

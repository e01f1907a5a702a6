"""Sleep timers and together barriers."""

from __future__ import annotations

import msgspec

from runstate import wire
from runstate.units import WHOLE_MAX
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import Holder, Moment, TokenText, name_in
from runstated.http.names import from_id, to_id, to_iso, to_ms

UNSET = msgspec.UNSET
EPOCH = 1  # of a barrier: it never changes, as a barrier that has opened stays open


class Sleep(Body, frozen=True):
    """The first call with a name fixes when it fires."""

    scope_id: wire.Id
    after_seconds: int | None = None
    at: Moment | None = None


class Timer(Answer, frozen=True):
    """`state`: PENDING, FIRED (with `token`, for the acknowledgement) or ACKED. `now`: the daemon's clock."""

    id: str
    state: str
    fire_at: str
    now: str
    token: str | msgspec.UnsetType = UNSET


class Ack(Body, frozen=True):
    token: TokenText


class Meet(Body, frozen=True):
    scope_id: wire.Id
    target: wire.Units


class Arrive(Body, frozen=True):
    arrival_key: Holder


class Barrier(Answer, frozen=True):
    """`state`: OPEN or RELEASED."""

    id: str
    state: str
    epoch: int
    target: int
    arrivals: int


def timer(call: Call, run: str, name: str, view: wire.TimerView) -> Timer:
    state = "ACKED" if view.acked else "FIRED" if view.fired else "PENDING"
    return Timer(
        id=to_id("t", run, name, str(view.fire_ms)),
        state=state,
        fire_at=to_iso(view.fire_ms),
        now=to_iso(call.now_ms()),
        token=str(view.fire_ms) if state == "FIRED" else UNSET,
    )


def barrier(run: str, name: str, view: wire.BarrierView) -> Barrier:
    return Barrier(
        id=to_id("x", run, name, str(view.target)),
        state="RELEASED" if view.released else "OPEN",
        epoch=EPOCH,
        target=view.target,
        arrivals=view.arrivals,
    )


@endpoint("PUT", "/timers/by-name/{name}", Timer, Sleep)
@endpoint("POST", "/timers", Timer, Sleep, status=201)
async def sleep(call: Call) -> Timer:
    """A timer; does not wait. Without a name it is one of its own."""
    body, name = call.body, _name(call, "timer")
    if (body.after_seconds is None) == (body.at is None):
        raise ApiError("VALIDATION_FAILED", "a timer needs either afterSeconds or at")
    if body.after_seconds is not None and not 0 <= body.after_seconds <= 10**10:
        raise ApiError("VALIDATION_FAILED", "afterSeconds must be 0 to 10000000000")
    request = wire.TimersSleep(
        run=body.scope_id,
        name=name,
        after_ms=None if body.after_seconds is None else body.after_seconds * 1000,
        at_ms=None if body.at is None else to_ms("at", body.at),
        wait_ms=0,
    )
    return timer(call, body.scope_id, name, await call.ask(request))


@endpoint("POST", "/timers/{timerId}/ack", Timer, Ack)
async def ack(call: Call) -> Timer:
    """Somebody goes on after the timer has fired. CONFLICT when somebody has said so before."""
    run, name, token = from_id("t", "timer", call.path["timerId"], 3)
    if call.body.token != token:
        raise ApiError("CONFLICT", "the token is not one of this timer")
    return timer(call, run, name, await call.ask(wire.TimersAck(run=run, name=name)))


@endpoint("PUT", "/barriers/by-name/{name}", Barrier, Meet)
@endpoint("POST", "/barriers", Barrier, Meet, status=201)
async def meet(call: Call) -> Barrier:
    """A barrier; does not arrive at it. Without a name it is one of its own."""
    body, name = call.body, _name(call, "barrier")
    reply = await call.ask(wire.BarriersDeclare(run=body.scope_id, name=name, count=body.target))
    return barrier(body.scope_id, name, reply)


@endpoint("POST", "/barriers/{barrierId}/arrive", Barrier, Arrive)
async def arrive(call: Call) -> Barrier:
    """Counts a worker, once for each label; does not wait."""
    run, name, target = _barrier_of(call)
    request = wire.BarriersArrive(run=run, name=name, count=target, worker=call.body.arrival_key, wait_ms=0)
    return barrier(run, name, await call.ask(request))


@endpoint("GET", "/barriers/{barrierId}", Barrier)
async def look(call: Call) -> Barrier:
    """How a barrier stands."""
    run, name, _ = _barrier_of(call)
    return barrier(run, name, await call.ask(wire.BarriersGet(run=run, name=name)))


def _name(call: Call, kind: str) -> str:
    return name_in(call.path["name"]) if "name" in call.path else call.own_name(kind)


def _barrier_of(call: Call) -> tuple[str, str, int]:
    """Run, name and target in an id. Raises ApiError."""
    text = call.path["barrierId"]
    run, name, target = from_id("x", "barrier", text, 3)
    if not (target.isascii() and target.isdigit() and len(target) <= 16 and 0 < int(target) <= WHOLE_MAX):
        raise ApiError("NOT_FOUND", f"barrier {text[:100]} not found")
    return run, name, int(target)

"""How a call that waits for a limit or for slots stands."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runstated.http.call import Answer, Call, Nothing, endpoint
from runstated.http.waiters import Waiter

StateWord = Annotated[
    str, Meta(extra_json_schema={"enum": ["WAITING", "GRANTED", "SIGNALED", "CLAIMED", "EXPIRED", "CANCELLED"]})
]


class State(Answer, frozen=True):
    """WAITING; GRANTED (of a limit, with `consumptionId`) or SIGNALED (of slots); EXPIRED, CANCELLED or CLAIMED."""

    state: StateWord
    consumption_id: str | msgspec.UnsetType = msgspec.UNSET


class WaiterState(Answer, frozen=True):
    """The same, of a call that has just come."""

    waiter_id: str
    state: StateWord
    consumption_id: str | msgspec.UnsetType = msgspec.UNSET


def state_of(waiter: Waiter) -> WaiterState:
    return WaiterState(waiter_id=waiter.id, **_how(waiter.id, waiter.state))


def _how(waiter_id: str, state: str) -> dict[str, Any]:
    """The SDK before 0.3 takes GRANTED for true only with the id of what was consumed; here that is the waiter's."""
    return {"state": state, "consumption_id": waiter_id} if state == "GRANTED" else {"state": state}


@endpoint("GET", "/allowance-waiters/{waiterId}", State)
@endpoint("GET", "/permit-waiters/{waiterId}", State)
async def waiting(call: Call) -> State:
    """How a waiting call stands."""
    waiter_id = call.path["waiterId"]
    return State(**_how(waiter_id, await call.waiters.state(call.access, waiter_id)))


@endpoint("POST", "/allowance-waiters/{waiterId}/cancel", State, Nothing)
@endpoint("POST", "/permit-waiters/{waiterId}/cancel", State, Nothing)
async def cancel(call: Call) -> State:
    """Its caller has given up: a grant that won the race stands, what was promised goes to the next in line."""
    waiter_id = call.path["waiterId"]
    return State(**_how(waiter_id, await call.waiters.cancel(call.access, waiter_id)))

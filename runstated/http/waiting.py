"""How a call that waits for a limit or for slots stands."""

from __future__ import annotations

from runstated.http.call import Answer, Call, Nothing, endpoint


class WaiterState(Answer, frozen=True):
    """WAITING; GRANTED (of a limit) or SIGNALED (of slots); EXPIRED, CANCELLED or CLAIMED."""

    waiter_id: str
    state: str


class State(Answer, frozen=True):
    state: str


@endpoint("GET", "/allowance-waiters/{waiterId}", State)
@endpoint("GET", "/permit-waiters/{waiterId}", State)
async def waiting(call: Call) -> State:
    """How a waiting call stands."""
    return State(state=await call.waiters.state(call.access, call.path["waiterId"]))


@endpoint("POST", "/allowance-waiters/{waiterId}/cancel", State, Nothing)
@endpoint("POST", "/permit-waiters/{waiterId}/cancel", State, Nothing)
async def cancel(call: Call) -> State:
    """Its caller has given up: a grant that won the race stands, what was promised goes to the next in line."""
    return State(state=await call.waiters.cancel(call.access, call.path["waiterId"]))

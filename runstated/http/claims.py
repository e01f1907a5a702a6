"""Claims, of the SDK before 0.3: a key of a run that one process holds for a while. They are once keys that nobody
completes, under a prefix of their own."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from runstate import wire
from runstated.http.call import Answer, Body, Call, Done, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import Holder, LeaseSeconds, TokenText
from runstated.http.holds import Renew, Renewed, renewed
from runstated.http.names import from_token, to_token

PREFIX = "claim/"


class Take(Body, frozen=True):
    scope_id: wire.Id
    key: Annotated[str, Meta(min_length=1, max_length=256)]
    holder: Holder = ""
    holder_session: Holder = ""
    lease_seconds: LeaseSeconds = 30


class Claim(Answer, frozen=True):
    """`generation` grows with every claim."""

    generation: int
    token: str
    lease_expires_at: str


class Release(Body, frozen=True):
    token: TokenText


@endpoint("POST", "/claims", Claim, Take, status=201)
async def take(call: Call) -> Claim:
    """Takes a key without waiting: CLAIM_HELD while somebody has it."""
    body = call.body
    lease_ms = body.lease_seconds * 1000
    request = wire.OnceAcquire(run=body.scope_id, key=PREFIX + body.key, lease_ms=lease_ms, wait_ms=0)
    reply = await call.ask(request, worker=body.holder)
    if not isinstance(reply, wire.OnceGranted):
        raise ApiError("CLAIM_HELD", f"somebody holds the claim {body.key}")
    token = to_token(reply.token, reply.secret)
    return Claim(generation=reply.token, token=token, lease_expires_at=call.lease_ends(reply.token))


@endpoint("POST", "/claims/{key}/renew", Renewed, Renew)
async def renew(call: Call) -> Renewed:
    """Renews the hold; the token alone says which."""
    return await renewed(call)


@endpoint("POST", "/claims/{key}/release", Done, Release)
async def release(call: Call) -> Done:
    """Gives the key back: anybody may claim it next."""
    token, secret = from_token(call.body.token)
    reply = await call.ask(wire.Release(token=token, secret=secret))
    if not reply.held:
        raise ApiError("STALE_CLAIM", "the claim was released before, or its lease has lapsed")
    return Done()

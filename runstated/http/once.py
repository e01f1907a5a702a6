"""Once keys."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runstate import wire
from runstated.http import holds
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.fields import ErrorText, Holder, LeaseSeconds, TokenText, WaitMs, null
from runstated.http.names import compact, from_token, to_token

UNSET = msgspec.UNSET


class Key(Body, frozen=True):
    """A key of a run."""

    scope_id: wire.Id
    key: wire.Key


class Look(Key, frozen=True):
    wait_ms: WaitMs = 0


class Acquire(Key, frozen=True):
    holder: Holder = ""
    holder_session: Holder = ""
    lease_seconds: LeaseSeconds = 30


class Renew(Key, frozen=True):
    token: TokenText
    lease_seconds: LeaseSeconds = 30


class Complete(Key, frozen=True):
    token: TokenText
    result: msgspec.Raw = msgspec.field(default_factory=null)


class Fail(Key, frozen=True):
    token: TokenText
    error: ErrorText = ""
    max_attempts: wire.Attempts = 3


class KeyState(Answer, frozen=True):
    """How a key stands: OPEN, HELD, DONE (with `result`), FAILED (with `lastError`), or ACQUIRED (with `token`)."""

    state: Annotated[str, Meta(extra_json_schema={"enum": ["OPEN", "HELD", "DONE", "FAILED", "ACQUIRED"]})]
    attempts: int | msgspec.UnsetType = UNSET
    token: str | msgspec.UnsetType = UNSET
    result: msgspec.Raw | msgspec.UnsetType = UNSET
    last_error: str | msgspec.UnsetType = UNSET


def view(reply: Any) -> KeyState:
    if isinstance(reply, wire.OnceGranted):
        return KeyState(state="ACQUIRED", token=to_token(reply.token, reply.secret), attempts=reply.attempt - 1)
    if isinstance(reply, wire.OnceDone):
        return KeyState(state="DONE", result=msgspec.Raw(reply.result.encode()))
    if isinstance(reply, wire.OnceFailed):
        return KeyState(state="FAILED", last_error=reply.error, attempts=reply.attempts)
    state = "OPEN" if isinstance(reply, wire.OnceOpen) else "HELD"
    return KeyState(state=state, attempts=reply.attempts)


@endpoint("POST", "/once/acquire", KeyState, Acquire)
async def acquire(call: Call) -> KeyState:
    """Takes a key if nobody has it; does not wait."""
    body = call.body
    lease_ms = body.lease_seconds * 1000
    return view(
        await call.ask(
            wire.OnceAcquire(run=body.scope_id, key=body.key, lease_ms=lease_ms, wait_ms=0), worker=body.holder
        )
    )


@endpoint("GET", "/once", KeyState, Look)
async def look(call: Call) -> KeyState:
    """How a key stands; waits as long as it is held."""
    body = call.body
    return view(await call.ask(wire.OnceGet(run=body.scope_id, key=body.key, wait_ms=body.wait_ms)))


@endpoint("POST", "/once/renew", holds.Renewed, Renew)
async def renew(call: Call) -> holds.Renewed:
    """Renews the hold."""
    return await holds.renewed(call)


@endpoint("POST", "/once/complete", KeyState, Complete)
async def complete(call: Call) -> KeyState:
    """Records the result."""
    body = call.body
    token, secret = from_token(body.token)
    result = compact(body.result)
    await call.ask(wire.OnceComplete(run=body.scope_id, key=body.key, token=token, secret=secret, result=result))
    return KeyState(state="DONE")


@endpoint("POST", "/once/fail", KeyState, Fail)
async def fail(call: Call) -> KeyState:
    """Counts a failure."""
    body = call.body
    token, secret = from_token(body.token)
    reply = await call.ask(
        wire.OnceFail(
            run=body.scope_id,
            key=body.key,
            token=token,
            secret=secret,
            error=body.error,
            attempts=body.max_attempts,
        )
    )
    return KeyState(state="FAILED" if reply.failed else "OPEN", attempts=reply.attempts)

"""What the holds of keys, slots and jobs have in common: a token, and its renewal."""

from __future__ import annotations

from runstate import wire
from runstated.http.call import Answer, Body, Call
from runstated.http.fields import LeaseSeconds, TokenText
from runstated.http.names import from_token, to_iso


class Renew(Body, frozen=True):
    """Renews a hold, from now on of `leaseSeconds`."""

    token: TokenText
    lease_seconds: LeaseSeconds = 30


class Renewed(Answer, frozen=True):
    lease_expires_at: str


async def renewed(call: Call) -> Renewed:
    """Renews the hold whose token the body names."""
    token, secret = from_token(call.body.token)
    request = wire.Renew(token=token, secret=secret, lease_ms=call.body.lease_seconds * 1000)
    return Renewed(lease_expires_at=to_iso((await call.ask(request)).lease_expires_ms))

"""Arrival numbers that come back with a repeat: they count only with a proof that they were given for that request.

After a restart nothing else tells who stood where, and a small number would stand before everybody.
"""

from __future__ import annotations

import hashlib
from typing import Any

from runstate import wire
from runstated.domain import replies
from runstated.domain.numbers import Numbers
from runstated.domain.waits import Call, CallKey

SECRET = "ticket_secret"  # see numbers.py


def parked(numbers: Numbers, call: Call, behind: tuple[int, ...]) -> wire.Parked:
    """What tells a caller that it waits."""
    shown = proof(numbers, call.key, call.request, call.ticket)
    return wire.Parked(call=call.request_id, ticket=call.ticket, proof=shown, behind=behind)


def proof(numbers: Numbers, key: CallKey, request: wire.Request[Any], ticket: int) -> int:
    """63 bits that only this database gives for a request and its arrival number."""
    text = f"{key[0]}\0{key[1]}\0{replies.fingerprint(key, request)}\0{ticket}"
    secret = numbers.last[SECRET].to_bytes(8, "big")
    digest = hashlib.blake2b(text.encode(), key=secret, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

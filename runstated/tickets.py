"""Arrival numbers that come back with a repeat: they count only with a proof that they were given for that request.

After a restart nothing else tells who stood where, and a small number would stand before everybody.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from runstate import wire
from runstated import replies
from runstated.lines import Memory
from runstated.waits import Call, CallKey

SECRET = "ticket_secret"  # kept among the counters: 62 random bits


def make_secret(memory: Memory) -> None:
    """What the proofs are made with, once for each database."""
    if SECRET not in memory.counters:
        memory.counters[SECRET] = secrets.randbits(62)
        memory.counters_changed.add(SECRET)


def parked(counters: Mapping[str, int], call: Call, behind: tuple[int, ...]) -> wire.Parked:
    """What tells a caller that it waits."""
    shown = proof(counters[SECRET], call.key, call.request, call.ticket)
    return wire.Parked(call=call.request_id, ticket=call.ticket, proof=shown, behind=behind)


def proof(secret: int, key: CallKey, request: wire.Request[Any], ticket: int) -> int:
    """63 bits that only this database gives for a request and its arrival number."""
    text = f"{key[0]}\0{key[1]}\0{replies.fingerprint(key, request)}\0{ticket}"
    digest = hashlib.blake2b(text.encode(), key=secret.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

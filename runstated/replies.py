"""Replies that are kept until the client has them: a repeat of their request must not do its work twice.

A reply is written in the transaction of its effect. It goes when the client says that it has it, with its session, or
with the lease that it granted: an answer with a dead token must never be given again.
"""

import zlib
from typing import Any

import msgspec

from runstate import wire
from runstated.lines import CallKey
from runstated.store.tx import Refusal, Tx

_to_text = msgspec.json.Encoder().encode
_from_text = msgspec.json.Decoder(wire.AnyReply).decode
_no_jobs = wire.JobsGranted()


class OtherRequest(Refusal):
    """this request id was used for another request of the same session"""

    code = "IDEMPOTENCY_CONFLICT"


def keep(tx: Tx, key: CallKey, request: wire.Request[Any], reply: wire.Reply) -> None:
    """Keeps the reply, if a repeat of its request would do harm. Who wants no reply (id 0) cannot repeat."""
    if key[1] and request.replayed and reply.kept and reply != _no_jobs:
        new = tx.run(
            "INSERT INTO replies (session, request, fingerprint, reply)"
            " VALUES (:session, :request, :fingerprint, :reply) ON CONFLICT (session, request) DO NOTHING",
            session=key[0],
            request=key[1],
            fingerprint=_fingerprint(request),
            reply=_to_text(reply).decode(),
        )
        if not new:  # the id is in use, and this is not said to be a repeat
            raise OtherRequest


def kept(tx: Tx, key: CallKey, request: wire.Request[Any]) -> wire.Reply | None:
    """The reply this request got before. Raises OtherRequest when its id was another request's."""
    row = tx.one(
        "SELECT fingerprint, reply FROM replies WHERE session = :session AND request = :request",
        session=key[0],
        request=key[1],
    )
    if row is None:
        return None
    if row[0] != _fingerprint(request):
        raise OtherRequest
    reply: wire.Reply = _from_text(row[1])
    return reply


def forget(tx: Tx, session: str, request_ids: tuple[int, ...]) -> None:
    """The client has these."""
    for request_id in request_ids:
        tx.run(
            "DELETE FROM replies WHERE session = :session AND request = :request",
            session=session,
            request=request_id,
        )


def _fingerprint(request: wire.Request[Any]) -> str:
    """Tells two requests apart, whatever a repeat says of the time that is left."""
    if isinstance(request, wire.WaitingRequest):
        request = msgspec.structs.replace(request, again=False, wait_ms=None, ticket=0)
    elif request.again:
        request = msgspec.structs.replace(request, again=False)
    return f"{zlib.crc32(wire.encode(request)):08x}"

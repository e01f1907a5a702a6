"""Replies that are kept until the client has them: a repeat of their request must not do its work twice.

A reply is written in the transaction of its effect. It goes when the client says that it has it, with its session, or
with the lease that it granted: an answer with a dead token must never be given again.
"""

import zlib
from typing import Any

import msgspec

from runstate import wire
from runstated.domain import leases
from runstated.store.tx import Refusal, Tx
from runstated.waits import CallKey

_to_text = msgspec.json.Encoder().encode
_from_text = msgspec.json.Decoder(wire.AnyReply).decode
_no_jobs = wire.JobsGranted()

WITHOUT_EFFECT = (wire.Error, wire.OnceHeld, wire.OnceOpen, wire.OnceFailed, wire.LimitBusy, wire.SlotsBusy)
KEPT_MS = 24 * 3_600_000  # of a request that asks for it, whatever becomes of its session
KEPT_MAX = 20_000  # of these; some 5 MB
REMOVED_IN_ONE_STEP = 500
OLDEST_KEPT = "SELECT until_ms FROM replies WHERE until_ms IS NOT NULL ORDER BY until_ms LIMIT 1"


class OtherRequest(Refusal):
    """The request id is not new."""

    code = "IDEMPOTENCY_CONFLICT"
    says = "this request id was used for another request of the same session"


def keep(tx: Tx, key: CallKey, request: wire.Request[Any], reply: wire.Reply) -> None:
    """Keeps the reply, if a repeat of its request would do harm, or the request says so. Who wants no reply (id 0)
    cannot repeat."""
    if not key[1] or isinstance(reply, WITHOUT_EFFECT) or reply == _no_jobs:
        return
    if isinstance(request, wire.OnceAcquire) and isinstance(reply, wire.OnceDone):
        return  # of a key that was done before: no effect either
    if not request.keep and not (request.replayed and reply.kept):
        return
    until_ms = tx.now_ms + KEPT_MS if request.keep else None
    new = tx.run(
        "INSERT INTO replies (session, request, fingerprint, reply, until_ms)"
        " VALUES (:session, :request, :fingerprint, :reply, :until) ON CONFLICT (session, request) DO NOTHING",
        session=leases.caller_of(key[0]) if request.keep else key[0],
        request=key[1],
        fingerprint=_fingerprint(key, request),
        reply=_to_text(_without_payload(reply) if request.keep else reply).decode(),
        until=until_ms,
    )
    if not new:  # the id is in use, and this is not said to be a repeat
        raise OtherRequest
    if until_ms is not None:
        tx.due(until_ms)


def tick(tx: Tx) -> int | None:
    """Removes what has been kept long enough, and the oldest of too many; when to look again."""
    many = tx.one("SELECT count(*) FROM replies WHERE until_ms IS NOT NULL")
    surplus = min(REMOVED_IN_ONE_STEP, max(0, (many[0] if many else 0) - KEPT_MAX))
    first = tx.one(OLDEST_KEPT)
    due = REMOVED_IN_ONE_STEP if first is not None and first[0] <= tx.now_ms else 0
    for before, limit in ((tx.now_ms, due), (2**62, surplus)):
        if not limit:
            continue
        tx.run(
            "DELETE FROM replies WHERE (session, request) IN (SELECT session, request FROM replies"
            " WHERE until_ms IS NOT NULL AND until_ms <= :before ORDER BY until_ms LIMIT :limit)",
            before=before,
            limit=limit,
        )
        first = tx.one(OLDEST_KEPT)
    return first[0] if first else None


def _without_payload(reply: wire.Reply) -> wire.Reply:
    """What is kept for a day must not be large: a result is where it belongs, and the caller sent it."""
    if isinstance(reply, wire.OnceDone):
        return wire.OnceDone(result="null")
    return msgspec.structs.replace(reply, result=None) if isinstance(reply, wire.JobView) else reply


def kept(tx: Tx, key: CallKey, request: wire.Request[Any]) -> wire.Reply | None:
    """The reply this request got before. Raises OtherRequest when its id was another request's."""
    row = tx.one(
        "SELECT fingerprint, reply FROM replies WHERE session = :session AND request = :request",
        session=leases.caller_of(key[0]) if request.keep else key[0],
        request=key[1],
    )
    if row is None:
        return None
    if row[0] != _fingerprint(key, request):
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


def _fingerprint(key: CallKey, request: wire.Request[Any]) -> str:
    """Tells two requests apart, whatever a repeat says of the time that is left."""
    session = key[0].encode() if request.keep else b""
    if isinstance(request, wire.WaitingRequest):
        request = msgspec.structs.replace(request, again=False, wait_ms=None, ticket=0)
    elif request.again:
        request = msgspec.structs.replace(request, again=False)
    return f"{zlib.crc32(session + wire.encode(request)):08x}"

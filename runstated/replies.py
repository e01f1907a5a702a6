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
KEPT_MAX = 100_000  # of these, of one caller; its oldest go first ...
KEPT_BYTES_MAX = 32 * 1024 * 1024  # ... also when these bytes are more
LOOK_EACH = 100  # replies that one caller keeps between two looks at their number and bytes
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
    text = _to_text(_without_payload(reply) if request.keep else reply).decode()
    new = tx.run(
        "INSERT INTO replies (session, request, fingerprint, reply, until_ms, bytes)"
        " VALUES (:session, :request, :fingerprint, :reply, :until, :bytes) ON CONFLICT (session, request) DO NOTHING",
        session=leases.caller_of(key[0]) if request.keep else key[0],
        request=key[1],
        fingerprint=fingerprint(key, request),
        reply=text,
        until=until_ms,
        bytes=len(text),
    )
    if not new:  # the id is in use, and this is not said to be a repeat
        raise OtherRequest
    if until_ms is not None:
        tx.due(until_ms)
        caller = leases.caller_of(key[0])
        if tx.is_nth(("kept", caller), LOOK_EACH):
            _drop_surplus(tx, caller)


def tick(tx: Tx) -> int | None:
    """Removes what has been kept long enough; when to look again."""
    first = tx.one(OLDEST_KEPT)
    if first is not None and first[0] <= tx.now_ms:
        tx.run(
            "DELETE FROM replies WHERE (session, request) IN (SELECT session, request FROM replies"
            " WHERE until_ms IS NOT NULL AND until_ms <= :now ORDER BY until_ms LIMIT :many)",
            now=tx.now_ms,
            many=REMOVED_IN_ONE_STEP,
        )
        first = tx.one(OLDEST_KEPT)
    return first[0] if first else None


def _drop_surplus(tx: Tx, caller: str) -> None:
    """What a caller has kept beyond its number or bytes goes, the oldest first; others lose nothing by it."""
    row = tx.one(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM replies WHERE session = :caller AND until_ms IS NOT NULL",
        caller=caller,
    )
    number, size = row or (0, 0)
    surplus = max(number - KEPT_MAX, 2 * LOOK_EACH if size > KEPT_BYTES_MAX else 0)
    if surplus <= 0:
        return
    tx.run(
        "DELETE FROM replies WHERE (session, request) IN (SELECT session, request FROM replies"
        " WHERE session = :caller AND until_ms IS NOT NULL ORDER BY until_ms LIMIT :surplus)",
        caller=caller,
        surplus=surplus,
    )
    oldest = tx.one(
        "SELECT until_ms FROM replies WHERE session = :caller AND until_ms IS NOT NULL ORDER BY until_ms LIMIT 1",
        caller=caller,
    )
    if oldest is not None:
        tx.keeps_for(caller, tx.now_ms + KEPT_MS - oldest[0])


def refusable(key: CallKey, request: wire.Request[Any]) -> CallKey | None:
    """Who can be told to send the request again; None: nobody. What gives something back and wants no answer (id 0) is
    never refused because the daemon cannot write."""
    return key if key[1] or not request.gives else None


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
    if row[0] != fingerprint(key, request):
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


def fingerprint(key: CallKey, request: wire.Request[Any]) -> str:
    """Tells two requests apart, whatever a repeat says of the time that is left and of what is held around it."""
    session = key[0].encode() if request.keep else b""
    if isinstance(request, wire.WaitingRequest):
        request = msgspec.structs.replace(
            request, again=False, wait_ms=None, ticket=0, proof=0, within=(), inherited=()
        )
    elif request.again:
        request = msgspec.structs.replace(request, again=False)
    return f"{zlib.crc32(session + wire.encode(request)):08x}"

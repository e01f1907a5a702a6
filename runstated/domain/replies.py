"""Replies that are kept until the client has them: a repeat of their request must not do its work twice.

A reply is written with its effect. It goes when the client says that it has it, with its session, or with the lease
that it granted: an answer with a dead token must never be given again. A request that asks for it (``keep``: callers
without a connection) has its reply kept for a day; these are on disk only. A reply that granted a lease is not kept at
all: it is told once more from the lease, see repeats.py.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runstate import wire
from runstated.domain.answers import Refusal
from runstated.domain.core import Core
from runstated.domain.tables import Index, Live, Table
from runstated.domain.waits import CallKey


@dataclass(slots=True, eq=False)
class Kept:
    """A reply. ``session``: of the session or, of one that is kept for a day, of its caller (see ``caller_of``).
    ``reply``: JSON text, of ``bytes`` characters. ``until_ms``: wall time, None while its session lives."""

    session: str
    request: int
    space: str
    fingerprint: str
    reply: str
    until_ms: int | None = None
    bytes: int = 0


REPLIES = Table(
    "replies",
    Kept,
    key=("session", "request"),
    live=Live("until_ms", (None,), indexed=False),  # the others are bounded, too
    indexes=(
        Index("replies_due", ("until_ms",), not_null="until_ms"),
        Index("replies_of_caller", ("session", "until_ms", "bytes"), not_null="until_ms"),
    ),
)

_to_text = msgspec.json.Encoder().encode
_from_text = msgspec.json.Decoder(wire.AnyReply).decode
_no_jobs = wire.JobsGranted()

WITHOUT_EFFECT = (wire.Error, wire.OnceHeld, wire.OnceOpen, wire.OnceFailed, wire.LimitBusy, wire.SlotsBusy)
FROM_LEASES = (wire.OnceGranted, wire.SlotsGranted, wire.JobsGranted, wire.BudgetReserved)
KEPT_MS = 24 * 3_600_000  # of a request that asks for it, whatever becomes of its session
LOOK_EACH = 100  # replies that one caller has kept for a day between two looks at their number and bytes


@dataclass(slots=True)
class Replies:
    """Those of each session that are in memory. ``of_callers``: how many each caller has had kept for a day since the
    last look at them; ``many``: whose are to be looked at."""

    of_session: dict[str, dict[int, Kept]] = field(default_factory=dict)
    of_callers: dict[str, int] = field(default_factory=dict)
    many: dict[str, None] = field(default_factory=dict)


class OtherRequest(Refusal):
    """The request id is not new."""

    code = "IDEMPOTENCY_CONFLICT"
    says = "this request id was used for another request of the same session"


def is_kept(key: CallKey, request: wire.Request[Any], reply: wire.Reply) -> bool:
    """Whether a repeat of the request would do harm, or the request says so. Who wants no reply (id 0) cannot
    repeat."""
    if not key[1] or isinstance(reply, WITHOUT_EFFECT) or reply == _no_jobs:
        return False
    if isinstance(request, wire.OnceAcquire) and isinstance(reply, wire.OnceDone):
        return False  # of a key that was done before: no effect either
    return request.keep or (request.replayed and reply.kept and not isinstance(reply, FROM_LEASES))


def keep(core: Core, key: CallKey, request: wire.Request[Any], reply: wire.Reply) -> None:
    """Keeps the reply, if ``is_kept`` says so."""
    if not is_kept(key, request, reply):
        return
    text = _to_text(_without_payload(reply) if request.keep else reply).decode()
    kept = Kept(
        caller_of(key[0]) if request.keep else key[0],
        key[1],
        core.space,
        fingerprint(key, request),
        text,
        core.now_ms + KEPT_MS if request.keep else None,
        len(text),
    )
    core.put(REPLIES, kept)
    if request.keep:
        _count(core.index(Replies), kept.session)
    else:
        core.index(Replies).of_session.setdefault(kept.session, {})[kept.request] = kept


def _count(replies: Replies, caller: str) -> None:
    number = replies.of_callers.get(caller, 0) + 1
    if number == LOOK_EACH:
        replies.many[caller] = None
    replies.of_callers[caller] = number % LOOK_EACH


def load(core: Core) -> None:
    """The look-up table, after the objects were loaded."""
    for kept in core.live(REPLIES).values():
        core.index(Replies).of_session.setdefault(kept.session, {})[kept.request] = kept


def find(core: Core, key: CallKey, request: wire.Request[Any]) -> wire.Reply | None:
    """The reply this request got before. Raises Missing, and OtherRequest when its id was another request's."""
    kept = core.find(REPLIES, (caller_of(key[0]), key[1])) if request.keep else core.live(REPLIES).get(key)
    if kept is None:
        return None
    if kept.fingerprint != fingerprint(key, request):
        raise OtherRequest
    reply: wire.Reply = _from_text(kept.reply)
    return reply


def forget(core: Core, session: str, request: int) -> None:
    """The client has it."""
    of_session = core.index(Replies).of_session.get(session)
    kept = of_session.pop(request, None) if of_session else None
    if kept is not None:
        core.remove(REPLIES, kept)
        if not of_session:
            del core.index(Replies).of_session[session]


def forget_session(core: Core, session: str) -> None:
    """The session is gone. What is kept for a day stays."""
    for request in list(core.index(Replies).of_session.get(session, ())):
        forget(core, session, request)


def forget_for_a_day(core: Core, session: str, request: int) -> None:
    """An answer that was kept for a day must not be given again: what it granted has ended."""
    core.remove(REPLIES, Kept(caller_of(session), request, core.space, "", ""))


def caller_of(session: str) -> str:
    """Whose the replies are that are kept for a day: the sessions of one key over HTTP, one for each worker label, are
    those of one caller and share its request ids. See ``Access.session_name``."""
    return session.rpartition("/")[0] if session.startswith("http/") else session


def refusable(key: CallKey, request: wire.Request[Any]) -> CallKey | None:
    """Who can be told to send the request again; None: nobody. What gives something back and wants no answer (id 0) is
    never refused because the daemon cannot write."""
    return key if key[1] or not request.gives else None


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


def _without_payload(reply: wire.Reply) -> wire.Reply:
    """What is kept for a day must not be large: a result is where it belongs, and the caller sent it."""
    if isinstance(reply, wire.OnceDone):
        return wire.OnceDone(result="null")
    return msgspec.structs.replace(reply, result=None) if isinstance(reply, wire.JobView) else reply

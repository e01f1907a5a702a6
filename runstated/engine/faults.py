"""What a request is answered with when answering it fails: every request gets an answer, whatever goes wrong.

The caller's fault is its refusal. The disk's is UNAVAILABLE, and may pass. Ours is INTERNAL where nothing was changed:
it is logged, and a repeat would fail in the same way. Where something was changed already it is a ``Fault``: nothing
of the turn is committed, and the process ends.
"""

from __future__ import annotations

import logging
import os
import sqlite3

from runstate import wire
from runstated.domain.answers import Refusal, ValidationFailed
from runstated.store.errors import is_damage, is_trouble

log = logging.getLogger(__name__)

EXIT_SOFTWARE = 70  # as in sysexits.h


class Fault(Exception):
    """We failed in the middle of a change. ``doing``: a request, as its verb and fingerprint, or a step of our own."""

    def __init__(self, doing: str, cause: BaseException) -> None:
        super().__init__(f"{doing}: {type(cause).__name__}: {cause}")
        self.doing = doing
        self.why = f"{type(cause).__name__}: {cause}"


class FailedBefore(Refusal):
    """The request made us fail in the middle of a change, and is not run again for an hour."""

    code = "INTERNAL"


def reply(fault: Exception, *, doing: str = "read") -> wire.Error:
    """The answer to a request that raised ``fault`` and has changed nothing. ``doing``: what the daemon wanted of its
    database."""
    if isinstance(fault, Refusal):
        return fault.reply()
    if isinstance(fault, OverflowError):
        return ValidationFailed("a number in the request does not fit into 64 bits").reply()
    log.error("a request failed", exc_info=fault)
    if isinstance(fault, sqlite3.Error) and is_trouble(fault):
        return unavailable(fault, doing=doing)
    if isinstance(fault, sqlite3.DatabaseError) and is_damage(fault):
        message = "what is stored for this request is damaged: restore a backup with `runstated restore`"
    else:
        message = f"the daemon failed at this request ({type(fault).__name__}); see its log"
    return wire.Error(code="INTERNAL", message=message)


def unavailable(cause: object, *, doing: str = "write to") -> wire.Error:
    """The answer while the daemon cannot serve; nothing was recorded, and the caller may try again."""
    return wire.Error(
        code="UNAVAILABLE",
        message=f"the daemon cannot {doing} its database ({cause}); nothing was recorded",
        retryable=True,
    )


def encode(message: wire.Reply | wire.Push) -> bytes:
    """The bytes of a reply or a push; of one that cannot be encoded, those of an error that says so."""
    try:
        return wire.encode(message)
    except Exception as fault:
        log.error("a %s cannot be encoded", type(message).__name__, exc_info=fault)
        told = f"the daemon cannot encode its answer ({type(fault).__name__}); see its log"
        return wire.encode(wire.Error(code="INTERNAL", message=told))


def leave(fault: BaseException | None) -> None:
    """A daemon whose engine has failed in the middle of a change would answer wrongly. All that was acknowledged is on
    disk, and its clients start another one."""
    log.critical("the engine has failed; leaving", exc_info=fault)
    logging.shutdown()
    os._exit(EXIT_SOFTWARE)

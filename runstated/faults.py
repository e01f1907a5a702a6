"""What a request is answered with when answering it fails: every request gets an answer, whatever goes wrong.

The caller's fault is its refusal. The disk's is UNAVAILABLE, and may pass. Ours, and what is damaged in the file, is
INTERNAL: it is logged, and a repeat would fail in the same way.
"""

import logging
import sqlite3

from runstate import wire
from runstated.store.tx import Refusal, ValidationFailed

log = logging.getLogger(__name__)

SQLITE_ERROR, SQLITE_CORRUPT, SQLITE_NOTADB = 1, 11, 26  # sqlite3 names them from Python 3.11 on
UNDECODABLE = "Could not decode to UTF-8"  # sqlite3's own words; it goes on with the text itself
NOT_OF_DISK = (UNDECODABLE, "no such ", "near ")  # where there is no code


def is_of_disk(fault: Exception) -> bool:
    """Whether the disk (or another process's lock on the file) refused, and not we or what is stored."""
    if not isinstance(fault, sqlite3.OperationalError):
        return False
    code: int | None = getattr(fault, "sqlite_errorcode", None)
    return not str(fault).startswith(NOT_OF_DISK) if code is None else code & 0xFF != SQLITE_ERROR


def reply(fault: Exception, *, doing: str = "write to") -> wire.Error:
    """The answer to a request that raised ``fault``. ``doing``: what the daemon wanted of its database."""
    if isinstance(fault, Refusal):
        return fault.reply()
    if isinstance(fault, OverflowError):
        return ValidationFailed("a number in the request does not fit into 64 bits").reply()
    log.error("a request failed", exc_info=fault)
    if is_of_disk(fault):
        return unavailable(fault, doing=doing)
    if _is_damage(fault):
        message = "what is stored for this request is damaged: restore a backup with `runstated restore`"
    else:
        message = f"the daemon failed at this request ({type(fault).__name__}); see its log"
    return wire.Error(code="INTERNAL", message=message)


def unavailable(cause: object, *, doing: str = "write to", is_known: bool = True) -> wire.Error:
    """The answer while the daemon cannot serve; the caller may try again. ``is_known``: that nothing was recorded."""
    outcome = "nothing was recorded" if is_known else "whether this request was recorded is not known: repeat it"
    return wire.Error(
        code="UNAVAILABLE", message=f"the daemon cannot {doing} its database ({cause}); {outcome}", retryable=True
    )


def encode(message: wire.Reply | wire.Push) -> bytes:
    """The bytes of a reply or a push; of one that cannot be encoded, those of an error that says so."""
    try:
        return wire.encode(message)
    except Exception as fault:
        log.error("a %s cannot be encoded", type(message).__name__, exc_info=fault)
        told = f"the daemon cannot encode its answer ({type(fault).__name__}); see its log"
        return wire.encode(wire.Error(code="INTERNAL", message=told))


def _is_undecodable(fault: Exception) -> bool:
    return isinstance(fault, sqlite3.OperationalError) and str(fault).startswith(UNDECODABLE)


def _is_damage(fault: Exception) -> bool:
    code: int = getattr(fault, "sqlite_errorcode", 0) & 0xFF
    return _is_undecodable(fault) or code in (SQLITE_CORRUPT, SQLITE_NOTADB)

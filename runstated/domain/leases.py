"""Leases: the one primitive. Somebody holds something, under a token, until they let go, die or fall silent.

    (nothing) --grant--> live --drop (completed, failed, released)--> gone
                          |  ^ beat (in memory)
                          +--lapse / death--> gone, and the noun says what that means for it

A token is a number that is never given twice; it tells holds apart and proves nothing. A caller who ends or renews a
hold proves that it was given to them: their session holds it, or they show its secret, which only this database can
make (numbers.py). A hold that is gone is "you lost it", never a second outcome.
"""

from __future__ import annotations

import hashlib
import hmac

from runstate import wire
from runstated.domain import replies
from runstated.domain.answers import Refusal, TooMany
from runstated.domain.core import Core
from runstated.domain.holds import LEASES, Lease, Units, pool_topic


class LeaseGone(Refusal):
    """The hold has ended."""

    code = "LEASE_LOST"
    says = "the hold is gone, or is another session's: it may have lapsed, and somebody else may have it now"


def too_many(core: Core, more: int = 1) -> TooMany | None:
    """The refusal where the caller's session may not hold so many more leases."""
    if core.holds.number_of_session(core.caller.session) + more <= wire.HELD_MAX:
        return None
    return TooMany(f"this session holds {wire.HELD_MAX} leases already, which is the most one may have")


def check_room(core: Core, more: int = 1) -> None:
    """Raises it. To be asked before anything is changed."""
    refused = too_many(core, more)
    if refused is not None:
        raise refused


def grant(core: Core, kind: str, subject: str, run: str, length_ms: int, *, units: int = 0, needs: int = 0) -> Lease:
    """A new hold of the caller."""
    caller = core.caller
    request = caller.request
    is_kept = request is not None and request.keep  # then the reply itself is, and the lease need not know it
    lease = Lease(
        core.next("token"),
        core.space,
        kind,
        subject,
        run,
        caller.session,
        caller.request_id,
        length_ms,
        core.now_ms,
        units,
        needs,
        "" if request is None or is_kept else replies.fingerprint((caller.session, caller.request_id), request),
    )
    core.put(LEASES, lease)
    core.holds.add(lease, core.lease_ms)
    return lease


def secret_of(core: Core, lease: Lease) -> str:
    """What proves the hold from another session."""
    return core.numbers.secret_of(lease.token)


def take_units(core: Core, lease: Lease, pool: Units, units: int) -> None:
    """Units of a pool go with a lease, from now on; ``Lease.units`` or ``Lease.needs`` says so on disk."""
    core.holds.add_units(lease, pool, units)


def find(core: Core, token: int, secret: str) -> Lease | None:
    """A live hold that the caller has proved to be theirs. A secret that is shown decides alone: sessions over HTTP are
    shared by label."""
    lease = core.holds.of_token.get(token)
    return lease if lease is not None and is_proved(core, token, lease.session, lease.proof, secret) else None


def is_proved(core: Core, token: int, session: str, proof: str, secret: str) -> bool:
    """Whether the caller has proved that the hold with this token is, or was, theirs."""
    if not secret:
        return session == core.caller.session
    if proof:  # of an older version, which made secrets at random and kept their digests
        return hmac.compare_digest(hashlib.sha256(secret.encode()).hexdigest(), proof)
    return hmac.compare_digest(secret.encode(), core.numbers.secret_of(token).encode())


def drop(core: Core, lease: Lease) -> None:
    """Ends the hold. Its units are free, and their lines are looked at."""
    core.remove(LEASES, lease)
    core.holds.drop(lease)
    for pool, _ in lease.taken:
        core.wake(pool_topic(pool.id))
    if lease.needs:
        core.unnamed.append(lease.needs)
    run = core.looked_after.pop(lease.token, None)
    if run is not None:
        core.revisit_run(run)
    if not core.holds.is_any_in_run(lease.run):
        core.emptied[lease.run] = None
    # What names a reservation may be told again: settling it a second time changes nothing.
    if not lease.fingerprint and lease.request and lease.kind != "budget":
        replies.forget(core, lease.session, lease.request)
        replies.forget_for_a_day(core, lease.session, lease.request)


def renew(core: Core, lease: Lease, length_ms: int) -> int:
    """Gives a lease its full, perhaps another, length; when it lapses, as an estimate in wall time."""
    is_other = lease.length_ms != length_ms
    core.holds.renew(lease, length_ms, core.lease_ms)
    if is_other:
        core.put(LEASES, lease)
    return core.lease_epoch_ms + lease.expires


def is_own(core: Core, session: str, token: int) -> bool:
    """Whether a live lease is the session's, or that of another one of its process in the same space."""
    lease = core.holds.of_token.get(token)
    if lease is None or lease.session == session:
        return lease is not None
    process = core.process_of.get(session, "")
    return bool(process) and process == core.process_of.get(lease.session)

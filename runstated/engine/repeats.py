"""A request that was sent before: its answer is told once more, and its work is not done twice.

Who holds something under a request had the answer that granted it: that is told again from the lease, which is on disk
with its grant. Other answers whose repeat would do harm are kept beside their effect (domain/replies.py).
"""

from __future__ import annotations

from typing import Any

from runstate import wire
from runstated.domain import admission, budgets, leases, once, replies
from runstated.domain.answers import must
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.waits import CallKey


def check_new(core: Core, key: CallKey, request: wire.Request[Any]) -> None:
    """Raises OtherRequest where the id of a request that is not said to be a repeat was used before, as far as that
    is known."""
    if not key[1] or not (request.keep or request.replayed):
        return
    known = replies.find(core, key, request) if request.keep else core.live(replies.REPLIES).get(key)
    if known is not None or any(lease.fingerprint for lease in core.holds.of_request(*key)):
        raise replies.OtherRequest


def answer(core: Core, key: CallKey, request: wire.Request[Any]) -> wire.Reply | None:
    """The answer that this request got before; None if it had none that must be told again. Raises OtherRequest when
    its id was another request's, and Missing."""
    held = [lease for lease in core.holds.of_request(*key) if lease.fingerprint]
    if not held or request.keep:
        return replies.find(core, key, request)
    if any(lease.fingerprint != replies.fingerprint(key, request) for lease in held):
        raise replies.OtherRequest
    return _of_leases(core, request, held)


def _of_leases(core: Core, request: wire.Request[Any], held: list[Lease]) -> wire.Reply:
    lease = held[0]
    if isinstance(request, wire.OnceAcquire):
        key = core.live(once.KEYS).get((lease.run, lease.subject))
        return once.granted(core, key or once.Key(lease.run, lease.subject), lease)
    if isinstance(request, wire.SlotsAcquire):
        return wire.SlotsGranted(token=lease.token, secret=leases.secret_of(core, lease))
    if isinstance(request, wire.QueuesAdmit):
        return admission.granted(core, request, held)
    must(isinstance(request, wire.BudgetsReserve), f"{type(request).__name__} grants no lease")
    return budgets.granted(core, lease)

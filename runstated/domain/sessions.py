"""Sessions: who uses the daemon, and what becomes of what they held when they are gone.

    hello --> open --bye | its process died | not resumed in time--> gone: all it held is handed on, in one step

A session is one process's connection with one configuration. Its row names the process, so that after a restart of
the daemon the holders that are gone can be told from those that will be back. This file stands above the nouns: it
alone knows which noun a kind of lease belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runstate import wire
from runstated.domain import budgets, leases, once, queues, replies, runs, slots
from runstated.domain.access import Access
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.tables import Table

GONE: Mapping[str, Callable[[Core, Lease, str], None]] = {
    once.KIND: once.gone,
    queues.KIND: queues.gone,
    slots.KIND: slots.gone,
    budgets.KIND: budgets.gone,
}


@dataclass(slots=True, eq=False)
class Session:
    """A session. ``session``: its name, see ``Access.session_name``. ``process``: see processes.Process.to_text; empty
    where the daemon cannot tell. ``key``: the id of the key it was opened with, empty for the owner. ``transport``:
    unix, tcp or http."""

    session: str
    space: str
    worker: str
    process: str
    pid: int
    command: str
    key: str = ""
    transport: str = "unix"
    opened_ms: int = 0

    @property
    def id(self) -> str:
        """What its client calls it."""
        return self.session[len(Access(self.space, key=self.key).session_name(self.transport, "")) :]


SESSIONS = Table("sessions", Session, key=("session",))


def open_session(core: Core, row: Session) -> None:
    """A session begins; one that comes back only changes its worker label."""
    known = core.live(SESSIONS).get(row.session)
    if known is None:
        row.opened_ms = core.now_ms
        core.put(SESSIONS, row)
    elif known.worker != row.worker:
        known.worker = row.worker
        core.put(SESSIONS, known)
    core.process_of[row.session] = row.process if known is None else known.process
    core.worker_of[row.session] = row.worker


def rejoin(core: Core, names: tuple[str, ...]) -> tuple[wire.RunEnded, ...]:
    """The session wants to hear of the end of these runs; those that are over already are told at once. Raises
    Missing."""
    found = [(name, runs.find(core, name)) for name in names]
    ended = []
    for name, run in found:
        over = runs.refusal(run, core.now_ms) if run else None
        if run is None:
            ended.append(wire.RunEnded(run=name, state="stopped", message=f"the run {name} is not known any more"))
        elif over is not None:
            state = runs.effective(run, core.now_ms)
            ended.append(wire.RunEnded(run=name, state=state, message=str(over)))
        else:
            core.subscribe(runs.signal(name))
    return tuple(ended)


def end(core: Core, session: str, how: str) -> None:
    """The session is gone (``how``: died, or released after an orderly end): all it held is handed on."""
    for lease in core.holds.of_session(session):
        hand_on(core, lease, how)
    runs.leave(core, session)
    replies.forget_session(core, session)
    row = core.live(SESSIONS).get(session)
    if row is not None:
        core.remove(SESSIONS, row)
    core.process_of.pop(session, None)
    core.worker_of.pop(session, None)


def lapse(core: Core, lease: Lease) -> None:
    """A lease has not been renewed in time: its holder is told that it has lost it."""
    if lease.token in core.holds.of_token:
        hand_on(core, lease, "lapsed")
        core.push(lease.session, wire.LeaseLost(token=lease.token, reason="the lease was not renewed in time"))


def renew(core: Core, request: wire.Renew) -> wire.Renewed:
    """Renews one lease of the caller's. Of a job it is refused as gone when the run is over (a worker also serves child
    runs, and must not take the end of one for the end of its own); of anything else with the run's refusal."""
    lease = leases.find(core, request.token, request.secret)
    if lease is None:
        raise leases.LeaseGone
    over = runs.refusal(runs.in_memory(core, lease.run), core.now_ms)
    if over is not None:
        raise leases.LeaseGone if lease.kind == queues.KIND else over
    return wire.Renewed(lease_expires_ms=leases.renew(core, lease, request.lease_ms))


def release(core: Core, request: wire.Release) -> wire.Released:
    """Gives a hold back without an outcome; a token that is gone already, or is not the caller's, is no error."""
    lease = leases.find(core, request.token, request.secret)
    if lease is not None:
        leases.drop(core, lease)
        GONE[lease.kind](core, lease, "released")
    return wire.Released(held=lease is not None)


def give_back(core: Core, session: str, request: int) -> None:
    """The caller of a request has gone: whatever the request was given and is still held goes back."""
    for lease in core.holds.of_request(session, request):
        hand_on(core, lease, "released")
    replies.forget(core, session, request)


def hand_on(core: Core, lease: Lease, how: str) -> None:
    """Ends a hold without an outcome and lets its noun say what that means."""
    leases.drop(core, lease)
    GONE[lease.kind](core, lease, how)
    if how != "released":
        _emit_lost(core, lease, how)


def load(core: Core) -> None:
    """After the objects were loaded: what others want to know of the sessions."""
    for row in core.live(SESSIONS).values():
        core.process_of[row.session] = row.process
        core.worker_of[row.session] = row.worker


def _emit_lost(core: Core, lease: Lease, how: str) -> None:
    row = core.live(SESSIONS).get(lease.session)
    data = {
        "scopeId": lease.run,
        "kind": lease.kind,
        "name": lease.subject,
        "worker": row.worker if row else "",
        "pid": row.pid if row else 0,
        "how": how,
    }
    core.emit("lease.lost", lease.run, runs.in_memory(core, lease.run).path, data)

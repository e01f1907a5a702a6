"""What the file says of the memory: counters, leases, sessions. Read at the start of the daemon."""

from __future__ import annotations

from runstated.domain import leases, runs, sessions
from runstated.lines import Memory
from runstated.store.tx import Tx


def load(tx: Tx, memory: Memory, lease_ms: int) -> list[sessions.Session]:
    """Fills the memory; the sessions, none of which is connected. Every lease gets its full length."""
    for counter, value in tx.all("SELECT counter, value FROM counters WHERE counter NOT LIKE 'instance:%'"):
        memory.counters[counter] = value
    for lease in leases.all_live(tx):
        memory.hold(lease.token, lease.session, lease.length_ms, lease.topic, lease_ms)
    for token, subject in leases.all_units(tx):
        memory.hold_also(token, subject)
    known = sessions.get_all(tx)
    for session in known:
        memory.open(session.session, session.space, session.process, away=True)
    for run in runs.orphans(tx):
        memory.revisit[run] = None
    memory.commit()
    return known

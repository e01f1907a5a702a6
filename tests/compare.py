"""Forgetting is impossible: what a start would load equals what is in memory.

Each object is compared by what the database keeps of it, and every look-up table by what it says. Exempt, and named
here only: waiting calls, beats, caches, times on the steady clock, and what is in memory only because it is about to
leave it.
"""

from __future__ import annotations

from typing import Any

from runstated.domain import budgets, jobs, limits, needs, nouns, once, queues, replies, runs, slots, timers
from runstated.domain.core import Core
from runstated.domain.holds import LEASES, Lease
from runstated.engine.spaces import Spaces

COUNTED_AHEAD = ("epoch", "ticket_secret", "lease_secret")  # a start makes them


def check_same(memory: Spaces, loaded: Spaces) -> None:
    """Raises AssertionError that names what differs."""
    numbers = {name: value for name, value in memory.numbers.last.items() if name not in COUNTED_AHEAD}
    assert numbers == {name: value for name, value in loaded.numbers.last.items() if name not in COUNTED_AHEAD}
    for space in {*memory.cores, *loaded.cores}:
        ours, theirs = canon(memory.of(space)), canon(loaded.of(space))
        for name in ours:
            assert ours[name] == theirs[name], f"{name} in {space!r}: in memory {ours[name]}, on disk {theirs[name]}"


def canon(core: Core) -> dict[str, Any]:
    """A space as plain values."""
    return {
        **{table.name: _rows(core, table) for table in nouns.TABLES if not table.appended},
        "leases that live": {token: _lease(lease) for token, lease in core.holds.of_token.items()},
        "leases of": _holds(core),
        "runs": _runs(core),
        "ready jobs": _ready(core),
        "jobs of": _jobs(core),
        "names": _names(core),
        "sets of needs": {number: found.named for number, found in core.live(needs.SETS).items()},
        "units": {pool.id: pool.used for pool in core.live(slots.POOLS).values()},
        "reservations of": {token: set(found) for token, found in core.index(budgets.Money).of_token.items()},
        "held keys": {
            key: found.lease.token
            for key, found in core.live(once.KEYS).items()
            if found.lease is not None and _is_active(core, key[0])
        },
        "kept replies": {session: set(found) for session, found in core.index(replies.Replies).of_session.items()},
        "sessions": (dict(core.worker_of), dict(core.process_of)),
    }


def _is_active(core: Core, run: str) -> bool:
    found = core.live(runs.RUNS).get(run)
    return found is not None and found.state == "active"


def _rows(core: Core, table: Any) -> dict[Any, Any]:
    """What is live of a table. Of runs that are over nothing is; a key that was only asked for is not."""
    found = {}
    for key, thing in core.live(table).items():
        if table.run is not None and not _is_active(core, getattr(thing, table.run)):
            continue
        if not table.is_live(thing) and table is not runs.RUNS:
            continue
        if table is once.KEYS and not (thing.failures or thing.takeovers or thing.lease):
            continue
        found[key] = table.row_of(thing)
    return found


def _lease(lease: Lease) -> Any:
    return LEASES.row_of(lease), sorted((pool.id, units) for pool, units in lease.taken), lease.topic


def _holds(core: Core) -> Any:
    holds = core.holds
    indexes = (holds._of_session, holds._of_request, holds._of_run, holds._of_topic)
    return [{key: set(members) for key, members in index.items()} for index in indexes]  # type: ignore[attr-defined]


def _runs(core: Core) -> Any:
    index = core.index(runs.Runs)
    return (
        {name: run.run for name, run in index.of_name.items()},
        {owner: set(owned) for owner, owned in index.of_owner.items()},
        {run.run: {name for name, child in run.children.items() if child.state == "active"}
         for run in core.live(runs.RUNS).values() if run.state == "active"},
    )  # fmt: skip


def _jobs(core: Core) -> Any:
    """Of each active run: its open jobs, the counts, and how many name each set of needs."""
    of_run = core.index(jobs.Jobs).of_run.items()
    return {
        run: (
            {place: job.job for place, job in known.of_key.items() if job.state in jobs.WAITING},
            set(known.counts),
            known.naming,
        )
        for run, known in of_run
        if known.counts
    }


def _ready(core: Core) -> Any:
    """The ready jobs of active runs, oldest first, and in which runs there are any below one."""
    ready = core.index(jobs.Jobs).ready
    own = {
        place: [(age, job.job) for age, _, job in entries]
        for place, entries in ready.all().items()
        if _is_active(core, place[0])
    }
    below = {place: {run for run in found if _is_active(core, run)} for place, found in ready.below().items()}
    return own, {place: found for place, found in below.items() if found}


def _names(core: Core) -> Any:
    return (
        {name: limit.id for name, limit in core.index(limits.Limits).of_name.items()},
        {name: pool.id for name, pool in core.index(slots.Pools).of_name.items()},
        {name: budget.id for name, budget in core.index(budgets.Money).of_name.items()},
        {text: found.needs for text, found in core.index(needs.Sets).of_text.items()},
        sorted(core.live(queues.QUEUES)),
        {entry[1:] for entry in core.index(timers.Timers).due if entry[1:] in _rows(core, timers.TIMERS)},
    )

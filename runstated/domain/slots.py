"""Slots: so many units of a pool at a time, shared by all runs of a space.

    acquire --> held (a lease and its units) --released, died, lapsed--> free for the head of the line

What is in use is the sum of what the leases hold, of slots and of jobs. More units than a pool has are refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import leases, runs
from runstated.domain.answers import Conflict, NotFound, Parked, ValidationFailed
from runstated.domain.core import Core
from runstated.domain.holds import Lease, pool_topic
from runstated.domain.tables import UNSTORED, Table
from runstated.domain.waits import Topic

KIND = "slots"
HOLDERS_SHOWN = 100


@dataclass(slots=True, eq=False)
class Pool:
    """A pool. ``used``: the units that leases hold."""

    id: str
    space: str
    name: str
    max: int
    used: int = field(default=0, metadata=UNSTORED)


POOLS = Table("pools", Pool, key=("id",))


@dataclass(slots=True)
class Pools:
    """By name."""

    of_name: dict[str, Pool] = field(default_factory=dict)


def line(pool: str) -> Topic:
    """Where those stand who want units of a pool."""
    return pool_topic(pool)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(core: Core, request: wire.SlotsDeclare) -> wire.SlotsView:
    """Creates or verifies a pool; without ``max`` it must exist."""
    pool = plan_ensure(core, request.pool, request.max)
    do_ensure(core, pool)
    return _view(core, pool)


def acquire(core: Core, request: wire.SlotsAcquire) -> wire.SlotsGranted | Parked:
    """Holds units; waits in line until they are free."""
    runs.active(core, request.run)
    pool = plan_ensure(core, request.pool, request.max)
    check_units(pool, request.units)
    if not has_room(core, pool, request.units):
        do_ensure(core, pool)
        return Parked(lines=(line(pool.id),), signals=(runs.signal(request.run),), late=wire.SlotsBusy())
    leases.check_room(core)
    do_ensure(core, pool)
    lease = leases.grant(core, KIND, pool.id, request.run, request.lease_ms, units=request.units)
    leases.take_units(core, lease, pool, request.units)
    return wire.SlotsGranted(token=lease.token, secret=leases.secret_of(core, lease))


def look(core: Core, request: wire.SlotsGet) -> wire.SlotsView:
    """A pool: what is used, and by whom."""
    return _view(core, find(core, request.pool))


# ---------------------------------------------------------------------------------------------------- for queues


def find(core: Core, name: str) -> Pool:
    """The pool of that name. Raises NotFound."""
    pool = core.index(Pools).of_name.get(name)
    if pool is None:
        raise NotFound(f"slots {name} not found: declare them with max, or with setup()")
    return pool


def by_id(core: Core, pool: str) -> Pool:
    """A pool that something refers to: none is ever removed."""
    return core.live(POOLS)[pool]


def check_units(pool: Pool, units: int) -> None:
    """Raises ValidationFailed for more units than the pool has: they would never be free."""
    if units > pool.max:
        raise ValidationFailed(f"{units} units exceed the slots {pool.name}, which are {pool.max}")


def has_room(core: Core, pool: Pool, units: int, age: int | None = None) -> bool:
    """Whether the units are free and nobody stands before the caller (``age``: a job's)."""
    return pool.used + units <= pool.max and not core.ahead(line(pool.id), age)


# ---------------------------------------------------------------------------------------------------- leases, memory


def gone(core: Core, lease: Lease, how: str) -> None:
    """The hold has ended; its units went, and their line was woken, with the lease."""


def load(core: Core) -> None:
    """After the objects were loaded: the names, and the units of leases of slots (those of jobs: needs.load)."""
    for pool in core.live(POOLS).values():
        core.index(Pools).of_name[pool.name] = pool
    for lease in core.holds.of_token.values():
        if lease.kind == KIND:
            leases.take_units(core, lease, by_id(core, lease.subject), lease.units)


# ---------------------------------------------------------------------------------------------------- helpers


def plan_ensure(core: Core, name: str, most: int | None) -> Pool:
    """The pool, a new one if ``most`` is given and there is none. Raises NotFound, Forbidden, Conflict."""
    pool = core.index(Pools).of_name.get(name)
    if pool is None and most is not None:
        core.need("resource_config", f"create the slots {name}")
        return Pool("", core.space, name, most)
    pool = find(core, name)
    if most is not None and most != pool.max:
        raise Conflict(f"slots {name} exist with max={pool.max}, this process declares max={most}")
    return pool


def do_ensure(core: Core, pool: Pool) -> None:
    """Keeps a pool that is new."""
    if not pool.id:
        pool.id = core.new_id("p")
        core.put(POOLS, pool)
        core.index(Pools).of_name[pool.name] = pool


def _view(core: Core, pool: Pool) -> wire.SlotsView:
    holders = sorted(core.holds.of_topic(line(pool.id)), key=lambda lease: lease.token)[:HOLDERS_SHOWN]
    return wire.SlotsView(
        id=pool.id,
        pool=pool.name,
        max=pool.max,
        used=pool.used,
        waiting=core.waiting(line(pool.id)),
        holders=tuple(core.worker_of.get(lease.session, "") for lease in holders),
    )

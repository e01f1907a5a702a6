"""Slots: so many units of a pool at a time, shared by all runs of a space.

    acquire --> held (a lease and its units) --released, died, lapsed--> free for the head of the line

Units in use are counted from the rows of what is held; there is no counter that could drift. A job's units are rows
under the job's token: they go with it. More units than a pool has are refused at once.
"""

from dataclasses import dataclass

from runstate import wire
from runstated.domain import leases, runs
from runstated.store.tx import Conflict, NotFound, Parked, Tx, ValidationFailed
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE pools (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    max BIGINT NOT NULL CHECK (max > 0)
);
CREATE UNIQUE INDEX pools_by_name ON pools (space, name);
"""

KIND = "slots"


@dataclass(frozen=True, slots=True)
class Pool:
    """A row."""

    id: str
    name: str
    max: int


def line(pool: str) -> Topic:
    return leases.topic(KIND, pool, "")


# ---------------------------------------------------------------------------------------------------- verbs


def declare(tx: Tx, request: wire.SlotsDeclare) -> wire.SlotsView:
    """Creates or verifies a pool; without ``max`` it must exist."""
    return _view(tx, ensure(tx, request.pool, request.max))


def acquire(tx: Tx, request: wire.SlotsAcquire) -> wire.SlotsGranted | Parked:
    """Holds units; waits in line until they are free."""
    runs.active(tx, request.run)
    pool = ensure(tx, request.pool, request.max)
    check_units(pool, request.units)
    if not has_room(tx, pool, request.units):
        return Parked(lines=(line(pool.id),), signals=(runs.signal(request.run),), late=wire.SlotsBusy())
    token, secret = leases.grant(tx, KIND, pool.id, request.run, request.lease_ms)
    leases.hold_units(tx, token, pool.id, request.units)
    return wire.SlotsGranted(token=token, secret=secret)


def look(tx: Tx, request: wire.SlotsGet) -> wire.SlotsView:
    """A pool: what is used, and by whom."""
    return _view(tx, find(tx, request.pool))


# ---------------------------------------------------------------------------------------------------- for queues


def find(tx: Tx, name: str) -> Pool:
    """The pool of that name. Raises NotFound."""
    row = tx.one(
        "SELECT id, name, max FROM pools WHERE space = :space AND name = :name", space=tx.caller.space, name=name
    )
    if row is None:
        raise NotFound(f"slots {name} not found: declare them with max, or with setup()")
    return Pool(*row)


def by_id(tx: Tx, pool: str) -> Pool:
    row = tx.one("SELECT id, name, max FROM pools WHERE id = :id", id=pool)
    assert row is not None, "pools are never removed"
    return Pool(*row)


def check_units(pool: Pool, units: int) -> None:
    """Raises ValidationFailed for more units than the pool has: they would never be free."""
    if units > pool.max:
        raise ValidationFailed(f"{units} units exceed the slots {pool.name}, which are {pool.max}")


def has_room(tx: Tx, pool: Pool, units: int, age: int | None = None) -> bool:
    """Whether the units are free and nobody stands before the caller (``age``: a job's)."""
    return leases.units_held(tx, pool.id) + units <= pool.max and not tx.ahead(line(pool.id), age)


# ---------------------------------------------------------------------------------------------------- helpers


def gone(tx: Tx, lease: leases.Lease, how: str) -> None:
    """The hold has ended; its units went, and their line was woken, with the lease's row."""


def ensure(tx: Tx, name: str, most: int | None) -> Pool:
    """The pool, created if ``most`` is given. Raises NotFound, Conflict."""
    space = tx.caller.space
    row = tx.one("SELECT id, name, max FROM pools WHERE space = :space AND name = :name", space=space, name=name)
    if row is None and most is not None:
        tx.need("resource_config", f"create the slots {name}")
        tx.run(
            "INSERT INTO pools (id, space, name, max) VALUES (:id, :space, :name, :max)",
            id=tx.new_id("p"),
            space=space,
            name=name,
            max=most,
        )
    pool = find(tx, name)
    if most is not None and most != pool.max:
        raise Conflict(f"slots {name} exist with max={pool.max}, this process declares max={most}")
    return pool


def _view(tx: Tx, pool: Pool) -> wire.SlotsView:
    holders = tx.all(
        "SELECT sessions.worker FROM units JOIN leases ON leases.token = units.token"
        " JOIN sessions ON sessions.session = leases.session WHERE units.pool = :pool ORDER BY units.token LIMIT 100",
        pool=pool.id,
    )
    return wire.SlotsView(
        id=pool.id,
        pool=pool.name,
        max=pool.max,
        used=leases.units_held(tx, pool.id),
        waiting=tx.waiting(line(pool.id)),
        holders=tuple(worker for (worker,) in holders),
    )

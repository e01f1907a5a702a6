"""Limits: so many units in each window of time, shared by all runs of a space.

    window open (used units count) --its end--> the next window, nothing used

Windows are fixed and aligned to the epoch. A window ends at its wall boundary or, if the wall clock went back, one
window of steady time after it opened; it is never opened twice. Units that were taken are spent, whatever becomes of
the work. A limit is a line: it is served by age, and its head holds up those behind it until its units fit.
"""

from dataclasses import dataclass, replace

from runstate import wire
from runstated.domain import runs
from runstated.store.tx import Conflict, NotFound, Parked, Tx, ValidationFailed, must
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE limits (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    max BIGINT NOT NULL CHECK (max > 0),
    per_seconds BIGINT NOT NULL CHECK (per_seconds BETWEEN 1 AND 86400),
    window_ms BIGINT NOT NULL DEFAULT 0,
    used BIGINT NOT NULL DEFAULT 0 CHECK (used BETWEEN 0 AND max)
);
CREATE UNIQUE INDEX limits_by_name ON limits (space, name);
CREATE INDEX limits_used ON limits (id) WHERE used > 0;
"""

# Version 8: ``tick`` looks at the limits that somebody waits for, not at all that are used.
SCHEMA_8 = """
DROP INDEX limits_used;
"""

KIND = "limit"
COLUMNS = "id, name, max, per_seconds, window_ms, used"
SLEWED_MS = 500  # a wall clock that runs behind steady time by this, and ...
SLEWED_SHARE = 1_000  # ... by this share of a window (twice what NTP slews), has not been set: no window ends by it


@dataclass(frozen=True, slots=True)
class Limit:
    """A row. ``window_ms``: when its latest window began, in wall time."""

    id: str
    name: str
    max: int
    per_seconds: int
    window_ms: int
    used: int

    @property
    def per_ms(self) -> int:
        return self.per_seconds * 1000


def line(limit: str) -> Topic:
    return (KIND, "", limit)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(tx: Tx, request: wire.LimitsDeclare) -> wire.LimitView:
    """Creates or verifies a limit; without sizes it must exist."""
    return _view(tx, _current(tx, ensure(tx, request.limit, request.max, request.per_seconds)))


def take(tx: Tx, request: wire.LimitsTake) -> wire.LimitTaken | Parked:
    """Spends units of the present window; waits in line until they fit."""
    runs.active(tx, request.run)
    limit = ensure(tx, request.limit, request.max, request.per_seconds)
    check_units(limit, request.units)
    if not has_room(tx, limit, request.units):
        return Parked(lines=(line(limit.id),), signals=(runs.signal(request.run),), late=wire.LimitBusy())
    spend(tx, limit.id, request.units)
    return wire.LimitTaken()


def look(tx: Tx, request: wire.LimitsGet) -> wire.LimitView:
    """A limit, with what is used of its present window."""
    limit = find(tx, request.limit)
    return _view(tx, replace(limit, used=0) if _is_over(tx, limit) else limit)


# ---------------------------------------------------------------------------------------------------- for queues


def find(tx: Tx, name: str) -> Limit:
    """The limit of that name. Raises NotFound."""
    row = tx.one(
        f"SELECT {COLUMNS} FROM limits WHERE space = :space AND name = :name", space=tx.caller.space, name=name
    )
    if row is None:
        raise NotFound(f"limit {name} not found: declare it with max and per, or with setup()")
    return Limit(*row)


def check_units(limit: Limit, units: int) -> None:
    """Raises ValidationFailed for more units than a window has: they would never come."""
    if units > limit.max:
        raise ValidationFailed(f"{units} units exceed the limit {limit.name}, which has {limit.max} in a window")


def by_id(tx: Tx, limit: str) -> Limit:
    row = tx.one(f"SELECT {COLUMNS} FROM limits WHERE id = :id", id=limit)
    assert row is not None, "limits are never removed"
    return Limit(*row)


def has_room(tx: Tx, limit: Limit, units: int, age: int | None = None) -> bool:
    """Whether the units fit into the present window and nobody stands before the caller (``age``: a job's)."""
    limit = _current(tx, limit)
    if limit.used + units <= limit.max and not tx.ahead(line(limit.id), age):
        return True
    _look_again(tx, limit)
    return False


def spend(tx: Tx, limit: str, units: int) -> None:
    changed = tx.run(
        "UPDATE limits SET used = used + :units WHERE id = :id AND used + :units <= max", id=limit, units=units
    )
    must(changed == 1, "looked at before")
    if tx.is_aside(line(limit)):
        tx.wake(line(limit))  # what was set aside may have been taken by who goes before: it must not hold up more


# ---------------------------------------------------------------------------------------------------- time


def tick(tx: Tx) -> int | None:
    """Windows that are over begin anew for those who wait in their lines; others begin with their next use. When to
    look again is said on both clocks."""
    for _, _, name in tx.awaited(KIND):
        limit = by_id(tx, name)
        if _is_over(tx, limit):
            _current(tx, limit)
        else:
            _look_again(tx, limit)
    return None


# ---------------------------------------------------------------------------------------------------- helpers


def ensure(tx: Tx, name: str, most: int | None, per_seconds: int | None) -> Limit:
    """The limit, created if sizes are given. Raises NotFound, Conflict, ValidationFailed."""
    if (most is None) != (per_seconds is None):
        raise ValidationFailed("a limit is declared with max and per_seconds together")
    space = tx.caller.space
    row = tx.one(f"SELECT {COLUMNS} FROM limits WHERE space = :space AND name = :name", space=space, name=name)
    if row is None and most is not None:
        tx.need("resource_config", f"create the limit {name}")
        tx.run(
            "INSERT INTO limits (id, space, name, max, per_seconds) VALUES (:id, :space, :name, :max, :per_seconds)",
            id=tx.new_id("l"),
            space=space,
            name=name,
            max=most,
            per_seconds=per_seconds,
        )
    limit = find(tx, name)
    if most is not None and (most, per_seconds) != (limit.max, limit.per_seconds):
        raise Conflict(
            f"limit {name} exists with {limit.max} units per {limit.per_seconds} s, this process declares {most} per"
            f" {per_seconds} s"
        )
    return limit


def _is_over(tx: Tx, limit: Limit) -> bool:
    """Whether the latest window has ended: by the wall or, if the wall clock went back since it opened, by steady time.
    When it opened is not known after a restart; then it is now."""
    if tx.now_ms >= limit.window_ms + limit.per_ms:
        return True
    opened = tx.opened(limit.id)
    if tx.lease_ms < opened.lease_ms + limit.per_ms:
        return False
    behind_ms = (tx.lease_ms - opened.lease_ms) - (tx.now_ms - opened.wall_ms)
    return tx.now_ms < limit.window_ms or behind_ms > SLEWED_MS + limit.per_ms // SLEWED_SHARE


def _current(tx: Tx, limit: Limit) -> Limit:
    """The limit with its present window, opened if the latest one is over."""
    if not _is_over(tx, limit):
        return limit
    # A clock that went back must not lead into windows that were open before: the latest keeps its name.
    window_ms = max(limit.window_ms, tx.now_ms - tx.now_ms % limit.per_ms)
    tx.run("UPDATE limits SET window_ms = :window_ms, used = 0 WHERE id = :id", id=limit.id, window_ms=window_ms)
    tx.open_window(limit.id)
    if tx.is_awaited(line(limit.id)):
        tx.wake(line(limit.id))  # whoever comes to the new window first, those who wait are served by age
    return replace(limit, window_ms=window_ms, used=0)


def _look_again(tx: Tx, limit: Limit) -> None:
    """Somebody waits for the end of the window: by the wall or, in case the wall clock goes back, by steady time."""
    tx.due(limit.window_ms + limit.per_ms)
    steady_ms = tx.opened(limit.id).lease_ms + limit.per_ms
    if steady_ms > tx.lease_ms:
        tx.due_steady(steady_ms)


def _view(tx: Tx, limit: Limit) -> wire.LimitView:
    return wire.LimitView(
        id=limit.id,
        limit=limit.name,
        max=limit.max,
        per_seconds=limit.per_seconds,
        used=limit.used,
        waiting=tx.waiting(line(limit.id)),
    )

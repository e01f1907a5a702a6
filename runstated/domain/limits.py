"""Limits: so many units in each window of time, shared by all runs of a space.

    window open (used units count) --its end--> the next window, nothing used

Windows are fixed and aligned to the epoch. A window ends at its wall boundary or, if the wall clock went back, one
window of steady time after it opened; it is never opened twice. Units that were taken are spent, whatever becomes of
the work. A limit is a line: it is served by age, and its head holds up those behind it until its units fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import runs
from runstated.domain.answers import Conflict, NotFound, Parked, ValidationFailed, must
from runstated.domain.core import Core
from runstated.domain.tables import Table
from runstated.domain.waits import Topic

KIND = "limit"
SLEWED_MS = 500  # a wall clock that runs behind steady time by this, and ...
SLEWED_SHARE = 1_000  # ... by this share of a window (twice what NTP slews), has not been set: no window ends by it


@dataclass(slots=True, eq=False)
class Limit:
    """A limit. ``window_ms``: when its latest window began, in wall time; ``used``: of that window."""

    id: str
    space: str
    name: str
    max: int
    per_seconds: int
    window_ms: int = 0
    used: int = 0

    @property
    def per_ms(self) -> int:
        return self.per_seconds * 1000


LIMITS = Table("limits", Limit, key=("id",))


@dataclass(slots=True)
class Limits:
    """By name."""

    of_name: dict[str, Limit] = field(default_factory=dict)


def line(limit: str) -> Topic:
    """Where those stand who want units of a limit."""
    return (KIND, "", limit)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(core: Core, request: wire.LimitsDeclare) -> wire.LimitView:
    """Creates or verifies a limit; without sizes it must exist."""
    limit = plan_ensure(core, request.limit, request.max, request.per_seconds)
    do_ensure(core, limit)
    _open_if_over(core, limit)
    return _view(core, limit, limit.used)


def take(core: Core, request: wire.LimitsTake) -> wire.LimitTaken | Parked:
    """Spends units of the present window; waits in line until they fit."""
    runs.active(core, request.run)
    limit = plan_ensure(core, request.limit, request.max, request.per_seconds)
    check_units(limit, request.units)
    do_ensure(core, limit)
    if not has_room(core, limit, request.units):
        return Parked(lines=(line(limit.id),), signals=(runs.signal(request.run),), late=wire.LimitBusy())
    spend(core, limit, request.units)
    return wire.LimitTaken()


def look(core: Core, request: wire.LimitsGet) -> wire.LimitView:
    """A limit, with what is used of its present window."""
    limit = find(core, request.limit)
    return _view(core, limit, 0 if _is_over(core, limit) else limit.used)


# ---------------------------------------------------------------------------------------------------- for queues


def find(core: Core, name: str) -> Limit:
    """The limit of that name. Raises NotFound."""
    limit = core.index(Limits).of_name.get(name)
    if limit is None:
        raise NotFound(f"limit {name} not found: declare it with max and per, or with setup()")
    return limit


def check_units(limit: Limit, units: int) -> None:
    """Raises ValidationFailed for more units than a window has: they would never come."""
    if units > limit.max:
        raise ValidationFailed(f"{units} units exceed the limit {limit.name}, which has {limit.max} in a window")


def by_id(core: Core, limit: str) -> Limit:
    """A limit that something refers to: none is ever removed."""
    return core.live(LIMITS)[limit]


def has_room(core: Core, limit: Limit, units: int, age: int | None = None) -> bool:
    """Whether the units fit into the present window and nobody stands before the caller (``age``: a job's). A window
    that is over begins anew by this."""
    _open_if_over(core, limit)
    if limit.used + units <= limit.max and not core.ahead(line(limit.id), age):
        return True
    _look_again(core, limit)
    return False


def spend(core: Core, limit: Limit, units: int) -> None:
    """Units of the present window are gone, after ``has_room`` said that there are so many."""
    must(limit.used + units <= limit.max, "looked at before")
    limit.used += units
    core.put(LIMITS, limit)
    if core.lines.is_aside(line(limit.id)):
        core.wake(line(limit.id))  # what was set aside may have been taken by who goes before: it must not hold up more


# ---------------------------------------------------------------------------------------------------- time, memory


def tick(core: Core) -> int | None:
    """Windows that are over begin anew for those who wait in their lines; others begin with their next use. When to
    look again is said on both clocks."""
    for _, _, name in core.lines.awaited(KIND):
        limit = by_id(core, name)
        if not _open_if_over(core, limit):
            _look_again(core, limit)
    return None


def load(core: Core) -> None:
    """After the objects were loaded: the names."""
    for limit in core.live(LIMITS).values():
        core.index(Limits).of_name[limit.name] = limit


# ---------------------------------------------------------------------------------------------------- helpers


def plan_ensure(core: Core, name: str, most: int | None, per_seconds: int | None) -> Limit:
    """The limit, a new one if sizes are given and there is none. Raises NotFound, Forbidden, Conflict,
    ValidationFailed."""
    if (most is None) != (per_seconds is None):
        raise ValidationFailed("a limit is declared with max and per_seconds together")
    limit = core.index(Limits).of_name.get(name)
    if limit is None and most is not None and per_seconds is not None:
        core.need("resource_config", f"create the limit {name}")
        return Limit("", core.space, name, most, per_seconds)
    limit = find(core, name)
    if most is not None and (most, per_seconds) != (limit.max, limit.per_seconds):
        raise Conflict(
            f"limit {name} exists with {limit.max} units per {limit.per_seconds} s, this process declares {most} per"
            f" {per_seconds} s"
        )
    return limit


def do_ensure(core: Core, limit: Limit) -> None:
    """Keeps a limit that is new."""
    if not limit.id:
        limit.id = core.new_id("l")
        core.put(LIMITS, limit)
        core.index(Limits).of_name[limit.name] = limit


def _is_over(core: Core, limit: Limit) -> bool:
    """Whether the latest window has ended: by the wall or, if the wall clock went back since it opened, by steady time.
    When it opened is not known after a restart; then it is now."""
    if core.now_ms >= limit.window_ms + limit.per_ms:
        return True
    opened = core.opened(limit.id)
    if core.lease_ms < opened.lease_ms + limit.per_ms:
        return False
    behind_ms = (core.lease_ms - opened.lease_ms) - (core.now_ms - opened.wall_ms)
    return core.now_ms < limit.window_ms or behind_ms > SLEWED_MS + limit.per_ms // SLEWED_SHARE


def _open_if_over(core: Core, limit: Limit) -> bool:
    """Opens the present window if the latest one is over; whether it was."""
    if not _is_over(core, limit):
        return False
    # A clock that went back must not lead into windows that were open before: the latest keeps its name.
    limit.window_ms = max(limit.window_ms, core.now_ms - core.now_ms % limit.per_ms)
    limit.used = 0
    core.put(LIMITS, limit)
    core.open_window(limit.id)
    if core.lines.is_awaited(line(limit.id)):
        core.wake(line(limit.id))  # whoever comes to the new window first, those who wait are served by age
    return True


def _look_again(core: Core, limit: Limit) -> None:
    """Somebody waits for the end of the window: by the wall or, in case the wall clock goes back, by steady time."""
    core.due(limit.window_ms + limit.per_ms)
    steady_ms = core.opened(limit.id).lease_ms + limit.per_ms
    if steady_ms > core.lease_ms:
        core.due_steady(steady_ms)


def _view(core: Core, limit: Limit, used: int) -> wire.LimitView:
    return wire.LimitView(
        id=limit.id,
        limit=limit.name,
        max=limit.max,
        per_seconds=limit.per_seconds,
        used=used,
        waiting=core.waiting(line(limit.id)),
    )

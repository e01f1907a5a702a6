"""Limits: so many units in each window of time, shared by all runs of a space.

    window open (used units count) --its end--> the next window, nothing used

Windows are fixed and aligned to the epoch. A window ends at its wall boundary or, if the wall clock went back, one
window of steady time after it opened; it is never opened twice. Units that were taken are spent, whatever becomes of
the work.

Who waits stands in the lines of all its limits, and is served by age. Whoever fits may pass those before it, but for
what is set aside for them: a job that lacks units of some limits can start when the last of their next windows opens,
so its units of each limit whose present window is still open then are set aside, until that window ends. Where its
next window opens before that or at the same time, setting aside would be in vain. So nobody starves: not who wants
much, nor who wants units of several limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import runs
from runstated.domain.answers import Conflict, NotFound, Parked, ValidationFailed, must
from runstated.domain.core import Core
from runstated.domain.stands import LAST, Looked
from runstated.domain.tables import Table
from runstated.domain.waits import LIMIT, UNTIL_A_WINDOW, Opening, Stand, StandPlace, Topic

KIND = LIMIT
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
    """By name; and what the clocks said of each other when those who wait were looked at last."""

    of_name: dict[str, Limit] = field(default_factory=dict)
    epoch_ms: int = 0


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
    """Spends units of the present window; waits until there are so many that are not set aside for others."""
    runs.active(core, request.run)
    limit = plan_ensure(core, request.limit, request.max, request.per_seconds)
    check_units(limit, request.units)
    do_ensure(core, limit)
    caller = core.caller
    place = (caller.rank, caller.ticket, 0, (caller.session, caller.request_id))
    topic = line(limit.id)
    if lacking(core, [(limit, request.units)], place, Looked()) is not None:
        return Parked(
            lines=(topic,),
            signals=(runs.signal(request.run),),
            late=wire.LimitBusy(),
            at={topic: (Stand(*place, request.units, 0),)},
        )
    spend(core, limit, request.units, place)
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


def lacking(
    core: Core, wanted: Sequence[tuple[Limit, int]], place: StandPlace, others: Looked
) -> dict[Topic, int] | None:
    """Whether who stands at a place lacks any of these units. None: it does not. Else its lines, and how long its units
    are set aside in each (see ``Stand.aside``). ``others``: the jobs that the same caller asked for before, which count
    by what is said of them here. Windows that are over begin anew by this."""
    for limit, _ in wanted:
        _open_if_over(core, limit)
    topics = [line(limit.id) for limit, _ in wanted]
    behind = any(topic in others.behind or core.lines.stands.is_behind(topic, place) for topic in topics)
    lacks = [limit for limit, units in wanted if behind or _free(core, limit, place, others) < units]
    if not lacks:
        return None
    for limit, _ in wanted:
        _look_again(core, limit)
    if behind:  # it is looked at again, after those: until then nothing changes
        others.behind.update(topics)
        return {topic: _aside_now(core, topic, place) for topic in topics}
    last_ms = max(left_ms(core, limit) for limit in lacks)
    return {line(limit.id): UNTIL_A_WINDOW * (left_ms(core, limit) > last_ms) for limit, _ in wanted}


def spend(core: Core, limit: Limit, units: int, place: StandPlace) -> None:
    """Units of the present window are gone, after ``lacking`` said that there are so many. Those for whom something is
    set aside that is not there any more are looked at: they must not hold up others for it."""
    must(limit.used + units <= limit.max, "looked at before")
    limit.used += units
    core.put(LIMITS, limit)
    stands, topic = core.lines.stands, line(limit.id)
    if stands.is_aside_for(topic, place[2]) or limit.max - limit.used < stands.set_aside(topic, LAST):
        stands.look_from(topic)


def may_have(core: Core, topic: Topic, stand: Stand) -> bool:
    """Whether one who waits is to be looked at: it may have what it wants, or something is set aside for it, here or in
    another line, that may be in vain by now."""
    limit = by_id(core, topic[-1])
    return (
        core.lines.calls[stand.key].aside
        or _is_over(core, limit)
        or _free(core, limit, stand.place, Looked()) >= stand.units
    )


# ---------------------------------------------------------------------------------------------------- time, memory


def look_at_clock(core: Core) -> None:
    """When a clock was set, windows open in another order than was expected: all who wait are looked at again."""
    index = core.index(Limits)
    if index.epoch_ms != core.lease_epoch_ms:
        index.epoch_ms = core.lease_epoch_ms
        for topic in core.lines.awaited(KIND):
            core.wake(topic)


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
    return core.lease_ms >= opened.lease_ms + limit.per_ms and _is_wall_behind(core, limit, opened)


def _is_wall_behind(core: Core, limit: Limit, opened: Opening, in_ms: int = 0) -> bool:
    """Whether the wall clock went back since the window opened, or is before its beginning (or will be, ``in_ms`` from
    now)."""
    behind_ms = (core.lease_ms - opened.lease_ms) - (core.now_ms - opened.wall_ms)
    return core.now_ms + in_ms < limit.window_ms or behind_ms > SLEWED_MS + limit.per_ms // SLEWED_SHARE


def left_ms(core: Core, limit: Limit) -> int:
    """How long until the next window opens, unless a clock is set."""
    left_ms = limit.window_ms + limit.per_ms - core.now_ms
    opened = core.opened(limit.id)
    steady_ms = opened.lease_ms + limit.per_ms - core.lease_ms
    return min(left_ms, steady_ms) if _is_wall_behind(core, limit, opened, steady_ms) else left_ms


def _free(core: Core, limit: Limit, place: StandPlace, others: Looked) -> int:
    """The units of the present window that somebody at a place may have."""
    topic = line(limit.id)
    free = limit.max - limit.used - core.lines.stands.set_aside(topic, place, others.numbers)
    return free - others.set_aside(topic, place)


def _aside_now(core: Core, topic: Topic, place: StandPlace) -> int:
    """How long something is set aside for who stands at a place, as it was said when it was looked at last."""
    call = core.lines.calls.get(place[3])
    stands = call.at.get(topic, ()) if call is not None else ()
    return next((stand.aside for stand in stands if stand.place == place), 0)


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
        _look_again(core, limit)  # not all of them may be, and those who lack units are not even looked at
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

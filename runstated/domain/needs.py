"""Needs: what a job must have before it starts. All of it is taken in one step, or nothing.

    budget lacking ----> it stands in that budget's line and holds up nobody
    limit lacking -----> it stands in the lines of all its limits; what is set aside for it there, limits.py says
    only slots lacking -> it stands in the lines of its limits and of those slots, so its units are set aside

Wants are looked at in that order. A set of needs is kept once, under a small number; number 0 in a job stands for "what
its queue's workers have declared last", which is looked up when the job is to start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from runstate import wire
from runstated.domain import budgets, leases, limits, slots
from runstated.domain.answers import ValidationFailed
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.stands import Looked
from runstated.domain.tables import UNSTORED, Table
from runstated.domain.waits import UNTIL_SLOTS, WATCH, Stand, StandPlace, Topic

OF_QUEUE = 0  # in a job: what its queue says


class Wants(msgspec.Struct, frozen=True):
    """A set of needs, by ids: (id, units) or (id, minor units)."""

    slots: tuple[tuple[str, int], ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    budgets: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slots or self.limits or self.budgets)


NOTHING = Wants()


@dataclass(slots=True, eq=False)
class NeedsSet:
    """A set of needs. ``text``: the wants as JSON. ``named``: how many queues, jobs that have not ended and leases name
    it; at none it is forgotten."""

    needs: int
    space: str
    text: str
    wants: Wants = field(default=NOTHING, metadata=UNSTORED)
    named: int = field(default=0, metadata=UNSTORED)

    def __post_init__(self) -> None:
        self.wants = msgspec.json.decode(self.text, type=Wants)


SETS = Table("needs", NeedsSet, key=("needs",))


@dataclass(slots=True)
class Sets:
    """By what they want."""

    of_text: dict[str, NeedsSet] = field(default_factory=dict)


def watch(space: str, queue: str) -> Topic:
    """Where workers stand whose jobs lack what the queue says they need, until it says something else."""
    return (WATCH, space, queue)


@dataclass(slots=True)
class Blocked:
    """Why jobs cannot start: the lines in which they stand, each by the age of its oldest job."""

    ages: dict[Topic, int] = field(default_factory=dict)
    wants: dict[Topic, Wants] = field(default_factory=dict)  # what that job needs, where it is in a line of it
    aside: bool = False
    looked: Looked = field(default_factory=Looked)

    def stand(self, line: Topic, age: int, wants: Wants = NOTHING) -> None:
        if age <= self.ages.get(line, age):
            self.ages[line] = age
            if wants:
                self.wants[line] = wants

    def stand_at(self, line: Topic, stand: Stand, wants: Wants) -> None:
        """In the line of a limit."""
        self.looked.at.setdefault(line, {})[stand.number] = stand
        self.aside |= stand.aside > 0
        self.stand(line, stand.age, wants)

    def at(self) -> dict[Topic, tuple[Stand, ...]]:
        """Where the jobs stand in the lines of limits."""
        return {line: tuple(stands.values()) for line, stands in self.looked.at.items() if stands}

    def before(self, line: Topic, age: int) -> bool:
        """Whether an older job of the same worker stands there."""
        return self.ages.get(line, age) < age


# ---------------------------------------------------------------------------------------------------- sets


def plan(core: Core, needs: wire.Needs | None, queue: str) -> str:
    """The text of a set of needs; "" for what the queue says. Raises NotFound for a name that does not exist,
    ValidationFailed for more than there is of something and for a name that occurs twice."""
    if needs is None:
        return ""
    for named in (needs.slots, needs.limits, needs.budgets):
        names = [need.name for need in named]
        for name in names:
            if names.count(name) > 1:
                raise ValidationFailed(f"{name} is needed twice: say it once, with all its units")
    wants = Wants(
        slots=tuple(_slots(core, need, queue) for need in needs.slots),
        limits=tuple(_limit(core, need, queue) for need in needs.limits),
        budgets=tuple(_budget(core, need, queue) for need in needs.budgets),
    )
    return msgspec.json.encode(wants).decode()


def do(core: Core, text: str, many: int = 1) -> int:
    """The number of a planned set, for so many more that name it."""
    if not text:
        return OF_QUEUE
    index = core.index(Sets)
    found = index.of_text.get(text)
    if found is None:
        found = index.of_text[text] = NeedsSet(core.next("needs"), core.space, text)
        core.put(SETS, found)
    found.named += many
    return found.needs


def name(core: Core, needs: int) -> None:
    """One more names the set."""
    if needs != OF_QUEUE:
        core.live(SETS)[needs].named += 1


def forget(core: Core, needs: int, many: int = 1) -> None:
    """So many less name the set; one that nobody names is no more."""
    if needs == OF_QUEUE:
        return
    found = core.live(SETS)[needs]
    found.named -= many
    if not found.named:
        core.remove(SETS, found)
        del core.index(Sets).of_text[found.text]


def get(core: Core, needs: int) -> Wants:
    """The set with that number; 0: nothing."""
    return NOTHING if needs == OF_QUEUE else core.live(SETS)[needs].wants


# ---------------------------------------------------------------------------------------------------- lacking, taking


def place(core: Core, age: int, number: int) -> StandPlace:
    """Where the caller stands for a job of that age and number, where limits are waited for."""
    return (1, age, number, (core.caller.session, core.caller.request_id))


def lacking(core: Core, wants: Wants, place: StandPlace, blocked: Blocked) -> bool:
    """Whether a job at a place lacks something; then ``blocked`` says where it stands."""
    age = place[1]
    blocked.looked.begin(place[2])
    short = [budgets.line(budget) for budget, amount in wants.budgets if budgets.by_id(core, budget).available < amount]
    if not short:
        short = _short_of_units(core, wants, place, blocked)
        if short:  # it holds up others only while it has the money: it looks again when some of that is gone
            short += [budgets.watch(budget) for budget, _ in wants.budgets]
    for line in short:
        blocked.stand(line, age, wants)
    return bool(short)


def _short_of_units(core: Core, wants: Wants, place: StandPlace, blocked: Blocked) -> list[Topic]:
    """The lines in which a job that has its money stands; none if it has all."""
    wanted = [(limits.by_id(core, limit), units) for limit, units in wants.limits]
    asides = limits.lacking(core, wanted, place, blocked.looked)
    short = []
    if asides is None:
        short = _short_of_slots(core, wants, place[1], blocked)
        asides = {limits.line(limit.id): UNTIL_SLOTS for limit, _ in wanted} if short else {}
    for (_, units), (line, aside) in zip(wanted, asides.items(), strict=False):
        blocked.stand_at(line, Stand(*place, units, aside), wants)
    return [*short, *asides]


def _short_of_slots(core: Core, wants: Wants, age: int, blocked: Blocked) -> list[Topic]:
    short = []
    for pool, units in wants.slots:
        line = slots.line(pool)
        if not slots.has_room(core, slots.by_id(core, pool), units, age) or blocked.before(line, age):
            short.append(line)
    return short


def suspect(core: Core, needs: int) -> None:
    """A job with that set begins to wait: for those who hold the slots it needs, perhaps, who may wait for it."""
    for pool, _ in get(core, needs).slots:
        core.suspect(slots.line(pool))


def held_up_by(core: Core, needs: int) -> list[Topic]:
    """The pools that have too few free slots for a job with that set: whoever waits for the job waits for those who
    hold them. (They are its signals only to say so: nothing is ever answered there.)"""
    short = []
    for name, units in get(core, needs).slots:
        pool = slots.by_id(core, name)
        if pool.used + units > pool.max:
            short.append(slots.line(name))
    return short


def take(core: Core, wants: Wants, lease: Lease, place: StandPlace) -> tuple[str, ...]:
    """Takes all of it under the lease of a job at a place, after ``lacking`` said that it is there; the ids of the
    reservations."""
    core.must_sync |= bool(wants.limits or wants.budgets)  # units and money stay spent when the holder's machine ends
    for limit, units in wants.limits:
        limits.spend(core, limits.by_id(core, limit), units, place)
    for pool, units in wants.slots:
        leases.take_units(core, lease, slots.by_id(core, pool), units)
    return tuple(budgets.hold(core, budgets.by_id(core, budget), lease, amount) for budget, amount in wants.budgets)


def load(core: Core) -> None:
    """After the objects were loaded: the texts, and the slots of jobs that run. Who names a set says so itself."""
    for found in core.live(SETS).values():
        core.index(Sets).of_text[found.text] = found
    for lease in core.holds.of_token.values():
        name(core, lease.needs)
        for pool, units in get(core, lease.needs).slots:
            leases.take_units(core, lease, slots.by_id(core, pool), units)


# A resource never changes its size, so a job that needs more than all of it would wait for ever: it is refused here.


def _slots(core: Core, need: wire.UnitsNeeded, queue: str) -> tuple[str, int]:
    pool = slots.find(core, need.name)
    if need.units > pool.max:
        raise ValidationFailed(
            f"a job of {queue} needs {need.units} units of the slots {pool.name}, which are {pool.max}"
        )
    return pool.id, need.units


def _limit(core: Core, need: wire.UnitsNeeded, queue: str) -> tuple[str, int]:
    limit = limits.find(core, need.name)
    if need.units > limit.max:
        raise ValidationFailed(
            f"a job of {queue} needs {need.units} units of the limit {limit.name}, which has {limit.max} in a window"
        )
    return limit.id, need.units


def _budget(core: Core, need: wire.MoneyNeeded, queue: str) -> tuple[str, int]:
    budget = budgets.find(core, need.name)
    if need.reserve_minor > budget.limit_minor:
        raise ValidationFailed(
            f"a job of {queue} reserves {need.reserve_minor} minor units of the budget {budget.name}, which has a limit"
            f" of {budget.limit_minor}"
        )
    return budget.id, need.reserve_minor

"""Needs: what a job must have before it starts. All of it is taken in one step, or nothing.

    budget lacking ----> it stands in that budget's line and holds up nobody
    limit lacking -----> it stands in that limit's line and holds up that limit only
    only slots lacking -> it stands in the lines of its limits and of those slots, so its units are set aside

Wants are looked at in that order. A set of needs is stored once, under a small number; number 0 in a job's row stands
for "what its queue's workers have declared last", which is looked up when the job is to start.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from runstate import wire
from runstated.domain import budgets, leases, limits, slots
from runstated.store.tx import Tx, ValidationFailed
from runstated.waits import WATCH, Topic

SCHEMA = """
CREATE TABLE needs (
    needs BIGINT NOT NULL PRIMARY KEY,
    wants TEXT NOT NULL
);
CREATE UNIQUE INDEX needs_by_wants ON needs (wants);
"""

OF_QUEUE = 0  # in a job's row: what its queue says


class Wants(msgspec.Struct, frozen=True):
    """A set of needs, by ids: (id, units) or (id, minor units)."""

    slots: tuple[tuple[str, int], ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    budgets: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slots or self.limits or self.budgets)


NOTHING = Wants()


def watch(space: str, queue: str) -> Topic:
    """Where workers stand whose jobs lack what the queue says they need, until it says something else."""
    return (WATCH, space, queue)


@dataclass(slots=True)
class Blocked:
    """Why jobs cannot start: the lines in which they stand, each by the age of its oldest job."""

    ages: dict[Topic, int] = field(default_factory=dict)
    wants: dict[Topic, Wants] = field(default_factory=dict)  # what that job needs, where it is in a line of it
    aside: bool = False

    def stand(self, line: Topic, age: int, wants: Wants = NOTHING) -> None:
        if age <= self.ages.get(line, age):
            self.ages[line] = age
            if wants:
                self.wants[line] = wants

    def before(self, line: Topic, age: int) -> bool:
        """Whether an older job of the same worker stands there."""
        return self.ages.get(line, age) < age


def number(tx: Tx, needs: wire.Needs, queue: str) -> int:
    """The number of a set of needs. Raises NotFound for a name that does not exist, ValidationFailed for more than
    there is of something and for a name that occurs twice."""
    for named in (needs.slots, needs.limits, needs.budgets):
        names = [need.name for need in named]
        for name in names:
            if names.count(name) > 1:
                raise ValidationFailed(f"{name} is needed twice: say it once, with all its units")
    wants = Wants(
        slots=tuple(_slots(tx, need, queue) for need in needs.slots),
        limits=tuple(_limit(tx, need, queue) for need in needs.limits),
        budgets=tuple(_budget(tx, need, queue) for need in needs.budgets),
    )
    text = msgspec.json.encode(wants).decode()
    row = tx.one("SELECT needs FROM needs WHERE wants = :wants", wants=text)
    if row is not None:
        return int(row[0])
    new = tx.next("needs")
    tx.run("INSERT INTO needs (needs, wants) VALUES (:needs, :wants)", needs=new, wants=text)
    return new


def get(tx: Tx, needs: int) -> Wants:
    """The set with that number; 0: nothing."""
    if needs == OF_QUEUE:
        return NOTHING
    row = tx.one("SELECT wants FROM needs WHERE needs = :needs", needs=needs)
    assert row is not None, "a set of needs that is named is there"
    return _parse(row[0])


def lacking(tx: Tx, wants: Wants, age: int, blocked: Blocked) -> bool:
    """Whether a job of that age lacks something; then ``blocked`` says where it stands."""
    short = [budgets.line(budget) for budget, amount in wants.budgets if budgets.by_id(tx, budget).available < amount]
    if not short:
        short = _short_of_units(tx, wants, age, blocked)
        if short:  # it holds up others only while it has the money: it looks again when some of that is gone
            short += [budgets.watch(budget) for budget, _ in wants.budgets]
    for line in short:
        blocked.stand(line, age, wants)
    return bool(short)


def _short_of_units(tx: Tx, wants: Wants, age: int, blocked: Blocked) -> list[Topic]:
    """The lines in which a job that has its money stands; none if it has all."""
    short = []
    for limit, units in wants.limits:
        line = limits.line(limit)
        if not limits.has_room(tx, limits.by_id(tx, limit), units, age) or blocked.before(line, age):
            short.append(line)
    if short:
        return short
    for pool, units in wants.slots:
        line = slots.line(pool)
        if not slots.has_room(tx, slots.by_id(tx, pool), units, age) or blocked.before(line, age):
            short.append(line)
    if short and wants.limits:
        blocked.aside = True
        short += [limits.line(limit) for limit, _ in wants.limits]
    return short


def suspect(tx: Tx, needs: int) -> None:
    """A job with that set begins to wait: for those who hold the slots it needs, perhaps, who may wait for it."""
    for pool, _ in get(tx, needs).slots:
        tx.suspect(slots.line(pool))


def held_up_by(tx: Tx, needs: int) -> list[Topic]:
    """The pools that have too few free slots for a job with that set: whoever waits for the job waits for those who
    hold them. (They are its signals only to say so: nothing is ever answered there.)"""
    return [
        slots.line(pool)
        for pool, units in get(tx, needs).slots
        if leases.units_held(tx, pool) + units > slots.by_id(tx, pool).max
    ]


def take(tx: Tx, wants: Wants, run: str, token: int) -> tuple[str, ...]:
    """Takes all of it under a job's token, after ``lacking`` said that it is there; the reservations' ids."""
    for limit, units in wants.limits:
        limits.spend(tx, limit, units)
    for pool, units in wants.slots:
        leases.hold_units(tx, token, pool, units)
    return tuple(budgets.hold(tx, budgets.by_id(tx, budget), run, token, amount) for budget, amount in wants.budgets)


def forget(tx: Tx, needs: int) -> None:
    """Removes a set that no queue and no job names any more."""
    tx.run(
        "DELETE FROM needs WHERE needs = :needs AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.needs > 0"
        " AND jobs.needs = :needs) AND NOT EXISTS (SELECT 1 FROM queues WHERE queues.needs > 0"
        " AND queues.needs = :needs)",
        needs=needs,
    )


# A resource never changes its size, so a job that needs more than all of it would wait for ever: it is refused here.


def _slots(tx: Tx, need: wire.UnitsNeeded, queue: str) -> tuple[str, int]:
    pool = slots.find(tx, need.name)
    if need.units > pool.max:
        raise ValidationFailed(
            f"a job of {queue} needs {need.units} units of the slots {pool.name}, which are {pool.max}"
        )
    return pool.id, need.units


def _limit(tx: Tx, need: wire.UnitsNeeded, queue: str) -> tuple[str, int]:
    limit = limits.find(tx, need.name)
    if need.units > limit.max:
        raise ValidationFailed(
            f"a job of {queue} needs {need.units} units of the limit {limit.name}, which has {limit.max} in a window"
        )
    return limit.id, need.units


def _budget(tx: Tx, need: wire.MoneyNeeded, queue: str) -> tuple[str, int]:
    budget = budgets.find(tx, need.name)
    if need.reserve_minor > budget.limit_minor:
        raise ValidationFailed(
            f"a job of {queue} reserves {need.reserve_minor} minor units of the budget {budget.name}, which has a limit"
            f" of {budget.limit_minor}"
        )
    return budget.id, need.reserve_minor


@lru_cache(maxsize=256)
def _parse(text: str) -> Wants:
    return msgspec.json.decode(text, type=Wants)

"""What a queue's jobs need: slots, units of a limit, money. As written in ``queue(..., slots=, limit=, budget=)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import budgets, errors, units
from .steps import Steps

if TYPE_CHECKING:
    from . import wire


class Budget(NamedTuple):
    """A budget with the amount to reserve for each job, and how to read the cost from its result."""

    name: str
    reserve: units.Amount
    cost: Callable[[Any], units.Amount] | None


class Resources(NamedTuple):
    """The needs of a queue, checked."""

    slots: tuple[str, int] | None = None
    limit: tuple[str, int] | None = None
    budget: Budget | None = None

    @property
    def nothing(self) -> bool:
        return self.slots is None and self.limit is None and self.budget is None

    def needs(self) -> Steps[wire.Needs]:
        """The needs as the daemon wants them; the budget's scale is asked for."""
        from . import wire

        money: tuple[wire.MoneyNeeded, ...] = ()
        if self.budget is not None:
            reserve = budgets.reserve_minor(self.budget.name, self.budget.reserve, (yield from self.scale()))
            money = (wire.MoneyNeeded(name=self.budget.name, reserve_minor=reserve),)
        return wire.Needs(slots=_units_needed(self.slots), limits=_units_needed(self.limit), budgets=money)

    def without_cost(self) -> Resources:
        """The same for those who send only: what a job cost is read where it is handled."""
        return self if self.budget is None else self._replace(budget=self.budget._replace(cost=None))

    def scale(self) -> Steps[int]:
        """Decimal places of the budget. Raises RunstateError (NOT_FOUND)."""
        from . import wire

        assert self.budget is not None, "asked only where there is one"
        answer = yield wire.BudgetsDeclare(budget=self.budget.name)
        return int(answer.reply.scale)

    def cost_minor(self, result: Any, scale: int) -> int | None:
        """What a job cost, in minor units; None: its whole reserve. Raises ConfigError for a cost that fails."""
        if self.budget is None or self.budget.cost is None:
            return None
        return budgets.cost_minor(self.budget.name, self.budget.cost, result, scale)


def read(slots: Any, limit: Any, budget: Any) -> Resources:
    """Checks the options of a queue. Raises ConfigError."""
    return Resources(_named("slots", slots), _named("limit", limit), _budget(budget))


def _named(what: str, value: Any) -> tuple[str, int] | None:
    """A name, or a mapping with ``name`` and ``units``."""
    if value is None:
        return None
    if isinstance(value, str):
        return units.name(value, f"{what} of a queue"), 1
    if not isinstance(value, Mapping):
        raise errors.ConfigError(
            f"{what} of a queue is {units.shown(value)}: give a name or a mapping with name, units"
        )
    _only(what, value, ("name", "units"))
    wanted = value.get("units")
    name = units.name(value.get("name"), f"the name in {what}")
    return name, units.whole(1 if wanted is None else wanted, f"units in {what}")


def _budget(value: Any) -> Budget | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise errors.ConfigError(f"budget of a queue is {units.shown(value)}: give a mapping with name, reserve, cost")
    _only("budget", value, ("name", "reserve", "cost"))
    reserve, cost = value.get("reserve"), value.get("cost")
    if reserve is None:
        raise errors.ConfigError("budget of a queue needs reserve, the amount to hold for each job")
    units.minor(reserve, units.SCALE_MAX, "reserve")
    name = units.name(value.get("name"), "the name in budget")
    budgets.check_cost(name, cost)
    return Budget(name, reserve, cost)


def _only(what: str, value: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in value:
        if key not in allowed:
            raise errors.ConfigError(f"{what} of a queue has no option {key!r}; it has {', '.join(allowed)}")


def _units_needed(named: tuple[str, int] | None) -> tuple[wire.UnitsNeeded, ...]:
    from . import wire

    return () if named is None else (wire.UnitsNeeded(name=named[0], units=named[1]),)

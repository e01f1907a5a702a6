"""``setup``: creates or verifies limits, slots and budgets, without using any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import budgets, errors, units
from .steps import Steps

if TYPE_CHECKING:
    from . import wire

Entries = Mapping[str, Mapping[str, Any]]


def setup(limits: Entries | None, slots: Entries | None, pools: Entries | None) -> Steps[None]:
    """Checks everything, then sends it, what comes after a refusal too. Raises ConfigError, or the first refusal:
    ConflictError, RunstateError (NOT_FOUND)."""
    requests = [
        *(_limit(name, options) for name, options in _entries("limits", limits, ("max", "per"))),
        *(_slots(name, options) for name, options in _entries("slots", slots, ("max",))),
        *(_budget(name, options) for name, options in _entries("budgets", pools, ("limit", "currency", "scale"))),
    ]
    refusal: errors.RunstateError | None = None
    for request in requests:
        try:
            yield request
        except errors.UnavailableError:
            raise
        except errors.RunstateError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def _entries(what: str, entries: Entries | None, allowed: tuple[str, ...]) -> list[tuple[str, Mapping[str, Any]]]:
    if entries is None:
        return []
    if not isinstance(entries, Mapping):
        raise errors.ConfigError(f"{what} is {units.shown(entries)}: give a mapping of names to options")
    for name, options in entries.items():
        units.name(name, f"a name in {what}")
        if not isinstance(options, Mapping):
            raise errors.ConfigError(f"{what} {name} is {units.shown(options)}: give a mapping of options")
        for option in options:
            if option not in allowed:
                raise errors.ConfigError(f"{what} {name} has no option {option!r}; it has {', '.join(allowed)}")
    return list(entries.items())


def _limit(name: str, options: Mapping[str, Any]) -> wire.Request[Any]:
    from . import wire

    most, per = options.get("max"), options.get("per")
    if (most is None) != (per is None):
        raise errors.ConfigError(f"limit {name}: give max and per together, or neither to use one that exists")
    return wire.LimitsDeclare(
        limit=name,
        max=None if most is None else units.whole(most, "max"),
        per_seconds=None if per is None else units.per_seconds(per),
    )


def _slots(name: str, options: Mapping[str, Any]) -> wire.Request[Any]:
    from . import wire

    most = options.get("max")
    return wire.SlotsDeclare(pool=name, max=None if most is None else units.whole(most, "max"))


def _budget(name: str, options: Mapping[str, Any]) -> wire.Request[Any]:
    from . import wire

    minor, currency, scale = budgets.sizes_of(name, options.get("limit"), options.get("currency"), options.get("scale"))
    return wire.BudgetsDeclare(budget=name, limit_minor=minor, currency=currency, scale=scale)

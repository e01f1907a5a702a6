"""``budget``: money held before a call, charged by what it cost, the rest given back.

``cost`` gets the result of the call: what the function returned, or what its coroutine gave. Of a generator it gets
what that returned (``return usage``), else the last value that it yielded, also when its reader stopped early; of an
async generator, which cannot return a value, the last one; None when nothing was yielded. A body that raises costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, functions, units
from .context import current
from .steps import Deliver, Run, Steps, Streamed
from .wrapping import wrap

if TYPE_CHECKING:
    from .client import Runstate
    from .holds import Hold

CURRENCY = "USD"
SCALE = 2


class Budget(NamedTuple):
    """A budget as a process names it. ``limit``, ``currency`` and ``scale`` are given when it declares it."""

    client: Runstate
    name: str
    reserve: units.Amount
    cost: Callable[[Any], units.Amount] | None
    limit_minor: int | None
    currency: str | None
    scale: int | None


def budget(
    client: Runstate,
    name: str,
    *,
    reserve: units.Amount | None,
    cost: Callable[[Any], units.Amount] | None = None,
    limit: units.Amount | None = None,
    currency: str | None = None,
    scale: int | None = None,
) -> Budget:
    """Checks the options. Raises ConfigError."""
    units.name(name, "the name of a budget")
    if reserve is None:
        raise errors.ConfigError(f"budget {name}: reserve is needed, the amount to hold before the call")
    check_cost(name, cost)
    units.minor(reserve, units.SCALE_MAX, "reserve")
    sizes = sizes_of(name, limit, currency, scale)
    return Budget(client, name, reserve, cost, *sizes)


def check_cost(name: str, cost: object) -> None:
    """Raises ConfigError for what is no plain function of one result."""
    if cost is None:
        return
    if not callable(cost):
        raise errors.ConfigError(f"budget {name}: cost is {units.shown(cost)}: give a function of the result")
    functions.check_plain(cost, f"budget {name}: cost")
    functions.check(cost, f"budget {name}: cost", "result")


def sizes_of(
    name: str, limit: units.Amount | None, currency: str | None, scale: int | None
) -> tuple[int | None, str | None, int | None]:
    """(limit in minor units, currency, scale), checked; all None when there is no limit."""
    if limit is None:
        if currency is not None or scale is not None:
            raise errors.ConfigError(f"budget {name}: currency and scale go with limit")
        return None, None, None
    places = units.whole(SCALE if scale is None else scale, "scale", 0, units.SCALE_MAX)
    minor = units.minor(limit, places, "limit")
    if minor <= 0 or minor > units.WHOLE_MAX:
        raise errors.ConfigError(f"budget {name}: limit is {units.shown(limit)}: give an amount above 0")
    return minor, units.currency(CURRENCY if currency is None else currency), places


def decorate(spec: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called while the amount is held."""
    return wrap(spec.client, function, "budget", lambda args, kwargs: _call(spec, function, args, kwargs))


def reserve_minor(name: str, reserve: units.Amount, scale: int) -> int:
    """What is to be held, in minor units. Raises ConfigError, also for nothing."""
    minor = units.minor(reserve, scale, "reserve")
    if not 0 < minor <= units.WHOLE_MAX:
        raise errors.ConfigError(f"budget {name}: reserve is {units.shown(reserve)}: give an amount above 0")
    return minor


def cost_minor(name: str, cost: Callable[[Any], units.Amount], result: Any, scale: int) -> int:
    """What a call cost, in minor units. Raises ConfigError naming ``cost`` when that cannot be said."""
    try:
        amount = cost(result)
        minor = units.minor(amount, scale, "cost")
        if not minor and not isinstance(amount, str) and amount > 0:
            _warn_of_nothing(name, amount, scale)
        if minor > units.WHOLE_MAX:
            raise errors.ConfigError(f"it is {minor} minor units, more than {units.WHOLE_MAX}")
        return minor
    except Exception as error:
        raise errors.ConfigError(
            f"budget {name}: cost failed with {type(error).__name__}: {error}; the reserve was charged"
        ) from error


_warned: set[str] = set()  # budgets


def _warn_of_nothing(name: str, amount: units.Amount, scale: int) -> None:
    """A cost that is rounded to nothing, told once for each budget: no number of such calls ends it."""
    import logging

    if name not in _warned:
        _warned.add(name)
        logging.getLogger(__name__).warning(
            "budget %s: a cost of %s is less than half of its smallest unit (scale %d) and charges nothing: declare the"
            " budget with a larger scale",
            name,
            amount,
            scale,
        )


def _call(spec: Budget, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    from . import wire

    binding = spec.client._binding()
    info = yield from binding.join()
    scale = (yield from _scale(spec)) if spec.scale is None else spec.scale
    reserve = reserve_minor(spec.name, spec.reserve, scale)
    request = wire.BudgetsReserve(
        run=info.id,
        budget=spec.name,
        amount_minor=reserve,
        limit_minor=spec.limit_minor,
        currency=spec.currency,
        scale=spec.scale,
    )
    try:
        answer = yield request
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904
    reservation, hold = answer.reply.reservation, answer.holds[answer.reply.token]
    if answer.reply.scale != scale:  # what was known of it was of another daemon or database
        del answer
        spec.client._core.scales.clear()
        yield from _void(hold, reservation)
        return (yield from _call(spec, function, args, kwargs))
    del answer
    frame = current()
    around = frame.context if frame is not None else binding.context()
    try:
        result = yield Run(function, args, kwargs, around)
    except Exception:
        yield from _void(hold, reservation)  # nothing was spent: all of it goes back
        raise
    except BaseException:
        hold.release()
        raise
    broken: BaseException | None = None
    cost = reserve
    if spec.cost is not None:
        try:
            counted = result.result if isinstance(result, Streamed) else result
            cost = cost_minor(spec.name, spec.cost, counted, scale)
        except BaseException as error:  # also Ctrl-C: it was spent all the same
            broken = error
    try:
        yield Deliver(wire.BudgetsSettle(reservation=reservation, cost_minor=cost, work_key="settle"), hold)
    except errors.RunstateError:  # the result counts, whatever becomes of the accounting
        if not hold.is_owed:
            hold.settle()  # refused for good: not given back as if nothing had been spent
    if broken is not None:
        raise broken
    return result


def _scale(spec: Budget) -> Steps[int]:
    """Decimal places of a budget that others have declared. It never changes, so it is asked for once."""
    from . import wire

    known = spec.client._core.scales
    scale = known.get(spec.name)
    if scale is None:
        answer = yield wire.BudgetsDeclare(budget=spec.name)
        scale = known[spec.name] = int(answer.reply.scale)
    return scale


def _void(hold: Hold, reservation: str) -> Steps[None]:
    """Gives all of a reservation back; it is free when this returns, or as soon as the daemon can write."""
    from . import wire

    try:
        yield Deliver(wire.BudgetsRelease(reservation=reservation), hold, patient=False)
    except errors.RunstateError:
        pass

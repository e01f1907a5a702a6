"""``limit`` and ``take``: so many units in each window of time, drawn by every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, units
from .context import current, inherited, within
from .steps import Run, Steps
from .wrapping import wrap

if TYPE_CHECKING:
    from .client import Runstate

TIMEOUT = "60s"


class Limit(NamedTuple):
    """A limit as a process names it: sizes are both given or both None."""

    client: Runstate
    name: str
    wanted: int
    timeout: units.Duration
    max: int | None
    per_seconds: int | None


def limit(
    client: Runstate,
    name: str,
    *,
    max: int | None = None,
    per: units.Per | None = None,
    units_: int | None = None,
    timeout: units.Duration | None = None,
) -> Limit:
    """Checks the options. Raises ConfigError."""
    if (max is None) != (per is None):
        raise errors.ConfigError(f"limit {name}: give max and per together, or neither to use one that exists")
    return Limit(
        client,
        units.name(name, "the name of a limit"),
        units.whole(1 if units_ is None else units_, "units"),
        TIMEOUT if timeout is None else timeout,
        None if max is None else units.whole(max, "max"),
        None if per is None else units.per_seconds(per),
    )


def decorate(spec: Limit, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once its units are taken."""
    return wrap(spec.client, function, "limit", lambda args, kwargs: _call(spec, function, args, kwargs))


def take(spec: Limit) -> Steps[None]:
    """Takes the units. Raises TimeoutError, ConflictError, RunstateError (NOT_FOUND), StoppedError."""
    from . import wire

    wait_ms = units.milliseconds(spec.timeout, "timeout")
    binding = spec.client._binding()
    info = yield from binding.join()
    request = wire.LimitsTake(
        run=info.id,
        limit=spec.name,
        units=spec.wanted,
        max=spec.max,
        per_seconds=spec.per_seconds,
        wait_ms=wait_ms,
        within=within(),
        inherited=inherited(),
    )
    try:
        answer = yield request
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904
    if isinstance(answer.reply, wire.LimitBusy):
        raise errors.TimeoutError(f"limit {spec.name}: no {spec.wanted} units within {spec.timeout}")


def _call(spec: Limit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    yield from take(spec)
    frame = current()
    around = frame.context if frame is not None else spec.client._binding().context()
    return (yield Run(function, args, kwargs, around))

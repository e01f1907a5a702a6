"""``sleep`` and ``together``: waiting for a moment, waiting for each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import errors, units
from .context import inherited, within
from .steps import Steps

if TYPE_CHECKING:
    import datetime

    from .client import Runstate


def sleep(client: Runstate, name: str, duration: units.Duration | None, until: datetime.datetime | None) -> Steps[None]:
    """Waits for the timer of that name in the run. Raises ConfigError, StoppedError."""
    from . import wire

    units.name(name, "the name of a sleep")
    if (duration is None) == (until is None):
        raise errors.ConfigError(f"sleep {name}: give either a duration or until=")
    after_ms = at_ms = None
    if duration is not None:
        after_ms = units.whole_seconds(duration) * 1000
    else:
        at_ms = _unix_ms(name, until)
    binding = client._binding()
    info = yield from binding.join()
    try:
        yield wire.TimersSleep(
            run=info.id, name=name, after_ms=after_ms, at_ms=at_ms, within=within(), inherited=inherited()
        )
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904


def together(client: Runstate, name: str, count: int, timeout: units.Duration | None) -> Steps[None]:
    """Waits until so many workers have come. Raises TimeoutError, ConflictError, ConfigError, StoppedError."""
    import socket

    from . import wire

    units.name(name, "the name of together")
    units.whole(count, "count")
    wait_ms = None if timeout is None else units.milliseconds(timeout, "timeout")
    binding = client._binding()
    info = yield from binding.join()
    worker = client._core.setting("worker", None) or f"{socket.gethostname()}-{os.getpid()}"
    try:
        answer = yield wire.BarriersArrive(
            run=info.id, name=name, count=count, worker=worker, wait_ms=wait_ms, within=within(), inherited=inherited()
        )
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904
    view = answer.reply
    if not view.released:
        raise errors.TimeoutError(f"together {name}: {view.arrivals} of {count} workers came within {timeout}")


def _unix_ms(name: str, until: datetime.datetime | None) -> int:
    """A datetime as Unix time; a naive one is local time, as everywhere in Python."""
    try:
        assert until is not None, "checked by the caller"
        return max(0, int(until.timestamp() * 1000))
    except (AttributeError, TypeError, ValueError, OverflowError, OSError) as error:
        raise errors.ConfigError(f"sleep {name}: until is {units.shown(until)}: give a datetime") from error

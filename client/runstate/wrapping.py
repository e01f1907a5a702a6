"""Wrapping a function: ``async def`` stays a coroutine function, everything else stays plain."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import errors, units
from .steps import Steps, adrive, drive

if TYPE_CHECKING:
    from .client import Runstate


def wrap(
    client: Runstate,
    function: Callable[..., Any],
    what: str,
    steps: Callable[[tuple[Any, ...], dict[str, Any]], Steps[Any]],
) -> Callable[..., Any]:
    """A function that runs ``steps(args, kwargs)``. Raises ConfigError for what cannot be called."""
    if not callable(function):
        raise errors.ConfigError(f"{what} needs a function, not {units.shown(function)}")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await adrive(client._connection, steps(args, kwargs))

        return async_wrapper

    @functools.wraps(function)
    def plain_wrapper(*args: Any, **kwargs: Any) -> Any:
        return drive(client._connection, steps(args, kwargs))

    return plain_wrapper

"""Wrapping a function: what it is, the wrapper is, too, and what is held is held for as long as its body runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import bodies, errors, functions, units
from .functions import ASYNC_GENERATOR, COROUTINE, GENERATOR
from .signals import running_loop
from .steps import Progress, Steps, adrive, drive

if TYPE_CHECKING:
    from .client import Runstate


def wrap(
    client: Runstate,
    function: Callable[..., Any],
    what: str,
    steps: Callable[[tuple[Any, ...], dict[str, Any]], Steps[Any]],
    *,
    streams: bool = True,
) -> Callable[..., Any]:
    """A function that runs ``steps(args, kwargs)``: plain stays plain, and a coroutine function, a generator function
    and an async generator function stay what they are. ``streams``: generators are taken.

    A plain function that gives a coroutine or a generator (one under another decorator may) is held on to until that
    has ended. Raises ConfigError for what cannot be called, and for what cannot be held on to.
    """
    if isinstance(function, classmethod) or not callable(function):
        raise errors.ConfigError(f"{what} needs a function, not {units.shown(function)}{_below(function, what)}")
    if functions.makes_context_manager(function):
        raise errors.ConfigError(
            f"{what} over contextmanager would end before the `with` block: write @contextmanager above @{what}"
        )
    kind = functions.kind(function)
    if not streams and kind in (GENERATOR, ASYNC_GENERATOR):
        raise errors.ConfigError(f"{what} needs a function with a result, and {units.shown(function)} is a generator")
    wrapper = _wrapper(client, function, kind, steps, streams)
    wrapper.__name__ = functions.name_of(function)
    return staticmethod(wrapper) if isinstance(function, staticmethod) else wrapper


def _wrapper(
    client: Runstate,
    function: Callable[..., Any],
    kind: str,
    steps: Callable[[tuple[Any, ...], dict[str, Any]], Steps[Any]],
    streams: bool,
) -> Callable[..., Any]:
    connection = client._core.connection

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Progress[Any]:
        return Progress(steps(args, kwargs))

    if kind == GENERATOR:
        return bodies.generator(connection, function, begin)
    if kind == ASYNC_GENERATOR:
        return bodies.async_generator(connection, function, begin)
    if kind == COROUTINE:

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await adrive(connection, steps(args, kwargs))

        return async_wrapper
    inner = functions.inner(function)
    go_on = functools.partial(bodies.go_on, streams=streams)

    @functools.wraps(function)
    def plain_wrapper(*args: Any, **kwargs: Any) -> Any:
        # Under another decorator: in an event loop the body is awaited, and so is what it must wait for.
        if inner == COROUTINE and running_loop() is not None:
            return adrive(connection, steps(args, kwargs))
        if inner == ASYNC_GENERATOR and streams and running_loop() is not None:
            return bodies.async_generator(connection, function, begin)(*args, **kwargs)
        return drive(connection, steps(args, kwargs), go_on)

    return plain_wrapper


def _below(function: object, what: str) -> str:
    return f": write @classmethod above @{what}" if isinstance(function, classmethod) else ""

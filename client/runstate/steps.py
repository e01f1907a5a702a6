"""A verb is written once, as steps: a generator that yields what it needs and is sent what came of it.

It yields a wire request (and is sent an ``Answer``) or a ``Run`` (and is sent what the user's function returned).
Errors are thrown into it. Two drivers run the same steps: ``drive`` in plain code, ``adrive`` in a coroutine.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from .context import enter, leave
from .loading import load
from .signals import running_loop

if TYPE_CHECKING:
    from . import wire
    from .connection import Connection
    from .results import RunContext

T = TypeVar("T")


class Run(NamedTuple):
    """Run a function of the user's, in a context."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: RunContext
    token: int | None = None
    may_await: bool = False  # what it returns may have to be awaited, in plain code too


Step: TypeAlias = "wire.Request[Any] | Run"
Steps: TypeAlias = Generator[Step, Any, T]


def drive(connection: Callable[[], Connection], steps: Steps[T]) -> T:
    """Runs the steps in plain code; blocks."""
    load()
    outcome: Any = None
    error: BaseException | None = None
    try:
        while True:
            step = steps.send(outcome) if error is None else steps.throw(error)
            outcome, error = None, None
            try:
                outcome = _run(step) if isinstance(step, Run) else connection().call(step)
            except BaseException as raised:
                error = raised
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # No circle of traceback and frame; and a traceback that somebody keeps must not keep what is held.
        outcome = error = None
        steps.close()


async def adrive(connection: Callable[[], Connection], steps: Steps[T]) -> T:
    """Runs the steps in a coroutine."""
    load()
    outcome: Any = None
    error: BaseException | None = None
    try:
        while True:
            step = steps.send(outcome) if error is None else steps.throw(error)
            outcome, error = None, None
            try:
                outcome = await _arun(step) if isinstance(step, Run) else await connection().acall(step)
            except BaseException as raised:
                error = raised
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        outcome = error = None
        steps.close()


def _run(step: Run) -> Any:
    entered = enter(step.context, step.token)
    try:
        result = step.function(*step.args, **step.kwargs)
        return _awaited(result) if step.may_await and inspect.isawaitable(result) else result
    finally:
        leave(entered)


async def _arun(step: Run) -> Any:
    entered = enter(step.context, step.token)
    try:
        result = step.function(*step.args, **step.kwargs)
        return await result if inspect.isawaitable(result) else result
    finally:
        leave(entered)


def _awaited(result: Awaitable[Any]) -> Any:
    """The outcome of an awaitable, in plain code: on an event loop of its own, in a thread of its own where this
    thread's loop is running already."""
    import asyncio

    async def wait() -> Any:
        return await result

    if running_loop() is None:
        return asyncio.run(wait())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(contextvars.copy_context().run, asyncio.run, wait()).result()

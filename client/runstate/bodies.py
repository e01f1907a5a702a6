"""Bodies that go on after the call: a generator or a coroutine of the user's, with the steps of a verb around it.

The first ``next`` takes what is to be held, the end gives it back: when the generator returns or raises, and when its
reader stops early (``break``, ``close``), which counts as an end like any other. In between, the context of the call is
entered for each piece of the body, and left while its reader has the turn.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

from .context import enter, leave
from .loading import load
from .signals import running_loop
from .steps import Progress, Run, Streamed, aask, adrive, ask, check_loop

if TYPE_CHECKING:
    from .connection import Connection

Connect = Callable[[], "Connection"]
Begin = Callable[[tuple[Any, ...], dict[str, Any]], Progress[Any]]


def generator(connection: Connect, function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    """A generator function that runs the steps around the generator that ``function`` makes."""

    @functools.wraps(function)
    def generator_wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        load()
        progress = begin(args, kwargs)
        try:
            while True:
                step = progress.next()
                try:
                    if not isinstance(step, Run):
                        progress.outcome = ask(connection, step)
                        continue
                    body = _inside(step, step.function, *step.args, **step.kwargs)
                    returned = last = sent = None
                    resume = body.send
                    while True:
                        try:
                            last = _inside(step, resume, sent)
                        except StopIteration as stop:
                            returned = stop.value
                            break
                        try:
                            sent, resume = (yield last), body.send
                        except GeneratorExit:
                            _inside(step, body.close)
                            if sys.is_finalizing():  # too late to ask anybody anything
                                raise
                            break
                        except BaseException as error:
                            sent, resume = error, body.throw
                    progress.outcome = Streamed(returned, last)
                except BaseException as error:
                    progress.failed(error, step)
        except StopIteration as stop:
            return stop.value.returned if isinstance(stop.value, Streamed) else stop.value
        except BaseException as error:
            raise progress.raised(error)  # noqa: B904 (mostly the same one)
        finally:
            progress.close()

    return generator_wrapper


def async_generator(connection: Connect, function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    """The same for an async generator."""

    @functools.wraps(function)
    async def async_generator_wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        load()
        check_loop()
        progress = begin(args, kwargs)
        try:
            while True:
                step = progress.next()
                try:
                    if not isinstance(step, Run):
                        progress.outcome = await aask(connection, step)
                        continue
                    body = _inside(step, step.function, *step.args, **step.kwargs)
                    last = sent = None
                    resume = body.asend
                    while True:
                        try:
                            last = await _ainside(step, resume, sent)
                        except StopAsyncIteration:
                            break
                        try:
                            sent, resume = (yield last), body.asend
                        except GeneratorExit:
                            await _ainside(step, body.aclose)
                            break
                        except BaseException as error:
                            sent, resume = error, body.athrow
                    progress.outcome = Streamed(None, last)
                except BaseException as error:
                    progress.failed(error, step)
        except StopIteration:
            return
        except BaseException as error:
            raise progress.raised(error)  # noqa: B904
        finally:
            progress.close()

    return async_generator_wrapper


def go_on(connection: Connect, progress: Progress[Any], step: Run, result: Any, *, streams: bool = True) -> Any:
    """Where a plain function gave a body that has not run yet: that body with the rest of the steps around it, else
    None. ``streams``: generators, too."""
    if isinstance(result, CoroutineType):
        hold = None if step.token is None else connection().holds.get(step.token)
        if hold is not None:
            hold.loop = running_loop()  # whose task ends it: a blocking call in this thread must not wait for that
        return adrive(connection, progress.again(step, result))
    if streams and isinstance(result, GeneratorType):
        return generator(connection, step.function, lambda args, kwargs: progress.again(step, result))()
    if streams and isinstance(result, AsyncGeneratorType):
        return async_generator(connection, step.function, lambda args, kwargs: progress.again(step, result))()
    return None


def _inside(step: Run, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    entered = enter(step.context, step.token)
    try:
        return function(*args, **kwargs)
    finally:
        leave(entered)


async def _ainside(step: Run, function: Callable[..., Any], *args: Any) -> Any:
    entered = enter(step.context, step.token)
    try:
        return await function(*args)
    finally:
        leave(entered)

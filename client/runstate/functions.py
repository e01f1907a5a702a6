"""What kind of function a user has given, and whether it can be called as it will be.

kind(f)   "plain", "coroutine", "generator" or "async generator": what calling it gives. Partials, methods, static
          methods and objects with ``__call__`` count as the function that they call
inner(f)  the same of what it wraps (``__wrapped__``): another decorator of an ``async def`` may be a plain function
          that passes the coroutine on, or one that waits for it; only the call shows which
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from . import errors, units

PLAIN = "plain"
COROUTINE = "coroutine"
GENERATOR = "generator"
ASYNC_GENERATOR = "async generator"
LAYERS_MAX = 100  # of partials, objects and decorators around a function; they may form a circle


def kind(function: Callable[..., Any]) -> str:
    """What calling it gives, as far as the function itself says."""
    called = _called(function)
    if inspect.isasyncgenfunction(called):
        return ASYNC_GENERATOR
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(function):  # marked ones count too
        return COROUTINE
    if inspect.isgeneratorfunction(called):
        code = getattr(inspect.unwrap(getattr(called, "__func__", called)), "__code__", None)
        awaited = code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE  # by types.coroutine
        return COROUTINE if awaited else GENERATOR
    return PLAIN


def inner(function: Callable[..., Any]) -> str:
    """What the function inside of all other decorators gives."""
    for _ in range(LAYERS_MAX):
        try:
            inside = _called(inspect.unwrap(function))
        except ValueError:  # it wraps itself
            break
        if inside is function:
            return kind(function)
        function = inside
    return PLAIN


def makes_context_manager(function: Callable[..., Any]) -> bool:
    """Whether ``contextlib.contextmanager`` (or its async form) has made it: its body runs after the call."""
    scope = getattr(function, "__globals__", {})
    return scope.get("__name__") == "contextlib" and inner(function) in (GENERATOR, ASYNC_GENERATOR)


def check(function: Callable[..., Any], what: str, *args: str) -> None:
    """Raises ConfigError for what cannot be called with positional arguments, of which ``args`` are the names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in: it has none to read
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise errors.ConfigError(
            f"{what} {units.shown(function)} cannot be called with ({', '.join(args)}): {error}; its signature is"
            f" {signature}"
        ) from None


def check_plain(function: Callable[..., Any], what: str) -> None:
    """Raises ConfigError for what gives no value when it is called."""
    found = kind(function)
    if found != PLAIN:
        raise errors.ConfigError(f"{what} is {_article(found)} function: give a plain function, which returns a value")


def name_of(function: Callable[..., Any]) -> str:
    """A name to show: its own, that of the function in a partial, or that of an object's class."""
    for each in (function, getattr(function, "func", None)):
        found = getattr(each, "__name__", None)
        if isinstance(found, str):
            return found
    return type(function).__name__


def _called(function: Any) -> Any:
    """The function that is called in the end."""
    for _ in range(LAYERS_MAX):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        elif inspect.isroutine(function) or isinstance(function, type):
            break
        elif inspect.isroutine(getattr(function, "__call__", None)):  # noqa: B004 (the function behind the object)
            function = function.__call__
        else:
            break
    return function


def _article(found: str) -> str:
    return f"an {found}" if found.startswith("a") else f"a {found}"

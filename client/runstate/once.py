"""``once``: a function that runs once in a run for the same arguments; every caller gets its one result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, functions, keys, payloads, tracebacks, units, wrapping
from .context import nesting
from .signals import Combined
from .steps import Deliver, Run, Steps

if TYPE_CHECKING:
    from .calls import Answer
    from .client import Runstate
    from .holds import Hold

ATTEMPTS = 3
LEASE = "30s"


class Once(NamedTuple):
    """A wrapped function and its options."""

    client: Runstate
    function: Callable[..., Any]
    name: str
    key: Callable[..., str] | None
    attempts: int
    lease_ms: int


def wrap(
    client: Runstate,
    function: Callable[..., Any],
    *,
    name: str | None,
    key: Callable[..., str] | None,
    attempts: int | None,
    lease: units.Duration | None,
) -> Callable[..., Any]:
    """The wrapped function: plain stays plain, ``async def`` stays a coroutine function.

    Raises ConfigError for options that cannot be used, and for generator functions, which have no result.
    """
    if key is not None:
        if not callable(key):
            raise errors.ConfigError(f"key is {units.shown(key)}: give a function that returns a string")
        functions.check_plain(key, "key")
    spec = Once(
        client,
        function,
        _name(function, name),
        key,
        units.whole(ATTEMPTS if attempts is None else attempts, "attempts", 1, 100),
        units.lease_seconds(LEASE if lease is None else lease) * 1000,
    )

    if name is None:
        _warn_of_same_name(client._core.once_names, spec)
    wrapper = wrapping.wrap(client, function, "once", functools.partial(call, spec), streams=False)
    if name is not None:
        wrapper.__name__ = name
    return wrapper


def call(spec: Once, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    """One call of a wrapped function."""
    from . import wire  # brings msgspec, which nobody needs before the first call

    binding = spec.client._bound or spec.client._binding()
    info = binding.joined()
    try:
        key = keys.call_key(spec.name, spec.function, spec.key, args, kwargs)
    except errors.ConfigError as error:
        raise _said_of_self(spec, args, error) from None
    if info is None:
        info = yield from binding.join()
    answer: Answer[Any] | None = None
    try:
        within, inherited = nesting()
        answer = yield wire.OnceAcquire(
            run=info.id, key=key, lease_ms=spec.lease_ms, within=within, inherited=inherited
        )
        reply = answer.reply
        if isinstance(reply, wire.OnceDone):
            return payloads.decode(reply.result)
        if isinstance(reply, wire.OnceFailed):
            failed = errors.OnceFailedError(reply.error, reply.attempts)
            raise errors.failed_elsewhere(failed, reply.traceback)
        from .results import RunContext

        hold = answer.holds[reply.token]
        if reply.takeovers:
            from .failures import took_over

            took_over("once", key)
        signal = Combined(binding.signal, hold.signal)
        try:
            around = RunContext(info, signal, reply.attempt, key)
            return (yield from _work(spec, hold, Run(spec.function, args, kwargs, around, hold.token)))
        finally:
            signal.close()
    except errors.StoppedError as error:
        raise binding.noted(error)  # noqa: B904 (its own cause stays)
    finally:
        # Whatever happened, and wherever an interrupt came: what is still held goes back now. Not when the last
        # reference to it goes, which a traceback that somebody keeps may put off for ever.
        if answer is not None:
            for left in answer.holds.values():
                left.release()


def _work(spec: Once, hold: Hold, run: Run) -> Steps[Any]:
    """Runs the function and records what came of it."""
    from . import wire

    key = None if run.context is None else run.context.key
    assert key is not None and hold.run is not None, "a once call has both"
    try:
        result = yield run
    except Exception as error:
        yield from _failed(spec, hold, key, error)
        raise
    try:
        text = payloads.encode(f"the result of {spec.name}", result)
    except errors.RunstateError as error:
        try:
            yield from _failed(spec, hold, key, error)
        except errors.OnceFailedError:
            pass  # it is the last failure, and its own error says best what is wrong
        raise
    # Anything else is an interrupt: nothing is recorded, ``call`` gives the hold back, the next caller goes on at once.
    try:
        answer = yield Deliver(wire.OnceComplete(run=hold.run, key=key, token=hold.token, result=text), hold)
    except errors.LeaseLostError as error:
        raise _lost(hold, error) from None
    except (errors.StoppedError, errors.UnavailableError):
        raise
    except errors.RunstateError as error:  # it is refused for good, and counts as a failure
        yield from _failed(spec, hold, key, error)
        raise
    return payloads.decode(answer.reply.result)


def _failed(spec: Once, hold: Hold, key: str, error: Exception) -> Steps[None]:
    """Records a failure. Raises OnceFailedError when it used up the attempts, LeaseLostError or StoppedError when the
    outcome does not count; otherwise the caller raises its own exception."""
    from . import wire

    assert hold.run is not None, "a once hold belongs to a run"
    text = payloads.error_text(error)
    request = wire.OnceFail(
        run=hold.run,
        key=key,
        token=hold.token,
        error=text,
        attempts=spec.attempts,
        traceback=tracebacks.text(error),
    )
    try:
        answer = yield Deliver(request, hold)
    except errors.LeaseLostError as lost:
        raise _lost(hold, lost) from error
    except errors.StoppedError as stopped:
        raise stopped from error
    except errors.RunstateError:
        return  # the caller's own exception matters more than that it is not recorded yet
    if answer.reply.failed:
        failed = errors.OnceFailedError(text, answer.reply.attempts)
        failed.traceback = tracebacks.text(error)
        raise failed from error


def _lost(hold: Hold, error: errors.LeaseLostError) -> errors.RunstateError:
    """Why the hold was lost: what set its signal, if something did."""
    reason = hold.signal.reason
    if isinstance(reason, errors.StoppedError):
        return reason
    lost = errors.LeaseLostError(error.message, code="LEASE_LOST")  # ours, however it was noticed
    if not hold.signal.is_set():
        hold.signal._set(lost)
    return lost


def _said_of_self(spec: Once, args: tuple[Any, ...], error: errors.ConfigError) -> errors.ConfigError:
    """The error; where it is about the object of a method, one that says so."""
    code = getattr(spec.function, "__code__", None)
    first = code.co_varnames[0] if code is not None and code.co_argcount else None
    if spec.key is None and args and first in ("self", "cls") and error.message.startswith("$[0] "):
        return errors.ConfigError(
            f"once on the method {spec.name}: `{first}` would be a part of the key, and is not JSON ({error.message});"
            f" give key=lambda {first}, ...: a string that names the work"
        )
    return error


def _warn_of_same_name(known: dict[str, tuple[object, ...]], spec: Once) -> None:
    """Functions of one name share their keys, and so their results: says so, once for each name."""
    function = inspect.unwrap(spec.function)
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            cells.append(units.shown(cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append("")
    mine = (getattr(function, "__module__", None), getattr(function, "__qualname__", None), tuple(cells))
    other = known.setdefault(spec.name, mine)
    if other not in (mine, ()):
        known[spec.name] = ()
        import logging

        logging.getLogger(__name__).warning(
            "two once functions are called %s (%s.%s, and now %s.%s): calls with the same arguments share one result;"
            " give one of them another name with once(name=...)",
            spec.name,
            *other[:2],
            *mine[:2],
        )


def _name(function: Callable[..., Any], name: str | None) -> str:
    if name is not None:
        return units.name(name, "name")
    found = getattr(function, "__name__", None)
    if not isinstance(found, str) or found == "<lambda>":
        raise errors.ConfigError("this function has no name of its own: pass name= to once")
    return units.name(found, "name")

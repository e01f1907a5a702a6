"""A verb is written once, as steps: a generator that yields what it needs and is sent what came of it.

It yields a wire request or a ``Deliver`` (and is sent an ``Answer``) or a ``Run`` (and is sent what the user's function
returned). Errors are thrown into it. Drivers run the same steps: ``drive`` in plain code, ``adrive`` in a coroutine,
and those of bodies.py around a generator of the user's.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from . import errors
from .context import enter, leave
from .loading import load
from .signals import running_loop
from .tracebacks import of_user

if TYPE_CHECKING:
    from . import wire
    from .connection import Connection
    from .holds import Hold
    from .results import RunContext

T = TypeVar("T")


class Run(NamedTuple):
    """Run a function of the user's, in a context."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: RunContext | None  # None: whatever it is here
    token: int | None = None
    may_await: bool = False  # what it returns may have to be awaited, in plain code too


class Streamed(NamedTuple):
    """What came of a generator: the value of its ``return``, and the last one that it yielded."""

    returned: Any
    last: Any

    @property
    def result(self) -> Any:
        """What counts as its result: what it returned, else the last value that it yielded."""
        return self.last if self.returned is None else self.returned


class Deliver(NamedTuple):
    """Offer an outcome until it is taken (see outcomes.py). With ``patient`` its caller waits for that as long as the
    client's ``timeout`` allows, else for the first offer only; then it gets UnavailableError, and the offers go on.

    ``late`` is called, in any thread, when the first offer was not taken.
    """

    request: wire.Request[Any]
    hold: Hold | None
    patient: bool = True
    late: Callable[[], object] | None = None


Step: TypeAlias = "wire.Request[Any] | Deliver | Run"
Steps: TypeAlias = Generator[Step, Any, T]


class Progress(Generic[T]):
    """How far the steps are. A driver asks for the next one and writes down what came of it."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._step: Step | None = None  # one that has begun, see ``again``
        self.outcome: Any = None
        self._error: BaseException | None = None
        self._users: tuple[BaseException, TracebackType | None] | None = None

    def next(self) -> Step:
        """The next step. Raises StopIteration with the result, and what the steps raise."""
        step, self._step = self._step, None
        if step is not None:
            return step
        error, outcome = self._error, self.outcome
        self._error = self.outcome = None
        try:
            return self._steps.send(outcome) if error is None else self._steps.throw(error)
        finally:
            error = outcome = None  # this frame is part of the traceback, and must not close a circle with its error

    def again(self, step: Run, body: Any) -> Progress[T]:
        """The function of a step has given a body that goes on: the next step is to run that."""
        self._step = step._replace(function=lambda: body, args=(), kwargs={})
        return self

    def failed(self, error: BaseException, step: Step) -> None:
        """What the step raised. Of a user's exception the traceback is as the user's own code has made it."""
        self._error = error
        if isinstance(step, Run):
            error.__traceback__ = of_user(error.__traceback__)
            self._users = error, error.__traceback__

    def raised(self, error: BaseException) -> BaseException:
        """What to raise for what the steps have raised: a user's exception without the frames on its way through."""
        if self._users is not None and self._users[0] is error:
            error.__traceback__ = self._users[1]
        return error

    def close(self) -> None:
        """No circle of traceback and frame; and a traceback that somebody keeps must not keep what is held."""
        self.outcome = self._error = self._users = None
        self._steps.close()


def drive(
    connection: Callable[[], Connection],
    steps: Steps[T],
    go_on: Callable[[Callable[[], Connection], Progress[T], Run, Any], Any] | None = None,
) -> T:
    """Runs the steps in plain code; blocks. ``go_on``: given what a function of the user's gave, what to return now if
    the rest of the steps comes later."""
    load()
    progress = Progress(steps)
    later = None
    try:
        while True:
            step = progress.next()
            try:
                if not isinstance(step, Run):
                    progress.outcome = ask(connection, step) if isinstance(step, Deliver) else connection().call(step)
                    continue
                progress.outcome = _run(step)
                later = None if go_on is None else go_on(connection, progress, step, progress.outcome)
            except BaseException as error:
                progress.failed(error, step)
            else:
                if later is not None:
                    return cast(T, later)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except BaseException as error:
        raise progress.raised(error)  # noqa: B904 (mostly the same one)
    finally:
        if later is None:
            progress.close()


async def adrive(connection: Callable[[], Connection], steps: Steps[T] | Progress[T]) -> T:
    """Runs the steps in a coroutine."""
    load()
    check_loop()
    progress = steps if isinstance(steps, Progress) else Progress(steps)
    try:
        while True:
            step = progress.next()
            try:
                progress.outcome = await (_arun(step) if isinstance(step, Run) else aask(connection, step))
            except BaseException as error:
                progress.failed(error, step)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except BaseException as error:
        raise progress.raised(error)  # noqa: B904
    finally:
        progress.close()


def ask(connection: Callable[[], Connection], step: wire.Request[Any] | Deliver) -> Any:
    """The answer to a request or an outcome."""
    return _session(connection, step).outcomes.deliver(step) if isinstance(step, Deliver) else connection().call(step)


async def aask(connection: Callable[[], Connection], step: wire.Request[Any] | Deliver) -> Any:
    """The same in a coroutine."""
    return await (
        _session(connection, step).outcomes.adeliver(step) if isinstance(step, Deliver) else connection().acall(step)
    )


def _session(connection: Callable[[], Connection], step: Deliver) -> Connection:
    """The session that holds the work: ``configure`` may have begun another one meanwhile."""
    session = None if step.hold is None else step.hold.session
    return connection() if session is None else session


def check_loop() -> None:
    """Raises ConfigError where no event loop of asyncio runs, for what would wait for one."""
    if running_loop() is None:
        raise errors.ConfigError(
            "the async forms need asyncio, and no event loop of asyncio runs in this thread: under trio use the plain"
            " forms in a thread (`await trio.to_thread.run_sync(...)`), or trio-asyncio"
        )


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

"""Signals: "the work should stop", told to any thread and any event loop.

    Signal      set once, by the library, with the exception that is the reason
    Combined    set by itself or by any of its parts: a call's own signal over its run's
    watching()  anything with is_set() (threading.Event, asyncio.Event) as a Signal, for a while

How it is built: **no locks**. A signal may be set from a signal handler that interrupts the very thread that is adding
a callback, and it must outlive a fork; a lock would hang in both. Instead there are two facts, each changed by one
atomic step of a list or dict:

    _outcomes   what set it; the first entry counts, and its being there is "set"
    _callbacks  token -> callback; whoever pops an entry calls it, so each is called once

Setting writes the outcome, then pops the callbacks; adding writes the callback, then looks at the outcome. So
whichever comes first, at least one of the two sees the other.

asyncio is imported only where a loop is running already.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from . import threads, units
from .errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    import asyncio

POLL_SECONDS = 0.1  # how often a foreign signal, which cannot call us, is asked; as in the hosted SDK

Callback = Callable[[], object]
Remover = Callable[[], None]


class SupportsIsSet(Protocol):
    """What the API takes as `signal=`: a Signal, a threading.Event, an asyncio.Event, ..."""

    def is_set(self) -> bool: ...


class _Outcome(NamedTuple):
    order: int  # a process-wide count, so that of two set signals the first is known
    reason: BaseException | None


_order = itertools.count()


class Signal:
    """Tells work to stop. Like a threading.Event that only the library sets; usable from any thread or event loop."""

    __slots__ = ("__weakref__", "_callbacks", "_outcomes")

    def __init__(self) -> None:
        self._outcomes: list[_Outcome] = []
        self._callbacks: dict[object, Callback] = {}

    def is_set(self) -> bool:
        """Whether the work should stop. Never goes back to False."""
        return self._outcome() is not None

    @property
    def reason(self) -> BaseException | None:
        """The exception that set it (StoppedError, LeaseLostError, ...); None while it is not set, or without one."""
        outcome = self._outcome()
        return None if outcome is None else outcome.reason

    def add_callback(self, callback: Callback) -> Remover:
        """Calls `callback()` once when the signal is set, from the thread that sets it; at once if it is set.

        Exceptions in it are swallowed. Returns a function that removes it (any number of times, from any thread); a
        callback that is being called at that moment still finishes.
        """
        token = object()
        self._callbacks[token] = callback
        if self.is_set():
            self._call(token)
        return lambda: self._forget(token)

    def wait(self, timeout: units.Duration | None = None) -> Any:
        """Waits until it is set, at most `timeout` (seconds or a duration string); gives whether it is set.

        In plain code it blocks and returns a bool. In a thread with a running event loop it returns an awaitable that
        gives the bool, so that the loop goes on: `await signal.wait(5)`.
        """
        limit = _limit(timeout)
        return self._wait_blocking(limit) if running_loop() is None else self._wait_in_loop(limit)

    def __bool__(self) -> bool:
        return self.is_set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} set={self.is_set()}>"

    def __copy__(self) -> Signal:
        return self  # a copy could never be set

    def __deepcopy__(self, memo: object) -> Signal:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signal belongs to its process and cannot be pickled")

    def _set(self, reason: BaseException | None = None) -> None:
        """For the library: sets it (the first reason stays) and calls the callbacks in this thread."""
        if not self._outcomes:
            self._outcomes.append(_Outcome(next(_order), reason))
        self._fire()

    def _outcome(self) -> _Outcome | None:
        return self._outcomes[0] if self._outcomes else None

    def _fire(self) -> None:
        """Calls all callbacks. A Ctrl-C in between is kept until all were called: none may miss the signal."""
        interrupt: KeyboardInterrupt | None = None
        for token in list(self._callbacks):
            try:
                self._call(token)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _call(self, token: object) -> None:
        callback = self._callbacks.pop(token, None)
        if callback is None:
            return  # removed, or called by another thread
        try:
            callback()
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit and CancelledError too
            pass  # not the setter's problem, which may be the thread that serves the whole process

    def _forget(self, token: object) -> None:
        self._callbacks.pop(token, None)

    def _wait_blocking(self, limit: float | None) -> bool:
        # A bare lock and not an Event: releasing it from a signal handler in this same thread cannot hang.
        gate = threading.Lock()
        gate.acquire()
        remove = self.add_callback(gate.release)
        try:
            gate.acquire(timeout=-1 if limit is None else limit)
        finally:
            remove()
        return self.is_set()

    async def _wait_in_loop(self, limit: float | None) -> bool:
        import asyncio

        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        # Where the loop is closed by then, so is the wait, and the error is swallowed like any callback's.
        remove = self.add_callback(lambda: loop.call_soon_threadsafe(gate.set_result, None))
        try:
            await asyncio.wait([gate], timeout=limit)
        finally:
            remove()
        return self.is_set()


class Combined(Signal):
    """Set as soon as one of its parts is, with that part's reason, or when it is set itself.

    It registers nothing with its parts until somebody adds a callback or waits, and nothing stays when that is removed
    or was called. close() drops what was forgotten, so that a long-lived part keeps no trace of short-lived calls.
    """

    __slots__ = ("_links", "_parts")

    def __init__(self, *parts: Signal) -> None:
        self._outcomes = []
        self._callbacks = {}
        self._parts = parts
        self._links: dict[object, list[Remover]] = {}

    def add_callback(self, callback: Callback) -> Remover:
        token = object()
        self._links[token] = links = []
        self._callbacks[token] = callback
        for part in self._parts:
            links.append(part.add_callback(self._fire))
        if self.is_set():
            self._call(token)
        if token not in self._callbacks:  # called meanwhile, perhaps before the last link was made
            for unlink in links:
                unlink()
        return lambda: self._forget(token)

    def close(self) -> None:
        """For the library, when the call is over: forgets all callbacks. is_set() and reason still work."""
        for token in list(self._callbacks):
            self._forget(token)

    def _outcome(self) -> _Outcome | None:
        if not self._outcomes:
            found = [outcome for part in self._parts if (outcome := part._outcome()) is not None]
            if not found:
                return None
            self._outcomes.append(min(found, key=lambda outcome: outcome.order))
        return self._outcomes[0]

    def _set(self, reason: BaseException | None = None) -> None:
        self._outcome()  # a part that was set before gives the reason
        super()._set(reason)

    def _call(self, token: object) -> None:
        try:
            super()._call(token)
        finally:
            self._unlink(token)  # last: add_callback() relies on the callback being gone before its links are

    def _forget(self, token: object) -> None:
        super()._forget(token)
        self._unlink(token)

    def _unlink(self, token: object) -> None:
        for unlink in self._links.pop(token, ()):
            unlink()


class watching:
    """`with watching(signal) as s` or `async with`: a Signal `s` that is set when `signal` is, for as long as it lasts.

    A Signal is given back as it is; None gives one that is never set. Anything else with is_set() is asked at once and
    then every 0.1 s, by a thread of its own (`with`) or by a timer of the running loop (`async with`). If asking
    raises, the signal is set with that error as its reason: going on unwatched would be worse.
    """

    def __init__(self, signal: SupportsIsSet | None) -> None:
        if signal is not None and (isinstance(signal, type) or not callable(getattr(signal, "is_set", None))):
            raise ConfigError(
                f"signal is {units.shown(signal)}: give an object with is_set(), such as a threading.Event"
            )
        self._foreign = None if signal is None or isinstance(signal, Signal) else signal
        self._signal = signal if isinstance(signal, Signal) else Signal()
        self._over = threading.Lock()  # released to end the thread
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Signal:
        if not self._look():
            self._over.acquire()
            thread = threading.Thread(target=self._poll, name="runstate-signal", daemon=True)
            why_not = threads.start(thread)
            if why_not:
                raise UnavailableError(why_not, code="UNAVAILABLE")
            self._thread = thread
        return self._signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.release()
            self._thread.join(timeout=1.0)  # at once, unless a foreign is_set() hangs
            self._thread = None

    async def __aenter__(self) -> Signal:
        self._look_again()
        return self._signal

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> bool:
        """Asks the foreign signal. True when there is nothing more to ask."""
        if self._foreign is None:
            return True
        try:
            if not self._foreign.is_set():
                return False
        except Exception as error:
            self._signal._set(error)
        else:
            self._signal._set()
        return True

    def _poll(self) -> None:
        while not self._over.acquire(timeout=POLL_SECONDS):
            if self._look():
                return

    def _look_again(self) -> None:
        loop = running_loop()
        if not self._look() and loop is not None:
            self._timer = loop.call_later(POLL_SECONDS, self._look_again)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, or None. Does not import asyncio: without it there is none.

    Under gevent many greenlets share a thread of the system, and asyncio takes its loop for that of each of them: the
    one that runs it is the one whose ident it has noted.
    """
    module = sys.modules.get("asyncio")
    get: Callable[[], asyncio.AbstractEventLoop | None] | None = getattr(module, "_get_running_loop", None)
    loop = None if get is None else get()
    return None if getattr(loop, "_thread_id", None) not in (None, threading.get_ident()) else loop


def _limit(timeout: object) -> float | None:
    """A timeout in seconds, at most 100 years. A negative number is "no longer", as for threading.Event."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and timeout < 0:
        return 0.0
    return min(units.seconds(timeout, "timeout"), units.DURATION_MS_MAX / 1000)

"""``slots``: so many at a time, in all processes together. A decorator, a ``with`` and an ``async with``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, units
from .context import Frame, current, enter, leave, nesting
from .signals import Combined
from .steps import Deliver, Run, Steps, adrive, drive
from .wrapping import wrap

if TYPE_CHECKING:
    from types import TracebackType

    from .client import Runstate
    from .holds import Hold
    from .results import RunContext

TIMEOUT = "60s"
LEASE = "30s"


class _Inside(NamedTuple):
    """One entered block."""

    slots: Slots
    hold: Hold
    signal: Combined
    entered: Token[Frame | None] | None


# The blocks that this thread or task is in, of all objects. One variable: a context keeps every variable for ever.
_stack: ContextVar[tuple[_Inside, ...]] = ContextVar("runstate_slots", default=())


class Slots:
    """Units of a pool: decorate a function with it, or enter it. It can be used again and again, and nested."""

    def __init__(
        self,
        client: Runstate,
        name: str,
        *,
        max: int | None = None,
        units_: int | None = None,
        timeout: units.Duration | None = None,
        lease: units.Duration | None = None,
    ) -> None:
        self.name = units.name(name, "the name of slots")
        self._client = client
        self._max = None if max is None else units.whole(max, "max")
        self._units = units.whole(1 if units_ is None else units_, "units")
        self._timeout = TIMEOUT if timeout is None else timeout
        self._lease_ms = units.lease_seconds(LEASE if lease is None else lease) * 1000
        self._entered: list[_Inside] = []  # by all threads and tasks

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called while the units are held."""
        return wrap(self._client, function, "slots", lambda args, kwargs: self._call(function, args, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"max": self._max, "units_": self._units, "timeout": self._timeout, "lease": self._lease_ms / 1000}
        return _unpickled, (self._client, self.name, options)

    def __enter__(self) -> RunContext:
        return self._push(*drive(self._client._connection, self._acquire()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold, signal = self._pop()
        drive(self._client._connection, self._release(hold, signal, failed=error is not None))

    async def __aenter__(self) -> RunContext:
        return self._push(*await adrive(self._client._connection, self._acquire()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold, signal = self._pop()
        await adrive(self._client._connection, self._release(hold, signal, failed=error is not None))

    def _push(self, hold: Hold, around: RunContext, signal: Combined) -> RunContext:
        inside = _Inside(self, hold, signal, enter(around, hold.token))
        self._entered.append(inside)
        _stack.set((*_stack.get(), inside))
        return around

    def _pop(self) -> tuple[Hold, Combined]:
        """The innermost block of this object in this thread or task; a block that was entered elsewhere (a generator
        may be closed in another context) is the last one of all."""
        inside = next((each for each in reversed(_stack.get()) if each in self._entered), self._entered[-1])
        self._entered.remove(inside)
        _stack.set(tuple(each for each in _stack.get() if each is not inside))
        leave(inside.entered)
        return inside.hold, inside.signal

    # ------------------------------------------------------------------ steps

    def _acquire(self) -> Steps[tuple[Hold, RunContext, Combined]]:
        """Takes the units, in line. Raises TimeoutError, ConflictError, RunstateError (NOT_FOUND), StoppedError."""
        from . import wire
        from .results import RunContext

        wait_ms = units.milliseconds(self._timeout, "timeout")
        binding = self._client._binding()
        info = yield from binding.join()
        within, inherited = nesting()
        request = wire.SlotsAcquire(
            run=info.id,
            pool=self.name,
            units=self._units,
            lease_ms=self._lease_ms,
            max=self._max,
            wait_ms=wait_ms,
            within=within,
            inherited=inherited,
        )
        try:
            answer = yield request
        except errors.StoppedError as error:
            raise binding.noted(error)  # noqa: B904
        except errors.RunstateError as error:
            if error.code == "DEADLOCK":  # it has a time-out, which is certain to pass
                raise errors.TimeoutError(f"slots {self.name}: {error}", code=error.code, status=error.status) from None
            raise
        reply = answer.reply
        if isinstance(reply, wire.SlotsBusy):
            raise errors.TimeoutError(f"slots {self.name}: no {self._units} free within {self._timeout}")
        hold = answer.holds[reply.token]
        frame = current()
        outer = frame.context if frame is not None else binding.context()
        signal = Combined(outer.signal, binding.signal, hold.signal)
        return hold, RunContext(outer.run, signal, outer.attempt, outer.key), signal

    def _release(self, hold: Hold, signal: Combined, *, failed: bool) -> Steps[None]:
        """Gives the units back; they are free when this returns, or as soon as the daemon can write. Raises
        LeaseLostError when somebody else had got them meanwhile, unless the block has failed with an exception of its
        own."""
        from . import wire

        signal.close()
        if hold.pid != os.getpid():
            return  # in a child that was forked inside the block: the units are its parent's
        lost = hold.signal.reason
        try:
            answer = yield Deliver(wire.Release(token=hold.token), hold, patient=False)
        except errors.RunstateError:
            return
        if failed:
            return
        if isinstance(lost, errors.LeaseLostError):
            raise lost
        # A release that was sent again may have done its work the first time.
        if lost is None and not answer.reply.held and not answer.again:
            raise errors.LeaseLostError(f"slots {self.name} were lost while they were used", code="LEASE_LOST")

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
        hold, around, signal = yield from self._acquire()
        try:
            result = yield Run(function, args, kwargs, around, hold.token)
        except Exception:
            yield from self._release(hold, signal, failed=True)
            raise
        except BaseException:
            hold.release()
            raise
        yield from self._release(hold, signal, failed=False)
        return result


def _unpickled(client: Runstate, name: str, options: dict[str, Any]) -> Slots:
    return Slots(client, name, **options)

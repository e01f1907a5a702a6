"""``events`` and ``status``: looking at a run."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import errors, threads, units
from .results import RunEvent, RunState, RunStatus, Waiting, WorkerStatus
from .signals import Signal, SupportsIsSet, watching
from .steps import Steps, adrive, check_loop, drive

if TYPE_CHECKING:
    from . import wire
    from .client import Runstate
    from .connection import Connection

STATES = {"active": "running"}
PAGE = 200
WAIT_MS = 20_000  # a wait of its own for each look, so that a signal is noticed even if the daemon hangs
RETRY_S_MIN = 0.5
RETRY_S_MAX = 10.0


def status(client: Runstate) -> Steps[RunStatus]:
    """The run, who holds work in it and below, and what waits. Also of a run that is over."""
    from . import wire

    run = yield from client._binding().known()
    try:
        answer = yield wire.RunsStatus(run=run.id)
    except errors.AuthError as error:
        if error.code != "FORBIDDEN":
            raise
        known = yield wire.RunsGet(run=run.id)  # a key without the permission `usage` sees no workers and no waits
        view = wire.RunStatusView(run=known.reply)
    else:
        view = answer.reply
    return RunStatus(
        run=RunState(view.run.run, run.name, STATES.get(view.run.state, view.run.state), moment(view.run.deadline_ms)),
        workers=[WorkerStatus(w.worker, w.holding, moment(w.lease_expires_ms)) for w in view.workers],
        waiting=[Waiting(w.kind, w.name, w.units) for w in view.waiting],
    )


class Feed:
    """Where a reader of events is."""

    def __init__(self, client: Runstate, types: Sequence[str] | None) -> None:
        if types is not None and (isinstance(types, str) or not all(isinstance(kind, str) for kind in types)):
            raise errors.ConfigError(f"types is {units.shown(types)}: give a list of event types")
        self._client = client
        self._types = tuple(types or ())
        self._cursor = 0
        self.pause_s = RETRY_S_MIN

    def wait(self) -> Steps[wire.EventsWait]:
        """What to ask to wait for the next event."""
        from . import wire

        run = yield from self._client._binding().known()
        return wire.EventsWait(run=run.id, after=self._cursor, wait_ms=WAIT_MS)

    def read(self) -> Steps[list[RunEvent]]:
        """The next events that are there already."""
        from . import wire

        run = yield from self._client._binding().known()
        answer = yield wire.EventsRead(run=run.id, after=self._cursor, types=self._types, limit=PAGE)
        self._cursor = answer.reply.cursor
        self.pause_s = RETRY_S_MIN
        return [_event(event) for event in answer.reply.events]

    def page(self) -> Steps[list[RunEvent]]:
        """Waits for the next events; an empty list when none came for a while."""
        yield (yield from self.wait())
        return (yield from self.read())

    def after_trouble(self, error: errors.RunstateError) -> float:
        """How long to wait after an error that may pass, in seconds. Raises it if it will not."""
        if not isinstance(error, errors.UnavailableError) or error.message == threads.LIMIT:
            raise error
        pause, self.pause_s = self.pause_s, min(RETRY_S_MAX, self.pause_s * 2)
        return pause


def events(client: Runstate, types: Sequence[str] | None, signal: SupportsIsSet | None) -> Iterator[RunEvent]:
    """The run's events from its beginning, then as they happen, until ``signal`` is set."""
    feed = Feed(client, types)
    with watching(signal) as watched:
        while not watched.is_set():
            try:
                request = drive(client._connection, feed.wait())
                if not _comes(client._connection(), request, watched):
                    return
                page = drive(client._connection, feed.read())
            except errors.RunstateError as error:
                if Signal.wait(watched, feed.after_trouble(error)):
                    return
                continue
            for event in page:
                if watched.is_set():
                    return
                yield event


async def aevents(
    client: Runstate, types: Sequence[str] | None, signal: SupportsIsSet | None
) -> AsyncIterator[RunEvent]:
    """The same in a coroutine."""
    import asyncio

    check_loop()
    feed = Feed(client, types)
    async with watching(signal) as watched:
        stopped = asyncio.ensure_future(watched._wait_in_loop(None))
        page: asyncio.Future[list[RunEvent]] | None = None
        try:
            while not stopped.done():
                page = asyncio.ensure_future(adrive(client._connection, feed.page()))
                await asyncio.wait((page, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not page.done():
                    return
                try:
                    found = page.result()
                except errors.RunstateError as error:
                    await asyncio.wait((stopped,), timeout=feed.after_trouble(error))
                    continue
                for event in found:
                    if stopped.done():
                        return
                    yield event
        finally:
            stopped.cancel()
            if page is not None:
                page.cancel()


def moment(at_ms: int | None) -> datetime.datetime | None:
    """A point in time of the wire as an aware datetime."""
    if at_ms is None:
        return None
    return datetime.datetime.fromtimestamp(at_ms / 1000, tz=datetime.timezone.utc)


def _event(event: wire.Event) -> RunEvent:
    at = moment(event.at_ms)
    assert at is not None, "every event has a time"
    return RunEvent(str(event.event), event.type, at, event.data)


def _comes(connection: Connection, request: wire.Request[Any], signal: Signal) -> bool:
    """Waits for the answer, without repeats; False when ``signal`` is set first."""
    from .calls import Gate, no_answer, patience

    gate = Gate()
    call = connection._new_call(request, gate.open, None, None)
    forget = signal.add_callback(gate.open)
    try:
        connection._start(call)  # not as a blocking one: the reader thread reads, so that the signal can end the wait
        if not gate.wait(patience(call, connection.address.timeout_s)):
            raise no_answer(request, connection.address.timeout_s)
        if not signal.is_set():
            call.outcome()
        return not signal.is_set()
    finally:
        forget()
        connection._abandon(call)

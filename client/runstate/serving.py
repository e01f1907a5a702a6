"""``serve``: a worker. Takes jobs of its queues, runs their handlers, records what came of them.

The file is not named after its verb: it is imported at first use, which would put the module in the place of the
function ``runstate.serve``.

    declared --> taking jobs --stop (run over, signal, SIGTERM, SIGINT)--> draining, at most 30 s --> returned

Each queue has its own places. A place is free again as soon as its handler has ended: the outcome and the request for
the next job travel together. Plain handlers run in threads that are kept (see handler_threads.py), ``async def``
handlers on the serving loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import signal as signals_of_os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import awake, errors, failures, payloads, units, wire
from .context import enter, leave
from .handler_threads import HandlerThreads
from .holds import Hold
from .queues import ATTEMPTS, PLACES_MAX, Queue
from .recording import record
from .results import RunContext, RunInfo
from .runs import CHILD_NAME
from .signals import Signal, SupportsIsSet, watching
from .steps import adrive

if TYPE_CHECKING:
    from .client import Runstate

log = logging.getLogger(__name__)

DRAIN_S = 30.0
RETRY_S_MIN = 0.25  # after trouble with taking jobs ...
RETRY_S_MAX = 10.0  # ... doubling up to this
SETUP_S_MAX = 2.0  # the same, while resources are missing
TAKEN_OVER = ("worker_died", "lease_expired")  # what ended the delivery before
NO_THREAD_S = 1.0  # for which a place stays empty whose handler could not be begun


class NoThread(Exception):
    """The handler could not be begun. No failure of the job's."""


class Source:
    """One queue that is served, in one run."""

    def __init__(self, queue: Queue, concurrency: int | None, *, is_picked: bool = True) -> None:
        self._queue = queue
        self._is_picked = is_picked
        self.client: Runstate = queue._client
        self.free = queue._concurrency if concurrency is None else concurrency
        self.changed = asyncio.Event()
        self.info: RunInfo | None = None
        self.scale = 0  # of the budget, if there is one
        self.threads = HandlerThreads(f"runstate-{queue.name}")

    @property
    def queue(self) -> Queue:
        """The queue; one that was not picked by hand is the one that was decorated last under its name."""
        return self._queue if self._is_picked else self._queue._latest()

    async def declare(self) -> None:
        """Joins the run and declares the queue and what its jobs need. Raises StoppedError, ConflictError,
        UnavailableError, and RunstateError (NOT_FOUND) for a resource that does not exist."""
        connection, resources = self.client._connection, self.queue._resources
        self.info = await adrive(connection, self.client._binding().join())
        attempts = self.queue._declared_attempts() or ATTEMPTS
        if not resources.nothing:  # they may be missing; the queue is there for its producers meanwhile
            await connection().acall(wire.QueuesDeclare(queue=self.queue.name, attempts=attempts))
        if resources.budget is not None:
            self.scale = await adrive(connection, resources.scale())
        needs = await adrive(connection, resources.needs())
        await connection().acall(wire.QueuesDeclare(queue=self.queue.name, attempts=attempts, needs=needs))

    def costs(self, job: wire.JobGrant, result: Any) -> dict[str, int]:
        """What the job cost, by reservation. Raises ConfigError for a cost that fails."""
        cost = self.queue._resources.cost_minor(result, self.scale) if job.reservations else None
        return {} if cost is None else {job.reservations[0]: cost}

    def take_place(self) -> None:
        self.free -= 1

    def give_place(self) -> None:
        self.free += 1
        self.changed.set()


class Worker:
    """Serves queues on the running loop until it is told to stop."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._stop = asyncio.Event()
        self._handlers: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Take no more jobs."""
        self._stop.set()

    async def run(self) -> None:
        """Declares, then takes jobs until stopped or until the runs of all queues are over; then drains."""
        early = [source for source in self._sources if not await self._declared(source)]
        self._sources = _one_of_each(self._sources)
        loops = [
            asyncio.ensure_future(self._take_jobs_later(source) if source in early else self._take_jobs(source))
            for source in self._sources
        ]
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await self._until_over(loops, stopped)
        finally:
            for task in (*loops, stopped):
                task.cancel()
            try:
                await _settled([*loops, stopped])
                await self._drain()
            finally:
                for source in self._sources:
                    source.threads.close()
        for task in loops:
            if not task.cancelled() and task.exception() is not None:
                task.result()

    async def _declared(self, source: Source) -> bool:
        """Declares a queue. False: what its jobs need has not been set up yet."""
        try:
            await source.declare()
        except errors.StoppedError as error:
            raise source.client._binding().noted(error)  # noqa: B904
        except errors.RunstateError as error:
            if error.code != "NOT_FOUND":
                raise
            log.warning("queue %s: waits for what its jobs need: %s", source.queue.name, error)
            return False
        return True

    async def _take_jobs_later(self, source: Source) -> None:
        """Takes jobs once what they need is there."""
        pause = RETRY_S_MIN
        while True:
            await asyncio.sleep(pause)
            pause = min(SETUP_S_MAX, pause * 2)
            try:
                await source.declare()
            except errors.StoppedError as error:
                source.client._binding().noted(error)
                return
            except errors.RunstateError as error:
                if error.code != "NOT_FOUND" and not isinstance(error, errors.UnavailableError):
                    raise
            else:
                log.warning("queue %s: what its jobs need is there", source.queue.name)
                await self._take_jobs(source)
                return

    async def _until_over(self, loops: Sequence[asyncio.Future[None]], stopped: asyncio.Future[Any]) -> None:
        """Returns when stopped, when one loop has failed, or when all have ended."""
        left: set[asyncio.Future[Any]] = {*loops, stopped}
        while not stopped.done() and len(left) > 1:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() is not None for task in done):
                return

    async def _drain(self) -> None:
        """Waits for the handlers that run. What is left of the coroutines is cancelled and its jobs are given back;
        what is left of the threads keeps its jobs until it ends or the process does."""
        self._stop.set()
        if self._handlers:
            await awake.wait(self._handlers, DRAIN_S)
        for task in self._handlers:
            task.cancel()
        await _settled(list(self._handlers))

    async def _take_jobs(self, source: Source) -> None:
        pause = RETRY_S_MIN
        assert source.info is not None, "declared before"
        while True:
            while source.free <= 0:
                source.changed.clear()
                await source.changed.wait()
            request = wire.QueuesAdmit(
                queues=(
                    wire.AdmitFrom(
                        run=source.info.id,
                        queue=source.queue.name,
                        places=source.free,
                        lease_ms=source.queue._lease_ms,
                    ),
                )
            )
            try:
                answer = await source.client._connection().acall(request)
            except errors.StoppedError as error:
                source.client._binding().noted(error)
                return
            except (errors.AuthError, errors.ConfigError):
                raise
            except errors.RunstateError as error:
                log.warning("queue %s: no jobs for now, next try in %g s: %s", source.queue.name, pause, error)
                await asyncio.sleep(pause)
                pause = min(RETRY_S_MAX, pause * 2)
                continue
            pause = RETRY_S_MIN
            for job in answer.reply.jobs:
                source.take_place()
                task = asyncio.ensure_future(self._handle(source, job, answer.holds[job.token]))
                self._handlers.add(task)  # the loop itself keeps only weak references to tasks
                task.add_done_callback(self._handlers.discard)
            del answer

    # ------------------------------------------------------------------ one job

    async def _handle(self, source: Source, job: wire.JobGrant, hold: Hold) -> None:
        outcome: wire.Request[wire.JobView]
        queue = source.queue
        if job.reason in TAKEN_OVER:
            failures.took_over(f"queue {queue.name}", f"job {job.job} ({job.key})")
        try:
            outcome = await self._outcome(source, queue, job, hold)
        except NoThread as error:
            log.warning("job %s goes back: %s", job.job, error)
            hold.release()
            await asyncio.sleep(NO_THREAD_S)  # in its place: or it would come again at once
            return
        except BaseException:
            # Cancelled. A coroutine has ended: its job goes to another worker, no attempt is counted. A thread goes on,
            # and keeps its job until it ends or the process does: it must not be done twice at the same time.
            if queue._is_async:
                hold.release()
            raise
        finally:
            source.give_place()
        await record(source, job, hold, outcome)

    async def _outcome(
        self, source: Source, queue: Queue, job: wire.JobGrant, hold: Hold
    ) -> wire.Request[wire.JobView]:
        """Runs the handler; what to record."""
        around = RunContext(RunInfo(job.run, job.run_name or CHILD_NAME), hold.signal, job.attempt, job.key)
        try:
            result = await self._run_handler(source, queue, payloads.decode(job.input), around, hold)
        except NoThread:
            raise
        except asyncio.CancelledError:
            if self._stop.is_set():
                raise
            return failures.of_job(queue, job, asyncio.CancelledError("the handler cancelled itself"))
        except BaseException as error:  # SystemExit too: a handler must not take the worker down
            return failures.of_job(queue, job, error)
        try:
            text = payloads.encode(f"the result of {queue.name}", result)
        except errors.ResultTooLargeError as error:
            return failures.of_job(queue, job, error, retry=False)
        except errors.ConfigError as error:
            return failures.of_job(queue, job, error, retry=False)
        try:
            costs = source.costs(job, result)
        except errors.ConfigError as error:
            # The result counts; without a cost the reserve is charged.
            log.error("queue %s: job %s: %s", queue.name, job.job, error, exc_info=error)
            costs = {}
        return wire.QueuesComplete(job=job.job, token=job.token, result=text, costs=costs)

    async def _run_handler(self, source: Source, queue: Queue, input: Any, around: RunContext, hold: Hold) -> Any:
        handler = queue._handler
        assert handler is not None, "only queues with a handler are served"
        if queue._is_async:
            entered = enter(around, hold.token)
            try:
                return await handler(input)
            finally:
                leave(entered)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def work() -> Callable[[], None]:
            enter(around, hold.token)  # in a context of the work's own: it ends with it
            try:
                result, error = handler(input), None
            except BaseException as raised:
                result, error = None, raised
            # ``hold`` is referred to by this function, so a thread that outlives the drain keeps its job.
            return lambda: _hand_over(loop, done, result, error)

        context = contextvars.copy_context()  # of whoever called serve(), as a coroutine has it
        why_not = source.threads.run(lambda: context.run(work))
        if why_not:
            raise NoThread(why_not)
        result = await done
        if not inspect.isawaitable(result):
            return result
        entered = enter(around, hold.token)
        try:
            return await result
        finally:
            leave(entered)


def _hand_over(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    """Settles a future of a loop from a thread."""

    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses to carry it
            done.set_exception(RuntimeError(f"StopIteration: {error}"))
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: serve() has returned
        loop.call_soon_threadsafe(settle)


# ---------------------------------------------------------------------------------------------------- entry points


async def aserve(
    client: Runstate,
    *,
    concurrency: int | None,
    queues: Sequence[Queue] | None,
    signal: SupportsIsSet | None,
    told: Signal | None = None,
) -> None:
    """Serves on the running loop. ``told``: set when the process is told to stop; set here when ``signal`` is."""
    worker = Worker(sources(client, concurrency, queues))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the worker
            loop.call_soon_threadsafe(worker.stop)

    told = Signal() if told is None else told  # not `or`: a signal that is not set counts as false
    remove_told = told.add_callback(stop)
    async with watching(signal) as watched:
        remove_watched = watched.add_callback(lambda: told._set())
        try:
            await worker.run()
        finally:
            remove_watched()
            remove_told()


def serve(
    client: Runstate, *, concurrency: int | None, queues: Sequence[Queue] | None, signal: SupportsIsSet | None
) -> None:
    """Serves in plain code, on a loop of its own. In the main thread SIGTERM and SIGINT stop it; a SIGINT after that
    raises KeyboardInterrupt without waiting for the handlers. Those that the program ignores stay ignored."""
    told = Signal()
    loop = asyncio.new_event_loop()
    try:
        with _stopping_on_signals(told):
            loop.run_until_complete(aserve(client, concurrency=concurrency, queues=queues, signal=signal, told=told))
    finally:
        _close(loop)


@contextlib.contextmanager
def _stopping_on_signals(told: Signal) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if number == signals_of_os.SIGINT and told.is_set():
            raise KeyboardInterrupt
        told._set()

    # An ignored one stays so: a shell does that to what a script runs in the background, where Ctrl-C is not for us.
    numbers = (signals_of_os.SIGTERM, signals_of_os.SIGINT)
    heard = [number for number in numbers if signals_of_os.getsignal(number) is not signals_of_os.SIG_IGN]
    before = {number: signals_of_os.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signals_of_os.signal(number, signals_of_os.SIG_DFL if handler is None else handler)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Closes the loop; tasks that an interrupt left behind are cancelled, and get one moment, not more."""
    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.05))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def sources(client: Runstate, concurrency: int | None, queues: Sequence[Queue] | None) -> list[Source]:
    """What is to be served. Raises ConfigError when there is nothing, or something that cannot be."""
    if concurrency is not None:
        units.whole(concurrency, "concurrency", 1, PLACES_MAX)
    chosen = client._core.queues if queues is None else queues
    for queue in chosen:
        if not isinstance(queue, Queue):
            raise errors.ConfigError(f"queues has {units.shown(queue)}: give queues made by queue()")
        if not queue.servable:
            raise errors.ConfigError(f"queue {queue.name} has no handler in this process, so it cannot be served")
    if not chosen:
        raise errors.ConfigError("there is no queue with a handler to serve: decorate one with @queue(name)")
    return [Source(queue, concurrency, is_picked=queues is not None) for queue in dict.fromkeys(chosen)]


def _one_of_each(sources: Sequence[Source]) -> list[Source]:
    """Of two handlers of one queue in one run the last one serves."""
    found: dict[tuple[str, str], Source] = {}
    for source in sources:
        assert source.info is not None, "declared before"
        before = found.pop((source.info.id, source.queue.name), None)
        if before is not None:
            source.queue._takes_the_place_of(before.queue)
        found[source.info.id, source.queue.name] = source
    return list(found.values())


async def _settled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Waits for cancelled tasks to end; their outcome is looked at elsewhere."""
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)

"""``queue``: work handed to worker processes. Producers call it like a function; see serving.py for the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import errors, functions, keys, payloads, units
from .context import inherited, within
from .gathering import gather
from .resources import Resources
from .runs import Binding
from .signals import running_loop
from .steps import Steps, adrive, drive

if TYPE_CHECKING:
    from . import wire
    from .client import Runstate

ATTEMPTS = 5
LEASE = "30s"
CONCURRENCY = 1
PLACES_MAX = 1_000  # handlers of one queue at once in one process, as the wire allows
PART_BYTES_MAX = 4 * 1024 * 1024  # of keys and inputs in one request: half of what a frame may be
MEMBER_BYTES = 32  # of a job in a request, beside its key and input
HANDLER_ERROR = "handler_error: "


class Queue:
    """A queue of one client: call it, ``send`` to it, or let ``serve`` run its handler."""

    def __init__(
        self,
        client: Runstate,
        name: str,
        handler: Callable[[Any], Any] | None,
        *,
        attempts: int | None,
        lease: units.Duration | None,
        concurrency: int | None,
        key: Callable[[Any], str] | None,
        resources: Resources,
    ) -> None:
        _check_key(key)
        _check_handler(name, handler)
        self._client = client
        self._name = units.name(name, "the name of a queue")
        self._handler = handler
        self._attempts = None if attempts is None else units.whole(attempts, "attempts", 1, 100)
        self._lease_ms = units.lease_seconds(LEASE if lease is None else lease) * 1000
        self._concurrency = units.whole(
            CONCURRENCY if concurrency is None else concurrency, "concurrency", 1, PLACES_MAX
        )
        self._key = key
        self._resources = resources
        self._successor: Queue | None = None
        self._is_async = handler is not None and functions.kind(handler) == functions.COROUTINE
        if handler is not None:
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                if hasattr(handler, attribute):
                    setattr(self, attribute, getattr(handler, attribute))
            self.__wrapped__ = handler
            self._register(client._core.queues)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._name

    @property
    def servable(self) -> bool:
        """Whether ``serve`` can run it: it has a handler."""
        return self._handler is not None

    def __call__(self, input: Any) -> Any:
        """Submits a job and waits for its result. With an ``async def`` handler, or without a handler in a thread with
        a running event loop, it gives a coroutine. A queue without a handler takes a function as its handler."""
        if self._handler is None and callable(input) and not isinstance(input, str | bytes | Mapping | list | tuple):
            return self._with_handler(input)
        if self._is_async or (self._handler is None and running_loop() is not None):
            return self.acall(input)
        return drive(self._client._connection, self._call(input))

    async def acall(self, input: Any) -> Any:
        """Submits a job and waits for its result."""
        return await adrive(self._client._connection, self._call(input))

    def send(self, input: Any) -> Job:
        """Submits a job. The same input in the same run is the same job."""
        return drive(self._client._connection, self._send(input))

    async def asend(self, input: Any) -> Job:
        """Submits a job. The same input in the same run is the same job."""
        return await adrive(self._client._connection, self._send(input))

    def send_many(self, inputs: Iterable[Any]) -> list[Job]:
        """Submits a job for each input, in few requests; the jobs in the order of the inputs. Each is a job of its own:
        who repeats this after an error submits only what is missing."""
        return drive(self._client._connection, self._send_many(inputs))

    async def asend_many(self, inputs: Iterable[Any]) -> list[Job]:
        """Submits a job for each input, in few requests; see ``send_many``."""
        return await adrive(self._client._connection, self._send_many(inputs))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its place in a module, as a function is; elsewhere by name, as a queue without a handler."""
        place = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for name in place.split("."):
            found = getattr(found, name, None)
        if found is self:
            return str(place)
        needs = self._resources.without_cost()
        return _unpickled, (
            self._client,
            self._name,
            self._declared_attempts(),
            self._lease_ms / 1000,
            self._key,
            needs,
        )

    def __repr__(self) -> str:
        return f"<Queue {self._name} ({'handler' if self.servable else 'producer-only'})>"

    def _with_handler(self, handler: Callable[[Any], Any]) -> Queue:
        return Queue(
            self._client,
            self._name,
            handler,
            attempts=self._attempts,
            lease=self._lease_ms / 1000,
            concurrency=self._concurrency,
            key=self._key,
            resources=self._resources,
        )

    def _register(self, queues: list[Queue]) -> None:
        """Of two handlers of one queue the last one is served: a notebook's cell that is run again mends the first."""
        for number, before in enumerate(queues):
            if before._name == self._name and before._client._is_same_run(self._client):
                self._takes_the_place_of(before)
                before._successor = self
                queues[number] = self
                return
        queues.append(self)

    def _takes_the_place_of(self, before: Queue) -> None:
        import logging

        logging.getLogger(__name__).warning(
            "queue %s has a new handler, %s: it is served in the place of the one before, %s",
            self._name,
            units.shown(self._handler),
            units.shown(before._handler),
        )

    def _latest(self) -> Queue:
        """The one that was decorated last in its place."""
        found = self
        while found._successor is not None:
            found = found._successor
        return found

    def _declared_attempts(self) -> int | None:
        """What to declare on the way: whoever has the handler, or names attempts, declares the queue."""
        return ATTEMPTS if self._attempts is None and self.servable else self._attempts

    def gather(
        self,
        inputs: Sequence[Any],
        *,
        need: int | str = "all",
        accept: Callable[[Any, Any], Any] | None = None,
        timeout: units.Duration | None = None,
    ) -> list[Any]:
        """Submits every input (at most 100) as one group; the accepted results in completion order, once ``need`` of
        them are accepted or, with "all", when every job has ended. The rest is cancelled.

        Raises TaskFailedError when ``need`` is out of reach, TimeoutError, StoppedError, and what ``accept`` raises.
        """
        return drive(self._client._connection, gather(self, inputs, need, accept, timeout))

    async def agather(
        self,
        inputs: Sequence[Any],
        *,
        need: int | str = "all",
        accept: Callable[[Any, Any], Any] | None = None,
        timeout: units.Duration | None = None,
    ) -> list[Any]:
        """Submits every input as one group; see ``gather``."""
        return await adrive(self._client._connection, gather(self, inputs, need, accept, timeout))

    def _needs(self) -> Steps[wire.Needs | None]:
        """What its jobs need, as far as this process says; None: what the workers have declared."""
        if self._resources.nothing:
            return None
        return (yield from self._resources.needs())

    def _send(self, input: Any) -> Steps[Job]:
        (job,) = yield from self._send_many([input])
        return job

    def _send_many(self, inputs: Iterable[Any]) -> Steps[list[Job]]:
        from . import wire  # brings msgspec, which nobody needs before the first call

        binding = self._client._binding()
        binding.check()
        named = [self._named(input) for input in inputs]  # all of them, before anything is sent
        info = yield from binding.join()
        needs = yield from self._needs()
        run, attempts = info.id, self._declared_attempts()
        ids: list[str] = []
        for part in _parts(named, wire.SENT_MAX):
            try:
                if len(part) == 1:
                    ((key, text),) = part
                    answer = yield wire.QueuesSend(
                        run=run, queue=self._name, key=key, input=text, attempts=attempts, needs=needs
                    )
                    ids.append(answer.reply.job)
                else:
                    members = tuple(wire.NewJob(key=key, input=text) for key, text in part)
                    answer = yield wire.QueuesSendMany(
                        run=run, queue=self._name, members=members, attempts=attempts, needs=needs
                    )
                    ids += answer.reply.jobs
            except errors.StoppedError as error:
                raise binding.noted(error)  # noqa: B904
        return [Job(self._client, binding, self._name, job) for job in ids]

    def _named(self, input: Any) -> tuple[str, str]:
        """The key of an input, and its JSON text."""
        return keys.queue_key(self._name, input, self._key), payloads.encode(f"the input of {self._name}", input)

    def _call(self, input: Any) -> Steps[Any]:
        job = yield from self._send(input)
        return (yield from job._result(None))


class Job:
    """A job that was submitted."""

    def __init__(self, client: Runstate, binding: Binding, queue: str, job: str) -> None:
        self._client = client
        self._bound = binding
        self._queue = queue
        self._id = job

    @property
    def id(self) -> str:
        """The job's id."""
        return self._id

    def result(self, timeout: units.Duration | None = None) -> Any:
        """Waits for the result, without a limit by default. Raises TimeoutError when ``timeout`` passes (the job goes
        on), TaskFailedError when the job has failed, StoppedError when its run is over."""
        return drive(self._client._connection, self._result(timeout))

    async def aresult(self, timeout: units.Duration | None = None) -> Any:
        """Waits for the result; see ``result``."""
        return await adrive(self._client._connection, self._result(timeout))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_job, (self._client, self._queue, self._id)

    def __repr__(self) -> str:
        return f"<Job {self._id} in {self._queue}>"

    def _result(self, timeout: units.Duration | None) -> Steps[Any]:
        from . import wire

        wait_ms = None if timeout is None else units.milliseconds(timeout, "timeout")
        try:
            answer = yield wire.QueuesResult(job=self._id, wait_ms=wait_ms, within=within(), inherited=inherited())
        except errors.StoppedError as error:
            raise self._bound.noted(error)  # noqa: B904
        except errors.RunstateError as error:
            if error.code == "DEADLOCK" and timeout is not None:  # it is certain to pass
                told = f"job {self._id} in {self._queue}: {error.message}"
                raise errors.TimeoutError(told, code=error.code, status=error.status) from None
            raise
        view = answer.reply
        if view.state == "succeeded":
            return payloads.decode(view.result)
        if view.state == "failed":
            reason = view.reason or "failed"
            failed = errors.TaskFailedError(reason.removeprefix(HANDLER_ERROR), job_id=self._id, reason=reason)
            raise errors.failed_elsewhere(failed, view.traceback)
        if view.state == "cancelled":
            raise self._bound.cut_off(f"job {self._id} was cut off: its run is over")
        raise errors.TimeoutError(f"job {self._id} in {self._queue} had not ended after {timeout} (it is {view.state})")


def _parts(named: list[tuple[str, str]], most: int) -> Iterator[list[tuple[str, str]]]:
    """Keys and texts in parts of at most ``most``, each of a size that a frame may have."""
    part: list[tuple[str, str]] = []
    size = 0
    for key, text in named:
        bytes_more = MEMBER_BYTES + len(key.encode()) + len(text.encode())
        if part and (len(part) == most or size + bytes_more > PART_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append((key, text))
        size += bytes_more
    if part:
        yield part


def _unpickled(
    client: Runstate,
    name: str,
    attempts: int | None,
    lease: float,
    key: Callable[[Any], str] | None,
    resources: Resources,
) -> Queue:
    return Queue(client, name, None, attempts=attempts, lease=lease, concurrency=None, key=key, resources=resources)


def _unpickled_job(client: Runstate, queue: str, job: str) -> Job:
    return Job(client, client._binding(), queue, job)


def _check_key(key: object) -> None:
    if key is None:
        return
    if not callable(key):
        raise errors.ConfigError(f"key is {units.shown(key)}: give a function that returns a string")
    functions.check_plain(key, "key")
    functions.check(key, "key", "input")


def _check_handler(name: str, handler: object) -> None:
    if handler is None:
        return
    if not callable(handler):
        raise errors.ConfigError(f"queue needs a function as its handler, not {units.shown(handler)}")
    if functions.kind(handler) in (functions.GENERATOR, functions.ASYNC_GENERATOR):
        raise errors.ConfigError(f"queue {name}: its handler is a generator function, which has no result")
    functions.check(handler, f"queue {name}: its handler", "input")

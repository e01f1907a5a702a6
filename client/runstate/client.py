"""``Runstate``: a client of one run. Each method is one line over its verb's own file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import budgets, declaring, errors, limits, timing, units
from .context import context
from .loading import load, serving
from .once import wrap
from .queues import Queue
from .resources import read
from .runs import Binding
from .signals import SupportsIsSet, running_loop
from .slots import Slots
from .steps import adrive, check_loop, drive

if TYPE_CHECKING:
    import datetime

    from .connection import Connection
    from .greeting import Address
    from .results import RunContext, RunEvent, RunStatus
    from .units import Amount, Duration, Per

DEFAULT_RUN = "default"
DEFAULT_SPACE = "default"
TIMEOUT = "30s"
RETRIES = 3
LABEL_MAX = 512  # characters of a worker's label or a key, as the wire allows
OPTIONS = ("api_key", "space_id", "base_url", "run", "worker", "timeout", "retries")


class Core:
    """What the clients made from one another share: options, the session, the queues with handlers."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.queues: list[Queue] = []
        self.configured = 0  # how often: what was joined before is joined again
        self.scales: dict[str, int] = {}  # of budgets that others have declared, once they are known
        self.once_names: dict[str, tuple[object, ...]] = {}  # of once functions: which one has the name
        self._made: dict[str, Connection] = {}  # at most one, under "connection"

    def connection(self) -> Connection:
        """The session, made at first use. Raises ConfigError for settings that cannot be used."""
        found = self._made.get("connection")
        if found is None:
            from .connection import Connection  # what it brings takes as long to import as all the rest

            # One atomic step: threads that come at once must not each get a session of their own.
            found = self._made.setdefault("connection", Connection(self._address()))
        return found

    def configure(self, options: dict[str, Any]) -> None:
        """Merges options; the next call starts a session of its own."""
        self.options = {**self.options, **options}
        self.configured += 1
        made, self._made = self._made, {}
        self.scales.clear()
        for connection in made.values():
            connection.retire()

    def setting(self, option: str, variable: str | None) -> str | None:
        """What the code says, else the environment; blank is nothing."""
        value = self.options.get(option)
        if value is None and variable is not None:
            value = os.environ.get(variable, "").strip() or None
        return value

    def _address(self) -> Address:
        from .greeting import Address

        url = self.setting("base_url", "RUNSTATE_BASE_URL")
        key = self.setting("api_key", "RUNSTATE_API_KEY")
        if url is not None:
            url = units.text(url, "base_url", 4096).rstrip("/")
            if not url.startswith(("unix://", "tcp://", "tls://")):
                from .autostart import not_an_address

                raise not_an_address(url)
            if not url.startswith("unix://") and key is None:
                raise errors.ConfigError("over TCP a key is needed: set RUNSTATE_API_KEY or api_key")
        space = self.setting("space_id", "RUNSTATE_SPACE_ID")
        worker = self.setting("worker", None)
        timeout = self.options.get("timeout")
        retries = self.options.get("retries")
        return Address(
            url=url,
            space=units.name(DEFAULT_SPACE if space is None else space, "space_id"),
            key=None if key is None else units.text(key, "api_key", LABEL_MAX),
            worker=None if worker is None else units.text(worker, "worker", LABEL_MAX),
            timeout_s=units.milliseconds(TIMEOUT if timeout is None else timeout, "timeout") / 1000,
            retries=units.whole(RETRIES if retries is None else retries, "retries", 0),
        )

    def __del__(self) -> None:
        for connection in getattr(self, "_made", {}).values():  # it may be half made, by an interrupt
            connection.retire()


class Runstate:
    """A client. Making one reads nothing and connects nowhere; that happens at the first call that needs it."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        space_id: str | None = None,
        base_url: str | None = None,
        run: str | None = None,
        worker: str | None = None,
        timeout: Duration | None = None,
        retries: int | None = None,
    ) -> None:
        given = (api_key, space_id, base_url, run, worker, timeout, retries)
        self._core = Core({name: value for name, value in zip(OPTIONS, given, strict=True) if value is not None})
        self._bound: Binding | None = None
        self._is_fixed = False  # made by run() or child(): configure does not change which run is meant

    @classmethod
    def _on(cls, core: Core, binding: Binding) -> Runstate:
        client = cls.__new__(cls)
        client._core = core
        client._bound = binding
        client._is_fixed = True
        return client

    def __reduce__(self) -> tuple[Any, ...]:
        """By its settings (a key too) and its run: in another process a client of the same run."""
        import runstate

        run: str | None = None
        if self._is_fixed:
            bound = self._binding()
            if bound.parent is not None and bound.over is None and not bound.is_known:
                raise TypeError("a client of a child run cannot be pickled before it is joined: call run_id() first")
            run = bound.name if bound.parent is None else bound.info.id
        return _unpickled, (None if self._core is runstate._default._core else self._core.options, run)

    def _connection(self) -> Connection:
        return self._core.connection()

    def _binding(self) -> Binding:
        if self._bound is None:
            name = self._core.setting("run", "RUNSTATE_RUN")
            self._bound = Binding(self._core, units.name(DEFAULT_RUN if name is None else name, "run"), None, None)
        return self._bound

    def _is_same_run(self, other: Runstate) -> bool:
        """Whether both are made for one run, as far as can be told before it is joined."""
        if self is other:
            return True
        mine, its = (each._bound if each._is_fixed else None for each in (self, other))
        return mine is not None and its is not None and mine.parent is its.parent is None and mine.name == its.name

    def configure(self, **options: Any) -> None:
        """Changes options of this client; what was joined is joined again. A client whose run is over stays so.

        Raises ConfigError for an option that does not exist.
        """
        for name in options:
            if name not in OPTIONS:
                raise errors.ConfigError(f"configure has no option {name!r}; it has {', '.join(OPTIONS)}")
        self._core.configure({name: value for name, value in options.items() if value is not None})
        if self._bound is not None and self._bound.over is None and not self._is_fixed:
            self._bound = None

    # ------------------------------------------------------------------ runs

    def run(self, name: str, *, deadline: Duration | None = None) -> Runstate:
        """A client of the root run of that name, which is created at the first call that needs it. A run's id gives
        that run, also one that is over: its status and events can be read. ``deadline`` is set if the run has none."""
        return Runstate._on(self._core, Binding(self._core, units.name(name, "run"), deadline, None))

    def child(self, name: str | None = None, *, deadline: Duration | None = None) -> Runstate:
        """A client of a new run below this one's. It ends with its parent."""
        if name is not None:
            units.name(name, "child")
        return Runstate._on(self._core, Binding(self._core, name, deadline, self._binding()))

    def run_id(self) -> str:
        """The id of the run, which is joined or created if need be."""
        return drive(self._connection, self._binding().join()).id

    async def arun_id(self) -> str:
        """The id of the run, which is joined or created if need be."""
        return (await adrive(self._connection, self._binding().join())).id

    def stop(self) -> None:
        """Stops the run and all below it, in every process. This client is over; a repeat does nothing."""
        drive(self._connection, self._binding().end("stopped"))

    async def astop(self) -> None:
        """Stops the run and all below it, in every process. This client is over; a repeat does nothing."""
        await adrive(self._connection, self._binding().end("stopped"))

    def finish(self) -> None:
        """Marks the run finished. Otherwise like ``stop``."""
        drive(self._connection, self._binding().end("finished"))

    async def afinish(self) -> None:
        """Marks the run finished. Otherwise like ``stop``."""
        await adrive(self._connection, self._binding().end("finished"))

    def context(self) -> RunContext | None:
        """Where the code runs; see ``runstate.context``."""
        return context()

    # ------------------------------------------------------------------ once, queues

    def once(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        key: Callable[..., str] | None = None,
        attempts: int | None = None,
        lease: Duration | None = None,
    ) -> Any:
        """Wraps a function so that it runs once in the run for the same arguments; every caller gets its one result.

        ``attempts`` (3): failures after which every caller gets OnceFailedError. ``lease`` (30 s): how long a process
        that hangs may hold the work. ``name``: default the function's. ``key``: gets the arguments, gives a string.
        Generator functions are refused: they have no result.
        """
        options: dict[str, Any] = {"name": name, "key": key, "attempts": attempts, "lease": lease}
        if fn is not None:
            return wrap(self, fn, **options)
        return lambda function: wrap(self, function, **options)

    def queue(
        self,
        name: str,
        handler: Callable[[Any], Any] | None = None,
        *,
        slots: Any = None,
        limit: Any = None,
        budget: Any = None,
        attempts: int | None = None,
        lease: Duration | None = None,
        concurrency: int | None = None,
        key: Callable[[Any], str] | None = None,
    ) -> Queue:
        """A queue: with a handler it can be served, without one it takes a handler as a decorator or only sends.

        ``attempts`` (5): deliveries after which a job has failed. ``concurrency`` (1): handlers at once in this
        process, at most 1,000. ``key``: which inputs are the same job; default a hash of the input. ``slots``,
        ``limit``: a name, or {"name": ..., "units": ...}; ``budget``: {"name": ..., "reserve": ..., "cost": function of
        the result}. A job is started with all of them, in one step.
        """
        resources = read(slots, limit, budget)
        return Queue(
            self,
            name,
            handler,
            attempts=attempts,
            lease=lease,
            concurrency=concurrency,
            key=key,
            resources=resources,
        )

    def serve(
        self,
        *,
        concurrency: int | None = None,
        queues: Sequence[Queue] | None = None,
        signal: SupportsIsSet | None = None,
    ) -> None:
        """Runs the handlers of this process's queues until the run ends, ``signal`` is set, or SIGTERM or SIGINT come;
        then waits up to 30 s for those that run. A queue whose resources have not been set up yet waits for them."""
        if running_loop() is not None:
            raise errors.ConfigError("serve() would block the event loop of this thread: use `await aserve()`")
        load()
        serving().serve(self, concurrency=concurrency, queues=queues, signal=signal)

    async def aserve(
        self,
        *,
        concurrency: int | None = None,
        queues: Sequence[Queue] | None = None,
        signal: SupportsIsSet | None = None,
    ) -> None:
        """The same on the running event loop; cancelling the task drains, too."""
        check_loop()
        load()
        await serving().aserve(self, concurrency=concurrency, queues=queues, signal=signal)

    # ------------------------------------------------------------------ limits, slots, budgets

    def limit(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        *,
        max: int | None = None,
        per: Per | None = None,
        units: int | None = None,
        timeout: Duration | None = None,
    ) -> Any:
        """Wraps a function so that each call first takes units (1) of a limit, in line with all other processes. A
        generator takes them at its first ``next``.

        ``max`` and ``per`` declare the limit; without them it must exist. ``timeout`` (60 s): TimeoutError after it.
        """
        spec = limits.limit(self, name, max=max, per=per, units_=units, timeout=timeout)
        return (lambda function: limits.decorate(spec, function)) if fn is None else limits.decorate(spec, fn)

    def take(self, name: str, *, units: int | None = None, timeout: Duration | None = None) -> None:
        """Takes units (1) of a limit that exists. Raises TimeoutError after ``timeout`` (60 s)."""
        drive(self._connection, limits.take(limits.limit(self, name, units_=units, timeout=timeout)))

    async def atake(self, name: str, *, units: int | None = None, timeout: Duration | None = None) -> None:
        """Takes units of a limit; see ``take``."""
        await adrive(self._connection, limits.take(limits.limit(self, name, units_=units, timeout=timeout)))

    def slots(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        *,
        max: int | None = None,
        units: int | None = None,
        timeout: Duration | None = None,
        lease: Duration | None = None,
    ) -> Any:
        """Units (1) of a pool, held while a function or a block runs: a decorator, a ``with`` and an ``async with``.
        A generator holds them from its first ``next`` until it has ended or is closed.

        ``max`` declares the pool; without it, it must exist. ``timeout`` (60 s): TimeoutError after it. ``lease``
        (30 s): how long a process that hangs keeps its units.
        """
        pool = Slots(self, name, max=max, units_=units, timeout=timeout, lease=lease)
        return pool if fn is None else pool(fn)

    def budget(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        *,
        reserve: Amount | None = None,
        cost: Callable[[Any], Amount] | None = None,
        limit: Amount | None = None,
        currency: str | None = None,
        scale: int | None = None,
    ) -> Any:
        """Wraps a function so that ``reserve`` is held before each call (BudgetExceededError if the budget cannot cover
        it) and ``cost(result)`` is charged after it, or the reserve without ``cost``; nothing if it raises.

        Of a generator ``cost`` gets what it returned, else the last value that it yielded (None: nothing), also when
        its reader stopped early; of an async generator the last value.

        ``limit`` declares the budget, in ``currency`` (USD) with ``scale`` (2) decimal places.
        """
        spec = budgets.budget(self, name, reserve=reserve, cost=cost, limit=limit, currency=currency, scale=scale)
        return (lambda function: budgets.decorate(spec, function)) if fn is None else budgets.decorate(spec, fn)

    def setup(
        self,
        *,
        limits: declaring.Entries | None = None,
        slots: declaring.Entries | None = None,
        budgets: declaring.Entries | None = None,
    ) -> None:
        """Creates or verifies resources: name -> {"max", "per"}, {"max"}, {"limit", "currency", "scale"}."""
        drive(self._connection, declaring.setup(limits, slots, budgets))

    async def asetup(
        self,
        *,
        limits: declaring.Entries | None = None,
        slots: declaring.Entries | None = None,
        budgets: declaring.Entries | None = None,
    ) -> None:
        """Creates or verifies resources; see ``setup``."""
        await adrive(self._connection, declaring.setup(limits, slots, budgets))

    # ------------------------------------------------------------------ waiting, looking

    def sleep(self, name: str, duration: Duration | None = None, *, until: datetime.datetime | None = None) -> None:
        """Waits for the timer of that name in the run, which the first call sets; a process that restarts waits for
        what is left."""
        drive(self._connection, timing.sleep(self, name, duration, until))

    async def asleep(
        self, name: str, duration: Duration | None = None, *, until: datetime.datetime | None = None
    ) -> None:
        """Waits for a timer; see ``sleep``."""
        await adrive(self._connection, timing.sleep(self, name, duration, until))

    def together(self, name: str, count: int, *, timeout: Duration | None = None) -> None:
        """Returns once ``count`` different workers have called it with that name."""
        drive(self._connection, timing.together(self, name, count, timeout))

    async def atogether(self, name: str, count: int, *, timeout: Duration | None = None) -> None:
        """Returns once ``count`` different workers have called it with that name."""
        await adrive(self._connection, timing.together(self, name, count, timeout))

    def events(self, *, types: Sequence[str] | None = None, signal: SupportsIsSet | None = None) -> Iterator[RunEvent]:
        """The run's events, from its beginning and then as they happen, until ``signal`` is set."""
        from .observe import events

        return events(self, types, signal)

    def aevents(
        self, *, types: Sequence[str] | None = None, signal: SupportsIsSet | None = None
    ) -> AsyncIterator[RunEvent]:
        """The run's events; see ``events``."""
        from .observe import aevents

        return aevents(self, types, signal)

    def status(self) -> RunStatus:
        """The run, who holds work in it, and what waits. Also of a run that is over."""
        from .observe import status

        return drive(self._connection, status(self))

    async def astatus(self) -> RunStatus:
        """The run, who holds work in it, and what waits."""
        from .observe import status

        return await adrive(self._connection, status(self))

    def __repr__(self) -> str:
        if self._bound is not None and self._is_fixed:
            return f"<Runstate run={self._bound.name or '(child run)'}>"
        return f"<Runstate run={self._core.options.get('run') or '(default run)'}>"


def _unpickled(options: dict[str, Any] | None, run: str | None) -> Runstate:
    """A client with these options (None: the default client's), of this run (None: the one that the settings name)."""
    import runstate

    client = runstate._default if options is None else Runstate(**options)
    return client if run is None else client.run(run)

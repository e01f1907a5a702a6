"""The engine: the only place where things wait. Batches, commit, replies, deadlines.

    submit ──> what is waiting ──one hop──> batch.Executor on the database's thread ──COMMIT──> replies, pushes
       └─ a settled `once` result is answered from memory; verbs that only read go to the reader's connection

What goes into a batch, and in which order, is said in arrivals.py. Nothing is acknowledged before it is on disk. While
the disk refuses, requests get a retryable UNAVAILABLE, the lease clock stands, and what the daemon itself has to do
(deaths, lapses) is kept until a batch commits.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from runstate import wire
from runstated import counters, dispatch, faults, loading, replies, tickets
from runstated.arrivals import Arrivals
from runstated.batch import Acked, Ask, Cancelled, Entry, Executor, Lost, Nested, Tick
from runstated.cache import Cache
from runstated.clock import Clock, Timer, Timers
from runstated.domain import keys, sessions
from runstated.keyring import Keyring
from runstated.lines import Memory
from runstated.pressure import Pressure
from runstated.settings import BATCH_REQUESTS_MAX
from runstated.store.files import BATCH
from runstated.store.sqlite import Store, is_full
from runstated.store.tx import Access, Caller, Tx
from runstated.upkeep import Upkeep
from runstated.waits import CallKey, Opening, Settled

log = logging.getLogger(__name__)
T = TypeVar("T")

EPOCH = "epoch"  # counter of the daemon's starts: the upper part of every arrival number
EPOCH_BITS = 40
SLICE = 1_000  # replies sent in one turn of the loop, so that 10^5 waiters of one result do not hold up the rest
OVERSLEPT_MS = 1_000  # a batch longer than this is time in which no beat was heard
EXIT_SOFTWARE = 70  # as in sysexits.h
RETRY_S_MIN = 0.5  # how soon the daemon's own entries are tried again after a failed batch ...
RETRY_S_MAX = 5.0  # ... doubling up to this
QUIET_MS = 60_000  # trouble that comes and goes (a disk with room for some writes) is logged once in this time


class Outbox(Protocol):
    """Where replies and pushes go: the sessions. What is for a session that is away is dropped."""

    def reply(self, session: str, request_id: int, body: bytes) -> None: ...

    def push(self, session: str, body: bytes) -> None: ...


class Engine:
    """See the module. All methods belong to the loop's thread."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.memory = Memory()
        self.trouble: str | None = None
        self.known: list[sessions.Session] = []  # the sessions of the daemon's last life
        self.outbox: Outbox | None = None
        self.overview: Callable[[wire.StatusView, str, int], wire.StatusView] | None = None
        self.keyring = Keyring()
        self.pressure = Pressure()
        self.keys_changed: Callable[[], None] | None = None  # told after the keyring
        self.committed: Callable[[], None] = lambda: None  # told before the replies of a batch leave
        self._executor = Executor(self.memory, clock, store.instance)
        self._cache = Cache()
        self._arrivals = Arrivals(self.pressure)
        self._alone: list[list[Entry]] = []  # batches to run again by themselves
        self._retry_timer: asyncio.TimerHandle | None = None
        self._told_of_trouble = self._made_room = False
        self._quiet_until_ms = clock.steady_ms()
        self._upkeep = Upkeep(store, self._spawn)
        self._looks: list[Callable[[], None]] = []  # for when no batch changes the memory
        self._tick_wanted = False
        self._unknown_beats: dict[str, set[int]] = {}  # tokens by session
        self._in_flight = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._retry_s = RETRY_S_MIN
        self._tickets = self._epoch = 0
        self.batch = 0  # the number of the last one that was committed

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Reads what the last life of the daemon left. Every lease gets its full length again."""
        loop = asyncio.get_running_loop()
        self._lease = self.clock.lease_alarm(loop, self._on_lease)
        self._timers = Timers(loop, self.clock)
        self._wall = self.clock.wall_alarm(loop, self._on_wall)
        self.known = await self.store.write(self._load)
        self._worker = asyncio.create_task(self._work(), name="engine")
        self._worker.add_done_callback(_leave_on_fault)
        self.memory.due(self.clock.wall_ms())
        self._want_tick()

    def _load(self, connection: sqlite3.Connection) -> list[sessions.Session]:
        memory, lease_ms = self.memory, self.clock.lease_ms()
        tx = Tx(connection, memory, self.store.instance)
        known = loading.load(tx, memory, lease_ms)
        connection.execute("BEGIN IMMEDIATE")
        self._epoch = memory.count(EPOCH)
        self.batch = memory.count(BATCH)
        tickets.make_secret(memory)
        counters.write(connection, memory)
        connection.execute("COMMIT")
        memory.counters_changed.clear()
        self.keyring.replace(keys.stored(tx))
        memory.began = Opening(lease_ms, self.clock.wall_ms())
        return known

    async def settle(self) -> None:
        """Waits until everything submitted so far has been committed or refused."""
        if self._in_flight or self._has_work():
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Finishes what was submitted, then stops. What cannot be written is left as it is on disk."""
        self.open_lines()
        if self._worker is not None:
            if self.trouble is None:
                await self.settle()
            self._worker.cancel()
            await asyncio.gather(self._worker, *self._tasks, return_exceptions=True)
            if self._retry_timer is not None:
                self._retry_timer.cancel()
            self._lease.close()
            self._timers.close()
            self._wall.close()

    # ------------------------------------------------------------------ in

    def ask(self, session: str, access: Access, request_id: int, request: wire.Request[Any]) -> None:
        """A request of a session; the answer goes to the outbox."""
        if type(request) is wire.OnceAcquire and not request.again and access.may(request.permission):
            cached = self._cache.get(Settled(access.space, request.run, request.key), self.clock.wall_ms())
            if cached is not None:
                self._send([(session, request_id)], cached)
                return
        if request.reads:
            self.pressure.add(session)
            self._spawn(self._read(session, access, request_id, request))
            return
        self._tickets += 1
        ticket = (self._epoch << EPOCH_BITS) + self._tickets
        if isinstance(request, wire.WaitingRequest) and request.again and request.ticket:
            known = tickets.proof(self.memory.counters[tickets.SECRET], (session, request_id), request, request.ticket)
            if request.proof == known:
                ticket = min(ticket, request.ticket)
        ask = Ask(session, access, request_id, request, ticket, self.clock.lease_ms())
        if self._arrivals.is_gate_closed and isinstance(request, wire.WaitingRequest):
            self._arrivals.hold_back(ask)
        else:
            # What ends a hold may have to wait for its turn, and the hold must not lapse meanwhile.
            if request.gives:
                self.memory.beat(session, getattr(request, "token", 0), ask.arrived)
            self.submit(ask, first=request.gives)

    def submit(self, entry: Entry, *, first: bool = False) -> None:
        """Anything that wants to be part of a batch."""
        self._arrivals.put(entry, first=first)
        self._wake.set()

    def cancel(self, session: str, request_id: int) -> None:
        """The caller of a request has gone."""
        self._arrivals.withdraw((session, request_id))
        self.submit(Cancelled(session, request_id))

    def nest(self, session: str, request: wire.Nested) -> None:
        """A call that may be waiting is made inside of other holds from now on."""
        self._arrivals.nest((session, request.call), request)
        self.submit(Nested(session, request))

    def acknowledge(self, session: str, request_ids: tuple[int, ...]) -> None:
        """Kept replies have arrived."""
        self.submit(Acked(session, request_ids))

    def beat(self, session: str, tokens: Iterable[int], *, is_told: bool = True) -> None:
        """Renews leases, in memory. A session is told of a token that it does not hold, or where not ``is_told`` by
        its next beat."""
        now = self.clock.lease_ms()
        for token in tokens:
            if not self.memory.beat(session, token, now) and is_told:
                # A batch in flight may be taken back, and with it the end of this lease: ask again after it. A batch
                # may take long, and a client make up tokens: more than anybody can hold are not kept.
                unknown = self._unknown_beats.setdefault(session, set())
                if len(unknown) < wire.HELD_MAX:
                    unknown.add(token)
        if self._unknown_beats and not self._in_flight:
            self._tell_unknown_beats()

    def _tell_unknown_beats(self) -> None:
        now = self.clock.lease_ms()
        beats, self._unknown_beats = self._unknown_beats, {}
        for session, tokens in beats.items():
            for token in tokens:
                if not self.memory.beat(session, token, now):
                    self._push(session, wire.LeaseLost(token=token, reason="the lease is gone"))

    # ------------------------------------------------------------------ the gate after a restart

    def hold_back(self) -> None:
        """Keeps requests that may stand in a line until ``open_lines``: the sessions of the daemon's last life get the
        time to come back, each to its old place."""
        self._arrivals.close_gate()

    def open_lines(self) -> None:
        """Lets in what was held back, by arrival numbers."""
        if self._arrivals.is_gate_closed:
            self._arrivals.open_gate()
            self._wake.set()

    # ------------------------------------------------------------------ batches

    def _has_work(self) -> bool:
        return bool(self._arrivals or self._alone or self._tick_wanted)

    async def _work(self) -> None:
        while True:
            if not self._has_work():
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            else:
                await asyncio.sleep(0)  # what came during the last batch is read first, and shares the next commit
            await self._batch(self._take())

    def _take(self) -> list[Entry]:
        if self._alone:
            return self._alone.pop(0)
        ticks: list[Entry] = [Tick()] if self._tick_wanted else []
        self._tick_wanted = False
        return self._arrivals.take(BATCH_REQUESTS_MAX, ticks)

    async def _batch(self, entries: list[Entry]) -> None:
        began = self.clock.steady_ms()
        self._in_flight = True
        if self.trouble is not None:
            self.memory.counters_changed.add(EPOCH)  # a real write, so that success means something
        try:
            done = await self.store.write(lambda connection: self._executor.run(connection, entries))
        except Lost as lost:
            await self._lost(entries, lost)
        except sqlite3.Error as error:  # the file could not be opened again
            await self._lost(entries, Lost(None, error))
        else:
            self._made_room = False
            self._tick_wanted |= self._arrivals.was_run(entries, done)
            self._committed()
            await self._upkeep.after_batch(has_ticked=any(isinstance(entry, Tick) for entry in entries))
        finally:
            self._in_flight = False
            looks, self._looks = self._looks, []
            for look in looks:
                look()
        took = self.clock.steady_ms() - began
        if took > OVERSLEPT_MS:
            self.clock.skip(took)
        if self._unknown_beats:
            self._tell_unknown_beats()
        self._arm()

    def _committed(self) -> None:
        memory = self.memory
        self.batch = memory.counters[BATCH]
        self.committed()
        for settled, deadline_ms, result in memory.settled:
            self._cache.put(settled, deadline_ms, faults.encode(result))
        for run in memory.forgotten_runs:
            self._cache.drop(run)
        for stored in memory.keys:
            self.keyring.replace(stored)
        if memory.keys and self.keys_changed is not None:
            self.keys_changed()
        replies, pushes = list(memory.replies), list(memory.pushes)
        for logged in (memory.settled, memory.forgotten_runs, memory.replies, memory.pushes, memory.keys):
            logged.clear()
        for session, push in pushes:
            self._push(session, push)
        for calls, reply in replies:
            self._send(calls, faults.encode(reply))
        if self.trouble is not None:
            if self._told_of_trouble:
                log.warning("writes work again")
                self._quiet_until_ms = self.clock.steady_ms() + QUIET_MS
            self.trouble = None
            self._retry_s = RETRY_S_MIN
            self.clock.thaw()
            if self._retry_timer is not None and not self._arrivals.has_kept:
                self._retry_timer.cancel()
                self._retry_timer = None

    async def _lost(self, entries: list[Entry], lost: Lost) -> None:
        """Nothing of the batch counts. Who is at fault is refused; the others are run again, or told to retry. When the
        disk is full, all of it is tried once more after room was made."""
        if lost.index is not None and is_full(lost.cause) and not self._made_room:
            self._made_room = True
            await self._upkeep.make_room()
            self._alone.insert(0, entries)
            return
        self._made_room = False
        if self.trouble is None:
            self.clock.freeze()
            self._told_of_trouble = self.clock.steady_ms() >= self._quiet_until_ms
            if self._told_of_trouble:
                log.error("writes fail: %s", lost.cause)
        self.trouble = str(lost.cause)
        if lost.index is not None:
            # One statement ended the transaction: those before it are run again in a batch of their own.
            before, fault, after = entries[: lost.index], entries[lost.index], entries[lost.index + 1 :]
            self._refuse([fault], lost)
            self._alone[:0] = [batch for batch in (before, after) if batch]
        else:
            # The outcome of a COMMIT that failed is unknown: the connection is given up, the callers may ask again, and
            # the memory is compared with the file before anything else.
            await self.store.reopen()
            if is_full(lost.cause):
                await self._upkeep.make_room()
            self._refuse(entries, lost)
            self._arrivals.reread()
            self._cache = Cache()

    def _refuse(self, entries: list[Entry], lost: Lost) -> None:
        error = wire.encode(faults.unavailable(lost.cause, is_known=not lost.in_commit))
        for entry in entries:
            if isinstance(entry, Ask) and replies.refusable(entry.key, entry.request):
                self._send([entry.key], error)
            elif not isinstance(entry, Tick):
                self._arrivals.keep(entry)
        if self._retry_timer is None:
            self._retry_timer = asyncio.get_running_loop().call_later(self._retry_s, self._retry)
            self._retry_s = min(RETRY_S_MAX, self._retry_s * 2)

    def _retry(self) -> None:
        """Tries whether the disk works again, with what was kept and all that has become due."""
        self._retry_timer = None
        self._want_tick()

    # ------------------------------------------------------------------ reads

    async def _read(self, session: str, access: Access, request_id: int, request: wire.Request[Any]) -> None:
        def work(connection: sqlite3.Connection) -> wire.Reply:
            tx = Tx(connection, self.memory, self.store.instance)
            tx.now_ms, tx.lease_ms = self.clock.wall_ms(), self.clock.lease_ms()
            tx.lease_epoch_ms = self.clock.lease_epoch_ms()
            tx.caller = Caller(session, access, request_id)
            answer = dispatch.answer(tx, request)
            assert isinstance(answer, wire.Reply), "a verb that only reads answers at once"
            return answer

        reply: wire.Reply
        try:
            reply = await self.store.read(work)
            if isinstance(reply, wire.StatusView) and isinstance(request, wire.StatusGet) and self.overview is not None:
                reply = await self._look(partial(self.overview, reply, access.space, request.limit))
        except Exception as fault:
            reply = faults.reply(fault, doing="read")
        self.pressure.take(session)
        self._send([(session, request_id)], faults.encode(reply))

    def when_quiet(self, look: Callable[[], None]) -> None:
        """Calls ``look``, which must not raise, when no batch is changing the memory beside it."""
        if self._in_flight:
            self._looks.append(look)
        else:
            look()

    async def _look(self, look: Callable[[], T]) -> T:
        """The same for one that gives something."""
        if not self._in_flight:
            return look()
        seen: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def between() -> None:
            if not seen.done():
                try:
                    seen.set_result(look())
                except Exception as error:
                    seen.set_exception(error)

        self._looks.append(between)
        return await seen

    # ------------------------------------------------------------------ out

    def _send(self, calls: list[CallKey], body: bytes) -> None:
        if self.outbox is None:
            return
        for session, request_id in calls[:SLICE]:
            self.outbox.reply(session, request_id, body)
        if len(calls) > SLICE:
            asyncio.get_running_loop().call_soon(self._send, calls[SLICE:], body)

    def _push(self, session: str, push: wire.Push) -> None:
        if self.outbox is not None:
            self.outbox.push(session, faults.encode(push))

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        self._lease.arm(self.memory.next_steady())
        self._wall.arm(self.memory.due_ms)

    def after(self, ms: int, work: Callable[[], object]) -> Timer:
        """Calls ``work``, which must not raise, when so much lease time has passed: what a client has to do in time."""
        return self._timers.after(ms, work)

    def _on_lease(self) -> None:
        # All that has arrived is read before leases lapse: two turns of the loop, each of which polls the sockets.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._want_tick)

    def _on_wall(self) -> None:
        self._want_tick()

    def _want_tick(self) -> None:
        if self.trouble is not None and self._retry_timer is not None:
            return  # the retry brings it
        self._tick_wanted = True
        self._wake.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # a task that nobody refers to may be collected while it runs
        task.add_done_callback(self._tasks.discard)


def _leave_on_fault(worker: asyncio.Task[None]) -> None:
    """A daemon whose engine has ended would answer nobody and look alive. All that was acknowledged is on disk, and its
    clients start another one."""
    if not worker.cancelled() and worker.exception() is not None:
        log.critical("the engine has failed; leaving", exc_info=worker.exception())
        os._exit(EXIT_SOFTWARE)

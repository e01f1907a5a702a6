"""The engine: what has come is decided on live objects, committed, and only then answered. All in the loop's thread.

    submit ──> what is waiting ──> a turn (turns.py) ──> the store's commit ──> replies, pushes
       └─ a settled `once` result is answered from memory

What goes into a turn, and in which order, is said in arrivals.py. Nothing is acknowledged before it is on disk. While
the disk refuses, the engine stands still: see trouble.py.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from runstate import presence, wire
from runstated.domain import keys, replies
from runstated.domain.access import Access
from runstated.domain.answers import Missing
from runstated.domain.holds import Lease
from runstated.domain.numbers import Numbers
from runstated.domain.sessions import SESSIONS, Session
from runstated.domain.waits import CallKey, Opening, Settled
from runstated.engine import faults, outbox, tickets
from runstated.engine.arrivals import Arrivals
from runstated.engine.cache import Cache
from runstated.engine.entries import Acked, Ask, Cancelled, Entry, Nested, Tick
from runstated.engine.faultlog import FaultLog
from runstated.engine.keyring import Keyring
from runstated.engine.outbox import Nobody, Outbox
from runstated.engine.pressure import Pressure
from runstated.engine.retention import Retention
from runstated.engine.serving import Asked
from runstated.engine.spaces import Spaces
from runstated.engine.trouble import ANSWERED, Trouble, last_try
from runstated.engine.turns import Said, Turns
from runstated.host.clock import Clock, Timer, Timers
from runstated.settings import BATCH_REQUESTS_MAX
from runstated.store import old
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed
from runstated.store.errors import is_full, is_trouble
from runstated.store.sqlite import Store
from runstated.store.upkeep import Upkeep

log = logging.getLogger(__name__)

EPOCH = "epoch"  # counter of the daemon's starts: the upper part of every arrival number
EPOCH_BITS = 40
SYNC_AFTER_S = 1.0  # what is written is on disk after this at the latest
OVERSLEPT_MS = 1_000  # a commit longer than this is time in which no beat was heard
Overview = Callable[[wire.StatusView, str, int], wire.StatusView]


class Engine:
    """See the module."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.known: list[Session] = []  # the sessions of the daemon's last life
        self.outbox: Outbox = Nobody()
        self.keyring = Keyring()
        self.pressure = Pressure()
        self.keys_changed: Callable[[], None] = lambda: None  # told after the keyring
        self.committed: Callable[[], None] = lambda: None  # told before the replies of a turn leave
        self.spaces = Spaces(Numbers(store.instance), Opening(clock.lease_ms(), clock.wall_ms()))
        self._turns = Turns(self.spaces, clock, self._fetch)
        self._retention = Retention(self.spaces, store.look)
        self._trouble = Trouble(clock)
        self._faults = FaultLog(store.path.parent, clock.wall_ms())
        self._turns.skip(self._faults.doings)
        self._cache = Cache()
        self._arrivals = Arrivals(self.pressure)
        self._upkeep = Upkeep(store, self._spawn)
        self._tick_wanted = False
        self._is_scheduled = False
        self._is_busy = False  # a commit is under way on another thread
        self._retry_timer: asyncio.TimerHandle | None = None
        self._has_unsynced = False  # something was written that may not be on disk
        self._sync_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tickets = self._epoch = 0
        self.unrecorded = 0  # outcomes that could not be written before the end

    @property
    def trouble(self) -> str | None:
        """Why the disk refuses; None while it does not."""
        return self._trouble.why

    @property
    def keeps_for(self) -> dict[str, int]:
        """Callers whose replies go early, after how many milliseconds."""
        return self._retention.keeps_for

    @property
    def told_trouble(self) -> str | None:
        """The same for people, who are also told what of the daemon's own is skipped after a fault."""
        return self.trouble or self._faults.told

    @property
    def batch(self) -> int:
        """The number of the last commit."""
        return self.store.batch

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Reads what the last life of the daemon left. Every lease gets its full length again."""
        self._loop = loop = asyncio.get_running_loop()
        self._lease = self.clock.lease_alarm(loop, self._on_lease)
        self._timers = Timers(loop, self.clock)
        self._wall = self.clock.wall_alarm(loop, self._want_tick)
        self.spaces.load(self.store.database)
        numbers = self.spaces.numbers
        numbers.make_secrets()
        was_cut = numbers.begin(presence.boot_id())
        self._epoch = numbers.next(EPOCH)
        if was_cut:
            log.warning("the machine has stopped without the daemon: numbers that it may have given are left out")
            for core in self.spaces:
                core.wary_age = self._epoch << EPOCH_BITS
        self.store.commit(self.spaces.take_batch())
        self.keyring.replace(keys.stored(self.spaces.of(keys.SPACE)))
        self._turns.tidy(self._retention)
        self._spawn(self._count_events())
        self.known = [session for core in self.spaces for session in core.live(SESSIONS).values()]
        self._want_tick()

    def overview(self, complete: Overview) -> None:
        """Who completes a status with what is not in the spaces."""
        self._turns.overview = complete

    async def settle(self) -> None:
        """Waits until everything submitted so far has been committed or refused."""
        while self._is_busy or self._has_work():
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Finishes what was submitted, then stops. What cannot be written is left as it is on disk."""
        self.open_lines()
        if self.trouble is None:
            await self.settle()
        self._is_busy = True  # nothing is done any more
        if self.trouble is not None:
            self.unrecorded = await last_try(self._trouble, self._turns, self.store)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for timer in (self._retry_timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        if self.trouble is None:
            self.spaces.numbers.end()
            self.store.commit(self.spaces.take_batch())
        self._lease.close()
        self._timers.close()
        self._wall.close()

    # ------------------------------------------------------------------ in

    def ask(self, session: str, access: Access, request_id: int, request: wire.Request[Any]) -> None:
        """A request of a session; the answer goes to the outbox."""
        if type(request) is wire.OnceAcquire and not request.again and self.trouble is None:
            cached = self._cache.get(Settled(access.space, request.run, request.key), self.clock.wall_ms())
            if cached is not None and access.may(request.permission):
                self._send([(session, request_id)], cached)
                return
        self._tickets += 1
        ticket = (self._epoch << EPOCH_BITS) + self._tickets
        if isinstance(request, wire.WaitingRequest) and request.again and request.ticket:
            known = tickets.proof(self.spaces.numbers, (session, request_id), request, request.ticket)
            if request.proof == known:
                ticket = min(ticket, request.ticket)
        ask = Ask(session, access, request_id, request, ticket, self.clock.lease_ms())
        if self._arrivals.is_gate_closed and isinstance(request, wire.WaitingRequest):
            self._arrivals.hold_back(ask)
            return
        # What ends a hold may have to wait for its turn, and the hold must not lapse meanwhile.
        if request.gives:
            self.spaces.of(access.space).holds.beat(session, getattr(request, "token", 0), ask.arrived)
        self.submit(ask, first=request.gives)

    def submit(self, entry: Entry, *, first: bool = False) -> None:
        """Anything that wants to be part of a turn."""
        self._arrivals.put(entry, first=first)
        self._schedule()

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
        core = self.spaces.of_session(session)
        now_ms = self.clock.lease_ms()
        for token in tokens:
            if (core is None or not core.holds.beat(session, token, now_ms)) and is_told:
                self._push(session, wire.LeaseLost(token=token, reason="the lease is gone"))

    def holds_anything(self, session: str) -> bool:
        """Whether a session holds a lease."""
        core = self.spaces.of_session(session)
        return core is not None and core.holds.number_of_session(session) > 0

    def lease(self, space: str, token: int) -> Lease | None:
        """A live lease."""
        return self.spaces.of(space).holds.of_token.get(token)

    # ------------------------------------------------------------------ the gate after a restart

    def hold_back(self) -> None:
        """Keeps requests that may stand in a line until ``open_lines``: the sessions of the daemon's last life get the
        time to come back, each to its old place."""
        self._arrivals.close_gate()

    def open_lines(self) -> None:
        """Lets in what was held back, by arrival numbers."""
        if self._arrivals.is_gate_closed:
            self._arrivals.open_gate()
            self._schedule()

    # ------------------------------------------------------------------ turns

    def _has_work(self) -> bool:
        return bool(self._arrivals or self._tick_wanted)

    def _schedule(self) -> None:
        """A turn is due when all that can be read now has been read."""
        if not self._is_scheduled and not self._is_busy:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._is_busy:
            return
        if self._trouble.may_try():  # somebody asks: the disk may work again
            self._retry_at_once()
            return
        entries = self._take()
        try:
            done = self._turns.run(entries)
        except faults.Fault as fault:
            self._faults.record(fault, self.clock.wall_ms())
            faults.leave(fault)
        self._tick_wanted |= self._arrivals.was_run(entries, done)
        if self.trouble is not None:
            self._say_in_trouble()
            self._go_on()
        else:
            self._commit(self._turns.take_batch(), has_ticked=any(isinstance(entry, Tick) for entry in entries))

    def _take(self) -> list[Entry]:
        if self.trouble is not None:
            return [entry for entry in self._arrivals.take(BATCH_REQUESTS_MAX, ()) if self._is_taken(entry)]
        ticks: list[Entry] = [Tick()] if self._tick_wanted else []
        self._tick_wanted = False
        return self._arrivals.take(BATCH_REQUESTS_MAX, ticks)

    def _go_on(self) -> None:
        """After a turn: what is next."""
        self._arm()
        if self._has_work() and (self._arrivals or self.trouble is None):
            self._schedule()
        else:
            self._idle.set()

    # ------------------------------------------------------------------ commits

    def _commit(self, batch: Batch, *, has_ticked: bool) -> None:
        is_durable = self._turns.must_sync() or (has_ticked and self._has_unsynced)
        if not batch and not (is_durable and self._has_unsynced):
            self._say(self._turns.durable() if not self._has_unsynced else self._turns.written())
            self._go_on()
            return
        if not is_durable:
            self._commit_relaxed(batch)
            return
        if self.store.is_slow():
            self._is_busy = True
            self._spawn(self._commit_aside(batch, has_ticked))
            return
        began_ms = self.clock.steady_ms()
        try:
            self.store.commit(batch)
        except CommitFailed as failed:
            self._failed(batch, failed)
        else:
            self._succeeded(has_ticked, began_ms)
        self._go_on()

    def _commit_relaxed(self, batch: Batch) -> None:
        """Writes a turn whose replies do not wait for the disk; that follows within a second."""
        try:
            self.store.commit(batch, durable=False)
        except CommitFailed as failed:
            self._failed(batch, failed)
        else:
            self._has_unsynced = True
            if self._sync_timer is None:
                self._sync_timer = self._loop.call_later(SYNC_AFTER_S, self._sync)
            self.committed()
            self._say(self._turns.written())
        self._go_on()

    def _sync(self) -> None:
        """Nothing since a relaxed turn has waited for the disk: a commit of its own does."""
        self._sync_timer = None
        if self._has_unsynced and self.trouble is None and not self._is_busy:
            self._commit(self._turns.take_batch(), has_ticked=True)

    async def _commit_aside(self, batch: Batch, has_ticked: bool) -> None:
        began_ms = self.clock.steady_ms()
        try:
            await self.store.commit_aside(batch)
        except CommitFailed as failed:
            self._is_busy = False
            self._failed(batch, failed)
        else:
            self._is_busy = False
            self._succeeded(has_ticked, began_ms)
        self._go_on()

    def _succeeded(self, has_ticked: bool, began_ms: int) -> None:
        took_ms = self.clock.steady_ms() - began_ms
        if took_ms > OVERSLEPT_MS:
            self.clock.skip(took_ms)
        self._is_synced_now()
        self.committed()
        self._say(self._turns.durable())
        self._upkeep.after_commit(has_ticked=has_ticked)

    def _is_synced_now(self) -> None:
        self._has_unsynced = False
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None

    def _failed(self, batch: Batch, failed: CommitFailed) -> None:
        """What the turn has to say is held until all that is owed is written."""
        if not is_trouble(failed.cause):
            faults.leave(failed)
        self._trouble.owe(batch)
        self._trouble.begin(failed.cause)
        self._turns.pause()
        self._say_in_trouble()
        if failed.took_place is None or not is_full(failed.cause):
            self._retry_later(self._trouble.next_retry_s())
        else:
            self._retry_later(0)  # after room was made

    def _retry_later(self, after_s: float) -> None:
        self._trouble.tried()
        if self._retry_timer is None:
            self._retry_timer = self._loop.call_later(after_s, self._retry_at_once)

    def _retry_at_once(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if not self._is_busy:
            self._is_busy = True
            self._spawn(self._retry())

    async def _retry(self) -> None:
        """Tries whether the disk works again, with all that is owed."""
        try:
            await self._upkeep.make_room()
            self._trouble.owe(self._turns.take_batch())
            await self.store.commit_again(self._trouble.owed())
        except (CommitFailed, sqlite3.Error) as failed:
            cause = failed.cause if isinstance(failed, CommitFailed) else failed
            if not is_trouble(cause):
                faults.leave(failed)
            self._trouble.begin(cause)
            self._is_busy = False
            self._retry_later(self._trouble.next_retry_s())
        else:
            self._is_busy = False
            self._trouble.end()
            self._is_synced_now()
            self.committed()
            self._say(self._turns.durable())
            self._turns.resume()
            self._tick_wanted = True
        self._go_on()

    # ------------------------------------------------------------------ in trouble

    def _is_taken(self, entry: Entry) -> bool:
        """Whether it is for memory, and owed; all else is refused."""
        if not isinstance(entry, Ask):
            return True
        if entry.key in self._turns.held():
            return False  # its answer is there, and leaves with the others
        if entry.request.gives or isinstance(entry.request, wire.StatusGet):
            return True
        if replies.refusable(entry.key, entry.request) is not None:
            self._send([entry.key], wire.encode(faults.unavailable(self.trouble)))
        return False

    def _say_in_trouble(self) -> None:
        for calls, reply in self._turns.take_replies(ANSWERED):
            self._send(calls, faults.encode(reply))

    # ------------------------------------------------------------------ reads

    def _fetch(self, missing: Missing) -> Any:
        row = self.store.read(missing.table, missing.columns, missing.value)
        return None if row is None else missing.table.made(row)

    async def _count_events(self) -> None:
        """It takes a while when there are many."""
        try:
            self._retention.counted(*await self.store.run_read(old.count_events))
        except sqlite3.Error as error:
            log.warning("the events cannot be counted: none goes before the next start: %s", error)

    async def _list(self, asked: Asked) -> None:
        """Answers with many rows, which are read on the reader's thread."""
        reply: wire.Reply
        try:
            reply = asked.listing.then(await self.store.list(asked.listing))
        except Exception as fault:
            reply = faults.reply(fault, doing="read")
        self._send([asked.key], faults.encode(reply))

    # ------------------------------------------------------------------ out

    def _say(self, said: Said) -> None:
        """All that a turn has to say, now that it is durable."""
        for settled, deadline_ms, result in said.settled:
            self._cache.put(settled, deadline_ms, faults.encode(result))
        for run in said.forgotten_runs:
            self._cache.drop(run)
        if said.keys is not None:
            self.keyring.replace(said.keys)
            self.keys_changed()
        for session, push in said.pushes:
            self._push(session, push)
        for calls, reply in said.replies:
            self._send(calls, faults.encode(reply))
        for asked in said.listings:
            self._spawn(self._list(asked))
        if said.has_more:
            self._tick_wanted = True

    def _send(self, calls: list[CallKey], body: bytes) -> None:
        outbox.send(self._loop, self.outbox, calls, body)

    def _push(self, session: str, push: wire.Push) -> None:
        self.outbox.push(session, faults.encode(push))

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        lease = [at for core in self.spaces if (at := core.next_lease()) is not None]
        wall = [core.due_ms for core in self.spaces if core.due_ms is not None]
        self._lease.arm(min(lease, default=None))
        self._wall.arm(min(wall, default=None))

    def after(self, ms: int, work: Callable[[], object]) -> Timer:
        """Calls ``work``, which must not raise, when so much lease time has passed: what a client has to do in time."""
        return self._timers.after(ms, work)

    def _on_lease(self) -> None:
        # All that has arrived is read before leases lapse: two turns of the loop, each of which polls the sockets.
        self._loop.call_soon(self._loop.call_soon, self._want_tick)

    def _want_tick(self) -> None:
        self._tick_wanted = True
        if self.trouble is None:
            self._schedule()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # a task that nobody refers to may be collected while it runs
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            faults.leave(task.exception())

"""A turn: what was waiting, decided at once on live objects. Synchronous; knows no loop and no file.

    for each entry: the verb; then the lines that it woke: their heads are run again (serving.py)
    take_batch ──> the store's commit ──> durable(): what the turn has to say may leave, and what has ended is evicted

A verb that refuses has changed nothing. One that fails after it has changed something is a fault of ours: the turn is
not committed, and the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns

import msgspec

from runstate import wire
from runstated.domain import ahead, keys, limits, needs, nouns, replies, sessions
from runstated.domain.access import Access, StoredKey
from runstated.domain.answers import NOBODY, Caller, Parked
from runstated.domain.core import Core
from runstated.domain.numbers import UNSYNCED_MAX
from runstated.domain.waits import CallKey, Settled
from runstated.engine import evicting, repeats
from runstated.engine.entries import Acked, Ask, Away, Cancelled, Ended, Entry, Nested, Opened
from runstated.engine.retention import Retention
from runstated.engine.serving import HOLD_UP_NOBODY, Asked, Fetch, Server
from runstated.engine.spaces import Spaces
from runstated.host.clock import Clock
from runstated.store.batch import Batch

TURN_MS = 5  # of verbs


@dataclass(slots=True)
class Said:
    """What leaves when a turn is durable, in this order."""

    settled: list[tuple[Settled, int | None, wire.OnceDone]] = field(default_factory=list)
    forgotten_runs: list[str] = field(default_factory=list)
    pushes: list[tuple[str, wire.Push]] = field(default_factory=list)
    replies: list[tuple[list[CallKey], wire.Reply]] = field(default_factory=list)
    listings: list[Asked] = field(default_factory=list)
    keys: tuple[StoredKey, ...] | None = None  # all of them, where they may have changed
    has_more: bool = False  # there is more to do at once


class Turns:
    """Runs turns on the spaces of one daemon. ``fetch``: what is missing, from the disk."""

    def __init__(self, spaces: Spaces, clock: Clock, fetch: Fetch) -> None:
        self.spaces = spaces
        self.clock = clock
        self._server = Server(fetch, lambda key: keys.is_live(spaces.of(keys.SPACE), key))
        self._woke_ms = clock.woke_ms()
        self._is_paused = self._were_keys_changed = False
        self._held: set[CallKey] = set()
        self.retention: Retention | None = None
        self.overview: Callable[[wire.StatusView, str, int], wire.StatusView] | None = None

    def run(self, entries: Sequence[Entry]) -> int:
        """Runs the first so many entries; how many. Raises Fault."""
        ends = perf_counter_ns() + TURN_MS * 1_000_000
        for done, entry in enumerate(entries, 1):
            self._entry(entry)
            if perf_counter_ns() > ends:
                return done
        return len(entries)

    def skip(self, failed: Mapping[str, str]) -> None:
        """What has failed in an earlier life is not run."""
        self._server.failed = failed

    def take_batch(self) -> Batch:
        """What is to be written before anything is said."""
        batch = self.spaces.take_batch()
        if batch and self.retention is not None:
            self.retention.changed(self.clock.wall_ms())
            self._arm_retention()
        return batch

    def must_sync(self) -> bool:
        """Whether something that this turn has to say waits for the disk. All does but what wire.py calls relaxed, to
        processes of this machine that the kernel tells us of: a power cut ends these as well."""
        if self._server.listings or self.spaces.numbers.unsynced > UNSYNCED_MAX:
            return True
        return any(self._must_sync(core) for core in self.spaces)

    def _must_sync(self, core: Core) -> bool:
        lines = core.lines
        if core.must_sync or core.settled or core.forgotten_runs:
            return True
        process_of = core.process_of
        return any(not push.relaxed or not process_of.get(session) for session, push in lines.pushes) or any(
            not reply.relaxed or not all(process_of.get(session) for session, _ in calls)
            for calls, reply in lines.replies
        )

    def written(self) -> Said:
        """All that was noted is written, if not on disk: what there is to say."""
        said = Said()
        for core in self.spaces:
            _take(core, said)
        return said

    def durable(self) -> Said:
        """All that was noted is on disk: what there is to say, and what has ended leaves memory."""
        said = Said()
        self.spaces.numbers.unsynced = 0
        for core in self.spaces:
            _take(core, said)
            core.must_sync = False
            evicting.evict(core)
        said.listings, self._server.listings = self._server.listings, []
        of_keys = self.spaces.cores.get(keys.SPACE)
        if of_keys is not None and of_keys.live(keys.KEYS) and self._were_keys_changed:
            said.keys = keys.stored(of_keys)
        self._were_keys_changed = False
        said.has_more = any(core.clearing for core in self.spaces)
        return said

    # ------------------------------------------------------------------ while the disk refuses

    def pause(self) -> None:
        """Nothing is served until ``resume``; what wakes a line meanwhile is remembered."""
        self._is_paused = True

    def resume(self) -> None:
        """Serves what was woken meanwhile."""
        self._is_paused = self._were_keys_changed = False
        self._held.clear()
        for core in self.spaces:
            self._set_time(core)
            self._finish(core)

    def held(self) -> set[CallKey]:
        """The calls whose replies are held."""
        replies = [calls for core in self.spaces for calls, _ in core.lines.replies]
        if len(self._held) != sum(map(len, replies)):
            self._held = {call for calls in replies for call in calls}
        return self._held

    def take_replies(self, kinds: tuple[type[wire.Reply], ...]) -> list[tuple[list[CallKey], wire.Reply]]:
        """The replies of these kinds, which do not wait for the disk."""
        taken = []
        for core in self.spaces:
            log = core.lines.replies
            taken += [each for each in log if isinstance(each[1], kinds)]
            log[:] = [each for each in log if not isinstance(each[1], kinds)]
        return taken

    def drop_held(self, core: Core, key: CallKey) -> None:
        """Its caller has gone: it gets no answer, and what it has done stays."""
        for calls, _ in core.lines.replies:
            if key in calls:
                calls.remove(key)

    # ------------------------------------------------------------------ entries

    def _entry(self, entry: Entry) -> None:
        if isinstance(entry, Ask):
            is_of_keys = isinstance(entry.request, keys.REQUESTS)
            core = self._begin(keys.SPACE if is_of_keys else entry.access.space)
            self._were_keys_changed |= is_of_keys
            self._server.guarded(core, replies.refusable(entry.key, entry.request), lambda: self._ask(core, entry))
        elif isinstance(entry, Opened):
            core = self._begin(entry.row.space)
            key = (entry.row.session, entry.request_id)
            step = f"hello of {entry.row.session}"
            self._server.guarded(core, key, lambda: self._opened(core, entry), step=step)
        elif isinstance(entry, Ended | Away | Cancelled | Nested | Acked):
            space = self.spaces.space_of.get(entry.session)
            if space is None:
                return  # it has ended before
            core = self._begin(space)
            step = f"{type(entry).__name__.lower()} of {entry.session}"
            self._server.guarded(core, None, lambda: self._own(core, entry), step=step)
        else:
            self._tick()
            return
        self._finish(core)

    def _begin(self, space: str) -> Core:
        core = self.spaces.of(space)
        self._set_time(core)
        if not self._is_paused:
            core.woken.clear()
            core.lines.left.clear()
            core.lines.overtaken.clear()
            core.lines.suspects.clear()
        return core

    def _set_time(self, core: Core) -> None:
        clock = self.clock
        core.now_ms, core.lease_ms, core.lease_epoch_ms = clock.wall_ms(), clock.lease_ms(), clock.lease_epoch_ms()
        core.caller = NOBODY

    def _finish(self, core: Core) -> None:
        if not self._is_paused:
            self._server.serve(core)
        core.caller = NOBODY
        for run in core.ended:
            for hook in nouns.ENDED:
                hook(core, run)
        core.clearing.extend(core.ended)
        core.ended.clear()
        for number in core.unnamed:
            needs.forget(core, number)
        core.unnamed.clear()

    # ------------------------------------------------------------------ requests

    def _ask(self, core: Core, ask: Ask) -> None:
        request = ask.request
        if ask.session not in self.spaces.space_of and not request.gives:
            # Its session ended while this stood in a queue, and nothing must be given to the dead.
            ended = wire.Error(code="UNAVAILABLE", message="the session has ended", retryable=True)
            core.lines.replies.append(([ask.key], ended))
            return
        core.caller = Caller(ask.session, ask.access, ask.request_id, 1, ask.ticket, request)
        if request.again:
            if ask.key in core.lines.calls:
                self._server.nest(core, ask.key, request)  # it still waits
                return
            known = self._server.fetching(core, lambda: repeats.answer(core, ask.key, request))
            if known is not None:
                core.lines.replies.append(([ask.key], known))
                return
        else:
            self._server.fetching(core, lambda: repeats.check_new(core, ask.key, request))
        rank = 1
        if isinstance(request, wire.WaitingRequest) and (request.within or request.inherited):
            inside = self._server.inside(core, ask.session, request)
            request = msgspec.structs.replace(request, **inside)
            rank = 0 if any(inside.values()) else 1
            core.caller = Caller(ask.session, ask.access, ask.request_id, rank, ask.ticket, request)
        answer = self._server.answer_of(core, request)
        if isinstance(answer, Parked):
            until = None if request.wait_ms is None else ask.arrived + request.wait_ms  # type: ignore[attr-defined]
            self._server.park_new(core, ask.access, request, answer, until)
        else:
            if isinstance(answer, wire.StatusView) and isinstance(request, wire.StatusGet) and self.overview:
                answer = self.overview(answer, core.space, request.limit)
            self._server.answer(core, ask.key, request, answer)

    # ------------------------------------------------------------------ what the daemon does by itself

    def _own(self, core: Core, entry: Ended | Away | Cancelled | Nested | Acked) -> None:
        lines = core.lines
        if isinstance(entry, Ended):
            lines.close(entry.session)
            sessions.end(core, entry.session, entry.how)
            del self.spaces.space_of[entry.session]
        elif isinstance(entry, Away):
            lines.set_away(entry.session, entry.away)
            # Those behind a call that is passed over from now on may be content with less than it wants. And a call
            # that is not passed over any more has missed what has woken its lines meanwhile.
            calls = lines.of_session(entry.session)
            for line in [line for call in calls for line in call.lines if line[0] not in HOLD_UP_NOBODY]:
                core.wake(line)
            if not entry.away:
                lines.overtaken.update((call.key, None) for call in calls)
                ahead.came_back(core, entry.session)
        elif isinstance(entry, Cancelled):
            if self._is_paused:
                self.drop_held(core, (entry.session, entry.request_id))
            if lines.leave((entry.session, entry.request_id)) is None:
                sessions.give_back(core, entry.session, entry.request_id)
        elif isinstance(entry, Nested):
            self._server.nest(core, (entry.session, entry.request.call), entry.request)
        else:
            for request_id in entry.request_ids:
                replies.forget(core, entry.session, request_id)

    def _opened(self, core: Core, entry: Opened) -> None:
        row = entry.row
        core.caller = Caller(row.session, Access(space=row.space))
        ended = self._server.fetching(core, lambda: sessions.rejoin(core, entry.runs))
        sessions.open_session(core, row)
        core.lines.open(row.session)
        self.spaces.space_of[row.session] = row.space
        welcome = msgspec.structs.replace(entry.welcome, ended=ended)
        core.lines.replies.append(([(row.session, entry.request_id)], welcome))

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        """Each thing that is due is guarded by itself: a fault of ours in one must not hold up the others."""
        woke_ms = self.clock.woke_ms()
        has_slept, self._woke_ms = woke_ms != self._woke_ms, woke_ms
        for core in self.spaces:
            if has_slept:
                core.holds.spare(woke_ms)
            self._begin(core.space)
            for lease in core.holds.lapsed(core.lease_ms):
                self._server.guarded(core, None, partial(sessions.lapse, core, lease), step=f"lapse of {lease.token}")
            for call in core.lines.late(core.lease_ms):
                self._server.guarded(core, call.key, partial(self._server.late, core, call))
            limits.look_at_clock(core)
            if core.take_due():
                for tick in nouns.TICKS:
                    self._server.guarded(core, None, partial(_tick_noun, core, tick), step=f"tick of {tick.__module__}")
            self._finish(core)
        if self.retention is not None:
            retention, core = self.retention, self._begin(keys.SPACE)
            self._server.guarded(core, None, lambda: retention.tick(core.now_ms), step="retention")
            self._arm_retention()

    def tidy(self, retention: Retention) -> None:
        """From now on what is old goes."""
        self.retention = retention
        retention.begin(self.clock.wall_ms())
        self._arm_retention()

    def _arm_retention(self) -> None:
        if self.retention is not None and self.retention.due_ms is not None:
            self.spaces.of(keys.SPACE).due(self.retention.due_ms)


def _take(core: Core, said: Said) -> None:
    """What a space has to say."""
    lines = core.lines
    for log, taken in (
        (core.settled, said.settled),
        (core.forgotten_runs, said.forgotten_runs),
        (lines.pushes, said.pushes),
        (lines.replies, said.replies),
    ):
        if log:
            taken.extend(log)  # type: ignore[arg-type]
            log.clear()


def _tick_noun(core: Core, tick: Callable[[Core], int | None]) -> None:
    due = tick(core)
    if due is not None:
        core.due(due)

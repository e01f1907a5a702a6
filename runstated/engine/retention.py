"""Retention: what is over goes from disk in small steps, so that the end of a run of 100,000 jobs holds up nobody.

    a turn wrote something ──some minutes later──> a look at what is old: the keys of a few rows are read ...
                       ... their removal is noted, and written with the turn; then the next look, while there is more

A run's keys and jobs read through its state from the moment it ends; their rows may go at any later time. The run's own
row stays a while longer, so that late questions ("what became of my job?") get a true answer. What is in memory stays
on disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from runstated.domain import nouns
from runstated.domain.core import EVENTS_TABLE, Core
from runstated.domain.keys import SPACE
from runstated.domain.money import LEDGER, RESERVATIONS
from runstated.domain.replies import KEPT_MS as REPLY_KEPT_MS
from runstated.domain.replies import LOOK_EACH, REPLIES, Replies
from runstated.domain.runs import RUNS, Run
from runstated.domain.tables import Table
from runstated.engine.spaces import Spaces
from runstated.store import old

ROWS_IN_ONE_STEP = 100  # of each kind; some milliseconds ...
RUNS_IN_ONE_STEP = 50  # ... of at most so many runs
EVENTS_IN_ONE_STEP = 500
PAUSE_MS = 10  # between two steps: others have the time in between
LOOK_EACH_MS = 10 * 60_000  # after a change; no longer than any of these times:
KEPT_MS = 10 * 60_000  # late questions about its jobs are answered until then
RUN_KEPT_MS = 7 * 24 * 3_600_000  # `status` on a run that has ended
MONEY_KEPT_MS = 7 * 24 * 3_600_000  # reservations that have ended, and the ledger, for whoever settles once more
EVENTS_KEPT = 200_000  # newest events of all runs together; about 60 MB
EVENTS_KEPT_MS = 30 * 24 * 3_600_000
REPLIES_KEPT = 100_000  # that are kept for a day, of one caller; the oldest go first ...
REPLIES_KEPT_BYTES = 32 * 1024 * 1024  # ... also when these bytes are more
OF_RUNS = tuple(table for table in nouns.TABLES if table.run is not None)


@dataclass(slots=True)
class Step:
    """What a look has found. ``gone``: keys of rows, with their tables and spaces. ``tidied``: the runs of which
    nothing else is left. ``events``: the numbers of those that go; ``oldest_event``: of the first that stays. ``due``:
    when something else will be old."""

    gone: list[tuple[Table[Any], str, Hashable]] = field(default_factory=list)
    tidied: list[Run] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    oldest_event: int | None = None
    due: list[int] = field(default_factory=list)
    has_more: bool = False

    def take(self, table: Table[Any], space: str, keys: list[Any]) -> None:
        self.gone += [(table, space, key) for key in keys]
        self.has_more |= bool(keys)


Reading = Callable[[Callable[[sqlite3.Connection], Step]], Step]


class Retention:
    """See the module. ``reading``: runs a function on a connection that sees what is written. ``due_ms``: when to look
    again, wall time; None: nothing is old, nor will be. ``keeps_for``: callers whose replies go early, after how many
    milliseconds."""

    def __init__(self, spaces: Spaces, reading: Reading) -> None:
        self.due_ms: int | None = None
        self.keeps_for: dict[str, int] = {}
        self._spaces = spaces
        self._reading = reading
        self._began_with = 0  # the number of the last event, then
        self._events: int | None = None  # how many there are up to ...
        self._counted_to = 0  # ... this number; none is left out in one life of the daemon

    def begin(self, now_ms: int) -> None:
        """All is loaded."""
        self._began_with = self._last_event()
        self._look_at(now_ms)

    def counted(self, events: int, newest: int) -> None:
        """How many events were on disk at some moment of this life. Before that is known none goes by its number:
        numbers are left out at some starts."""
        self._events, self._counted_to = events, max(newest, self._began_with)

    def changed(self, now_ms: int) -> None:
        """Something was written."""
        is_much = self._surplus_events() > 0 or any(self._replies())
        self._look_at(now_ms if is_much else now_ms + LOOK_EACH_MS)

    def tick(self, now_ms: int) -> None:
        """Looks, if it is time to, and notes what goes. Raises sqlite3.Error, before it has noted anything."""
        if self.due_ms is None or self.due_ms > now_ms:
            return
        self.due_ms = now_ms + LOOK_EACH_MS  # if it fails
        step = self._reading(lambda connection: self._look(connection, now_ms))
        self._note(step)
        self.due_ms = now_ms + PAUSE_MS if step.has_more else min(step.due, default=None)

    def _look_at(self, at_ms: int) -> None:
        self.due_ms = at_ms if self.due_ms is None else min(self.due_ms, at_ms)

    # ------------------------------------------------------------------ what is old

    def _look(self, connection: sqlite3.Connection, now_ms: int) -> Step:
        step = Step()
        _look_at_runs(step, connection, now_ms)
        self._look_at_money(step, connection, now_ms)
        self._look_at_events(step, connection, now_ms)
        _look_at_replies(step, connection, now_ms)
        for replies in self._replies():
            self._look_at_callers(step, connection, replies, now_ms)
        return step

    def _look_at_money(self, step: Step, connection: sqlite3.Connection, now_ms: int) -> None:
        """A reservation stays with all its rows: a work key is known for as long as it. The sums are the budget's."""
        many = ROWS_IN_ONE_STEP
        for reservation, space, ended_ms in old.reservations(connection, ROWS_IN_ONE_STEP):
            if now_ms < ended_ms + MONEY_KEPT_MS:
                step.due.append(ended_ms + MONEY_KEPT_MS)
                return
            if reservation in self._core(space).live(RESERVATIONS):
                continue  # it is charged in this very turn
            entries = old.ledger_of(connection, reservation, many)
            step.take(LEDGER, space, entries)
            many -= len(entries)
            if many <= 0:
                return  # it may have more of them
            step.take(RESERVATIONS, space, [reservation])
            many -= 1

    def _look_at_events(self, step: Step, connection: sqlite3.Connection, now_ms: int) -> None:
        surplus = self._surplus_events()
        first = old.events(connection, 1)
        if first and not surplus and first[0][1] + EVENTS_KEPT_MS > now_ms:
            step.due.append(first[0][1] + EVENTS_KEPT_MS)
            return
        found = old.events(connection, EVENTS_IN_ONE_STEP + 1)
        young = (n for n, (_, at_ms) in enumerate(found) if n >= surplus and at_ms + EVENTS_KEPT_MS > now_ms)
        gone = min(next(young, len(found)), EVENTS_IN_ONE_STEP)
        step.events = [event for event, _ in found[:gone]]
        step.has_more |= gone == EVENTS_IN_ONE_STEP
        if gone < len(found):
            step.oldest_event, at_ms = found[gone]
            step.due.append(at_ms + EVENTS_KEPT_MS)

    def _surplus_events(self) -> int:
        """How many are to go by their number; 0 until that is worth a step."""
        if self._events is None:
            return 0
        surplus = self._events + self._last_event() - self._counted_to - EVENTS_KEPT
        return surplus if surplus >= EVENTS_IN_ONE_STEP else 0

    def _last_event(self) -> int:
        return self._spaces.numbers.last.get("event", 0)

    def _replies(self) -> list[Replies]:
        """Where somebody has had many replies kept for a day."""
        return [found for core in self._spaces if (found := core.index(Replies)).many]

    def _look_at_callers(self, step: Step, connection: sqlite3.Connection, replies: Replies, now_ms: int) -> None:
        """What a caller has kept beyond its number or bytes goes, the oldest first; others lose nothing by it."""
        for caller in replies.many:
            number, size = old.size_of_replies(connection, caller)
            surplus = max(number - REPLIES_KEPT, 2 * LOOK_EACH if size > REPLIES_KEPT_BYTES else 0)
            if surplus <= 0:
                continue
            found = old.replies_of(connection, caller, surplus + 1)
            for space, request, _ in found[:surplus]:
                step.take(REPLIES, space, [(caller, request)])
            if len(found) > surplus:
                self.keeps_for[caller] = now_ms + REPLY_KEPT_MS - found[-1][2]

    # ------------------------------------------------------------------ changes

    def _note(self, step: Step) -> None:
        for replies in self._replies():
            replies.many.clear()
        for table, space, key in step.gone:
            self._core(space).forget(table, key)
        for run in step.tidied:
            core = self._core(run.space)
            known = core.live(RUNS).get(run.run, run)
            known.tidied = 1
            core.rewrite(RUNS, known)
        if step.events:
            self._note_events(step)

    def _note_events(self, step: Step) -> None:
        core = self._core("")
        for event in step.events:
            core.forget(EVENTS_TABLE, event)
        if self._events is not None:
            self._events -= len(step.events)
        self._spaces.numbers.oldest_event = step.oldest_event or self._first_noted_event()

    def _first_noted_event(self) -> int:
        """The first that this turn tells: it is not on disk yet. 0 where there is none."""
        noted = (each.notes.get(EVENTS_TABLE, {}).values() for each in self._spaces)
        return min((row[0] for rows in noted for row in rows if row is not None), default=0)

    def _core(self, space: str) -> Core:
        """The space, or for one that nobody is in, the daemon's own: where there are no objects, none can be lost."""
        return self._spaces.cores.get(space) or self._spaces.of(SPACE)


def _look_at_runs(step: Step, connection: sqlite3.Connection, now_ms: int) -> None:
    many = ROWS_IN_ONE_STEP
    for row in old.ended_runs(connection, RUNS_IN_ONE_STEP):
        run = RUNS.made(row)
        due = (run.ended_ms or 0) + KEPT_MS
        if now_ms < due:
            step.due.append(due)
            break
        many -= _take_things(step, connection, run, many)
        if many <= 0:
            return  # it may have more of them
        step.tidied.append(run)
    if step.tidied:
        step.has_more = True
        for name, space in old.tidied_runs(connection, now_ms - RUN_KEPT_MS, ROWS_IN_ONE_STEP):
            step.take(RUNS, space, [name])


def _take_things(step: Step, connection: sqlite3.Connection, run: Run, many: int) -> int:
    """Takes rows of what belonged to a run, at most ``many``; how many."""
    left = many
    for table in OF_RUNS:
        if left > 0:
            keys = old.of_run(connection, table, run.run, left)
            step.take(table, run.space, keys)
            left -= len(keys)
    return many - left


def _look_at_replies(step: Step, connection: sqlite3.Connection, now_ms: int) -> None:
    for caller, space, request, until_ms in old.replies(connection, ROWS_IN_ONE_STEP):
        if now_ms < until_ms:
            step.due.append(until_ms)
            return
        step.take(REPLIES, space, [(caller, request)])

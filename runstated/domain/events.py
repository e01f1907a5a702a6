"""Events: what happened in a run and below it, in the order of their numbers, from a cursor on.

Events are written by ``Core.emit`` with what they tell. They go by age and count, also in runs that live on: a reader
whose cursor is older than what is kept, or newer than all there is, is told that there is a gap. The newest of a space
stay in memory, where those who follow read them; older ones are read from disk.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec

from runstate import wire
from runstated.domain import runs
from runstated.domain.answers import Listing, Parked
from runstated.domain.core import EVENTS_TABLE, Core, Event
from runstated.domain.runs import Run
from runstated.domain.waits import EVENTS, Topic

EXAMINED_MAX = (
    5_000  # events of all runs that one page looks at: a quiet run in a busy daemon must not cost a full scan
)


def line(run: str) -> Topic:
    """Where those stand who wait for the next event of a run or of one below it."""
    return (EVENTS, run)


def read(core: Core, request: wire.EventsRead) -> wire.EventsPage | Listing:
    """A page of the events of a run and all below it after the cursor. Works on ended runs too."""
    run = runs.get(core, request.run)
    is_beyond = _is_beyond(core, request.after)
    first, last = _kept(core)
    start = max(0 if is_beyond else request.after, first - 1)
    gap = 0 < request.after < first - 1 or is_beyond

    def page(found: list[Event], end: int) -> wire.EventsPage:
        """Of the events after ``start``, as far as they were looked at: up to ``end``, or the page is full."""
        wanted = set(request.types)
        is_full = len(found) == request.limit
        return wire.EventsPage(
            events=tuple(_view(event) for event in found if not wanted or event.type in wanted),
            cursor=found[-1].event if is_full else end,
            more=is_full or end < last,
            gap=gap,
        )

    if start + 1 >= core.ring_first:
        return page(_younger(core, run, start)[: request.limit], max(start, last))

    def of_rows(found: list[Event]) -> wire.EventsPage:
        own = [event for event in found if event.path.startswith(run.path)]
        return page(own[: request.limit], found[-1].event if found else last)

    low, high = runs.below(run.path)
    between = {"event": (start + 1, last + 1), "path": (low, high)}
    many = request.limit + 1  # and the last that was looked at
    return Listing(EVENTS_TABLE, of_rows, between=between, order="event", many=many, examined=EXAMINED_MAX)


def wait(core: Core, request: wire.EventsWait) -> wire.Ok | Parked:
    """Waits until there is an event after the cursor in the run or below it; an ended run has none to come, and its
    readers just wait. Where there is more after the cursor than memory has, the reader is to read on."""
    run = runs.get(core, request.run)
    if _is_beyond(core, request.after):
        return wire.Ok()  # reading tells more
    first, last = _kept(core)
    start = max(request.after, first - 1)
    is_older = start + 1 < core.ring_first and start < last
    if is_older or _younger(core, run, start):
        return wire.Ok()
    return Parked(lines=(line(run.run),), signals=(), late=wire.Ok())


def _younger(core: Core, run: Run, start: int) -> list[Event]:
    """The events after ``start`` of a run and all below it, of those in memory. Who follows looks at the last ones."""
    younger = takewhile(lambda event: event.event > start, reversed(core.ring))
    found = [event for event in younger if event.path.startswith(run.path)]
    found.reverse()
    return found


def _view(event: Event) -> wire.Event:
    return wire.Event(event=event.event, type=event.type, at_ms=event.at_ms, data=msgspec.json.decode(event.data))


def _is_beyond(core: Core, after: int) -> bool:
    """Whether no event has had this number yet: the cursor is one of another database."""
    return after > core.numbers.last.get("event", 0)


def _kept(core: Core) -> tuple[int, int]:
    """The numbers of the oldest and of the newest event there is; 0 and 0 without any."""
    first = core.numbers.oldest_event
    return (first, core.numbers.last.get("event", 0)) if first else (0, 0)

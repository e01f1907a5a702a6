"""Events: what happened in a run and below it, in the order of their numbers, from a cursor on.

Events are written by ``Tx.emit`` in the transaction of what they tell. They go by age and count, also in runs that
live on: a reader whose cursor is older than what is kept, or newer than all there is, is told that there is a gap.
"""

import msgspec

from runstate import wire
from runstated.domain import runs
from runstated.store.tx import Parked, Tx
from runstated.waits import EVENTS, Topic

PAGE_MAX = 500
EXAMINED_MAX = (
    5_000  # events of all runs that one page looks at: a quiet run in a busy daemon must not cost a full scan
)


def line(run: str) -> Topic:
    """Where those stand who wait for the next event of a run or of one below it."""
    return (EVENTS, run)


def read(tx: Tx, request: wire.EventsRead) -> wire.EventsPage:
    """A page of the events of a run and all below it after the cursor. Works on ended runs too."""
    run = runs.get(tx, request.run)
    first, last = _kept(tx)
    is_beyond = _is_beyond(tx, request.after)
    start, end = _examined(0 if is_beyond else request.after, first, last)
    low, high = runs.below(run.path)
    rows = tx.all(
        "SELECT events.event, events.type, events.at_ms, events.data FROM events JOIN runs ON runs.run = events.run"
        " WHERE events.event > :start AND events.event <= :end AND runs.path >= :low AND runs.path < :high"
        " ORDER BY events.event LIMIT :many",
        start=start,
        end=end,
        low=low,
        high=high,
        many=request.limit,
    )
    wanted = set(request.types)
    events = tuple(
        wire.Event(event=event, type=kind, at_ms=at_ms, data=msgspec.json.decode(data))
        for event, kind, at_ms, data in rows
        if not wanted or kind in wanted
    )
    is_full = len(rows) == request.limit
    return wire.EventsPage(
        events=events,
        cursor=rows[-1][0] if is_full else end,
        more=is_full or end < last,
        gap=0 < request.after < first - 1 or is_beyond,
    )


def wait(tx: Tx, request: wire.EventsWait) -> wire.Ok | Parked:
    """Waits until there is an event after the cursor in the run or below it; an ended run has none to come, and its
    readers just wait. Where there is more after the cursor than one page looks at, the reader is to read on."""
    run = runs.get(tx, request.run)
    if _is_beyond(tx, request.after):
        return wire.Ok()  # reading tells more
    first, last = _kept(tx)
    start, end = _examined(request.after, first, last)
    low, high = runs.below(run.path)
    found = tx.one(
        "SELECT events.event FROM events JOIN runs ON runs.run = events.run"
        " WHERE events.event > :start AND events.event <= :end AND runs.path >= :low AND runs.path < :high LIMIT 1",
        start=start,
        end=end,
        low=low,
        high=high,
    )
    if found is not None or end < last:
        return wire.Ok()
    return Parked(lines=(line(run.run),), signals=(), late=wire.Ok())


def _is_beyond(tx: Tx, after: int) -> bool:
    """Whether no event has had this number yet: the cursor is one of another database."""
    return after > tx.last("event")


def _kept(tx: Tx) -> tuple[int, int]:
    """The numbers of the oldest and of the newest event there is; 0 and 0 without any."""
    row = tx.one("SELECT (SELECT min(event) FROM events), (SELECT max(event) FROM events)")
    return (row[0], row[1]) if row is not None and row[0] is not None else (0, 0)


def _examined(after: int, first: int, last: int) -> tuple[int, int]:
    """Between which numbers to look: start < event <= end."""
    start = max(after, first - 1)
    return start, max(after, min(start + EXAMINED_MAX, last))

"""Events: what happened in a run and below it, in the order of their numbers, from a cursor on.

Events are written by ``Tx.emit`` in the transaction of what they tell. They go by age and count, also in runs that
live on: a reader whose cursor is older than what is kept is told that there is a gap.
"""

import msgspec

from runstate import wire
from runstated.domain import runs
from runstated.lines import EVENTS, Topic
from runstated.store.tx import Parked, Tx

PAGE_MAX = 500


def line(root: str) -> Topic:
    """Where those stand who wait for the next event of a tree of runs."""
    return (EVENTS, root)


def read(tx: Tx, request: wire.EventsRead) -> wire.EventsPage:
    """A page of the events of a run and all below it after the cursor. Works on ended runs too."""
    run = runs.get(tx, request.run)
    low, high = runs.below(run.path)
    rows = tx.all(
        "SELECT events.event, events.type, events.at_ms, events.data FROM events JOIN runs ON runs.run = events.run"
        " WHERE events.event > :after AND runs.path >= :low AND runs.path < :high ORDER BY events.event LIMIT :many",
        after=request.after,
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
    oldest = tx.one("SELECT min(event) FROM events")
    gap = request.after > 0 and oldest is not None and oldest[0] is not None and oldest[0] > request.after + 1
    cursor = rows[-1][0] if rows else request.after
    return wire.EventsPage(events=events, cursor=cursor, more=len(rows) == request.limit, gap=gap)


def wait(tx: Tx, request: wire.EventsWait) -> wire.Ok | Parked:
    """Waits until there is an event after the cursor in the run or below it; an ended run has none to come, and its
    readers just wait."""
    run = runs.get(tx, request.run)
    low, high = runs.below(run.path)
    found = tx.one(
        "SELECT events.event FROM events JOIN runs ON runs.run = events.run"
        " WHERE events.event > :after AND runs.path >= :low AND runs.path < :high LIMIT 1",
        after=request.after,
        low=low,
        high=high,
    )
    if found is not None:
        return wire.Ok()
    return Parked(lines=(line(runs.above(run)[-1]),), signals=(), late=wire.Ok())

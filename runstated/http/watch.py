"""Events."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from runstate import wire
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import WaitSeconds
from runstated.http.names import to_iso


class Watch(Body, frozen=True):
    """`types`: comma-separated; none: all."""

    scope_id: wire.Id
    types: Annotated[str, Meta(max_length=4_000)] = ""
    cursor: Annotated[str, Meta(pattern="^[0-9]{1,15}$")] | None = None
    wait_seconds: WaitSeconds = 5
    limit: Annotated[int, Meta(ge=1, le=500)] = 200


class Event(Answer, frozen=True):
    event_id: str
    type: str
    created_at: str
    payload: dict[str, Any]


class Events(Answer, frozen=True):
    """`nextCursor` goes past what `types` has left out."""

    events: tuple[Event, ...]
    next_cursor: str


@endpoint("GET", "/watch", Events, Watch)
async def watch(call: Call) -> Events:
    """Events of a run and all below it, also after its end; waits until there is one."""
    body = call.body
    types = tuple(name for name in body.types.split(",") if name)
    if len(types) > 100 or any(len(name) > 256 for name in types):
        raise ApiError("VALIDATION_FAILED", "types: at most 100, of at most 256 characters each")
    after, until_ms = int(body.cursor or 0), call.steady_ms() + body.wait_seconds * 1000
    while True:
        page = await call.ask(wire.EventsRead(run=body.scope_id, after=after, types=types, limit=body.limit))
        if page.gap and body.cursor is not None:
            raise ApiError("CURSOR_EXPIRED", "events after this cursor are not kept any more")
        after = page.cursor
        left_ms = until_ms - call.steady_ms()
        if page.events or left_ms <= 0:
            return view(page)
        if not page.more:
            await call.ask(wire.EventsWait(run=body.scope_id, after=after, wait_ms=int(left_ms)))


def view(page: wire.EventsPage) -> Events:
    events = tuple(
        Event(event_id=str(one.event), type=one.type, created_at=to_iso(one.at_ms), payload=one.data)
        for one in page.events
    )
    return Events(events=events, next_cursor=str(page.cursor))

"""What a turn is made of: requests, and what the daemon itself has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from runstate import wire
from runstated.domain.access import Access
from runstated.domain.sessions import Session
from runstated.domain.waits import CallKey


@dataclass(slots=True, eq=False)
class Ask:
    """A request of a session. ``arrived``: on the lease clock."""

    session: str
    access: Access
    request_id: int
    request: wire.Request[Any]
    ticket: int
    arrived: int

    @property
    def key(self) -> CallKey:
        return (self.session, self.request_id)


@dataclass(slots=True, eq=False)
class Opened:
    """A connection said hello."""

    row: Session
    request_id: int
    runs: tuple[str, ...]
    welcome: wire.Welcome


@dataclass(slots=True, eq=False)
class Ended:
    """A session is gone. ``how``: died or released."""

    session: str
    how: str


@dataclass(slots=True, eq=False)
class Away:
    """A session has lost its connection (or, ``away`` False, is back)."""

    session: str
    away: bool


@dataclass(slots=True, eq=False)
class Cancelled:
    """The caller of a request has gone."""

    session: str
    request_id: int


@dataclass(slots=True, eq=False)
class Nested:
    """A call is made inside of other holds from now on."""

    session: str
    request: wire.Nested


@dataclass(slots=True, eq=False)
class Acked:
    """Kept replies have arrived."""

    session: str
    request_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Tick:
    """Time has passed."""


Entry: TypeAlias = Ask | Opened | Ended | Away | Cancelled | Nested | Acked | Tick

"""The values of waiting and holding: a topic, a call that waits, a live lease."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runstate import wire
from runstated.domain.access import Access

Topic = tuple[str, ...]
CallKey = tuple[str, int]  # session, request id
Place = tuple[int, int, CallKey]  # in a line: rank, arrival, the call
StandPlace = tuple[int, int, int, CallKey]  # at a limit: rank, arrival, the number of the job, the call
LIMIT = "limit"  # the kind of line in which those stand who want units of a limit
EVENTS = "events"  # the kind of line in which those stand who wait for events
WATCH = "watch"  # the kind of line in which those stand who must look again when something changes that they have


class Settled(NamedTuple):
    """A once key whose result will not change while its run is active."""

    space: str
    run: str
    key: str


class Opening(NamedTuple):
    """When the window of a limit opened."""

    lease_ms: int
    wall_ms: int


class Stand(NamedTuple):
    """Where a call stands in the line of a limit. ``rank`` and ``age``: of the call or, with a ``number``, of the job
    for which it stands. ``aside``: how long its units are set aside: not at all (0), until a window of another limit
    opens, or until slots are free."""

    rank: int
    age: int
    number: int
    key: CallKey
    units: int
    aside: int

    @property
    def place(self) -> StandPlace:
        return (self.rank, self.age, self.number, self.key)


UNTIL_A_WINDOW, UNTIL_SLOTS = 1, 2  # see Stand.aside


@dataclass(slots=True, eq=False)
class Call:
    """A request that waits. ``until``: on the lease clock, None for ever. ``away``: its session has lost its
    connection; it keeps its place and is passed over. ``aside`` and ``over``: see ``tx.Parked``."""

    session: str
    access: Access
    request_id: int
    request: wire.WaitingRequest[Any]
    rank: int
    ticket: int
    since_ms: int
    until: int | None
    late: wire.Reply | Callable[[Any], wire.Reply]
    lines: tuple[Topic, ...]
    signals: tuple[Topic, ...]
    aside: bool = False
    ages: Mapping[Topic, int] = field(default_factory=dict)  # of the job for which it stands in a line, not its own
    stands: Mapping[Topic, Any] = field(default_factory=dict)  # what that job needs
    over: Callable[[Any], wire.Reply] | None = None
    away: bool = False
    at: Mapping[Topic, tuple[Stand, ...]] = field(default_factory=dict)  # where it stands in lines of limits

    @property
    def key(self) -> CallKey:
        return (self.session, self.request_id)

    @property
    def space(self) -> str:
        return self.access.space

    @property
    def place(self) -> Place:
        return (self.rank, self.ticket, (self.session, self.request_id))

    def place_in(self, line: Topic) -> Place:
        """Where it stands in a line: by its own age, or by that of the job for which it stands there."""
        age = self.ages.get(line)
        return self.place if age is None else (1, age, (self.session, self.request_id))


@dataclass(slots=True, eq=False)
class Hold:
    """A live lease. ``expires`` on the lease clock; a beat moves it."""

    token: int
    session: str
    length_ms: int
    subject: Topic
    expires: int
    others: list[Topic] = field(default_factory=list)  # further things that go with it: the slots of a job

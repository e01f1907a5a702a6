"""Deadlocks: calls that wait for each other, so that none of them would ever be answered.

A wait can end when one of its *ways* is open: the leases it waits for have ended, enough units of the pools are free,
and those ahead of it in the lines have left. What can end is found by taking away, over and over:

    a call whose time runs out, whose session is away, or that somebody outside may answer  -> is answered
    a call one of whose ways is open                                                        -> is answered
    a lease inside of which no call waits any more                                          -> ends, its units are free

A call that is left over is stuck. It is refused if the way from it leads back to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runstate import wire
from runstated.domain import jobs, limits, needs, once, queues, slots
from runstated.domain.answers import Refusal
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.jobs import JOBS, Job
from runstated.domain.sessions import SESSIONS
from runstated.domain.waits import UNTIL_SLOTS, Call, CallKey, Place, Topic

REACT_MS = 1_000  # somebody whose wait times out needs this to give back what it holds
MAY_STICK = (wire.OnceAcquire, wire.OnceGet, wire.SlotsAcquire, wire.QueuesResult, wire.GroupsEnded)
MEMBERS_MAX = 100  # of a group; with more jobs than that in a run, one will end


class Deadlock(Refusal):
    """The wait would never end."""

    code = "DEADLOCK"


class Key(NamedTuple):
    """A call or, with a line, what stands there before others: whatever is before it in that line is left aside."""

    call: CallKey
    line: Topic = ()


@dataclass(slots=True)
class Way:
    """How a wait can end: all these leases end, these units are free, these others have gone before. ``job``: what is
    waited for, in words, if that is a job."""

    leases: dict[int, Topic] = field(default_factory=dict)
    units: dict[Topic, int] = field(default_factory=dict)
    behind: dict[Key, Topic] = field(default_factory=dict)
    job: str = ""


@dataclass(slots=True)
class Node:
    """A wait. ``ways`` None: somebody outside of all this can end it."""

    call: Call
    ways: list[Way] | None = None
    answered: bool = False


class Edge(NamedTuple):
    """Why a wait does not end: a wait inside of a lease that is in its way (``token``), or before it in a line."""

    topic: Topic
    token: int | None
    job: str
    onward: Key


def closed_by(core: Core, call: Call) -> str | None:
    """The circle that a call would close if it began to wait, in words. Its own time-out does not count: it would
    wait in vain until then. Those of the others do, if they pass well before its own."""
    if not (call.request.within or call.request.again):
        return None  # nobody waits for it; only one that comes back to its old place can stand in somebody's way
    world = World(core, call)
    world.take_away([call])
    return world.circle(call)


def standing(core: Core, suspects: Iterable[Call]) -> tuple[Call, str] | None:
    """A circle that has closed without a new wait, among calls that wait already: the youngest of them, and the circle
    in words. One that a time-out will open is none."""
    calls = [call for call in suspects if not call.away and call.until is None and isinstance(call.request, MAY_STICK)]
    if not calls:
        return None
    world = World(core)
    world.take_away(calls)
    for call in sorted(calls, key=lambda call: call.ticket, reverse=True):
        circle = world.circle(call)
        if circle is not None:
            return call, circle
    return None


class World:
    """What can be reached from some calls: who waits for what, who holds it, who waits inside of that."""

    def __init__(self, core: Core, newcomer: Call | None = None) -> None:
        self._core = core
        self._newcomer = newcomer
        self._nodes: dict[Key, Node] = {}
        self._new: list[Key] = []
        self._inside: dict[int, set[Key]] = {}  # of each lease that was reached and has not ended
        self._free: dict[Topic, int] = {}  # units of a pool that are not held by such leases
        self._held: dict[Topic, list[int]] = {}  # by such leases
        self._units: dict[int, dict[Topic, int]] = {}
        self._asked_by: dict[int, list[Key]] = {}
        self._followed_by: dict[Key, list[Key]] = {}
        self._around: dict[Key, list[int]] = {}

    # ------------------------------------------------------------------ what can end

    def take_away(self, calls: Iterable[Call]) -> None:
        """Follows all that the calls wait for, then marks what can be answered and drops the leases that can end."""
        for call in calls:
            self._node(Key(call.key), call)
        while self._new:
            self._reach(self._new.pop())
        work = deque(self._nodes)
        for token in [token for token, inside in self._inside.items() if not inside]:
            self._end(token, work)
        while work:
            key = work.popleft()
            node = self._nodes[key]
            if node.answered or not self._is_open(node):
                continue
            node.answered = True
            work.extend(self._followed_by.get(key, ()))
            for token in self._around.get(key, ()):
                self._inside[token].discard(key)
                if not self._inside[token]:
                    self._end(token, work)

    def _end(self, token: int, work: deque[Key]) -> None:
        del self._inside[token]
        for pool, units in self._units.get(token, {}).items():
            self._free[pool] += units
        work.extend(self._asked_by.get(token, ()))

    def _is_open(self, node: Node) -> bool:
        return node.ways is None or any(
            not any(token in self._inside for token in way.leases)
            and all(self._free[pool] >= units for pool, units in way.units.items())
            and all(self._nodes[other].answered for other in way.behind)
            for way in node.ways
        )

    # ------------------------------------------------------------------ what is reached

    def _node(self, key: Key, call: Call) -> None:
        if key not in self._nodes:
            self._nodes[key] = Node(call)
            self._new.append(key)

    def _reach(self, key: Key) -> None:
        node = self._nodes[key]
        if not self._ends_by_itself(node.call):
            node.ways = list(self._ways(key, node.call))
        for way in node.ways or ():
            for token in way.leases:
                self._lease(token)
            for pool in way.units:
                self._pool(pool)
            for token in (*way.leases, *(token for pool in way.units for token in self._held[pool])):
                self._asked_by.setdefault(token, []).append(key)
            for other in way.behind:
                self._followed_by.setdefault(other, []).append(key)

    def _lease(self, token: int) -> None:
        """The calls that are made inside of a lease: it ends when they have all been answered."""
        if token not in self._inside:
            calls = self._calls_inside(token)
            self._inside[token] = {Key(call.key) for call in calls}
            for call in calls:
                self._around.setdefault(Key(call.key), []).append(token)
                self._node(Key(call.key), call)

    def _calls_inside(self, token: int) -> list[Call]:
        calls = [call for call in self._core.lines.inside(token) if not self._is_newcomer(call)]
        if self._newcomer is not None and token in self._newcomer.request.within:
            calls.append(self._newcomer)
        return calls

    def _pool(self, pool: Topic) -> None:
        """What is free of a pool when all leases have ended inside of which nobody waits."""
        if pool not in self._free:
            self._free[pool] = slots.by_id(self._core, pool[-1]).max
            held = [lease for lease in self._core.holds.of_topic(pool) if self._calls_inside(lease.token)]
            self._held[pool] = [lease.token for lease in held]
            for lease in held:
                units = _units_of(lease, pool)
                self._units.setdefault(lease.token, {})[pool] = units
                self._free[pool] -= units
                self._lease(lease.token)

    def _ends_by_itself(self, call: Call) -> bool:
        """Whether its time runs out, well before that of the newcomer, or its session is away: it may be gone."""
        if self._newcomer is None or self._newcomer.until is None:
            return call.away or call.until is not None
        return call.away or (call.until is not None and call.until + REACT_MS <= self._newcomer.until)

    def _is_newcomer(self, call: Call) -> bool:
        return self._newcomer is not None and call.key == self._newcomer.key

    # ------------------------------------------------------------------ how a wait can end

    def _ways(self, key: Key, call: Call) -> Iterator[Way]:
        request = call.request
        if key.line and key.line in call.stands:
            yield self._start(call.stands[key.line], call.ages[key.line], besides=key.line)
        elif isinstance(request, wire.SlotsAcquire):
            (pool,) = call.lines
            yield Way(units={pool: request.units}, behind={} if key.line else self._ahead(pool, call.place_in(pool)))
        elif isinstance(request, wire.OnceAcquire | wire.OnceGet):
            topic = once.line(request.run, request.key)
            yield Way(leases=self._held_on(topic))
        elif isinstance(request, wire.QueuesResult):
            yield self._end_of(request.job) or Way()
        elif isinstance(request, wire.GroupsEnded):
            waiting = jobs.of_run(self._core, request.run, MEMBERS_MAX + 1)
            ways = [] if len(waiting) > MEMBERS_MAX else [self._end_of(job.job) for job in waiting]
            yield from [way for way in ways if way is not None] or [Way()]
        else:
            yield Way()  # time passes, a job is sent, somebody arrives

    def _end_of(self, job: str) -> Way | None:
        """A job ends when its delivery does or, before that, when it can start; None if it has ended."""
        found: Job | None = self._core.live(JOBS).get(job)
        if found is None or found.state not in jobs.WAITING:
            return None
        what = f"job {job} of {found.queue}"
        if found.state == "running":
            topic = jobs.signal(found)
            return Way(leases=self._held_on(topic), job=what)
        way = self._start(needs.get(self._core, queues.needs_of(self._core, found)), found.age)
        way.job = what
        return way

    def _held_on(self, topic: Topic) -> dict[int, Topic]:
        return {lease.token: topic for lease in self._core.holds.of_topic(topic)}

    def _start(self, wants: needs.Wants, age: int, besides: Topic = ()) -> Way:
        """A job starts when its slots are free and nobody stands before it. Limits and budgets come back with time."""
        way = Way(units={slots.line(pool): units for pool, units in wants.slots})
        for line in way.units:
            if line != besides:
                way.behind |= self._ahead(line, (1, age, ("", 0)))
        for limit, units in wants.limits:
            line = limits.line(limit)
            aside = self._aside(line, age)
            if line != besides and sum(aside.values()) + units > limits.by_id(self._core, limit).max:
                ahead = self._ahead(line, (1, age, ("", 0)))
                way.behind |= {key: topic for key, topic in ahead.items() if key.call in aside}
        return way

    def _aside(self, line: Topic, age: int) -> dict[CallKey, int]:
        """The units that older jobs, which lack nothing but slots, set aside in every window of a limit."""
        asides = [
            *self._core.lines.stands.asides(line, (1, age, 0, ("", 0))),
            *(stand for stand in (self._newcomer.at.get(line, ()) if self._newcomer else ()) if stand.age < age),
        ]
        of_job = {stand.number: stand for stand in asides if stand.aside == UNTIL_SLOTS}
        return {stand.key: stand.units for stand in of_job.values()}

    def _ahead(self, line: Topic, place: Place) -> dict[Key, Topic]:
        """Those before a place in a line: of each sort that wants the same, the last one, who has the most before it
        in other lines."""
        sorts: dict[Any, Key] = {}
        before = [call for call in self._core.lines.before(line, place) if not self._is_newcomer(call)]
        if self._newcomer is not None and line in self._newcomer.lines and self._newcomer.place_in(line) < place:
            before.append(self._newcomer)
        for call in before:
            wants = call.request.units if isinstance(call.request, wire.SlotsAcquire) else call.stands.get(line)
            if wants is not None and wants not in sorts and not self._ends_by_itself(call):
                sorts[wants] = Key(call.key, line)
                self._node(sorts[wants], call)
        return dict.fromkeys(sorts.values(), line)

    # ------------------------------------------------------------------ the circle

    def circle(self, call: Call) -> str | None:
        """The shortest way from a call that is stuck back to itself, in words."""
        start = Key(call.key)
        came: dict[Key, tuple[Key, Edge]] = {}
        keys = deque([start])
        while keys:
            key = keys.popleft()
            for edge in self._edges(self._nodes[key]):
                if edge.onward.call == call.key:
                    edges = [edge]
                    while key != start:
                        key, edge = came[key]
                        edges.append(edge)
                    return self._tell(call, edges[::-1])
                if edge.onward not in came:
                    came[edge.onward] = (key, edge)
                    keys.append(edge.onward)
        return None

    def _edges(self, node: Node) -> Iterator[Edge]:
        if node.answered:
            return
        for way in node.ways or ():
            held = dict(way.leases)
            for pool, units in way.units.items():
                if self._free[pool] < units:
                    held.update((token, pool) for token in self._held[pool])
            for token, topic in held.items():
                yield from (Edge(topic, token, way.job, key) for key in sorted(self._inside.get(token, ())))
            for key, line in way.behind.items():
                if not self._nodes[key].answered:
                    yield Edge(line, None, way.job, key)

    def _tell(self, call: Call, edges: list[Edge]) -> str:
        """As in: deadlock: A (pid 1) waits for slots gpu, held by B (pid 2), which waits for A (slots disk)."""
        worker, pid = self._who(call)
        text = f"deadlock: {worker} (pid {pid})"
        for n, edge in enumerate(edges):
            what = self._what(edge)
            how = "behind" if edge.token is None else "run by" if edge.topic[0] == jobs.KIND else "held by"
            if n < len(edges) - 1:
                other, other_pid = self._who(self._nodes[edge.onward].call)
                text += f" waits for {what}, {how} {other} (pid {other_pid}), which"
            elif n:
                text += f" waits for {worker} ({what})"
            else:
                text += f" waits for {what}, {how} {worker} itself"
        return text

    def _what(self, edge: Edge) -> str:
        kind, _, name, *_ = edge.topic
        if kind == jobs.KIND:
            return edge.job
        if kind == slots.KIND:
            name = slots.by_id(self._core, name).name
        elif kind == limits.KIND:
            name = limits.by_id(self._core, name).name
        return f"{kind} {name}, which {edge.job} needs" if edge.job else f"{kind} {name}"

    def _who(self, call: Call) -> tuple[str, int]:
        row = self._core.live(SESSIONS).get(call.session)
        return (row.worker, row.pid) if row else ("a session that has ended", 0)


def _units_of(lease: Lease, pool: Topic) -> int:
    """How many units of a pool go with a lease."""
    return sum(units for each, units in lease.taken if each.id == pool[-1])

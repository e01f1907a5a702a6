"""Who waits for what, in which order. Two ways of waiting:

- In a **line** calls stand by age (``rank``, then ``ticket``): rank 0 for calls made from inside a hold, which go first
  so that nested holds cannot starve each other, 1 for all others. The engine serves a line from its head.
- A **signal** answers all that wait for it at once.

    newcomer --park--> in its lines and signals --served / answered / late / cancelled / session gone--> left

Leaving a line, for whatever reason, is reported, so that the engine can look at the new head before the turn goes on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from runstate import wire
from runstated.domain.stands import Stands
from runstated.domain.waits import EVENTS, LIMIT, WATCH, Call, CallKey, Place, Topic

STALE_MAX = 1_000  # entries of the heap whose call has ended, beside those that live


class _Asks(Protocol):
    """A caller, as far as its place in a line goes."""

    @property
    def session(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ticket(self) -> int: ...
    @property
    def request_id(self) -> int: ...


@dataclass(slots=True)
class Lines:
    """Everybody in one space who waits, and the sessions that may."""

    sessions: dict[str, bool] = field(default_factory=dict)  # those that are open -> whether they are away
    calls: dict[CallKey, Call] = field(default_factory=dict)
    left: list[Topic] = field(default_factory=list)  # lines that lost a member in this entry
    overtaken: dict[CallKey, None] = field(default_factory=dict)  # calls that others have come to stand before
    suspects: dict[Topic, None] = field(default_factory=dict)  # for whose holders a deadlock may have come about
    replies: list[tuple[list[CallKey], wire.Reply]] = field(default_factory=list)
    pushes: list[tuple[str, wire.Push]] = field(default_factory=list)
    listeners: int = 0  # calls that wait for events
    stands: Stands = field(init=False)
    _lines: dict[Topic, list[tuple[int, int, CallKey]]] = field(default_factory=dict)
    _aside: dict[Topic, dict[CallKey, None]] = field(default_factory=dict)
    _signals: dict[Topic, dict[CallKey, None]] = field(default_factory=dict)
    _subscribers: dict[Topic, dict[str, None]] = field(default_factory=dict)
    _subscriptions: dict[str, dict[Topic, None]] = field(default_factory=dict)
    _inside: dict[int, dict[CallKey, None]] = field(default_factory=dict)  # token -> calls made while holding it
    _by_session: dict[str, dict[CallKey, None]] = field(default_factory=dict)
    _lates: list[tuple[int, CallKey]] = field(default_factory=list)  # heap, checked when it comes up

    def __post_init__(self) -> None:
        self.stands = Stands(self.calls)

    # ------------------------------------------------------------------ sessions

    def open(self, session: str, *, away: bool = False) -> None:
        """A session begins; one that is known stays as it is."""
        self.sessions.setdefault(session, away)

    def close(self, session: str) -> None:
        """A session is gone, and its calls and subscriptions with it."""
        for call in self.of_session(session):
            self.leave(call.key)
        for signal in list(self._subscriptions.get(session, ())):
            self._unsubscribe(signal, session)
        self.sessions.pop(session, None)

    # ------------------------------------------------------------------ calls

    def park(self, call: Call) -> None:
        """``call`` starts to wait; one that waits already only changes its lines and signals."""
        old = self.calls.get(call.key)
        if old is not None:
            self._remove(old)
        call.away = self.sessions.get(call.session, False)
        self._put_in(call)
        if call.until is not None and (old is None or old.until != call.until):
            heapq.heappush(self._lates, (call.until, call.key))
        if old is not None:
            # Who has come to stand further back makes room for those between, as much as who has left.
            self.left += [
                line
                for line in old.lines
                if line[0] != LIMIT and (line not in call.lines or old.place_in(line) < call.place_in(line))
            ]
        self.stands.changed(old, call)
        self._overtake(
            call,
            [ln for ln in call.lines if old is None or ln not in old.lines or call.place_in(ln) < old.place_in(ln)],
        )

    def _overtake(self, call: Call, lines: Iterable[Topic]) -> None:
        """``call`` has come to stand before others. What they had set aside for themselves may be its now, and then
        they must not hold up other lines any more."""
        for line in lines:
            if line[0] == LIMIT:
                continue  # see ``Stands.changed``
            for key in self._aside.get(line, ()):
                if self.calls[key].place_in(line) > call.place_in(line):
                    self.overtaken[key] = None

    def leave(self, key: CallKey) -> Call | None:
        """The call waits no longer. Its lines are noted in ``left``."""
        call = self.calls.get(key)
        if call is not None:
            self._remove(call)
            self.left += [line for line in call.lines if line[0] != LIMIT]
            self.stands.changed(call, None)
        return call

    def _put_in(self, call: Call) -> None:
        key = call.key
        self.calls[key] = call
        self._by_session.setdefault(call.session, {})[key] = None
        for line in call.lines:
            insort(self._lines.setdefault(line, []), call.place_in(line))
            self.listeners += line[0] == EVENTS
            if call.aside:
                self._aside.setdefault(line, {})[key] = None
        self.stands.put(call)
        for signal in call.signals:
            self._signals.setdefault(signal, {})[key] = None
        for token in call.request.within:
            self._inside.setdefault(token, {})[key] = None

    def _remove(self, call: Call) -> None:
        key = call.key
        del self.calls[key]
        _discard(self._by_session, call.session, key)
        for line in call.lines:
            places = self._lines[line]
            del places[bisect_left(places, call.place_in(line))]
            self.listeners -= line[0] == EVENTS
            if not places:
                del self._lines[line]
            _discard(self._aside, line, key)
        self.stands.remove(call)
        for signal in call.signals:
            _discard(self._signals, signal, key)
        for token in call.request.within:
            _discard(self._inside, token, key)

    def line(self, line: Topic) -> Iterator[Call]:
        """The calls in a line, first to last, as it stands now."""
        for _, _, key in list(self._lines.get(line, ())):
            call = self.calls.get(key)
            if call is not None and line in call.lines:
                yield call

    def length(self, line: Topic) -> int:
        """How many stand in the line."""
        return len(self._lines.get(line, ()))

    def awaited(self, kind: str) -> list[Topic]:
        """The lines of a kind in which anybody stands."""
        return [line for line in self._lines if line[0] == kind]

    def is_awaited(self, line: Topic) -> bool:
        """Whether anybody stands in the line."""
        return line in self._lines

    def ahead(self, line: Topic, caller: _Asks, age: int | None = None) -> bool:
        """Whether a call that is not passed over stands in the line before the caller, or before a job of that age
        for which the caller asks."""
        key = (caller.session, caller.request_id)
        mine = (caller.rank, caller.ticket, key) if age is None else (1, age, key)
        for place in self._lines.get(line, ()):
            if place >= mine:
                return False
            if not self.calls[place[2]].away:
                return True
        return False

    def position(self, call: Call) -> int:
        """How many stand before the call, in the line where it is furthest back (for display)."""
        lines = [line for line in call.lines if line[0] != WATCH]
        return max((bisect_left(self._lines.get(line, []), call.place_in(line)) for line in lines), default=0)

    def set_away(self, session: str, away: bool) -> None:
        """The calls of a session keep their places, and are passed over while it is away."""
        if session in self.sessions:
            self.sessions[session] = away
        for call in self.of_session(session):
            if call.away != away:
                call.away = away
                self.stands.set_away(call)
                if not away:
                    self._overtake(call, call.lines)

    def awaiting(self, session: str) -> int:
        """How many calls of a session wait."""
        return len(self._by_session.get(session, ()))

    def of_session(self, session: str) -> list[Call]:
        return [self.calls[key] for key in self._by_session.get(session, ())]

    def late(self, lease_ms: int) -> list[Call]:
        """The calls whose wait is over."""
        due: dict[CallKey, Call] = {}
        while self._lates and self._lates[0][0] <= lease_ms:
            until, key = heapq.heappop(self._lates)
            call = self.calls.get(key)
            if call is not None and call.until == until:
                due[key] = call
        return list(due.values())

    # ------------------------------------------------------------------ signals

    def waiting_for(self, signal: Topic) -> list[Call]:
        """The calls that a signal answers."""
        return [self.calls[key] for key in self._signals.get(signal, ())]

    def answer_one(self, call: Call, reply: wire.Reply) -> None:
        self.leave(call.key)
        self.replies.append(([call.key], reply))

    def answer(self, signal: Topic, reply: wire.Reply, push: wire.Push | None) -> None:
        keys = list(self._signals.get(signal, ()))
        for key in reversed(keys):  # the last of a line leaves it at once, the first makes all others move up
            self.leave(key)
        if keys:
            self.replies.append((keys, reply))
        if push is not None:
            for session in list(self._subscribers.get(signal, ())):
                self._unsubscribe(signal, session)
                self.pushes.append((session, push))

    def subscribe(self, signal: Topic, session: str) -> None:
        if session not in self._subscribers.get(signal, ()):
            self._subscribe(signal, session)

    def subscribed(self) -> list[Topic]:
        """The signals that some session wants to be told of."""
        return list(self._subscribers)

    def _subscribe(self, signal: Topic, session: str) -> None:
        self._subscribers.setdefault(signal, {})[session] = None
        self._subscriptions.setdefault(session, {})[signal] = None

    def _unsubscribe(self, signal: Topic, session: str) -> None:
        _discard(self._subscribers, signal, session)
        _discard(self._subscriptions, session, signal)

    # ------------------------------------------------------------------ time

    def next_late(self) -> int | None:
        """When, on the lease clock, the next wait may be over. What has ended since wakes nobody."""
        if len(self._lates) > 2 * len(self.calls) + STALE_MAX:
            self._lates = [(call.until, key) for key, call in self.calls.items() if call.until is not None]
            heapq.heapify(self._lates)
        while self._lates and self._lates[0][1] not in self.calls:
            heapq.heappop(self._lates)
        return self._lates[0][0] if self._lates else None

    # ------------------------------------------------------------------ who is behind whom

    def inside(self, token: int) -> list[Call]:
        """The calls that are made inside of a lease."""
        return [self.calls[key] for key in self._inside.get(token, ())]

    def before(self, line: Topic, place: Place) -> Iterator[Call]:
        """The calls before a place in a line, last to first."""
        places = self._lines.get(line, [])
        return (self.calls[places[n][2]] for n in range(bisect_left(places, place) - 1, -1, -1))


def _discard(index: dict[Any, dict[Any, None]], key: Any, member: Any) -> None:
    """Takes a member out of a set kept in a dict, and the set when it is empty, so that memory does not grow."""
    members = index.get(key)
    if members is not None:
        members.pop(member, None)
        if not members:
            del index[key]

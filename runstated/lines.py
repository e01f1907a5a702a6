"""Who waits for what, in which order; which leases live. The daemon's memory, with an undo log.

Two ways of waiting:

- In a **line** calls stand by age (``rank``, then ``ticket``): rank 0 for calls made from inside a hold, which go first
  so that nested holds cannot starve each other, 1 for all others. The engine serves a line from its head.
- A **signal** answers all that wait for it at once.

    newcomer --park--> in its lines and signals --served / answered / late / cancelled / session gone--> left

Leaving a line, for whatever reason, is reported, so that the engine can look at the new head in the same transaction.

Memory follows the disk: every change is noted in ``_undo`` and taken back by ``rollback`` when its savepoint or its
transaction is. It is changed by one thread at a time: the one that runs the batch.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from runstate import wire

Topic = tuple[str, ...]
CallKey = tuple[str, int]  # session, request id


class Settled(NamedTuple):
    """A once key whose result will not change while its run is active."""

    space: str
    run: str
    key: str


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


@dataclass(slots=True, eq=False)
class Call:
    """A request that waits. ``until``: on the lease clock, None for ever. ``away``: its session has lost its
    connection; it keeps its place and is passed over."""

    session: str
    space: str
    request_id: int
    request: wire.WaitingRequest[Any]
    rank: int
    ticket: int
    since_ms: int
    until: int | None
    late: wire.Reply
    lines: tuple[Topic, ...]
    signals: tuple[Topic, ...]
    away: bool = False

    @property
    def key(self) -> CallKey:
        return (self.session, self.request_id)

    @property
    def place(self) -> tuple[int, int, CallKey]:
        return (self.rank, self.ticket, (self.session, self.request_id))


@dataclass(slots=True, eq=False)
class Hold:
    """A live lease. ``expires`` on the lease clock; a beat moves it."""

    token: int
    session: str
    length_ms: int
    subject: Topic
    expires: int


@dataclass(slots=True)
class Memory:
    """Everything the engine remembers between two transactions."""

    counters: dict[str, int] = field(default_factory=dict)
    counters_changed: set[str] = field(default_factory=set)
    calls: dict[CallKey, Call] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)
    left: list[Topic] = field(default_factory=list)  # lines that lost a member in this entry
    replies: list[tuple[list[CallKey], wire.Reply]] = field(default_factory=list)
    pushes: list[tuple[str, wire.Push]] = field(default_factory=list)
    settled: list[tuple[Settled, int | None, wire.OnceDone]] = field(default_factory=list)
    forgotten_runs: list[str] = field(default_factory=list)
    due_ms: int | None = None
    _lines: dict[Topic, list[tuple[int, int, CallKey]]] = field(default_factory=dict)
    _signals: dict[Topic, dict[CallKey, None]] = field(default_factory=dict)
    _subscribers: dict[Topic, dict[str, None]] = field(default_factory=dict)
    _subscriptions: dict[str, dict[Topic, None]] = field(default_factory=dict)
    _held: dict[Topic, dict[int, None]] = field(default_factory=dict)
    _inside: dict[int, dict[CallKey, None]] = field(default_factory=dict)  # token -> calls made while holding it
    _by_session: dict[str, dict[CallKey, None]] = field(default_factory=dict)
    _lapses: list[tuple[int, int]] = field(default_factory=list)  # heap of (expires, token), checked when it comes up
    _lates: list[tuple[int, CallKey]] = field(default_factory=list)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    # ------------------------------------------------------------------ undo

    def mark(self) -> tuple[int, ...]:
        """A point to which ``rollback`` can return."""
        return (
            len(self._undo),
            len(self.replies),
            len(self.pushes),
            len(self.settled),
            len(self.forgotten_runs),
            len(self.left),
        )

    def rollback(self, mark: tuple[int, ...] = (0, 0, 0, 0, 0, 0)) -> None:
        """Takes back all changes since ``mark``. Counters keep running: a number is never given twice."""
        while len(self._undo) > mark[0]:
            self._undo.pop()()
        for log, length in zip(
            (self.replies, self.pushes, self.settled, self.forgotten_runs, self.left), mark[1:], strict=True
        ):
            del log[length:]  # type: ignore[attr-defined]

    def commit(self) -> None:
        """The changes are on disk: there is no way back."""
        self._undo.clear()
        self.counters_changed.clear()

    # ------------------------------------------------------------------ counters and deadlines

    def count(self, counter: str) -> int:
        value = self.counters.get(counter, 0) + 1
        self.counters[counter] = value
        self.counters_changed.add(counter)
        return value

    def due(self, at_ms: int) -> None:
        if self.due_ms is None or at_ms < self.due_ms:
            self.due_ms = at_ms  # too early a look does no harm, so this is not undone

    # ------------------------------------------------------------------ calls

    def park(self, call: Call) -> None:
        """``call`` starts to wait; one that waits already only changes its lines and signals."""
        old = self.calls.get(call.key)
        if old is not None:
            self._take_out(old)
        self._put_in(call)
        if old is not None:
            self.left += [line for line in old.lines if line not in call.lines]

    def leave(self, key: CallKey) -> Call | None:
        """The call waits no longer. Its lines are noted in ``left``."""
        call = self.calls.get(key)
        if call is not None:
            self._take_out(call)
            self.left += call.lines
        return call

    def _put_in(self, call: Call) -> None:
        key = call.key
        self.calls[key] = call
        self._by_session.setdefault(call.session, {})[key] = None
        for line in call.lines:
            insort(self._lines.setdefault(line, []), call.place)
        for signal in call.signals:
            self._signals.setdefault(signal, {})[key] = None
        for token in call.request.within:
            self._inside.setdefault(token, {})[key] = None
        if call.until is not None:
            heapq.heappush(self._lates, (call.until, key))
        self._undo.append(lambda: self._remove(call))

    def _take_out(self, call: Call) -> None:
        self._remove(call)
        self._undo.append(lambda: self._restore(call))

    def _restore(self, call: Call) -> None:
        self._put_in(call)
        self._undo.pop()

    def _remove(self, call: Call) -> None:
        key = call.key
        del self.calls[key]
        _discard(self._by_session, call.session, key)
        for line in call.lines:
            places = self._lines[line]
            del places[bisect_left(places, call.place)]
            if not places:
                del self._lines[line]
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

    def ahead(self, line: Topic, caller: _Asks) -> bool:
        """Whether a call that is not passed over stands in the line before the caller."""
        mine = (caller.rank, caller.ticket, (caller.session, caller.request_id))
        for place in self._lines.get(line, ()):
            if place >= mine:
                return False
            if not self.calls[place[2]].away:
                return True
        return False

    def position(self, call: Call) -> int:
        """How many stand before the call, in the line where it is furthest back (for display)."""
        return max((bisect_left(self._lines.get(line, []), call.place) for line in call.lines), default=0)

    def set_away(self, session: str, away: bool) -> None:
        """The calls of a session keep their places, and are passed over while it is away."""
        for call in self.of_session(session):
            if call.away != away:
                call.away = away
                self._undo.append(partial(setattr, call, "away", not away))

    def of_session(self, session: str) -> list[Call]:
        return [self.calls[key] for key in self._by_session.get(session, ())]

    def late(self, lease_ms: int) -> list[Call]:
        """The calls whose wait is over."""
        due = []
        while self._lates and self._lates[0][0] <= lease_ms:
            until, key = heapq.heappop(self._lates)
            call = self.calls.get(key)
            if call is not None and call.until == until:
                due.append(call)
        return due

    # ------------------------------------------------------------------ signals

    def answer(self, signal: Topic, reply: wire.Reply, push: wire.Push | None) -> None:
        keys = list(self._signals.get(signal, ()))
        for key in keys:
            self.leave(key)
        if keys:
            self.replies.append((keys, reply))
        if push is not None:
            for session in list(self._subscribers.get(signal, ())):
                self._unsubscribe(signal, session)
                self._undo.append(partial(self._subscribe, signal, session))
                self.pushes.append((session, push))

    def subscribe(self, signal: Topic, session: str) -> None:
        if session not in self._subscribers.get(signal, ()):
            self._subscribe(signal, session)
            self._undo.append(partial(self._unsubscribe, signal, session))

    def unsubscribe_all(self, session: str) -> None:
        for signal in list(self._subscriptions.get(session, ())):
            self._unsubscribe(signal, session)
            self._undo.append(partial(self._subscribe, signal, session))

    def _subscribe(self, signal: Topic, session: str) -> None:
        self._subscribers.setdefault(signal, {})[session] = None
        self._subscriptions.setdefault(session, {})[signal] = None

    def _unsubscribe(self, signal: Topic, session: str) -> None:
        _discard(self._subscribers, signal, session)
        _discard(self._subscriptions, session, signal)

    # ------------------------------------------------------------------ leases

    def hold(self, token: int, session: str, length_ms: int, subject: Topic, lease_ms: int) -> None:
        hold = Hold(token, session, length_ms, subject, lease_ms + length_ms)
        self._keep(hold)
        self._undo.append(lambda: self._drop(hold))

    def let_go(self, token: int) -> None:
        hold = self.holds.get(token)
        if hold is not None:
            self._drop(hold)
            self._undo.append(lambda: self._keep(hold))

    def _keep(self, hold: Hold) -> None:
        self.holds[hold.token] = hold
        self._held.setdefault(hold.subject, {})[hold.token] = None
        heapq.heappush(self._lapses, (hold.expires, hold.token))

    def _drop(self, hold: Hold) -> None:
        del self.holds[hold.token]
        _discard(self._held, hold.subject, hold.token)

    def beat(self, session: str, token: int, lease_ms: int) -> bool:
        """Renews a lease; False when the session does not hold it."""
        hold = self.holds.get(token)
        if hold is None or hold.session != session:
            return False
        hold.expires = lease_ms + hold.length_ms
        return True

    def lapsed(self, lease_ms: int) -> list[int]:
        """The tokens whose lease is over. Those renewed since they were queued are queued again."""
        tokens: dict[int, None] = {}
        while self._lapses and self._lapses[0][0] <= lease_ms:
            _, token = heapq.heappop(self._lapses)
            hold = self.holds.get(token)
            if hold is not None and hold.expires <= lease_ms:
                tokens[token] = None
            elif hold is not None:
                heapq.heappush(self._lapses, (hold.expires, token))
        return list(tokens)

    def requeue(self) -> None:
        """Rebuilds the two heaps after a batch was taken back: what came up in it must come up again."""
        self._lapses = [(hold.expires, token) for token, hold in self.holds.items()]
        heapq.heapify(self._lapses)
        self._lates = [(call.until, key) for key, call in self.calls.items() if call.until is not None]
        heapq.heapify(self._lates)

    def next_steady(self) -> int | None:
        """When, on the lease clock, the next lease or wait may be over."""
        times = [heap[0][0] for heap in (self._lapses, self._lates) if heap]
        return min(times) if times else None

    # ------------------------------------------------------------------ who is behind whom

    def holders(self, call: Call) -> list[Hold]:
        """The leases that keep the call waiting, as far as they are known."""
        topics = dict.fromkeys((*call.lines, *call.signals))
        return [self.holds[token] for topic in topics for token in self._held.get(topic, ())]

    def circle(self, call: Call) -> list[Call] | None:
        """The circle of waiting calls that ``call`` would close, itself first; None if there is none.

        A lease leads back if a call made inside it waits and all that this call waits for leads back to a lease that
        ``call`` itself is made in. All: one of several holders that can go on is enough to end a wait.
        """
        mine = set(call.request.within)
        return self._leads_back(call, mine, {}) if mine else None

    def _leads_back(self, call: Call, mine: set[int], known: dict[CallKey, list[Call] | None]) -> list[Call] | None:
        known[call.key] = None  # a circle that does not pass through ``mine`` is not this call's
        path: list[Call] | None = None
        for hold in self.holders(call):
            onward: list[Call] | None = []
            if hold.token not in mine:
                onward = self._any_leads_back(hold.token, mine, known)
                if onward is None:
                    return None
            path = [call, *(onward or ())]
        known[call.key] = path
        return path

    def _any_leads_back(self, token: int, mine: set[int], known: dict[CallKey, list[Call] | None]) -> list[Call] | None:
        for key in self._inside.get(token, ()):
            path = known[key] if key in known else self._leads_back(self.calls[key], mine, known)
            if path is not None:
                return path
        return None


def _discard(index: dict[Any, dict[Any, None]], key: Any, member: Any) -> None:
    """Takes a member out of a set kept in a dict, and the set when it is empty, so that memory does not grow."""
    members = index.get(key)
    if members is not None:
        members.pop(member, None)
        if not members:
            del index[key]

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

from runstate import wire
from runstated.access import StoredKey
from runstated.waits import EVENTS, WATCH, Call, CallKey, Hold, Opening, Place, Settled, Topic

STALE_MAX = 1_000  # entries of the two heaps whose lease or call has ended, beside those that live


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
class Memory:
    """Everything the engine remembers between two transactions."""

    counters: dict[str, int] = field(default_factory=dict)
    counters_changed: set[str] = field(default_factory=set)
    sessions: dict[str, bool] = field(default_factory=dict)  # those that are open -> whether they are away
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)  # of those that are open: space and process
    calls: dict[CallKey, Call] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)
    left: list[Topic] = field(default_factory=list)  # lines that lost a member in this entry
    overtaken: dict[CallKey, None] = field(default_factory=dict)  # calls that others have come to stand before
    suspects: dict[Topic, None] = field(default_factory=dict)  # for whose holders a deadlock may have come about
    replies: list[tuple[list[CallKey], wire.Reply]] = field(default_factory=list)
    pushes: list[tuple[str, wire.Push]] = field(default_factory=list)
    settled: list[tuple[Settled, int | None, wire.OnceDone]] = field(default_factory=list)
    forgotten_runs: list[str] = field(default_factory=list)
    keys: list[tuple[StoredKey, ...]] = field(default_factory=list)  # all of them, after each change
    keeps_for: dict[str, int] = field(default_factory=dict)  # callers whose replies go early -> after how many ms
    due_ms: int | None = None
    due_lease_ms: int | None = None
    windows: dict[str, Opening] = field(default_factory=dict)  # of limits
    began: Opening = field(default_factory=lambda: Opening(0, 0))  # when this life of the daemon began
    looked_after: dict[int, str] = field(default_factory=dict)  # token -> a run to revisit when it has ended
    revisit: dict[str, None] = field(default_factory=dict)  # runs that a tick looks at; a stale entry costs one look
    listeners: int = 0  # calls that wait for events
    _times: dict[tuple[str, str], int] = field(default_factory=dict)
    _lines: dict[Topic, list[tuple[int, int, CallKey]]] = field(default_factory=dict)
    _aside: dict[Topic, dict[CallKey, None]] = field(default_factory=dict)
    _signals: dict[Topic, dict[CallKey, None]] = field(default_factory=dict)
    _subscribers: dict[Topic, dict[str, None]] = field(default_factory=dict)
    _subscriptions: dict[str, dict[Topic, None]] = field(default_factory=dict)
    _held: dict[Topic, dict[int, None]] = field(default_factory=dict)
    _held_by: dict[str, dict[int, None]] = field(default_factory=dict)
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
            len(self.keys),
        )

    def rollback(self, mark: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)) -> None:
        """Takes back all changes since ``mark``. Counters keep running: a number is never given twice."""
        while len(self._undo) > mark[0]:
            self._undo.pop()()
        for log, length in zip(
            (self.replies, self.pushes, self.settled, self.forgotten_runs, self.left, self.keys), mark[1:], strict=True
        ):
            del log[length:]  # type: ignore[attr-defined]

    def commit(self) -> None:
        """The changes are on disk: there is no way back."""
        self._undo.clear()
        self.counters_changed.clear()
        if self.looked_after:
            for token in [token for token in self.looked_after if token not in self.holds]:
                del self.looked_after[token]
        if len(self._lapses) > 2 * len(self.holds) + STALE_MAX or len(self._lates) > 2 * len(self.calls) + STALE_MAX:
            self.requeue()

    # ------------------------------------------------------------------ counters and deadlines

    def count(self, counter: str) -> int:
        value = self.counters.get(counter, 0) + 1
        self.counters[counter] = value
        self.counters_changed.add(counter)
        return value

    def due(self, at_ms: int) -> None:
        if self.due_ms is None or at_ms < self.due_ms:
            self.due_ms = at_ms  # too early a look does no harm, so this is not undone

    def is_nth(self, what: tuple[str, str], n: int) -> bool:
        """Whether this is the n-th, 2n-th ... time. Not undone: a look too early does no harm."""
        times = self._times[what] = self._times.get(what, 0) + 1
        return times % n == 0

    def take_revisits(self, many: int) -> list[str]:
        """The next runs that a tick is to look at."""
        taken = list(islice(self.revisit, many))
        for run in taken:
            del self.revisit[run]
            self._undo.append(partial(self.revisit.setdefault, run))
        return taken

    def due_steady(self, at_lease_ms: int) -> None:
        if self.due_lease_ms is None or at_lease_ms < self.due_lease_ms:
            self.due_lease_ms = at_lease_ms

    def take_due(self, now_ms: int, lease_ms: int) -> bool:
        """Whether there is something for the nouns' ticks; if so, they are to name the next time."""
        at_ms, at_lease_ms = self.due_ms, self.due_lease_ms
        is_due = at_ms is not None and at_ms <= now_ms
        if not is_due and (at_lease_ms is None or at_lease_ms > lease_ms):
            return False
        self.due_ms = self.due_lease_ms = None
        if at_ms is not None:
            self._undo.append(partial(self.due, at_ms))
        if at_lease_ms is not None:
            self._undo.append(partial(self.due_steady, at_lease_ms))
        return True

    # ------------------------------------------------------------------ sessions

    def open(self, session: str, space: str, process: str = "", *, away: bool = False) -> None:
        """A session begins; one that is known stays as it is. ``process``: empty where the kernel does not tell."""
        if session not in self.sessions:
            self.sessions[session], self.origins[session] = away, (space, process)
            self._undo.append(partial(self.sessions.pop, session))
            self._undo.append(partial(self.origins.pop, session))

    def close(self, session: str) -> None:
        """A session is gone, and its calls and subscriptions with it."""
        for call in self.of_session(session):
            self.leave(call.key)
        for signal in list(self._subscriptions.get(session, ())):
            self._unsubscribe(signal, session)
            self._undo.append(partial(self._subscribe, signal, session))
        if session in self.sessions:
            away, origin = self.sessions.pop(session), self.origins.pop(session)
            self._undo.append(partial(self.sessions.__setitem__, session, away))
            self._undo.append(partial(self.origins.__setitem__, session, origin))

    # ------------------------------------------------------------------ calls

    def park(self, call: Call) -> None:
        """``call`` starts to wait; one that waits already only changes its lines and signals."""
        old = self.calls.get(call.key)
        if old is not None:
            self._take_out(old)
        call.away = self.sessions.get(call.session, False)
        self._put_in(call)
        if call.until is not None and (old is None or old.until != call.until):
            heapq.heappush(self._lates, (call.until, call.key))
        if old is not None:
            # Who has come to stand further back makes room for those between, as much as who has left.
            self.left += [
                line for line in old.lines if line not in call.lines or old.place_in(line) < call.place_in(line)
            ]
        self._overtake(
            call,
            [ln for ln in call.lines if old is None or ln not in old.lines or call.place_in(ln) < old.place_in(ln)],
        )

    def _overtake(self, call: Call, lines: Iterable[Topic]) -> None:
        """``call`` has come to stand before others. What they had set aside for themselves may be its now, and then
        they must not hold up other lines any more."""
        for line in lines:
            for key in self._aside.get(line, ()):
                if self.calls[key].place_in(line) > call.place_in(line):
                    self.overtaken[key] = None

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
            insort(self._lines.setdefault(line, []), call.place_in(line))
            self.listeners += line[0] == EVENTS
            if call.aside:
                self._aside.setdefault(line, {})[key] = None
        for signal in call.signals:
            self._signals.setdefault(signal, {})[key] = None
        for token in call.request.within:
            self._inside.setdefault(token, {})[key] = None
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
            del places[bisect_left(places, call.place_in(line))]
            self.listeners -= line[0] == EVENTS
            if not places:
                del self._lines[line]
            _discard(self._aside, line, key)
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

    def is_aside(self, line: Topic) -> bool:
        """Whether anybody stands in the line who is ``aside``."""
        return line in self._aside

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
        if self.sessions.get(session, away) != away:
            self.sessions[session] = away
            self._undo.append(partial(self.sessions.__setitem__, session, not away))
        for call in self.of_session(session):
            if call.away != away:
                call.away = away
                self._undo.append(partial(setattr, call, "away", not away))
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
                self._undo.append(partial(self._subscribe, signal, session))
                self.pushes.append((session, push))

    def subscribe(self, signal: Topic, session: str) -> None:
        if session not in self._subscribers.get(signal, ()):
            self._subscribe(signal, session)
            self._undo.append(partial(self._unsubscribe, signal, session))

    def subscribed(self) -> list[Topic]:
        """The signals that some session wants to be told of."""
        return list(self._subscribers)

    def _subscribe(self, signal: Topic, session: str) -> None:
        self._subscribers.setdefault(signal, {})[session] = None
        self._subscriptions.setdefault(session, {})[signal] = None

    def _unsubscribe(self, signal: Topic, session: str) -> None:
        _discard(self._subscribers, signal, session)
        _discard(self._subscriptions, session, signal)

    # ------------------------------------------------------------------ leases

    def hold(
        self, token: int, session: str, length_ms: int, subject: Topic, lease_ms: int, others: Iterable[Topic] = ()
    ) -> None:
        hold = Hold(token, session, length_ms, subject, lease_ms + length_ms, list(others))
        self._keep(hold)
        self._undo.append(lambda: self._drop(hold))

    def hold_also(self, token: int, subject: Topic) -> None:
        hold = self.holds.get(token)
        if hold is not None and subject != hold.subject and subject not in hold.others:
            hold.others.append(subject)
            self._held.setdefault(subject, {})[token] = None
            self._undo.append(partial(_discard, self._held, subject, token))
            self._undo.append(partial(hold.others.remove, subject))

    def let_go(self, token: int) -> None:
        hold = self.holds.get(token)
        if hold is not None:
            self._drop(hold)
            self._undo.append(lambda: self._keep(hold))

    def _keep(self, hold: Hold) -> None:
        self.holds[hold.token] = hold
        for subject in (hold.subject, *hold.others):
            self._held.setdefault(subject, {})[hold.token] = None
        self._held_by.setdefault(hold.session, {})[hold.token] = None
        heapq.heappush(self._lapses, (hold.expires, hold.token))

    def _drop(self, hold: Hold) -> None:
        del self.holds[hold.token]
        for subject in (hold.subject, *hold.others):
            _discard(self._held, subject, hold.token)
        _discard(self._held_by, hold.session, hold.token)

    def holding(self, session: str) -> int:
        """How many leases a session holds."""
        return len(self._held_by.get(session, ()))

    def is_own(self, session: str, token: int) -> bool:
        """Whether a live lease is the session's, or that of another one of its process in the same space."""
        hold = self.holds.get(token)
        if hold is None or hold.session == session:
            return hold is not None
        origin = self.origins.get(session, ("", ""))
        return bool(origin[1]) and origin == self.origins.get(hold.session)

    def beat(self, session: str, token: int, lease_ms: int) -> bool:
        """Renews a lease; False when the session does not hold it."""
        hold = self.holds.get(token)
        if hold is None or hold.session != session:
            return False
        hold.expires = lease_ms + hold.length_ms
        return True

    def renew(self, token: int, length_ms: int, lease_ms: int) -> None:
        """Renews a lease, from now on of another length."""
        hold = self.holds[token]
        self.let_go(token)  # and held anew, so that it can be undone
        self.hold(token, hold.session, length_ms, hold.subject, lease_ms, hold.others)

    def spare(self, lease_ms: int) -> None:
        """Gives every lease the time for a beat and more: its holder may have slept as the daemon did."""
        for hold in self.holds.values():
            hold.expires = max(hold.expires, lease_ms + hold.length_ms // 2)

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
        """When, on the lease clock, the next lease or wait may be over. What has ended since wakes nobody."""
        while self._lapses and self._lapses[0][1] not in self.holds:
            heapq.heappop(self._lapses)
        while self._lates and self._lates[0][1] not in self.calls:
            heapq.heappop(self._lates)
        times = [heap[0][0] for heap in (self._lapses, self._lates) if heap]
        if self.due_lease_ms is not None:
            times.append(self.due_lease_ms)
        return min(times) if times else None

    # ------------------------------------------------------------------ who is behind whom

    def holders(self, call: Call) -> list[Hold]:
        """The leases that keep the call waiting, as far as they are known."""
        topics = dict.fromkeys((*call.lines, *call.signals))
        return [self.holds[token] for topic in topics for token in self._held.get(topic, ())]

    def held(self, topic: Topic) -> list[int]:
        """The leases on a topic."""
        return list(self._held.get(topic, ()))

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

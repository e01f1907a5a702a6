"""What has come and waits for a turn: a line for what gives something back, and one for all the rest.

Sessions have their turns: one entry of each, then one more of each, so that one that sends much holds up itself only.
Of each session what came first goes first. After a restart, requests that may stand in a line wait behind a gate.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import chain, zip_longest

import msgspec

from runstate import wire
from runstated.domain.waits import CallKey
from runstated.engine.entries import Acked, Ask, Away, Cancelled, Ended, Entry, Nested, Opened, Tick
from runstated.engine.pressure import Pressure

# What becomes of sessions keeps its order: one that has come and died must not be opened after its end.
OF_A_SESSION = (Opened, Away, Ended)
SENT = (Ask, Cancelled, Nested, Acked)  # what a client may send as much of as it likes: counted, see pressure.py


class Line:
    """Entries of many sessions, taken in turns."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Entry]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._of)

    def put(self, entry: Entry) -> None:
        self._of.setdefault(session_of(entry), deque()).append(entry)

    def put_back(self, entry: Entry) -> None:
        """Before all others."""
        session = session_of(entry)
        self._of.setdefault(session, deque()).appendleft(entry)
        self._of.move_to_end(session, last=False)

    def take(self, most: int) -> list[Entry]:
        taken: list[Entry] = []
        while self._of and len(taken) < most:
            session, entries = self._of.popitem(last=False)
            taken.append(entries.popleft())
            if entries:
                self._of[session] = entries
        return taken

    def entries(self) -> list[Entry]:
        """All of them (for a look)."""
        return list(chain.from_iterable(self._of.values()))


class Arrivals:
    """See the module. ``pressure`` always counts what is here of each session."""

    def __init__(self, pressure: Pressure) -> None:
        self.pressure = pressure
        self._first = Line()  # what gives something back, and what becomes of sessions
        self._rest = Line()
        self._gate: list[Ask] | None = None
        self._let_in: deque[Ask] = deque()  # through the gate; before all others that came with them
        self._let_in_ticket = 0  # the highest of their arrival numbers
        self._is_cut = False  # the last turn ended before all of it was run ...
        self._last_gave = self._last_ticked = False  # ... after one of these

    def __bool__(self) -> bool:
        return bool(self._first or self._rest or self._let_in)

    def put(self, entry: Entry, *, first: bool = False) -> None:
        self._count(entry)
        (self._first if first or isinstance(entry, OF_A_SESSION) else self._rest).put(entry)

    def take(self, most: int, ticks: Sequence[Entry]) -> list[Entry]:
        """At most so many, and ``ticks`` where it is their turn: what gives something back goes before what lapses, and
        that before all others. Each kind has half of a turn, if it wants it; and while turns end before all of it
        was run, the two kinds take turns."""
        rest = self._take_rest(most // 2)
        first = self._first.take(most - len(rest))
        rest += self._take_rest(most - len(rest) - len(first))
        for entry in (*first, *rest):
            self._uncount(entry)
        if not self._is_cut:
            return [*away_first(first), *ticks, *rest]
        turns = zip_longest(*((rest, first) if self._last_gave else (first, rest)))
        mixed = away_first([entry for entry in chain.from_iterable(turns) if entry is not None])
        return [*mixed, *ticks] if self._last_ticked else [*ticks, *mixed]

    def _take_rest(self, most: int) -> list[Entry]:
        old: list[Entry] = [self._let_in.popleft() for _ in range(min(most, len(self._let_in)))]
        return old + self._rest.take(most - len(old))

    def was_run(self, entries: Sequence[Entry], done: int) -> bool:
        """So many of a turn were run; the others come first in the next. Whether a tick is among these."""
        self._is_cut = done < len(entries)
        if self._is_cut:
            last = entries[done - 1]
            self._last_ticked = isinstance(last, Tick)
            self._last_gave = self._last_gave if self._last_ticked else _is_first(last)
        for entry in reversed(entries[done:]):
            if not isinstance(entry, Tick):
                self._count(entry)
                if isinstance(entry, Ask) and entry.ticket <= self._let_in_ticket and not entry.request.gives:
                    self._let_in.appendleft(entry)
                else:
                    (self._first if _is_first(entry) else self._rest).put_back(entry)
        return any(isinstance(entry, Tick) for entry in entries[done:])

    # ------------------------------------------------------------------ the gate after a restart

    def close_gate(self) -> None:
        self._gate = []

    @property
    def is_gate_closed(self) -> bool:
        return self._gate is not None

    def hold_back(self, ask: Ask) -> None:
        assert self._gate is not None, "only while the gate is closed"
        self._count(ask)
        self._gate.append(ask)

    def withdraw(self, call: CallKey) -> None:
        """Its caller has gone: it need not go through the gate any more."""
        for ask in [ask for ask in self._gate or () if ask.key == call]:
            assert self._gate is not None, "something was found behind it"
            self._gate.remove(ask)
            self._uncount(ask)

    def nest(self, call: CallKey, nested: wire.Nested) -> None:
        """It is made inside of other holds by now: so it is to go through the gate."""
        for ask in self._gate or ():
            if ask.key == call:
                ask.request = msgspec.structs.replace(ask.request, within=nested.within, inherited=nested.inherited)

    def open_gate(self) -> None:
        """Lets in what was held back, by arrival numbers."""
        waiting, self._gate = sorted(self._gate or (), key=lambda ask: ask.ticket), None
        self._let_in.extend(waiting)
        self._let_in_ticket = max((ask.ticket for ask in waiting), default=0)

    # ------------------------------------------------------------------ how many

    def _count(self, entry: Entry) -> None:
        if isinstance(entry, SENT):
            self.pressure.add(entry.session)

    def _uncount(self, entry: Entry) -> None:
        if isinstance(entry, SENT):
            self.pressure.take(entry.session)

    def entries(self) -> list[Entry]:
        """All that is here (for a look)."""
        return [*self._first.entries(), *self._rest.entries(), *self._let_in, *(self._gate or ())]


def session_of(entry: Entry) -> str:
    if isinstance(entry, Opened):
        return entry.row.session
    assert not isinstance(entry, Tick), "nobody's"
    return entry.session


def _is_first(entry: Entry) -> bool:
    return isinstance(entry, OF_A_SESSION) or (isinstance(entry, Ask) and entry.request.gives)


def away_first(entries: Sequence[Entry]) -> list[Entry]:
    """Who has lost its connection by now is passed over by all that is given back in the same turn."""
    away: list[Entry] = []
    rest: list[Entry] = []
    known: set[str] = set()  # sessions that something else became of before
    for entry in entries:
        if isinstance(entry, Away) and entry.away and entry.session not in known:
            away.append(entry)
            continue
        if isinstance(entry, OF_A_SESSION):
            known.add(session_of(entry))
        rest.append(entry)
    return away + rest

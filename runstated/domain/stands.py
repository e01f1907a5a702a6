"""Stands: who waits for units of limits, by age, and what is set aside there for whom.

A call stands in the line of a limit once for each job that it would start, and a direct one once. Unlike in any other
line, who fits may pass those before it: only what is *set aside* for them is not free. So a line in which something has
changed is looked at from the place of the change on, and all such lines together, in one pass by age:

    look_from(line, place) --> pending, up to where it was looked at --next, next--> looked at

Nobody takes units in a line that is pending who stands there behind somebody who was not looked at.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from runstated.domain.waits import Call, CallKey, Stand, StandPlace, Topic

FIRST: StandPlace = (-1, 0, 0, ("", 0))  # before everybody
LAST: StandPlace = (2, 0, 0, ("", 0))  # behind everybody
_place = itemgetter(0, 1, 2, 3)


@dataclass(slots=True)
class Looked:
    """What has been found by now of the jobs that one call asks for: it counts in place of what was said of them
    before. ``behind``: the lines in which one of them has to wait until others were looked at."""

    at: dict[Topic, dict[int, Stand]] = field(default_factory=dict)  # by line and number
    numbers: set[int] = field(default_factory=set)
    behind: set[Topic] = field(default_factory=set)

    def begin(self, number: int) -> None:
        """The job with that number is looked at now."""
        if number in self.numbers:
            for stands in self.at.values():
                stands.pop(number, None)
        self.numbers.add(number)

    def set_aside(self, line: Topic, place: StandPlace) -> int:
        """The units that are set aside for those of them before a place."""
        stands = self.at.get(line, {}).values()
        return sum(stand.units for stand in stands if stand.aside and stand[:3] < place[:3])


class Stands:
    """See the module. ``calls``: all that wait, by key."""

    def __init__(self, calls: Mapping[CallKey, Call]) -> None:
        self._calls = calls
        self._lines: dict[Topic, list[Stand]] = {}
        self._aside: dict[Topic, list[Stand]] = {}  # those for whom something is set aside
        self._looked: dict[Topic, StandPlace] = {}  # of the lines that are pending: up to where
        self._next: list[tuple[StandPlace, Topic]] = []  # heap: where such a line may go on, never later than it does

    def put(self, call: Call) -> None:
        """The call stands in its lines from now on."""
        for line, stands in call.at.items():
            for stand in stands:
                insort(self._lines.setdefault(line, []), stand)
                if stand.aside:
                    insort(self._aside.setdefault(line, []), stand)
                if line in self._looked:
                    heapq.heappush(self._next, (stand.place, line))

    def remove(self, call: Call) -> None:
        """It does no more."""
        for line, stands in call.at.items():
            for stand in stands:
                _remove(self._lines, line, stand)
                if stand.aside:
                    _remove(self._aside, line, stand)

    def changed(self, old: Call | None, new: Call | None) -> None:
        """A call has come, gone or changed: those behind look again where not the same is set aside for it."""
        before, after = _set_aside(old), _set_aside(new)
        for line, place, _ in before ^ after:
            self.look_from(line, place)

    def set_away(self, call: Call) -> None:
        """The call is passed over, or not any more: what was set aside for it is free, or not any more."""
        for line, place, _ in _set_aside(call):
            self.look_from(line, place)

    # ------------------------------------------------------------------ what is free

    def set_aside(self, line: Topic, place: StandPlace, besides: Container[int] = ()) -> int:
        """The units that are set aside for those before a place, each job counted once; ``besides``: the numbers of
        jobs that are not counted."""
        units, last = 0, FIRST[:3]
        for stand in self._aside.get(line, ()):
            job = stand[:3]
            if job >= place[:3]:
                break
            if job != last and stand.number not in besides and not self._calls[stand.key].away:
                units, last = units + stand.units, job
        return units

    def is_aside_for(self, line: Topic, number: int) -> bool:
        """Whether anything is set aside for the job with that number."""
        return any(stand.number == number for stand in self._aside.get(line, ()))

    def asides(self, line: Topic, place: StandPlace) -> list[Stand]:
        """Those before a place for whom something is set aside."""
        stands = self._aside.get(line, [])
        return stands[: bisect_left(stands, place, key=_place)]

    # ------------------------------------------------------------------ the pass

    def look_from(self, line: Topic, place: StandPlace = FIRST) -> None:
        """Those behind the place are to be looked at."""
        if line in self._lines and place < self._looked.get(line, LAST):
            self._looked[line] = place
            heapq.heappush(self._next, (place, line))

    def next(self) -> tuple[Topic, Stand] | None:
        """The next to be looked at: the oldest of all lines that are pending; None if there is none."""
        while self._next:
            place, line = heapq.heappop(self._next)
            looked = self._looked.get(line)
            stand = None if looked is None else self._after(line, looked)
            if stand is None:
                self._looked.pop(line, None)
                continue
            heapq.heappush(self._next, (stand.place, line))
            if stand.place <= place:
                self._looked[line] = stand.place
                return line, stand
        return None

    def is_behind(self, line: Topic, place: StandPlace) -> bool:
        """Whether another call that is to be looked at stands before the place."""
        looked = self._looked.get(line)
        if looked is None:
            return False
        stands = self._lines.get(line, [])
        for stand in stands[bisect_right(stands, looked, key=_place) : bisect_left(stands, place, key=_place)]:
            if stand.key != place[3] and not self._calls[stand.key].away:
                return True
        return False

    def _after(self, line: Topic, looked: StandPlace) -> Stand | None:
        stands = self._lines.get(line, [])
        for n in range(bisect_right(stands, looked, key=_place), len(stands)):
            if not self._calls[stands[n].key].away:
                return stands[n]
        return None


def _set_aside(call: Call | None) -> set[tuple[Topic, StandPlace, int]]:
    if call is None or not call.aside:
        return set()
    return {(line, stand.place, stand.units) for line, stands in call.at.items() for stand in stands if stand.aside}


def _remove(lines: dict[Topic, list[Stand]], line: Topic, stand: Stand) -> None:
    stands = lines[line]
    del stands[bisect_left(stands, stand)]
    if not stands:
        del lines[line]

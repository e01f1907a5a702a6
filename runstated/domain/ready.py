"""Ready: which jobs may start, found by run and set of needs in the order of their age.

Each run has a heap of its own jobs for each queue and set of needs; each run and each above it has a heap of the runs
below by the oldest of these. So a look costs no more where there are many jobs, and a run that ends takes all its jobs
along in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[int, int]  # age, number
Entry = tuple[int, int, T]  # age, number, job
STALE_MAX = 64  # entries of a heap that do not count any more, beside those that do


@dataclass(slots=True)
class Tops:
    """The runs below one, itself included, by the place of their oldest job. ``heap``: (age, number, run), checked when
    it comes up: ``place_of`` has those that count. A place there is never younger than that job's."""

    heap: list[tuple[int, int, str]] = field(default_factory=list)
    place_of: dict[str, Place] = field(default_factory=dict)

    def put(self, run: str, place: Place) -> None:
        """The run has an older job than before."""
        self.place_of[run] = place
        if len(self.heap) > 2 * len(self.place_of) + STALE_MAX:
            self.heap = [(*place, run) for run, place in self.place_of.items()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (*place, run))


@dataclass(slots=True)
class OfRun(Generic[T]):
    """The jobs of one run, by queue and set of needs. ``above``: the run and each above it."""

    above: tuple[str, ...]
    heaps: dict[tuple[str, int], list[Entry[T]]] = field(default_factory=dict)


@dataclass(slots=True)
class Ready(Generic[T]):
    """See the module."""

    _of_run: dict[str, OfRun[T]] = field(default_factory=dict)
    _tops: dict[tuple[str, str], dict[int, Tops]] = field(default_factory=dict)

    def add(self, above: Sequence[str], queue: str, needs: int, place: Place, job: T) -> None:
        """A job may start. ``above``: its run and each above it, the run first. No other job has its place."""
        run = above[0]
        own = self._of_run.get(run)
        if own is None:
            own = self._of_run[run] = OfRun(tuple(above))
        heap = own.heaps.setdefault((queue, needs), [])
        heapq.heappush(heap, (*place, job))
        if heap[0][2] is job:
            for each in above:
                self._tops.setdefault((queue, each), {}).setdefault(needs, Tops()).put(run, place)

    def take(self, run: str, queue: str, needs: int) -> T:
        """The oldest job of a run with these needs is to start."""
        own = self._of_run[run]
        heap = own.heaps[queue, needs]
        job = heapq.heappop(heap)[2]
        if not heap:
            del own.heaps[queue, needs]
            self._forget_top(own.above, queue, needs)
            if not own.heaps:
                del self._of_run[run]
        return job

    def forget(self, run: str) -> None:
        """The run has ended, and its jobs with it."""
        own = self._of_run.pop(run, None)
        if own is not None:
            for queue, needs in own.heaps:
                self._forget_top(own.above, queue, needs)

    def heads(self, queue: str, run: str, *, below: bool, is_over: Callable[[str], bool]) -> list[T]:
        """The oldest job of each set of needs in a run and, where ``below``, in those below it, oldest first. Runs of
        which ``is_over`` says so are passed over."""
        if below:
            tops = self._tops.get((queue, run), {})
            found = [self._oldest(top, queue, needs, is_over) for needs, top in tops.items()]
        elif run in self._of_run and not is_over(run):
            found = [heap[0] for (of, _), heap in self._of_run[run].heaps.items() if of == queue]
        else:
            found = []
        return [job for *_, job in sorted((head for head in found if head is not None), key=_place)]

    def all(self) -> dict[tuple[str, str, int], list[Entry[T]]]:
        """All jobs by run, queue and set of needs, oldest first (for display)."""
        return {
            (run, *key): sorted(heap, key=_place) for run, of in self._of_run.items() for key, heap in of.heaps.items()
        }

    def below(self) -> dict[tuple[str, str, int], set[str]]:
        """By run, queue and set of needs: the runs below, and perhaps the run itself, that have any (for display)."""
        tops = {(run, queue, needs): top for (queue, run), of in self._tops.items() for needs, top in of.items()}
        return {key: set(top.place_of) for key, top in tops.items()}

    def _oldest(self, tops: Tops, queue: str, needs: int, is_over: Callable[[str], bool]) -> Entry[T] | None:
        heap, oldest = tops.heap, None
        over = []  # of runs whose deadline has passed and which nobody has ended yet: the clock may go back
        while heap and oldest is None:
            age, number, run = heap[0]
            if tops.place_of.get(run) != (age, number):
                heapq.heappop(heap)
                continue
            head = self._of_run[run].heaps[queue, needs][0]
            if _place(head) != (age, number):
                tops.place_of[run] = _place(head)
                heapq.heapreplace(heap, (*_place(head), run))
            elif is_over(run):
                over.append(heapq.heappop(heap))
            else:
                oldest = head
        for top in over:
            heapq.heappush(heap, top)
        return oldest

    def _forget_top(self, above: Sequence[str], queue: str, needs: int) -> None:
        """A run has no job with these needs any more."""
        for each in above:
            tops = self._tops.get((queue, each), {})
            top = tops.get(needs)
            if top is not None:
                top.place_of.pop(above[0], None)
                if not top.place_of:
                    del tops[needs]
                    if not tops:
                        del self._tops[queue, each]


def _place(entry: Entry[T]) -> Place:
    return entry[:2]

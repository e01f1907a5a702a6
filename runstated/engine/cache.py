"""Settled `once` results, answered from memory: filled after COMMIT, dropped with their run in the same step."""

from collections import OrderedDict

from runstated.domain.waits import Settled
from runstated.settings import CACHE_BYTES


class Cache:
    """Encoded results of done once keys: the least used go first."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bodies: OrderedDict[Settled, tuple[bytes, int | None]] = OrderedDict()
        self._of_run: dict[str, dict[Settled, None]] = {}

    def get(self, settled: Settled, now_ms: int) -> bytes | None:
        """The body, unless the run's deadline has passed by the clock."""
        found = self._bodies.get(settled)
        if found is None:
            return None
        body, deadline_ms = found
        if deadline_ms is not None and now_ms >= deadline_ms:
            return None
        self._bodies.move_to_end(settled)
        return body

    def put(self, settled: Settled, deadline_ms: int | None, body: bytes) -> None:
        if settled in self._bodies:
            return
        self._bodies[settled] = (body, deadline_ms)
        self._of_run.setdefault(settled.run, {})[settled] = None
        self._bytes += _cost(settled, body)
        while self._bytes > self._bytes_max:
            oldest = next(iter(self._bodies))
            self._remove(oldest)

    def drop(self, run: str) -> None:
        """The run has ended: its results are no answers any more."""
        for settled in list(self._of_run.get(run, ())):
            self._remove(settled)

    def _remove(self, settled: Settled) -> None:
        body, _ = self._bodies.pop(settled)
        self._bytes -= _cost(settled, body)
        of_run = self._of_run[settled.run]
        del of_run[settled]
        if not of_run:
            del self._of_run[settled.run]


def _cost(settled: Settled, body: bytes) -> int:
    return len(body) + len(settled.key) + 300  # the objects around them

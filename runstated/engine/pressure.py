"""How many requests of each session wait to be taken: one that sends faster than it is served is read no further.

So a flood fills its own socket, and everybody else's request is a batch away.
"""

from collections.abc import Callable

from runstated.settings import WAITING_PER_SESSION_MAX


class Pressure:
    """Counts by session."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._relieved: dict[str, Callable[[], object]] = {}

    def add(self, session: str) -> None:
        self._waiting[session] = self._waiting.get(session, 0) + 1

    def take(self, session: str) -> None:
        """One of them is being served."""
        left = self._waiting.get(session, 0) - 1
        if left > 0:
            self._waiting[session] = left
        else:
            self._waiting.pop(session, None)
        if left <= WAITING_PER_SESSION_MAX // 2 and session in self._relieved:
            self._relieved.pop(session)()

    def is_high(self, session: str) -> bool:
        return self._waiting.get(session, 0) >= WAITING_PER_SESSION_MAX

    def when_relieved(self, session: str, relieved: Callable[[], object]) -> None:
        """``relieved`` is called once, when half of what may wait has been taken."""
        self._relieved[session] = relieved

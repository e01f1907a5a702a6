"""How long somebody has waited: only the time counts in which this process was awake.

The kernel's monotonic clock stands still while the machine is suspended, but not while a process is stopped or frozen
with its container, and nobody tells a process that it was. So who waits for a limited time looks at the clock every
PULSE_S. A look that comes ASLEEP_S after the last one is proof of sleep, and that time is taken out for all who wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

PULSE_S = 0.5
ASLEEP_S = 1.0

_lock = threading.RLock()  # so that a signal handler may look while the thread that it interrupts does
_slept_s = 0.0
_woke_s = 0.0  # monotonic time up to which that is known


def now_s() -> float:
    """Monotonic time without what is known to have been slept."""
    return time.monotonic() - _slept_s


def _has_slept(since_s: float, now_s: float) -> None:
    global _slept_s, _woke_s
    with _lock:
        _slept_s += max(0.0, now_s - max(since_s, _woke_s))
        _woke_s = max(_woke_s, now_s)


class Patience:
    """What is left of somebody's time, None: without end. It is waited for in steps, one right after the other."""

    __slots__ = ("_ends_s", "_seen_s")

    def __init__(self, seconds: float | None) -> None:
        self._seen_s = time.monotonic()
        self._ends_s = None if seconds is None else now_s() + seconds

    def step(self) -> float | None:
        """How long to wait until the next step, in seconds; 0: the time is over, None: for ever."""
        if self._ends_s is None:
            return None
        self.look()
        return max(0.0, min(PULSE_S, self._ends_s - now_s()))

    def look(self) -> None:
        """A step is over, or what was waited for has come."""
        since_s, self._seen_s = self._seen_s, time.monotonic()
        if self._ends_s is not None and self._seen_s - since_s > ASLEEP_S:
            _has_slept(since_s, self._seen_s)

    def resume(self) -> None:
        """Something else was done since the last step, which may have taken its time."""
        self._seen_s = time.monotonic()


async def wait(tasks: Iterable[asyncio.Future[Any]], seconds: float) -> None:
    """Until all of them have ended, or the time is over."""
    import asyncio

    left, pending = Patience(seconds), set(tasks)
    while pending and (step_s := left.step()):
        _, pending = await asyncio.wait(pending, timeout=step_s)

"""The threads in which plain handlers run.

One that is through with a handler is kept for the next: to start a thread costs more than most handlers do. There are
never more than handlers ran at once, and they end with the worker.

    started or kept --work--> runs --told--> kept
                                               └── closed ──> ended

How it is built: **no locks**, since an interrupt may come between any two lines of the serving thread. A thread is
reserved by taking an entry out of ``_idle``, and gets its work through ``_works``; each is one atomic step. An
interrupt in between leaves a thread too many, never one too few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from . import threads

Work = Callable[[], Callable[[], object]]  # must not raise; gives what to call once the thread is free for other work


class HandlerThreads:
    """Of one queue that is served."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._idle: list[None] = []  # an entry for each thread that is free

    def run(self, work: Work) -> str:
        """Runs it in a thread, where nothing else runs meanwhile. Otherwise why not: see ``threads.start``."""
        try:
            self._idle.pop()
        except IndexError:
            why_not = threads.start(
                threading.Thread(target=_live, args=(self._works, self._idle), name=self._name, daemon=True)
            )
            if why_not:
                return why_not
        self._works.put(work)
        return ""

    def close(self) -> None:
        """The threads end, each after the handler that runs in it."""
        self._works.put(None)

    def __del__(self) -> None:
        self.close()


def _live(works: SimpleQueue[Work | None], idle: list[None]) -> None:
    while _run_next(works, idle):
        pass
    works.put(None)  # for the next one


def _run_next(works: SimpleQueue[Work | None], idle: list[None]) -> bool:
    """Whether there was work: nothing of it is referred to afterwards."""
    work = works.get()
    if work is None:
        return False
    tell = work()
    idle.append(None)  # first: whoever hears of the outcome may bring more work
    tell()
    return True

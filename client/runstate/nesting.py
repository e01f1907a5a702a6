"""Calls that wait and were made by a task or thread that another one had started: looked at again from time to time.

Whether the other one awaits them may change while they wait, and with it what they are inside of (see awaiting.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from . import threads, wire
from .context import standing

if TYPE_CHECKING:
    from .calls import Call

PAUSE_S = 0.1  # before a call is looked at for the first time ...
PAUSE_S_MAX = 1.0  # ... doubling up to this


class _Watched:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.stands = standing()
        self.pause_s = PAUSE_S
        self.due = time.monotonic() + PAUSE_S


class Nesting:
    """See the module. ``calls``: those that are open, by request id. ``tell``: tells the daemon."""

    def __init__(self, calls: Mapping[int, Call], tell: Callable[[wire.Nested], None]) -> None:
        self._calls = calls
        self._tell = tell
        self._lock = threading.RLock()  # so that a signal handler may call while the thread that it interrupts does
        self._watched: list[_Watched] = []
        self._is_running = False

    def watch(self, call: Call) -> None:
        """For as long as the call is open, which it is to be next; made where it waits."""
        with self._lock:
            self._watched.append(_Watched(call))
            if self._is_running:
                return
            if threads.start(threading.Thread(target=self._run, name="runstate-nesting", daemon=True)):
                self._watched.clear()  # the calls stand as they were made
            else:
                self._is_running = True  # last: a second thread, after an interrupt, does no harm

    def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            time.sleep(pause_s)
            now = time.monotonic()
            with self._lock:
                self._watched = [each for each in self._watched if now < each.due or self._is_open(each.call)]
                self._is_running = bool(self._watched)
                watched = list(self._watched)
            if not watched:
                return
            for each in watched:
                if each.due <= now:
                    each.pause_s = min(PAUSE_S_MAX, 2 * each.pause_s)
                    each.due = now + each.pause_s
                    self._look(each)
            pause_s = max(PAUSE_S, min(each.due for each in watched) - now)

    def _is_open(self, call: Call) -> bool:
        return self._calls.get(call.request_id) is call

    def _look(self, watched: _Watched) -> None:
        call = watched.call
        request = call.request
        assert isinstance(request, wire.WaitingRequest), "only a call that may wait is watched"
        within, inherited = watched.stands()
        if (within, inherited) != (request.within, request.inherited):
            call.request = msgspec.structs.replace(request, within=within, inherited=inherited)
            self._tell(wire.Nested(call=call.request_id, within=within, inherited=inherited))

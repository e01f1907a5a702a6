"""A daemon that is away: how long it has been, how often it is looked for, when it is started by ourselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import errors
from .calls import unavailable

if TYPE_CHECKING:
    from .calls import Call
    from .holds import Hold

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks for it, while something is held ...
START_S = 10.0  # ... and between two attempts to start it, while no call waits


class Absence:
    """Of one session. ``is_remote``: the daemon may be alive where we do not reach it."""

    def __init__(self, is_remote: bool) -> None:
        self._is_remote = is_remote
        self._since_s = 0.0
        self._start_s = 0.0

    def begins(self) -> None:
        """The connection has ended."""
        self._since_s = time.monotonic()

    def is_over(self) -> None:
        """The daemon has answered."""
        self._start_s = 0.0

    def may_start(self, calls: Iterable[Call], *, is_holding: bool) -> bool:
        """Whether it is to be started: at once for a call, now and then for what is held or owed."""
        waiting = [call.is_offer for call in calls]
        if not all(waiting):
            return True
        if time.monotonic() < self._start_s or not (waiting or is_holding):
            return False
        self._start_s = time.monotonic() + START_S
        return True

    def befalls(self, holds: Iterable[Hold], error: BaseException) -> None:
        """The daemon was looked for in vain. Where none is alive nothing lapses. One elsewhere may be: what may have
        lapsed is told to stop. One that does not want us has handed on all that we held."""
        away_ms = (time.monotonic() - self._since_s) * 1000 if self._is_remote else 0.0
        for hold in holds:
            if not isinstance(error, errors.UnavailableError | OSError):
                log.warning("lost the hold %d in the run %s: %s", hold.token, hold.run, error)
                hold.lose(unavailable(error))
            elif away_ms > hold.lease_ms:
                hold.signal._set(unavailable(error))

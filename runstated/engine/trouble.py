"""Trouble: the disk refuses. Then the engine stands still: nothing is served, lapses, fires or times out.

    works --a commit fails--> in trouble --a commit of all that is owed succeeds--> works
                               | ^ taken into memory and owed: what ends or gives back, deaths; their replies are held
                               +-+ all else, reads too, gets UNAVAILABLE; only `status` is answered, and says so

What is owed is bounded by what is live. A held reply is no error until its caller's own time-out; a repeat attaches to
it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Hashable
from typing import Any

from runstate import wire
from runstated.domain.tables import Row, Table
from runstated.engine.turns import Turns
from runstated.host.clock import Clock
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed
from runstated.store.sqlite import Store

log = logging.getLogger(__name__)

RETRY_S_MIN = 0.5  # how soon a commit is tried again ...
RETRY_S_MAX = 5.0  # ... doubling up to this
TRY_EACH_MS = 100  # who asks meanwhile makes the disk be tried at once, if the last try is as old as this
QUIET_MS = 60_000  # trouble that comes and goes (a disk with room for some writes) is logged once in this time
ANSWERED = (wire.Welcome, wire.StatusView)  # replies that leave while the disk refuses


class Trouble:
    """Whether there is any, and what is owed to the disk."""

    def __init__(self, clock: Clock) -> None:
        self.why: str | None = None
        self.retry_s = RETRY_S_MIN
        self._clock = clock
        self._quiet_until_ms = clock.steady_ms()
        self._was_told = False
        self._tried_ms = 0
        self._rows: dict[Table[Any], dict[Hashable, Row | None]] = {}
        self._numbers: dict[str, int] = {}

    def begin(self, cause: object) -> None:
        """A commit has failed."""
        if self.why is None:
            self._clock.freeze()
            self._was_told = self._clock.steady_ms() >= self._quiet_until_ms
            if self._was_told:
                log.error("writes fail: %s", cause)
        self.why = str(cause)

    def end(self) -> None:
        """A commit of all that was owed has succeeded."""
        if self.why is None:
            return
        if self._was_told:
            log.warning("writes work again")
            self._quiet_until_ms = self._clock.steady_ms() + QUIET_MS
        self.why = None
        self.retry_s = RETRY_S_MIN
        self._rows, self._numbers = {}, {}
        self._clock.thaw()

    def owe(self, batch: Batch) -> None:
        """What is to be written with the next commit that works."""
        for table, rows in batch.rows.items():
            self._rows.setdefault(table, {}).update(rows)
        self._numbers.update(batch.numbers)

    def owed(self) -> Batch:
        """All of it."""
        return Batch(self._rows, self._numbers)

    def may_try(self) -> bool:
        """Whether the last try is long enough ago."""
        return self.why is not None and self._clock.steady_ms() - self._tried_ms >= TRY_EACH_MS

    def tried(self) -> None:
        """A try has just ended."""
        self._tried_ms = self._clock.steady_ms()

    def next_retry_s(self) -> float:
        """How long to wait before the next try."""
        now_s, self.retry_s = self.retry_s, min(RETRY_S_MAX, self.retry_s * 2)
        return now_s


async def last_try(trouble: Trouble, turns: Turns, store: Store) -> int:
    """One more try before the daemon ends; how many outcomes could not be recorded."""
    trouble.owe(turns.take_batch())
    try:
        await store.commit_again(trouble.owed())
    except (CommitFailed, sqlite3.Error) as error:
        unrecorded = len(turns.held())
        log.error("ending while the disk refuses (%s): %d outcomes are not recorded", error, unrecorded)
        return unrecorded
    trouble.end()
    return 0

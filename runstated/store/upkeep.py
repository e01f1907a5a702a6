"""What the database needs beside batches: its log copied into it in time, its free pages given back to the disk.

batch committed ── the log is as long as the disk allows ──> checkpoint, beside the writer
                └─ time has passed, and tidying left free pages ──> shrinks, a step at a time between batches
batch lost ── the disk is full ──> checkpoint, for the room that the log takes
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any

from runstated.store.sqlite import Store

log = logging.getLogger(__name__)

READER_S = 0.25  # how long a checkpoint is put off that met a long read, such as a backup: each try holds up the writer
FAILED_S = 1.0
SHRINK_PAUSE_S = 0.05  # between two steps, each of which is one small commit of the writer: some 5 MB in a second


class Upkeep:
    """See the module. All methods belong to the loop's thread."""

    def __init__(self, store: Store, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._store = store
        self._spawn = spawn
        self._is_copying = self._is_shrinking = self._has_failed = False

    def after_commit(self, *, has_ticked: bool) -> None:
        """A batch was committed."""
        if not self._is_copying and self._store.is_log_long():
            self._is_copying = True
            self._spawn(self._copy())
        if has_ticked and not self._is_shrinking:
            self._is_shrinking = True
            self._spawn(self._shrink())

    async def make_room(self) -> None:
        """The disk is full: what the log takes may be all that is needed."""
        try:
            await self._store.checkpoint()
        except sqlite3.Error as error:
            log.debug("no room was made: %s", error)  # the trouble itself has been told

    async def _copy(self) -> None:
        try:
            pause_s = 0.0 if await self._store.checkpoint() else READER_S
            self._has_failed = False
        except sqlite3.Error as error:
            if not self._has_failed:  # once, until it works again
                log.warning("checkpoint failed: %s", error)
            pause_s, self._has_failed = FAILED_S, True
        asyncio.get_running_loop().call_later(pause_s, self._may_copy)

    def _may_copy(self) -> None:
        self._is_copying = False

    async def _shrink(self) -> None:
        try:
            steps = 0
            while await self._store.shrink():
                steps += 1
                await asyncio.sleep(SHRINK_PAUSE_S)
            if steps:
                await self._store.checkpoint()  # only now does the file get smaller
        except sqlite3.Error as error:
            log.warning("giving back free pages failed: %s", error)
        finally:
            self._is_shrinking = False

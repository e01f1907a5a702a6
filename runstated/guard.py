"""Whether the daemon's files are still its own: its directory, database, lock and socket.

Looked at at a slow pulse, before anybody new is served, and (the database) before what was committed is acknowledged. A
daemon that goes on without one of them is a second daemon in the making, or records what nobody will find again.

    database or directory gone -> the process ends at once: all that was acknowledged is where its files are
    only the log gone          -> drained; the log, which is still open, is copied into the database
    lock or socket gone        -> drained and closed

In each case the lock file says at the end which database belongs here, also where it was taken away: the next daemon
starts from that, and starts with nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from runstated.store.files import Files, log_of

if TYPE_CHECKING:
    from runstated.daemon import Listener
    from runstated.engine.engine import Engine
    from runstated.host.lockfile import Lock
    from runstated.store.sqlite import Store

log = logging.getLogger("runstated")


class Guard:
    """See the module. ``lost``: what happened. ``is_log_lost``: the database must not be closed in the usual way."""

    def __init__(self, lock: Lock, listener: Listener, stopping: asyncio.Event) -> None:
        self.listener, self.stopping = listener, stopping
        self.lost: str | None = None
        self.is_log_lost = False
        self.files: Files | None = None
        self._lock = lock
        self._directory = _identity(lock.path.parent)

    @property
    def database(self) -> str:
        """The id of the database."""
        return self._lock.info.database

    def watch(self, store: Store, engine: Engine) -> None:
        """The database is open and written to: from now on it must stay where it is."""
        self.files = store.files
        if store.sync != "full":
            self.files.sync_log()
        self._lock.announce(replace(self._lock.info, database=store.id, fresh=False, wal=True))
        engine.committed = self.look_at_files
        store.folds = lambda: self.note(engine.batch, has_log=True)

    def look(self) -> bool:
        """Whether all are there; if not, the daemon stops."""
        self.look_at_files()
        if self.lost is None and not self._lock.is_ours():
            self._stop(f"the lock file {self._lock.path} was removed or replaced, or emptied, while we held it")
        elif self.lost is None and not self.listener.is_ours():
            self._stop(f"the socket {self.listener.path} was removed or replaced while we listened on it")
        return self.lost is None

    def look_at_files(self) -> None:
        """Whether what was committed is where the next daemon will look for it. Returns only if it is, or will be."""
        lost = self.files.lost() if self.files is not None and self.lost is None else None
        if lost is None:
            return
        assert self.files is not None, "it was asked a line before"
        if self.files.is_only_log_lost():
            self.is_log_lost = True
            self._stop(f"{lost} while the daemon used it")
            return
        directory = self._lock.path.parent
        if _identity(directory) != self._directory:
            lost = f"the directory {directory} was removed, moved or replaced"
        self._leave(f"{lost} while the daemon used it")

    async def close(self, store: Store, engine: Engine) -> None:
        """Closes the database. Without its log what is in that is copied, and the process ends."""
        if self.is_log_lost:
            try:
                is_whole = await store.fold()
                self.note(engine.batch, has_log=not is_whole)
            finally:
                self._leave(self.lost)
        if self.files is not None:
            self.note(engine.batch, has_log=False)
            self.files = None  # SQLite itself removes the log now, and a daemon that starts may make us look
        await store.close()
        if not log_of(store.path).exists():
            self.note(self._lock.info.batch, has_log=False)

    def note(self, batch: int, *, has_log: bool) -> None:
        """Records how far the database is by itself, and whether it has a log."""
        try:
            self._lock.note(batch, has_log=has_log)
        except OSError as error:
            log.warning("cannot write the lock file: %s", error)

    def _leave(self, why: str | None) -> NoReturn:
        """Ends the process without closing the database: SQLite would remove, by its name, a log that is not ours."""
        log.critical("%s: leaving", why)
        self._lock.leave_word()
        logging.shutdown()
        os._exit(1)

    def _stop(self, lost: str) -> None:
        self.lost = lost
        self.stopping.set()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

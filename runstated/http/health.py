"""Whether the daemon can do its work: a real write and a real read."""

from __future__ import annotations

import asyncio
import sqlite3

from runstated.engine.engine import Engine

FRESH_S = 1.0  # an answer this young is given again: the question needs no key, and costs an fsync
PATIENCE_S = 5.0


class Health:
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checked_at = float("-inf")
        self._trouble: str | None = None
        self._lock = asyncio.Lock()

    async def check(self) -> str | None:
        """What is wrong; None when nothing is."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._checked_at > FRESH_S:
                self._trouble = await self._look()
                self._checked_at = asyncio.get_running_loop().time()
            return self._trouble

    async def _look(self) -> str | None:
        if self._engine.trouble is not None:
            return f"writes fail: {self._engine.trouble}"
        try:
            await asyncio.wait_for(self._engine.store.write(_write), PATIENCE_S)
            await asyncio.wait_for(self._engine.store.run_read(_read), PATIENCE_S)
        except asyncio.TimeoutError:
            return f"the database has not answered within {PATIENCE_S:g} s"
        except sqlite3.Error as error:
            return f"the database fails: {error}"
        return None


def _write(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(
            "INSERT INTO counters (counter, value) VALUES (:counter, :value)"
            " ON CONFLICT (counter) DO UPDATE SET value = counters.value + 1",
            {"counter": "health", "value": 1},
        )
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _read(connection: sqlite3.Connection) -> None:
    connection.execute("SELECT value FROM counters WHERE counter = :counter", {"counter": "health"}).fetchone()

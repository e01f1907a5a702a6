"""The database beside the batches: its log is copied in time, its free pages go back to the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runstate import wire
from runstated.settings import PAGES_KEPT_MIN
from runstated.store import sqlite, upkeep
from tests.engines import life, play
from tests.store.test_sqlite import leave_free_pages


def test_the_log_of_the_database_is_looked_at_after_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "WAL_CHECKPOINT_BYTES", 200 * 1024)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            largest = 0
            for number in range(60):
                payload = '"' + "x" * 60_000 + '"'
                await it.ask("a", wire.QueuesSend(run=run, queue="q", key=str(number), input=payload, attempts=3))
                await it.engine.settle()
                largest = max(largest, it.engine.store.wal_bytes())
                await asyncio.gather(*it.engine._tasks)
            assert largest < 1024 * 1024  # the schema alone takes half of it
            assert it.engine.store.database_bytes() > 3 * 1024 * 1024

    play(story())


def test_the_file_gets_smaller_after_tidying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "SHRINK_PAUSE_S", 0)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.engine.settle()
            await asyncio.gather(*it.engine._tasks)  # of the tick at the start
            await it.engine.store.write(leave_free_pages)
            await it.engine.store.checkpoint()
            assert it.engine.store.database_bytes() > 2_000 * 4096
            await it.ask("a", wire.RunsJoin(name="short", deadline_ms=it.clock.wall_ms() + 1_000))
            await it.pass_ms(1_000)  # a tick
            await asyncio.gather(*it.engine._tasks)
            assert it.engine.store.database_bytes() < 2 * PAGES_KEPT_MIN * 4096

    play(story())

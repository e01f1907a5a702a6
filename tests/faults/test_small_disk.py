"""Six megabytes: most of it can be used, a full disk says so, and a restart works on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runstate import wire
from runstated.engine import trouble
from tests.disks import disk, fill_up
from tests.engines import Life, life, play
from tests.faults.test_trouble import is_answered

RESULT = '"' + "x" * 2_000 + '"'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "6m") as directory:
        yield directory


async def once(it: Life, run: str, key: str) -> Any:
    """A once call, to its end; None where its answer waits for room."""
    asked = it.submit("a", wire.OnceAcquire(run=run, key=key))
    if not await is_answered(it, asked):
        return None
    got = await it.answer(asked)
    if isinstance(got, wire.OnceGranted):
        asked = it.submit("a", wire.OnceComplete(run=run, key=key, token=got.token, result=RESULT))
        got = await it.answer(asked) if await is_answered(it, asked) else None
    return got


async def until_full(it: Life, run: str, prefix: str) -> int:
    """How many could be done."""
    for number in itertools.count():
        got = await once(it, run, f"{prefix}{number}")
        if got is None:
            refused = await it.ask("a", wire.OnceAcquire(run=run, key="another"))
            assert (refused.code, refused.retryable) == ("UNAVAILABLE", True)
            assert "nothing was recorded" in refused.message
            return number
        assert got == wire.OnceDone(result=RESULT)
    raise AssertionError("never full")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "RETRY_S_MIN", 0.001)
    monkeypatch.setattr(trouble, "RETRY_S_MAX", 0.01)


def test_a_small_disk_is_used_well_and_a_full_one_is_no_trap(small_disk: Path) -> None:
    """What is in the log must fit into the file, or nothing ever frees it: not the daemon, not a restart."""
    ballast = small_disk / "ballast"

    async def fill() -> int:
        async with life(small_disk / "db") as it:
            await it.session("a")
            run = await it.run_id()
            done = await until_full(it, run, "k")
            fill_up(ballast)
            return done

    async def restart(done: int) -> None:
        async with life(small_disk / "db") as it:  # with nothing free at all
            await it.session("a")
            run = await it.run_id()
            assert await once(it, run, f"k{done - 1}") == wire.OnceDone(result=RESULT)
            await until_full(it, run, "more")
            ballast.unlink()

    async def with_room(done: int) -> None:
        async with life(small_disk / "db") as it:
            await it.session("a")
            run = await it.run_id()
            assert isinstance(await once(it, run, f"k{done - 1}"), wire.OnceDone)

    done: list[int] = []

    async def story() -> None:
        done.append(await fill())
        await restart(done[0])
        await with_room(done[0])

    play(story())
    assert done[0] > 800

"""What has to be on disk before what leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.domain import sessions
from runstated.domain.numbers import Numbers
from runstated.engine import engine
from runstated.engine.entries import Opened
from runstated.store.batch import Batch
from tests.engines import Life, life, play

RELAXED = {"once.granted", "slots.granted", "jobs.granted", "released", "parked"}
PUSHES_ALSO = {"jobs.return"}  # a wish, of which nothing is on disk


def test_the_list_of_what_does_not_wait_for_the_disk_is_closed() -> None:
    kinds: list[Any] = [kind for base in (wire.Reply, wire.Push) for kind in base.__subclasses__()]
    assert len(kinds) > 30
    relaxed = {str(kind.__struct_config__.tag) for kind in kinds if kind.relaxed}
    assert relaxed - PUSHES_ALSO == RELAXED


async def local(it: Life, name: str, transport: str = "unix", process: str = "boot/ns/1/2") -> None:
    """A session of a process that the kernel tells of, or not."""
    row = sessions.Session(name, "default", name, process, 1, "python x", transport=transport)
    it.engine.submit(Opened(row, 10**6, (), wire.Welcome(protocol=1, version="test", pid=1)))
    await it.engine.settle()


def spy(it: Life, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each commit, whether it waits for the disk."""
    commits: list[bool] = []
    commit = it.engine.store.commit

    def spied(batch: Batch, *, durable: bool = True) -> None:
        commits.append(durable)
        commit(batch, durable=durable)

    monkeypatch.setattr(it.engine.store, "commit", spied)
    return commits


def story_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Any) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await local(it, "a")
            run = await it.run_id()
            await it.ask("a", wire.SlotsDeclare(pool="gpu", max=1))
            await it.ask("a", wire.QueuesDeclare(queue="q", attempts=3))
            await tell(it, run, spy(it, monkeypatch))

    play(story())


def slots(run: str, **more: Any) -> wire.SlotsAcquire:
    return wire.SlotsAcquire(run=run, pool="gpu", **more)


def test_a_grant_to_a_local_process_and_its_release_are_only_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        held = await it.ask("a", slots(run))
        waits = it.submit("a", slots(run))
        await it.engine.settle()
        assert it.told("a", wire.Parked)
        await it.ask("a", wire.Release(token=held.token))
        await it.answer(waits)
        key = await it.ask("a", wire.OnceAcquire(run=run, key="k"))
        assert not any(commits)
        await it.ask("a", wire.OnceComplete(run=run, key="k", token=key.token, result="1"))
        assert commits[-1], "a result is on disk, and all before it"

    story_of(tmp_path, monkeypatch, tell)


@pytest.mark.parametrize(("transport", "process"), [("tcp", ""), ("http", ""), ("unix", "")])
def test_a_grant_to_anybody_else_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, process: str
) -> None:
    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        await local(it, "b", transport, process)
        commits.clear()
        await it.ask("b", slots(run))
        assert commits == [True]

    story_of(tmp_path, monkeypatch, tell)


def test_a_remote_grant_of_what_a_local_process_has_released_covers_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        await local(it, "b", "tcp", "")
        commits.clear()
        held = await it.ask("a", slots(run))
        waits = it.submit("b", slots(run))
        await it.engine.settle()
        commits.clear()
        it.submit("a", wire.Release(token=held.token))
        await it.answer(waits)
        assert commits == [True]

    story_of(tmp_path, monkeypatch, tell)


def test_a_read_waits_until_what_it_may_have_seen_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        await it.ask("a", slots(run))
        assert commits == [False]
        assert (await it.ask("a", wire.SlotsGet(pool="gpu"))).used == 1
        assert commits == [False, True]
        await it.ask("a", wire.SlotsGet(pool="gpu"))
        assert commits == [False, True], "nothing has been written since"

    story_of(tmp_path, monkeypatch, tell)


def test_a_job_that_took_units_of_a_limit_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        await it.ask("a", wire.LimitsDeclare(limit="api", max=5, per_seconds=60))
        needs = wire.Needs(limits=(wire.UnitsNeeded(name="api"),))
        for key, wanted in (("plain", None), ("limited", needs)):
            await it.ask("a", wire.QueuesSend(run=run, queue="q", key=key, input="1", needs=wanted))
        admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", lease_ms=30_000, places=1),))
        for durable in (False, True):
            commits.clear()
            assert len((await it.ask("a", admit)).jobs) == 1
            assert commits == [durable]

    story_of(tmp_path, monkeypatch, tell)


def test_what_is_written_is_on_disk_a_second_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SYNC_AFTER_S", 0.01)

    async def tell(it: Life, run: str, commits: list[bool]) -> None:
        await it.ask("a", slots(run))
        while commits != [False, True]:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
        loop: Any = asyncio.get_running_loop()
        assert it.engine._sync_timer is None
        assert len([timer for timer in loop._scheduled if not timer.cancelled()]) == 1, "the story's own"

    story_of(tmp_path, monkeypatch, tell)


def test_jobs_that_were_there_when_the_power_was_cut_are_granted_when_that_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = wire.QueuesSend(run="", queue="q", key="old", input="1", attempts=3)

    async def story() -> None:
        boots = iter(("first", "second"))
        monkeypatch.setattr("runstate.presence.boot_id", lambda: next(boots))
        async with life(tmp_path / "db") as it:
            await local(it, "a")
            run = await it.run_id()
            await it.ask("a", msgspec.structs.replace(send, run=run))
            monkeypatch.setattr(Numbers, "end", lambda self: None)  # as when the power is cut
        async with life(tmp_path / "db") as it:
            await local(it, "a")
            await it.ask("a", msgspec.structs.replace(send, run=run, key="new"))
            commits = spy(it, monkeypatch)
            admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", lease_ms=30_000, places=1),))
            assert [(await it.ask("a", admit)).jobs[0].key for _ in range(2)] == ["old", "new"]
            assert commits == [True, False]

    play(story())

"""A real engine while its disk refuses: what it takes, refuses and says, and that it recovers by itself."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiosqlite
import msgspec
import pytest

from runstate import wire
from runstated.domain.access import Access
from runstated.engine import trouble
from runstated.engine.entries import Away
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed
from tests.disks import disk, fill_up
from tests.engines import Life, life, play
from tests.harness import Connection, nothing

LEASE_MS = 30_000


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "RETRY_S_MIN", 0.001)
    monkeypatch.setattr(trouble, "RETRY_S_MAX", 0.01)


class Fault:
    """Makes statements fail."""

    def __init__(self, matches: Callable[[str], bool], times: int) -> None:
        self.matches, self.times = matches, times
        self.failed = 0

    def __call__(self, sql: str) -> None:
        if self.matches(sql) and self.failed < self.times:
            self.failed += 1
            raise sqlite3.OperationalError("disk I/O error")


def is_commit(sql: str) -> bool:
    return sql == "COMMIT"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Every connection of the store asks these before and after each statement."""
    connect = aiosqlite.connect
    monkeypatch.setattr(aiosqlite, "connect", lambda *args, **more: connect(*args, factory=Connection, **more))
    hooks: dict[str, Any] = {"before": nothing, "after": nothing}
    monkeypatch.setattr(Connection, "before", lambda self, sql: hooks["before"](sql))
    monkeypatch.setattr(Connection, "after", lambda self, sql: hooks["after"](sql))
    yield hooks
    hooks.update(before=nothing, after=nothing)


async def until(true: Callable[[], Any]) -> None:
    # The engine tells nobody when it has recovered.
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def recovered(it: Life) -> None:
    await until(lambda: it.engine.trouble is None)
    await it.engine.settle()


def held(it: Life) -> list[int]:
    """The tokens of the leases that live."""
    return list(it.engine.spaces.of("default").holds.of_token)


async def on_disk(it: Life, sql: str) -> list[tuple[Any, ...]]:
    return await it.engine.store.run_read(lambda connection: connection.execute(sql).fetchall())


# ------------------------------------------------------------------ a commit fails


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_decided_is_told_when_it_is_written(
    tmp_path: Path, quick: None, faulty: dict[str, Any], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            for name in "abc":
                await it.session(name)
            run = await it.run_id()
            first = await it.ask("a", wire.OnceAcquire(run=run, key="first"))
            waits = it.submit("b", wire.OnceAcquire(run=run, key="first"))
            await it.engine.settle()
            faulty[when] = fault = Fault(is_commit, 3)
            request = wire.OnceAcquire(run=run, key="k")
            key = it.submit("a", request)
            await until(lambda: fault.failed)
            done = it.submit("a", wire.OnceComplete(run=run, key="first", token=first.token, result="1"))
            refused = it.submit("b", wire.RunsJoin(name="another"))
            reply = await it.answer(refused)
            assert (reply.code, reply.retryable) == ("UNAVAILABLE", True)
            assert "cannot write to its database" in reply.message
            assert key not in it.out.replies
            it.die("c")
            await recovered(it)
            assert fault.failed == 3
            granted = await it.answer(key)
            assert await it.answer(done) == await it.answer(waits) == wire.OnceDone(result="1")
            assert await it.again(key, msgspec.structs.replace(request, again=True)) == granted
            assert held(it) == [token for (token,) in await on_disk(it, "SELECT token FROM leases")] == [granted.token]
            assert list(it.engine.spaces.of("default").lines.sessions) == ["a", "b"]

    play(run())
    assert [record.message for record in caplog.records if record.name == "runstated.engine.trouble"] == [
        "writes fail: disk I/O error",
        "writes work again",
    ]


def test_a_repeat_of_what_is_held_attaches_to_it(tmp_path: Path, quick: None, faulty: dict[str, Any]) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            faulty["before"] = fault = Fault(is_commit, 10**9)
            request = wire.OnceAcquire(run=run, key="k")
            key = it.submit("a", request)
            await until(lambda: fault.failed)
            it.engine.ask("a", Access(), key[1], msgspec.structs.replace(request, again=True))
            await until(lambda: fault.failed > 3)
            assert key not in it.out.replies
            fault.times = 0
            await recovered(it)
            assert isinstance(await it.answer(key), wire.OnceGranted)

    play(run())


def test_a_caller_that_has_gone_meanwhile_gives_back_what_it_was_granted(
    tmp_path: Path, quick: None, faulty: dict[str, Any]
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            faulty["before"] = fault = Fault(is_commit, 10**9)
            key = it.submit("a", wire.OnceAcquire(run=run, key="k"))
            await until(lambda: fault.failed)
            it.engine.cancel(*key)
            fault.times = fault.failed + 2
            await recovered(it)
            assert held(it) == await on_disk(it, "SELECT token FROM leases") == []
            assert key not in it.out.replies

    play(run())


def test_what_the_daemon_itself_has_to_do_is_done_when_it_can_be_written(
    tmp_path: Path, quick: None, faulty: dict[str, Any]
) -> None:
    async def tell() -> None:
        async with life(tmp_path / "db") as it:
            for name in "abc":
                await it.session(name)
            run = await it.run_id()
            for name in "ab":
                await it.ask(name, wire.OnceAcquire(run=run, key=name))
            waits = [it.submit("c", wire.OnceAcquire(run=run, key=key)) for key in "ab"]
            await it.engine.settle()
            fault = faulty["before"] = Fault(is_commit, 4)
            it.die("a")
            it.engine.submit(Away("c", True))
            await until(lambda: fault.failed >= 2)
            it.engine.submit(Away("c", False))
            await recovered(it)
            assert fault.failed == 4
            assert isinstance(await it.answer(waits[0]), wire.OnceGranted)
            assert it.engine.spaces.of("default").lines.sessions == {"b": False, "c": False}
            await it.pass_ms(LEASE_MS - 1)
            it.engine.beat("c", [it.out.replies[waits[0]][0].token])
            fault = faulty["before"] = Fault(is_commit, 3)
            await it.pass_ms(1)
            await until(lambda: fault.failed == 3)
            await recovered(it)
            assert isinstance(await it.answer(waits[1]), wire.OnceGranted)

    play(tell())


def test_a_deadline_that_came_while_writes_failed_is_kept(tmp_path: Path, quick: None, faulty: dict[str, Any]) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            deadline = it.clock.wall_ms() + 1_000
            await it.ask("a", wire.RunsJoin(name="short", deadline_ms=deadline))
            fault = faulty["before"] = Fault(is_commit, 2)
            await it.pass_ms(1_000)
            await until(lambda: fault.failed == 2)
            await recovered(it)
            assert [push.state for push in it.told("a", wire.RunEnded)] == ["expired"]

    play(run())


def test_leases_stand_while_writes_fail(tmp_path: Path, quick: None, faulty: dict[str, Any]) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", wire.OnceAcquire(run=run, key="k"))).token
            faulty["before"] = fault = Fault(is_commit, 10**9)
            joins = it.submit("a", wire.RunsJoin(name="x"))
            await until(lambda: fault.failed)
            it.clock.pass_ms(10 * LEASE_MS)
            fault.times = 0
            await recovered(it)
            await it.answer(joins)
            assert token in held(it)
            await it.pass_ms(LEASE_MS)
            assert held(it) == []

    play(run())


def test_a_connection_that_is_of_no_use_is_opened_anew_until_that_works(
    tmp_path: Path, quick: None, faulty: dict[str, Any]
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            await on_disk(it, "SELECT 1")  # what is read at the start has been
            faulty["before"] = fault = Fault(lambda sql: sql in ("COMMIT", "ROLLBACK") or "busy_timeout" in sql, 7)
            key = it.submit("a", wire.OnceAcquire(run=run, key="k"))
            await until(lambda: fault.failed == 7)
            await recovered(it)
            assert isinstance(await it.answer(key), wire.OnceGranted)

    play(run())


# ------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "4m") as directory:
        yield directory


def test_a_full_disk_refuses_writes_and_the_daemon_recovers_by_itself(
    small_disk: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(small_disk / "db") as it:
            ballast = small_disk / "ballast"
            ballast.write_bytes(b"x" * 1_000_000)
            more = small_disk / "more"
            await full_disk(it, lambda: fill_up(more), lambda: make_room(ballast, more))

    play(run())
    check_log(caplog)


def test_a_database_that_may_not_grow_refuses_writes_and_recovers_by_itself(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as it:

            async def set_limit(pages: str) -> None:
                await it.engine.store.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())

            (pages,) = await it.engine.store.write(lambda c: c.execute("PRAGMA page_count").fetchone())
            await set_limit(str(pages + 200))
            await full_disk(it, lambda: None, lambda: set_limit("1000000"))

    play(run())
    check_log(caplog)


async def full_disk(it: Life, fill: Callable[[], object], make_room: Callable[[], Awaitable[None] | None]) -> None:
    await it.session("a")
    run = await it.run_id()
    token = (await it.ask("a", wire.OnceAcquire(run=run, key="k"))).token
    sent = []
    for number in itertools.count():
        send = wire.QueuesSend(run=run, queue="q", key=str(number), input='"' + "x" * 60_000 + '"', attempts=3)
        last = it.submit("a", send)
        if not await is_answered(it, last):
            fill()
            if not await is_answered(it, last):
                break
        sent.append((await it.answer(last)).job)
    it.clock.pass_ms(10 * LEASE_MS)
    other = wire.QueuesSend(run=run, queue="q", key="other", input="1", attempts=3)
    for _ in range(3):
        reply = await it.ask("a", other)
        assert (reply.code, reply.retryable) == ("UNAVAILABLE", True)
    seen = await it.ask("a", wire.StatusGet())
    assert seen.queues[0].counts == {"ready": len(sent) + 1}, "with the one that is held"
    assert last not in it.out.replies
    room = make_room()
    if room is not None:
        await room
    await recovered(it)
    assert token in held(it)
    sent.append((await it.answer(last)).job)
    assert (await it.ask("a", other)).state == "ready"
    rows = await on_disk(it, "SELECT job FROM jobs ORDER BY age")
    assert [job for (job,) in rows[:-1]] == sent


async def is_answered(it: Life, key: tuple[str, int]) -> bool:
    """Whether it is, or waits for a disk that has refused three times since."""
    store, failed = it.engine.store, 0
    commit_again = store.commit_again

    async def counted(batch: Batch) -> None:
        nonlocal failed
        try:
            await commit_again(batch)
        except (CommitFailed, sqlite3.Error):
            failed += 1
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit_again", counted)
        await until(lambda: key in it.out.replies or failed > 3)
    return key in it.out.replies


def make_room(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    said = [record.message for record in caplog.records if record.name == "runstated.engine.trouble"]
    assert len([line for line in said if line.startswith("writes fail")]) <= 3, "a storm of one error"
    assert said[-1] == "writes work again"

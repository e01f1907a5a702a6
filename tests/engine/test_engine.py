from __future__ import annotations

import asyncio
import itertools
import socket
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.domain import nouns as dispatch
from runstated.domain import sessions
from runstated.domain.access import Access
from runstated.domain.core import Core
from runstated.domain.waits import Settled
from runstated.engine import engine, outbox, turns
from runstated.engine.cache import Cache
from runstated.engine.entries import Ask, Away, Ended, Opened
from runstated.engine.retention import EVENTS_KEPT_MS, LOOK_EACH_MS
from runstated.engine.turns import Turns
from tests.clock import ManualClock
from tests.daemons import PATIENCE_S
from tests.engines import Life, life, play

LEASE_MS = 30_000


class Stopped:
    """As while a commit is under way on another thread: what is submitted meanwhile comes into one turn."""

    def __init__(self, it: Life) -> None:
        self._engine = it.engine

    async def __aenter__(self) -> Stopped:
        await self._engine.settle()
        self._engine._is_busy = True
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._engine._is_busy = False
        self._engine._schedule()


def acquire(run: str, key: str = "k", **more: Any) -> wire.OnceAcquire:
    return wire.OnceAcquire(run=run, key=key, **more)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What each turn is given to run."""
    given: list[list[Any]] = []
    run = Turns.run

    def spied(self: Turns, entries: Sequence[Any]) -> int:
        given.append(list(entries))
        return run(self, entries)

    monkeypatch.setattr(Turns, "run", spied)
    return given


def core_of(it: Life) -> Core:
    return it.engine.spaces.of("default")


# ------------------------------------------------------------------ the cache


def test_a_settled_result_is_answered_without_the_database_until_its_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.ask("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
            await it.engine.settle()
            async with Stopped(it):
                assert await it.ask("a", acquire(run)) == wire.OnceDone(result="1")
                other = it.submit("a", acquire(run), space="other")
            assert (await it.answer(other)).code == "NOT_FOUND"
            await it.ask("a", wire.RunsEnd(run=run, state="stopped"))
            assert (await it.ask("a", acquire(run))).code == "SCOPE_CANCELLED"

    play(story())


def test_a_settled_result_is_no_answer_after_the_deadline_before_any_tick(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            join = wire.RunsJoin(name="short", deadline_ms=it.clock.wall_ms() + 1_000)
            run = (await it.ask("a", join)).run
            token = (await it.ask("a", acquire(run))).token
            await it.ask("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
            await it.engine.settle()
            it.clock._move(1_000)  # no alarm rings
            assert (await it.ask("a", acquire(run))).code == "DEADLINE_EXCEEDED"

    play(story())


def test_a_result_read_back_after_a_restart_is_cached_too(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.ask("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.ask("a", acquire(run))
            await it.engine.settle()
            async with Stopped(it):
                assert await it.ask("a", acquire(run)) == wire.OnceDone(result="1")

    play(story())


def test_the_cache_drops_the_least_used_first_and_counts_what_it_keeps() -> None:
    cache = Cache(bytes_max=3 * 400)
    keys = [Settled("default", "r", key) for key in "abcd"]
    for key in keys[:3]:
        cache.put(key, None, b"x" * 90)
    assert cache.get(keys[0], 0) is not None
    cache.put(keys[3], None, b"x" * 90)
    assert [cache.get(key, 0) is not None for key in keys] == [True, False, True, True]
    cache.put(keys[3], None, b"another")
    assert cache.get(keys[3], 0) == b"x" * 90
    cache.drop("r")
    assert (cache._bytes, len(cache._bodies), cache._of_run) == (0, 0, {})
    cache.put(keys[0], None, b"x" * 5_000)
    assert cache.get(keys[0], 0) is None, "larger than the whole cache"


# ------------------------------------------------------------------ batches


def test_what_waits_goes_into_one_batch_and_what_gives_back_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    monkeypatch.setattr(turns, "TURN_MS", 60_000)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.session("b")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.engine.settle()
            async with Stopped(it):
                batches.clear()
                waits = it.submit("b", acquire(run))
                it.engine._want_tick()
                done = it.submit("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
                it.engine.cancel("b", 999)
                it.engine.acknowledge("b", (1,))
            assert await it.answer(waits) == wire.OnceDone(result="1")
            assert it.out.order.index(done) < it.out.order.index(waits)
            (last,) = [entries for entries in batches if len(entries) > 1]
            kinds = [type(entry.request if isinstance(entry, Ask) else entry).__name__ for entry in last]
            assert kinds == ["OnceComplete", "Tick", "OnceAcquire", "Cancelled", "Acked"]

    play(story())


def test_a_batch_takes_no_more_than_its_bound_and_what_is_left_keeps_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    monkeypatch.setattr(engine, "BATCH_REQUESTS_MAX", 4)
    monkeypatch.setattr(turns, "TURN_MS", 60_000)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            await it.engine.settle()
            batches.clear()
            async with Stopped(it):
                keys = [
                    it.submit("a", wire.QueuesSend(run=run, queue="q", key=str(n), input="1", attempts=3))
                    for n in range(11)
                ]
            await it.out.until(*keys)
            assert [len(entries) for entries in batches] == [4, 4, 3]
            rows = await it.engine.store.run_read(lambda c: c.execute("SELECT key FROM jobs ORDER BY age").fetchall())
            assert [key for (key,) in rows] == [str(n) for n in range(11)]

    play(story())


def test_a_batch_whose_time_is_over_gives_the_rest_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_MS", 0)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            async with Stopped(it):
                keys = [
                    it.submit("a", wire.QueuesSend(run=run, queue="q", key=str(n), input="1", attempts=3))
                    for n in range(9)
                ]
                keys.append(it.submit("a", wire.Release(token=99)))
                it.engine._want_tick()
            await it.out.until(*keys)
            assert [key for key in it.out.order if key in keys[:9]] == keys[:9]

    play(story())


# ------------------------------------------------------------------ reads


def test_a_read_that_fails_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(core: Core, request: wire.RunsGet) -> Any:
        raise {"disk": sqlite3.OperationalError("disk I/O error"), "ours": AssertionError("ours")}[request.run]

    monkeypatch.setattr(dispatch, "VERBS", {**dispatch.VERBS, wire.RunsGet: fails})

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            disk, ours = await it.ask("a", wire.RunsGet(run="disk")), await it.ask("a", wire.RunsGet(run="ours"))
            assert (disk.code, disk.retryable) == ("UNAVAILABLE", True)
            assert (ours.code, ours.retryable) == ("INTERNAL", False)

    play(story())
    assert "AssertionError" in caplog.text


# ------------------------------------------------------------------ many waiters


def test_ten_thousand_waiters_of_one_result_are_answered_in_slices(tmp_path: Path) -> None:
    many = 10_000

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            waits = [it.submit("a", acquire(run)) for _ in range(many)]
            await it.engine.settle()
            assert len(core_of(it).lines.calls) == many
            looks: list[int] = []
            done = False

            async def count_turns() -> None:
                while not done:
                    looks.append(len(it.out.order))
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count_turns())
            it.submit("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
            await it.out.until(*waits)
            done = True
            await counting
            steps = [after - before for before, after in itertools.pairwise(looks)]
            assert max(steps) <= outbox.SLICE + 1
            assert not core_of(it).lines.calls
            assert all(it.out.replies[key] == [wire.OnceDone(result="1")] for key in waits)

    play(story())


# ------------------------------------------------------------------ the gate


def test_after_a_restart_lines_are_formed_by_the_old_arrival_numbers(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in "abc":
                await it.session(name)
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            waits = {name: it.submit(name, acquire(run)) for name in "bc"}
            await it.engine.settle()
            parked = {name: it.told(name, wire.Parked)[0] for name in "bc"}
        async with life(tmp_path / "db") as it:
            it.engine.hold_back()
            for name in "abc":
                await it.session(name)
            await it.session("new")
            new = it.submit("new", acquire(run, again=True, ticket=1, proof=parked["b"].proof))

            def repeat(name: str) -> tuple[str, int]:
                again = acquire(run, again=True, ticket=parked[name].ticket, proof=parked[name].proof)
                it.engine.ask(name, Access(), waits[name][1], again)
                return waits[name]

            second = repeat("c")
            gone = it.submit("new", acquire(run))
            it.engine.cancel(*gone)
            first = repeat("b")
            await it.ask("a", wire.RunsJoin(name="who does not wait passes"))
            assert not core_of(it).lines.calls
            await it.ask("a", wire.Release(token=token))
            it.engine.open_lines()
            assert isinstance(await it.answer(first), wire.OnceGranted)
            await it.engine.settle()
            order = [call.key for call in core_of(it).lines.line(("once", run, "k"))]
            assert order == [second, new]
            it.engine.open_lines()

    play(story())


def test_what_is_held_back_is_made_where_its_caller_says_by_then(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in "ab":
                await it.session(name)
            run = await it.run_id()
            x, y = [(await it.ask(name, acquire(run, key))).token for name, key in (("a", "x"), ("b", "y"))]
            it.engine.hold_back()
            task = it.submit("a", acquire(run, "y", inherited=(x,)))
            closes = it.submit("b", acquire(run, "x", within=(y,)))
            it.engine.nest("a", wire.Nested(call=task[1], within=(x,)))
            await it.engine.settle()
            it.engine.open_lines()
            assert (await it.answer(closes)).code == "DEADLOCK"

    play(story())


def test_arrival_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        tickets = []
        for _ in range(3):
            async with life(tmp_path / "db") as it:
                await it.session("a")
                run = await it.run_id()
                await it.ask("a", acquire(run, wait_ms=0))
                it.submit("a", acquire(run))
                await it.engine.settle()
                tickets += [push.ticket for push in it.told("a", wire.Parked)]
        assert tickets == sorted(set(tickets))
        assert tickets[0] < tickets[1] < tickets[2] < 2**53

    play(story())


def test_what_was_held_back_of_a_session_that_died_gets_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            it.engine.hold_back()
            key = it.submit("a", acquire(run))
            it.die("a")
            it.engine.open_lines()
            assert (await it.answer(key)).code == "UNAVAILABLE"
            assert not core_of(it).holds.of_token

    play(story())


def test_what_a_session_asked_before_it_died_gets_nothing_though_its_death_came_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            async with Stopped(it):
                key = it.submit("a", acquire(run))
                it.die("a")
            await it.answer(key)
            await it.engine.settle()
            assert not core_of(it).holds.of_token
            assert not core_of(it).lines.sessions

    play(story())


def test_sessions_of_the_last_life_are_known_and_away(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            await it.ask("a", acquire(run))
        async with life(tmp_path / "db") as it:
            assert [known.session for known in it.engine.known] == ["a"]
            assert core_of(it).lines.sessions == {"a": True}
            assert len(core_of(it).holds.of_token) == 1
            it.engine.submit(Ended("a", "died"))
            await it.engine.settle()
            assert not core_of(it).holds.of_token

    play(story())


# ------------------------------------------------------------------ beats


def test_a_beat_renews_and_tells_of_what_is_not_held(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.session("b")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.engine.settle()
            await it.pass_ms(LEASE_MS - 1)
            it.engine.beat("a", [token, 99])
            it.engine.beat("b", [token])
            assert [push.token for push in it.told("a", wire.LeaseLost)] == [99]
            assert [push.token for push in it.told("b", wire.LeaseLost)] == [token]
            await it.pass_ms(LEASE_MS - 1)
            assert token in core_of(it).holds.of_token
            await it.pass_ms(1)
            assert [push.token for push in it.told("a", wire.LeaseLost)] == [99, token]

    play(story())


def test_a_beat_beside_the_batch_that_ends_its_lease_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.engine.settle()
            async with Stopped(it):
                it.submit("a", wire.Release(token=token))
                await asyncio.sleep(0)
            it.engine.beat("a", [token])
            await it.engine.settle()
            it.engine.beat("a", [token])
            assert {push.token for push in it.told("a", wire.LeaseLost)} == {token}

    play(story())


# ------------------------------------------------------------------ waits end


def test_a_wait_ends_in_time_and_a_cancelled_one_is_not_answered(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.session("b")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run, lease_ms=600_000))).token
            late, cancelled = it.submit("b", acquire(run, wait_ms=5_000)), it.submit("b", acquire(run))
            await it.engine.settle()
            it.engine.cancel(*cancelled)
            await it.pass_ms(4_999)
            assert late not in it.out.replies
            await it.pass_ms(1)
            assert await it.answer(late) == wire.OnceHeld()
            await it.ask("a", wire.Release(token=token))
            await it.engine.settle()
            assert cancelled not in it.out.replies
            assert not core_of(it).holds.of_token

    play(story())


def test_a_cancel_that_overtakes_nothing_gives_back_what_was_granted(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            async with Stopped(it):
                key = it.submit("a", acquire(run))
                it.engine.cancel(*key)
            await it.engine.settle()
            assert not core_of(it).holds.of_token
            assert isinstance(await it.ask("a", acquire(run)), wire.OnceGranted)

    play(story())


def test_a_session_that_is_away_gets_its_answer_when_it_asks_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.session("b")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            key = it.submit("b", acquire(run))
            it.engine.submit(Away("b", True))
            await it.engine.settle()
            await it.ask("a", wire.Release(token=token))
            await it.engine.settle()
            assert key not in it.out.replies
            it.engine.submit(Away("b", False))
            granted = await it.answer(key)
            assert await it.again(key, acquire(run, again=True)) == granted

    play(story())


# ------------------------------------------------------------------ life


def test_close_finishes_what_was_submitted(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            sends = [wire.QueuesSend(run=run, queue="q", key=str(n), input="1", attempts=3) for n in range(600)]
            keys = [it.submit("a", send) for send in sends]
        assert all(it.out.replies[key][0].state == "ready" for key in keys)  # type: ignore[attr-defined]
        async with life(tmp_path / "db") as it:
            await it.session("a")
            seen = await it.ask("a", wire.StatusGet())
            assert seen.queues[0].counts == {"ready": 600}

    play(story())


def test_close_finishes_what_was_held_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            it.engine.hold_back()
            key = it.submit("a", acquire(run))
        assert isinstance(it.out.replies[key][0], wire.OnceGranted)

    play(story())


def test_an_idle_engine_arms_no_alarm_and_no_timer(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            await it.engine.settle()
            assert it.clock.next_alarm_ms() == LEASE_MS
            await it.ask("a", wire.OnceComplete(run=run, key="k", token=token, result="1"))
            await it.engine.settle()
            assert it.clock.next_alarm_ms() == LOOK_EACH_MS, "one look at what is old"
            await it.pass_ms(LOOK_EACH_MS)
            assert it.clock.next_alarm_ms() == EVENTS_KEPT_MS - LOOK_EACH_MS, "the oldest event, in a month"
            loop: Any = asyncio.get_running_loop()
            patience = [timer for timer in loop._scheduled if not timer.cancelled()]
            assert len(patience) == 1, "the story's own"

    play(story())


def test_deadlines_ring_the_wall_alarm(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.ask("a", wire.RunsJoin(name="short", deadline_ms=it.clock.wall_ms() + 60_000))
            await it.engine.settle()
            it.clock.suspend(60_000)
            for _ in range(4):
                await asyncio.sleep(0)
            await it.engine.settle()
            assert [push.state for push in it.told("a", wire.RunEnded)] == ["expired"]

    play(story())


def test_what_has_arrived_is_read_before_leases_lapse(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            tokens = [(await it.ask("a", acquire(run, key))).token for key in ("beaten", "silent")]
            await it.engine.settle()
            loop = asyncio.get_running_loop()
            ours, theirs = socket.socketpair()
            loop.add_reader(ours, lambda: (ours.recv(1), it.engine.beat("a", tokens[:1])))
            theirs.send(b"b")
            it.clock.pass_ms(LEASE_MS)
            assert not it.engine._tick_wanted, "the sockets come first"
            await asyncio.sleep(0)
            for _ in range(4):
                await asyncio.sleep(0)
            await it.engine.settle()
            assert list(core_of(it).holds.of_token) == tokens[:1]
            loop.remove_reader(ours)
            ours.close()
            theirs.close()

    play(story())


def test_a_request_that_is_read_before_the_alarm_rings_ends_no_lease_after_a_sleep(tmp_path: Path) -> None:
    """Whoever looks at the lease clock first after a sleep takes it out, or it would have told a time too late."""

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            await it.session("b")
            run = await it.run_id()
            token = (await it.ask("a", acquire(run))).token
            waits = it.submit("b", acquire(run, wait_ms=4_000))
            await it.engine.settle()
            it.clock._move(10 * LEASE_MS)  # and no alarm has rung yet
            await it.ask("b", wire.RunsJoin(name="other"))
            it.engine._want_tick()
            await it.pass_ms(3_999)
            assert list(core_of(it).holds.of_token) == [token]
            assert waits not in it.out.replies
            await it.pass_ms(1)
            assert await it.answer(waits) == wire.OnceHeld()

    play(story())


def test_a_tick_that_is_due_again_and_again_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tidying after a large run goes on for a while, and each step may take longer than a batch is to take."""

    def slow(core: Core) -> int:
        time.sleep(0.02)
        return core.now_ms

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "TICKS", (slow,))
                core_of(it).due(0)
                it.engine._want_tick()
                for number in range(10):
                    await asyncio.wait_for(it.ask("a", wire.RunsJoin(name=f"{number}")), PATIENCE_S)

    play(story())


def test_two_lives_of_a_daemon_never_give_one_token_twice(tmp_path: Path) -> None:
    async def story() -> None:
        tokens = []
        for _ in range(3):
            async with life(tmp_path / "db", ManualClock()) as it:
                await it.session("a")
                run = await it.run_id()
                token = (await it.ask("a", acquire(run))).token
                await it.ask("a", wire.Release(token=token))
                tokens.append(token)
        assert len(set(tokens)) == 3

    play(story())


def test_who_has_just_lost_its_connection_is_given_nothing_of_what_is_freed_in_the_same_batch(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in "abc":
                await it.session(name)
            run = await it.run_id()
            held = await it.ask("a", wire.SlotsAcquire(run=run, pool="gpu", max=1))
            first = it.submit("b", wire.SlotsAcquire(run=run, pool="gpu"))
            second = it.submit("c", wire.SlotsAcquire(run=run, pool="gpu"))
            await it.engine.settle()
            it.submit("a", wire.Release(token=held.token))
            it.engine.submit(Away("b", True))
            assert isinstance(await it.answer(second), wire.SlotsGranted)
            assert first not in it.out.replies

    play(story())


def test_a_session_that_has_come_lost_its_connection_and_come_back_in_one_batch_is_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            it.engine.submit(Away("a", True))
            it.engine.submit(Away("a", False))
            it.engine.submit(Away("a", True))
            it.engine.submit(Away("a", False))
            await it.engine.settle()
            assert core_of(it).lines.sessions == {"a": False}
            it.engine.submit(Away("a", False))
            it.engine.submit(Away("a", True))
            await it.engine.settle()
            assert core_of(it).lines.sessions == {"a": True}

    play(story())


def test_a_session_that_came_and_died_in_one_batch_is_gone_and_was_given_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            row = sessions.Session("x", "default", "w", "", 1, "python x")
            it.engine.submit(Opened(row, 1_000, (), wire.Welcome(protocol=1, version="test", pid=1)))
            it.submit("x", wire.SlotsAcquire(run=run, pool="gpu", max=1))
            it.die("x")
            await it.engine.settle()
            assert core_of(it).lines.sessions == {"a": False}
            assert not core_of(it).holds.of_token

    play(story())


# ------------------------------------------------------------------ commits


def test_a_long_commit_is_taken_out_of_the_lease_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            before = it.clock.lease_ms()
            commit = it.engine.store.commit

            def slow(*batch: Any, **how: Any) -> None:
                it.clock._move(5_000)
                commit(*batch, **how)

            monkeypatch.setattr(it.engine.store, "commit", slow)
            await it.ask("a", wire.RunsJoin(name="job"))
            monkeypatch.undo()
            assert it.clock.lease_ms() < before + 5_000

    play(story())


def test_while_syncs_are_slow_commits_run_aside_and_the_next_turn_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = spy(monkeypatch)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            monkeypatch.setattr(it.engine.store, "is_slow", lambda: True)
            first = it.submit("a", acquire(run, "1"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert it.engine._is_busy
            given.clear()
            rest = [it.submit("a", acquire(run, key)) for key in "23"]
            await it.out.until(first, *rest)
            assert len(given[0]) == 2

    play(story())


def test_a_status_is_completed_by_whoever_knows_the_rest(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            it.engine.overview(lambda view, space, limit: msgspec.structs.replace(view, more=(space, str(limit))))
            assert (await it.ask("a", wire.StatusGet(limit=7))).more == ("default", "7")

    play(story())

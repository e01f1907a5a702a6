"""Who comes into a batch: each session has its turn, whatever another one sends; and what waits is always counted."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from runstate import wire
from runstated.engine import engine, trouble, turns
from runstated.engine.arrivals import SENT
from runstated.engine.entries import Away, Ended
from runstated.settings import WAITING_PER_SESSION_MAX
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed, Database
from tests.engines import Life, life, play

NEVER_GIVEN = 10**15  # a token


@pytest.mark.parametrize(
    "loud", [wire.Release(token=NEVER_GIVEN), wire.RunsJoin(name="loud")], ids=["gives back", "asks"]
)
@pytest.mark.parametrize(
    "quiet", [wire.Release(token=NEVER_GIVEN), wire.RunsJoin(name="quiet")], ids=["gives back", "asks"]
)
def test_a_flood_of_one_session_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loud: wire.Request[Any], quiet: wire.Request[Any]
) -> None:
    """Whatever kind of request both send, and though each takes as long as a whole batch should."""
    monkeypatch.setattr(turns, "TURN_MS", 0)
    monkeypatch.setattr(engine, "BATCH_REQUESTS_MAX", 4)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in ("loud", "quiet"):
                await it.session(name)
            for _ in range(50):
                it.submit("loud", loud)
            await asyncio.sleep(0)
            asked = it.submit("quiet", quiet)
            await it.answer(asked)
            assert it.out.order.index(asked) <= 2 + 4, "the hellos, and what had its turn before"

    play(story())


def test_a_flood_of_gives_does_not_hold_up_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_MS", 0)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in ("loud", "a", "b"):
                await it.session(name)
            run = await it.run_id("a")
            await it.ask("a", wire.OnceAcquire(run=run, key="k", lease_ms=60_000))
            waits = it.submit("b", wire.OnceAcquire(run=run, key="k", wait_ms=1_000))
            await it.engine.settle()
            flood = [it.submit("loud", wire.Release(token=NEVER_GIVEN)) for _ in range(50)]
            it.clock.pass_ms(1_000)
            assert isinstance(await it.answer(waits), wire.OnceHeld)
            assert flood[10] not in it.out.replies
            await it.out.until(flood[-1])

    play(story())


def test_an_outcome_that_waits_for_its_turn_keeps_its_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id("a")
            granted = await it.ask("a", wire.OnceAcquire(run=run, key="k", lease_ms=5_000))
            it.clock.pass_ms(4_900)
            asked = [it.submit("a", wire.Release(token=NEVER_GIVEN)) for _ in range(4)]
            asked.append(it.submit("a", wire.OnceComplete(run=run, key="k", token=granted.token, result="1")))
            monkeypatch.setattr(turns, "TURN_MS", 0)
            it.clock.pass_ms(200)
            it.engine._want_tick()
            assert await it.answer(asked[-1]) == wire.OnceDone(result="1")

    play(story())


@pytest.mark.parametrize("seed", range(6))
def test_what_waits_of_each_session_is_counted_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A session whose count stays too high would be read no further, for ever."""
    rng = random.Random(seed)
    commit = Database.commit

    def may_fail(self: Database, batch: Batch, *, durable: bool = True) -> None:
        monkeypatch.setattr(turns, "TURN_MS", rng.choice((0, 10)))
        if rng.random() < 0.2:
            raise CommitFailed(sqlite3.OperationalError("disk I/O error"), took_place=False)
        commit(self, batch, durable=durable)

    def adds_up(it: Life) -> None:
        here = Counter(entry.session for entry in it.engine._arrivals.entries() if isinstance(entry, SENT))
        assert it.engine.pressure._waiting == here

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            for name in "abc":
                await it.session(name)
            run = await it.run_id("a")
            monkeypatch.setattr(Database, "commit", may_fail)
            monkeypatch.setattr(trouble, "RETRY_S_MIN", 0.01)
            monkeypatch.setattr(trouble, "RETRY_S_MAX", 0.01)
            sent = []
            for _ in range(300):
                step(it, rng, run, sent)
                adds_up(it)
                for _ in range(rng.choice((0, 0, 1, 5))):
                    await asyncio.sleep(0)
                    adds_up(it)
            monkeypatch.setattr(Database, "commit", commit)
            it.engine.open_lines()
            it.engine._want_tick()
            while it.engine.trouble is not None:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
            await it.engine.settle()
            assert it.engine.pressure._waiting == {}

    play(story())


def step(it: Life, rng: random.Random, run: str, sent: list[tuple[str, int]]) -> None:
    session = rng.choice("abc")
    kind = rng.randrange(12)
    if kind <= 3:
        wait_ms = rng.choice((0, None, 1_000))
        sent.append(it.submit(session, wire.OnceAcquire(run=run, key=str(rng.randrange(4)), wait_ms=wait_ms)))
    elif kind == 4:
        sent.append(it.submit(session, wire.RunsJoin(name="x")))
    elif kind == 5:
        sent.append(it.submit(session, wire.Release(token=rng.choice((1, 2, 3, NEVER_GIVEN)))))
    elif kind == 6 and sent:
        it.engine.cancel(*rng.choice(sent))
    elif kind == 7:
        it.engine.acknowledge(session, (1, 2))
    elif kind == 8:
        it.engine.submit(Away(session, rng.random() < 0.5))
    elif kind == 9 and not it.engine._arrivals.is_gate_closed:
        it.engine.hold_back()
    elif kind == 10:
        it.engine.open_lines()
    elif kind == 11 and session == "c" and rng.random() < 0.1:
        it.engine.submit(Ended(session, "died"), first=True)


def test_calls_that_are_given_up_behind_the_gate_count_no_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id("a")
            it.engine.hold_back()
            waits = [it.submit("a", wire.OnceAcquire(run=run, key="k")) for _ in range(WAITING_PER_SESSION_MAX)]
            assert it.engine.pressure.is_high("a")
            for waiting in waits:
                it.engine.cancel(*waiting)
            await it.engine.settle()
            assert not it.engine.pressure.is_high("a")

    play(story())


def test_cancels_and_acks_count_like_requests(tmp_path: Path) -> None:
    """They want no answer, so nothing else would slow down who sends them."""

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            for number in range(WAITING_PER_SESSION_MAX):
                it.engine.cancel("a", number) if number % 2 else it.engine.acknowledge("a", (number,))
            assert it.engine.pressure.is_high("a")
            await it.engine.settle()
            assert not it.engine.pressure.is_high("a")

    play(story())

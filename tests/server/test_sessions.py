"""Sessions over TCP and HTTP, of which no kernel tells when they are gone: their leases decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from runstate import wire
from runstated.domain import sessions as rows
from runstated.domain.access import OWNER, Access
from runstated.engine.entries import Opened
from runstated.server import sessions
from runstated.server.sessions import HelloRefused, Origin, Sessions, Transport
from tests.engines import Life, life, play

RESUME_MS, REMOTE_RESUME_MS = 5_000, 30_000
LEASE_MS = 30_000
HELLO = 1_000_000  # the id of that request: one that no other has


ID = "0123456789abcdef"  # of every session here, as its client calls it


class Line:
    """A connection that takes everything and says nothing."""

    def send(self, request_id: int, body: bytes) -> None: ...

    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RESUME_MS", RESUME_MS)
    monkeypatch.setattr(sessions, "REMOTE_RESUME_MS", REMOTE_RESUME_MS)
    monkeypatch.setattr(sessions, "OPENING_MS", 600_000)  # so that only those who are waited for open the lines


def known(it: Life) -> Sessions:
    """The sessions of an engine; what it replies goes to ``it.out``."""
    made = Sessions(it.engine, "test", 1)
    it.engine.outbox = it.out
    return made


def named(over: Transport) -> str:
    """What the daemon calls the session that its client calls "0123456789abcdef"."""
    return OWNER.session_name(over, ID)


async def connect(it: Life, of: Sessions, over: Transport) -> Line:
    line = Line()
    hello = wire.Hello(protocol=1, protocol_min=1, session=ID, worker="w", pid=7, command="python x")
    of.hello(line, HELLO, hello, Origin(0, None, None, over), OWNER)
    await it.out.until((named(over), HELLO))
    return line


def acquire(run: str, wait_ms: int | None = None) -> wire.OnceAcquire:
    return wire.OnceAcquire(run=run, key="k", lease_ms=LEASE_MS, wait_ms=wait_ms)


@pytest.mark.parametrize("over", ["tcp", "http"])
def test_a_remote_session_that_is_away_and_holds_nothing_ends(tmp_path: Path, over: Transport) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            line = await connect(it, of, over)
            await it.pass_ms(3 * RESUME_MS)
            assert of.is_connected(named(over)), "who is connected may be idle"
            of.lost(named(over), line)
            if over == "tcp":
                await it.pass_ms(REMOTE_RESUME_MS - 1)
                assert len(of) == 1, "it may wait for what others do, and come back"
            assert len(of) == 1
            await it.pass_ms(2 * RESUME_MS)
            assert len(of) == 0
            assert not it.engine.spaces.of("default").lines.sessions
            of.drain()

    play(story())


def test_a_remote_session_that_is_away_stays_for_as_long_as_it_holds_something(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            line = await connect(it, of, "tcp")
            run = await it.run_id(named("tcp"))
            await it.ask(named("tcp"), acquire(run))
            of.lost(named("tcp"), line)
            await it.pass_ms(5 * RESUME_MS)
            assert len(of) == 1
            assert len(it.engine.spaces.of("default").holds.of_token) == 1
            await it.pass_ms(LEASE_MS)
            await it.pass_ms(2 * RESUME_MS)
            assert len(of) == 0
            assert not it.engine.spaces.of("default").holds.of_token
            of.drain()

    play(story())


async def left_by(it: Life, over: Transport) -> str:
    """A session of that kind, which holds a key when the daemon ends; its run."""
    row = rows.Session(named(over), "default", "w", "", 7, "python x", transport=over)
    it.engine.submit(Opened(row, HELLO, (), wire.Welcome(protocol=1, version="test", pid=1)))
    run = await it.run_id(named(over))
    await it.ask(named(over), acquire(run))
    return run


def test_nobody_waits_for_an_http_session_after_a_restart_and_it_keeps_its_leases(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            run = await left_by(it, "http")
        async with life(tmp_path / "db") as it:
            of = known(it)
            await of.restore(it.engine.known)
            of.listening()
            await connect(it, of, "unix")
            assert (await it.ask(named("unix"), acquire(run, wait_ms=0))) == wire.OnceHeld(), (
                "the lines are open, the key held"
            )
            waits = it.submit(named("unix"), acquire(run))
            await it.pass_ms(LEASE_MS - 1)
            assert waits not in it.out.replies
            assert of.row(named("http")) is not None
            await it.pass_ms(1)
            assert isinstance(await it.answer(waits), wire.OnceGranted)
            await it.pass_ms(2 * RESUME_MS)
            assert of.row(named("http")) is None
            of.drain()

    play(story())


def test_the_lines_wait_for_a_tcp_session_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            run = await left_by(it, "tcp")
        async with life(tmp_path / "db") as it:
            of = known(it)
            await of.restore(it.engine.known)
            of.listening()
            await connect(it, of, "unix")
            asked = it.submit(named("unix"), acquire(run, wait_ms=0))
            await it.engine.settle()
            assert asked not in it.out.replies
            await connect(it, of, "tcp")
            assert await it.answer(asked) == wire.OnceHeld()
            of.drain()

    play(story())


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_who_slept_while_it_was_away_has_the_whole_time_to_come_back(tmp_path: Path, over: Transport) -> None:
    """The daemon is frozen, and its clients with it, a moment before the time is over."""
    time_ms = RESUME_MS if over == "unix" else REMOTE_RESUME_MS

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            of.lost(named(over), await connect(it, of, over))
            await it.pass_ms(time_ms - 1)
            it.clock.stall(600_000)
            await it.pass_ms(time_ms - 1)
            assert len(of) == 1
            await connect(it, of, over)
            await it.pass_ms(2 * time_ms)
            assert len(of) == 1
            of.drain()

    play(story())


def test_the_lines_wait_for_who_slept_with_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "OPENING_MS", 2_000)

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            run = await left_by(it, "tcp")
        async with life(tmp_path / "db") as it:
            of = known(it)
            await of.restore(it.engine.known)
            of.listening()
            await connect(it, of, "unix")
            asked = it.submit(named("unix"), acquire(run, wait_ms=0))
            await it.pass_ms(1_999)
            it.clock.stall(600_000)
            await it.pass_ms(1_999)
            assert asked not in it.out.replies
            await it.pass_ms(2_000)
            assert asked in it.out.replies
            of.drain()

    play(story())


# ------------------------------------------------------------------ who comes back


def greeting(session: str = ID, pid: int = 7) -> wire.Hello:
    return wire.Hello(protocol=1, protocol_min=1, session=session, worker="w", pid=pid)


def test_where_the_kernel_does_not_tell_the_process_its_number_must_be_the_same(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            nobody = Origin(0, None, None, "unix")
            of.hello(Line(), HELLO, greeting(), nobody, OWNER)
            with pytest.raises(HelloRefused, match="belongs to another process"):
                of.hello(Line(), HELLO, greeting(pid=8), nobody, OWNER)
            assert of.hello(Line(), HELLO, greeting(), nobody, OWNER) == named("unix")
            assert len(of) == 1
            of.drain()

    play(story())


def test_one_id_is_another_session_in_another_space_with_another_key_and_over_another_transport(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            callers = [OWNER, Access(space="a/1:b/"), Access(space="a")]
            told = {
                of.hello(Line(), HELLO, greeting(session), Origin(0, None, None, over), access)
                for session in (ID, f"1:b//{ID}")
                for over in ("unix", "tcp", "http")
                for access in callers
            }
            assert len(told) == len(of) == 18
            assert {of.row(name).id for name in told} == {ID, f"1:b//{ID}"}  # type: ignore[union-attr]
            of.drain()

    play(story())


def test_over_tcp_an_id_that_is_too_short_to_be_random_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            of = known(it)
            with pytest.raises(HelloRefused, match="at least 16 characters"):
                of.hello(Line(), HELLO, greeting(ID[1:]), Origin(0, None, None, "tcp"), OWNER)
            of.drain()

    play(story())

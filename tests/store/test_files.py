"""Which files a daemon may start with, and what it notices of them while it runs. No processes: those are in e2e."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from runstate import wire
from runstate.presence import LockInfo
from runstated.store import files
from runstated.store.sqlite import Store
from tests.engines import life, play

Damage = Callable[[Path, Path], object]  # of the database and its log


class Made:
    """What a killed daemon left: the files, and what its lock file said of them."""

    def __init__(self, directory: Path, *, is_folded: bool = False) -> None:
        directory.mkdir()
        self.database = directory / "runstate.db"
        self.log = files.log_of(self.database)
        play(self._live(directory / "live.db", is_folded))

    async def _live(self, source: Path, is_folded: bool) -> None:
        async with life(source) as daemon:
            await daemon.session("a")
            batch = 0
            if is_folded:
                batch = daemon.engine.batch
                await daemon.engine.store.checkpoint()
            await daemon.run_id()
            self.known = LockInfo(database=daemon.engine.store.id, batch=batch, wal=True)
            self.last = daemon.engine.batch
            shutil.copy(source, self.database)
            shutil.copy(files.log_of(source), self.log)
        self.closed, self.stopped = source, daemon.engine.batch

    def check(self, **changed: object) -> tuple[int, bool]:
        known = {**vars(self.known), **changed}
        return files.check(self.database, LockInfo(**known))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("files") / "killed")


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The same after a checkpoint."""
    return Made(tmp_path_factory.mktemp("files") / "folded", is_folded=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("files") / "other", is_folded=True)


def copy(made: Made, directory: Path) -> Made:
    mine = Made.__new__(Made)
    mine.__dict__.update(made.__dict__)
    mine.database = directory / "runstate.db"
    mine.log = files.log_of(mine.database)
    shutil.copy(made.database, mine.database)
    shutil.copy(made.log, mine.log)
    return mine


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def garble(path: Path) -> None:
    path.write_bytes(b"x" * 5_000)


# ------------------------------------------------------------------ at start


def test_what_a_killed_daemon_left_is_started_with(killed: Made, folded: Made) -> None:
    assert killed.check() == (0, True)
    assert folded.check() == (folded.known.batch, True)
    found = files.read(folded.database, with_log=True)
    assert (found.id, found.batch) == (folded.known.database, folded.last)


def test_what_a_stopped_daemon_left_is_started_with(killed: Made) -> None:
    known = LockInfo(database=killed.known.database, batch=killed.stopped)
    assert files.check(killed.closed, known) == (killed.stopped, False)


def test_an_empty_directory_is_a_first_start(tmp_path: Path) -> None:
    for known in (None, LockInfo(), LockInfo(database="1f", fresh=True)):
        assert files.check(tmp_path / "runstate.db", known) == (0, False)


@pytest.mark.parametrize("damage", [remove, empty, garble])
@pytest.mark.parametrize("made", ["killed", "folded"])
def test_a_database_that_is_gone_is_missed(
    made: str, damage: Callable[[Path], None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mine = copy(request.getfixturevalue(made), tmp_path)
    damage(mine.database)
    with pytest.raises(files.FilesError, match=rf"{mine.database} is .*--new-database") as missed:
        mine.check()
    assert mine.known.database in str(missed.value)


@pytest.mark.parametrize("damage", [remove, empty, garble])
@pytest.mark.parametrize("made", ["killed", "folded"])
def test_a_log_that_is_gone_is_missed(
    made: str, damage: Callable[[Path], None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mine = copy(request.getfixturevalue(made), tmp_path)
    damage(mine.log)
    expected = rf"{mine.log} is .*after batch {mine.known.batch} .*runstated restore {mine.database}"
    with pytest.raises(files.FilesError, match=expected):
        mine.check()


def test_a_log_that_another_sqlite_has_folded_is_not_missed(killed: Made, tmp_path: Path) -> None:
    mine = copy(killed, tmp_path)
    connection = sqlite3.connect(mine.database)
    connection.execute("SELECT count(*) FROM counters").fetchone()
    connection.close()
    assert not mine.log.exists()
    assert mine.check() == (mine.last, False)


@pytest.mark.parametrize("which", ["database", "log"])
def test_a_file_of_another_daemon_is_refused_and_nothing_changed(
    folded: Made, other: Made, which: str, tmp_path: Path
) -> None:
    mine = copy(folded, tmp_path)
    path = getattr(mine, which)
    shutil.copy(getattr(other, which), path)
    before = mine.database.read_bytes(), mine.log.read_bytes()
    with pytest.raises(files.FilesError, match=f"{path} is "):
        mine.check()
    assert (mine.database.read_bytes(), mine.log.read_bytes()) == before


def test_both_files_of_another_daemon_are_refused(folded: Made, other: Made, tmp_path: Path) -> None:
    mine = copy(other, tmp_path)
    with pytest.raises(files.FilesError, match="is not the database that belongs here"):
        files.check(mine.database, folded.known)


def test_an_older_log_is_refused(killed: Made, tmp_path: Path) -> None:
    mine = copy(killed, tmp_path)
    shutil.copy(mine.closed, mine.database)  # with all that is in the log, and more
    connection = sqlite3.connect(mine.closed, isolation_level=None)
    connection.execute("UPDATE counters SET value = value + 5 WHERE counter = 'batch'")
    connection.close()
    shutil.copy(mine.closed, mine.database)
    with pytest.raises(files.FilesError, match=f"{mine.log} is the log of another or an older database"):
        mine.check()


def test_a_torn_log_is_started_with_and_one_warning_says_both_numbers(
    folded: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = copy(folded, tmp_path)
    with caplog.at_level(logging.WARNING):
        mine.check(batch=folded.last + 7)
    (said,) = caplog.messages
    assert f"batch {folded.last}," in said
    assert f"batch {folded.last + 7} " in said


@pytest.mark.parametrize("damage", [remove, empty])
def test_a_lock_file_that_is_gone_is_missed(folded: Made, damage: Callable[[Path], None], tmp_path: Path) -> None:
    mine = copy(folded, tmp_path)
    for known in (None, LockInfo(), LockInfo(database="1f", fresh=True)):
        with pytest.raises(files.FilesError, match=r"the lock file beside .* is missing, empty or another's"):
            files.check(mine.database, known)
    damage(mine.log)
    damage(mine.database)
    assert files.check(mine.database, None) == (0, False)


def test_a_first_start_that_was_cut_short_goes_on(folded: Made, tmp_path: Path) -> None:
    mine = copy(folded, tmp_path)
    assert files.check(mine.database, LockInfo(database=mine.known.database, fresh=True)) == (0, False)


def test_a_log_alone_is_refused_whatever_the_lock_file_says(killed: Made, tmp_path: Path) -> None:
    mine = copy(killed, tmp_path)
    mine.database.unlink()
    with pytest.raises(files.FilesError, match=r"runstate\.db is missing"):
        files.check(mine.database, None)


def test_over_an_upgrade_from_a_lock_file_that_named_no_database(killed: Made, tmp_path: Path) -> None:
    database = tmp_path / "runstate.db"
    shutil.copy(killed.closed, database)
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("UPDATE counters SET value = 1 WHERE counter LIKE 'instance:%'")
    connection.close()
    died = LockInfo(pid=7, socket="/s")
    for known in (None, died):
        assert files.check(database, known) == (0, False)

    async def run() -> None:
        store = await Store.open(database, new_id="1f2e")
        assert store.id == "1f2e"
        await store.close()

    play(run())
    assert files.read(database, with_log=False).id == "1f2e"
    database.unlink()
    with pytest.raises(files.FilesError, match="is missing"):
        files.check(database, died)


def test_a_new_database_leaves_the_old_one_under_another_name(killed: Made, tmp_path: Path) -> None:
    mine = copy(killed, tmp_path)
    (tmp_path / "runstate.db.replaced-123").write_text("of before")
    kept = files.put_aside(mine.database, 123)
    assert kept == tmp_path / "runstate.db.replaced-124"
    assert files.read(kept, with_log=True).id == mine.known.database
    assert files.put_aside(mine.database, 124) is None


# ------------------------------------------------------------------ while it runs


def test_batches_are_numbered_if_they_change_something(tmp_path: Path) -> None:
    async def run() -> None:
        async with life(tmp_path / "db") as daemon:
            await daemon.session("a")
            run = await daemon.run_id()
            before = daemon.engine.batch
            held = await daemon.ask("a", wire.OnceAcquire(run=run, key="k"))
            assert daemon.engine.batch == before + 1
            daemon.engine.beat("a", (held.token,))
            await daemon.session("b")
            waits = daemon.submit("b", wire.OnceAcquire(run=run, key="k", wait_ms=0))
            before = daemon.engine.batch
            await daemon.answer(waits)
            assert daemon.engine.batch == before
            rows = await daemon.engine.store.run_read(
                lambda c: c.execute("SELECT counter, value FROM counters").fetchall()
            )
            assert dict(rows)["batch"] == before

    play(run())


@pytest.mark.parametrize(
    ("damage", "says", "is_log"),
    [
        (lambda database, log: None, None, False),
        (lambda database, log: database.unlink(), r"db was removed or moved", False),
        (lambda database, log: empty(database), r"db was emptied", False),
        (lambda database, log: database.rename(log) and database.write_bytes(b"x" * 9_000), "db was replaced", False),
        (lambda database, log: os.truncate(database, 4_096), "db was cut off", False),
        (lambda database, log: log.unlink(), "db-wal was removed or moved", True),
        (lambda database, log: empty(log), "db-wal was emptied", False),
        (lambda database, log: shutil.copy(log, f"{log}2") and Path(f"{log}2").rename(log), "wal was replaced", True),
        (lambda database, log: files.index_of(database).unlink(), "db-shm was removed or moved", True),
        (lambda database, log: shutil.rmtree(database.parent), "db was removed or moved", False),
    ],
)
def test_what_becomes_of_the_files_is_noticed(tmp_path: Path, damage: Damage, says: str | None, is_log: bool) -> None:
    database = tmp_path / "state" / "db"
    database.parent.mkdir()
    for path in (database, files.log_of(database), files.index_of(database)):
        path.write_bytes(b"x" * 9_000)
    found = files.Files(database)
    damage(database, files.log_of(database))
    lost = found.lost()
    assert (lost is None) if says is None else (lost is not None and lost.endswith(says))
    if lost is not None:
        assert found.is_only_log_lost() is is_log


def test_a_checkpoint_may_make_the_database_smaller(tmp_path: Path) -> None:
    database = tmp_path / "db"
    for path in (database, files.log_of(database), files.index_of(database)):
        path.write_bytes(b"x" * 9_000)
    found = files.Files(database)
    found.copying(True)
    os.truncate(database, 5_000)
    assert found.lost() is None
    found.copying(False)
    assert found.lost() is None

"""The disk that can lose its power, with small programs in place of the daemon."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.power.disk import PAGE, Cut, Disk, NotModelled

Run = Callable[..., None]


@pytest.fixture
def disk(tmp_path: Path, library: Path) -> Disk:
    directory = tmp_path / "state"
    directory.mkdir()
    return Disk(directory, library, tmp_path)


@pytest.fixture
def run(disk: Disk) -> Run:
    """Runs lines of Python on the disk: `fd` is the open file `data`, `directory` its directory, `at(page, letter)`
    writes a page."""

    def run(*lines: str, fail: str = "", end: int | None = None, slow_ms: int = 0, goes_on: bool = False) -> None:
        where = str(disk.directory)
        program = [
            "import os, sqlite3, errno",
            f"where = {where!r}",
            "fd = os.open(where + '/data', os.O_RDWR | os.O_CREAT)",
            "directory = os.open(where, os.O_RDONLY)",
            f"def at(page, letter): os.pwrite(fd, letter.encode() * {PAGE}, page * {PAGE})",
            *lines,
            "os.kill(os.getpid(), 9)",
        ]
        environ = disk.go_on() if goes_on else disk.power_on(fail, end, slow_ms)
        environ["LOG"] = str(disk.log)
        answer = subprocess.run([sys.executable, "-c", "\n".join(program)], env=environ, capture_output=True, text=True)
        assert answer.returncode == -9, answer.stderr

    return run


def cuts(disk: Disk, name: str = "data", count: int = 60) -> set[str]:
    """What many cuts leave of the same file: a letter for each page, "." for zeros, "-" if it is not there."""
    saved = disk.contents()
    found = set()
    for seed in range(count):
        disk.cut(random.Random(seed))
        path = disk.directory / name
        found.add(letters(path.read_bytes()) if path.exists() else "-")
        disk.write(saved)
    return found


def letters(content: bytes) -> str:
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    assert all(len(set(page)) == 1 for page in pages), "a page is in pieces"
    return "".join(chr(page[0]) if page[0] else "." for page in pages)


ARM = "os.close(os.open(os.environ['POWER_ARM'], os.O_CREAT | os.O_WRONLY))"
SAFE = ("at(0, 'a'); at(1, 'b'); os.fsync(fd); os.fsync(directory)",)


def test_what_was_synced_is_there(disk: Disk, run: Run) -> None:
    run(*SAFE)
    assert cuts(disk) == {"ab"}


def test_each_page_that_was_not_synced_survives_by_itself(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); at(1, 'y')")
    assert cuts(disk) == {"ab", "xb", "ay", "xy"}


def test_a_page_may_be_as_it_was_in_between(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); at(0, 'y')")
    assert cuts(disk) == {"ab", "xb", "yb"}


def test_a_file_that_grew_has_zeros_where_nothing_arrived(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(2, 'c')")
    assert cuts(disk) == {"ab", "ab.", "abc"}


def test_a_cut_file_may_have_its_end_again(disk: Disk, run: Run) -> None:
    run(*SAFE, f"os.ftruncate(fd, {PAGE})")
    assert cuts(disk) == {"a", "ab", "a."}


def test_a_sync_covers_only_what_was_written_before(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); os.fdatasync(fd); at(0, 'y')")
    assert cuts(disk) == {"xb", "yb"}


def test_a_sync_through_another_descriptor_counts(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); os.fsync(os.open(where + '/data', os.O_RDONLY))")
    assert cuts(disk) == {"xb"}


def test_what_a_failed_sync_was_for_is_not_covered_by_the_next(disk: Disk, run: Run) -> None:
    failing = "try: os.fsync(fd)\nexcept OSError as error: assert error.errno == errno.EIO\nelse: raise SystemExit(1)"
    run(*SAFE, ARM, "at(0, 'x')", failing, "at(1, 'y'); os.fsync(fd)", fail="data:1:1")
    assert cuts(disk) == {"ay", "xy"}
    assert disk.cut(random.Random(0)).failed == 1


def test_a_sync_may_fail_only_for_who_has_not_written(disk: Disk, run: Run) -> None:
    other = "other = os.open(where + '/data', os.O_RDWR)\ntry: os.fsync(other)\nexcept OSError: os.fsync(fd)"
    run(*SAFE, ARM, "at(0, 'x'); os.fsync(fd); at(1, 'y')", other, fail="~data:1:1")
    assert cuts(disk) == {"xb", "xy"}


def test_what_is_written_again_after_a_failed_sync_is_covered(disk: Disk, run: Run) -> None:
    run(*SAFE, ARM, "at(0, 'x')\ntry: os.fsync(fd)\nexcept OSError: pass", "at(0, 'z'); os.fsync(fd)", fail="data:1:1")
    assert cuts(disk) == {"zb"}


def test_a_name_is_safe_when_its_directory_was_synced(disk: Disk, run: Run) -> None:
    run("at(0, 'a'); os.fsync(fd)")
    assert cuts(disk) == {"-", "a"}
    run("at(0, 'a'); os.fsync(fd); os.fsync(directory)")
    assert cuts(disk) == {"a"}


def test_a_renamed_file_has_one_of_its_names(disk: Disk, run: Run) -> None:
    run(*SAFE, "os.replace(where + '/data', where + '/other')")
    assert cuts(disk) == {"ab", "-"}
    assert cuts(disk, "other") == {"ab", "-"}
    disk.cut(random.Random(0))
    assert len(list(disk.directory.iterdir())) == 1


def test_a_removed_file_may_be_back(disk: Disk, run: Run) -> None:
    run(*SAFE, "os.unlink(where + '/data')")
    assert cuts(disk) == {"ab", "-"}
    run(*SAFE, "os.unlink(where + '/data'); os.fsync(directory)")
    assert cuts(disk) == {"-"}


def test_what_survived_a_cut_is_safe(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); at(1, 'y')")
    disk.cut(random.Random(1))
    (left,) = (letters(path.read_bytes()) for path in disk.directory.iterdir())
    run()
    assert cuts(disk) == {left}


@pytest.mark.parametrize("call", ["os.posix_fallocate(fd, 0, 8192)", "__import__('mmap').mmap(fd, 4096)"])
def test_what_is_not_modelled_is_refused(disk: Disk, run: Run, call: str) -> None:
    run(*SAFE, call)
    with pytest.raises(NotModelled):
        disk.cut(random.Random(0))


def test_a_log_that_misses_a_write_is_found_out(disk: Disk, run: Run) -> None:
    run(*SAFE)
    (disk.directory / "data").write_bytes(b"z" * PAGE)
    with pytest.raises(NotModelled):
        disk.cut(random.Random(0))


def test_the_boot_id_is_another_after_each_power_on(disk: Disk, run: Run) -> None:
    line = "os.write(fd, open('/proc/sys/kernel/random/boot_id', 'rb').read())"
    run(line)
    first = (disk.directory / "data").read_text()
    run(line)
    assert first.count("-") == 4 and (disk.directory / "data").read_text() not in ("", first)


def test_what_a_program_did_not_sync_is_lost_after_its_end_too(disk: Disk, run: Run) -> None:
    run(*SAFE, "at(0, 'x'); at(1, 'y')")
    disk.settle()
    run("at(1, 'z')", "os.fsync(fd)", goes_on=True)
    assert cuts(disk) == {"xz"}
    run(*SAFE, "at(0, 'x'); at(1, 'y')")
    disk.settle()
    run("at(1, 'z')", goes_on=True)
    assert cuts(disk) == {"ab", "ay", "az", "xb", "xy", "xz"}


def test_a_slow_sync_covers_what_was_written_before_it_began(disk: Disk, run: Run) -> None:
    """While the sync takes its time, another thread writes."""
    run(
        *SAFE,
        "import threading, time",
        "at(0, 'x')",
        "other = threading.Thread(target=os.fsync, args=(fd,)); other.start()",
        "while open(os.environ['LOG'], 'rb').read().count(b'B\\0\\0\\0') < 3: time.sleep(0.001)",
        "at(1, 'y'); other.join()",
        slow_ms=200,
    )
    assert cuts(disk) == {"xb", "xy"}


def test_a_program_is_ended_at_any_record(disk: Disk, run: Run) -> None:
    left = set()
    for end in range(9):
        run(*SAFE, end=end)
        left |= cuts(disk)
        disk.write({})
    assert left == {"-", "", "a", ".", ".b", "a.", "ab", ".."}


@pytest.mark.parametrize(("how", "is_safe"), [("FULL", True), ("NORMAL", False)])
def test_sqlite_is_as_safe_as_it_says(disk: Disk, run: Run, how: str, is_safe: bool) -> None:
    """With FULL nothing is lost; with NORMAL a cut may take the last transactions, and never one from the middle."""
    run(
        "db = sqlite3.connect(where + '/db', isolation_level=None)",
        "db.execute('PRAGMA journal_mode = WAL')",
        "db.execute('CREATE TABLE t (n INTEGER PRIMARY KEY)'); db.execute('PRAGMA wal_checkpoint(TRUNCATE)')",
        "db.execute('PRAGMA synchronous = FULL'); db.execute('INSERT INTO t VALUES (0)'); os.fsync(directory)",
        f"db.execute('PRAGMA synchronous = {how}')",
        "for n in range(1, 6): db.execute('INSERT INTO t VALUES (?)', (n,))",
    )
    saved = disk.contents()
    found = set()
    for seed in range(40):
        cut = disk.cut(random.Random(seed))
        found.add(5 - last_row(disk.directory / "db", cut))
        disk.write(saved)
    assert found == {0} if is_safe else found >= {0, 5}


def last_row(database: Path, cut: Cut) -> int:
    connection = sqlite3.connect(database)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], cut
        rows = [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]
    finally:
        connection.close()
    assert rows == list(range(len(rows))), cut
    return len(rows) - 1

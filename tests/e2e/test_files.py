"""Daemons that are robbed of their files: none goes on, and none starts with less than the one before had."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstate import paths
from runstated.main import Process
from tests.daemons import PATIENCE_S, Home
from tests.e2e.test_daemon import QUICK_PULSE

WRITE = "import runstate; runstate.configure(run='r'); print(runstate.run_id())"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    place = Home(tmp_path / "state")
    yield place
    place.close()


def written(home: Home) -> str:
    """Something that is on disk, and only once: the run's id."""
    answer = home.python("-c", WRITE)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def refusal(home: Home) -> str:
    answer = home.run("start")
    assert answer.returncode == 1, answer.stdout
    assert home.holder() is None
    assert "Traceback" not in home.read_log()
    return answer.stderr


def test_a_database_that_is_removed_ends_the_daemon_and_is_missed_at_the_next_start(home: Home) -> None:
    database = home.state_dir / paths.DATABASE_NAME
    with home.popen(sys.executable, "-c", QUICK_PULSE, "start", "--foreground") as process:
        home.wait_until_listening()
        before = written(home)
        database.unlink()
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"{database} was removed or moved" in said
    assert f"{database} is missing" in refusal(home)
    assert home.python("-c", WRITE).returncode == 1, "nor does a client start it"
    answer = home.run("start", "--new-database")
    assert answer.returncode == 0, answer.stderr
    assert written(home) != before
    assert [path.name for path in home.state_dir.glob("*-wal*")] != ["runstate.db-wal"], "the old log is kept"
    answer = home.run("start", "--new-database")
    assert answer.returncode == 1
    assert "but with its present database" in answer.stderr


def test_a_log_that_is_removed_is_copied_into_the_database_before_the_daemon_ends(home: Home) -> None:
    with home.popen(sys.executable, "-c", QUICK_PULSE, "start", "--foreground") as process:
        home.wait_until_listening()
        before = written(home)
        (home.state_dir / "runstate.db-wal").unlink()
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert "runstate.db-wal was removed or moved" in said
    assert written(home) == before


def test_nothing_is_acknowledged_that_went_to_a_database_without_a_name(home: Home) -> None:
    script = (
        "import os, runstate; runstate.configure(timeout='2s'); runstate.run_id()\n"
        f"os.remove({str(home.state_dir / paths.DATABASE_NAME)!r})\n"
        "try: print(runstate.run('other').run_id())\n"
        "except runstate.UnavailableError as error: print('refused', error)\n"
    )
    assert home.python("-c", script).stdout.startswith("refused")
    assert "was removed or moved" in home.read_log()


def test_of_a_lock_file_that_is_removed_the_daemon_leaves_another_one(home: Home) -> None:
    before = written(home)
    home.lock.unlink()
    assert written(home) == before  # the first daemon has sent its client away, and the next one has started
    assert home.read_log().count("starts in") == 2


def test_a_lock_file_that_is_removed_meanwhile_is_missed_and_restore_makes_another(home: Home) -> None:
    before = written(home)
    home.run("stop")
    home.lock.unlink()
    database = home.state_dir / paths.DATABASE_NAME
    assert f"`runstated restore {database}`" in refusal(home)
    assert home.run("restore", str(database)).returncode == 0
    assert home.run("start").returncode == 0
    assert written(home) == before


def test_a_socket_that_is_removed_is_noticed_when_the_next_client_comes(home: Home) -> None:
    before = written(home)
    home.socket.unlink()
    began = time.monotonic()
    assert written(home) == before
    if sys.platform.startswith("linux"):
        assert time.monotonic() - began < 25, "not only at the pulse"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="without abstract sockets it is noticed at the pulse")
@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_no_second_daemon_serves_where_the_directory_was_taken_away(home: Home, tmp_path: Path, how: str) -> None:
    written(home)
    first = home.running()
    moved = tmp_path / "moved"
    if how == "deleted":
        shutil.rmtree(home.state_dir)
    else:
        home.state_dir.rename(moved)
    if how == "replaced":
        home.state_dir.mkdir(mode=0o700)
    assert "runstate.db is missing" in refusal(home)
    with Process(first) as process:
        assert not process.is_alive()
    if how == "moved":
        assert "was removed, moved or replaced" in home.read_log()
        shutil.rmtree(home.state_dir)
        moved.rename(home.state_dir)
        assert home.run("start").returncode == 0, "it is back, as it was"


def test_a_log_file_that_is_removed_is_made_again(home: Home) -> None:
    written(home)
    home.log.unlink()
    home.run("stop")
    assert home.read_log().rstrip().endswith("stopped")

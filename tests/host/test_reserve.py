"""Room that is kept for a start on a full disk."""

from __future__ import annotations

from pathlib import Path

from runstated import settings
from runstated.host import reserve
from tests.daemons import Home
from tests.disks import disk, fill_up


def test_the_room_is_free_meanwhile_and_kept_again(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    for _ in range(2):
        with reserve.lent(path):
            assert not path.exists()
        assert path.stat().st_size == settings.RESERVE_BYTES


def test_a_daemon_restarts_on_a_disk_without_any_room(tmp_path: Path) -> None:
    with disk(tmp_path / "state", "6m") as directory:
        home = Home(directory)
        try:
            work = "import runstate\n@runstate.once\ndef f(i): return 'y' * 2000\nfor i in range(20): f(i)"
            assert home.python("-c", work).returncode == 0
            for _ in range(2):
                fill_up(directory / "other")
                restarted = home.run("restart")
                assert restarted.returncode == 0, restarted.stderr
        finally:
            home.close()

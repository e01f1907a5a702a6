"""One holder at a time, whatever dies, looks on or starts in the same moment; and the hosts that are refused."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runstate import presence
from runstated.host import lockfile

HOLDER = """
import os, sys
from pathlib import Path
from runstated.host import lockfile
try:
    lock = lockfile.acquire(Path(sys.argv[1]), lockfile.LockInfo(pid=os.getpid(), version="9.8", socket="/s"))
except lockfile.LockHeld as held:
    print("refused", held.pid, flush=True)
else:
    print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runstated.lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = spawn_holder(path)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def spawn_holder(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def mine(**changes: Any) -> lockfile.LockInfo:
    return lockfile.LockInfo(pid=os.getpid(), version="0.1", **changes)


def test_the_holder_is_seen_with_what_it_announced(path: Path) -> None:
    lock = lockfile.acquire(path, mine())
    assert presence.inspect(path) == lock.info
    lock.announce(mine(socket="/somewhere/runstated.sock"))
    seen = presence.inspect(path)
    assert seen is not None
    assert (seen.pid, seen.version, seen.socket) == (os.getpid(), "0.1", "/somewhere/runstated.sock")
    lock.announce(mine(socket="/s"))
    assert presence.inspect(path) == mine(socket="/s"), "a shorter text leaves nothing of the longer one"
    lock.release()


def test_nobody_is_seen_before_and_after(path: Path) -> None:
    assert presence.inspect(path) is None
    lockfile.acquire(path, mine()).release()
    assert presence.inspect(path) is None
    assert path.exists(), "the lock file is never unlinked"


def test_acquire_is_refused_with_the_holders_pid_and_version(path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(lockfile.LockHeld, match=rf"runstated 9\.8 already runs as pid {holder.pid} on /s") as held:
        lockfile.acquire(path, mine())
    assert (held.value.pid, held.value.version, held.value.socket) == (holder.pid, "9.8", "/s")


def test_a_killed_holder_leaves_the_lock_free_and_its_text_meaningless(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert str(holder.pid) in path.read_text()
    assert presence.inspect(path) is None
    lockfile.acquire(path, mine()).release()


def test_the_text_of_a_dead_daemon_is_not_taken_for_that_of_the_next_one(
    path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    old = path.read_bytes()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the next one, which has not written yet
        looks = 0

        def look_again(seconds: float) -> None:
            nonlocal looks
            looks += 1
            text = mine(socket="/next", birth=presence.process_birth(os.getpid())).encode()
            os.pwrite(file.fileno(), text, 0)
            os.ftruncate(file.fileno(), len(text))

        monkeypatch.setattr(presence.time, "sleep", look_again)
        found = presence.inspect(path)
        assert found is not None and (found.pid, found.socket, looks) == (os.getpid(), "/next", 1)
        os.pwrite(file.fileno(), old, 0)
        os.ftruncate(file.fileno(), len(old))
        monkeypatch.setattr(presence.time, "sleep", lambda seconds: None)
        assert presence.inspect(path) == presence.decode(old), "where the holder's process cannot be seen"


def test_onlookers_never_keep_a_daemon_from_starting(path: Path) -> None:
    lockfile.acquire(path, mine()).release()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            presence.inspect(path)

    onlookers = [threading.Thread(target=look) for _ in range(4)]
    for onlooker in onlookers:
        onlooker.start()
    try:
        for _ in range(300):
            lockfile.acquire(path, mine()).release()
    finally:
        done.set()
        for onlooker in onlookers:
            onlooker.join()


def test_of_many_that_start_at_once_one_holds_the_lock(path: Path) -> None:
    starters = [spawn_holder(path) for _ in range(8)]
    said = [starter.stdout.readline() for starter in starters if starter.stdout]
    winner = starters[said.index("holds\n")]
    for starter in starters:
        starter.communicate()
    assert said.count("holds\n") == 1
    # A loser that came before the winner had written its text says pid 0 (not known), never another one.
    assert set(said) <= {"holds\n", f"refused {winner.pid}\n", "refused 0\n"}


def test_a_replaced_or_removed_lock_file_is_noticed(path: Path) -> None:
    lock = lockfile.acquire(path, mine())
    assert lock.is_ours()
    path.rename(path.with_suffix(".old"))
    assert not lock.is_ours()
    path.write_text("")
    assert not lock.is_ours()
    lock.release()
    lock = lockfile.acquire(path, mine())
    os.truncate(path, 0)
    assert not lock.is_ours()
    lock.release()


def test_what_belongs_here_is_said_also_when_nobody_holds_the_lock(path: Path) -> None:
    lock = lockfile.acquire(path, mine())
    assert lock.before is None
    lock.announce(mine(database="1f", fresh=True))
    lock.note(7, has_log=True)
    lock.release()
    left = presence.decode(path.read_bytes())
    assert left == presence.LockInfo(database="1f", batch=7, wal=True)
    assert "pid" not in path.read_text(), "not even 0: who kills that kills his own process group"
    lock = lockfile.acquire(path, mine())
    assert (lock.before, lock.info.belongings, lock.info.pid) == (left, left, os.getpid())
    lock.release()


def test_a_lock_file_that_was_taken_away_is_left_again_and_another_is_left_alone(path: Path) -> None:
    lock = lockfile.acquire(path, mine())
    lock.announce(mine(database="1f"))
    path.unlink()
    lock.release()
    assert presence.decode(path.read_bytes()) == presence.LockInfo(database="1f")
    lock = lockfile.acquire(path, mine())
    path.unlink()
    path.write_text("")
    lock.release()
    assert path.read_text() == ""


def test_a_disk_that_is_full_names_the_lock_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lockfile.os, "pwrite", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        lockfile.acquire(path, mine())


def test_the_rest_of_a_longer_text_is_not_read() -> None:
    """A holder may die between the text and the cut behind it."""
    assert presence.decode(mine(socket="/s").encode() + b'er text"}\n') == mine(socket="/s")


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    path.symlink_to(path.with_suffix(".elsewhere"))
    with pytest.raises(OSError, match="symbolic link"):
        lockfile.acquire(path, mine())


def test_a_holder_that_has_not_written_yet_is_seen_without_a_name(path: Path, holder: subprocess.Popen[str]) -> None:
    path.write_text('{"pid": 12')
    assert presence.inspect(path) == presence.LockInfo()


def test_fields_of_a_newer_daemon_are_skipped() -> None:
    assert presence.decode(b'{"pid": 7, "shoe_size": 43}') == presence.LockInfo(pid=7)
    assert presence.decode(b"[]") is None


def test_the_birth_of_a_process_tells_it_from_a_later_one_with_its_number() -> None:
    assert presence.process_birth(os.getpid()) == presence.process_birth(os.getpid()) != ""
    assert presence.process_birth(os.getpid()) != presence.process_birth(1)
    assert presence.process_birth(2**22 + 1) == ""


def test_a_stop_marker_holds_until_it_is_removed_or_the_machine_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "runstated.stopped"
    assert not presence.is_marked_stopped(marker)
    presence.mark_stopped(marker)
    assert presence.is_marked_stopped(marker)
    monkeypatch.setattr(presence, "boot_id", lambda: "another boot")
    assert not presence.is_marked_stopped(marker)
    marker.write_text("?")
    assert presence.is_marked_stopped(marker), "what cannot be read still says stopped"
    presence.unmark_stopped(marker)
    presence.unmark_stopped(marker)
    assert not presence.is_marked_stopped(marker)


MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/local\\040disk rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/remote rw - fuse.sshfs me@there: rw
33 32 0:43 / /mnt/remote rw master:3 - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/var/lib/x", ("/", "ext4")),
        ("/home/me/.local/state", ("/home", "nfs4")),
        ("/home/local disk/state", ("/home/local disk", "xfs")),
        ("/homestead", ("/", "ext4")),
        ("/mnt/remote/x", ("/mnt/remote", "tmpfs")),
    ],
)
def test_the_file_system_of_a_directory_is_that_of_the_nearest_mount(
    directory: str, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockfile, "mounts_of_linux", lambda: lockfile.parse_mountinfo(MOUNTINFO))
    monkeypatch.setattr(sys, "platform", "linux")
    assert lockfile.file_system(Path(directory)) == found


def test_the_mounts_of_macos_are_read_too() -> None:
    text = "/dev/disk3s1 on / (apfs, local)\n//me@nas/share on /Volumes/my share (smbfs, nodev)\n"
    assert lockfile.parse_mount(text) == [("/", "apfs"), ("/Volumes/my share", "smbfs")]


def test_network_file_systems_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("nfs4", "cifs", "fuse.sshfs", "9p", "ceph"):
        monkeypatch.setattr(lockfile, "file_system", lambda _, kind=kind: ("/net", kind))
        with pytest.raises(lockfile.UnfitError, match=rf"network file system \({kind} at /net\)"):
            lockfile.check_host(tmp_path)
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "fuse.gocryptfs", ""):
        assert not lockfile.is_unfit(kind, "/net")
    assert not lockfile.is_unfit("9p", "/"), "a sandbox whose only disk it is"


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockfile.sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(lockfile.UnfitError, match=r"runstated needs 3\.35 or newer"):
        lockfile.check_host(tmp_path)


def test_the_real_state_directory_of_a_test_is_fit(tmp_path: Path) -> None:
    lockfile.check_host(tmp_path)

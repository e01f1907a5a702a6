"""The lock that makes a daemon the only one of its state directory, and what that directory must be like.

    free ── acquire ──> held, no socket ── announce ──> held, listening ── release / death ──> free

The lock is an exclusive `flock` on <state>/runstated.lock, taken before anything else is opened and kept for life. The
file is never unlinked: a second daemon that opened it before the unlink and a third that made a new one would both hold
"the" lock. Instead the holder looks now and then whether the path still leads to its file (`Lock.is_ours`).

Onlookers (`presence.inspect`) take a shared lock for some microseconds, so a failed attempt does not yet mean "held".
Asking for a shared lock tells the two apart without any guess about time: it is granted beside onlookers and refused
beside a holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from runstate import presence
from runstate.presence import LockInfo, inspect

__all__ = ["Lock", "LockHeld", "LockInfo", "UnfitError", "acquire", "check_host", "inspect"]

# Only two daemons that start in the same moment can meet here, each mistaking the other for an onlooker.
MEETINGS_MAX = 1000
MEETING_WAIT_MS = 2

SQLITE_VERSION_MIN = (3, 35, 0)  # RETURNING, which the store is written with

# On these, flock or SQLite's shared memory is not one and the same for all who mount them.
NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb",
    "smb2",
    "smb3",
    "smbfs",
    "ncpfs",
    "afs",
    "afpfs",
    "webdav",
    "davfs",
}
CLUSTER_FILE_SYSTEMS = {"ceph", "glusterfs", "lustre", "gpfs", "beegfs", "ocfs2", "gfs2", "pvfs2", "coda"}
HOST_SHARES = {"9p", "vboxsf", "prl_fs", "vmhgfs", "fuse.vmhgfs-fuse"}  # a host's directory in a virtual machine
FUSE_NETWORK_FILE_SYSTEMS = {
    f"fuse.{name}"
    for name in ("sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "glusterfs", "ceph", "davfs2", "curlftpfs", "juicefs")
} | {"macfuse", "osxfuse"}  # macOS does not say which one; hardly any of them is a local disk
UNFIT_FILE_SYSTEMS = NETWORK_FILE_SYSTEMS | CLUSTER_FILE_SYSTEMS | HOST_SHARES | FUSE_NETWORK_FILE_SYSTEMS


class LockHeld(Exception):
    """Another daemon serves this state directory."""

    def __init__(self, holder: LockInfo) -> None:
        self.pid, self.version, self.socket = holder.pid, holder.version, holder.socket
        where = f"on {self.socket}" if self.socket else "and is starting"
        super().__init__(
            f"runstated {self.version or '(version unknown)'} already runs as pid {self.pid or '?'} {where}"
        )


class UnfitError(Exception):
    """The host cannot keep the state safe: the file system or SQLite is not good enough."""


class Lock:
    """The held lock. `release` is for an orderly end; a process that dies gives it back as well. `before`: what the
    last holder left behind."""

    def __init__(self, path: Path, descriptor: int, info: LockInfo) -> None:
        self.path, self.info = path, info
        self.before = presence.decode(os.pread(descriptor, 65_536, 0))
        self._descriptor = descriptor
        self._identity = _identity(os.fstat(descriptor))

    def announce(self, info: LockInfo) -> None:
        """Write who holds the lock and where it listens, in place: the file keeps its inode."""
        _write(self._descriptor, info, self.path)
        self.info = info

    def note(self, batch: int, *, has_log: bool) -> None:
        """Write how far the database is by itself, and whether it needs its log."""
        self.announce(replace(self.info, batch=batch, wal=has_log, fresh=False))

    def is_ours(self) -> bool:
        """Whether the path still leads to the file we hold; if not, a second daemon may be about to start."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return _identity(found) == self._identity and found.st_size > 0

    def leave_word(self) -> None:
        """Where the file was taken away, another one says what belongs here: nothing else is to be started with. Not
        where the place for it is gone, too, and not where something else is in its place."""
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            _write(descriptor, self.info.belongings, self.path)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # it was written before: the database's part of it is right
            _write(self._descriptor, self.info.belongings, self.path)
            self.leave_word()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def _write(descriptor: int, info: LockInfo, path: Path) -> None:
    content = info.encode()
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def acquire(path: Path, info: LockInfo) -> Lock:
    """Take the lock and write `info` into it. Raises LockHeld when a daemon has it, OSError for an unusable file."""
    for _ in range(MEETINGS_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _take(descriptor) and _identity(os.fstat(descriptor)) == _identity(os.lstat(path)):
                lock = Lock(path, descriptor, info)
                info = replace(info, birth=presence.process_birth(info.pid))
                lock.announce(info.keeping(lock.before or LockInfo()))
                descriptor = -1  # the lock's now
                return lock
        except FileNotFoundError:
            pass  # someone removed the file between open and lstat; the next round makes a new one
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(random.uniform(0, MEETING_WAIT_MS) / 1000)
    raise LockHeld(LockInfo())


def _take(descriptor: int) -> bool:
    """True: taken. False: only onlookers were in the way. Raises LockHeld when there is a holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if not presence.is_held(descriptor):
            return False
    holder = presence.decode(os.pread(descriptor, 65_536, 0))
    raise LockHeld(holder or LockInfo())


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def check_host(directory: Path) -> None:
    """Refuse, with UnfitError, a state directory or an SQLite on which acknowledged work could be lost."""
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        needed = ".".join(map(str, SQLITE_VERSION_MIN[:2]))
        raise UnfitError(f"this Python comes with SQLite {sqlite3.sqlite_version}; runstated needs {needed} or newer")
    mount_point, kind = file_system(directory)
    if is_unfit(kind, mount_point):
        raise UnfitError(
            f"the state directory {directory} is on a network file system ({kind} at {mount_point}), where file locks "
            "and SQLite's write-ahead log are not safe; set --state-dir or RUNSTATED_STATE_DIR to a local disk"
        )


def is_unfit(kind: str, mount_point: str) -> bool:
    # Some sandboxes (gVisor) show their whole root as 9p: private to them, well locked, and there is no other disk.
    return kind in UNFIT_FILE_SYSTEMS and not (kind == "9p" and mount_point == "/")


def file_system(directory: Path) -> tuple[str, str]:
    """(mount point, type) of the file system that holds `directory`; ("", "") where that cannot be told."""
    mounts = mounts_of_linux() if sys.platform.startswith("linux") else mounts_of_bsd()
    real = os.path.realpath(directory)
    best = ("", "")
    for point, kind in mounts:
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):  # >=: of two mounts on one point the later one is on top
            best = (point, kind)
    return best


def mounts_of_linux() -> list[tuple[str, str]]:
    """From mountinfo rather than statfs: only it tells sshfs from the other FUSE file systems."""
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return []
    return parse_mountinfo(text)


def parse_mountinfo(text: str) -> list[tuple[str, str]]:
    """Lines are `id parent major:minor root POINT options [fields...] - TYPE source options`; \\040 is a space."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        for escape in ("\\040", "\\011", "\\012", "\\134"):
            point = point.replace(escape, chr(int(escape[1:], 8)))
        mounts.append((point, after.split(" ")[0]))
    return mounts


def mounts_of_bsd() -> list[tuple[str, str]]:
    try:
        answer = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_mount(answer.stdout)


def parse_mount(text: str) -> list[tuple[str, str]]:
    """Lines are `source on POINT (TYPE, options)`."""
    mounts = []
    for line in text.splitlines():
        head, _, options = line.rpartition(" (")
        mounts.append((head.partition(" on ")[2], options.rstrip(")").split(",")[0].strip()))
    return mounts

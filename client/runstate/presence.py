"""Who serves a state directory: reading the daemon's lock file, and the marker that `runstated stop` leaves.

The lock file is the truth. The daemon holds an exclusive `flock` on it from before it opens anything until it has
closed everything, and writes into it who it is and where it listens. A lock of the kernel cannot be stale: it ends
with its holder, however that ends. The text may be stale, so it means something only while the lock is held.

Taking the lock is the daemon's business (`runstated.lockfile`); clients only look.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

# A holder that has just taken the lock needs microseconds to write its text; a reader that comes between looks again.
UNREADABLE_RETRIES = 20
UNREADABLE_WAIT_MS = 5


@dataclass(frozen=True)
class LockInfo:
    """What the holder of the lock says of itself."""

    pid: int = 0
    version: str = ""
    started: float = 0.0  # seconds since the epoch, for display
    socket: str = ""  # "" until the daemon listens
    birth: str = ""  # the process's start time as the kernel counts it: with the pid, it names one process for good
    log: str = ""
    tcp: str = ""  # host:port, where it listens for clients over TCP
    http: str = ""  # host:port, where it serves the HTTP API
    http_hosts: str = ""  # names under which it may be asked there, separated by commas
    tls_cert: str = ""  # the files of both, "" without TLS
    tls_key: str = ""
    inherited: str = ""  # what limits it that the program which started it had, for display
    # What belongs here also while nobody holds the lock:
    database: str = ""  # the id of the database; "" before there was one
    fresh: bool = False  # it is being made: its file may not be there yet
    batch: int = 0  # the last commit that is in the database itself, without its log
    wal: bool = False  # its log, with later ones, must be there

    @property
    def tls(self) -> bool:
        """Whether it listens with TLS."""
        return bool(self.tls_cert)

    @property
    def listeners(self) -> dict[str, str]:
        """The settings by which a daemon listens where this one does, beside its socket; {} where it does not."""
        if not self.tcp and not self.http:
            return {}
        given = {"tcp": self.tcp, "http": self.http, "tls_cert": self.tls_cert, "tls_key": self.tls_key}
        given["http_hosts"] = self.http_hosts
        given["allow_plaintext"] = "" if self.tls else "yes"  # it was allowed, or it is not needed
        return {name: value for name, value in given.items() if value}

    def keeping(self, other: LockInfo) -> LockInfo:
        """The same holder, of what belongs to another one."""
        return replace(self, database=other.database, fresh=other.fresh, batch=other.batch, wal=other.wal)

    @property
    def belongings(self) -> LockInfo:
        """What stays when the holder has gone."""
        return LockInfo().keeping(self)

    def encode(self) -> bytes:
        """One line. Without a holder it has no `pid`, not even 0: `kill 0` ends the process group of who reads it."""
        return json.dumps({name: value for name, value in asdict(self).items() if self.pid or value}).encode() + b"\n"


def inspect(path: Path) -> LockInfo | None:
    """Who holds the lock file at `path`, or None when nobody does. Raises OSError when it may not be read.

    The look is an attempt at a *shared* lock, given back at once. It can never make a starting daemon give up: a daemon
    that finds the lock taken asks for a shared one itself, which it gets beside any number of onlookers and never
    beside a holder (`runstated.lockfile.acquire`).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        info: LockInfo | None = None
        for _ in range(UNREADABLE_RETRIES):
            if not is_held(descriptor):
                return None
            info = decode(os.pread(descriptor, 65_536, 0))
            if info is not None and not _is_left_behind(info):
                return info
            time.sleep(UNREADABLE_WAIT_MS / 1000)
        return info or LockInfo()  # a holder of another pid namespace cannot be told from a dead one
    finally:
        os.close(descriptor)


def _is_left_behind(info: LockInfo) -> bool:
    """Whether the text may be that of a holder that has gone: the next one has the lock and has not written yet."""
    return not info.pid or (bool(info.birth) and process_birth(info.pid) != info.birth)


def is_held(descriptor: int) -> bool:
    """Whether another open file holds the lock exclusively."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    # An explicit unlock: a process forked by another thread in this moment would otherwise keep its copy locked.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def decode(content: bytes) -> LockInfo | None:
    """The text of a lock file; fields of a newer daemon are skipped, an unfinished text is None."""
    try:
        raw = json.loads(content.partition(b"\n")[0])  # behind it may be the rest of a longer one
        if not isinstance(raw, dict):
            return None
        return LockInfo(**{each.name: raw[each.name] for each in fields(LockInfo) if each.name in raw})
    except (ValueError, TypeError):
        return None


def process_birth(pid: int) -> str:
    """When the process started, in kernel ticks since boot; "" where that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may itself hold spaces and parentheses: count from the last one.
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def boot_id() -> str:
    """A name of this boot of the machine; "" where none can be had."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _boot_id_of_macos()


def _boot_id_of_macos() -> str:
    if sys.platform != "darwin":
        return ""
    import subprocess

    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def mark_stopped(path: Path, why: str = "") -> None:
    """Leave the marker: no client starts the daemon again until `runstated start` or a reboot. ``why``: if it was not
    `runstated stop`."""
    path.write_text(json.dumps({"boot": boot_id(), "stopped": time.time(), "why": why}) + "\n")


def why_stopped(path: Path) -> str:
    """What a marker says beside that the daemon was stopped; "" for `runstated stop`."""
    try:
        return str(json.loads(path.read_text())["why"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def unmark_stopped(path: Path) -> None:
    path.unlink(missing_ok=True)


def is_marked_stopped(path: Path) -> bool:
    """Whether the user stopped the daemon in this boot. A marker nobody can parse still says "stopped"."""
    try:
        content = path.read_text()
    except FileNotFoundError:
        return False
    try:
        boot = json.loads(content)["boot"]
    except (ValueError, TypeError, KeyError):
        return True
    return bool(boot == boot_id())

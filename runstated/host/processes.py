"""Who is on the other side of a Unix socket, and the kernel's word that it died.

A process is told from every other by boot, pid namespace, pid and start time: a pid alone is handed out again. It is
dead when its **pidfd** is readable, not when /proc has lost it: a killed process that its parent has not yet waited for
still has its entry there.

Reading /proc proves something only while the pid cannot be handed out again, that is if the process of a pidfd opened
*before* the reading is found alive *after* it. Every look in this file is made in that order.

Descriptors may run out. That says nothing about the peer, so every function here lets OSError with EMFILE, ENFILE or
ENOMEM through to its caller, instead of answering "unsupported" or "gone".
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
import sys
from asyncio import trsock
from collections.abc import Callable
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""socket(7), Linux 6.5: a pidfd of the process that connected. Python has no name for it yet."""

COMMAND_CHARACTERS_MAX = 256
"""A command line is shown in one column of `status`. Those of agents hold whole prompts; their beginning identifies."""

NOBODY = -1
"""The uid and gid of a peer the system does not tell: equal to no real one, so every comparison refuses it."""

_ALL_ONES = 2**32 - 1  # uid_t and gid_t of -1
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LOST = (errno.ESRCH, errno.EINVAL, errno.ENODATA)  # what SO_PEERPIDFD says, by kernel version, of a peer long gone


class UnknownProcess(Exception):
    """From here nobody can tell whether this process lives: another pid namespace, or a system without pidfds."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot of this machine, as its pid namespace numbers it."""

    boot_id: str
    namespace: str  # the text of the link /proc/self/ns/pid, as in "pid:[4026531836]"
    pid: int
    start: int  # clock ticks from boot to its start: field 22 of /proc/<pid>/stat. An exec changes neither

    def to_text(self) -> str:
        """The process in one column of a database; `from_text` reads it."""
        return f"{self.boot_id}/{self.namespace}/{self.pid}/{self.start}"

    @staticmethod
    def from_text(text: str) -> Process:
        """Raises ValueError for anything that `to_text` did not write."""
        boot_id, namespace, pid, start = text.split("/")
        process = Process(boot_id, namespace, int(pid), int(start))
        if process.to_text() != text:
            raise ValueError(f"not a process: {text!r}")
        return process


@dataclass(frozen=True, slots=True)
class Peer:
    """Who opened the other end of a socket. pid 0: not visible from our pid namespace, or not told by the system."""

    pid: int
    uid: int
    gid: int


def of_self() -> Process | None:
    """This process. None where a process cannot be told from a later one with its pid (no /proc, or a foreign one)."""
    return of(os.getpid())


def of(pid: int, pidfd: int | None = None) -> Process | None:
    """The process that has this pid. None when there is none, or when it is not visible.

    With its `pidfd`, the answer is about the process of that pidfd or, if it died meanwhile, None.
    """
    place = _here()
    start = _start_of(pid)
    if place is None or start is None or (pidfd is not None and is_dead(pidfd)):
        return None
    return Process(*place, pid, start)


def describe(pid: int) -> str:
    """The command line of a process for people to read: at most `COMMAND_CHARACTERS_MAX` characters, all printable.

    Empty when it is not visible, or gone. The text is the process's own: it proves nothing.
    """
    raw = _read(f"/proc/{pid}/cmdline", 4 * COMMAND_CHARACTERS_MAX) or b""
    text = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    if len(text) > COMMAND_CHARACTERS_MAX:
        text = text[: COMMAND_CHARACTERS_MAX - 1] + "…"
    return "".join(character if character.isprintable() else "?" for character in text)


def peer(sock: socket.socket | trsock.TransportSocket) -> Peer:
    """The kernel's word on who connected this Unix socket: credentials as they were at that moment."""
    if hasattr(socket, "SO_PEERCRED"):
        pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(pid, NOBODY if uid == _ALL_ONES else uid, NOBODY if gid == _ALL_ONES else gid)
    if sys.platform == "darwin":
        # sys/un.h: level SOL_LOCAL is 0, LOCAL_PEERCRED 1 gives a struct xucred, LOCAL_PEERPID 2 an int.
        try:
            version, uid, _, gid = struct.unpack_from("IIhxxI", sock.getsockopt(0, 1, 76))
            if version == 0:
                return Peer(sock.getsockopt(0, 2), uid, gid)
        except OSError:
            pass  # it has hung up already
    return Peer(0, NOBODY, NOBODY)


def open_pidfd(sock: socket.socket | trsock.TransportSocket, pid: int) -> int | None:
    """A pidfd of the process that connected this socket, whose pid is `pid` by `peer`. The caller closes it.

    It may be dead already. None when there is no pidfd to have: then only the end of the connection tells.
    """
    if sys.platform != "linux" or pid <= 0:
        return None
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None if error.errno in _LOST else _open_by_number(sock, pid)
    os.set_inheritable(pidfd, False)
    return pidfd


def reopen(process: Process) -> int | None:
    """A pidfd of a process that an earlier life of the daemon recorded; None if that process is gone.

    Raises UnknownProcess where neither can be said.
    """
    place = _here()
    if place is None:
        raise UnknownProcess("this system does not tell its boot or its processes")
    if place[0] != process.boot_id:
        return None
    if place[1] != process.namespace:
        raise UnknownProcess(f"{process.to_text()} was seen from another pid namespace than {place[1]}")
    try:
        pidfd = _pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        if _start_of(process.pid) != process.start:  # also a number that now belongs to a thread
            return None
        raise UnknownProcess(f"no pidfd to be had of process {process.pid}: {error.strerror}") from error
    return _kept_if(pidfd, lambda: _is_this(process, pidfd))


def is_dead(pidfd: int) -> bool:
    """Whether the process of this pidfd has ended, waited for or not. A stopped one has not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    events = poll.poll(0)
    if events and events[0][1] & select.POLLNVAL:
        raise AssertionError("a closed pidfd tells nothing")  # raised: under -O a live process would seem to be dead
    return bool(events)


class Deaths:
    """Watches processes on an event loop: one pidfd for each, however many sessions it has.

    All calls belong on the loop's thread. Watched pidfds belong to this object, which closes each exactly once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[Process, _Watch] = {}

    def __len__(self) -> int:
        """How many processes are watched."""
        return len(self._watched)

    def watch(self, process: Process, pidfd: int, on_death: Callable[[Process], None]) -> None:
        """Call `on_death(process)` once, on the loop, when the process ends; in the next turn if it has ended already.

        Every further watch of a process counts, and must name the same `on_death`: the death of a process is one event.
        The pidfd is ours from here on, also if this raises.
        """
        watch = self._watched.get(process)
        if watch is not None:
            if pidfd != watch.pidfd:
                os.close(pidfd)
            assert watch.on_death == on_death, "a process dies once: one callback for all who watch it"
            watch.count += 1
            return
        try:
            self._loop.add_reader(pidfd, self._on_readable, process)
        except BaseException:
            os.close(pidfd)
            raise
        self._watched[process] = _Watch(pidfd, on_death)

    def forget(self, process: Process) -> None:
        """Take back one watch; with the last one the pidfd is closed. Nothing happens if the death was told already."""
        watch = self._watched.get(process)
        if watch is not None:
            watch.count -= 1
            if watch.count == 0:
                self._drop(process)

    def close(self) -> None:
        """Watch nothing any more."""
        for process in list(self._watched):
            self._drop(process)

    def _on_readable(self, process: Process) -> None:
        # Kernels before 6.15 may wake a pidfd's watchers when only the first thread of a process has ended: look again.
        watch = self._watched.get(process)
        if watch is not None and is_dead(watch.pidfd):
            self._drop(process)
            watch.on_death(process)

    def _drop(self, process: Process) -> None:
        watch = self._watched.pop(process)
        self._loop.remove_reader(watch.pidfd)
        os.close(watch.pidfd)


@dataclass(slots=True)
class _Watch:
    pidfd: int
    on_death: Callable[[Process], None]
    count: int = 1


def _open_by_number(sock: socket.socket | trsock.TransportSocket, pid: int) -> int | None:
    """The way before SO_PEERPIDFD: by number, then prove that the number did not change hands meanwhile."""
    start = _start_of(pid)
    if start is None:
        return None
    try:
        pidfd = _pidfd_open(pid)
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None
    return _kept_if(pidfd, lambda: _is_up(sock) and _start_of(pid) == start and not is_dead(pidfd))


def _kept_if(pidfd: int, proved: Callable[[], bool]) -> int | None:
    """The pidfd if the proof succeeds. Otherwise, and if it raises, it is closed."""
    keep = False
    try:
        keep = proved()
    finally:
        if not keep:
            os.close(pidfd)
    return pidfd if keep else None


def _is_this(process: Process, pidfd: int) -> bool:
    start = _start_of(process.pid)
    if is_dead(pidfd):
        return False
    if start is None:
        raise UnknownProcess(f"process {process.pid} lives, but its start time is hidden")
    return start == process.start


def _pidfd_open(pid: int) -> int:
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _is_up(sock: socket.socket | trsock.TransportSocket) -> bool:
    """Whether the other end still holds the connection. Polled, not read: a loop's sockets cannot be peeked into."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP if sys.platform == "linux" else 0)
    return not poll.poll(0)


def _here() -> tuple[str, str] | None:
    """Boot id and pid namespace of this process. None unless /proc is there and numbers processes as we do."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None  # mounted in another pid namespace
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None
    boot_id = _read("/proc/sys/kernel/random/boot_id", 64)
    return (boot_id.decode("ascii").strip(), namespace) if boot_id else None


def _start_of(pid: int) -> int | None:
    stat = _read(f"/proc/{pid}/stat", 4096)
    if not stat:
        return None
    # Field 2 is the name in parentheses, and may hold spaces and parentheses itself: fields count from the last one.
    fields = stat[stat.rindex(b")") + 1 :].split()
    return int(fields[22 - 3])


def _read(path: str, bytes_max: int) -> bytes | None:
    """The beginning of a file of /proc. None when it is not there or not ours to read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None
    try:
        return os.read(fd, bytes_max)
    except OSError:  # it ended between the two calls
        return None
    finally:
        os.close(fd)

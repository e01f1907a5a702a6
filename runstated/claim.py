"""The name of a state directory among the processes of this machine (Linux).

The lock is on a file. Where the directory was moved away or deleted, a new daemon for the same path finds no lock,
while the old one still serves those who are connected to it. So a daemon also listens on an abstract socket named after
the path. The next one finds the name taken and connects: then the old one looks at its files, and if they are gone it
says what belongs in the directory and leaves.

    what the old one says:  its belongings, a line of JSON; then `here`, if its files are where they should be
                            (containers that share a network see each other's names, but have directories of their
                            own), or its belongings once more, when it has closed its database
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from pathlib import Path

from runstate import paths, presence
from runstate.presence import LockInfo
from runstated import settings
from runstated.guard import Guard
from runstated.host import processes
from runstated.host.lockfile import Lock

ANSWER_MS = settings.DRAIN_MS + 5_000
TRIES = 500  # to get the name of a process that is about to end
AGAIN_MS = 10
HERE = b"here\n"


class NameTaken(Exception):
    """Another daemon was started for this directory, and does not say what became of it."""


class Claim:
    """The hold on a directory's name. ``heard``: what the daemon before said belongs there."""

    def __init__(self, sock: socket.socket | None, heard: LockInfo | None) -> None:
        self.heard = heard
        self._socket = sock
        self._told: list[socket.socket] = []

    def keep(self, guard: Guard, lock: Lock) -> None:
        """Answers the daemons that come for the name."""
        if self._socket is not None:
            self._socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self._socket, self._answer, self._socket, guard, lock)

    def _answer(self, sock: socket.socket, guard: Guard, lock: Lock) -> None:
        try:
            other, _ = sock.accept()
        except OSError:
            return  # it has hung up, or no descriptors are left
        if processes.peer(other).uid == os.geteuid():
            self._told.append(other)
            _say(other, lock.info.belongings.encode())
            if not guard.look():
                return
            _say(other, HERE)
            self._told.remove(other)
        other.close()

    def release(self, lock: Lock) -> None:
        """Gives the name back, and says what belongs in the directory now that the database is closed."""
        for other in self._told:
            _say(other, lock.info.belongings.encode())
            other.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()


def take(directory: Path) -> Claim:
    """The claim on a directory, without the name where that cannot be had. Raises NameTaken."""
    if not sys.platform.startswith("linux"):
        return Claim(None, None)
    name = paths.claim_name(directory)
    heard: LockInfo | None = None
    for _ in range(TRIES):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(name)
            sock.listen()
            return Claim(sock, heard)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                return Claim(None, heard)
        is_other, said = _ask(name)
        if is_other:
            return Claim(None, None)
        heard = said or heard
        time.sleep(AGAIN_MS / 1000)
    raise NameTaken("another runstated was started for this directory and does not end")


def _ask(name: bytes) -> tuple[bool, LockInfo | None]:
    """Whether the owner of the name has nothing to do with our directory, and what it says belongs there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_MS / 1000)
        said = b""
        try:
            sock.connect(name)
            owner = processes.peer(sock)
            if owner.uid != os.geteuid():
                return True, None  # anybody may take any name
            while piece := sock.recv(65_536):
                said += piece
        except TimeoutError:
            raise NameTaken(
                f"another runstated (pid {owner.pid}) was started for this directory, which was moved or replaced"
                f" since, and does not answer: end it with `kill {owner.pid}`"
            ) from None
        except OSError:
            pass  # it has just ended
    lines = said.splitlines()
    return bool(lines) and lines[-1] == HERE.strip(), presence.decode(lines[-1]) if lines else None


def _say(other: socket.socket, line: bytes) -> None:
    try:
        other.sendall(line)
    except OSError:
        pass  # it has hung up

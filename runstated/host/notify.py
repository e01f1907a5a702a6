"""What the daemon tells its service manager, and the sockets it gets from it.

Both protocols are a few environment variables and one datagram (sd_notify(3), sd_listen_fds(3)), so no library is
needed. The variables are taken out of the environment when they are read: they are meant for this process alone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

log = logging.getLogger(__name__)


class Notifier:
    """READY, STOPPING, WATCHDOG and STATUS for the manager that started us; silent when there is none."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(environ)  # the manager's limit; None when it sets none
        for name in NOTIFY_VARIABLES:
            environ.pop(name, None)

    def ready(self, status: str) -> None:
        self.send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def stopping(self, status: str) -> None:
        self.send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        self.send("WATCHDOG=1")

    def send(self, message: str) -> None:
        """One datagram. A manager that cannot be reached is no reason to stop serving: it is logged and left."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1)  # a manager that does not read must not stop the daemon
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("cannot notify the service manager: %s", error)


def _address(named: str) -> str | bytes | None:
    if named.startswith("@"):
        return b"\0" + os.fsencode(named[1:])  # the abstract namespace
    return named if named.startswith("/") else None  # vsock: addresses are for virtual machines, not for us


def _watchdog_s(environ: MutableMapping[str, str]) -> float | None:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None  # inherited from a parent whose watchdog it is
    return int(usec) / 1e6


def listen_fds(
    environ: MutableMapping[str, str] = os.environ, first: int = FIRST_DESCRIPTOR
) -> list[tuple[str, socket.socket]]:
    """The listening sockets we were started with, as (name, socket); the name is "unknown" when none was given."""
    values = {name: environ.pop(name, "") for name in LISTEN_VARIABLES}
    if values["LISTEN_PID"] != str(os.getpid()) or not values["LISTEN_FDS"].isdecimal():
        return []
    count = int(values["LISTEN_FDS"])
    names = values["LISTEN_FDNAMES"].split(":") if values["LISTEN_FDNAMES"] else []
    names += ["unknown"] * (count - len(names))
    found = []
    for offset in range(count):
        os.set_inheritable(first + offset, False)
        found.append((names[offset], socket.socket(fileno=first + offset)))
    return found

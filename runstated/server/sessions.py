"""Who is connected: hello, peer credentials, the death of a process, the time to come back.

    hello --> connected --bye--------------------------------------------> ended, what it held is given back
                 |  ^ hello with the same id, from the same process and with the same key
                 +--connection lost--> away --RESUME_MS passed-----------> ended, as if it had died
                 +-----------------------+----the kernel says it died----> ended, died

The kernel's word (a pidfd) decides. Where there is none (another pid namespace, no pidfds) the connection's end does.
Of a remote session (over TCP or HTTP) neither says anything: its leases decide. It stays away for as long as it holds
something, over TCP also for REMOTE_RESUME_MS, and ends at the first look, RESUME_MS after the last, that finds nothing.

All these times are of the lease clock, and who was asleep when the daemon was has one of them anew.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Literal, Protocol

from runstate import wire
from runstate.wire import PROTOCOL, PROTOCOL_MIN
from runstated.domain import sessions as rows
from runstated.domain.access import Access
from runstated.engine.engine import Engine
from runstated.engine.entries import Away, Ended, Opened
from runstated.host import processes
from runstated.host.clock import Timer
from runstated.host.processes import Deaths, Process
from runstated.settings import OPENING_MS, REMOTE_RESUME_MS, RESUME_MS

Transport = Literal["unix", "tcp", "http"]

REMOTE_ID_CHARACTERS_MIN = 16  # 64 random bits in hexadecimal digits: over TCP the id and the key are all that tells

log = logging.getLogger(__name__)


class Wire(Protocol):
    """A connection, as far as sessions need it."""

    def send(self, request_id: int, body: bytes) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Who is at the other end, by the kernel, and over what. ``pidfd`` belongs to whoever holds this."""

    pid: int
    process: Process | None
    pidfd: int | None
    transport: Transport = "unix"


@dataclass(slots=True, eq=False)
class Session:
    """One session that is open. ``watched``: the kernel tells of its process's death. ``away_ms``: since when, on the
    lease clock, it has no connection."""

    row: rows.Session
    process: Process | None
    watched: bool
    wire: Wire | None = None
    away_ms: int = 0
    timer: Timer | None = None

    @property
    def is_remote(self) -> bool:
        return self.row.transport != "unix"


class HelloRefused(Exception):
    """The hello cannot be accepted; ``code`` and the message go to the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sessions:
    """All sessions; the outbox of the engine."""

    def __init__(self, engine: Engine, version: str, pid: int) -> None:
        self._engine = engine
        self._version = version
        self._pid = pid
        self._loop = asyncio.get_running_loop()
        self._deaths = Deaths(self._loop)
        self._open: dict[str, Session] = {}
        self._of_process: dict[Process, dict[str, None]] = {}
        self._expected: set[str] = set()
        self._opening: Timer | None = None
        self._closing = False
        engine.outbox = self
        engine.keys_changed = self._end_revoked

    # ------------------------------------------------------------------ after a restart

    async def restore(self, known: list[rows.Session]) -> None:
        """Takes over the sessions of the daemon's last life. Those whose process is gone have let go of everything
        when this returns; for the others the lines stay shut until they are back, or OPENING_MS have passed. Nobody
        waits for those of HTTP clients: they come back with their next request, if there is one."""
        for row in known:
            try:
                process = Process.from_text(row.process) if row.process else None
                pidfd = processes.reopen(process) if process else None
            except (processes.UnknownProcess, ValueError):
                process = pidfd = None
            if (process is not None and pidfd is None) or not self._engine.keyring.is_live(row.key):
                if pidfd is not None:
                    os.close(pidfd)
                self._engine.submit(Ended(row.session, "died"))
                continue
            self._add(Session(row, process, watched=pidfd is not None), pidfd)
            if row.transport != "http":
                self._expected.add(row.session)
        if self._expected:
            self._engine.hold_back()
        await self._engine.settle()

    def listening(self) -> None:
        """The socket accepts from now on: the time to come back begins."""
        for session in self._open.values():
            if session.wire is None:
                self._is_away(session)
        if self._expected:
            self._await_expected()

    def _await_expected(self) -> None:
        since_ms = self._engine.clock.lease_ms()
        self._opening = self._engine.after(OPENING_MS, lambda: self._enough_awaited(since_ms))

    def _enough_awaited(self, since_ms: int) -> None:
        self._await_expected() if self._engine.clock.woke_ms() >= since_ms else self._open_lines()

    def _open_lines(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
            self._expected.clear()
            self._engine.open_lines()

    # ------------------------------------------------------------------ in

    def hello(self, connection: Wire, request_id: int, hello: wire.Hello, origin: Origin, access: Access) -> str:
        """Opens or resumes a session for a connection; its name. Welcome follows when the session is on disk.
        ``access`` is what the caller has shown to have; the space and the key in ``hello`` are not looked at.

        Raises HelloRefused.
        """
        protocol = min(PROTOCOL, hello.protocol)
        if protocol < max(PROTOCOL_MIN, hello.protocol_min):
            raise HelloRefused(
                "PROTOCOL",
                f"this daemon ({self._version}) speaks protocol {PROTOCOL_MIN} to {PROTOCOL}, the client"
                f" {hello.protocol_min} to {hello.protocol}: install matching versions",
            )
        if not self._engine.keyring.is_live(access.key):
            raise HelloRefused("UNAUTHENTICATED", f"the key {access.key} was revoked")
        if origin.transport == "tcp" and len(hello.session) < REMOTE_ID_CHARACTERS_MIN:
            raise HelloRefused(
                "VALIDATION_FAILED",
                f"over TCP a session id has at least {REMOTE_ID_CHARACTERS_MIN} characters, and must be random",
            )
        name = access.session_name(origin.transport, hello.session)
        session = self._open.get(name)
        resumed = session is not None
        if session is None:
            session = self._new(name, hello, origin, access)
        else:
            _check_same(session, hello, origin)
            if origin.pidfd is not None:
                os.close(origin.pidfd)  # the process is watched already
            if session.wire is not None and session.wire is not connection:
                session.wire.end()
        session.wire = connection
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        welcome = wire.Welcome(protocol=protocol, version=self._version, pid=self._pid, resumed=resumed)
        self._engine.submit(Opened(session.row, request_id, hello.runs, welcome))
        if resumed:
            self._engine.submit(Away(name, away=False))
        self._expected.discard(name)
        if not self._expected:
            self._open_lines()
        return name

    def _end_revoked(self) -> None:
        """The keys have changed: the sessions of those that are revoked end, with their connections."""
        for name, session in list(self._open.items()):
            if not self._engine.keyring.is_live(session.row.key):
                self._end(name, "died")

    def bye(self, name: str) -> None:
        """The session ends in good order."""
        self._end(name, "released")

    def lost(self, name: str, connection: Wire) -> None:
        """A connection has ended without a bye."""
        session = self._open.get(name)
        if session is None or session.wire is not connection or self._closing:
            return
        session.wire = None
        self._engine.submit(Away(name, away=True))
        self._is_away(session)

    def drain(self) -> None:
        """Tells everybody to reconnect; sessions stay as they are on disk for the next life of the daemon."""
        self._closing = True
        body = wire.encode(wire.Reconnect())
        for session in self._open.values():
            if session.wire is not None:
                session.wire.send(0, body)
            if session.timer is not None:
                session.timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self._deaths.close()

    # ------------------------------------------------------------------ out

    def reply(self, session: str, request_id: int, body: bytes) -> None:
        found = self._open.get(session)
        if request_id and found is not None and found.wire is not None:
            found.wire.send(request_id, body)

    def push(self, session: str, body: bytes) -> None:
        found = self._open.get(session)
        if found is not None and found.wire is not None:
            found.wire.send(0, body)

    def is_connected(self, session: str) -> bool:
        """Whether a session has a connection now (for display)."""
        found = self._open.get(session)
        return found is not None and found.wire is not None

    def row(self, session: str) -> rows.Session | None:
        """Who a session is."""
        found = self._open.get(session)
        return found.row if found else None

    def __len__(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------------ helpers

    def _new(self, name: str, hello: wire.Hello, origin: Origin, access: Access) -> Session:
        row = rows.Session(
            session=name,
            space=access.space,
            worker=hello.worker,
            process=origin.process.to_text() if origin.process and origin.pidfd is not None else "",
            pid=origin.pid or hello.pid,
            command=hello.command,
            key=access.key,
            transport=origin.transport,
        )
        session = Session(row, origin.process, watched=origin.pidfd is not None)
        self._add(session, origin.pidfd)
        return session

    def _add(self, session: Session, pidfd: int | None) -> None:
        self._open[session.row.session] = session
        if session.process is not None and pidfd is not None:
            self._of_process.setdefault(session.process, {})[session.row.session] = None
            self._deaths.watch(session.process, pidfd, self._on_death)

    def _on_death(self, process: Process) -> None:
        for name in list(self._of_process.get(process, ())):
            self._end(name, "died", told_by_kernel=True)

    def _end(self, name: str, how: str, *, told_by_kernel: bool = False) -> None:
        session = self._open.pop(name, None)
        if session is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        if session.watched and session.process is not None:
            names = self._of_process[session.process]
            del names[name]
            if not names:
                del self._of_process[session.process]
            if not told_by_kernel:
                self._deaths.forget(session.process)
        connection, session.wire = session.wire, None
        if connection is not None and how == "died":
            connection.end()
        self._engine.submit(Ended(name, how), first=True)
        self._expected.discard(name)
        if not self._expected:
            self._open_lines()

    def _is_away(self, session: Session) -> None:
        session.away_ms = self._engine.clock.lease_ms()
        self._give_time(session)

    def _give_time(self, session: Session) -> None:
        session.timer = self._engine.after(RESUME_MS, lambda: self._time_is_up(session))

    def _time_is_up(self, session: Session) -> None:
        if self._engine.clock.woke_ms() >= session.away_ms:
            self._is_away(session)  # we overslept, and with us perhaps the hello
        elif session.is_remote:
            self._end_if_idle(session)
        else:
            self._end(session.row.session, "died")

    def _end_if_idle(self, session: Session) -> None:
        """A remote session that is away ends when it holds nothing any more. Who only waits, or has others do its jobs,
        holds nothing: over TCP it is given as long as a lease would have."""
        if session.wire is not None or self._open.get(session.row.session) is not session or self._closing:
            return
        away_ms = self._engine.clock.lease_ms() - session.away_ms
        may_be_back = session.row.transport == "tcp" and away_ms < REMOTE_RESUME_MS
        if may_be_back or self._engine.holds_anything(session.row.session):
            self._give_time(session)
        else:
            self._end(session.row.session, "died")


def _check_same(session: Session, hello: wire.Hello, origin: Origin) -> None:
    """Raises HelloRefused for another process than the one that has opened the session; where the kernel did not tell
    which that was, by its number. A process that was seen from another pid namespace has another number there."""
    if session.process is not None:
        same = origin.process == session.process
    else:
        seen_elsewhere = bool(session.row.process)
        same = session.is_remote or seen_elsewhere or session.row.pid == (origin.pid or hello.pid)
    if not same:
        raise HelloRefused("CONFLICT", f"the session {hello.session} belongs to another process")

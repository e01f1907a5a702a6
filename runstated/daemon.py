"""The life of the daemon, from the first system call to the last.

    umask, state directory, host check ── lock ── log, limits ── store, engine ── bind, listen ── lock text ── READY
                                                                                                      │
    lock given back <── store closed <── engine closed <── open calls told to reconnect <── SIGTERM, SIGINT, replaced

The lock comes before anything is opened and is given back after everything is closed, so whoever holds it may replace a
socket file and open the database without asking anybody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runstate
from runstate import paths, presence
from runstated import claim, settings
from runstated.guard import Guard
from runstated.host import lockfile, logs, notify, reserve
from runstated.host.clock import Clock
from runstated.settings import Settings
from runstated.store import files

if TYPE_CHECKING:
    import ssl

    from runstated.engine.engine import Engine

log = logging.getLogger("runstated")


class DaemonError(Exception):
    """The daemon cannot start, or cannot go on; the message is for the user."""


EXIT_TEMPFAIL = 75  # as in sysexits.h: the disk has refused what was to be recorded

# What can be wrong with a machine, its files or the settings. All else is a fault of ours.
EXPECTED = (DaemonError, lockfile.UnfitError, files.FilesError, claim.NameTaken, OSError)


def serve(config: Settings, ready: Callable[[], None], *, foreground: bool) -> None:
    """Run the daemon until it is told to stop. Raises LockHeld, DaemonError, UnfitError or OSError otherwise."""
    life = run(config, ready, foreground=foreground)
    try:
        import uvloop
    except ImportError:  # no CPython, or a platform it is not built for
        asyncio.run(life)
    else:
        uvloop.run(life)


async def run(config: Settings, ready: Callable[[], None], *, foreground: bool = True) -> None:
    os.umask(0o077)
    prepare_state_dir(config.state_dir)
    lock = lockfile.acquire(config.lock, _lock_info(config, foreground))
    try:
        logs.set_up(config, foreground=foreground)
        held = claim.take(config.state_dir)
        try:
            _know_files(config, lock, held.heard or lock.before)
            await _live(_as_before(config, lock.before), lock, held, ready)
        finally:
            held.release(lock)
    except Exception as error:
        told = logs.words_of(error) or type(error).__name__
        log.error("cannot go on: %s", told, exc_info=None if isinstance(error, EXPECTED) else error)
        raise
    finally:
        lock.release()


def _know_files(config: Settings, lock: lockfile.Lock, before: presence.LockInfo | None) -> None:
    """The lock file says which database belongs here before anything of it is opened or made. Raises FilesError."""
    lock.announce(lock.info.keeping(before or presence.LockInfo()))
    if config.new_database:
        kept = files.put_aside(config.database, int(lock.info.started))
        log.warning("starting with a new database; the one before: %s", kept or "there was none")
        before = None
    batch, has_log = files.check(config.database, before)
    if before is None or not before.database:
        before = presence.LockInfo(database=files.make_id(), fresh=True)
    lock.announce(lock.info.keeping(replace(before, batch=batch, wal=has_log)))


async def _live(config: Settings, lock: lockfile.Lock, held: claim.Claim, ready: Callable[[], None]) -> None:
    notifier = notify.Notifier()
    raise_descriptor_limit()
    stopping = _stop_on_signals()
    log.info("runstated %s starts in %s", runstate.__version__, config.state_dir)
    listener = Listener.open(config.socket)
    guard = Guard(lock, listener, stopping)
    service = Service(config, listener, guard)
    held.keep(guard, lock)
    try:
        with reserve.lent(config.reserve):
            await service.start()
        lock.announce(service.announced(replace(lock.info, socket=str(listener.path))))
        notifier.ready(f"Listening on {listener.path}")
        log.info("ready on %s", listener.path)
        ready()
        await _watch(guard, notifier)
        notifier.stopping("Draining")
        log.info("stopping: %s", guard.lost or "asked to")
    finally:
        listener.unlink()  # first: who comes now sees "absent, but the lock is held" and waits for the next daemon
        await service.stop()
    if guard.lost is not None:
        raise DaemonError(guard.lost)
    if service.unrecorded:
        raise SystemExit(EXIT_TEMPFAIL)
    log.info("stopped")


def _as_before(config: Settings, before: presence.LockInfo | None) -> Settings:
    """With the listeners of a daemon that has died, unless others are named: it may be a client that starts this one,
    and knows nothing of them."""
    if before is None or not before.listeners or config.tcp is not None or config.http is not None:
        return config
    try:
        found = settings.load({**before.listeners, "state_dir": str(config.state_dir), "socket": str(config.socket)})
    except settings.SettingsError as error:
        log.warning("not listening where the daemon did that died: %s", error)
        return config
    log.info("listening where the daemon did that died: %s", ", ".join(map(str, filter(None, (found.tcp, found.http)))))
    return replace(
        config,
        tcp=found.tcp,
        http=found.http,
        http_hosts=found.http_hosts,
        tls_cert=found.tls_cert,
        tls_key=found.tls_key,
        is_as_before=True,
    )


class Service:
    """The parts between the database and the socket, put together and taken apart in order.

    The one place to change when a part's constructor does.
    """

    def __init__(self, config: Settings, listener: Listener, guard: Guard) -> None:
        self._config, self._listener, self._guard = config, listener, guard
        self._undo: list[tuple[str, Callable[[], Awaitable[Any]]]] = []
        self._tcp = self._http = ""
        self._engine: Engine | None = None

    async def start(self) -> None:
        config = self._config
        tcp, http, tls = _listen(config)  # first: imports take a while, and who connects meanwhile waits
        # Imported here, so that a refused second daemon and `--help` do not pay for the engine.
        from runstated.engine.engine import Engine
        from runstated.server import listening
        from runstated.server.server import Server
        from runstated.store import sqlite

        new_id, backup = self._guard.database, not config.no_backup
        try:
            store = await sqlite.Store.open(config.database, config.sync, new_id=new_id, backup=backup)
        except sqlite.StoreError as error:
            raise DaemonError(str(error)) from error
        engine = Engine(store, Clock())
        self._undo.append(("the store", partial(self._guard.close, store, engine)))
        self._engine = engine
        self._undo.append(("the engine", engine.close))
        await engine.start()
        self._guard.watch(store, engine)
        server = Server(
            engine,
            version=runstate.__version__,
            socket_path=str(self._listener.path),
            inherited=config.inherited,
        )
        server.may_serve = self._guard.look
        self._undo.append(("the server", server.drain))
        await server.listen(self._listener.socket, tcp, tls)
        if tcp is not None:
            self._tcp = str(listening.bound_to(tcp))
        if http is not None:
            from runstated.http.listener import HttpListener  # half of a start's time, for those who want it only

            listener = await HttpListener.open(
                http,
                engine,
                server.sessions,
                version=runstate.__version__,
                may_serve=self._guard.look,
                hosts=self._http_hosts(),
                certificate=config.tls_cert,
                key=config.tls_key,
            )
            self._undo.append(("the HTTP listener", listener.close))
            self._http = str(listening.bound_to(http))

    def announced(self, info: presence.LockInfo) -> presence.LockInfo:
        """What is said of this daemon, with where it listens beside the socket."""
        cert, key = (str(path or "") for path in (self._config.tls_cert, self._config.tls_key))
        hosts = ",".join(self._http_hosts()) if self._http else ""
        return replace(info, tcp=self._tcp, http=self._http, http_hosts=hosts, tls_cert=cert, tls_key=key)

    def _http_hosts(self) -> tuple[str, ...]:
        """The names under which HTTP may be asked for: also the one that was looked up to listen."""
        named = (self._config.http.host,) if self._config.http is not None else ()
        return tuple(dict.fromkeys((*named, *self._config.http_hosts)))

    @property
    def unrecorded(self) -> int:
        """How many outcomes the disk has refused until the end."""
        return self._engine.unrecorded if self._engine is not None else 0

    async def stop(self) -> None:
        """The reverse of `start`, as far as it got. A part that hangs or fails does not keep the rest from closing."""
        while self._undo:
            name, close = self._undo.pop()
            try:
                await asyncio.wait_for(close(), settings.DRAIN_MS / 1000)
            except asyncio.TimeoutError:
                log.error("%s did not close within %d ms", name, settings.DRAIN_MS)
            except Exception:
                log.exception("%s failed to close", name)


def _listen(config: Settings) -> tuple[socket.socket | None, socket.socket | None, ssl.SSLContext | None]:
    """The sockets for TCP and for HTTP, and the TLS of the first. Raises DaemonError."""
    from runstated.server import listening

    tcp = http = tls = None
    try:
        tls = listening.tls(config.tls_cert, config.tls_key)
        tcp = listening.bind(config.tcp) if config.tcp is not None else None
        http = listening.bind(config.http) if config.http is not None else None
    except listening.CannotListen as error:
        if not config.is_as_before:
            raise DaemonError(str(error)) from error
        log.warning("%s; the daemon goes on without", error)  # nobody has asked this daemon for it
    return tcp, http, tls


class Listener:
    """The bound socket: our own, or one that the service manager opened and keeps."""

    def __init__(self, sock: socket.socket, path: Path, *, is_own: bool) -> None:
        self.socket, self.path, self.is_own = sock, path, is_own
        self._identity = _identity(path) if is_own else None

    @classmethod
    def open(cls, path: Path) -> Listener:
        for name, given in notify.listen_fds():
            if given.family == socket.AF_UNIX and given.type == socket.SOCK_STREAM:
                return cls(given, Path(given.getsockname()), is_own=False)
            log.warning("the socket %r of the service manager is not a Unix stream socket; it is not used", name)
            given.close()
        return cls(bind(path), path, is_own=True)

    def is_ours(self) -> bool:
        """Whether clients that connect to the path reach us. A service manager's socket is the manager's affair."""
        return not self.is_own or _identity(self.path) == self._identity

    def refresh(self) -> None:
        """Keep the cleaners of /tmp, which go by age, away from a socket there."""
        if self.is_own and paths.is_short(self.path):
            os.utime(self.path)

    def unlink(self) -> None:
        if self.is_own and self._identity is not None and self.is_ours():
            self._identity = None
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:  # the next daemon replaces it
                log.warning("cannot remove the socket %s: %s", self.path, error.strerror)


def bind(path: Path) -> socket.socket:
    """A bound socket that does not listen yet. A stale file is replaced: we hold the lock, so its owner is gone.

    Unless the path was named by hand and belongs to a daemon of another state directory: that one still answers.
    """
    if paths.is_short(path):
        paths.private_directory(path.parent)
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
    except OSError as error:
        sock.close()
        raise DaemonError(f"cannot bind the socket {path}: {error.strerror or error}") from error
    return sock


def _remove_stale(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise DaemonError(f"{path} is in the way: it is not a socket; remove it or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise DaemonError(f"the socket {path} is in use: {error.strerror or error}") from error
    raise DaemonError(f"another process, of another state directory, listens on {path}; choose another --socket")


async def _watch(guard: Guard, notifier: notify.Notifier) -> None:
    """Wait for the order to stop, or until our lock or socket was replaced. The same slow pulse feeds the service
    manager's watchdog."""
    pulse_s = settings.PULSE_MS / 1000
    if notifier.watchdog_s is not None:
        pulse_s = min(pulse_s, notifier.watchdog_s / 2)
    while not guard.stopping.is_set():
        notifier.alive()
        try:
            await asyncio.wait_for(guard.stopping.wait(), pulse_s)
        except asyncio.TimeoutError:
            if guard.look():
                guard.listener.refresh()


def _stop_on_signals() -> asyncio.Event:
    """SIGTERM and SIGINT set the event; a second one ends the process at once, which loses nothing acknowledged.

    SIGTERM does so whatever our parent has blocked or ignored. A SIGINT that is ignored stays ignored: a script's shell
    does that to what it runs in the background, for there a Ctrl-C is not for us.
    """
    stopping = asyncio.Event()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)

    def stop(number: int) -> None:
        if stopping.is_set():
            log.warning("second signal: leaving at once")
            os._exit(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal we were started from may close
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # last: what has come meanwhile is heard now
    return stopping


def prepare_state_dir(directory: Path) -> None:
    """A directory of ours, mode 0700, on a file system that keeps its promises."""
    try:
        paths.private_directory(directory, follow=True)
    except OSError as error:
        raise DaemonError(f"cannot use the state directory: {error}") from error
    lockfile.check_host(directory)


def raise_descriptor_limit() -> None:
    """Each client is a descriptor or two; the usual soft limit of 1024 is for programs that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS calls the hard limit infinite and refuses it
        log.info("the limit of open files stays at %d: %s", soft, error)


def _lock_info(config: Settings, foreground: bool) -> presence.LockInfo:
    return presence.LockInfo(
        pid=os.getpid(),
        version=runstate.__version__,
        started=Clock().wall_ms() / 1000,
        log="" if foreground else str(config.log),
        inherited=", ".join(config.inherited),
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

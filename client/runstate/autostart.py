"""Getting a socket to the daemon: connect, and start it first if it is this user's own and absent.

What the kernel answers to `connect` decides (anything but "absent" must never start a second daemon, and nothing here
ever unlinks a socket):

    connected                          done
    ENOENT, ECONNREFUSED               absent: start it, if it is ours to start
    EAGAIN                             busy, its backlog is full: again until the caller's time is over
    EPERM, EACCES, EROFS               denied, mostly by a sandbox: say what is denied and which setting opens it

Starting happens under a `flock` on <state>/runstated.spawn.lock, so of many who find no daemon one starts it; the
others try to connect until it answers. The lock belongs to the kernel: Ctrl-C or a crash in the middle leaves nothing
stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runstate import errors, paths, presence, spawn

AUTOSTART_VARIABLE = "RUNSTATE_AUTOSTART"

ABSENT = frozenset({errno.ENOENT, errno.ECONNREFUSED})
DENIED = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})

# Between two looks at a socket that is busy or about to be there. Doubling: the first wait of a start that takes 300 ms
# should be short, the hundredth wait for a daemon that drains need not be.
WAIT_MS_MIN = 4
WAIT_MS_MAX = 64

# Before a daemon that died while it was starting is started again: by a client, for as long as its call has time.
DIED_S_MIN = 0.1
DIED_S_MAX = 2.0


@dataclass(frozen=True)
class Target:
    """The daemon that is meant: where it keeps its state, where it should listen, what to start it with."""

    state_dir: Path
    socket: Path
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def lock(self) -> Path:
        return self.state_dir / paths.LOCK_NAME

    @property
    def stopped(self) -> Path:
        return self.state_dir / paths.STOPPED_NAME


def connect(*, deadline: float) -> socket.socket:
    """A connected socket to this user's daemon, which is started if need be.

    `deadline` is a time of `time.monotonic()`. The socket blocks and is not inherited. Raises UnavailableError when
    there is no daemon to be had, and ConfigError when the socket cannot be trusted.
    """
    target = default_target()
    connected = find(target, deadline=deadline)
    if connected is not None:
        return connected
    if os.environ.get(AUTOSTART_VARIABLE, "").strip() == "0":
        raise unavailable(
            f"runstated is not running (nothing listens on {target.socket}) and {AUTOSTART_VARIABLE} is 0: "
            "run `runstated start`"
        )
    if presence.is_marked_stopped(target.stopped):
        raise unavailable(stopped_message(target))
    return start(target, deadline=deadline, heed_marker=True)


def stopped_message(target: Target) -> str:
    """Why no daemon is started, and what to do."""
    why = presence.why_stopped(target.stopped)
    if why:
        return f"runstated is not started: {why}; then run `runstated start`"
    return "runstated was stopped with `runstated stop`; run `runstated start`"


def unavailable(message: str) -> errors.UnavailableError:
    return errors.UnavailableError(message, code="UNAVAILABLE")


def default_target() -> Target:
    state_dir = paths.state_dir()
    return Target(state_dir, paths.socket_path(state_dir))


FORMS = "unix:///path, tcp://host:port or tls://host:port"


def dial(address: str, *, deadline: float) -> socket.socket:
    """A connected socket to an address that was named: `unix:///path`, `tcp://host:port` or `tls://host:port`. Nothing
    is started."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "unix" and rest.startswith("/"):
        connected = knock(paths.fit(Path(rest)), deadline=deadline)
        if connected is None:
            raise unavailable(f"nothing listens on {address}")
        return connected
    if separator and scheme in ("tcp", "tls"):
        from . import remote

        return remote.dial(address, deadline)
    raise not_an_address(address)


def not_an_address(url: str) -> errors.ConfigError:
    """The error for an address that this client does not speak."""
    if url.startswith(("http://", "https://")):
        return errors.ConfigError(
            f"the address {url!r} (RUNSTATE_BASE_URL or base_url) is one of the HTTP API, for the hosted SDK and other"
            f" programs; this library and the `runstate` command use {FORMS}: unset it to use the daemon of this user"
        )
    return errors.ConfigError(
        f"the address {url!r} (RUNSTATE_BASE_URL or base_url) is not of the form {FORMS}; without it the daemon of this"
        " user is used"
    )


def find(target: Target, *, deadline: float) -> socket.socket | None:
    """A socket to the target's daemon if it runs, on its usual socket or on the one its lock file names."""
    connected = knock(target.socket, deadline=deadline, state_dir=target.state_dir)
    if connected is not None:
        return connected
    holder = holder_of(target)
    if holder is None or holder.socket in ("", str(target.socket)):
        return None
    return knock(Path(holder.socket), deadline=deadline, state_dir=target.state_dir)


def knock(path: Path, *, deadline: float, state_dir: Path | None = None) -> socket.socket | None:
    """Connect to a Unix socket; None when nobody listens there. Waits only for one that is busy, until the deadline."""
    if paths.is_short(path):
        reason = paths.foreign_directory(path.parent)
        if reason is not None:
            raise errors.ConfigError(f"the socket {path} is not to be trusted: {reason}")
    for _ in _tries(deadline):
        try:
            return _connect_once(path, deadline)
        except (BlockingIOError, TimeoutError):
            continue
        except OSError as error:
            if error.errno in ABSENT:
                return None
            if error.errno in DENIED:
                message = denied(f"connecting to the socket {path}", error, state_dir, path)
                raise unavailable(message) from error
            raise unavailable(f"cannot connect to {path}: {error.strerror or error}") from error
    raise unavailable(f"runstated is busy: its socket {path} took no connection in time")


def _connect_once(path: Path, deadline: float) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # Python makes it close-on-exec
    try:
        # With a time-out Python connects without blocking; a full backlog is then EAGAIN at once (Linux).
        connecting.settimeout(max(0.01, deadline - time.monotonic()))
        connecting.connect(os.fspath(path))
        connecting.settimeout(None)
    except BaseException:
        connecting.close()
        raise
    return connecting


def start(target: Target, *, deadline: float, heed_marker: bool = False) -> socket.socket:
    """Start the target's daemon, unless someone else does, and connect to it."""
    _own_state_dir(target)
    with spawn_lock(target, deadline=deadline) as lock:
        return start_locked(target, lock, deadline=deadline, heed_marker=heed_marker)


def start_locked(target: Target, lock: SpawnLock, *, deadline: float, heed_marker: bool = False) -> socket.socket:
    died, pause = None, DIED_S_MIN
    for _ in _tries(deadline):
        connected = find(target, deadline=deadline)
        if connected is not None:
            return connected
        if heed_marker and presence.is_marked_stopped(target.stopped):
            raise unavailable(stopped_message(target))
        # Whoever is about to spawn holds the lock; a holder of the *daemon's* lock is starting or ending by itself,
        # or its socket was taken away: then it should look now.
        is_ours, holder = lock.try_take(), holder_of(target)
        if is_ours and holder is None:
            try:
                _spawn(target, deadline)
            except spawn.Died as error:  # killed in this moment, perhaps by chance
                died = error
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(DIED_S_MAX, pause * 2)
        elif holder is not None and holder.socket:
            _alert(target)
    raise unavailable(str(died) if died is not None else _too_late(target))


def _alert(target: Target) -> None:
    """Makes the daemon look at its files."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alerting, contextlib.suppress(OSError, ValueError):
        alerting.setblocking(False)
        alerting.connect(paths.claim_name(target.state_dir))


def _spawn(target: Target, deadline: float) -> None:
    try:
        units = spawn.installed_units() if not target.options else []
        if units and spawn.systemctl("start", units, deadline=deadline):
            return
        # Said, not found again: the daemon has another working directory, and must not come to another result.
        places = {"state_dir": str(target.state_dir), "socket": str(target.socket)}
        spawn.daemon(target.state_dir, {**places, **target.options}, deadline=deadline)
    except spawn.AlreadyHeld:
        return  # started by other means in this moment: connect to that one
    except spawn.Died:
        raise
    except spawn.SpawnError as error:
        raise unavailable(str(error)) from error
    except OSError as error:
        message = f"runstated is not running and could not be started: {error}{spawn.log_tail(target.state_dir)}"
        if error.errno in DENIED:
            message = denied("starting runstated", error, target.state_dir)
        raise unavailable(message) from error


def _too_late(target: Target) -> str:
    holder = holder_of(target)
    if holder is None:
        return f"runstated did not start in time{spawn.log_tail(target.state_dir)}"
    return (
        f"runstated (pid {holder.pid or '?'}) holds {target.lock} but does not answer on "
        f"{holder.socket or target.socket}{spawn.log_tail(target.state_dir)}"
    )


def holder_of(target: Target) -> presence.LockInfo | None:
    try:
        return presence.inspect(target.lock)
    except OSError as error:
        if error.errno in DENIED:
            message = denied(f"reading {target.lock}", error, target.state_dir)
            raise unavailable(message) from error
        raise unavailable(f"cannot read {target.lock}: {error}") from error


def _own_state_dir(target: Target) -> None:
    """Only the owner of the state directory starts its daemon: a root shell must not leave root's files in a user's."""
    try:
        paths.private_directory(target.state_dir, follow=True)
    except OSError as error:
        if error.errno in DENIED:
            message = denied(f"creating the state directory {target.state_dir}", error, target.state_dir)
        else:
            message = f"runstated is not running and is not started here: {error}"
        raise unavailable(message) from error


class SpawnLock:
    """The lock under which the daemon is started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_taken = False

    def try_take(self) -> bool:
        if not self.is_taken:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_taken = True
            except BlockingIOError:
                pass
        return self.is_taken

    def release(self) -> None:
        # An explicit unlock, not just a close: a process forked meanwhile by another thread has a copy.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


@contextlib.contextmanager
def spawn_lock(target: Target, *, deadline: float) -> Iterator[SpawnLock]:
    path = target.state_dir / paths.SPAWN_LOCK_NAME
    try:
        lock = SpawnLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        message = (
            denied(f"opening {path}", error, target.state_dir)
            if error.errno in DENIED
            else f"cannot open {path}: {error}"
        )
        raise unavailable(message) from error
    try:
        yield lock
    finally:
        lock.release()


def _tries(deadline: float) -> Iterator[None]:
    """One try at once, then more with growing waits between them until the deadline."""
    wait_s = WAIT_MS_MIN / 1000
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(wait_s, left))
        wait_s = min(wait_s * 2, WAIT_MS_MAX / 1000)


def denied(what: str, error: OSError, state_dir: Path | None, path: Path | None = None) -> str:
    """The text for EPERM, EACCES and EROFS: what was denied, by which sandbox if we can tell, what would open it."""
    reason = error.strerror or str(error)
    name, setting = sandbox(state_dir or paths.state_dir(), path or paths.socket_path())
    return f"{what} was denied ({reason}): {name}; {setting}"


def sandbox(state_dir: Path, socket_file: Path, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(who denies, what to set). Told apart by the variables that the sandboxes of coding agents set."""
    outside = "or start runstated outside of it and let the sandbox connect"
    if environ.get("CODEX_SANDBOX_NETWORK_DISABLED") or environ.get("CODEX_SANDBOX"):
        return (
            "this process runs in the Codex sandbox",
            "in ~/.codex/config.toml set [sandbox_workspace_write] network_access = true and "
            f'writable_roots = ["{state_dir}"], {outside}',
        )
    if environ.get("SANDBOX_RUNTIME") or environ.get("CLAUDE_CODE_BUBBLEWRAP"):
        return (
            "this process runs in the sandbox of Claude Code (sandbox-runtime)",
            f'in settings.json set sandbox.network.allowUnixSockets to ["{socket_file}"] (macOS) or '
            f"sandbox.network.allowAllUnixSockets to true (Linux), and add {state_dir} to "
            f"sandbox.filesystem.allowWrite, {outside}",
        )
    return (
        "this process runs in a sandbox or as a user without the right",
        f"allow it to connect to {socket_file} and to write in {state_dir}",
    )

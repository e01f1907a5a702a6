"""Where things are: the state directory, its files and the socket, computed alike by the daemon and by every client.

There is one daemon per user and host, so every path follows from the user alone, never from the working directory, the
runtime directory (it vanishes at logout) or the terminal. From first to last:

    RUNSTATED_STATE_DIR, RUNSTATED_SOCKET  >  the daemon's configuration file  >  the user's state directory

Clients honour the configuration file too: a daemon moved by it must be found by a script that was told nothing.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

APP_NAME = "runstated"

STATE_DIR_VARIABLE = "RUNSTATED_STATE_DIR"
SOCKET_VARIABLE = "RUNSTATED_SOCKET"
CONFIG_VARIABLE = "RUNSTATED_CONFIG"

DATABASE_NAME = "runstate.db"
RESERVE_NAME = "runstated.reserve"
LOG_NAME = "runstated.log"
LOCK_NAME = "runstated.lock"
SPAWN_LOCK_NAME = "runstated.spawn.lock"
SOCKET_NAME = "runstated.sock"
STOPPED_NAME = "runstated.stopped"

# Bytes of sockaddr_un.sun_path, with the NUL that ends it.
SUN_PATH_BYTES = 108 if sys.platform.startswith("linux") else 104

# Not tempfile.gettempdir(): TMPDIR differs between a terminal, cron and an agent's sandbox, and both sides must agree.
SHORT_ROOT = "/tmp"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory that holds everything the daemon keeps. It need not exist yet."""
    named = environ.get(STATE_DIR_VARIABLE, "").strip() or configured("state_dir", environ)
    return absolute(named) if named else default_state_dir()


def socket_path(directory: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket of the daemon that keeps its state in `directory` (default: this user's), short enough to be bound."""
    named = environ.get(SOCKET_VARIABLE, "").strip() or configured("socket", environ)
    if named:
        return fit(absolute(named))
    return fit((directory or state_dir(environ)) / SOCKET_NAME)


def default_state_dir() -> Path:
    """What `platformdirs.user_state_dir` answers.

    On Linux that is one variable and one constant; importing the library for it would cost every short script 35 ms
    (measured), so it is asked only elsewhere. A test compares the two.
    """
    if sys.platform.startswith("linux"):
        return Path(xdg_directory("XDG_STATE_HOME", "~/.local/state")) / APP_NAME
    import platformdirs

    return Path(platformdirs.user_state_dir(APP_NAME, appauthor=False))


def xdg_directory(variable: str, default: str, environ: Mapping[str, str] = os.environ) -> str:
    """One of the XDG base directories. A relative one counts as not set, as the specification has it: it would be
    another one in each working directory."""
    base = environ.get(variable, "")
    return base if os.path.isabs(base) else os.path.abspath(os.path.expanduser(default))


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The daemon's configuration file; it need not exist."""
    named = environ.get(CONFIG_VARIABLE, "").strip()
    if named:
        return absolute(named)
    if sys.platform.startswith("linux"):
        directory = Path(xdg_directory("XDG_CONFIG_HOME", "~/.config")) / APP_NAME
    else:
        import platformdirs

        directory = Path(platformdirs.user_config_dir(APP_NAME, appauthor=False))
    return directory / "runstated.toml"


def configured(key: str, environ: Mapping[str, str] = os.environ) -> str:
    """The path that a top-level key of the configuration file names, or "".

    A file that cannot be read or parsed counts as empty here: the daemon refuses it at start with the reason, and a
    client that complained as well would hide that one good message behind a hundred copies.
    """
    try:
        content = read_config(config_file(environ))
    except (OSError, ValueError):
        return ""
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        return ""
    return str(absolute(value.strip(), config_file(environ).parent))  # the same in every working directory


def read_config(path: Path) -> dict[str, Any]:
    """The parsed configuration file. Raises OSError, or ValueError when it is not TOML."""
    with open(path, "rb") as file:  # first, so that the usual case, no file, imports no parser
        parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        content: dict[str, Any] = parser.load(file)
        return content


def absolute(path: str, base: Path | None = None) -> Path:
    """`~` and relative paths resolved against `base`, else this process's directory; symbolic links are left as they
    are."""
    return Path(os.path.abspath(os.path.join(base or "", os.path.expanduser(path))))


def fit(path: Path) -> Path:
    """`path`, or a short stand-in for it when it does not fit into a socket address.

    The stand-in is a pure function of the user and the path, so a client finds what the daemon bound.
    """
    encoded = os.fsencode(path)
    if len(encoded) < SUN_PATH_BYTES:
        return path
    import hashlib  # rarely needed, and it loads a cryptography library

    return short_directory() / f"{hashlib.sha256(encoded).hexdigest()[:32]}.sock"


def short_directory() -> Path:
    """The directory of this user's stand-in sockets."""
    return Path(SHORT_ROOT) / f"{APP_NAME}-{os.geteuid()}"


def claim_name(directory: Path) -> bytes:
    """The abstract socket (Linux) by which the daemon of a state directory can be found where its files cannot."""
    import hashlib

    return b"\0runstated/%d/%s" % (os.geteuid(), hashlib.sha256(os.fsencode(directory)).hexdigest()[:32].encode())


def is_short(path: Path) -> bool:
    """Whether a socket path is a stand-in made by `fit`."""
    return path.parent == short_directory()


def foreign_directory(path: Path) -> str | None:
    """Why `path` must not be trusted as a private directory of ours, or None when it may.

    Anyone can make a directory under /tmp before we do, or put a symbolic link there, and so become the man in the
    middle; hence lstat, the owner and the mode. The state directory is held to the same (a link to it is the user's own
    choice and is followed, see `follow`).
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return _foreign(path, found)


def private_directory(path: Path, *, follow: bool = False) -> None:
    """Make `path` a directory of mode 0700 that is ours. Raises OSError, with the reason, when it cannot be.

    With `follow`, a symbolic link to a directory of ours is good. A wider mode of our own directory is narrowed.
    """
    try:
        os.makedirs(path.parent, exist_ok=True)
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.stat(path) if follow else os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
        found = os.stat(path) if follow else os.lstat(path)
    reason = _foreign(path, found)
    if reason is not None:
        raise PermissionError(reason)


def _foreign(path: Path, found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a directory"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to user id {found.st_uid}, not to {os.geteuid()}"
    if stat.S_IMODE(found.st_mode) & 0o022:
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}; it should be 0700)"
    return None

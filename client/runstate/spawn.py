"""Starting the daemon in the background: for a client that finds none, and for `runstated start` alike.

The daemon must not die with the script or the terminal that needed it first, must not hold their output open
(`out=$(python once.py)` returns), and must not be their child (a program that waits for its children would get ours).
So the new process gets a session of its own and forks once more before it does anything else; its input and output are
/dev/null and the log; of our descriptors it gets the readiness pipe and nothing else.

The pipe carries one line of JSON: {"pid": ...} once the daemon answers, or {"error": ...} when it will not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from runstate import paths

# What the daemon needs of the caller's environment. The rest stays out: a daemon that lives for weeks must not carry
# the keys, proxies and display of whichever script came first.
KEPT_VARIABLES = frozenset(
    {"HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"}
    | {"VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    | {"PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUTF8"}
    | {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
)
KEPT_PREFIXES = ("LC_", "XDG_", "RUNSTATED_")
# The daemon's working directory is /, so what is relative to ours is made absolute.
PATH_VARIABLES = (
    *(paths.STATE_DIR_VARIABLE, paths.SOCKET_VARIABLE, paths.CONFIG_VARIABLE),
    *("RUNSTATED_TLS_CERT", "RUNSTATED_TLS_KEY", "HOME"),
)

# The packages that the daemon imports first; where they are importable from, so is the rest.
NEEDED_PACKAGES = ("runstated", "runstate", "msgspec", "aiosqlite", "uvloop", "click", "platformdirs")
# The caller's extra import directories go last: nothing in them may shadow the standard library.
BOOTSTRAP = "import os,sys;sys.path+=sys.argv.pop(1).split(os.pathsep);from runstated.__main__ import main;main()"

LOG_TAIL_LINES = 15
UNIT_NAMES = ("runstated.socket", "runstated.service")
UNIT_DIRECTORIES = ("/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user", "/lib/systemd/user")


class SpawnError(Exception):
    """The daemon did not come up; the message says why, with the end of its log."""


class Died(SpawnError):
    """It was killed while it was starting: what cannot start says so, or ends before it is on its own."""


class AlreadyHeld(SpawnError):
    """Someone else's daemon took the state directory first: no failure, there is one to connect to."""


def daemon(state_dir: Path, options: Mapping[str, str], *, deadline: float) -> None:
    """Start the daemon and return when it answers. `options` are settings by name (absolute paths).

    `deadline` is a time of `time.monotonic()`. Raises SpawnError, or OSError when the process cannot be made.
    """
    command = python_command()
    reader, writer = os.pipe()
    try:
        try:
            _launch([*command, "detached", str(writer), json.dumps(dict(options))], writer, state_dir, deadline)
        finally:
            os.close(writer)
        answer = _read_line(reader, deadline)
    finally:
        os.close(reader)
    _check(answer, state_dir)


def _launch(command: list[str], writer: int, state_dir: Path, deadline: float) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(state_dir / paths.LOG_NAME, flags, 0o600)
    try:
        first = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(writer,),
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
    finally:
        os.close(log)
    try:
        code = first.wait(max(0.1, deadline - time.monotonic()))  # it forks and ends at once: see runstated.__main__
    except subprocess.TimeoutExpired:
        raise SpawnError(f"the Python interpreter {command[0]} does not start") from None
    if code != 0:
        raise (Died if code < 0 else SpawnError)(f"runstated ended while it was starting{log_tail(state_dir)}")


def _read_line(reader: int, deadline: float) -> bytes | None:
    """The daemon's line; b"" when it ended without one, None when the time is over."""
    answer = b""
    while not answer.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return None
        piece = os.read(reader, 65_536)
        if not piece:
            return b""
        answer += piece
    return answer


def _check(answer: bytes | None, state_dir: Path) -> None:
    if answer is None:
        raise SpawnError(f"runstated was started but does not answer yet{log_tail(state_dir)}")
    if not answer:
        raise Died(f"runstated ended while it was starting{log_tail(state_dir)}")
    said = json.loads(answer)
    if said.get("held"):
        raise AlreadyHeld(said["error"])
    if "error" in said:
        raise SpawnError(f"runstated could not start: {said['error']}")


def log_tail(state_dir: Path) -> str:
    """The last lines of the daemon's log, ready to be put behind a message; "" when there are none."""
    path = state_dir / paths.LOG_NAME
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return ""
    return f". The end of {path}:" + "".join(f"\n    {line}" for line in lines) if lines else ""


def python_command() -> list[str]:
    """How to run the daemon: this interpreter, with the packages this process can import.

    A checkout on PYTHONPATH, a directory put on sys.path by hand or a zip archive is unknown to a new interpreter, so
    it is handed on. An interpreter that is none (a frozen program, a server that embeds Python) is not started again:
    then the installed `runstated` command is used.
    """
    if is_interpreter(sys.executable) and importlib.util.find_spec("runstated") is not None:
        extra = import_directories()
        if extra:
            return [sys.executable, *_isolation_flags(), "-c", BOOTSTRAP, os.pathsep.join(extra)]
        return [sys.executable, *_isolation_flags(), "-m", "runstated"]
    script = shutil.which("runstated")
    if script is None:
        raise SpawnError(
            "runstated is not running and cannot be started from this program (no Python interpreter with the "
            "runstated package, no `runstated` command on PATH): run `runstated start` where it is installed"
        )
    return [script]


def is_interpreter(executable: str | None) -> bool:
    if not executable or getattr(sys, "frozen", False):
        return False
    return os.path.basename(executable).lower().startswith(("python", "pypy")) and os.access(executable, os.X_OK)


def _isolation_flags() -> list[str]:
    """The flags that decide what an interpreter imports, as this one got them."""
    if sys.flags.isolated:
        return ["-I"]
    return ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site


def import_directories() -> list[str]:
    """Where the needed packages were found, apart from what a new interpreter searches by itself."""
    searched = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    known = {os.path.realpath(path) for path in searched}
    found: list[str] = []
    for name in NEEDED_PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        for location in (spec.submodule_search_locations or ()) if spec else ():
            parent = os.path.dirname(os.path.abspath(location))
            if os.path.realpath(parent) not in known and parent not in found:
                found.append(parent)
    return found


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The reduced environment of the daemon."""
    kept = {name: value for name, value in environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)}
    for name in PATH_VARIABLES:
        if kept.get(name, "").strip():
            kept[name] = str(paths.absolute(kept[name].strip()))
    if kept.get("PYTHONPATH"):
        # An empty entry means "the current directory", which will be another one.
        entries = [os.path.abspath(entry) for entry in kept["PYTHONPATH"].split(os.pathsep)]
        kept["PYTHONPATH"] = os.pathsep.join(entries)
    return kept


def installed_units(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Which of our systemd user units are installed, the socket first; [] where we are not to use them.

    A unit knows nothing of the caller's RUNSTATED_* variables: who sets one wants the daemon that they describe.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("RUNSTATED_") for name in environ):
        return []
    config = paths.xdg_directory("XDG_CONFIG_HOME", "~/.config", environ)
    data = paths.xdg_directory("XDG_DATA_HOME", "~/.local/share", environ)
    directories = (f"{config}/systemd/user", f"{data}/systemd/user", *UNIT_DIRECTORIES)
    units = [name for name in UNIT_NAMES if any(os.path.exists(f"{place}/{name}") for place in directories)]
    return units if "runstated.service" in units else []


def systemctl(verb: str, units: list[str], *, deadline: float) -> bool:
    """Run `systemctl --user VERB`. False when there is no user manager to ask; SpawnError when it says no."""
    program = shutil.which("systemctl")
    if program is None:
        return False
    command = [program, "--user", "--no-ask-password", verb, *units]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(0.1, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SpawnError(f"`{' '.join(command[1:])}` takes too long") from None
    if answer.returncode == 0:
        return True
    if (
        "connect to bus" in answer.stderr
        or "offline" in answer.stderr
        or "not been booted with systemd" in answer.stderr
    ):
        return False
    hint = "see `systemctl --user status runstated` and `journalctl --user -u runstated`"
    raise SpawnError(f"systemd could not {verb} runstated: {answer.stderr.strip()} ({hint})")

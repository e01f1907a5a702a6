"""What people would pick instead of us: its servers, its workers and its load, all in places of their own."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import processes
from processes import HERE, Crew

LIBRARIES = (
    "redis", "hiredis", "saq", "dramatiq", "huey", "pgqueuer", "asyncpg", "greenstalk", "uvloop",
)  # fmt: skip
WORKERS = 2


@dataclass(frozen=True)
class Peer:
    """Another way to do what we do. ``server`` and ``load``: what runs, and what load it is given."""

    name: str
    load: str
    server: str  # redis, beanstalkd, postgres, or a file of its own
    fsyncs: str
    keeps: str = ""  # whether it keeps results
    is_python: bool = True


LOCKS = (
    Peer("SET NX + DEL", "setnx", "redis", "every second"),
    Peer("redis-py Lock", "redis-lock", "redis", "every second"),
)
HAND_OVERS = (Peer("BLPOP", "blpop", "redis", "every second"),)
QUEUES = (
    Peer("saq", "saq", "redis", "every second", "for 10 min"),
    Peer("dramatiq", "dramatiq", "redis", "every second", "for 10 min"),
    Peer("huey on Redis", "huey", "redis", "every second", "until read"),
    Peer("huey on SQLite", "huey", "file", "each commit", "until read"),
    Peer("pgqueuer", "pgqueuer", "postgres", "each commit", "no"),
    Peer("beanstalkd, fsync", "beanstalkd", "beanstalkd", "each put", "no", is_python=False),
)


# ---------------------------------------------------------------------------------------------------- what there is


def postgres_programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def missing_packages() -> list[str]:
    """The system's packages (as Debian calls them) whose servers are not here."""
    needed = {
        "redis-server": shutil.which("redis-server"),
        "beanstalkd": shutil.which("beanstalkd"),
        "postgresql": postgres_programs(),
    }
    return [name for name, found in needed.items() if not found]


def environment() -> Path:
    """The Python of the peers' environment, made when it is needed first."""
    place = (
        Path(platformdirs.user_cache_dir("runstated-benchmarks")) / f"peers-{sys.version_info[0]}.{sys.version_info[1]}"
    )
    python, is_whole = place / "bin/python", place / "complete"
    if not is_whole.exists() or is_whole.read_text() != repr(LIBRARIES):
        print(f"making an environment for the peers in {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *LIBRARIES], check=True, stderr=subprocess.DEVNULL)
        is_whole.write_text(repr(LIBRARIES))
    return python


# ---------------------------------------------------------------------------------------------------- their servers


class Servers:
    """Started when they are asked for, ended together."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.addresses: dict[str, str] = {}

    def address(self, name: str) -> str:
        """Where the server is. Raises LookupError when its package is not installed."""
        if name not in self.addresses:
            starts = {
                "redis": self._redis,
                "beanstalkd": self._beanstalkd,
                "postgres": self._postgres,
                "file": self._file,
            }
            self.addresses[name] = starts[name]()
        return self.addresses[name]

    def _start(self, *command: object, **options: object) -> None:
        with (self.directory / "servers.log").open("ab") as log:
            process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, **options)
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def _redis(self) -> str:
        socket = self.directory / "redis.sock"
        durability = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
        _need("redis-server")
        self._start("redis-server", "--port", 0, "--unixsocket", socket, "--dir", self.directory, *durability)
        processes.wait_for(socket.exists, "redis-server")
        return str(socket)

    def _beanstalkd(self) -> str:
        socket, binlog = self.directory / "beanstalkd.sock", self.directory / "binlog"
        binlog.mkdir()
        _need("beanstalkd")
        self._start("beanstalkd", "-l", f"unix:{socket}", "-b", binlog, "-f", 0)
        processes.wait_for(socket.exists, "beanstalkd")
        return str(socket)

    def _postgres(self) -> str:
        programs = postgres_programs()
        if programs is None:
            raise LookupError("postgresql is not installed")
        place = Path(tempfile.mkdtemp(prefix="runstated-postgres-"))
        self.stack.callback(shutil.rmtree, place, ignore_errors=True)
        owner: dict[str, object] = {}
        if os.getuid() == 0:  # it refuses to run as root
            shutil.chown(place, "postgres")
            owner = {"user": "postgres", "group": "postgres", "extra_groups": []}
        initdb = [programs / "initdb", "-D", place / "data", "-A", "trust", "-U", "postgres", "-E", "UTF8"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=place, **owner)
        self._start(
            programs / "postgres", "-D", place / "data", "-k", place, "-c", "listen_addresses=", cwd=place, **owner
        )
        processes.wait_for((place / ".s.PGSQL.5432").exists, "postgres")
        where = {**processes.ENVIRONMENT, "PGHOST": str(place), "PGUSER": "postgres", "PGDATABASE": "postgres"}
        install = [environment().parent / "pgq", "install"]
        processes.wait_for(
            lambda: subprocess.run(install, env=where, capture_output=True).returncode == 0, "pgq install"
        )
        return str(place)

    def _file(self) -> str:
        return str(self.directory / "huey.db")


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise LookupError(f"{program} is not installed")


# ---------------------------------------------------------------------------------------------------- their load


def crew(peer: Peer, servers: Servers, count: int = 1) -> Crew:
    """``count`` processes that load a peer."""
    address = servers.address(peer.server)
    script = [str(environment()), str(HERE / "peer_load.py"), peer.load, address]
    return Crew([[*script, str(n)] for n in range(count)], PEER_SOCKET=address)


@contextlib.contextmanager
def workers(peer: Peer, servers: Servers) -> Iterator[None]:
    """Two worker processes of a peer's queue."""
    address, python = servers.address(peer.server), environment()
    if peer.load == "dramatiq":
        options = ("--processes", str(WORKERS), "--path", str(HERE))
        commands = [[python, "-m", "dramatiq", "peer_dramatiq", *options]]
    else:
        commands = [[python, HERE / "peer_load.py", f"work-{peer.load}", address, str(n)] for n in range(WORKERS)]
    log = servers.directory / f"{peer.load}-workers.log"
    started = [processes.start(command, log, PEER_SOCKET=address) for command in commands]
    try:
        yield
    finally:
        for process in started:
            processes.end(process)


BY_NAME = {peer.name: peer for peer in (*LOCKS, *HAND_OVERS, *QUEUES)}

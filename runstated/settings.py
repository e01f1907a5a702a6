"""Every knob of the daemon, with its default, unit, bounds and the reason for the number.

A setting comes from, first to last: the command line, a RUNSTATED_* variable, the configuration file (TOML), the
default. A value that cannot be used is refused with the place it came from and what is allowed there: a daemon that
guesses is found out weeks later.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from runstate import paths

KIB = 1024
MIB = 1024 * KIB

# -- The wire ----------------------------------------------------------------------------------------------------------
OPENING_MS = 2_000  # after a restart, lines open at the latest now, when live sessions have not all come back
HELLO_MS = 10_000  # a connection that has not said hello by now holds a descriptor for nothing
END_MS = 1_000  # a connection that is to end, and whose client does not read what it was sent, is cut off now
CONNECTIONS_PER_PROCESS_MAX = 256  # a process that leaks connections is stopped long before the descriptors run out
REMOTE_CONNECTIONS_MAX = 4_096  # over TCP or HTTP, with a key: what a flood can take must leave some descriptors
REMOTE_CONNECTIONS_OF_KEY_MAX = 1_024  # one key does not take the places of all others
STRANGERS_MAX = 256  # over TCP or HTTP, that have not shown a key: the next one takes the place of the oldest of them
HELLO_BYTES_MAX = 256 * KIB  # over TCP, before the hello is accepted: a stranger must not make us buffer whole frames
DESCRIPTORS_KEPT = 24  # a client that is given one of the last may only ask for the status ...
LOOK_MS = 1_000  # ... for so long ...
DESCRIPTORS_OWN = 12  # ... and of these none: they are for the daemon's own files
KEEPALIVE_S, KEEPALIVE_PROBES = 15, 4  # a peer that vanished without a word is found after a minute or so
FRAMES_PER_TURN = 64  # of one connection, before the others have their turn
WAITING_PER_SESSION_MAX = 64  # requests that nobody has looked at yet; then its connection is read no further
LISTEN_BACKLOG = 4_096  # hundreds of agents may start in one second; the kernel cuts this to net.core.somaxconn

# -- The engine --------------------------------------------------------------------------------------------------------
BATCH_REQUESTS_MAX = 256  # bounds what one failed COMMIT puts in doubt
BATCH_VERBS_MS = 10  # bounds how long the first request of a batch waits for the fsync it shares
CACHE_BYTES = 32 * MIB  # results of done `once` keys, answered without the database; half of the memory target

# -- Sessions and leases -----------------------------------------------------------------------------------------------
RESUME_MS = 5_000  # a lost Unix connection may come back for this long before its session ends
REMOTE_RESUME_MS = 30_000  # a lost TCP connection, where nobody tells of a death: as long as a usual lease

# -- The store ---------------------------------------------------------------------------------------------------------
WAL_CHECKPOINT_BYTES = 16 * MIB  # then its pages are copied into the file, which costs two fsyncs or more ...
WAL_SHARE = 4  # ... or when it takes this part of the room that the disk has for it and for the file ...
WAL_BYTES_MIN = 128 * KIB  # ... but never before it has this size
DISK_KEPT_BYTES = 512 * KIB  # what the file does not grow into: for the WAL, its index, and starting again
PAGES_SHRUNK = 64  # in one step: some 3 ms and a commit
PAGES_KEPT_MIN = 256  # free pages that stay for what comes next ...
PAGES_KEPT_SHARE = 8  # ... or this part of all, whichever is more

# -- The life of the daemon --------------------------------------------------------------------------------------------
DRAIN_MS = 10_000  # SIGTERM to exit; what is not answered by then is re-issued by its client anyway
PULSE_MS = 30_000  # watchdog and "are lock and socket still ours": the only periodic wake-up of an idle daemon
RESERVE_BYTES = 256 * KIB  # for a start on a full disk: the index of the log, and the first commits
LOG_BYTES_MAX = 4 * MIB  # one log file
LOG_FILES_KEPT = 3  # older log files beside it: with the current one, 16 MiB at most

SYNC_MODES = ("full", "normal")
ANSWERS = ("no", "yes")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Endpoint:
    """A host and a port to listen on; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: who knows where it leads


class SettingsError(ValueError):
    """A setting that cannot be used; the message names where it was read and what is allowed there."""


@dataclass(frozen=True)
class Settings:
    """What one daemon runs with."""

    state_dir: Path
    socket: Path
    sync: Literal["full", "normal"] = (
        "full"  # fsync per commit, or per checkpoint (a power cut may lose the last second)
    )
    log_level: str = "info"
    tcp: Endpoint | None = None  # where the client library is served besides the socket
    http: Endpoint | None = None  # where the HTTP API is served
    http_hosts: tuple[str, ...] = ()  # names under which HTTP may be asked for, beside where it listens
    tls_cert: Path | None = None  # PEM files, for both; with them nothing is spoken without TLS
    tls_key: Path | None = None
    no_backup: bool = False  # of the database before its upgrade
    config: Path | None = None  # the file that was read, if there was one
    new_database: bool = False  # begin with an empty one, whatever is there
    inherited: tuple[str, ...] = ()  # what limits it that it could not give up
    is_as_before: bool = False  # tcp, http and TLS are those of a daemon that died: nice to have

    @property
    def database(self) -> Path:
        return self.state_dir / paths.DATABASE_NAME

    @property
    def reserve(self) -> Path:
        return self.state_dir / paths.RESERVE_NAME

    @property
    def log(self) -> Path:
        return self.state_dir / paths.LOG_NAME

    @property
    def lock(self) -> Path:
        return self.state_dir / paths.LOCK_NAME

    @property
    def stopped(self) -> Path:
        return self.state_dir / paths.STOPPED_NAME


def load(options: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings from all four places. `options` are the command line's, by field name; None means "not given"."""
    config, content = _read_file(options.get("config"), environ)
    sources = _Sources(options, environ, config, content)
    directory = sources.path("state_dir") or paths.default_state_dir()
    cert, key = sources.path("tls_cert"), sources.path("tls_key")
    if (cert is None) != (key is None):
        raise SettingsError("tls_cert and tls_key are needed together: the files of a certificate and of its key (PEM)")
    tcp, http = sources.endpoint("tcp"), sources.endpoint("http")
    plaintext = sources.choice("allow_plaintext", ANSWERS, "no")
    for name, endpoint in (("tcp", tcp), ("http", http)):
        if endpoint is not None and not endpoint.is_loopback and cert is None and plaintext == "no":
            raise SettingsError(
                f"{name}: {endpoint} can be reached from other machines, and without TLS keys and data cross the"
                " network in the clear: give --tls-cert and --tls-key, listen on 127.0.0.1, or say --allow-plaintext"
            )
    return Settings(
        tcp=tcp,
        http=http,
        http_hosts=sources.names("http_hosts"),
        tls_cert=cert,
        tls_key=key,
        state_dir=directory,
        socket=paths.fit(sources.path("socket") or directory / paths.SOCKET_NAME),
        sync=cast(Literal["full", "normal"], sources.choice("sync", SYNC_MODES, "full")),
        log_level=sources.choice("log_level", LOG_LEVELS, "info"),
        no_backup=sources.choice("no_backup", ANSWERS, "no") == "yes",
        config=config if content is not None else None,
        new_database=options.get("new_database") is not None,  # never from the environment: it is meant once
    )


def _read_file(option: str | None, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any] | None]:
    """(path, content); the content is None when there is no file and none was asked for."""
    named = option or environ.get(paths.CONFIG_VARIABLE, "").strip()
    path = paths.absolute(option) if option else paths.config_file(environ)
    try:
        content = paths.read_config(path)
    except FileNotFoundError:
        if named:
            raise SettingsError(f"the configuration file {path} does not exist") from None
        return path, None
    except OSError as error:
        raise SettingsError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"the configuration file {path} is not valid TOML: {error}") from error
    for key in content:
        if key not in FILE_KEYS:
            raise SettingsError(f"{path}: unknown key {key!r}; allowed are {', '.join(FILE_KEYS)}")
    return path, content


FILE_KEYS = (
    "state_dir",
    "socket",
    "tcp",
    "http",
    "http_hosts",
    "tls_cert",
    "tls_key",
    "allow_plaintext",
    "sync",
    "log_level",
    "no_backup",
)


@dataclass(frozen=True)
class _Sources:
    options: Mapping[str, str | None]
    environ: Mapping[str, str]
    config: Path
    content: Mapping[str, Any] | None

    def path(self, key: str) -> Path | None:
        """Relative ones in the file are relative to it: the same for all who read it."""
        value, place = self._found(key)
        return paths.absolute(value, self.config.parent if place == str(self.config) else None) if value else None

    def endpoint(self, key: str) -> Endpoint | None:
        value, place = self._found(key)
        if not value:
            return None
        host, _, port = value.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise SettingsError(f"{place}: {key} is {value!r}; it must be HOST:PORT, such as 127.0.0.1:7700")
        return Endpoint(host, int(port))

    def names(self, key: str) -> tuple[str, ...]:
        """Host names, separated by commas."""
        value, place = self._found(key)
        found = tuple(name.strip().lower() for name in value.split(",")) if value else ()
        for name in found:
            if not re.fullmatch(r"[a-z0-9_.:-]{1,253}", name):
                raise SettingsError(f"{place}: {key} has {name!r}; it must be names of hosts, separated by commas")
        return found

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value, place = self._found(key)
        if not value:
            return default
        if value.lower() not in allowed:
            raise SettingsError(f"{place}: {key} is {value!r}; allowed are {', '.join(allowed)}")
        return value.lower()

    def _found(self, key: str) -> tuple[str, str]:
        """(value, where it was found); ("", "") when it is nowhere. Blank variables count as unset."""
        option = self.options.get(key)
        if option is not None:
            if not option.strip():
                raise SettingsError(f"--{key.replace('_', '-')} is empty")
            return option.strip(), "--" + key.replace("_", "-")
        variable = "RUNSTATED_" + key.upper()
        if self.environ.get(variable, "").strip():
            return self.environ[variable].strip(), variable
        if self.content is None or key not in self.content:
            return "", ""
        value = self.content[key]
        if not isinstance(value, str) or not value.strip():
            raise SettingsError(f"{self.config}: {key} must be a text that is not empty, not {value!r}")
        return value.strip(), str(self.config)

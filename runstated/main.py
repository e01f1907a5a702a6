"""The `runstated` command: start, stop, restart and look at the daemon of this user.

`stop` and `status` go by the kernel's lock, never by a pid file: a pid is used only after the lock was seen held by it,
and through a pidfd, so that a process which got the number later is never hit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

import runstate
from runstate import autostart, errors, paths, presence, spawn
from runstated import settings
from runstated.settings import Settings

START_MS = 30_000  # a start after a crash may have to recover a large database
STOP_WAITS_MS = 10_000  # for who starts it: then it is ended in the middle of that
STOP_MARGIN_MS = 5_000  # beyond the daemon's own time to drain
ANSWER_MS = 2_000  # `status`: a daemon that takes longer to accept is reported as not answering

NOT_RUNNING_EXIT = 3  # as in the init scripts' convention


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["detached"]:
        from runstated.__main__ import detached

        detached(*sys.argv[2:])
    cli(prog_name="runstated")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(runstate.__version__, prog_name="runstated", message="%(prog)s %(version)s")
def cli() -> None:
    """The daemon that lets the processes of this machine share work."""


def daemon_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a daemon to be started; each is also a RUNSTATED_* variable and a key of the file."""
    for option in (
        click.option(
            "--allow-plaintext",
            flag_value="yes",
            default=None,
            help="Listen without TLS on addresses that other machines can reach, too: only in a network you trust.",
        ),
        click.option("--tls-key", metavar="FILE", help="Its private key (PEM)."),
        click.option("--tls-cert", metavar="FILE", help="TLS for --tcp and --http: the certificate (PEM)."),
        click.option(
            "--http-hosts",
            metavar="NAMES",
            help="Further host names that HTTP requests may use, separated by commas.",
        ),
        click.option("--http", metavar="HOST:PORT", help="Serve the HTTP API here, too. Needs keys."),
        click.option("--tcp", metavar="HOST:PORT", help="Serve clients over TCP, too (port 0: any). Needs keys."),
        click.option(
            "--no-backup",
            flag_value="yes",
            default=None,
            help="Do not save the database before an upgrade of runstated changes its schema.",
        ),
        click.option("--log-level", metavar="LEVEL", help=f"One of {', '.join(settings.LOG_LEVELS)}. Default: info."),
        click.option("--sync", metavar="MODE", help="full: safe against power loss (default). normal: faster."),
        click.option("--socket", metavar="PATH", help="Listen here. Default: runstated.sock in the state directory."),
    ):
        command = option(command)
    return place_options(command)


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which daemon is meant."""
    for option in (
        click.option("--config", metavar="FILE", help="Read settings from this TOML file."),
        click.option("--state-dir", metavar="DIR", help="Where the database, the log and the lock are."),
    ):
        command = option(command)
    return command


@cli.command()
@click.option("--foreground", is_flag=True, help="Stay in this terminal and log to it.")
@click.option(
    "--new-database",
    flag_value="yes",
    default=None,
    help="Start with an empty database; one that is there is kept under another name.",
)
@daemon_options
def start(foreground: bool, **options: str | None) -> None:
    """Start the daemon and return when it answers."""
    config = _load(options)
    if foreground:
        _run_in_foreground(config)
    target = _target(config, options)
    deadline = _deadline(START_MS)
    try:
        with _alone(target, deadline) as lock:
            presence.unmark_stopped(config.stopped)
            before = _holder(config)
            holder = _start(config, target, lock, deadline)
    except errors.RunstateError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot start runstated: {error}")
    already = _is_same(before, holder)
    click.echo("runstated already runs" if already else "runstated started")
    _describe(config, holder)
    if already:
        _check_listeners(config, holder)
        if config.new_database:
            _fail("but with its present database: run `runstated stop`, then `runstated start --new-database`")


@contextlib.contextmanager
def _alone(target: autostart.Target, deadline: float, *, must: bool = True) -> Iterator[autostart.SpawnLock]:
    """Only one process starts, stops or restarts the daemon at a time: what each of them then says is true. With
    ``must`` False the time may pass without the lock."""
    paths.private_directory(target.state_dir, follow=True)
    with autostart.spawn_lock(target, deadline=deadline) as lock:
        while not lock.try_take():
            if time.monotonic() > deadline:
                if not must:
                    break
                _fail("another process is starting or stopping runstated and does not get done")
            time.sleep(autostart.WAIT_MS_MAX / 1000)
        yield lock


def _start(config: Settings, target: autostart.Target, lock: autostart.SpawnLock, deadline: float) -> presence.LockInfo:
    """The daemon that listens now: started, or found when it was about to."""
    while True:
        autostart.start_locked(target, lock, deadline=deadline).close()
        holder = _holder(config)
        if holder is not None and holder.socket:
            return holder
        if time.monotonic() > deadline:
            _fail(f"runstated started and ended at once{spawn.log_tail(config.state_dir)}")
        time.sleep(autostart.WAIT_MS_MAX / 1000)


def _check_listeners(config: Settings, holder: presence.LockInfo) -> None:
    """Fails when the daemon that runs does not listen where it was told to just now."""
    for name, wanted, found in (("tcp", config.tcp, holder.tcp), ("http", config.http, holder.http)):
        if wanted is None:
            continue
        is_there = bool(found) and wanted.port in (0, int(found.rpartition(":")[2]))
        if not is_there or (config.tls_cert is not None) != holder.tls:
            tls = " with TLS" if config.tls_cert is not None else ""
            _fail(f"but it does not listen on {name} {wanted}{tls}: run `runstated restart` with the same options")


def _run_in_foreground(config: Settings) -> NoReturn:
    from runstated import daemon
    from runstated.host import lockfile

    try:
        presence.unmark_stopped(config.stopped)
        daemon.serve(config, lambda: None, foreground=True)
    except (lockfile.LockHeld, *daemon.EXPECTED) as error:
        _fail(str(error))
    sys.exit(0)


@cli.command()
@place_options
def stop(**options: str | None) -> None:
    """Stop the daemon and wait until it is gone. Nothing starts it again until `runstated start` or a reboot."""
    config = _load(options)
    try:
        paths.private_directory(config.state_dir, follow=True)
        was_marked = presence.is_marked_stopped(config.stopped)
        _mark_stopped(config)  # first: a client that loses its connection must not start another
        with _alone(_target(config, options), _deadline(STOP_WAITS_MS), must=False):
            _mark_stopped(config)  # again: a start that came before has removed it
            try:
                stopped = _end(config)
            except CannotStop:
                if not was_marked:
                    presence.unmark_stopped(config.stopped)
                raise
    except (CannotStop, errors.RunstateError, OSError) as error:
        _fail(f"cannot stop runstated: {error}")
    click.echo(f"runstated stopped (pid {stopped.pid})" if stopped else "runstated is not running")


def _mark_stopped(config: Settings) -> None:
    try:
        presence.mark_stopped(config.stopped)
    except OSError as error:  # on a full disk it must stop all the same, and a marker without a text is one, too
        if presence.is_marked_stopped(config.stopped):
            return
        click.echo(f"runstated: clients may start it again: cannot write {config.stopped}: {error.strerror}", err=True)


@cli.command()
@daemon_options
def restart(**options: str | None) -> None:
    """Stop the daemon, if it runs, and start it. Clients that wait for it go on by themselves.

    Without --tcp and --http it listens where it did before.
    """
    config = _load(options)
    before = _holder(config)
    if before is not None and config.tcp is None and config.http is None:
        options = {**options, **before.listeners}
    target = _target(config, options)
    deadline = _deadline(START_MS + settings.DRAIN_MS + STOP_MARGIN_MS)
    try:
        # The lock keeps clients from starting the daemon in between, with other options.
        with _alone(target, deadline) as lock:
            _end(config)
            presence.unmark_stopped(config.stopped)
            holder = _start(config, target, lock, deadline)
    except (CannotStop, errors.RunstateError, OSError) as error:
        _fail(f"cannot restart runstated: {error}")
    click.echo("runstated restarted")
    _describe(config, holder)


@cli.command()
@place_options
def status(**options: str | None) -> None:
    """Say whether the daemon runs, and where. Exit code 3 when it does not."""
    config = _load(options)
    holder = _holder(config)
    if holder is None:
        click.echo("runstated is not running")
        if presence.is_marked_stopped(config.stopped):
            click.echo("it was stopped with `runstated stop`: clients do not start it; run `runstated start`")
        sys.exit(NOT_RUNNING_EXIT)
    click.echo("runstated is running" if holder.socket else "runstated is starting")
    _describe(config, holder)
    if holder.socket and not _answers(holder):
        _fail(f"but it does not answer within {ANSWER_MS} ms{spawn.log_tail(config.state_dir)}")


@cli.command()
@click.argument("file", type=click.Path())
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@place_options
def backup(file: str, force: bool, **options: str | None) -> None:
    """Save a copy of the database in FILE, also while the daemon runs. It is checked before it counts."""
    from runstated.store import backup as copies

    config = _load(options)
    try:
        copies.save(config.database, paths.absolute(file), force=force)
    except (copies.BackupError, OSError, sqlite3.Error) as error:
        _fail(f"no backup was made: {error}")
    click.echo(f"saved {config.database} in {file}")


@cli.command()
@click.argument("file", type=click.Path())
@place_options
def restore(file: str, **options: str | None) -> None:
    """Go back to the backup in FILE. The daemon must be stopped; the database it had is kept.

    What was held at the time of the backup is given back, as if all processes had died.
    """
    from runstated import daemon
    from runstated.host import lockfile
    from runstated.restore import restore as go_back
    from runstated.store.backup import BackupError

    config = _load(options)
    os.umask(0o077)
    try:
        daemon.prepare_state_dir(config.state_dir)
        done = go_back(config, paths.absolute(file))
    except lockfile.LockHeld as held:
        _fail(f"{held}: run `runstated stop` first")
    except (BackupError, daemon.DaemonError, lockfile.UnfitError, OSError, sqlite3.Error) as error:
        _fail(f"nothing was restored: {error}")
    click.echo(f"restored {file}: {done.sessions} sessions and {done.leases} leases were ended")
    if done.kept is not None:
        click.echo(f"the database before is kept as {done.kept}")


def _load(options: dict[str, str | None]) -> Settings:
    try:
        return settings.load(options)
    except settings.SettingsError as error:
        raise click.UsageError(str(error)) from error


def _target(config: Settings, options: dict[str, str | None]) -> autostart.Target:
    """What was said on the command line goes to the new process; the rest it finds where we found it."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("state_dir", "socket", "config", "tls_cert", "tls_key"):
        if name in given:
            given[name] = str(paths.absolute(given[name]))
    return autostart.Target(config.state_dir, config.socket, given)


def _holder(config: Settings) -> presence.LockInfo | None:
    try:
        return presence.inspect(config.lock)
    except OSError as error:
        _fail(f"cannot read {config.lock}: {error.strerror or error}")


def _describe(config: Settings, holder: presence.LockInfo) -> None:
    rows = {
        "socket": holder.socket,
        "state directory": str(config.state_dir),
        "pid": str(holder.pid),
        "log": holder.log or "(the terminal or the service manager it was started by)",
        "version": holder.version,
        "up for": _duration(time.time() - holder.started),
    }
    if holder.inherited:
        rows["limited"] = f"{holder.inherited}: inherited; run `runstated restart` in a new shell"
    if holder.tcp:
        rows["tcp"] = f"{'tls' if holder.tls else 'tcp'}://{holder.tcp}"
    if holder.http:
        rows["http"] = f"{'https' if holder.tls else 'http'}://{holder.http}"
    for name, value in rows.items():
        click.echo(f"  {name + ':':<17} {value}")


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"


def _answers(holder: presence.LockInfo) -> bool:
    try:
        connected = autostart.knock(Path(holder.socket), deadline=_deadline(ANSWER_MS))
    except errors.RunstateError:
        return False
    if connected is None:
        return False
    connected.close()
    return True


class CannotStop(Exception):
    """The daemon runs, and cannot be ended from here."""


def _end(config: Settings) -> presence.LockInfo | None:
    """End the holder of the lock and wait until it is gone. None when nobody held it. Raises CannotStop."""
    holder = _holder(config)
    if holder is None:
        _stop_units()
        return None
    if not holder.pid:
        _fail(f"{config.lock} is held by a process that does not say who it is")
    if _stop_units() and _holder(config) is None:
        return holder
    deadline = _deadline(settings.DRAIN_MS + STOP_MARGIN_MS)
    with Process(holder) as process:
        # Looked at again with the process in hand: from here on it is the holder, or it is gone.
        is_alive = process.is_alive()
        if is_alive and _is_same(_holder(config), holder):
            process.terminate()
        elif not is_alive and _is_same(_holder(config), holder):
            raise CannotStop(
                f"it runs (pid {holder.pid}) where this process cannot see it, in another container or pid namespace:"
                " run `runstated stop` there"
            )
        while process.is_alive() or _is_same(_holder(config), holder):
            if time.monotonic() > deadline:
                _fail(
                    f"runstated (pid {holder.pid}) was told to stop but is still there after "
                    f"{(settings.DRAIN_MS + STOP_MARGIN_MS) / 1000:g} s; its log: {holder.log or '(terminal)'}"
                )
            process.wait(0.05)
    return holder


def _is_same(one: presence.LockInfo | None, other: presence.LockInfo) -> bool:
    return one is not None and (one.pid, one.birth) == (other.pid, other.birth)


def _stop_units() -> bool:
    """Where systemd runs the daemon, its units must stop too: the socket unit would start the daemon again."""
    units = spawn.installed_units()
    try:
        return bool(units) and spawn.systemctl("stop", units, deadline=_deadline(settings.DRAIN_MS + STOP_MARGIN_MS))
    except spawn.SpawnError as error:
        _fail(str(error))


class Process:
    """A handle on the process that a lock file names: a pidfd where the kernel has them, else the number."""

    def __init__(self, holder: presence.LockInfo) -> None:
        self._pid, self._birth = holder.pid, holder.birth
        self._descriptor: int | None = None

    def __enter__(self) -> Process:
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(self._pid)
            except OSError:
                pass  # gone already, or a kernel without pidfds: is_alive tells
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def is_alive(self) -> bool:
        if self._descriptor is not None and select.select([self._descriptor], [], [], 0)[0]:
            return False
        if self._birth and presence.process_birth(self._pid) != self._birth:
            return False  # the number went to another process before we got hold of it
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        try:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
            else:
                os.kill(self._pid, signal.SIGTERM)
        except ProcessLookupError:
            pass

    def wait(self, seconds: float) -> None:
        """Until the process ends or the time is over; where there is no pidfd the time is simply spent."""
        if self._descriptor is not None and not select.select([self._descriptor], [], [], seconds)[0]:
            return
        if self._descriptor is None or self.is_alive():
            time.sleep(seconds)


def _deadline(milliseconds: int) -> float:
    return time.monotonic() + milliseconds / 1000


def _fail(message: str) -> NoReturn:
    click.echo(f"runstated: {message}", err=True)
    sys.exit(1)

"""From `connect` to a socket: who starts a daemon, who waits, who is refused, and what they are told."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstate import autostart, errors, paths, presence, spawn
from tests.daemons import PATIENCE_S, Home

CONNECT = f"""
import time
from runstate import autostart
with autostart.connect(deadline=time.monotonic() + {PATIENCE_S}) as connected:
    print("connected", connected.getpeername(), flush=True)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """An absent daemon; this process and its children look for it in the test's own directory."""
    place = Home(tmp_path / "state")
    for name in [name for name in os.environ if name.startswith(("RUNSTATE", "CODEX_"))]:
        monkeypatch.delenv(name)
    for name in ("RUNSTATED_STATE_DIR", "RUNSTATED_CONFIG"):
        monkeypatch.setenv(name, place.environ[name])
    yield place
    place.close()


@pytest.fixture
def no_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a daemon was spawned")

    monkeypatch.setattr(spawn, "daemon", refuse)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def at_once() -> float:
    return time.monotonic() + 0.2


def listen(path: Path, backlog: int = 8) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


# --- starting ---


def test_an_absent_daemon_is_started_and_reached(home: Home) -> None:
    with autostart.connect(deadline=soon()) as connected:
        assert connected.getpeername() == str(home.socket)
        assert connected.gettimeout() is None
        assert not connected.get_inheritable()
    assert home.running().socket == str(home.socket)


def test_a_running_daemon_is_only_connected_to(home: Home) -> None:
    autostart.connect(deadline=soon()).close()
    first = home.running()
    autostart.connect(deadline=soon()).close()
    assert home.running() == first


def test_thirty_processes_that_start_at_once_get_one_daemon(home: Home) -> None:
    starters = [home.popen(sys.executable, "-c", CONNECT) for _ in range(30)]
    said = [starter.communicate(timeout=PATIENCE_S)[0] for starter in starters]
    assert set(said) == {f"connected {home.socket}\n"}
    assert home.read_log().count("starts in") == 1


def test_threads_that_start_at_once_get_one_daemon(home: Home) -> None:
    reached: list[str] = []

    def connect() -> None:
        with autostart.connect(deadline=soon()) as connected:
            reached.append(connected.getpeername())

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reached == [str(home.socket)] * 8
    assert home.read_log().count("starts in") == 1


def test_the_daemon_does_not_hold_the_output_of_the_script_that_started_it(home: Home) -> None:
    answer = home.python("-c", CONNECT)  # returns only when nobody has the pipe open any more
    assert answer.stdout == f"connected {home.socket}\n"
    assert answer.stderr == ""
    assert home.running().pid


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_the_daemon_has_left_the_scripts_session_directory_and_descriptors(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    subprocess.run([sys.executable, "-c", CONNECT], env=home.environ, close_fds=False, check=True, timeout=PATIENCE_S)
    os.close(writer)
    assert select.select([reader], [], [], PATIENCE_S)[0], "the daemon inherited a descriptor of the script"
    os.close(reader)
    pid = home.running().pid
    assert os.getsid(pid) not in (os.getsid(0), pid), "no terminal's session, and not the leader of its own"
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == ["/dev/null", "/dev/null", str(home.log)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_the_daemon_gets_a_reduced_environment(home: Home) -> None:
    home.python("-c", CONNECT, AN_API_KEY="secret", NOTIFY_SOCKET="/x", LC_ALL="C")
    environ = Path(f"/proc/{home.running().pid}/environ").read_text()
    assert "LC_ALL=C\0" in environ
    assert "RUNSTATED_STATE_DIR=" in environ
    assert "secret" not in environ
    assert "NOTIFY_SOCKET" not in environ


def test_the_script_is_not_left_with_a_child(home: Home) -> None:
    script = "import os\ntry: print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError: print('no child')"
    assert home.python("-c", CONNECT + script).stdout.splitlines()[1:] == ["no child"]


def test_a_script_killed_in_the_middle_of_a_start_leaves_no_stale_lock(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    script = (
        "import sys, time; from runstate import autostart\n"
        "with autostart.spawn_lock(autostart.default_target(), deadline=time.monotonic()) as lock:\n"
        "    print(lock.try_take(), flush=True); sys.stdin.read()"
    )
    with home.popen(sys.executable, "-c", script) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "True\n"
        with pytest.raises(errors.UnavailableError, match="did not start in time"):
            autostart.connect(deadline=at_once())
        starter.send_signal(signal.SIGKILL)
    autostart.connect(deadline=soon()).close()


def test_ctrl_c_while_waiting_leaves_everything_usable(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    lock = os.open(home.state_dir / paths.SPAWN_LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    script = (
        "import time; from runstate import autostart\n"
        "def started(*_, real=autostart.start_locked, **options):\n"
        "    print('waits', flush=True); return real(*_, **options)\n"
        "autostart.start_locked = started\n"
        "try: autostart.connect(deadline=time.monotonic() + 60)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
        "autostart.connect(deadline=time.monotonic() + 60).close(); print('connected', flush=True)"
    )
    with home.popen(sys.executable, "-c", script) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waits\n"
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.readline() == "interrupted\n"
        os.close(lock)
        assert [waiter.stdout.readline() for _ in range(2)] == ["waits\n", "connected\n"]


def test_a_forked_child_can_connect_by_itself(home: Home) -> None:
    script = (
        "import os, time; from runstate import autostart\n"
        "child = os.fork()\n"
        "autostart.connect(deadline=time.monotonic() + 60).close()\n"
        "if child: print(os.waitpid(child, 0)[1])\n"
    )
    assert home.python("-c", script).stdout == "0\n"
    assert home.read_log().count("starts in") == 1


def test_a_daemon_that_listens_elsewhere_is_found_through_its_lock(home: Home, tmp_path: Path, no_spawn: None) -> None:
    elsewhere = tmp_path / "elsewhere.sock"
    assert home.run("start", "--socket", str(elsewhere)).returncode == 0
    with autostart.connect(deadline=soon()) as connected:
        assert connected.getpeername() == str(elsewhere)


def test_a_path_too_long_for_a_socket_works_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / ("deep" * 30))
    monkeypatch.setenv("RUNSTATED_STATE_DIR", str(home.state_dir))
    monkeypatch.setenv("RUNSTATED_CONFIG", home.environ["RUNSTATED_CONFIG"])
    try:
        with autostart.connect(deadline=soon()) as connected:
            assert connected.getpeername().startswith(f"/tmp/runstated-{os.geteuid()}/")
    finally:
        home.close()


def test_a_failed_start_says_why(home: Home) -> None:
    (home.state_dir / paths.DATABASE_NAME).mkdir(parents=True)
    with pytest.raises(errors.UnavailableError, match="runstated could not start: ") as failed:
        autostart.connect(deadline=soon())
    assert failed.value.code == "UNAVAILABLE"


def test_a_daemon_that_is_killed_while_starting_is_started_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = []

    def dies(*arguments: object, real: object = spawn.daemon, **options: object) -> None:
        if len(deaths) < 2:
            deaths.append(arguments)
            raise spawn.Died("killed")
        real(*arguments, **options)  # type: ignore[operator]

    monkeypatch.setattr(spawn, "daemon", dies)
    autostart.connect(deadline=soon()).close()
    assert len(deaths) == 2


def test_the_daemon_is_told_the_places_that_the_client_has_found(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def start(directory: Path, options: dict[str, str], **_: object) -> None:
        told.append(options)
        raise spawn.SpawnError("seen")

    monkeypatch.setattr(spawn, "daemon", start)
    with pytest.raises(errors.UnavailableError, match="seen"):
        autostart.connect(deadline=soon())
    assert told == [{"state_dir": str(home.state_dir), "socket": str(home.socket)}]


def test_a_daemon_that_always_dies_is_reported_when_the_time_is_over(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise spawn.Died("killed while it was starting")

    monkeypatch.setattr(spawn, "daemon", dies)
    with pytest.raises(errors.UnavailableError, match="killed while it was starting"):
        autostart.connect(deadline=at_once())


def test_a_killed_daemon_is_told_from_one_that_refuses(home: Home, tmp_path: Path) -> None:
    """For real: the daemon kills itself before it says anything."""
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "sitecustomize.py").write_text(
        "import os, sys\nif 'detached' in sys.orig_argv:\n"
        "    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), 9))\n"
    )
    script = CONNECT.replace(f"+ {PATIENCE_S}", "+ 2")
    answer = home.python("-c", script, PYTHONPATH=str(killed))
    assert "runstated ended while it was starting" in answer.stderr


def test_a_daemon_that_dies_while_starting_is_reported_with_the_end_of_its_log(home: Home, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.mkdir()
    (crash / "sitecustomize.py").write_text("import os, sys\nif 'detached' in sys.argv: sys.exit('broken Python')\n")
    answer = home.python("-c", CONNECT, PYTHONPATH=str(crash))
    assert "runstated ended while it was starting" in answer.stderr
    assert "    SystemExit: broken Python" in answer.stderr
    assert str(home.log) in answer.stderr


# --- not starting ---


@pytest.mark.usefixtures("no_spawn")
def test_a_stopped_daemon_is_not_started_again_and_the_error_says_so(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    presence.mark_stopped(home.stopped)
    with pytest.raises(errors.UnavailableError, match="was stopped with `runstated stop`; run `runstated start`"):
        autostart.connect(deadline=soon())


def test_the_marker_of_an_earlier_boot_does_not_count(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    home.stopped.write_text(json.dumps({"boot": "an earlier one"}))
    autostart.connect(deadline=soon()).close()


@pytest.mark.usefixtures("no_spawn")
def test_autostart_can_be_switched_off(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSTATE_AUTOSTART", "0")
    with pytest.raises(errors.UnavailableError, match="RUNSTATE_AUTOSTART is 0: run `runstated start`"):
        autostart.connect(deadline=soon())
    assert not home.state_dir.exists()


@pytest.mark.usefixtures("no_spawn")
def test_a_state_directory_of_another_user_is_not_served(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.state_dir.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: home.state_dir.stat().st_uid + 1)
    with pytest.raises(errors.UnavailableError, match=r"is not started here: .* belongs to user id"):
        autostart.connect(deadline=soon())


@pytest.mark.usefixtures("no_spawn")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EROFS])
def test_what_a_sandbox_denies_neither_spawns_nor_unlinks(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def deny(*_: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(autostart, "_connect_once", deny)
    monkeypatch.setenv("CODEX_SANDBOX_NETWORK_DISABLED", "1")
    with listen(home.socket), pytest.raises(errors.UnavailableError) as denied:
        autostart.connect(deadline=soon())
    assert f"connecting to the socket {home.socket} was denied ({os.strerror(number)})" in str(denied.value)
    assert "Codex sandbox" in str(denied.value)
    assert "network_access = true" in str(denied.value)
    assert home.socket.exists()


@pytest.mark.usefixtures("no_spawn")
def test_a_state_directory_that_may_not_be_made_is_reported_as_denied(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(paths, "private_directory", deny)
    monkeypatch.setenv("SANDBOX_RUNTIME", "1")
    with pytest.raises(errors.UnavailableError, match=r"creating the state directory .* \(Read-only file system\)"):
        autostart.connect(deadline=soon())


def test_a_user_without_the_right_is_told_so(home: Home) -> None:
    """For real, with the kernel's own EACCES: as another user if we are root, else by taking our own rights away."""
    script = (
        "import os, time; from runstate import autostart\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: autostart.connect(deadline=time.monotonic() + 5)\n"
        "except autostart.errors.UnavailableError as error: print(error)\n"
    )
    with listen(home.socket):
        if os.geteuid() != 0:
            home.state_dir.chmod(0)
        try:
            answer = home.python("-c", script)
        finally:
            home.state_dir.chmod(0o700)
        assert "was denied (Permission denied)" in answer.stdout
        assert str(home.socket) in answer.stdout
        assert home.socket.exists()
    assert home.holder() is None


@pytest.mark.parametrize(
    ("environ", "name", "setting"),
    [
        ({"CODEX_SANDBOX": "seatbelt"}, "Codex sandbox", 'writable_roots = ["/state"]'),
        ({"SANDBOX_RUNTIME": "1"}, "Claude Code", 'allowUnixSockets to ["/state/s"]'),
        ({}, "without the right", "/state/s"),
    ],
)
def test_the_sandbox_is_named_with_the_setting_that_opens_it(environ: dict[str, str], name: str, setting: str) -> None:
    who, what = autostart.sandbox(Path("/state"), Path("/state/s"), environ)
    assert name in who
    assert setting in what


@pytest.mark.usefixtures("no_spawn")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux answers EAGAIN for a full backlog")
def test_a_busy_daemon_is_waited_for_and_not_replaced(home: Home) -> None:
    with listen(home.socket, backlog=0) as listener:
        first = autostart.connect(deadline=soon())
        with pytest.raises(errors.UnavailableError, match="is busy"):
            autostart.connect(deadline=at_once())
        threading.Timer(0.05, lambda: listener.accept()[0].close()).start()
        autostart.connect(deadline=soon()).close()
        first.close()


@pytest.mark.usefixtures("no_spawn")
def test_a_daemon_that_holds_the_lock_but_does_not_listen_is_waited_for(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    held = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(held, presence.LockInfo(pid=os.getpid()).encode())
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(errors.UnavailableError, match=rf"pid {os.getpid()}\) holds .* but does not answer"):
            autostart.connect(deadline=at_once())
        listener = listen(home.socket)
        autostart.connect(deadline=soon()).close()
        listener.close()
    finally:
        os.close(held)


# --- addresses ---


@pytest.mark.usefixtures("no_spawn")
def test_a_named_unix_socket_is_dialled_and_never_started(tmp_path: Path) -> None:
    path = tmp_path / "named.sock"
    with pytest.raises(errors.UnavailableError, match=f"nothing listens on unix://{path}"):
        autostart.dial(f"unix://{path}", deadline=soon())
    with listen(path):
        autostart.dial(f"unix://{path}", deadline=soon()).close()
    with pytest.raises(errors.UnavailableError, match="nothing listens"):  # the file is there, nobody behind it
        autostart.dial(f"unix://{path}", deadline=soon())
    assert path.exists()


def test_a_tcp_address_is_dialled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with autostart.dial(f"tcp://127.0.0.1:{port}", deadline=soon()) as connected:
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert connected.gettimeout() is None
    with pytest.raises(errors.UnavailableError, match="cannot connect to tcp://"):
        autostart.dial(f"tcp://127.0.0.1:{port}", deadline=soon())


@pytest.mark.parametrize("address", ["/run/x", "unix:/x", "unix://x", "tcp://host", "tcp://:1", "tcp://h:x", "ftp://h"])
def test_an_address_of_another_form_is_a_config_error(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not of the form"):
        autostart.dial(address, deadline=soon())


@pytest.mark.parametrize("address", ["http://h:1", "https://h"])
def test_an_address_of_the_http_api_is_told_apart(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="of the HTTP API"):
        autostart.dial(address, deadline=soon())


# --- how the daemon is run ---


def test_relative_paths_reach_the_daemon_as_absolute_ones() -> None:
    environ = {
        "RUNSTATED_STATE_DIR": "state",
        "PYTHONPATH": f"lib{os.pathsep}",
        "RUNSTATE_API_KEY": "k",
        "LC_TIME": "C",
    }
    assert spawn.environment(environ) == {
        "RUNSTATED_STATE_DIR": os.path.abspath("state"),
        "PYTHONPATH": f"{os.path.abspath('lib')}{os.pathsep}{os.getcwd()}",
        "LC_TIME": "C",
    }


def test_a_program_that_is_no_interpreter_uses_the_installed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in ("", None, "/usr/sbin/uwsgi"):
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        with pytest.raises(spawn.SpawnError, match="run `runstated start` where it is installed"):
            spawn.python_command()
        script = tmp_path / "runstated"
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert spawn.python_command() == [str(script)]


def test_a_directory_on_the_import_path_of_the_script_alone_is_handed_on(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the packages that only this script can import serves it; the daemon runs from the same copy."""
    copy = tmp_path / "vendored"
    copy.mkdir()
    for package in ("runstated", "runstate"):
        (copy / package).symlink_to(Path(__import__(package).__file__ or "").parent)
    script = f"import sys; sys.path.insert(0, {str(copy)!r})\n{CONNECT}"
    assert home.python("-c", script).stdout.startswith("connected")
    command = Path(f"/proc/{home.running().pid}/cmdline")
    if command.exists():
        assert str(copy) in command.read_text()


def test_units_are_used_only_where_nothing_points_elsewhere(tmp_path: Path) -> None:
    units = tmp_path / "systemd" / "user"
    units.mkdir(parents=True)
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    assert spawn.installed_units(environ) == []
    (units / "runstated.service").write_text("")
    (units / "runstated.socket").write_text("")
    expected = ["runstated.socket", "runstated.service"] if sys.platform.startswith("linux") else []
    assert spawn.installed_units(environ) == expected
    assert spawn.installed_units({**environ, "RUNSTATED_STATE_DIR": "/x"}) == []


@pytest.mark.parametrize(
    ("exit_code", "stderr", "outcome"),
    [
        (0, "", True),
        (1, "Failed to connect to bus: No medium found", False),
        (1, "Job for runstated.service failed", "systemd could not start runstated: Job for .* failed"),
    ],
)
def test_systemctl_is_asked_and_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, stderr: str, outcome: bool | str
) -> None:
    fake = tmp_path / "systemctl"
    fake.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{stderr}' >&2\nexit {exit_code}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if isinstance(outcome, bool):
        assert spawn.systemctl("start", ["runstated.service"], deadline=soon()) is outcome
    else:
        with pytest.raises(spawn.SpawnError, match=outcome):
            spawn.systemctl("start", ["runstated.service"], deadline=soon())
    assert (tmp_path / "asked").read_text() == "--user --no-ask-password start runstated.service\n"

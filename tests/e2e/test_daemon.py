"""The life of a real daemon: started, refused, stopped, killed, restarted, and robbed of its files."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runstate
from runstate import presence
from runstated import settings
from runstated.main import Process
from tests.daemons import PATIENCE_S, Home
from tests.e2e.support import Raw

# A daemon in the foreground that looks after its lock and socket every 50 ms instead of every 30 s.
QUICK_PULSE = "from runstated import main, settings; settings.PULSE_MS = 50; main.main()"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    place = Home(tmp_path / "state")
    yield place
    place.close()


@pytest.fixture
def foreground(home: Home) -> Iterator[subprocess.Popen[str]]:
    """A daemon in the foreground, listening."""
    with home.popen(*home.command("start", "--foreground")) as process:
        home.wait_until_listening()
        yield process
        process.kill()


def knock(path: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(PATIENCE_S)
    connected.connect(str(path))
    return connected


# --- start ---


def test_start_returns_when_the_daemon_answers_and_says_where(home: Home) -> None:
    answer = home.run("start")
    knock(home.socket).close()
    holder = home.running()
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.splitlines()[0] == "runstated started"
    for shown in (home.socket, home.state_dir, holder.pid, home.log, runstate.__version__):
        assert f" {shown}\n" in answer.stdout


def test_start_when_it_runs_already_says_where(home: Home) -> None:
    home.run("start")
    before = home.running()
    answer = home.run("start")
    assert answer.returncode == 0
    assert answer.stdout.startswith("runstated already runs\n")
    assert str(home.socket) in answer.stdout
    assert home.running() == before


def test_starts_beside_each_other_wait_until_one_has_decided(home: Home) -> None:
    """Each looks for what it was told to listen on only when the daemon has said where it listens."""
    starts = []
    for _ in range(3):
        starts.append(home.popen(*home.command("start", "--tcp", "127.0.0.1:0")))
        time.sleep(0.15)  # so that one comes while another one's daemon is on its way; it must do for any time
    said = [start.communicate(timeout=PATIENCE_S)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], said
    assert sorted(text.splitlines()[0] for text in said) == ["runstated already runs"] * 2 + ["runstated started"]
    assert all(f"tcp://{home.running().tcp}" in text for text in said)


@pytest.mark.parametrize("options", [[], ["--socket", "/tmp/runstated-test-never-bound.sock"]])
def test_a_second_daemon_in_the_foreground_is_refused_with_pid_and_version(home: Home, options: list[str]) -> None:
    home.run("start")
    answer = home.run("start", "--foreground", *options)
    assert answer.returncode == 1
    assert (
        f"runstated {runstate.__version__} already runs as pid {home.running().pid} on {home.socket}" in answer.stderr
    )


def test_everything_the_daemon_makes_is_private(home: Home) -> None:
    home.run("start")
    knock(home.socket).close()
    assert home.state_dir.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.lstat().st_mode & 0o077 for path in home.state_dir.iterdir()}
    assert set(modes.values()) == {0}, modes


def test_a_stale_socket_file_is_replaced(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(home.socket))
    assert home.run("start").returncode == 0
    knock(home.socket).close()


def test_a_file_that_is_no_socket_is_left_alone(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    home.socket.write_text("precious")
    answer = home.run("start")
    assert answer.returncode == 1
    assert f"{home.socket} is in the way: it is not a socket" in answer.stderr
    assert home.socket.read_text() == "precious"
    assert home.holder() is None
    home.socket.unlink()


def test_the_socket_of_a_daemon_with_another_state_directory_is_not_taken(home: Home, tmp_path: Path) -> None:
    home.run("start")
    other = Home(tmp_path / "other")
    answer = other.run("start", "--foreground", "--socket", str(home.socket))
    assert answer.returncode == 1
    assert "of another state directory, listens on" in answer.stderr
    knock(home.socket).close()


def test_a_start_that_fails_prints_the_reason(home: Home) -> None:
    (home.state_dir / "runstate.db").mkdir(parents=True)
    answer = home.run("start")
    assert answer.returncode == 1
    assert answer.stderr.startswith("runstated: runstated could not start: ")


def test_a_setting_that_cannot_be_used_is_refused_by_name(home: Home) -> None:
    answer = home.run("start", RUNSTATED_SYNC="fast")
    assert answer.returncode == 2
    assert "RUNSTATED_SYNC: sync is 'fast'; allowed are full, normal" in answer.stderr


def test_options_reach_the_daemon_in_the_background(home: Home, tmp_path: Path) -> None:
    home.run("start", "--log-level", "error", "--socket", str(tmp_path / "x.sock"), "--sync", "normal")
    assert home.running().socket == str(tmp_path / "x.sock")
    assert home.read_log() == ""


def test_after_a_kill_it_starts_again(home: Home) -> None:
    home.run("start")
    first = home.running().pid
    os.kill(first, signal.SIGKILL)
    home.wait_until_gone()
    answer = home.run("start")
    assert answer.returncode == 0, answer.stderr
    assert home.running().pid != first


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_the_limit_of_open_files_is_raised_to_what_is_allowed(home: Home) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        home.run("start")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lines = Path(f"/proc/{home.running().pid}/limits").read_text().splitlines()
    limits = next(line.split() for line in lines if line.startswith("Max open files"))
    assert limits[3] == limits[4] == str(hard)


# --- stop ---


def test_stop_returns_when_the_process_is_gone_and_leaves_its_marker(home: Home) -> None:
    home.run("start")
    holder = home.running()
    with Process(holder) as process:
        assert process.is_alive()
        answer = home.run("stop")
        assert not process.is_alive()
    assert (answer.returncode, answer.stdout) == (0, f"runstated stopped (pid {holder.pid})\n")
    assert home.holder() is None
    assert not home.socket.exists()
    assert presence.is_marked_stopped(home.stopped)


def test_stop_when_nothing_runs_says_so_and_leaves_its_marker(home: Home) -> None:
    answer = home.run("stop")
    assert (answer.returncode, answer.stdout) == (0, "runstated is not running\n")
    assert presence.is_marked_stopped(home.stopped)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_stop_says_that_it_cannot_reach_a_daemon_of_another_pid_namespace(home: Home) -> None:
    home.state_dir.mkdir(mode=0o700)
    with home.lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(
            presence.LockInfo(pid=1, birth="1", socket="/s").encode()
        )  # a number that means another process here
        held.flush()
        answer = home.run("stop")
    assert answer.returncode == 1
    assert "cannot stop runstated: it runs (pid 1) where this process cannot see it" in answer.stderr
    assert not home.stopped.exists(), "it runs: clients may start it when it has ended"


@pytest.mark.parametrize("command", ["start", "restart"])
def test_start_and_restart_remove_the_marker(home: Home, command: str) -> None:
    home.run("stop")
    assert home.run(command).returncode == 0
    assert not home.stopped.exists()


def test_a_stopped_process_that_got_the_holders_number_is_not_taken_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        with Process(presence.LockInfo(pid=innocent.pid, birth="1")) as process:
            assert process.is_alive() is (presence.process_birth(innocent.pid) == "")
        with Process(presence.LockInfo(pid=innocent.pid, birth=presence.process_birth(innocent.pid))) as process:
            assert process.is_alive()
            process.terminate()
            assert innocent.wait(PATIENCE_S) == -signal.SIGTERM
            process.terminate()
            assert not process.is_alive()


def test_status_tells_running_from_stopped_by_its_exit_code(home: Home) -> None:
    answer = home.run("status")
    assert (answer.returncode, answer.stdout) == (3, "runstated is not running\n")
    home.run("start")
    answer = home.run("status")
    assert answer.returncode == 0
    assert answer.stdout.startswith("runstated is running\n")
    home.run("stop")
    answer = home.run("status")
    assert answer.returncode == 3
    assert "it was stopped with `runstated stop`" in answer.stdout


def test_restart_is_another_process_on_the_same_socket(home: Home) -> None:
    home.run("start")
    first = home.running()
    answer = home.run("restart")
    assert answer.returncode == 0, answer.stderr
    assert home.running().pid != first.pid
    assert home.running().socket == first.socket


def test_clients_that_come_during_a_restart_are_served_and_see_no_stop(home: Home) -> None:
    home.run("start")
    script = (
        "import sys, threading, time; from runstate import autostart\n"
        "done = threading.Event()\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "while not done.is_set(): autostart.connect(deadline=time.monotonic() + 60).close()\n"
    )
    clients = [home.popen(sys.executable, "-c", script) for _ in range(3)]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
    for _ in range(3):
        assert home.run("restart").returncode == 0
    assert [client.communicate(timeout=PATIENCE_S)[0] for client in clients] == ["", "", ""]


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_exit_code_0(
    home: Home, foreground: subprocess.Popen[str], number: signal.Signals
) -> None:
    connected = knock(home.socket)
    foreground.send_signal(number)
    said, _ = foreground.communicate(timeout=PATIENCE_S)
    assert foreground.returncode == 0, said
    assert said.rstrip().endswith("stopped")
    while connected.recv(65_536):
        pass  # whatever it says, it says goodbye and closes
    connected.close()
    assert home.holder() is None
    assert not home.socket.exists()


def test_a_terminal_that_closes_does_not_end_it(home: Home, foreground: subprocess.Popen[str]) -> None:
    foreground.send_signal(signal.SIGHUP)
    knock(home.socket).close()
    assert home.run("status").returncode == 0
    assert foreground.poll() is None


def test_a_second_signal_ends_it_at_once() -> None:
    script = (
        "import asyncio; from runstated import daemon\n"
        "async def drain_for_ever():\n"
        "    stopping = daemon._stop_on_signals(); print('listens', flush=True)\n"
        "    await stopping.wait(); print('drains', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(drain_for_ever())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("listens\n", "drains\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


# --- its files ---


@pytest.mark.parametrize("name", ["lock", "socket"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_it_ends_when_its_lock_or_socket_is_taken_away(home: Home, name: str, how: str) -> None:
    path: Path = getattr(home, name)
    with home.popen(sys.executable, "-c", QUICK_PULSE, "start", "--foreground") as process:
        home.wait_until_listening()
        path.rename(path.with_suffix(".taken"))
        if how == "replaced":
            path.write_text("")
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    what = "the lock file" if name == "lock" else "the socket"
    assert f"{what} {path} was removed or replaced" in said
    if how == "replaced":
        assert path.read_text() == "", "what took its place is not ours"
    else:
        assert path.exists() is (name == "lock"), "a lock file for the next daemon"


@pytest.mark.parametrize("name", ["lock", "socket"])
def test_it_serves_nobody_new_when_its_lock_or_socket_is_taken_away(home: Home, name: str) -> None:
    path: Path = getattr(home, name)
    with home.popen(sys.executable, "-m", "runstated", "start", "--foreground") as process:
        home.wait_until_listening()
        taken = path.with_suffix(".taken")
        path.rename(taken)
        with Raw(taken if name == "socket" else home.socket) as connection:
            assert connection.is_closed()
        said, _ = process.communicate(timeout=settings.PULSE_MS / 2000)  # long before the pulse
    assert process.returncode == 1
    assert f"{path} was removed or replaced" in said


def test_its_log_is_rotated_by_size(home: Home) -> None:
    script = "from runstated import main, settings; settings.LOG_BYTES_MAX = 300; main.main()"
    for _ in range(2):
        with home.popen(sys.executable, "-c", script, "start", "--foreground") as process:
            home.wait_until_listening()
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
    assert not home.log.exists(), "in the foreground the log is the terminal"
    reader, writer = os.pipe()
    code = (
        "import sys; from runstated import settings; settings.LOG_BYTES_MAX = 300\n"
        "from runstated.__main__ import main; main()"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, "detached", str(writer), "{}"]
        subprocess.run(command, env=home.environ, pass_fds=(writer,), check=True, timeout=PATIENCE_S)
        assert b"pid" in os.read(reader, 1000)
        home.run("stop")
    os.close(reader)
    os.close(writer)
    assert home.log.with_suffix(".log.1").exists()


def test_the_version_is_the_packages(home: Home) -> None:
    assert home.run("--version").stdout == f"runstated {runstate.__version__}\n"


def test_uptime_is_shown_in_words() -> None:
    from runstated.main import _duration

    assert [_duration(s) for s in (0, 59, 61, 3_600, 90_061)] == ["0 s", "59 s", "1 min 1 s", "1 h", "1 d 1 h"]
    assert _duration(-time.time()) == "0 s"

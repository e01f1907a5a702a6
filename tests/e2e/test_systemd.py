"""The units, and the daemon under a service manager's protocols."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstate import paths
from tests.daemons import PATIENCE_S, Home

UNITS = Path(__file__).parents[2] / "systemd"

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is for Linux")


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    place = Home(tmp_path / "state")
    yield place
    place.close()


@needs("systemd-analyze")
@pytest.mark.parametrize("mode", [[], ["--user"]])
@pytest.mark.parametrize("unit", ["runstated.service", "runstated.socket"])
def test_the_units_are_clean(unit: str, mode: list[str], tmp_path: Path) -> None:
    answer = subprocess.run(
        ["systemd-analyze", "verify", *mode, str(UNITS / unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


@linux_only
def test_the_socket_unit_listens_where_clients_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    lines = (UNITS / "runstated.socket").read_text().splitlines()
    listens = next(line.partition("=")[2] for line in lines if line.startswith("ListenStream="))
    expected = paths.default_state_dir() / paths.SOCKET_NAME
    assert listens.replace("%h", "/home/me") == str(expected)


def test_ready_watchdog_and_stopping_are_told_to_the_manager(home: Home, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        command = home.command("start", "--foreground")
        environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
        with home.popen(*command, **environ) as process:
            ready = manager.recv(4096).decode().splitlines()
            assert ready == ["READY=1", f"STATUS=Listening on {home.socket}", f"MAINPID={process.pid}"]
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(str(home.socket))
            assert [manager.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            process.send_signal(signal.SIGTERM)
            said = manager.recv(4096)
            while said == b"WATCHDOG=1":
                said = manager.recv(4096)
            assert said == b"STOPPING=1\nSTATUS=Draining"
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


@needs("systemd-socket-activate")
def test_the_first_connection_starts_the_daemon_on_the_managers_socket(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "given.sock"
    passed = [f"--setenv={name}={value}" for name, value in home.environ.items() if name.startswith(("RUN", "PYTHON"))]
    command = ["systemd-socket-activate", f"--listen={path}", *passed, *home.command("start", "--foreground")]
    with home.popen(*command) as process:
        assert process.stdout is not None
        assert "Listening on" in process.stdout.readline()
        assert home.holder() is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            holder = home.wait_until_listening()
            assert (holder.pid, holder.socket) == (process.pid, str(path))
            assert not home.socket.exists()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
        assert home.run("status").returncode == 0
        assert home.run("stop").returncode == 0
        assert process.wait(PATIENCE_S) == 0
    assert path.exists(), "a socket of the manager is not ours to remove"

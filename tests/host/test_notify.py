"""The service manager's two protocols, against real sockets and descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from runstated.host import notify


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(10)
        yield receiver


def test_ready_alive_and_stopping_arrive_as_datagrams(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "60000000", "OTHER": "x"}
    notifier = notify.Notifier(environ)
    assert environ == {"OTHER": "x"}, "the variables are meant for this process alone"
    assert notifier.watchdog_s == 60
    notifier.ready("Listening")
    notifier.alive()
    notifier.stopping("Draining")
    received = [manager.recv(4096).decode().splitlines() for _ in range(3)]
    assert received == [
        ["READY=1", "STATUS=Listening", f"MAINPID={os.getpid()}"],
        ["WATCHDOG=1"],
        ["STOPPING=1", "STATUS=Draining"],
    ]


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="abstract addresses exist on Linux only")
def test_an_abstract_address_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # Linux: the kernel picks an abstract address
        receiver.settimeout(10)
        name = receiver.getsockname()
        notify.Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}).alive()
        assert receiver.recv(100) == b"WATCHDOG=1"


def test_without_a_manager_nothing_happens() -> None:
    notifier = notify.Notifier({})
    notifier.ready("")
    notifier.alive()
    assert notifier.watchdog_s is None


def test_a_manager_that_is_gone_is_logged_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify.Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).alive()
    assert "cannot notify the service manager" in caplog.text


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("30000000", "ours", 30.0),
        ("30000000", "1", None),
        ("0", "", None),
        ("soon", "", None),
        ("", "", None),
    ],
)
def test_the_watchdog_counts_only_when_it_is_ours(usec: str, pid: str, expected: float | None) -> None:
    assert (
        notify.Notifier({"WATCHDOG_USEC": usec, "WATCHDOG_PID": pid.replace("ours", str(os.getpid()))}).watchdog_s
        == expected
    )


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[int]:
    """Two sockets on neighbouring descriptors, as a manager leaves them; the first one's number."""
    first = 230
    for offset in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(str(tmp_path / f"{offset}.sock"))
            os.dup2(sock.fileno(), first + offset)
    yield first
    for offset in range(2):
        try:
            os.close(first + offset)
        except OSError:
            pass  # closed by the test through its socket object


def test_given_sockets_come_with_their_names(descriptors: int, tmp_path: Path) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "main", "KEPT": "1"}
    found = notify.listen_fds(environ, first=descriptors)
    assert [(name, sock.getsockname(), sock.family) for name, sock in found] == [
        ("main", str(tmp_path / "0.sock"), socket.AF_UNIX),
        ("unknown", str(tmp_path / "1.sock"), socket.AF_UNIX),
    ]
    assert not any(sock.get_inheritable() for _, sock in found)
    assert environ == {"KEPT": "1"}
    for _, sock in found:
        sock.close()


def test_sockets_meant_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "2"}
    assert notify.listen_fds(environ) == []
    assert environ == {}

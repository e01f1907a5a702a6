"""Where the daemon listens beside its socket: over restarts, crashes and starts by somebody who knows nothing of it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import PATIENCE_S, Home

CLIENT = "import runstate; runstate.run('r').run_id()"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A daemon that serves HTTP."""
    place = Home(tmp_path / "state")
    answer = place.run("start", "--http", "127.0.0.1:0")
    assert answer.returncode == 0, answer.stderr
    yield place
    place.close()


def kill(home: Home) -> str:
    """The daemon dies; where it had listened."""
    holder = home.running()
    os.kill(holder.pid, signal.SIGKILL)
    home.wait_until_gone()
    return holder.http


def health(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_restart_listens_where_the_daemon_did_before(home: Home) -> None:
    before = home.running().http
    assert home.run("restart").returncode == 0
    assert home.running().http == before
    assert health(before) == 200
    assert home.run("restart", "--tcp", "127.0.0.1:0").returncode == 0
    assert (home.running().http, bool(home.running().tcp)) == ("", True)


def test_a_client_that_starts_it_after_a_crash_brings_all_of_it_back(home: Home) -> None:
    before = kill(home)
    answer = home.python("-c", CLIENT)
    assert answer.returncode == 0, answer.stderr
    assert home.running().http == before
    assert health(before) == 200


def test_a_stop_forgets(home: Home) -> None:
    assert home.run("stop").returncode == 0
    assert home.run("start").returncode == 0
    assert home.running().http == ""


def test_after_a_crash_a_port_that_is_taken_is_done_without(home: Home) -> None:
    host, _, port = kill(home).rpartition(":")
    with socket.create_server((host, int(port))):
        assert home.run("start").returncode == 0
        assert home.running().http == ""
    assert "another program listens there" in home.read_log()


def test_start_fails_when_the_daemon_that_runs_does_not_listen_there(home: Home) -> None:
    there = home.running().http
    for fine in (["--http", there], []):
        assert home.run("start", *fine).returncode == 0
    for missing in (["--http", "127.0.0.1:1"], ["--tcp", "127.0.0.1:0"]):
        answer = home.run("start", *missing)
        assert answer.returncode == 1
        assert "already runs" in answer.stdout
        assert "runstated restart" in answer.stderr
    assert home.running().http == there


def test_who_connects_while_it_starts_is_served_when_it_is_ready(home: Home) -> None:
    """Between the end of the old process and the first moment of the new one nobody listens; not longer."""
    address = home.running().http
    refused: list[bool] = []
    over = threading.Event()

    def knock() -> None:
        while not over.is_set():
            try:
                health(address)
                refused.append(False)
            except ConnectionRefusedError:
                refused.append(True)
            except (OSError, http.client.HTTPException):
                pass  # the old process took it along: as with any server, the client tries again

    thread = threading.Thread(target=knock)
    thread.start()
    answer = home.run("restart")
    ready = home.running().http
    over.set()
    thread.join()
    assert (answer.returncode, ready) == (0, address)
    assert health(address) == 200
    assert not refused[-1]


def test_a_state_directory_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    place = Home(tmp_path / "state")
    place.state_dir.write_text("")
    for command in ("start", "restart"):
        answer = place.run(command)
        assert answer.returncode == 1
        assert answer.stderr.startswith("runstated: ")
        assert "Traceback" not in answer.stderr

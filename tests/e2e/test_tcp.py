"""Over TCP: real processes, keys, spaces, TLS, connections that are cut, slow or full of noise."""

from __future__ import annotations

import contextvars
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runstate
from runstate import errors, wire
from tests.daemons import PATIENCE_S
from tests.e2e.support import Daemon, Raw, eventually

WORKER = """
@runstate.once
def work(x):
    effect("worked", x)
    return x * 2
say(work(21), bool(hear()))
"""
OPENSSL = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
    *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
)
HOLDER = """
with runstate.slots("gpu", max=1, lease="5s"):
    say("held")
    hear()
"""


class Remote:
    """A daemon that listens on TCP, too."""

    def __init__(self, daemon: Daemon, scheme: str = "tcp") -> None:
        self.daemon, self.scheme = daemon, scheme

    @property
    def port(self) -> int:
        return int(self.daemon.running().tcp.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"{self.scheme}://localhost:{self.port}"

    def command(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.daemon.python("-m", "runstate_cli", *arguments, **environ)

    def key(self, *arguments: str) -> dict[str, Any]:
        made = self.command("keys", "create", "--json", *arguments)
        assert made.returncode == 0, made.stderr
        found: dict[str, Any] = json.loads(made.stdout)
        return found

    def environ(self, key: dict[str, Any]) -> dict[str, str]:
        return {
            "RUNSTATE_BASE_URL": self.url,
            "RUNSTATE_API_KEY": key["secret"],
            "RUNSTATE_SPACE_ID": key["space"],
        }

    def client(self, key: dict[str, Any], **options: Any) -> runstate.Runstate:
        given = {"base_url": self.url, "api_key": key["secret"], "space_id": key["space"], **options}
        return runstate.Runstate(**given)

    def raw(self) -> Raw:
        return Raw(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S))


@pytest.fixture
def remote(no_daemon: Daemon) -> Remote:
    no_daemon.environ["RUNSTATED_TCP"] = "127.0.0.1:0"
    no_daemon.start()
    no_daemon.environ["RUNSTATED_TCP"] = f"127.0.0.1:{Remote(no_daemon).port}"  # the same after a restart
    return Remote(no_daemon)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RUNSTATE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [*OPENSSL, "-keyout", str(key), "-out", str(cert)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    yield cert, key


def test_two_processes_over_tcp_share_one_once_with_one_over_the_socket(remote: Remote) -> None:
    environ = remote.environ(remote.key())
    programs = [remote.daemon.program(WORKER, **environ) for _ in range(2)] + [remote.daemon.program(WORKER)]
    for program in programs:
        program.say("go")
        assert program.hear() == "42 True"
    assert remote.daemon.effects() == ["worked 21"]


def test_a_killed_holder_keeps_what_it_held_until_its_lease_lapses(remote: Remote) -> None:
    key = remote.key()
    holder = remote.daemon.program(HOLDER, **remote.environ(key))
    assert holder.hear() == "held"
    holder.kill()
    client = remote.client(key)
    with pytest.raises(errors.TimeoutError), client.slots("gpu", timeout="100ms"):
        pass
    with client.slots("gpu", timeout="30s"):
        assert remote.daemon.status().workers
    client._core.configure({})


def test_a_connection_that_is_cut_is_resumed_with_its_leases(remote: Remote) -> None:
    client = remote.client(remote.key())
    with client.slots("gpu", max=1):
        connection = client._connection()
        session, before = connection.session, connection._stream
        assert before is not None
        before.cut()
        eventually(lambda: connection._stream not in (None, before), "it connects again")
        assert client.run_id()
        (worker,) = [worker for worker in remote.daemon.status().workers if worker.holdings]
        assert worker.session == wire.shown_session(session), "which is not told to others"
    client._core.configure({})


def test_a_restart_of_the_daemon_loses_nothing(remote: Remote) -> None:
    client = remote.client(remote.key())
    with client.slots("gpu", max=1):
        remote.daemon.restart(kill=True)
        assert client.run_id()
        other = runstate.Runstate(base_url=f"unix://{remote.daemon.socket}")
        with pytest.raises(errors.TimeoutError), other.slots("gpu", timeout="100ms"):
            pass
    with other.slots("gpu", timeout="10s"):
        pass
    other._core.configure({})
    client._core.configure({})


def test_two_spaces_do_not_see_each_other(remote: Remote) -> None:
    a, b = (remote.client(remote.key("--space", space)) for space in ("a", "b"))
    assert a.run_id() != b.run_id()
    with a.slots("gpu", max=1), b.slots("gpu", max=1):
        seen = remote.command("status", "--json", **remote.environ(remote.key("--space", "b")))
        (run,) = json.loads(seen.stdout)["runs"]
        assert run["run"] == b.run_id()
    for client in (a, b):
        client._core.configure({})


# ------------------------------------------------------------------ keys


def test_a_key_is_needed_and_says_what_is_wrong_with_it(remote: Remote) -> None:
    key = remote.key("--space", "a")
    with pytest.raises(errors.ConfigError, match="RUNSTATE_API_KEY"):
        runstate.Runstate(base_url=remote.url).run_id()
    with pytest.raises(errors.AuthError, match="not one of this daemon's") as wrong:
        remote.client(key, api_key=key["secret"] + "x").run_id()
    assert (wrong.value.code, wrong.value.status) == ("UNAUTHENTICATED", 401)
    with pytest.raises(errors.AuthError, match="works in the space 'a', not in 'b'") as elsewhere:
        remote.client(key, space_id="b").run_id()
    assert elsewhere.value.code == "FORBIDDEN"
    with remote.raw() as connection:
        assert connection.hello().code == "UNAUTHENTICATED"
        assert connection.is_closed()


def test_a_revoked_key_ends_its_sessions_at_once_and_frees_what_they_held(remote: Remote) -> None:
    key, other = remote.key(), remote.client(remote.key())
    client = remote.client(key, timeout="1s")
    holds = client.slots("gpu", max=1)
    contextvars.copy_context().run(holds.__enter__)  # for good; the next test is not to be inside of it
    with remote.raw() as connection:
        connection.hello(key=key["secret"])
        assert remote.command("keys", "revoke", key["id"]).returncode == 0
        assert connection.is_closed()
    with other.slots("gpu", timeout="20s"):
        pass
    with pytest.raises(errors.AuthError, match="revoked"):
        client.status()
    listed = json.loads(remote.command("keys", "list", "--json").stdout)["keys"]
    assert [each["revoked_ms"] is not None for each in listed if each["id"] == key["id"]] == [True]
    remote.daemon.restart()
    with pytest.raises(errors.AuthError, match="revoked"):
        remote.client(key).run_id()
    other._core.configure({})


def test_keys_are_managed_over_the_socket_only(remote: Remote) -> None:
    denied = remote.command("keys", "list", **remote.environ(remote.key()))
    assert denied.returncode == 4
    assert "Unix socket" in denied.stderr
    assert remote.command("keys", "revoke", "k9-none").returncode == 1


def test_a_key_may_do_what_its_permissions_say(remote: Remote) -> None:
    client = remote.client(remote.key("--permission", "work"))
    with pytest.raises(errors.AuthError, match="resource_config"), client.slots("new", max=1):
        pass
    status = client.status()
    assert (status.run.state, status.workers, status.waiting) == ("running", [], [])
    client._core.configure({})
    looker = remote.environ(remote.key("--permission", "usage"))
    assert remote.command("status", **looker).returncode == 0
    assert remote.command("status", **remote.environ(remote.key("--permission", "work"))).returncode == 4


def test_a_session_is_resumed_with_its_own_key_only(remote: Remote) -> None:
    first, second = remote.key(), remote.key()
    mine = os.urandom(8).hex()
    with remote.raw() as one, remote.raw() as two, remote.raw() as three, remote.raw() as four:
        assert not one.hello(session=mine, key=first["secret"]).resumed
        assert not two.hello(session=mine, key=second["secret"]).resumed
        with Raw(remote.daemon.socket) as local:
            assert not local.hello(session=mine).resumed
        assert isinstance(one.ask(wire.RunsJoin(name="x")), wire.RunView), "nobody has taken its place"
        assert three.hello(session=mine, key=first["secret"]).resumed
        assert four.hello(session="guessed", key=first["secret"]).code == "VALIDATION_FAILED"


def test_a_client_that_tries_all_small_numbers_ends_nobodys_hold(remote: Remote) -> None:
    key = remote.key()
    client = remote.client(key)
    with client.slots("gpu", max=1), remote.raw() as thief:
        thief.hello(key=key["secret"], session=os.urandom(8).hex())
        for number in range(1, 40):
            assert thief.ask(wire.Release(token=number)) == wire.Released(held=False)
            assert thief.ask(wire.Renew(token=number, lease_ms=5_000)).code == "LEASE_LOST"
        assert thief.ask(wire.SlotsGet(pool="gpu")).used == 1
    client._core.configure({})


# ------------------------------------------------------------------ noise, TLS, addresses


def test_noise_is_cut_off_and_harms_nobody(remote: Remote) -> None:
    for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x00\x00\x09" + b"\xff" * 9, b"\x00" * 400_000):
        with remote.raw() as connection:
            connection.socket.sendall(noise)
            assert connection.is_closed()
    with remote.raw() as connection:
        connection.socket.sendall((4 * 1024 * 1024).to_bytes(4, "big"))  # a frame that may come after a hello only
        try:
            connection.socket.sendall(b"x" * 1024 * 1024)
        except OSError:
            pass  # it is closed already
        assert connection.is_closed()
    with remote.raw() as connection:
        assert isinstance(connection.hello(key=remote.key()["secret"]), wire.Welcome)


def test_tls_with_a_certificate_that_the_client_is_told_of(
    no_daemon: Daemon, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key_file = certificate
    no_daemon.environ |= {
        "RUNSTATED_TCP": "localhost:0",
        "RUNSTATED_TLS_CERT": str(cert),
        "RUNSTATED_TLS_KEY": str(key_file),
    }
    no_daemon.start()
    remote = Remote(no_daemon, "tls")
    key = remote.key()
    with pytest.raises(errors.ConfigError, match="RUNSTATE_CA_FILE"):
        remote.client(key).run_id()
    monkeypatch.setenv("RUNSTATE_CA_FILE", str(cert))
    client = remote.client(key)
    with client.slots("gpu", max=1):
        assert client.once(lambda: "x" * 60_000, name="large")() == "x" * 60_000
    client._core.configure({})
    with pytest.raises(errors.ConfigError, match="tls://"):
        remote.client(key, base_url=f"tcp://localhost:{remote.port}", timeout="5s", retries=0).run_id()
    environ = {**remote.environ(key), "RUNSTATE_CA_FILE": str(cert)}
    assert remote.command("status", **environ).returncode == 0
    program = no_daemon.program(WORKER, **environ)
    program.say("go")
    assert program.hear() == "42 True"


@pytest.mark.parametrize("option", ["--tcp", "--http"])
def test_an_address_that_others_can_reach_needs_tls_or_a_word(no_daemon: Daemon, option: str) -> None:
    refused = no_daemon.run("start", option, "0.0.0.0:0")
    assert refused.returncode == 2
    assert "--tls-cert" in refused.stderr
    assert "--allow-plaintext" in refused.stderr
    assert no_daemon.holder() is None


def test_the_real_address_is_shown_and_one_that_is_taken_is_refused(remote: Remote, tmp_path: Path) -> None:
    assert f"tcp://127.0.0.1:{remote.port}" in remote.daemon.run("status").stdout
    second = subprocess.run(
        [sys.executable, "-m", "runstated", "start", "--tcp", f"127.0.0.1:{remote.port}"],
        env={**remote.daemon.environ, "RUNSTATED_STATE_DIR": str(tmp_path / "second")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    assert "another program listens there" in second.stderr

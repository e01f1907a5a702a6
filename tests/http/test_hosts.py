from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runstated.http.hosts import Hosts, names_in


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::"])
def test_names_are_ours_whatever_the_port(bound: str) -> None:
    hosts = Hosts(bound, ("Box.local", "*.example.org"))
    for host in (
        "localhost",
        "localhost:1",
        "127.0.0.1:80",
        "[::1]:80",
        "box.local:8443",
        "a.example.org",
        "BOX.LOCAL.",
    ):
        assert hosts.has(host), host
    for host in (
        "",
        ":80",
        "evil.example",
        "box.local.evil.example",
        "example.org",
        "a.b.example.org",
        "x:y:z",
    ):
        assert not hosts.has(host), host


def test_any_address_will_do_where_all_are_listened_on() -> None:
    assert Hosts("0.0.0.0", ()).has("10.1.2.3:80")
    assert Hosts("::", ()).has("[fe80::1]:80")
    assert not Hosts("127.0.0.1", ()).has("10.1.2.3:80")


def test_a_certificate_that_cannot_be_read_names_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cert.pem").write_text("none")
    with caplog.at_level(logging.WARNING):
        assert names_in(tmp_path / "cert.pem", tmp_path / "key.pem") == ()
    assert "cannot be read" in caplog.text

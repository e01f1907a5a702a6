"""Where a setting comes from, which place wins, and what is said about one that cannot be used."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from runstated import settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "runstated.toml"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose configuration file does not exist, whatever the developer's own says."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "none"), "HOME": str(tmp_path)}


@pytest.fixture(autouse=True)
def _no_config_of_the_developer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def test_without_any_source_the_defaults_hold(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    found = settings.load({}, environ)
    assert found == settings.Settings(Path("/state/runstated"), Path("/state/runstated/runstated.sock"))
    assert (found.sync, found.log_level, found.config) == ("full", "info", None)
    assert found.database == Path("/state/runstated/runstate.db")


def test_the_command_line_wins_over_variables_over_the_file(environ: dict[str, str], config: Path) -> None:
    config.write_text('sync = "normal"\nlog_level = "error"\nsocket = "/file.sock"\n')
    environ |= {"RUNSTATED_CONFIG": str(config), "RUNSTATED_SYNC": "full", "RUNSTATED_LOG_LEVEL": "warning"}
    found = settings.load({"log_level": "debug", "sync": None}, environ)
    assert (found.log_level, found.sync, found.socket) == ("debug", "full", Path("/file.sock"))
    assert found.config == config


def test_the_config_option_wins_over_its_variable(environ: dict[str, str], config: Path) -> None:
    config.write_text('sync = "normal"\n')
    environ["RUNSTATED_CONFIG"] = "/does/not/exist.toml"
    assert settings.load({"config": str(config)}, environ).sync == "normal"


def test_the_socket_follows_the_state_directory(environ: dict[str, str]) -> None:
    assert settings.load({"state_dir": "/srv/a"}, environ).socket == Path("/srv/a/runstated.sock")


def test_a_blank_variable_counts_as_unset(environ: dict[str, str]) -> None:
    assert settings.load({}, environ | {"RUNSTATED_SYNC": "  "}).sync == "full"


def test_a_bad_value_names_its_place_and_what_is_allowed(environ: dict[str, str], config: Path) -> None:
    with pytest.raises(settings.SettingsError, match=r"RUNSTATED_SYNC: sync is 'fast'; allowed are full, normal"):
        settings.load({}, environ | {"RUNSTATED_SYNC": "fast"})
    with pytest.raises(settings.SettingsError, match=r"--log-level: .* allowed are debug, info, warning, error"):
        settings.load({"log_level": "loud"}, environ)
    config.write_text('sync = "off"\n')
    with pytest.raises(settings.SettingsError, match=rf"{config}: sync is 'off'"):
        settings.load({"config": str(config)}, environ)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("colour = 3\n", r"unknown key 'colour'; allowed are state_dir, socket, tcp, http, "),
        ("sync = 3\n", r"sync must be a text that is not empty, not 3"),
        ('socket = ""\n', r"socket must be a text"),
        ("sync = \n", r"is not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_by_name(environ: dict[str, str], config: Path, content: str, said: str) -> None:
    config.write_text(content)
    with pytest.raises(settings.SettingsError, match=said) as refused:
        settings.load({"config": str(config)}, environ)
    assert str(config) in str(refused.value)


def test_a_file_that_was_asked_for_must_exist(environ: dict[str, str]) -> None:
    with pytest.raises(settings.SettingsError, match=r"/none\.toml does not exist"):
        settings.load({"config": "/none.toml"}, environ)


def test_an_empty_option_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(settings.SettingsError, match=r"--state-dir is empty"):
        settings.load({"state_dir": " "}, environ)


def test_settings_cannot_be_changed(environ: dict[str, str]) -> None:
    with pytest.raises(FrozenInstanceError):
        settings.load({}, environ).sync = "normal"  # type: ignore[misc]


# ------------------------------------------------------------------ beyond the socket


@pytest.mark.parametrize(
    ("text", "shown", "is_loopback"),
    [
        ("127.0.0.1:7700", "127.0.0.1:7700", True),
        ("localhost:0", "localhost:0", True),
        ("[::1]:80", "[::1]:80", True),
        ("0.0.0.0:7700", "0.0.0.0:7700", False),
        ("localhost.example.org:1", "localhost.example.org:1", False),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(environ: dict[str, str], text: str, shown: str, *, is_loopback: bool) -> None:
    found = settings.load({"tcp": text, "allow_plaintext": "yes"}, environ).tcp
    assert found is not None
    assert (str(found), found.is_loopback) == (shown, is_loopback)


@pytest.mark.parametrize("text", ["7700", ":7700", "host:", "host:x", "host:65536", "host:-1", "host:²"])
def test_an_endpoint_that_is_none_is_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(settings.SettingsError, match=r"RUNSTATED_HTTP: http is .* it must be HOST:PORT"):
        settings.load({}, environ | {"RUNSTATED_HTTP": text})


@pytest.mark.parametrize("key", ["tcp", "http"])
def test_what_others_can_reach_needs_tls_or_a_word(environ: dict[str, str], key: str) -> None:
    with pytest.raises(settings.SettingsError, match=r"--tls-cert.*--allow-plaintext"):
        settings.load({key: "0.0.0.0:1"}, environ)
    assert settings.load({key: "0.0.0.0:1", "tls_cert": "/c", "tls_key": "/k"}, environ).tls_cert == Path("/c")


def test_a_certificate_needs_its_key(environ: dict[str, str]) -> None:
    with pytest.raises(settings.SettingsError, match="needed together"):
        settings.load({"tls_cert": "/c"}, environ)

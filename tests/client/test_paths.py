"""Both sides must find the same files: where they are, and what makes a directory private enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from runstate import paths
from runstated import settings


def test_the_default_state_directory_is_the_one_platformdirs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for base in ("/somewhere/else", "somewhere/else", "", None):
        if base is None:
            monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_STATE_HOME", base)
        assert str(paths.default_state_dir()) == platformdirs.user_state_dir("runstated", appauthor=False)


def test_the_default_configuration_file_is_in_the_directory_platformdirs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for base in ("/somewhere/else", "somewhere/else", ""):
        monkeypatch.setenv("XDG_CONFIG_HOME", base)
        directory = platformdirs.user_config_dir("runstated", appauthor=False)
        assert str(paths.config_file({})) == f"{directory}/runstated.toml"


def test_variables_name_the_state_directory_and_the_socket(tmp_path: Path) -> None:
    environ = {"RUNSTATED_STATE_DIR": f" {tmp_path} ", "RUNSTATED_CONFIG": "/none"}
    assert paths.state_dir(environ) == tmp_path
    assert paths.socket_path(environ=environ) == tmp_path / "runstated.sock"
    assert paths.socket_path(environ={**environ, "RUNSTATED_SOCKET": "/run/x.sock"}) == Path("/run/x.sock")


def test_a_relative_state_directory_is_made_absolute() -> None:
    assert paths.state_dir({"RUNSTATED_STATE_DIR": "here"}) == Path.cwd() / "here"


def test_a_client_finds_a_daemon_that_the_configuration_file_moved(tmp_path: Path) -> None:
    file = tmp_path / "runstated.toml"
    file.write_text('state_dir = "/srv/state"\n')
    environ = {"RUNSTATED_CONFIG": str(file)}
    assert paths.state_dir(environ) == Path("/srv/state")
    assert paths.socket_path(environ=environ) == Path("/srv/state/runstated.sock")


def test_what_the_configuration_file_names_is_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runstated.toml").write_text('state_dir = "state"\nsocket = "s/x.sock"\n')
    monkeypatch.chdir("/")
    environ = {"RUNSTATED_CONFIG": str(tmp_path / "runstated.toml")}
    found = settings.load({}, environ)
    assert (found.state_dir, found.socket) == (tmp_path / "state", tmp_path / "s/x.sock")
    assert (paths.state_dir(environ), paths.socket_path(environ=environ)) == (found.state_dir, found.socket)


def test_a_client_takes_a_broken_configuration_file_as_empty(tmp_path: Path) -> None:
    file = tmp_path / "runstated.toml"
    file.write_bytes(b"state_dir = \xff")
    assert paths.state_dir({"RUNSTATED_CONFIG": str(file)}) == paths.default_state_dir()


def test_a_path_that_just_fits_is_kept_and_one_byte_more_is_hashed() -> None:
    fits = Path("/" + "x" * (paths.SUN_PATH_BYTES - 2))
    too_long = Path(f"{fits}x")
    assert paths.fit(fits) == fits
    short = paths.fit(too_long)
    assert short.parent == Path(f"/tmp/runstated-{os.geteuid()}")
    assert len(os.fsencode(short)) < paths.SUN_PATH_BYTES
    assert paths.is_short(short)
    assert not paths.is_short(fits)


def test_bytes_are_counted_not_letters() -> None:
    assert paths.is_short(paths.fit(Path("/" + "ü" * (paths.SUN_PATH_BYTES // 2 + 1))))


def test_both_sides_compute_the_same_short_path_whatever_tmpdir_says(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    code = "from runstate import paths; print(paths.socket_path())"
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RUNSTATED_STATE_DIR": str(directory), "TMPDIR": tmpdir},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for tmpdir, cwd in (("/tmp", "/"), (str(tmp_path), str(tmp_path)))
    }
    assert answers == {f"{paths.fit(directory / 'runstated.sock')}\n"}


def test_a_private_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    paths.private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_ours_that_others_can_read_is_narrowed(tmp_path: Path) -> None:
    directory = tmp_path / "wide"
    directory.mkdir()
    directory.chmod(0o777)
    paths.private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_is_refused_unless_it_is_the_users_own_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert "symbolic link" in (paths.foreign_directory(link) or "")
    with pytest.raises(PermissionError, match="symbolic link"):
        paths.private_directory(link)
    paths.private_directory(link, follow=True)
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user id"):
        paths.private_directory(directory)
    assert "belongs to user id" in (paths.foreign_directory(directory) or "")


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="not a directory"):
        paths.private_directory(tmp_path / "file")


def test_an_absent_directory_is_not_foreign(tmp_path: Path) -> None:
    assert paths.foreign_directory(tmp_path / "none") is None


def test_importing_the_paths_loads_no_library() -> None:
    code = "import sys; from runstate import paths; paths.socket_path(); print('platformdirs' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "False\n" if sys.platform.startswith("linux") else "True\n"
    assert answer.stdout == expected

"""`runstate status` without a daemon: the picture of a view, and the ways not to get one."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

import runstate
import runstate_cli
from runstate import autostart, wire
from runstate_cli import status

NOW = 1_700_000_000_000
KEY = "research:0123456789abcdef0123456789abcdef"

DAEMON = wire.DaemonView(
    version=runstate.__version__,
    pid=4711,
    started_ms=NOW - 192_000,
    now_ms=NOW,
    socket="/var/lib/ada/runstated/runstated.sock",
    state_dir="/var/lib/ada/runstated",
    database_bytes=122_880,
    wal_bytes=4 << 20,
    sessions=3,
)
RUN = wire.RunView(run="r1-ab12", name="quickstart", state="active", created_ms=NOW - 60_000, deadline_ms=NOW + 300_000)
HOLDER = wire.WorkerView(
    session="s1",
    worker="box-4712",
    pid=4712,
    command="python research.py",
    connected=True,
    holdings=(
        wire.Holding(token=1, kind="once", name=KEY, run="quickstart", since_ms=NOW - 12_000, until_ms=NOW + 18_000),
    ),
)
WAITER = wire.WaitView(
    worker="box-4713",
    pid=4713,
    kind="once",
    name=KEY,
    run="r1-ab12",
    since_ms=NOW - 9_000,
    until_ms=NOW + 51_000,
    ahead=2,
    behind=("box-4712 (pid 4712)",),
)
QUEUE = wire.QueueView(queue="double", attempts=5, counts={"ready": 7, "succeeded": 31})
VIEW = wire.StatusView(daemon=DAEMON, runs=(RUN,), workers=(HOLDER,), waits=(WAITER,), queues=(QUEUE,))


def shown(view: wire.StatusView, width: int = 80) -> str:
    return "\n".join(line.text for line in status.picture(view, width))


def words(view: wire.StatusView, start: str) -> list[str]:
    """The words of the one line that starts so."""
    (line,) = [line for line in shown(view).splitlines() if line.startswith(start)]
    return line.split()


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that is not there; this process looks for its daemon in it."""
    for name in [name for name in os.environ if name.startswith(("RUNSTATE", "CODEX_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("RUNSTATED_CONFIG", str(tmp_path / "empty.toml"))
    monkeypatch.setenv("RUNSTATED_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(runstate_cli.cli, ["status", *arguments])


# --- the picture ---


def test_the_picture_says_who_holds_what_since_when_and_until_when() -> None:
    assert words(VIEW, "once research") == (
        "once research:01234567~ quickstart box-4712 12 s ago in 18 s".split()  # noqa: SIM905
    )


def test_the_picture_says_who_waits_for_what_behind_whom() -> None:
    expected = "box-4713 once research:01234567~ quickstart 9 s ago in 51 s 2 box-4712"
    assert words(VIEW, "box-4713") == expected.split()


def test_the_picture_shows_the_daemon_its_runs_and_queues() -> None:
    text = shown(VIEW)
    assert f"runstated {runstate.__version__}, pid 4711, up 3 min 12 s" in text
    assert "120.0 KiB, write-ahead log 4.0 MiB" in text
    assert DAEMON.socket in text
    assert words(VIEW, "quickstart") == "quickstart r1-ab12 1 min ago in 5 min -".split()  # noqa: SIM905
    assert words(VIEW, "double") == "double 7 0 0 31 0 5".split()  # noqa: SIM905
    assert words(VIEW, "box-4712") == "box-4712 4712 connected 1 python research.py".split()  # noqa: SIM905


def test_the_picture_fits_80_columns_whatever_the_names() -> None:
    long = msgspec.structs.replace(HOLDER, worker="w" * 300, command="c" * 900)
    view = msgspec.structs.replace(VIEW, workers=(long,), queues=(msgspec.structs.replace(QUEUE, queue="q" * 256),))
    assert max(len(line) for line in shown(view).splitlines()) <= 80


def test_a_pid_is_added_to_a_label_that_does_not_have_it() -> None:
    view = msgspec.structs.replace(VIEW, workers=(msgspec.structs.replace(HOLDER, worker="crawler"),))
    assert "crawler (4712)" in shown(view, 120)


def test_an_idle_worker_waits_for_work() -> None:
    idle = msgspec.structs.replace(WAITER, kind="queue", name="double", behind=())
    assert "work in double" in shown(msgspec.structs.replace(VIEW, waits=(idle,)))


def test_a_worker_whose_jobs_lack_something_says_what() -> None:
    stuck = msgspec.structs.replace(WAITER, kind="queue", name="q", behind=(), lacks=("slots browser", "budget usd"))
    text = " ".join(shown(msgspec.structs.replace(VIEW, waits=(stuck,)), width=200).split())
    assert "work in q, whose jobs lack slots browser, budget usd" in text


def test_waits_are_called_as_the_verbs_are() -> None:
    for kind, word in (("slots", "slots x"), ("limit", "limit x"), ("timer", "sleep x"), ("barrier", "together x")):
        wait = msgspec.structs.replace(WAITER, kind=kind, name="x")
        assert word in " ".join(shown(msgspec.structs.replace(VIEW, waits=(wait,)), width=200).split())


def test_a_worker_that_lost_its_connection_is_away() -> None:
    view = msgspec.structs.replace(VIEW, workers=(msgspec.structs.replace(HOLDER, connected=False),))
    assert words(view, "box-4712")[2] == "away"


def test_trouble_with_writing_is_said() -> None:
    daemon = msgspec.structs.replace(DAEMON, trouble="database or disk is full")
    assert "TROUBLE: writes fail (database or disk is full)" in shown(wire.StatusView(daemon=daemon))


def test_what_limits_the_daemon_is_said() -> None:
    daemon = msgspec.structs.replace(DAEMON, inherited=("nice 19", "CPU time limited to 60 s"))
    assert "LIMITED: nice 19, CPU time limited to 60 s: inherited" in shown(wire.StatusView(daemon=daemon))


def test_a_daemon_of_another_version_is_to_be_restarted() -> None:
    assert "restart pending" not in shown(VIEW)
    view = wire.StatusView(daemon=msgspec.structs.replace(DAEMON, version="0.0.1"))
    assert f"binary replaced, restart pending: {runstate.__version__} is installed" in shown(view)


def test_lists_that_were_cut_are_named() -> None:
    assert "There are more workers, waits than shown" in shown(msgspec.structs.replace(VIEW, more=("workers", "waits")))


def test_an_empty_daemon_has_none_of_everything() -> None:
    text = shown(wire.StatusView(daemon=DAEMON))
    for heading in ("Active runs", "Workers", "Held", "Waiting", "Queues"):
        assert f"{heading}: none" in text


def test_the_help_names_every_key_of_the_json() -> None:
    text = status.command.get_help(click.Context(status.command, info_name="status"))
    structs = (wire.StatusView, wire.DaemonView, wire.RunView, wire.WorkerView, wire.Holding, wire.WaitView)
    for struct in (*structs, wire.QueueView):
        for field in struct.__struct_fields__:
            assert field in text


# --- no picture ---


def test_not_running_is_a_line_on_stderr_and_exit_code_3(state_dir: Path) -> None:
    answer = run()
    assert (answer.exit_code, answer.stdout) == (3, "")
    assert answer.stderr == f"runstate: runstated is not running (nothing listens on {state_dir}/runstated.sock)\n"
    assert not state_dir.exists()


@pytest.mark.parametrize("option", ["--json", "--watch"])
def test_not_running_is_the_same_with_every_option(state_dir: Path, option: str) -> None:
    assert run(option).exit_code == 3


@pytest.mark.parametrize("url", ["unix:///nowhere/at-all.sock", "tcp://127.0.0.1:{port}"])
def test_an_address_where_nobody_listens_is_exit_code_3(
    state_dir: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("RUNSTATE_BASE_URL", url.format(port=taken.getsockname()[1]))
        answer = run()
    assert answer.exit_code == 3, answer.stderr


def test_an_address_of_another_form_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSTATE_BASE_URL", "ftp://example.org")
    answer = run()
    assert answer.exit_code == 1
    assert "is not of the form unix:///path, tcp://host:port or tls://host:port" in answer.stderr


def test_a_sandbox_that_denies_is_named_and_exit_code_4(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(autostart, "_connect_once", deny)
    monkeypatch.setenv("CODEX_SANDBOX", "seatbelt")
    answer = run()
    assert answer.exit_code == 4
    assert "this process runs in the Codex sandbox" in answer.stderr


def test_a_daemon_that_does_not_answer_is_exit_code_1(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runstate_cli import look

    monkeypatch.setattr(look, "ANSWER_S", 0.2)
    state_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(state_dir / "runstated.sock"))
        deaf.listen()
        answer = run()
    assert answer.exit_code == 1
    assert answer.stderr == "runstate: runstated did not answer within 0.2 s\n"


def test_the_version_and_the_help_do_not_need_a_daemon(state_dir: Path) -> None:
    answer = CliRunner().invoke(runstate_cli.cli, ["--version"])
    assert answer.output == f"runstate {runstate.__version__}\n"
    answer = CliRunner().invoke(runstate_cli.cli, ["--help"])
    assert answer.exit_code == 0
    for command in ("status", "demo"):
        assert command in answer.output

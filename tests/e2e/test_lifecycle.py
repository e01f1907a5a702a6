"""Clients and the life of the daemon: many start it at once, one stops it, somebody starts it again."""

from __future__ import annotations

import pytest

from tests.e2e.support import Daemon


def test_thirty_processes_start_at_once_and_there_is_one_daemon(no_daemon: Daemon) -> None:
    source = """
@runstate.once
def work():
    effect("worked")
    return os.getpid()
children = []
for _ in range(30):
    pid = os.fork()
    if pid == 0:
        say(name(work))
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""
    said = no_daemon.program(source).ends_well()
    assert len(said) == 30
    assert len(set(said)) == 1
    assert said[0].isdigit()
    assert no_daemon.effects() == ["worked"]
    assert no_daemon.read_log().count("starts in") == 1


WAITER = """
runstate.configure(timeout=sys.argv[1])
@runstate.once
def work():
    return "worked"
job = runstate.queue("q", attempts=5).send({"n": 1})
say("waits")
say(name(job.result))
"""


def test_a_stop_is_not_undone_by_a_waiting_client(daemon: Daemon) -> None:
    waiter = daemon.program(WAITER, "1s")
    waiter.expect("waits")
    daemon.waits(1)
    assert daemon.run("stop").returncode == 0
    waiter.expect("UnavailableError UNAVAILABLE")
    assert daemon.holder() is None
    assert "run `runstated start`" in daemon.program("runstate.run_id()").errors_at_the_end()


def test_a_client_goes_on_when_the_daemon_is_started_again_within_its_timeout(daemon: Daemon) -> None:
    waiter = daemon.program(WAITER, "60s")
    waiter.expect("waits")
    daemon.waits(1)
    assert daemon.run("stop").returncode == 0
    assert daemon.run("start").returncode == 0
    daemon.waits(1)
    worker = daemon.program("@runstate.queue('q')\ndef handle(input): return 'handled'\nrunstate.serve()")
    waiter.expect("'handled'")
    worker.send_signal(15)
    assert worker.ends_well() == []


@pytest.mark.parametrize(
    ("environ", "call", "says"),
    [
        (
            {"RUNSTATE_BASE_URL": "http://localhost:1"},
            "runstate.run_id()",
            "ConfigError the address 'http://localhost:1'",
        ),
        ({"RUNSTATE_BASE_URL": "unix:///nowhere/x.sock"}, "runstate.run_id()", "UnavailableError nothing listens on"),
        ({"RUNSTATE_BASE_URL": "unix://"}, "runstate.run_id()", "ConfigError"),
        ({"RUNSTATE_BASE_URL": "unix://relative/x"}, "runstate.run_id()", "ConfigError"),
        ({"RUNSTATE_BASE_URL": "tcp://localhost:1"}, "runstate.run_id()", "ConfigError over TCP a key is needed"),
        (
            {"RUNSTATE_BASE_URL": "tcp://localhost:1", "RUNSTATE_API_KEY": "k"},
            "runstate.run_id()",
            "UnavailableError cannot connect to tcp://localhost:1",
        ),
        ({"RUNSTATE_BASE_URL": "tcp://nohost", "RUNSTATE_API_KEY": "k"}, "runstate.run_id()", "ConfigError"),
        ({"RUNSTATE_RUN": "x" * 257}, "runstate.run_id()", "ConfigError"),
        ({"RUNSTATE_SPACE_ID": "x" * 257}, "runstate.run_id()", "ConfigError"),
        ({"RUNSTATE_BASE_URL": "  ", "RUNSTATE_RUN": " "}, "say(runstate.run_id() and 'joined')", "joined"),
        ({}, "runstate.configure(timeout='soon'); runstate.run_id()", "ConfigError"),
        ({}, "runstate.configure(retries=-1); runstate.run_id()", "ConfigError"),
        ({}, "runstate.configure(retries=True); runstate.run_id()", "ConfigError"),
        ({}, "runstate.configure(worker=7); runstate.run_id()", "ConfigError"),
        ({}, "runstate.configure(worker='w' * 1000); runstate.run_id()", "ConfigError"),
        ({}, "runstate.configure(apiKey='k')", "ConfigError configure has no option 'apiKey'"),
        ({}, "runstate.run('')", "ConfigError"),
        ({}, "runstate.run('x', deadline='1h30m').run_id()", "ConfigError"),
        ({}, "runstate.once(lambda: 1)", "ConfigError"),
        ({}, "runstate.once(lease='-1s')(print)", "ConfigError"),
        ({}, "runstate.queue('q', slots=7)", "ConfigError"),
        ({}, "runstate.serve()", "ConfigError there is no queue"),
        ({"RUNSTATE_AUTOSTART": "0"}, "runstate.run_id()", "UnavailableError runstated is not running"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_clear_error(
    no_daemon: Daemon, environ: dict[str, str], call: str, says: str
) -> None:
    source = f"""
try:
    {call}
except runstate.RunstateError as error:
    say(type(error).__name__, error)
"""
    said = no_daemon.program(source, **environ).ends_well()
    assert len(said) == 1
    assert said[0].startswith(says), said

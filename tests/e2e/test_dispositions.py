"""Signals that the parent ignores or has blocked: `nohup`, `&` in a script, agents that block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import dispositions
from tests.daemons import PATIENCE_S
from tests.e2e.support import Daemon

DISPOSITIONS = """
import signal
ours = {signal.SIGINT: signal.default_int_handler}  # what Python itself makes of the default
print([number for number in range(1, 32) if signal.getsignal(number) != ours.get(number, signal.SIG_DFL)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def make_deaf() -> None:
    for number in dispositions.INHERITED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, dispositions.INHERITED)


def test_programs_that_a_test_starts_hear_every_signal() -> None:
    before = {number: signal.getsignal(number) for number in dispositions.INHERITED}
    try:
        make_deaf()
        dispositions.reset()
        os.kill(os.getpid(), signal.SIGTERM)  # the test run itself goes on
        said = subprocess.check_output([sys.executable, "-S", "-c", DISPOSITIONS], text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ignored_by_python = [int(signal.SIGPIPE), int(signal.SIGXFSZ)]
    assert said.splitlines() == [str(ignored_by_python), "set()"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_in_the_background_ends_at_signals_that_who_started_it_is_deaf_to(
    no_daemon: Daemon, number: signal.Signals
) -> None:
    command = no_daemon.command("start")
    subprocess.run(command, env=no_daemon.environ, preexec_fn=make_deaf, capture_output=True, check=True)
    os.kill(no_daemon.pid, number)
    no_daemon.wait_until_gone()
    assert no_daemon.read_log().rstrip().endswith("stopped")


def test_a_daemon_in_the_foreground_of_a_deaf_parent_goes_on_at_sigint_and_ends_at_sigterm(no_daemon: Daemon) -> None:
    command = no_daemon.command("start", "--foreground")
    log = no_daemon.directory / "daemon.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=no_daemon.environ, preexec_fn=make_deaf, stderr=file)
    no_daemon.process = process
    no_daemon.wait_until_listening()
    process.send_signal(signal.SIGINT)
    no_daemon.knock().socket.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0, no_daemon.output
    assert no_daemon.output.rstrip().endswith("stopped")


def test_a_worker_that_ignores_sigint_goes_on_until_sigterm(shared: Daemon) -> None:
    worker = shared.program(
        """
signal.signal(signal.SIGINT, signal.SIG_IGN)
runstate.queue("q", lambda input: input * 2)
runstate.serve()
say(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
"""
    )
    shared.waits(1)
    worker.send_signal(signal.SIGINT)
    sender = shared.program("say(runstate.queue('q')(21))")
    assert sender.ends_well() == ["42"]
    worker.send_signal(signal.SIGTERM)
    assert worker.ends_well() == ["True"]

"""What has thrown in the middle of a change is not tried again, in this life or the next."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runstate
from runstate import presence
from runstated.engine.faultlog import KEPT_MS, MANY, MANY_MS, NAME, FaultLog
from runstated.engine.faults import EXIT_SOFTWARE, Fault
from tests.daemons import PATIENCE_S

NOW_MS = 1_700_000_000_000
FAULT = Fault("limits.take 1234abcd", ValueError("ours"))
STEP = Fault("step lapse of 7", ValueError("ours"))

# A daemon of which two steps are wrong: they throw when they have changed something.
FAULTY = """
import sys
from runstate import wire
from runstated.domain import nouns, sessions
take, lapse = nouns.VERBS[wire.LimitsTake], sessions.lapse

def bad_take(core, request):
    answer = take(core, request)
    if request.limit.startswith("bad"):
        raise RuntimeError("injected")
    return answer

def bad_lapse(core, lease):
    lapse(core, lease)
    raise RuntimeError("injected")

nouns.VERBS = {**nouns.VERBS, wire.LimitsTake: bad_take}
sessions.lapse = bad_lapse
from runstated.main import main
sys.argv[1:] = ["start", "--foreground", "--state-dir", sys.argv[1]]
main()
"""


def test_a_fault_is_known_for_an_hour_and_a_step_is_told(tmp_path: Path) -> None:
    FaultLog(tmp_path, NOW_MS).record(FAULT, NOW_MS)
    FaultLog(tmp_path, NOW_MS).record(STEP, NOW_MS)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"at_ms": 17')
    known = FaultLog(tmp_path, NOW_MS + KEPT_MS - 1)
    assert set(known.doings) == {FAULT.doing, STEP.doing}
    assert known.told == "skipped after a fault of the daemon's own: step lapse of 7 (ValueError: ours); see its log"
    later = FaultLog(tmp_path, NOW_MS + KEPT_MS)
    assert (later.doings, later.told) == ({}, None)


@pytest.mark.parametrize("each_ms", [MANY_MS // MANY, MANY_MS])
def test_the_third_fault_within_a_minute_leaves_the_mark_that_nobody_starts_it(tmp_path: Path, each_ms: int) -> None:
    marker = tmp_path / "runstated.stopped"
    for number in range(MANY):
        assert not presence.is_marked_stopped(marker)
        now_ms = NOW_MS + number * each_ms
        FaultLog(tmp_path, now_ms).record(FAULT, now_ms)
    assert presence.is_marked_stopped(marker) is (each_ms < MANY_MS // 2)
    if each_ms < MANY_MS // 2:
        assert "three times within a minute" in presence.why_stopped(marker)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def start(state: Path) -> subprocess.Popen[bytes]:
    daemon = subprocess.Popen([sys.executable, "-c", FAULTY, str(state)], stderr=subprocess.DEVNULL)
    ends_s = time.monotonic() + PATIENCE_S
    while not answers(state / "runstated.sock"):
        assert time.monotonic() < ends_s
        assert daemon.poll() is None
        time.sleep(0.02)
    return daemon


def client(state: Path, monkeypatch: pytest.MonkeyPatch) -> runstate.Runstate:
    monkeypatch.setenv("RUNSTATED_STATE_DIR", str(state))
    monkeypatch.setenv("RUNSTATE_AUTOSTART", "0")
    return runstate.Runstate(retries=0, timeout="2s")


def take(rs: runstate.Runstate, name: str) -> None:
    @rs.limit(name, max=5, per="minute")
    def work() -> None: ...

    work()


def test_a_request_that_fails_in_the_middle_ends_the_daemon_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "s"
    daemon = start(state)
    try:
        rs = client(state, monkeypatch)
        take(rs, "good")
        with pytest.raises(runstate.UnavailableError):
            take(rs, "bad")
        assert daemon.wait(PATIENCE_S) == EXIT_SOFTWARE
        daemon = start(state)
        with pytest.raises(runstate.RunstateError, match="failed at this request before"):
            take(rs, "bad")
        take(rs, "good")
        assert daemon.poll() is None, "it has not run it"
    finally:
        daemon.kill()
        daemon.wait()

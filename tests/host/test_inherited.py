"""What the daemon gives up of the script that happened to come first."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from runstated.host import inherited

RESET = """
import os, resource
from runstated.host import inherited
remains = inherited.reset()
print(os.getpriority(os.PRIO_PROCESS, 0), inherited._reset_oom_score(), resource.getrlimit(resource.RLIMIT_FSIZE)[0])
print("; ".join(remains))
"""


def burden() -> None:
    os.nice(5)
    inherited.OOM_SCORE.write_text("300")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000_000, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (60, hard))


@pytest.mark.skipif(not inherited.OOM_SCORE.exists(), reason="looks into /proc")
def test_what_may_be_reset_is_reset_and_the_rest_is_said() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", RESET], preexec_fn=burden, capture_output=True, text=True, check=True
    )
    numbers, remains = answer.stdout.splitlines()
    nice, score, size = map(int, numbers.split())
    assert size == resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    assert (nice == 0) is ("nice" not in remains)
    assert (score == 0) is ("OOM" not in remains)
    if os.geteuid() == 0 and size == resource.RLIM_INFINITY:
        assert (nice, score, remains) == (0, 0, "")


def test_a_limit_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inherited.os, "setpriority", lambda *_: None)
    monkeypatch.setattr(inherited.os, "getpriority", lambda *_: 19)
    monkeypatch.setattr(inherited, "_schedule", lambda: None)
    monkeypatch.setattr(inherited, "_reset_oom_score", lambda: 700)
    monkeypatch.setattr(inherited.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(
        inherited.resource, "getrlimit", lambda limit: (60, 60) if limit == resource.RLIMIT_CPU else (-1, -1)
    )
    assert inherited.reset() == ("nice 19", "OOM score 700", "CPU time limited to 60 s")

"""Fixtures for all tests: a daemon without sockets, its clock, and a Tx."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import dispositions
from tests.clock import ManualClock
from tests.harness import Harness

# Every commit of a daemon waits for the disk. In memory it is the same commit without the wait, as no test cuts the
# power. The room is for many runs: it is used when a run fails, whose files are kept.
IN_MEMORY = Path("/dev/shm")
ROOM_BYTES = 1 << 30
if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# A failing example prints the line that repeats it; a slow machine is no failure.
settings.register_profile("runstate", print_blob=True, deadline=None)
settings.load_profile("runstate")


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Only where tests run, so not in the process that distributes them: it stays as deaf as it was started."""
    dispositions.reset()


@pytest.fixture(scope="session", autouse=True)
def bytecode_for_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Who wants no bytecode in the source tree still has hundreds of programs started by tests: compiled once, in the
    temporary directory of this run, they take half the time."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        directory = tmp_path_factory.getbasetemp()
        is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
        os.environ["PYTHONPYCACHEPREFIX"] = str((directory.parent if is_one_of_many else directory) / "bytecode")


@pytest.fixture
def h() -> Iterator[Harness]:
    """A daemon without sockets. What must always be true is checked at the end of each test."""
    harness = Harness()
    yield harness
    if not harness.connection.in_transaction:
        harness.check()
    harness.close()


@pytest.fixture
def clock(h: Harness) -> ManualClock:
    return h.clock

"""Fixtures for all tests: a daemon without sockets, its clock, and a Tx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from runstated.store.tx import Tx
from tests import dispositions
from tests.clock import ManualClock
from tests.harness import Harness

# A failing example prints the line that repeats it; a slow machine is no failure.
settings.register_profile("runstate", print_blob=True, deadline=None)
settings.load_profile("runstate")


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Only where tests run, so not in the process that distributes them: it stays as deaf as it was started."""
    dispositions.reset()


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


@pytest.fixture
def tx(h: Harness) -> Tx:
    return h.tx()

"""One real daemon for the tests of a module; each test has a space of its own in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.e2e.support import Daemon, running

_spaces = itertools.count(1)


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as place:
        yield place


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    shared_daemon.fresh(f"space-{next(_spaces)}")
    yield shared_daemon
    shared_daemon.end_programs()

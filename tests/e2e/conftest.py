"""Real daemons: one for each test, or one for a module whose tests leave it alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import Daemon

_spaces = itertools.count(1)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that runs, with a state of its own."""
    place = Daemon(tmp_path)
    try:
        place.start()
        yield place
    finally:
        place.close()


@pytest.fixture
def no_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A place where none runs yet."""
    place = Daemon(tmp_path)
    try:
        yield place
    finally:
        place.close()


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    place = Daemon(tmp_path_factory.mktemp("daemon"))
    try:
        place.start()
        yield place
    finally:
        place.close()


@pytest.fixture
def shared(module_daemon: Daemon) -> Iterator[Daemon]:
    """A space of its own in a daemon that the tests of a module share."""
    module_daemon.fresh(f"space-{next(_spaces)}")
    yield module_daemon
    module_daemon.end_programs()

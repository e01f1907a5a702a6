"""Real daemons: one for each test, or one for a module whose tests leave it alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runstate
from tests.e2e.support import Daemon, running

_spaces = itertools.count(1)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that runs, with a state of its own."""
    with running(tmp_path) as place:
        yield place


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
    with running(tmp_path_factory.mktemp("daemon")) as place:
        yield place


@pytest.fixture
def shared(module_daemon: Daemon) -> Iterator[Daemon]:
    """A space of its own in a daemon that the tests of a module share."""
    module_daemon.fresh(f"space-{next(_spaces)}")
    yield module_daemon
    module_daemon.end_programs()


@pytest.fixture
def make(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., runstate.Runstate]]:
    """Makes clients of this process, each with a session of its own, all in one space that is new."""
    for name in [name for name in os.environ if name.startswith("RUNSTATE_")]:
        monkeypatch.delenv(name)
    made: list[runstate.Runstate] = []
    space = f"space-{next(_spaces)}"

    def client(**options: Any) -> runstate.Runstate:
        given = {"base_url": f"unix://{shared.socket}", "space_id": space, **options}
        made.append(runstate.Runstate(**given))
        return made[-1]

    yield client
    for each in made:
        each._core.configure({})  # ends its session


@pytest.fixture
def rs(make: Callable[..., runstate.Runstate]) -> runstate.Runstate:
    """A client of this process."""
    return make()

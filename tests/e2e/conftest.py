"""A real daemon for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import Daemon


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

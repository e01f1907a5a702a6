"""Room that is kept on the disk, so that a daemon can be restarted on one that is full: SQLite makes an index and a log
before anything can be read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from runstated.settings import RESERVE_BYTES


@contextlib.contextmanager
def lent(path: Path) -> Iterator[None]:
    """The room may be used meanwhile. Afterwards as much is kept again as there is."""
    path.unlink(missing_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _keep(path)


def _keep(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        left = RESERVE_BYTES
        while left > 0:
            left -= os.write(descriptor, bytes(min(left, 16 * 1024)))
    finally:
        os.close(descriptor)

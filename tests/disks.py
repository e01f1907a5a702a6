"""Small file systems, for tests of full disks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of its own, such as "6m"; skips the test where none can be mounted."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill_up(path: Path) -> None:
    """Takes all the room that is left."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4_096):
            pass

"""All sessions of this process: what a fork, and the end of the interpreter, means for each."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Session(Protocol):
    """What is kept here, for as long as somebody else keeps it."""

    def after_fork(self) -> None: ...

    def close(self) -> None: ...


everywhere: weakref.WeakSet[Session] = weakref.WeakSet()


def _forked() -> None:
    for session in list(everywhere):
        session.after_fork()


def _exit() -> None:
    for session in list(everywhere):
        session.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(_exit)

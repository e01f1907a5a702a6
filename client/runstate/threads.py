"""Starting a thread where there may be none to be had."""

from __future__ import annotations

import threading

SHUTDOWN = "the interpreter is shutting down"
LIMIT = (
    "this process cannot start another thread (`ulimit -u`, `pids.max` of its container, memory), and without one"
    " nothing can be held or waited for here: raise the limit"
)


def start(thread: threading.Thread) -> str:
    """Starts it. Otherwise why not: SHUTDOWN or LIMIT."""
    try:
        thread.start()
    except RuntimeError as error:
        return SHUTDOWN if "shutdown" in str(error) else LIMIT
    return ""

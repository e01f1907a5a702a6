"""What a process inherits and the daemon of all must not keep from the script that happened to come first.

A daemon in the foreground keeps it: there it is the order of a service manager.
"""

import contextlib
import os
import resource
from pathlib import Path

OOM_SCORE = Path("/proc/self/oom_score_adj")
LIMITS = {
    "CPU": ("CPU time", "s"),
    "FSIZE": ("file size", "bytes"),
    "AS": ("address space", "bytes"),
    "DATA": ("data segment", "bytes"),
    "RSS": ("resident memory", "bytes"),
    "MEMLOCK": ("", ""),  # raised, and not worth a word
    "NPROC": ("", ""),
}


def reset() -> tuple[str, ...]:
    """Goes back to what a new login has, as far as that is allowed; what remains, for people to read."""
    _schedule()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    remains = [f"nice {nice}"] if nice > 0 else []
    score = _reset_oom_score()
    if score > 0:
        remains.append(f"OOM score {score}")
    for name, (words, unit) in LIMITS.items():
        limit = _raise(getattr(resource, f"RLIMIT_{name}", None))
        if words and limit != resource.RLIM_INFINITY:
            remains.append(f"{words} limited to {limit} {unit}")
    return tuple(remains)


def _schedule() -> None:
    """All processors, and the usual share of them."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _reset_oom_score() -> int:
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("0")
    try:
        return int(OOM_SCORE.read_text())
    except (OSError, ValueError):
        return 0  # not Linux


def _raise(limit: int | None) -> int:
    """The soft limit, raised to what is allowed: without any for root, else to the hard limit."""
    if limit is None:
        return resource.RLIM_INFINITY
    _, hard = resource.getrlimit(limit)
    for wanted in ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (hard, hard)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, wanted)
            break
    return resource.getrlimit(limit)[0]

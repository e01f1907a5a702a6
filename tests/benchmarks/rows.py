"""The rows of the table: what each is, its unit, its target and its stretch, and who measures it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import peers
import speed
from figures import (
    Figures,
    Goal,
    above_floor,
    against_before,
    at_least,
    at_least_of,
    at_least_of_floor,
    at_most_of,
)
from processes import HERE

KEPT = HERE / "kept"


@dataclass(frozen=True)
class Row:
    """``name``: for --row. ``unit``: of all its figures. ``fsyncs``: what of ours is on disk before the answer."""

    name: str
    what: str
    unit: str
    target: Goal | None
    stretch: Goal | None
    measure: Callable[[speed.Bench], dict[str, Figures]]
    fsyncs: str = ""


def kept(name: str) -> dict[str, Figures]:
    """What ``--keep NAME`` wrote; nothing where there is no such file."""
    path = KEPT / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {row: Figures(**figures) for row, figures in rows.items()}


PYTHON_PEERS = tuple(peer.name for peer in peers.QUEUES if peer.is_python)
KEEPING_PEERS = tuple(peer.name for peer in peers.QUEUES if peer.is_python and peer.keeps != "no")

GRANT = "relaxed: the grant is written, not synced"
RESULT = "the result"
NOTHING = "nothing to sync"

ROWS = (
    Row(
        "once-fresh", "fresh once, 8 processes", "/s",
        at_least_of_floor(0.085), at_least_of_floor(0.12), speed.once_fresh, RESULT,
    ),
    Row(
        "once-done-1", "once done, asked from the daemon, 1 process", "/s",
        at_least_of_floor(0.55), at_least_of_floor(0.65), speed.once_done, NOTHING,
    ),
    Row(
        "once-done-8", "once done, asked from the daemon, 8 processes", "/s",
        at_least_of_floor(0.33), at_least_of_floor(0.40), speed.once_done, NOTHING,
    ),
    Row(
        "once-known", "once done, known to the process, 8 processes", "/s",
        at_least_of_floor(1.5), at_least_of_floor(3), speed.once_known, NOTHING,
    ),
    Row(
        "slots", "slots(1) enter and leave, 4 processes", "/s",
        at_least_of(1.3, "SET NX + DEL"), at_least_of(1, "redis-py Lock"), speed.slots, GRANT,
    ),
    Row(
        "jobs-async", "jobs, 2 workers, async, concurrency 16", "/s",
        at_least_of(1.2, *PYTHON_PEERS), at_least_of(2, *PYTHON_PEERS), speed.jobs, RESULT,
    ),
    Row(
        "jobs-plain", "jobs, 2 workers, plain, concurrency 1", "/s",
        at_least_of(0.9, *KEEPING_PEERS), at_least_of(1.2, *KEEPING_PEERS), speed.jobs, RESULT,
    ),
    Row(
        "jobs-ahead", "the same with jobs taken ahead", "/s",
        at_least_of(1.5, *KEEPING_PEERS), at_least_of(2, *KEEPING_PEERS), speed.jobs, RESULT,
    ),
    Row(
        "job-trip", "job round trip p50", "ms",
        at_most_of(1.25, "beanstalkd, fsync"), at_most_of(1, "huey on Redis"), speed.jobs, RESULT,
    ),
    Row("slot-hand-over", "slot hand-over p50", "ms", at_most_of(1, "BLPOP"), None, speed.hand_overs, GRANT),
    Row("once-waiter", "once waiter p50", "ms", above_floor(0.5, "ms"), None, speed.waiters, RESULT),
    Row("job-waiter", "job waiter p50", "ms", above_floor(0.5, "ms"), None, speed.waiters, RESULT),
    Row(
        "send", "send in a loop", "/s",
        against_before(2, lambda: kept("before").get("send")), None, speed.sends, "the job",
    ),
    Row("send-many", "send_many of 1,000", "/s", at_least(15_000, "/s"), None, speed.sends, "the jobs"),
)  # fmt: skip

"""The rows of the table: what each is, its unit, its target and its stretch, and who measures it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import growth
import peer_servers as peers
import speed
import upkeep
from figures import (
    Figures,
    Goal,
    above_floor,
    against_before,
    at_least,
    at_least_of,
    at_least_of_floor,
    at_most,
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
WITHIN = at_least(0.8, "of an empty database")

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
    Row("death", "kill -9 of a holder to the next start, worst", "ms", at_most(100, "ms"), None, upkeep.deaths),
    Row("idle", "idle: wake-ups in 30 s", "", at_most(2), None, upkeep.idle),
    Row("rss-idle", "idle: resident memory", "MB", at_most(60, "MB"), None, upkeep.idle),
    Row("start", "`runstated start` to ready", "ms", at_most(400, "ms"), None, upkeep.starts),
    Row("status", "`runstate status`", "ms", at_most(250, "ms"), None, upkeep.starts),
    Row("import", "`import runstate`, above a bare Python", "ms", at_most(80, "ms"), None, upkeep.starts),
    Row("leases", "1,000 clients with a lease of 30 s each, of a core", "%", at_most(1, "%"), None, upkeep.leases),
    Row("growth-finished", "rates with 10^6 finished jobs", "x", WITHIN, None, growth.finished),
    Row("rss-finished", "resident memory with 10^6 finished jobs", "MB", at_most(60, "MB"), None, growth.finished),
    Row("growth-waiting", "rates with 10^5 waiting jobs", "x", WITHIN, None, growth.waiting),
    Row("rss-waiting", "resident memory with 10^5 waiting jobs", "MB", at_most(160, "MB"), None, growth.waiting),
    Row("start-waiting", "start with 10^5 waiting jobs", "ms", at_most(800, "ms"), None, growth.waiting),
    Row("growth-ended-runs", "rates with 10^5 ended runs", "x", WITHIN, None, growth.ended_runs),
    Row("growth-limits", "rates with 10^4 limits", "x", WITHIN, None, growth.limits),
    Row("growth-child-runs", "rates with 10^4 child runs", "x", WITHIN, None, growth.child_runs),
)  # fmt: skip

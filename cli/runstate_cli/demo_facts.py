"""What the demo measured, and whether it is what was promised. Pure.

Every number comes from what the worker processes reported and from what the demo's own client got; nothing is assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORKERS = 10
JOBS = 40
LONG_JOB = 0
# Takeover after a death must not be takeover after a time-out: this is the shortest lease there is.
TAKEOVER_MS_MAX = 5_000.0


@dataclass(frozen=True)
class Event:
    """One line of a worker. ``at``: seconds of CLOCK_MONOTONIC."""

    name: str
    at: float
    pid: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """A process that the demo killed, and when."""

    pid: int
    at: float


@dataclass(frozen=True)
class Facts:
    """The numbers."""

    workers: int
    once_calls: int
    once_starts: int
    once_ends: int
    once_results: int  # callers that got a result, the demo itself at the end among them
    once_distinct: int  # how many different results they got
    once_by_the_second: bool  # it is the result of the process that took over
    once_takeover_ms: float | None
    jobs_sent: int
    jobs_done: int
    jobs_handled: int  # deliveries that ran to the end
    jobs_redelivered: int
    long_job_attempt: int | None
    long_job_moved: bool  # its second delivery was another process's
    job_takeover_ms: float | None
    workers_left: int
    exit_codes: tuple[int, ...]


def gather(
    events: Sequence[Event],
    *,
    once_kill: Kill,
    job_kill: Kill,
    own_result: Any,
    results: Sequence[dict[str, int]],
    exit_codes: Sequence[int],
) -> Facts:
    """The numbers, from what was seen. ``own_result``: what the demo's own call of the `once` function got;
    ``results``: those of the jobs it sent; ``exit_codes``: of all workers, -9 for those that were killed."""
    named = Counter(event.name for event in events)
    starts = [event for event in events if event.name == "once.started" and event.pid != once_kill.pid]
    answers = [event.data["result"] for event in events if event.name == "once.returned"] + [own_result]
    deliveries = [event for event in events if event.name == "job.started"]
    again = [event for event in deliveries if event.data["attempt"] > 1]
    moved = [event for event in again if event.data["number"] == LONG_JOB and event.pid != job_kill.pid]
    by_number = {result["number"]: result for result in results}
    return Facts(
        workers=named["ready"],
        once_calls=named["once.called"],
        once_starts=named["once.started"],
        once_ends=named["once.ended"],
        once_results=len(answers),
        once_distinct=len({str(answer) for answer in answers}),
        once_by_the_second=bool(starts) and all(answer["by"] == starts[0].pid for answer in answers),
        once_takeover_ms=_ms(once_kill, starts),
        jobs_sent=JOBS,
        jobs_done=len(by_number),
        jobs_handled=named["job.ended"],
        jobs_redelivered=len(again),
        long_job_attempt=by_number[LONG_JOB]["attempt"] if LONG_JOB in by_number else None,
        long_job_moved=bool(moved),
        job_takeover_ms=_ms(job_kill, moved),
        workers_left=named["left"],
        exit_codes=tuple(sorted(exit_codes)),
    )


def _ms(kill: Kill, started: Sequence[Event]) -> float | None:
    return (started[0].at - kill.at) * 1000 if started else None


def wrong(facts: Facts) -> list[str]:
    """Each number that is not what was promised, as a sentence; empty when all is well."""
    left = WORKERS - 2
    expected: tuple[tuple[str, Any, Any], ...] = (
        ("worker processes that came up", facts.workers, WORKERS),
        ("calls of the once function by workers", facts.once_calls, WORKERS),
        ("starts of the once function (its holder was killed once)", facts.once_starts, 2),
        ("times the once function ran to the end", facts.once_ends, 1),
        ("callers that got the once result", facts.once_results, WORKERS - 1 + 1),
        ("different results that they got", facts.once_distinct, 1),
        ("the result is the one of the process that took over", facts.once_by_the_second, True),
        ("jobs that were done", facts.jobs_done, facts.jobs_sent),
        ("times a job ran to the end", facts.jobs_handled, facts.jobs_sent),
        ("jobs that were delivered again", facts.jobs_redelivered, 1),
        ("attempt that finished the killed worker's job", facts.long_job_attempt, 2),
        ("another process finished the killed worker's job", facts.long_job_moved, True),
        ("workers that left by themselves when the run was stopped", facts.workers_left, left),
        ("exit codes of the workers", facts.exit_codes, (*[-9] * 2, *[0] * left)),
    )
    sentences = [f"{what}: {found}, should be {right}" for what, found, right in expected if found != right]
    for what, took_ms in (("once", facts.once_takeover_ms), ("job", facts.job_takeover_ms)):
        if took_ms is None or not 0 <= took_ms < TAKEOVER_MS_MAX:
            found = "none" if took_ms is None else f"{took_ms:.1f} ms"
            sentences.append(f"takeover of the {what}: {found}, should be under {TAKEOVER_MS_MAX:g} ms")
    return sentences


def rows(facts: Facts) -> list[tuple[str, str, str]]:
    """The numbers for people: what, how much, what is right."""
    return [
        ("worker processes", str(facts.workers), str(WORKERS)),
        ("once: times the function was started", str(facts.once_starts), "2"),
        ("once: times it ran to the end", str(facts.once_ends), "1"),
        ("once: callers that got the result", str(facts.once_results), str(WORKERS)),
        ("once: different results recorded", str(facts.once_distinct), "1"),
        ("once: kill -9 to the next holder's start", _shown(facts.once_takeover_ms), f"< {TAKEOVER_MS_MAX:g} ms"),
        ("queue: jobs done", f"{facts.jobs_done} of {facts.jobs_sent}", f"{facts.jobs_sent} of {facts.jobs_sent}"),
        ("queue: times a job ran to the end", str(facts.jobs_handled), str(facts.jobs_sent)),
        ("queue: attempt that finished the killed job", str(facts.long_job_attempt), "2"),
        ("queue: kill -9 to the job's next start", _shown(facts.job_takeover_ms), f"< {TAKEOVER_MS_MAX:g} ms"),
        ("stop: workers that left by themselves", str(facts.workers_left), str(WORKERS - 2)),
    ]


def _shown(milliseconds: float | None) -> str:
    return "never" if milliseconds is None else f"{milliseconds:.1f} ms"

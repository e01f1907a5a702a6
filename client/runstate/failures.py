"""What a worker says of trouble: to its own log, with the traceback, and to the daemon, for those who wait.

Through ``logging``; where that is not configured, Python writes warnings and errors to stderr.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import payloads, tracebacks, wire

if TYPE_CHECKING:
    from .queues import Queue

log = logging.getLogger(__name__)


def of_job(queue: Queue, job: wire.JobGrant, error: BaseException, *, retry: bool = True) -> wire.QueuesFail:
    """Logs what ended an attempt and gives what to record of it. ``retry`` false: no other attempt can do better."""
    told = tracebacks.text(error)
    trace = tracebacks.of_user(error.__traceback__)
    log.error(
        "queue %s: attempt %d of job %s (%s) failed%s",
        queue.name,
        job.attempt,
        job.job,
        job.key,
        "" if told else f" with {type(error).__name__}, whose traceback cannot be written",
        exc_info=(type(error), error, trace) if told else None,
    )
    return wire.QueuesFail(job=job.job, token=job.token, error=payloads.error_text(error), traceback=told, retry=retry)


def took_over(what: str, key: str) -> None:
    """The work was begun by a holder that died or fell silent."""
    log.warning("%s: taking over %s, whose last holder died or fell silent", what, key)


def not_taken(queue: Queue, job: wire.JobGrant, error: Exception) -> None:
    """The outcome of a job was refused."""
    log.warning("queue %s: the outcome of job %s (%s) is not taken: %s", queue.name, job.job, job.key, error)

"""Recording what came of a job: a worker offers it until it is taken, and takes no other job in its place meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import errors, failures, wire
from .steps import Deliver

if TYPE_CHECKING:
    from .holds import Hold
    from .outcomes import Outcomes
    from .serving import Source

log = logging.getLogger(__name__)


async def record(source: Source, job: wire.JobGrant, hold: Hold, outcome: wire.Request[wire.JobView]) -> None:
    """Returns when the outcome is taken, or its hold is lost: then somebody else has the job, and the result is
    dropped. The place, which is free already, is taken again while that lasts.

    What is refused for good fails the job, which counts; if that is refused, too, its lease lapses, which counts."""
    import asyncio

    assert hold.session is not None, "a session holds it"
    outcomes = hold.session.outcomes
    loop = asyncio.get_running_loop()
    is_late = False

    def late() -> None:
        nonlocal is_late
        is_late = True
        loop.call_soon_threadsafe(source.take_place)

    try:
        await outcomes.adeliver(Deliver(outcome, hold, late=late), for_ever=True)
    except (errors.LeaseLostError, errors.StoppedError) as error:
        failures.not_taken(source.queue, job, error)
        await _account(outcomes, job, outcome)
    except errors.RunstateError as error:
        failures.not_taken(source.queue, job, error)
        if error.code == "NOT_FOUND":
            return  # the job has gone with its run
        try:
            await outcomes.adeliver(Deliver(failures.of_job(source.queue, job, error), hold), for_ever=True)
        except errors.RunstateError:
            hold.settle()
    finally:
        if is_late:
            source.give_place()


async def _account(outcomes: Outcomes, job: wire.JobGrant, outcome: wire.Request[wire.JobView]) -> None:
    """The job is lost, but not what it has cost: its reservations were charged whole when the lease lapsed."""
    for reservation in job.reservations:
        said: wire.Request[wire.BudgetSettled] = wire.BudgetsRelease(reservation=reservation)
        if isinstance(outcome, wire.QueuesComplete):
            cost = outcome.costs.get(reservation)
            if cost is None:
                continue
            said = wire.BudgetsSettle(reservation=reservation, cost_minor=cost, work_key=f"job:{job.token}")
        try:
            await outcomes.adeliver(Deliver(said, None), for_ever=True)
        except errors.RunstateError as error:
            log.error("job %s: its cost was refused: %s", job.job, error)

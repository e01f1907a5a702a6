"""Groups: what `gather` submits. One request makes a child run of its own with all the jobs in it.

    submit --> open, its jobs end one by one --the caller has what it needs, or is gone--> ended, the rest cancelled

A group is a run, so ending it cancels what is left, and a worker of any run above takes its jobs. The same input in
two groups is different work. Results are handed out in the order in which the jobs end.
"""

from __future__ import annotations

from runstate import wire
from runstated.domain import ahead, jobs, needs, payloads, queues, runs
from runstated.domain.answers import Listing, Parked
from runstated.domain.core import Core
from runstated.domain.jobs import JOBS, Job
from runstated.domain.waits import Topic

TOLD_IN_ONE_REPLY = 100  # results of the largest size nearly fill a frame


def line(run: str) -> Topic:
    """Where the caller of a group stands."""
    return queues.group_line(run)


def submit(core: Core, request: wire.GroupsSubmit) -> wire.GroupView:
    """Creates the group's run and its jobs. A group ends with the session that made it."""
    parent = runs.active(core, request.run)
    for member in request.members:
        payloads.check("input", member.input)
    queue = queues.plan_declare(core, request.queue, request.attempts)
    wanted = needs.plan(core, request.needs, request.queue)
    queues.do_declare(core, queue)
    run = runs.create_group(core, parent, owned=request.owned)
    inputs = queues.unique(request.members)  # without any they come later, with `queues.send`
    sent = queues.do_send(core, run, queue.queue, inputs, wanted) if inputs else {}
    return wire.GroupView(run=run.run, jobs=tuple(sent[member.key].job for member in request.members))


def ended(core: Core, request: wire.GroupsEnded) -> wire.GroupEnded | Parked | Listing:
    """The next jobs that have ended since the cursor, in that order; waits for one more if there are none."""
    run = runs.active(core, request.run)
    if jobs.last_finish(core, run.run) <= request.after:
        for job in jobs.reserved_in(core, run.run) if request.within else ():
            ahead.ask_back_one(core, job)  # the caller may be what its holder does before
        late = wire.GroupEnded(cursor=request.after)
        return Parked(lines=(line(request.run),), signals=(runs.signal(request.run),), late=late)
    just_ended = jobs.ended_after(core, run.run, request.after)
    if just_ended is not None:
        return _told(just_ended[:TOLD_IN_ONE_REPLY])
    return Listing(
        JOBS,
        _told,
        equals={"run": run.run},
        between={"finish": (request.after + 1, wire.NUMBER_MAX)},
        order="finish",
        many=TOLD_IN_ONE_REPLY,
    )


def _told(ended: list[Job]) -> wire.GroupEnded:
    return wire.GroupEnded(jobs=tuple(jobs.view(job) for job in ended), cursor=ended[-1].finish or 0)

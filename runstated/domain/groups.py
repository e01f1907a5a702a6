"""Groups: what `gather` submits. One request makes a child run of its own with all the jobs in it.

    submit --> open, its jobs end one by one --the caller has what it needs, or is gone--> ended, the rest cancelled

A group is a run, so ending it cancels what is left, and a worker of any run above takes its jobs. The same input in
two groups is different work. Results are handed out in the order in which the jobs end.
"""

from runstate import wire
from runstated.domain import jobs, queues, runs
from runstated.store.tx import Parked, Tx
from runstated.waits import Topic

MEMBERS_MAX = 100


def line(run: str) -> Topic:
    """Where the caller of a group stands."""
    return queues.group_line(run)


def submit(tx: Tx, request: wire.GroupsSubmit) -> wire.GroupView:
    """Creates the group's run and its jobs. A group ends with the session that made it."""
    run = runs.create_group(tx, runs.active(tx, request.run), owned=request.owned)
    if not request.members:  # they come one by one, with `queues.send`
        queues.declare(tx, wire.QueuesDeclare(queue=request.queue, attempts=request.attempts))
    jobs = []
    for member in request.members:
        sent = queues.send(
            tx,
            wire.QueuesSend(
                run=run.run,
                queue=request.queue,
                key=member.key,
                input=member.input,
                attempts=request.attempts,
                needs=request.needs,
            ),
        )
        jobs.append(sent.job)
    return wire.GroupView(run=run.run, jobs=tuple(jobs))


def ended(tx: Tx, request: wire.GroupsEnded) -> wire.GroupEnded | Parked:
    """The jobs that have ended since the cursor, in that order; waits for one more if there are none."""
    runs.active(tx, request.run)
    views = jobs.ended_since(tx, request.run, request.after)
    if not views:
        late = wire.GroupEnded(cursor=request.after)
        return Parked(lines=(line(request.run),), signals=(runs.signal(request.run),), late=late)
    return wire.GroupEnded(jobs=tuple(view for _, view in views), cursor=views[-1][0])

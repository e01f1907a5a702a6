"""Barriers: `together`. So many different workers arrive, then all go on; who comes later goes on at once.

    open --the arrival that makes the number--> released (until the run ends)

Workers are counted by their label, so a process that restarts under the same label counts once. Who gives up waiting
stays counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import runs
from runstated.domain.answers import Conflict, NotFound, Parked
from runstated.domain.core import Core
from runstated.domain.runs import Run
from runstated.domain.tables import UNSTORED, Live, Table
from runstated.domain.waits import Topic


@dataclass(slots=True, eq=False)
class Barrier:
    """A barrier. ``arrivals``: how many workers have arrived."""

    run: str
    name: str
    target: int
    released: int = 0
    arrivals: int = 0
    workers: set[str] = field(default_factory=set, metadata=UNSTORED)  # while it is open


@dataclass(slots=True, eq=False)
class Arrival:
    """A worker that has arrived. ``released``: as its barrier."""

    run: str
    name: str
    worker: str
    released: int = 0


BARRIERS = Table("barriers", Barrier, key=("run", "name"), live=Live("released", (0,)), run="run")
ARRIVALS = Table("arrivals", Arrival, key=("run", "name", "worker"), live=Live("released", (0,)), run="run")


def signal(run: str, name: str) -> Topic:
    return ("barrier", run, name)


def arrive(core: Core, request: wire.BarriersArrive) -> wire.BarrierView | Parked:
    """Counts the worker and waits for the others. Raises Conflict when another number was named before."""
    run = runs.active(core, request.run)
    barrier = _plan(core, run, request.name, request.count)
    if barrier.released:
        if _is_new(core, barrier, request.worker):
            _count(core, barrier, request.worker, released=1)
        return _view(barrier)
    if request.worker not in barrier.workers:
        barrier.workers.add(request.worker)
        _count(core, barrier, request.worker, released=0)
    if barrier.arrivals < barrier.target:
        signals = (signal(run.run, barrier.name), runs.signal(run.run))
        return Parked(lines=(), signals=signals, late=_view(barrier))
    _release(core, run, barrier)
    return _view(barrier)


def declare(core: Core, request: wire.BarriersDeclare) -> wire.BarrierView:
    """Creates or verifies a barrier. Raises Conflict when another number was named before."""
    run = runs.active(core, request.run)
    barrier = _plan(core, run, request.name, request.count)
    if not barrier.released and (run.run, request.name) not in core.live(BARRIERS):
        core.put(BARRIERS, barrier)
    return _view(barrier)


def look(core: Core, request: wire.BarriersGet) -> wire.BarrierView:
    """How a barrier stands; one that has opened stays open for who looks after the end of its run."""
    run = runs.get(core, request.run)
    barrier = _find(core, run, request.name)
    over = runs.refusal(run, core.now_ms)
    if over is not None and (barrier is None or not barrier.released):
        raise over
    if barrier is None:
        raise NotFound(f"together {request.name} not found")
    return _view(barrier)


def load(core: Core) -> None:
    """After the objects were loaded: who has arrived."""
    for arrival in core.live(ARRIVALS).values():
        core.live(BARRIERS)[arrival.run, arrival.name].workers.add(arrival.worker)


def _find(core: Core, run: Run, name: str) -> Barrier | None:
    """The barrier, if there is one. Raises Missing."""
    barrier = core.live(BARRIERS).get((run.run, name))
    return barrier if barrier is not None or not run.has_rows else core.find(BARRIERS, (run.run, name))


def _plan(core: Core, run: Run, name: str, count: int) -> Barrier:
    """The barrier, perhaps a new one. Raises Conflict and Missing."""
    barrier = _find(core, run, name) or Barrier(run.run, name, count)
    if barrier.target != count:
        raise Conflict(f"together {name} waits for {barrier.target} workers, this call for {count}")
    return barrier


def _is_new(core: Core, barrier: Barrier, worker: str) -> bool:
    """Whether a worker comes to a released barrier for the first time. Raises Missing."""
    return core.find(ARRIVALS, (barrier.run, barrier.name, worker)) is None


def _count(core: Core, barrier: Barrier, worker: str, *, released: int) -> None:
    barrier.arrivals += 1
    core.put(BARRIERS, barrier)
    core.put(ARRIVALS, Arrival(barrier.run, barrier.name, worker, released))


def _release(core: Core, run: Run, barrier: Barrier) -> None:
    """All go on."""
    barrier.released = 1
    core.put(BARRIERS, barrier)
    for worker in barrier.workers:
        arrival = core.live(ARRIVALS)[run.run, barrier.name, worker]
        arrival.released = 1
        core.put(ARRIVALS, arrival)
    core.answer(signal(run.run, barrier.name), _view(barrier))
    data = {"scopeId": run.run, "name": barrier.name, "target": barrier.target}
    core.emit("barrier.released", run.run, run.path, data)


def _view(barrier: Barrier) -> wire.BarrierView:
    return wire.BarrierView(released=bool(barrier.released), target=barrier.target, arrivals=barrier.arrivals)

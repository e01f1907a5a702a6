"""Barriers: `together`. So many different workers arrive, then all go on; who comes later goes on at once.

    open --the arrival that makes the number--> released (until the run ends)

Workers are counted by their label, so a process that restarts under the same label counts once. Who gives up waiting
stays counted.
"""

from runstate import wire
from runstated.domain import runs
from runstated.store.tx import Conflict, NotFound, Parked, Tx
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE barriers (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    target BIGINT NOT NULL CHECK (target > 0),
    released INTEGER NOT NULL DEFAULT 0 CHECK (released IN (0, 1)),
    PRIMARY KEY (run, name)
);
CREATE TABLE arrivals (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    worker TEXT NOT NULL,
    PRIMARY KEY (run, name, worker)
);
"""


def signal(run: str, name: str) -> Topic:
    return ("barrier", run, name)


def arrive(tx: Tx, request: wire.BarriersArrive) -> wire.BarrierView | Parked:
    """Counts the worker and waits for the others. Raises Conflict when another number was named before."""
    run, name = request.run, request.name
    runs.active(tx, run)
    target, released = _ensure(tx, run, name, request.count)
    tx.run(
        "INSERT INTO arrivals (run, name, worker) VALUES (:run, :name, :worker) ON CONFLICT DO NOTHING",
        run=run,
        name=name,
        worker=request.worker,
    )
    view = _view(tx, run, name, target, released)
    if released:
        return view
    if view.arrivals < target:
        return Parked(lines=(), signals=(signal(run, name), runs.signal(run)), late=view)
    tx.run("UPDATE barriers SET released = 1 WHERE run = :run AND name = :name", run=run, name=name)
    view = wire.BarrierView(released=True, target=target, arrivals=view.arrivals)
    tx.answer(signal(run, name), view)
    tx.emit("barrier.released", run, {"scopeId": run, "name": name, "target": target})
    return view


def declare(tx: Tx, request: wire.BarriersDeclare) -> wire.BarrierView:
    """Creates or verifies a barrier. Raises Conflict when another number was named before."""
    runs.active(tx, request.run)
    target, released = _ensure(tx, request.run, request.name, request.count)
    return _view(tx, request.run, request.name, target, released)


def look(tx: Tx, request: wire.BarriersGet) -> wire.BarrierView:
    """How a barrier stands; one that has opened stays open for who looks after the end of its run."""
    run = runs.get(tx, request.run)
    row = tx.one(
        "SELECT target, released FROM barriers WHERE run = :run AND name = :name", run=request.run, name=request.name
    )
    over = runs.refusal(run, tx.now_ms)
    if over is not None and (row is None or not row[1]):
        raise over
    if row is None:
        raise NotFound(f"together {request.name} not found")
    return _view(tx, request.run, request.name, *row)


def tidy(tx: Tx, run: str, many: int) -> int:
    """Removes barriers of an ended run; how many rows went."""
    gone = tx.run(
        "DELETE FROM arrivals WHERE run = :run AND worker IN"
        " (SELECT worker FROM arrivals WHERE run = :run ORDER BY worker LIMIT :many)",
        run=run,
        many=many,
    )
    return gone or tx.run("DELETE FROM barriers WHERE run = :run", run=run)


def _ensure(tx: Tx, run: str, name: str, count: int) -> tuple[int, int]:
    """The barrier's target, and whether it is released. Raises Conflict."""
    tx.run(
        "INSERT INTO barriers (run, name, target) VALUES (:run, :name, :target) ON CONFLICT (run, name) DO NOTHING",
        run=run,
        name=name,
        target=count,
    )
    row = tx.one("SELECT target, released FROM barriers WHERE run = :run AND name = :name", run=run, name=name)
    assert row is not None, "written above"
    target, released = row
    if target != count:
        raise Conflict(f"together {name} waits for {target} workers, this call for {count}")
    return target, released


def _view(tx: Tx, run: str, name: str, target: int, released: int) -> wire.BarrierView:
    arrived = tx.one("SELECT count(*) FROM arrivals WHERE run = :run AND name = :name", run=run, name=name)
    return wire.BarrierView(released=bool(released), target=target, arrivals=arrived[0] if arrived else 0)

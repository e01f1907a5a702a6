"""Timers: `sleep` by name. The first call with a name in a run fixes when it fires; a fired one lets everybody pass.

    (nothing) --sleep--> pending --its time--> fired (until the run ends)

Times are wall time: a laptop that was suspended past the moment wakes its sleepers on resume.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import runs
from runstated.domain.answers import Conflict, Parked, ValidationFailed
from runstated.domain.core import Core
from runstated.domain.runs import RUNS, Run
from runstated.domain.tables import Live, Table
from runstated.domain.waits import Topic

FIRED_IN_ONE_STEP = 500
STALE_MAX = 64  # entries of the heap whose timer is gone with its run, beside those that are pending


@dataclass(slots=True, eq=False)
class Timer:
    """A timer. ``acked``: 1 when somebody has gone on after it fired."""

    run: str
    name: str
    fire_ms: int
    fired: int = 0
    acked: int = 0


TIMERS = Table("timers", Timer, key=("run", "name"), live=Live("fired", (0,)), run="run")


@dataclass(slots=True)
class Timers:
    """Those that have not fired, by their time."""

    due: list[tuple[int, str, str]] = field(default_factory=list)  # heap of (time, run, name)


def signal(run: str, name: str) -> Topic:
    return ("timer", run, name)


def sleep(core: Core, request: wire.TimersSleep) -> wire.TimerView | Parked:
    """Waits until the timer of that name fires. Later calls ignore their own duration."""
    run = runs.active(core, request.run)
    timer = _find(core, run, request.name)
    if timer is None:
        timer = Timer(run.run, request.name, _fire_ms(core, request))
        core.put(TIMERS, timer)
        _queue(core, timer)
    if not timer.fired and timer.fire_ms <= core.now_ms:
        _fire(core, run, timer)  # also one that is due and that `tick` has not come to yet
    view = _view(timer)
    if timer.fired:
        return view
    core.due(timer.fire_ms)
    return Parked(lines=(), signals=(signal(run.run, timer.name), runs.signal(run.run)), late=view)


def ack(core: Core, request: wire.TimersAck) -> wire.TimerView:
    """Somebody has gone on after it fired; the first says so, the others get Conflict."""
    timer = _find(core, runs.get(core, request.run), request.name)
    if timer is None or not timer.fired or timer.acked:
        raise Conflict(f"sleep {request.name} has not ended, or somebody has said so before")
    timer.acked = 1
    core.put(TIMERS, timer)
    return _view(timer)


def tick(core: Core) -> int | None:
    """Fires what is due; when to look again."""
    due = core.index(Timers).due
    for _ in range(FIRED_IN_ONE_STEP):
        if not due or due[0][0] > core.now_ms:
            break
        _, run, name = heapq.heappop(due)
        timer = core.live(TIMERS).get((run, name))
        found = core.live(RUNS).get(run)
        if timer is not None and not timer.fired and found is not None:
            _fire(core, found, timer)
    while due and due[0][1:] not in core.live(TIMERS):
        heapq.heappop(due)
    return due[0][0] if due else None


def load(core: Core) -> None:
    """After the objects were loaded: when they fire."""
    for timer in core.live(TIMERS).values():
        _queue(core, timer)


def _queue(core: Core, timer: Timer) -> None:
    """It is to fire at its time. The entries of those whose run has ended go when they come up, or are too many."""
    timers = core.index(Timers)
    heapq.heappush(timers.due, (timer.fire_ms, timer.run, timer.name))
    if len(timers.due) > 2 * len(core.live(TIMERS)) + STALE_MAX:
        timers.due = [entry for entry in timers.due if entry[1:] in core.live(TIMERS)]
        heapq.heapify(timers.due)


def _find(core: Core, run: Run, name: str) -> Timer | None:
    """The timer, if there is one. Raises Missing."""
    timer = core.live(TIMERS).get((run.run, name))
    return timer if timer is not None or not run.has_rows else core.find(TIMERS, (run.run, name))


def _fire(core: Core, run: Run, timer: Timer) -> None:
    """Everybody passes from now on. In a run that is over nobody does, and nothing happens any more."""
    timer.fired = 1
    core.put(TIMERS, timer)
    if runs.refusal(run, core.now_ms) is None:
        core.answer(signal(run.run, timer.name), wire.TimerView(fired=True, fire_ms=timer.fire_ms))
        core.emit("timer.fired", run.run, run.path, {"scopeId": run.run, "name": timer.name})


def _fire_ms(core: Core, request: wire.TimersSleep) -> int:
    if (request.after_ms is None) == (request.at_ms is None):
        raise ValidationFailed("a timer needs either after_ms or at_ms")
    return core.now_ms + request.after_ms if request.after_ms is not None else int(request.at_ms or 0)


def _view(timer: Timer) -> wire.TimerView:
    return wire.TimerView(fired=bool(timer.fired), fire_ms=timer.fire_ms, acked=bool(timer.acked))

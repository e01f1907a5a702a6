"""What is over leaves memory when that is on disk: finished keys and jobs, runs in which nothing is held."""

from __future__ import annotations

from typing import Any

from runstated.domain import runs
from runstated.domain.core import Core
from runstated.domain.runs import RUNS
from runstated.domain.tables import Table

CLEARED_IN_ONE_STEP = 500  # objects of ended runs that leave memory after one turn


def evict(core: Core) -> None:
    """All that was noted is on disk."""
    for table, thing in core.leaving:
        if not table.is_live(thing) and core.live(table).get(table.key_of(thing)) is thing:
            _leave(core, table, thing)
    core.leaving.clear()
    for run in core.emptied:
        runs.leave_memory(core, run)
    core.emptied.clear()
    works, core.durable = core.durable, []
    for work in works:
        work()
    clear_ended(core, CLEARED_IN_ONE_STEP)


def clear_ended(core: Core, many: int) -> None:
    """The objects of runs that have ended leave memory, at most so many at a time: on disk they stay as they are."""
    while core.clearing and many > 0:
        run = core.clearing[-1]
        things = core.things_of_run(run, many)
        for table, thing in things:
            core.drop(table, thing)
        many -= len(things) + 1
        if many > 0:
            core.clearing.pop()
            runs.leave_memory(core, run)
            _has_rows(core, run)


def _leave(core: Core, table: Table[Any], thing: Any) -> None:
    if table is RUNS:
        runs.leave_memory(core, thing.run)
        return
    core.drop(table, thing)
    if table.run is not None:
        _has_rows(core, getattr(thing, table.run))


def _has_rows(core: Core, run: str) -> None:
    """Some of the run's things are on disk only."""
    found = core.live(RUNS).get(run)
    if found is not None:
        found.has_rows = True

"""Spaces: each is an engine's world of its own (a ``Core``). What they share: the numbers, and who is in which one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runstated.domain import keys, nouns
from runstated.domain.core import Core
from runstated.domain.holds import LEASES
from runstated.domain.numbers import Numbers
from runstated.domain.runs import RUNS
from runstated.domain.sessions import SESSIONS
from runstated.domain.tables import Table
from runstated.domain.waits import Opening
from runstated.store.batch import Batch
from runstated.store.database import Database


class Spaces:
    """See the module. ``space_of``: of each session that is open, or was in the daemon's last life."""

    def __init__(self, numbers: Numbers, began: Opening) -> None:
        self.numbers = numbers
        self.began = began
        self.cores: dict[str, Core] = {}
        self.space_of: dict[str, str] = {}

    def of(self, space: str) -> Core:
        """The space, empty if nobody has used it."""
        core = self.cores.get(space)
        if core is None:
            core = self.cores[space] = Core(space, self.numbers, self.began)
        return core

    def of_session(self, session: str) -> Core | None:
        """The space that a session is in; None if it has ended."""
        space = self.space_of.get(session)
        return None if space is None else self.of(space)

    def __iter__(self) -> Iterator[Core]:
        return iter(list(self.cores.values()))

    # ------------------------------------------------------------------ what a turn has changed

    def take_batch(self) -> Batch:
        """What was noted and is not written yet."""
        noted = [core for core in self.cores.values() if core.notes]
        if len(noted) == 1:
            rows, noted[0].notes = noted[0].notes, {}
        else:
            rows = {}
            for core in noted:
                for table, changes in core.notes.items():
                    rows.setdefault(table, {}).update(changes)
                core.notes = {}
        numbers = {name: self.numbers.last[name] for name in self.numbers.changed}
        self.numbers.changed.clear()
        return Batch(rows, numbers)

    # ------------------------------------------------------------------ at the start

    def load(self, database: Database) -> None:
        """Fills the spaces with what is live on disk. Every lease gets its full length."""
        self.numbers.last = database.numbers()
        self.numbers.oldest_event = database.oldest_event()
        self._load_tables(database)
        for core in self:
            for lease in core.live(LEASES).values():
                core.holds.add(lease, self.began.lease_ms)
                self._load_run(database, core, lease.run)
            for load in nouns.LOADS:
                load(core)
            for session in core.live(SESSIONS).values():
                core.lines.open(session.session, away=True)
                self.space_of[session.session] = core.space
            core.noted = 0
            core.due(core.now_ms)  # the nouns' ticks say when they want to be called

    def _load_tables(self, database: Database) -> None:
        """What belongs to a run that is over stays on disk."""
        of_run: dict[str, Core] = {}
        for table in nouns.TABLES:
            if table.appended:
                continue
            if table.run is not None and not of_run:
                of_run = {run: core for core in self for run in core.live(RUNS)}
            for row in database.load(table):
                thing = table.made(row)
                core = of_run.get(getattr(thing, table.run)) if table.run is not None else self._space_of(table, thing)
                if core is not None:
                    core.keep(table, thing)

    def _space_of(self, table: Table[Any], thing: Any) -> Core:
        return self.of(keys.SPACE if table is keys.KEYS else thing.space)

    def _load_run(self, database: Database, core: Core, name: str) -> None:
        """A run that is over stays in memory, as do those above it, while something is held in it."""
        above: str | None = name
        while above is not None and above not in core.live(RUNS):
            row = database.read(RUNS, ("run",), above)
            if row is None:
                return
            run = RUNS.made(row)
            core.keep(RUNS, run)
            above = run.parent

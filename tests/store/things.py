"""Tables of no noun, for tests of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runstated.domain.tables import UNSTORED, Index, Live, Row, Table
from runstated.store.batch import Batch


@dataclass(slots=True, eq=False)
class Thing:
    """``state``: open, waiting or done."""

    id: int
    name: str
    state: str = "open"
    ended_ms: int | None = None
    looks: int = field(default=0, metadata=UNSTORED)


@dataclass(slots=True, eq=False)
class Note:
    thing: int
    name: str
    text: str | None = None


THINGS = Table(
    "things",
    Thing,
    key=("id",),
    live=Live("state", ("open", "waiting")),
    asked_by=(("name",),),
    indexes=(Index("things_ended", ("ended_ms",), not_null="ended_ms"),),
)
NOTES = Table("notes", Note, key=("thing", "name"), live=Live("text", (None,)))
TABLES: tuple[Table[Any], ...] = (THINGS, NOTES)


def batch(*things: Thing | Note, gone: tuple[Thing | Note, ...] = (), **numbers: int) -> Batch:
    """What a turn would note of these."""
    rows: dict[Table[Any], dict[Any, Row | None]] = {}
    for thing in (*things, *gone):
        table: Table[Any] = THINGS if isinstance(thing, Thing) else NOTES
        rows.setdefault(table, {})[table.key_of(thing)] = None if thing in gone else table.checked_row(thing)
    return Batch(rows, numbers)

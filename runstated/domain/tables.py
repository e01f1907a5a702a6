"""Tables: what of a noun's objects is kept, said as data. The store makes its SQL from this; no SQL is written here.

An object is a slotted dataclass. Its first fields are the columns, in order: ``int`` and ``str``, each perhaps
``None``. Fields with the metadata ``UNSTORED`` come after them; they live in memory only.

    TIMERS = Table("timers", Timer, key=("run", "name"), run="run", live=Live("fired", (0,)))

An object is *live* while its columns say so: a live one is in memory, and is loaded at the start. Any other is read
when somebody asks for it, by its key or by one of the unique keys in ``asked_by``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]
Value = int | str | None

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
UNSTORED = {"unstored": True}  # the metadata of a field that is no column
_TYPES = {
    "int": ("BIGINT", False),
    "int | None": ("BIGINT", True),
    "str": ("TEXT", False),
    "str | None": ("TEXT", True),
}


@dataclass(frozen=True, slots=True)
class Column:
    """``type``: BIGINT or TEXT."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class Live:
    """An object is live while this column has one of these values. ``indexed``: the live rows are found at the start by
    an index of their own, because those that are not live may be very many."""

    column: str
    values: tuple[Value, ...]
    indexed: bool = True


@dataclass(frozen=True, slots=True)
class Index:
    """An index for lists and tidying. ``where``: only the rows whose column has, or (``not_null``) has any, value."""

    name: str
    columns: tuple[str, ...]
    not_null: str | None = None
    unique: bool = False


class Table(Generic[T]):
    """See the module.

    ``key``: the columns of the primary key. ``live``: None where all are. ``run``: the column that names the run to
    which a row belongs; with it a row goes when its run is tidied. ``asked_by``: further unique keys by which a row
    that is not in memory may be asked for. ``appended``: rows are written and never loaded (events, ledger): an
    append table's objects are not kept.
    """

    def __init__(
        self,
        name: str,
        type: type[T],
        *,
        key: tuple[str, ...],
        live: Live | None = None,
        run: str | None = None,
        asked_by: tuple[tuple[str, ...], ...] = (),
        indexes: tuple[Index, ...] = (),
        appended: bool = False,
    ) -> None:
        self.name = name
        self.type = type
        self.key = key
        self.live = live
        self.run = run
        self.asked_by = asked_by
        self.indexes = indexes
        self.appended = appended
        fields: Any = dataclasses.fields(type)  # type: ignore[arg-type]
        self.columns = tuple(
            Column(field.name, *_TYPES[field.type]) for field in fields if not field.metadata.get("unstored")
        )
        names = tuple(column.name for column in self.columns)
        self.row_of: Callable[[T], Row] = attrgetter(*names)
        self.key_of: Callable[[T], Hashable] = attrgetter(*key)
        self._live_of = attrgetter(live.column) if live else None

    def __repr__(self) -> str:
        return f"Table({self.name})"

    def is_live(self, thing: T) -> bool:
        """Whether the object belongs in memory."""
        return self._live_of is None or self._live_of(thing) in self.live.values  # type: ignore[union-attr]

    def made(self, row: Row) -> T:
        """The object that a row is."""
        return self.type(*row)

    def checked_row(self, thing: T) -> Row:
        """The object's row. Raises ValueError for what no database can hold: a fault of ours, found before anything of
        the turn is written."""
        row = self.row_of(thing)
        for value in row:
            if isinstance(value, str):
                if not value.isascii():
                    value.encode()
            elif value is not None and not INT_MIN <= value <= INT_MAX:
                raise ValueError(f"{value} does not fit a column of {self.name}")
        return row

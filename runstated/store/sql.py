"""All SQL, made from the declarations of tables. SQLite's spelling: an integer key is the row's own place, and a table
with another key is kept in its key's order, which saves an index and with it a page to write in nearly every batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from runstated.domain.answers import Listing
from runstated.domain.tables import Index, Live, Table


@dataclass(frozen=True, slots=True)
class Statements:
    """What is done with one table. Parameters are positional."""

    put: str
    remove: str
    load: str


@cache
def of(table: Table[Any]) -> Statements:
    names = _names(table)
    where = "" if table.live is None else f" WHERE {_is_live(table.live)}"
    return Statements(
        put=f"INSERT OR REPLACE INTO {table.name} ({names}) VALUES ({', '.join('?' for _ in table.columns)})",
        remove=f"DELETE FROM {table.name} WHERE {_all_of(table.key)}",
        load=f"SELECT {names} FROM {table.name}{where} ORDER BY {', '.join(table.key)}",
    )


@cache
def read(table: Table[Any], columns: tuple[str, ...]) -> str:
    """One row by its key, or by another unique key."""
    return f"SELECT {_names(table)} FROM {table.name} WHERE {_all_of(columns)} LIMIT 1"


def create(table: Table[Any]) -> list[str]:
    """The table and its indexes."""
    is_number = len(table.key) == 1 and _type(table, table.key[0]) == "BIGINT"
    columns = [
        f"{column.name} INTEGER NOT NULL PRIMARY KEY"
        if is_number and column.name == table.key[0]
        else f"{column.name} {column.type}{'' if column.nullable else ' NOT NULL'}"
        for column in table.columns
    ]
    if is_number:
        made = f"CREATE TABLE {table.name} ({', '.join(columns)})"
    else:
        key = f"PRIMARY KEY ({', '.join(table.key)})"
        made = f"CREATE TABLE {table.name} ({', '.join([*columns, key])}) WITHOUT ROWID"
    indexes = [_create_index(table, index) for index in (*table.indexes, *_asked_by(table))]
    if table.live is not None and table.live.indexed:
        key = ", ".join(table.key)
        indexes.append(f"CREATE INDEX {table.name}_live ON {table.name} ({key}) WHERE {_is_live(table.live)}")
    return [made, *indexes]


def listing(asked: Listing) -> tuple[str, list[Any]]:
    """The statement of a listing, and its values."""
    terms = [f"{column} = ?" for column in asked.equals]
    values = list(asked.equals.values())
    for column, (low, high) in asked.between.items():
        terms.append(f"{column} >= ? AND {column} < ?")
        values += [low, high]
    if asked.examined:
        last = f"(SELECT max({asked.order}) FROM ({_first(asked)}))"
        low, high = asked.between[asked.order]
        bounds = [low, high, asked.examined]
        terms = [f"{asked.order} BETWEEN ? AND {last}", f"({' AND '.join(terms)} OR {asked.order} = {last})"]
        values = [low, *bounds, *values, *bounds]
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    order = f" ORDER BY {asked.order}{' DESC' if asked.newest else ''}" if asked.order else ""
    return f"SELECT {_names(asked.table)} FROM {asked.table.name}{where}{order} LIMIT ?", [*values, asked.many]


def _first(asked: Listing) -> str:
    """The values of ``order`` of the rows that are looked at. Values: the bounds, and how many."""
    by, name = asked.order, asked.table.name
    return f"SELECT {by} FROM {name} WHERE {by} >= ? AND {by} < ? ORDER BY {by} LIMIT ?"


def _asked_by(table: Table[Any]) -> list[Index]:
    return [Index(f"{table.name}_by_{'_'.join(columns)}", columns) for columns in table.asked_by]


def _create_index(table: Table[Any], index: Index) -> str:
    where = f" WHERE {index.not_null} IS NOT NULL" if index.not_null else ""
    return f"CREATE {'UNIQUE ' * index.unique}INDEX {index.name} ON {table.name} ({', '.join(index.columns)}){where}"


def _names(table: Table[Any]) -> str:
    return ", ".join(column.name for column in table.columns)


def _type(table: Table[Any], name: str) -> str:
    return next(column.type for column in table.columns if column.name == name)


def _all_of(columns: tuple[str, ...]) -> str:
    return " AND ".join(f"{column} = ?" for column in columns)


def _is_live(live: Live) -> str:
    """The condition, with its values in it: only so does SQLite see that an index is of these rows."""
    terms = [f"{live.column} IS NULL"] if None in live.values else []
    values = [_literal(value) for value in live.values if value is not None]
    if values:
        terms.append(f"{live.column} IN ({', '.join(values)})")
    return " OR ".join(terms)


def _literal(value: int | str) -> str:
    """A word of our own or a number."""
    assert isinstance(value, int) or value.isidentifier(), value
    return str(value) if isinstance(value, int) else f"'{value}'"

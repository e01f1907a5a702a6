"""No statement looks through a table: what holds up everybody must not grow with what is stored."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterator

import pytest

from runstated.domain import nouns
from runstated.store import schema, sql
from tests.faults.test_sqlite_faults import Faulty, story
from tests.harness import Connection

# Statements that look through a table on purpose, by their beginnings.
LOOKED_THROUGH = {
    "SELECT count(*) FROM sqlite_master": "the tables, at the start of the daemon",
    "SELECT counter, value FROM counters": "all numbers, at the start of the daemon",
    "SELECT count(*), coalesce(max(event), 0) FROM events": "how many are kept, at the start of the daemon",
    **{sql.of(table).load: "what is live, at the start of the daemon" for table in nouns.TABLES if not table.appended},
}


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    schema.migrate(connection)
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def executed() -> set[str]:
    """Every statement of a story with every verb, and of a start."""
    logging.disable(logging.CRITICAL)
    Connection.statements.clear()
    h = Faulty()
    story(h)
    h.start()
    h.close()
    logging.disable(logging.NOTSET)
    return {text for text in Connection.statements if text.startswith(("SELECT", "INSERT", "UPDATE", "DELETE"))}


def plan(connection: sqlite3.Connection, text: str) -> list[str]:
    parameters: dict[str, int] | list[int] = dict.fromkeys(re.findall(r":(\w+)", text), 0) or [0] * text.count("?")
    return [step for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]


def is_bounded(text: str, steps: list[str]) -> bool:
    """It finds its rows by an index, or stops after a few; nor does it sort more than it gives."""
    scans = [step for step in steps if step.startswith("SCAN ") or "AUTOMATIC" in step]
    is_sorted = any("TEMP B-TREE" in step for step in steps)
    return not is_sorted and (not scans or "LIMIT" in text or scans[0].startswith("SCAN (subquery"))


def test_no_statement_looks_through_a_table(connection: sqlite3.Connection, executed: set[str]) -> None:
    assert len(executed) > 40
    found = {text: steps for text in executed if not is_bounded(text, steps := plan(connection, text))}
    found.pop("SELECT min(event) FROM events", None)  # which SQLite calls a search
    unexpected = {text: steps for text, steps in found.items() if not text.startswith(tuple(LOOKED_THROUGH))}
    assert not unexpected
    unused = [text for text in LOOKED_THROUGH if not any(each.startswith(text) for each in executed)]
    assert not unused, "one that is not needed any more goes"


def test_rows_are_found_by_an_index_by_whatever_they_may_be_asked_by(connection: sqlite3.Connection) -> None:
    for table in nouns.TABLES:
        for columns in (table.key, *table.asked_by):
            assert is_bounded("", plan(connection, sql.read(table, columns))), (table, columns)
        assert is_bounded("", plan(connection, sql.of(table).remove)), table


def test_what_is_live_is_loaded_without_a_look_at_what_is_not_and_in_the_order_of_keys(
    connection: sqlite3.Connection,
) -> None:
    for table in nouns.TABLES:
        (step,) = plan(connection, sql.of(table).load)  # and none that sorts
        assert (f"USING INDEX {table.name}_live" in step) == (table.live is not None and table.live.indexed), step

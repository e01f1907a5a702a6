"""What a batch does to the file, and what is read of it afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from runstated.domain.answers import Listing
from runstated.store import schema, sql
from runstated.store.batch import Batch
from runstated.store.database import CommitFailed, Database
from tests.store.things import NOTES, TABLES, THINGS, Note, Thing, batch


@pytest.fixture
def db() -> Iterator[Database]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    schema.create(connection, TABLES)
    yield Database(connection)
    connection.close()


def names(db: Database) -> list[str]:
    return [name for (name,) in db.connection.execute("SELECT name FROM things ORDER BY id")]


def test_rows_are_new_replaced_and_go(db: Database) -> None:
    one, two = Thing(1, "one"), Thing(2, "two")
    db.commit(batch(one, two, Note(1, "a")))
    one.name = "1"
    db.commit(batch(one, gone=(two, Note(1, "a"))))
    assert names(db) == ["1"]
    assert db.read(NOTES, NOTES.key, (1, "a")) is None


def test_one_that_goes_makes_room_for_one_that_comes_in_the_same_batch(db: Database) -> None:
    db.commit(batch(Thing(1, "n")))
    db.commit(batch(Thing(2, "n"), gone=(Thing(1, "n"),)))
    assert db.read(THINGS, ("name",), "n") == (2, "n", "open", None)


def test_no_batch_is_empty_and_each_has_a_number_of_its_own(db: Database) -> None:
    changed = db.connection.total_changes
    for number in (1, 2, 3):
        db.commit(Batch())
        assert (db.batch, db.last_batch()) == (number, number)
        assert db.connection.total_changes > changed
        changed = db.connection.total_changes
    assert Database(db.connection).last_batch() == 3


def test_numbers_are_kept_and_those_of_the_store_are_not_among_them(db: Database) -> None:
    db.connection.execute("INSERT INTO counters VALUES ('instance:abcd', 5)")
    db.commit(batch(token=3, event=9))
    db.commit(batch(token=4))
    assert db.numbers() == {"token": 4, "event": 9}


def test_rows_are_read_by_key_and_by_what_they_may_be_asked_by(db: Database) -> None:
    db.commit(batch(Thing(7, "seven", "done", 5), Note(7, "é", "x")))
    assert db.read(THINGS, ("id",), 7) == db.read(THINGS, ("name",), "seven") == (7, "seven", "done", 5)
    assert db.read(NOTES, ("thing", "name"), (7, "é")) == (7, "é", "x")
    assert db.read(THINGS, ("id",), 8) is None


def test_loaded_is_what_is_live_in_the_order_of_keys(db: Database) -> None:
    things = [Thing(4, "d", "done", 1), Thing(3, "c", "waiting"), Thing(9, "i"), Thing(1, "a", "done", 2)]
    db.commit(batch(*things, Note(2, "b"), Note(1, "b"), Note(1, "a"), Note(0, "a", "over")))
    assert [row[0] for row in db.load(THINGS)] == [3, 9]
    assert list(db.load(NOTES)) == [(1, "a", None), (1, "b", None), (2, "b", None)]
    assert THINGS.made(next(db.load(THINGS))).name == "c"


def test_a_listing_bounds_orders_and_counts(db: Database) -> None:
    db.commit(batch(*(Thing(n, f"{n}", "done" if n % 2 else "open") for n in range(10))))
    asked = Listing(THINGS, lambda _: None, equals={"state": "done"}, between={"id": (2, 9)}, order="id", many=2)  # type: ignore[arg-type, return-value]
    assert [thing.id for thing in db.list(asked)] == [3, 5]


def test_indexes_are_used_and_none_forbids_anything(db: Database) -> None:
    for columns, index in ((("name",), "things_by_name"), (("id",), "PRIMARY KEY")):
        statement = sql.read(THINGS, columns)
        (plan,) = db.connection.execute(f"EXPLAIN QUERY PLAN {statement}", ("1",)).fetchall()
        assert index in plan[-1]
    assert [unique for _, _, unique, *_ in db.connection.execute("PRAGMA index_list(things)")] == [0, 0, 0]


@pytest.mark.parametrize("rows", [Batch({THINGS: {1: (1, None, "open", None)}}), Batch({THINGS: {1: (1, "x")}})])
def test_a_batch_that_cannot_be_written_leaves_nothing(db: Database, rows: Batch) -> None:
    db.commit(batch(Thing(1, "before")))
    both = Batch({NOTES: {(1, "a"): (1, "a", None)}, **rows.rows}, {"token": 1})
    with pytest.raises(CommitFailed) as failed:
        db.commit(both)
    assert failed.value.took_place is False
    assert (names(db), list(db.load(NOTES)), db.numbers(), db.batch) == (["before"], [], {}, 1)
    db.commit(batch(Thing(1, "after")))
    assert (names(db), db.last_batch()) == (["after"], 2)

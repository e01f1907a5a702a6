from __future__ import annotations

import pytest

from runstate import wire
from runstated.engine import retention
from tests.harness import Client, Harness


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def arrive(run: str, worker: str, count: int = 2, name: str = "b", **more: object) -> wire.BarriersArrive:
    return wire.BarriersArrive(run=run, name=name, count=count, worker=worker, **more)  # type: ignore[arg-type]


def test_all_go_on_when_the_last_one_arrives(h: Harness, a: Client, run: str) -> None:
    waits = [h.session(f"s{number}").waits(arrive(run, str(number), 3)) for number in range(2)]
    last = a.ask(arrive(run, "last", 3))
    assert last == wire.BarrierView(released=True, target=3, arrivals=3)
    assert [request.reply for request in waits] == [last, last]
    assert h.events(run).count("barrier.released") == 1


def test_one_who_waits_for_nobody_else_goes_on(a: Client, run: str) -> None:
    assert a.ask(arrive(run, "1", 1)).released


def test_a_label_counts_once(h: Harness, a: Client, run: str) -> None:
    one = a.waits(arrive(run, "same"))
    two = h.session("b").waits(arrive(run, "same"))
    a.ask(arrive(run, "other"))
    assert one.reply.released and two.reply.released


def test_latecomers_pass(h: Harness, a: Client, run: str) -> None:
    a.waits(arrive(run, "1"))
    a.ask(arrive(run, "2"))
    assert a.ask(arrive(run, "3")).released
    assert h.events(run).count("barrier.released") == 1


def test_another_number_is_a_conflict_also_for_latecomers(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(arrive(run, "1"))
    error = a.refused("CONFLICT", arrive(run, "2", 3))
    assert error.message == "together b waits for 2 workers, this call for 3"
    assert h.value("SELECT count(*) FROM arrivals") == 1, "who was refused is not counted"
    a.ask(arrive(run, "2"))
    assert waits.reply.released
    a.refused("CONFLICT", arrive(run, "3", 3))


def test_who_gives_up_stays_counted(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(arrive(run, "1", wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.BarrierView(released=False, target=2, arrivals=1)
    assert a.ask(arrive(run, "2")).released


@pytest.mark.parametrize("how", ["cancel", "die"])
def test_who_goes_stays_counted(h: Harness, a: Client, run: str, how: str) -> None:
    b = h.session("b")
    waits = b.waits(arrive(run, "1"))
    waits.cancel() if how == "cancel" else b.die()
    assert a.ask(arrive(run, "2")).released


def test_a_repeat_counts_once(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(arrive(run, "1"))
    h.start()
    a.resume()
    again = waits.repeat()
    assert again.reply is None
    a.ask(arrive(run, "2"))
    assert again.reply.arrivals == 2


def test_another_name_or_run_is_another_barrier(a: Client, run: str) -> None:
    a.waits(arrive(run, "1"))
    a.waits(arrive(run, "2", name="c"))
    a.waits(arrive(a.ask(wire.RunsChild(parent=run)).run, "2"))


def test_the_end_of_the_run_answers_who_waits(a: Client, run: str) -> None:
    waits = a.waits(arrive(run, "1"))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply.code == "SCOPE_CANCELLED"
    a.refused("SCOPE_CANCELLED", arrive(run, "2"))


def test_barriers_of_an_ended_run_are_tidied(h: Harness, a: Client, run: str) -> None:
    a.waits(arrive(run, "1"))
    a.ask(arrive(run, "2"))
    a.waits(arrive(run, "1", name="c"))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    h.pass_ms(retention.KEPT_MS - 1)
    assert len(h.rows("SELECT name FROM barriers")) == 2
    h.pass_ms(1)
    assert h.rows("SELECT name FROM barriers") == h.rows("SELECT worker FROM arrivals") == []


def test_declare_creates_a_barrier_without_arriving_and_get_looks_at_it(h: Harness, a: Client, run: str) -> None:
    get, declare = wire.BarriersGet(run=run, name="b"), wire.BarriersDeclare(run=run, name="b", count=2)
    assert "b not found" in a.refused("NOT_FOUND", get).message
    made = wire.BarrierView(released=False, target=2, arrivals=0)
    assert (a.ask(declare), a.ask(get), a.ask(declare)) == (made, made, made)
    waits = a.waits(arrive(run, "1"))
    assert a.ask(get) == a.ask(declare) == wire.BarrierView(released=False, target=2, arrivals=1)
    a.ask(arrive(run, "2"))
    assert a.ask(get) == a.ask(declare) == waits.reply == wire.BarrierView(released=True, target=2, arrivals=2)
    assert not h.core().lines.calls


def test_declare_with_another_number_is_a_conflict_either_way(a: Client, run: str) -> None:
    a.ask(wire.BarriersDeclare(run=run, name="b", count=2))
    a.refused("CONFLICT", wire.BarriersDeclare(run=run, name="b", count=3))
    a.refused("CONFLICT", arrive(run, "1", 3))
    assert a.ask(wire.BarriersGet(run=run, name="b")).arrivals == 0
    a.waits(arrive(run, "1", 3, "other"))
    a.refused("CONFLICT", wire.BarriersDeclare(run=run, name="other", count=2))


def test_barriers_of_a_run_that_is_over_are_neither_declared_nor_looked_at(a: Client, run: str) -> None:
    a.ask(wire.BarriersDeclare(run=run, name="b", count=2))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", wire.BarriersDeclare(run=run, name="b", count=2))
    a.refused("SCOPE_CANCELLED", wire.BarriersGet(run=run, name="b"))

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from runstate import wire
from runstated.domain import core, events, nouns
from runstated.domain.core import Core
from runstated.engine import retention
from tests.harness import Client, Harness


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def read(client: Client, run: str, after: int = 0, **more: object) -> wire.EventsPage:
    page = client.ask(wire.EventsRead(run=run, after=after, **more))  # type: ignore[arg-type]
    assert isinstance(page, wire.EventsPage)
    return page


def send(client: Client, run: str, key: str = "1") -> None:
    client.ask(wire.QueuesSend(run=run, queue="q", key=key, input="1", attempts=3))


def test_events_come_in_the_order_of_their_numbers_with_their_data(h: Harness, a: Client, run: str) -> None:
    h.pass_ms(1_000)
    send(a, run)
    page = read(a, run)
    assert [event.type for event in page.events] == ["scope.created", "task.submitted"]
    assert page.events[0].event < page.events[1].event == page.cursor
    assert page.events[1].at_ms == h.clock.wall_ms()
    assert page.events[1].data["queue"] == "q" and page.events[1].data["scopeId"] == run
    assert not page.more and not page.gap


def test_a_run_sees_what_is_below_it_and_nothing_beside_or_above(a: Client, run: str) -> None:
    below, beside = a.ask(wire.RunsChild(parent=run)).run, a.ask(wire.RunsChild(parent=run)).run
    other = a.ask(wire.RunsJoin(name="other")).run
    for where in (run, below, beside, other):
        send(a, where)
    assert [event.data["scopeId"] for event in read(a, run).events] == [run, below, beside, run, below, beside]
    assert [event.data["scopeId"] for event in read(a, below).events] == [below, below]
    assert len(read(a, other).events) == 2


def test_only_the_named_types_are_shown_and_the_cursor_moves_past_the_others(a: Client, run: str) -> None:
    for key in "123":
        send(a, run, key)
    page = read(a, run, types=("scope.created",))
    assert [event.type for event in page.events] == ["scope.created"]
    assert page.cursor == read(a, run).cursor
    assert read(a, run, types=("scope.created", "task.submitted")).events == read(a, run).events
    assert read(a, run, page.cursor, types=("scope.created",)).events == ()


def test_pages_go_on_from_their_cursor(a: Client, run: str) -> None:
    for number in range(7):
        send(a, run, str(number))
    seen: list[wire.Event] = []
    cursor, more = 0, True
    while more:
        page = read(a, run, cursor, limit=3)
        assert len(page.events) <= 3
        seen, cursor, more = [*seen, *page.events], page.cursor, page.more
    assert tuple(seen) == read(a, run).events
    assert read(a, run, cursor).cursor == cursor


def test_events_of_an_ended_run_can_be_read(a: Client, run: str) -> None:
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert [event.type for event in read(a, run).events] == ["scope.created", "scope.completed"]


def test_events_of_another_space_are_not_found(h: Harness, a: Client, run: str) -> None:
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", wire.EventsRead(run=run))
    other.refused("NOT_FOUND", wire.EventsWait(run=run))


def test_a_cursor_that_is_too_old_is_told_of_the_gap(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "EVENTS_KEPT", 5)
    monkeypatch.setattr(retention, "EVENTS_IN_ONE_STEP", 1)
    old = read(a, run).cursor
    for number in range(20):
        send(a, run, str(number))
    recent = read(a, run).cursor - 2
    h.pass_ms(1_000)
    page = read(a, run, old)
    assert page.gap
    assert 5 <= len(page.events) <= 7
    assert not read(a, run, recent).gap
    oldest = page.events[0].event
    assert [read(a, run, oldest + n).gap for n in (-2, -1, 0)] == [True, False, False]
    assert not read(a, run, 0).gap, "who begins has missed nothing that was promised"


# ------------------------------------------------------------------ wait


def test_a_wait_is_answered_in_the_batch_of_the_next_event(h: Harness, a: Client, run: str) -> None:
    b = h.session("b")
    cursor = read(a, run).cursor
    assert b.ask(wire.EventsWait(run=run, after=0)) == wire.Ok()
    waits = [b.waits(wire.EventsWait(run=run, after=cursor)) for _ in range(3)]
    send(a, run)
    assert [request.reply for request in waits] == [wire.Ok()] * 3
    assert len(read(a, run, cursor).events) == 1


def test_a_wait_hears_of_what_is_below_and_of_nothing_else(h: Harness, a: Client, run: str) -> None:
    below, beside = a.ask(wire.RunsChild(parent=run)).run, a.ask(wire.RunsChild(parent=run)).run
    other = a.ask(wire.RunsJoin(name="other")).run
    cursor = read(a, other).cursor
    top, low = (h.session(f"w {name}").waits(wire.EventsWait(run=name, after=cursor)) for name in (run, below))
    send(a, other)
    assert (top.reply, low.reply) == (None, None)
    send(a, beside)
    assert (top.reply, low.reply) == (wire.Ok(), None)
    send(a, below, "2")
    assert low.reply == wire.Ok()


def test_a_wait_hears_of_the_end_of_its_run_and_waits_on_after_it(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(wire.EventsWait(run=run, after=read(a, run).cursor))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply == wire.Ok()
    late = a.waits(wire.EventsWait(run=run, after=read(a, run).cursor, wait_ms=5_000))
    h.pass_ms(5_000)
    assert late.reply == wire.Ok()


@pytest.mark.parametrize("how", ["tick", "death"])
def test_a_wait_hears_of_what_the_daemon_does_by_itself(h: Harness, a: Client, run: str, how: str) -> None:
    b = h.session("b")
    b.ask(wire.OnceAcquire(run=run, key="k", lease_ms=5_000))
    waits = a.waits(wire.EventsWait(run=run, after=read(a, run).cursor))
    h.pass_ms(5_000) if how == "tick" else b.die()
    assert waits.reply == wire.Ok()
    assert read(a, run).events[-1].type == "lease.lost"


def test_events_without_listeners_look_for_no_line(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(wire.EventsWait(run=run, after=read(a, run).cursor))
    assert h.core().lines.listeners == 1
    waits.cancel()
    assert h.core().lines.listeners == 0


def test_a_page_of_a_quiet_run_looks_at_so_many_events_and_moves_on(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EXAMINED_MAX", 10)
    busy = a.ask(wire.RunsJoin(name="busy")).run
    cursor = read(a, run).cursor
    for number in range(24):
        send(a, busy, str(number))
    send(a, run)
    h.spaces.numbers.last["event"] += 1_000  # as after a power cut: numbers that were left out are no events
    send(a, run, "late")
    h.start()  # what was told before is on disk only
    a.resume()
    waits = a.submit(wire.EventsWait(run=run, after=cursor))
    assert waits.reply == wire.Ok(), "there is more than one page to look at: read on"
    pages = [read(a, run, cursor)]
    while pages[-1].more:
        pages.append(read(a, run, pages[-1].cursor))
    assert [[event.type for event in page.events] for page in pages] == [[], [], ["task.submitted"] * 2]
    assert [page.cursor - cursor for page in pages] == [10, 20, 1_026]
    a.waits(wire.EventsWait(run=run, after=pages[-1].cursor))


def test_a_wait_of_a_quiet_run_is_not_looked_at_for_the_events_of_others(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counted(core: Core, request: wire.EventsWait) -> Any:
        looks.append(request.run)
        return events.wait(core, request)

    monkeypatch.setitem(nouns.VERBS, wire.EventsWait, counted)  # type: ignore[arg-type]
    quiet, busy = (a.ask(wire.RunsChild(parent=run)).run for _ in range(2))
    waits = a.waits(wire.EventsWait(run=quiet, after=read(a, quiet).cursor))
    assert looks == [quiet]
    send(a, busy)
    assert looks == [quiet]
    send(a, quiet)
    assert waits.reply == wire.Ok() and looks == [quiet, quiet]


# ------------------------------------------------------------------ the ring


def everything(client: Client, run: str, after: int = 0, **more: object) -> list[wire.Event]:
    """All pages after a cursor."""
    seen: list[wire.Event] = []
    is_more = True
    while is_more:
        page = read(client, run, after, **more)
        seen += page.events
        after, is_more = page.cursor, page.more
    return seen


@pytest.mark.parametrize("restarted", [False, True])
def test_a_reader_sees_the_same_whether_events_are_in_memory_or_on_disk(
    h: Harness, a: Client, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    monkeypatch.setattr(core, "RING_MAX", 7)
    h.core().ring = deque(maxlen=7)
    run = a.ask(wire.RunsJoin(name="job")).run
    below, other = a.ask(wire.RunsChild(parent=run)).run, a.ask(wire.RunsJoin(name="other")).run
    for number in range(12):
        send(a, (run, other, below)[number % 3], str(number))
    if restarted:
        h.start()
        a.resume()
    last = h.value("SELECT max(event) FROM events")
    for which in (run, below, other):
        rows = h.rows("SELECT event FROM events WHERE path LIKE :path ORDER BY event", path=f"%/{which}/%")
        for after in range(last + 1):
            younger = [event for (event,) in rows if event > after]
            for limit in (1, 2, 500):
                assert [event.event for event in everything(a, which, after, limit=limit)] == younger
            waits = a.submit(wire.EventsWait(run=which, after=after))
            assert waits.reply == wire.Ok() or not younger, "who would miss something is told"
            waits.cancel()

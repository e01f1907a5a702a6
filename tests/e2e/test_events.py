"""`events` and `aevents`: a run's story from its beginning, live, until told to stop, over restarts."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import runstate
from runstate import RunEvent, Runstate, wire
from tests.e2e.inside import Make, serving
from tests.e2e.support import Daemon, eventually


def first(events: Iterator[RunEvent], count: int) -> list[RunEvent]:
    return [next(events) for _ in range(count)]


def test_history_comes_first_then_what_happens(rs: Runstate, make: Make) -> None:
    assert rs.once(lambda: 1, name="before")() == 1
    events = make().events()
    created, completed = first(events, 2)
    assert (created.type, created.data) == ("scope.created", {"scopeId": rs.run_id(), "name": "default"})
    assert completed.type == "once.completed" and completed.data["key"].startswith("before:")
    assert isinstance(created.id, str) and created.id != completed.id
    assert created.at.tzinfo is not None
    assert abs(datetime.now(timezone.utc) - created.at) < timedelta(minutes=1)
    threading.Timer(0.05, rs.once(lambda: 2, name="live")).start()
    assert next(events).data["key"].startswith("live:")


def test_types_choose(rs: Runstate) -> None:
    @rs.queue("review", attempts=1)
    def review(doc: int) -> int:
        if doc == 3:
            raise ValueError("bad doc 3")
        return doc

    with serving(rs):
        assert review.gather(range(5)) and review(9) == 9
    (failed,) = first(rs.events(types=["task.failed"]), 1)
    assert failed.data["reason"] == "handler_error: ValueError: bad doc 3"
    assert (failed.data["queue"], failed.data["attempts"]) == ("review", 1)
    both = first(rs.events(types=("scope.created", "task.submitted")), 7)
    assert [event.type for event in both].count("task.submitted") == 5, "those of the gather's own run, too"


@pytest.mark.parametrize("make_signal", [threading.Event, runstate.Signal], ids=["Event", "Signal"])
def test_a_signal_ends_it_between_and_during_polls(rs: Runstate, make_signal: Any) -> None:
    stop = make_signal()
    seen: list[str] = []
    began = threading.Event()

    def read() -> None:
        for event in rs.events(signal=stop):
            seen.append(event.type)
            began.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(60)
    eventually(lambda: any(wait.kind == "events" for wait in waits(rs)))
    ended = time.monotonic()
    stop.set() if isinstance(stop, threading.Event) else stop._set()
    thread.join(60)
    assert time.monotonic() - ended < 5
    assert seen == ["scope.created"]
    eventually(lambda: not any(wait.kind == "events" for wait in waits(rs)), "the daemon knows that nobody waits")
    assert list(rs.events(signal=stop)) == []


def waits(client: Runstate) -> tuple[wire.WaitView, ...]:
    view: wire.StatusView = client._connection().call(wire.StatusGet()).reply
    return view.waits


def test_in_coroutines_with_a_signal_a_break_and_a_cancel(rs: Runstate) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        seen = []
        async for event in rs.aevents(signal=stop):
            seen.append(event.type)
            asyncio.get_running_loop().call_later(0.05, stop.set)
        assert seen == ["scope.created"]
        async for event in rs.aevents(types=["scope.created"]):
            assert event.type == "scope.created"
            break

        async def listen() -> None:
            async for event in rs.aevents():
                seen.append(event.type)

        task = asyncio.ensure_future(listen())
        await asyncio.to_thread(eventually, lambda: any(wait.kind == "events" for wait in waits(rs)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["scope.created"] * 2

    asyncio.run(main())
    eventually(lambda: not any(wait.kind == "events" for wait in waits(rs)))


def test_a_generator_can_be_left_at_any_time(rs: Runstate) -> None:
    for event in rs.events():
        assert event.type == "scope.created"
        break
    events = rs.events()
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert list(events) == []


def test_it_reads_on_after_the_run_has_ended(rs: Runstate, make: Make) -> None:
    rs.run_id()
    rs.stop()
    created, ended = first(rs.events(), 2)
    assert (created.type, ended.type) == ("scope.created", "scope.cancelled")
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    assert [event.type for event in rs.events(signal=stop)] == ["scope.created", "scope.cancelled"]


def test_children_are_part_of_the_story_and_others_are_not(rs: Runstate) -> None:
    rs.run_id()
    child = rs.child("part")
    child.run_id()
    rs.run("other").run_id()
    child.finish()
    types = [(event.type, event.data["name"]) for event in first(rs.events(), 3)]
    assert types == [("scope.created", "default"), ("scope.created", "part"), ("scope.completed", "part")]
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    assert len(list(child.events(signal=stop))) == 2


def test_timers_barriers_and_overruns_are_told(rs: Runstate) -> None:
    rs.sleep("nap", "1s")
    rs.together("us", 1)
    rs.budget("b", lambda: 1, reserve=1, cost=lambda result: "3.00", limit=2)()
    kinds = ["timer.fired", "barrier.released", "budget.overrun"]
    found = {event.type: event.data for event in first(rs.events(types=kinds), 3)}
    assert set(found) == set(kinds)
    overrun = found["budget.overrun"]
    assert (overrun["budget"], overrun["amountMinor"], overrun["chargedMinor"], overrun["overrunMinor"]) == (
        "b",
        "300",
        "200",
        "100",
    )


READER = """
for event in runstate.events(types=["once.completed"]):
    say(event.data["key"].partition(":")[0])
"""


def test_it_goes_on_where_it_was_when_the_daemon_was_away(daemon: Daemon) -> None:
    reader = daemon.program(READER)
    client = Runstate(base_url=f"unix://{daemon.socket}")
    client.once(lambda: 1, name="first")()
    reader.expect("first")
    daemon.restart(kill=True)
    client.once(lambda: 1, name="second")()
    reader.expect("second")
    daemon.restart()
    client.once(lambda: 1, name="third")()
    reader.expect("third")
    client._core.configure({})


def test_many_events_come_in_pages_in_order(rs: Runstate) -> None:
    queue = rs.queue("many", attempts=1)
    sent = [queue.send(number).id for number in range(450)]
    found = first(rs.events(types=["task.submitted"]), 450)
    assert [event.data["taskId"] for event in found] == sent
    numbers = [int(event.id) for event in found]
    assert numbers == sorted(numbers)


STORY = """
runstate.run_id()
child = runstate.child("part")
child.run_id()
child.finish()
other = runstate.child(deadline="0.3s")
try:
    other.sleep("nap", "1h")
except runstate.StoppedError:
    pass
runstate.once(lambda: 1, name="works")()
try:
    runstate.once(lambda: 1 / 0, name="fails", attempts=1)()
except runstate.OnceFailedError:
    pass
runstate.sleep("nap", "1s")
runstate.together("us", 1)
runstate.budget("b", lambda: 1, reserve=1, cost=lambda result: 3, limit=2)()

@runstate.queue("review", attempts=2)
def review(doc):
    if doc:
        raise ValueError
stop = threading.Event()
worker = threading.Thread(target=lambda: runstate.serve(signal=stop))
worker.start()
try:
    review.gather([0, 1], need=2)
except runstate.TaskFailedError:
    pass
stop.set()
worker.join()
"""
DEATH = """
@runstate.budget("c", reserve=1, limit=2)
def hold():
    with runstate.slots("s", max=1):
        say("holds")
        hear()
hold()
"""


def test_the_payloads_are_those_of_the_table_in_the_readme(daemon: Daemon) -> None:
    table = (Path(__file__).parents[2] / "README.md").read_text().partition("## Events")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    documented = {row[0].strip("| `"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    daemon.program(STORY).ends_well()
    victim = daemon.program(DEATH)
    victim.expect("holds")
    victim.kill()
    client = Runstate(base_url=f"unix://{daemon.socket}")
    soon_ms = int(time.time() * 1000) + 1_000
    held = client._connection().call(
        wire.BudgetsReserve(run=client.run_id(), budget="c", amount_minor=1, settle_by_ms=soon_ms)
    )
    seen: dict[str, set[str]] = {}
    for event in client.events():
        assert seen.setdefault(event.type, set(event.data)) == set(event.data)
        if seen.keys() == documented.keys():
            break
    assert seen == documented
    del held
    client._core.configure({})

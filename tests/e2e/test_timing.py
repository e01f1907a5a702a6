"""`sleep`, `together` and deadlines: waiting for a moment, for each other, and what ends every wait."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest

import runstate
from runstate import Runstate, wire
from tests.e2e.inside import Make
from tests.e2e.support import Daemon, eventually


def took(call: object, *args: object, **kwargs: object) -> float:
    began = time.monotonic()
    call(*args, **kwargs)  # type: ignore[operator]
    return time.monotonic() - began


# ---------------------------------------------------------------------------------------------------- sleep


def test_a_sleep_is_rounded_up_to_seconds_and_over_for_good(rs: Runstate, make: Make) -> None:
    assert 0.9 < took(rs.sleep, "cooldown", "300ms") < 20
    assert took(rs.sleep, "cooldown", "1s") < 0.5
    assert took(make().sleep, "cooldown", "1h") < 0.5, "in every process; later durations count for nothing"
    assert took(asyncio.run, rs.asleep("cooldown", "1h")) < 0.5
    assert took(rs.sleep, "none", 0) < 0.5


def test_sleep_until_takes_aware_and_naive_times(rs: Runstate) -> None:
    aware = datetime.now(timezone.utc) + timedelta(seconds=0.4)
    assert 0.3 < took(rs.sleep, "aware", until=aware) < 20
    naive = datetime.now() + timedelta(seconds=0.4)
    assert 0.3 < took(rs.sleep, "naive", until=naive) < 20
    elsewhere = datetime.now(timezone(timedelta(hours=9))) - timedelta(seconds=1)
    assert took(rs.sleep, "over", until=elsewhere) < 0.5


def test_a_process_that_restarts_sleeps_for_what_is_left(rs: Runstate, make: Make) -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=0.8)
    before = make()
    timer = wire.TimersSleep(run=before.run_id(), name="report", at_ms=int(at.timestamp() * 1000) + 1, wait_ms=0)
    before._connection().call(timer)  # it has set the timer, and does not wait any more
    make().sleep("report", "1h")
    assert datetime.now(timezone.utc) >= at


def test_many_sleepers_wake_together(rs: Runstate) -> None:
    async def main() -> None:
        await asyncio.gather(*(rs.asleep("all", "1s") for _ in range(50)))

    assert 0.9 < took(asyncio.run, main()) < 20


def test_a_sleep_outlives_the_daemon(daemon: Daemon) -> None:
    sleeper = daemon.program("say('sleeps'); runstate.sleep('nap', '2s'); say('awake')")
    sleeper.expect("sleeps")
    daemon.waits(1)
    daemon.restart(kill=True)
    assert sleeper.ends_well() == ["awake"]


# ---------------------------------------------------------------------------------------------------- together


def test_together_counts_labels_and_lets_latecomers_through(rs: Runstate, make: Make) -> None:
    passed: list[str] = []

    def come(label: str) -> None:
        make(worker=label).together("stage-2", 3)
        passed.append(label)

    threads = [threading.Thread(target=come, args=(label,)) for label in ("a", "a", "b")]
    for thread in threads:
        thread.start()
    with pytest.raises(runstate.TimeoutError, match="of 3"):
        make(worker="b").together("stage-2", 3, timeout="0.2s")
    assert passed == []
    come("c")
    for thread in threads:
        thread.join()
    assert sorted(passed) == ["a", "a", "b", "c"]
    assert took(make(worker="late").together, "stage-2", 3) < 0.5
    assert took(asyncio.run, make(worker="later").atogether("stage-2", 3)) < 0.5
    with pytest.raises(runstate.ConflictError):
        rs.together("stage-2", 4)


def test_clients_of_one_process_count_once_and_stay_counted(rs: Runstate, make: Make) -> None:
    for client in (rs, make()):
        with pytest.raises(runstate.TimeoutError, match="1 of 2"):
            client.together("pair", 2, timeout=0)
    make(worker="other").together("pair", 2)
    rs.together("pair", 2)


def test_together_waits_in_tasks(make: Make) -> None:
    async def main() -> None:
        await asyncio.gather(*(make(worker=str(number)).atogether("all", 10) for number in range(10)))

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- ends

WAITS = {
    "sleep": lambda rs: rs.sleep("nap", "1h"),
    "together": lambda rs: rs.together("pair", 2),
    "slots": lambda rs: rs.slots("full", int)(),
    "take": lambda rs: rs.take("spent", timeout="1h"),
    "call": lambda rs: rs.queue("nobody", attempts=1)(1),
    "gather": lambda rs: rs.queue("nobody", attempts=1).gather([1]),
    "once": lambda rs: rs.once(lambda: 1, name="held")(),
    "serve": lambda rs: rs.serve(queues=[rs.queue("idle", lambda input: input)]),
}


def run_to_its_end(make: Make, name: str, client: Runstate, end: object) -> None:
    """Every kind of wait in a run ends with it, and the signals of what is held are set."""
    rs = make()
    rs.setup(slots={"full": {"max": 1}}, limits={"spent": {"max": 1, "per": "day"}})
    rs.take("spent")
    results: dict[str, BaseException | None] = {}
    told: list[object] = []

    def wait(kind: str) -> None:
        try:
            WAITS[kind](make(run=name))
            results[kind] = None
        except BaseException as error:
            results[kind] = error

    def hold() -> None:
        context = runstate.context()
        assert context is not None and context.signal.wait(60)
        told.append(context.signal.reason)

    def holder() -> None:
        with pytest.raises(runstate.StoppedError):
            make(run=name).once(hold, name="held")()

    with make(run="elsewhere").slots("full"):
        threads = [threading.Thread(target=holder)]
        threads[0].start()
        eventually(lambda: client.status().workers)
        threads += [threading.Thread(target=wait, args=(kind,)) for kind in WAITS]
        for thread in threads[1:]:
            thread.start()
        if callable(end):
            eventually(lambda: len(make(run="look")._connection().call(wire.StatusGet()).reply.waits) == 8)
            end()
        for thread in threads:
            thread.join(60)
    served = results.pop("serve")
    assert served is None, "serve returns"
    assert {kind: type(error) for kind, error in results.items()} == dict.fromkeys(results, runstate.StoppedError)
    assert {error.code for error in results.values() if isinstance(error, runstate.StoppedError)} == {
        "SCOPE_CANCELLED" if callable(end) else "DEADLINE_EXCEEDED"
    }
    assert [type(reason) for reason in told] == [runstate.StoppedError]


def test_stopping_ends_every_wait(make: Make) -> None:
    client = make(run="stopped")
    client.run_id()
    run_to_its_end(make, "stopped", client, make(run="stopped").stop)


def test_a_deadline_ends_every_wait(make: Make) -> None:
    client = make().run("short", deadline="1.5s")
    client.run_id()
    run_to_its_end(make, "short", client, None)
    assert client.status().run.state == "expired"
    with pytest.raises(runstate.StoppedError):
        client.take("spent")
    fresh = make().run("short")
    assert fresh.run_id() != client.status().run.id and fresh.status().run.state == "running"


def test_a_parents_deadline_ends_its_children(rs: Runstate) -> None:
    parent = rs.run("short", deadline=0.5)
    child = parent.child(deadline="1h")
    with pytest.raises(runstate.StoppedError) as error:
        child.sleep("nap", "1h")
    assert (error.value.code, error.value.status) == ("DEADLINE_EXCEEDED", 409)
    assert child.status().run.state == parent.status().run.state == "expired"
    assert child.status().run.deadline == parent.status().run.deadline

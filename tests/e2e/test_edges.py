"""Edges of the public surface that programs for the hosted SDK stand on; one process, a real daemon."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import runstate
from runstate import Runstate
from tests.daemons import PATIENCE_S
from tests.e2e.inside import Make, pool, serving

FAR = "99999999d"


@pytest.mark.parametrize("timeout", ["25d", FAR, 1e308])
def test_a_wait_may_be_longer_than_the_system_can_count(rs: Runstate, timeout: Any) -> None:
    rs.setup(limits={"api": {"max": 100, "per": "day"}})
    rs.take("api", timeout=timeout)
    with rs.slots("gpu", max=1, timeout=timeout):
        pass
    queue = rs.queue("double", lambda number: number * 2)
    with serving(rs):
        assert queue.send(1).result(timeout) == 2
        assert sorted(queue.gather([1, 2], timeout=timeout)) == [2, 4]
    rs.together("start", 1, timeout=timeout)


def test_a_handler_may_give_an_awaitable_or_be_an_object_whose_call_is_one(rs: Runstate) -> None:
    async def work(number: int) -> tuple[int, str | None]:
        inside = runstate.context()
        return number + 1, None if inside is None else inside.key

    class Handler:
        async def __call__(self, number: int) -> tuple[int, str | None]:
            return await work(number)

    given = rs.queue("given", lambda number: work(number))
    called = rs.queue("called", Handler())
    with serving(rs):
        for queue in (given, called):
            number, key = queue.send(1).result()
            assert number == 2
            assert key.startswith(queue.name)


@pytest.mark.parametrize("handler", [5, "x", ["f"]])
def test_a_handler_that_cannot_be_called_is_refused(rs: Runstate, handler: Any) -> None:
    with pytest.raises(runstate.ConfigError, match="handler"):
        rs.queue("q", handler)
    with pytest.raises(runstate.ConfigError, match="no queue"):
        rs.serve()


def test_an_empty_run_or_space_is_refused_in_code(make: Make) -> None:
    for option in ("run", "space_id"):
        with pytest.raises(runstate.ConfigError, match=option):
            make(**{option: ""}).run_id()


def test_the_end_of_another_clients_run_does_not_end_ours(rs: Runstate, make: Make) -> None:
    other = make(run="other")
    other.stop()
    with pytest.raises(runstate.StoppedError):
        rs.once(other.run_id, name="ask")()
    assert rs.status().run.state == "running"
    assert rs.run_id()


def test_clients_of_run_and_child_join_again_after_configure(make: Make) -> None:
    rs = make(space_id="one")
    run = rs.run("same")
    child = run.child("below")
    before = run.run_id(), child.run_id()
    rs.configure(space_id="two")
    assert child.once(lambda: 1, name="f")() == 1
    after = run.run_id(), child.run_id()
    assert not set(before) & set(after)


def test_setup_goes_on_after_a_conflict_and_tells_it(rs: Runstate, make: Make) -> None:
    rs.setup(limits={"api": {"max": 1, "per": "day"}})
    with pytest.raises(runstate.ConflictError, match="api"):
        rs.setup(limits={"api": {"max": 2, "per": "day"}}, slots={"gpu": {"max": 3}})
    assert pool(make, "gpu").max == 3


def test_places_have_an_upper_bound_and_units_a_default(rs: Runstate) -> None:
    rs.setup(slots={"gpu": {"max": 1}})
    queue = rs.queue("q", lambda number: number, slots={"name": "gpu", "units": None}, concurrency=1_000)
    with serving(rs):
        assert queue(1) == 1
    for ask in (lambda: rs.serve(concurrency=1_001), lambda: rs.queue("r", lambda number: number, concurrency=1_001)):
        with pytest.raises(runstate.ConfigError, match="1 to 1000"):
            ask()


def test_of_two_that_hold_one_slot_each_and_want_the_others_one_is_told_at_once(make: Make) -> None:
    make().setup(slots={"gpu": {"max": 2}})
    both = threading.Barrier(2, timeout=PATIENCE_S)
    seen: list[str] = []

    def work() -> None:
        client = make()
        try:
            with client.slots("gpu"):
                both.wait()
                with client.slots("gpu", timeout="1h"):
                    seen.append("both")
        except runstate.TimeoutError as error:
            seen.append(error.code)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(seen) == ["DEADLOCK", "both"]

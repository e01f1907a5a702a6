"""`gather`: groups of jobs, results as they come, the rest cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import runstate
from runstate import Queue, Runstate, wire
from tests.e2e.inside import Make, serving
from tests.e2e.support import Daemon, eventually


class Gates:
    """A handler whose jobs end when the test says so."""

    def __init__(self, client: Runstate, **options: Any) -> None:
        self.open: dict[int, threading.Event] = {number: threading.Event() for number in range(10)}
        self.started: list[int] = []
        self.queue: Queue = client.queue("gated", self.handle, **{"attempts": 1, "concurrency": 20, **options})

    def handle(self, number: int) -> int:
        context = runstate.context()
        assert context is not None
        self.started.append(number)
        while not self.open[number].wait(0.02):
            if context.signal.is_set():
                return -number
        if number >= 8:
            raise ValueError(f"bad {number}")
        return number

    def let(self, *numbers: int) -> None:
        for number in numbers:
            self.open[number].set()


@pytest.fixture
def gates(rs: Runstate) -> Gates:
    return Gates(rs)


def forms(queue: Queue) -> list[Callable[..., list[Any]]]:
    return [queue.gather, lambda *args, **kwargs: asyncio.run(queue.agather(*args, **kwargs))]


def test_all_results_come_in_completion_order(rs: Runstate, gates: Gates) -> None:
    order = [2, 0, 1]

    def accept(result: int, input: int) -> bool:
        assert result == input
        after = [*order, 3][order.index(result) + 1]
        gates.let(after)
        return True

    with serving(rs):
        gates.let(2)
        assert gates.queue.gather([0, 1, 2], accept=accept) == order


def test_it_returns_once_the_need_is_met_and_cancels_the_rest(rs: Runstate, gates: Gates) -> None:
    gates.let(1, 2)
    with serving(rs):
        for gather in forms(gates.queue):
            assert sorted(gather([0, 1, 2, 3], need=2)) == [1, 2]
            began = len(gates.started)
            assert began
        eventually(lambda: not rs.status().workers, "the handlers of the rest were told to stop")


def test_accept_chooses_plain_and_async(rs: Runstate, gates: Gates) -> None:
    seen: list[tuple[int, int]] = []

    def plain(result: int, input: int) -> bool:
        seen.append((result, input))
        return result % 2 == 1

    async def later(result: int, input: int) -> bool:
        await asyncio.sleep(0)
        return plain(result, input)

    async def blocking_in_a_loop() -> list[int]:
        return gates.queue.gather(range(6), accept=later)

    gates.let(*range(10))
    with serving(rs):
        for accept in (plain, later):
            for gather in forms(gates.queue):
                assert sorted(gather(range(6), accept=accept)) == [1, 3, 5]
        assert sorted(asyncio.run(blocking_in_a_loop())) == [1, 3, 5]
        assert sorted(gates.queue.gather(range(6), need=3, accept=plain)) == [1, 3, 5]
        assert sorted(gates.queue.gather([7, 8, 9])) == [7], "with all: the accepted ones, however few"
        assert gates.queue.gather([8, 9], accept=plain) == []
    assert all(result == input for result, input in seen), "failed members are never shown"


def test_an_exception_in_accept_ends_it_with_that_exception(rs: Runstate, gates: Gates) -> None:
    def accept(result: int, input: int) -> bool:
        raise KeyError(input)

    gates.let(1)
    with serving(rs):
        for gather in forms(gates.queue):
            with pytest.raises(KeyError, match="1"):
                gather([0, 1], accept=accept)
        eventually(lambda: not rs.status().workers)


def test_a_need_out_of_reach_raises_with_the_first_failure(rs: Runstate, gates: Gates) -> None:
    gates.let(8)
    with serving(rs):
        for gather in forms(gates.queue):
            with pytest.raises(runstate.TaskFailedError, match="bad 8") as error:
                gather([0, 8], need=2)
            assert (error.value.job_id, error.value.reason) == (None, "handler_error: ValueError: bad 8")
        gates.let(1, 2)
        with pytest.raises(runstate.TaskFailedError) as error:
            gates.queue.gather([1, 2], need=1, accept=lambda result, input: False)
        assert error.value.job_id is None and error.value.reason


def test_it_times_out_and_cancels(rs: Runstate, gates: Gates) -> None:
    gates.let(1)
    with serving(rs):
        for gather in forms(gates.queue):
            began = time.monotonic()
            with pytest.raises(runstate.TimeoutError):
                gather([0, 1], timeout="0.3s")
            assert 0.25 < time.monotonic() - began < 20
        eventually(lambda: not rs.status().workers)
    with pytest.raises(runstate.ConfigError):
        gates.queue.gather([0], timeout="soon")


def test_an_empty_one_sends_nothing(make: Make) -> None:
    queue = make(base_url="unix:///nowhere/at/all.sock").queue("any", attempts=1)
    assert queue.gather([]) == queue.gather(iter(()), need=3) == []
    assert asyncio.run(queue.agather([])) == []


def test_the_same_input_twice_is_one_job_and_counts_twice(rs: Runstate, gates: Gates) -> None:
    gates.let(1)
    with serving(rs):
        assert gates.queue.gather([1, 1, 1], need=3) == [1, 1, 1]
        assert gates.started == [1]
        assert gates.queue.gather([1]) == [1]
    assert gates.started == [1, 1], "another group is other work"


def test_a_hundred_inputs_and_a_worker_of_the_run_above(rs: Runstate, make: Make) -> None:
    rs.queue("double", lambda number: 2 * number, concurrency=20)
    producer = make().child().queue("double", attempts=5)
    with serving(rs):
        assert sorted(producer.gather(range(100))) == [2 * number for number in range(100)]


def test_a_gather_on_a_run_that_ends_is_stopped(rs: Runstate, make: Make, gates: Gates) -> None:
    caller = make()
    for need in ("all", 1):
        run = f"ends-{need}"
        queue = caller.run(run).queue("gated", attempts=1)
        raised: list[type] = []

        def call(queue: Queue = queue, need: Any = need, raised: list[type] = raised) -> None:
            with pytest.raises(runstate.StoppedError) as error:
                queue.gather([0], need=need)
            raised.append(error.type)

        thread = threading.Thread(target=call)
        thread.start()
        eventually(lambda: any(wait.kind == "group" for wait in waits(make)))
        make(run=run).stop()
        thread.join()
        assert raised == [runstate.StoppedError]


def waits(make: Make) -> tuple[wire.WaitView, ...]:
    view: wire.StatusView = make()._connection().call(wire.StatusGet()).reply
    return view.waits


def test_a_blocking_gather_that_its_own_loop_would_have_to_serve_is_a_config_error(rs: Runstate) -> None:
    @rs.queue("own", attempts=1)
    async def own(number: int) -> int:
        return number

    async def main() -> None:
        stop = asyncio.Event()
        worker = asyncio.ensure_future(rs.aserve(signal=stop))
        await asyncio.to_thread(eventually, lambda: rs._connection().call(wire.StatusGet()).reply.waits)
        with pytest.raises(runstate.ConfigError, match="event loop"):
            own.gather([1, 2])
        assert await own.agather([3]) == [3]
        stop.set()
        await worker

    asyncio.run(main())


def test_the_group_ends_when_its_caller_is_killed(daemon: Daemon) -> None:
    worker = daemon.program(
        """
@runstate.queue("slow", concurrency=5)
def slow(number):
    say("started", number)
    assert runstate.context().signal.wait(60)
    say("told", number)
    raise ValueError
runstate.serve()
"""
    )
    caller = daemon.program("runstate.queue('slow', attempts=5).gather([1, 2, 3])")
    assert sorted(worker.hear() for _ in range(3)) == ["started 1", "started 2", "started 3"]
    caller.kill()
    assert sorted(worker.hear() for _ in range(3)) == ["told 1", "told 2", "told 3"]
    eventually(lambda: not daemon.holdings())
    worker.send_signal(15)
    worker.end()


def test_a_cancelled_gather_cancels_its_jobs(rs: Runstate, gates: Gates) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(gates.queue.agather([0, 1]))
        await asyncio.to_thread(eventually, lambda: len(gates.started) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(rs):
        asyncio.run(main())
        eventually(lambda: not rs.status().workers)

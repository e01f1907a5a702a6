"""Limits, slots, budgets, and queues that need them: one process, a real daemon. Many processes: test_contention.py."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

import runstate
from runstate import Runstate, wire
from tests.e2e.inside import Make, money, pool, serving, used
from tests.e2e.support import eventually

# ---------------------------------------------------------------------------------------------------- limit and take


def test_a_limited_function_spends_units_also_when_it_fails(rs: Runstate, make: Make) -> None:
    @rs.limit("api", max=5, per="day", units=2)
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert used(make, "api") == 2
    rs.take("api")
    rs.take("api", units=2)
    assert used(make, "api") == 5


def test_take_on_a_used_up_limit_times_out(rs: Runstate) -> None:
    rs.setup(limits={"hourly": {"max": 1, "per": "hour"}})
    rs.take("hourly")
    began = time.monotonic()
    with pytest.raises(builtins.TimeoutError):
        rs.take("hourly", timeout="1s")
    assert 0.9 < time.monotonic() - began < 5
    with pytest.raises(runstate.TimeoutError):
        asyncio.run(rs.atake("hourly", timeout=0))


def test_sizes_that_differ_are_a_conflict_at_the_call(rs: Runstate) -> None:
    rs.limit("api", lambda: 1, max=60, per="minute")()
    for other in ({"max": 61, "per": "minute"}, {"max": 60, "per": "hour"}):
        wrapped = rs.limit("api", lambda: 1, **other)
        with pytest.raises(runstate.ConflictError):
            wrapped()
    assert rs.limit("api", lambda: 1, max=60, per=60)() == rs.limit("api", lambda: 1)() == 1
    with rs.slots("pool", max=2):
        pass
    with pytest.raises(runstate.ConflictError), rs.slots("pool", max=3):
        pass
    rs.budget("money", lambda: 1, reserve=1, limit=50)()
    with pytest.raises(runstate.ConflictError):
        rs.budget("money", lambda: 1, reserve=1, limit=51)()
    with pytest.raises(runstate.ConflictError):
        rs.budget("money", lambda: 1, reserve=1, limit=50, currency="EUR")()


def test_a_missing_resource_is_not_found(rs: Runstate) -> None:
    calls = [lambda: rs.take("x"), rs.limit("x", lambda: 1), rs.slots("x", lambda: 1)]
    calls += [rs.budget("x", lambda: 1, reserve=1), lambda: rs.setup(budgets={"x": {}})]
    for call in calls:
        with pytest.raises(runstate.RunstateError) as error:
            call()
        assert error.value.code == "NOT_FOUND"


def test_more_units_than_there_are_is_refused_at_once(rs: Runstate) -> None:
    rs.setup(limits={"l": {"max": 2, "per": "hour"}}, slots={"s": {"max": 2}})
    for call in (lambda: rs.take("l", units=3), rs.slots("s", lambda: 1, units=3)):
        with pytest.raises(runstate.RunstateError, match="3 units exceed"):
            call()


# ---------------------------------------------------------------------------------------------------- slots


def test_six_calls_on_two_slots_one_raising(rs: Runstate, make: Make) -> None:
    inside, peaks, lock = 0, [], threading.Lock()

    @rs.slots("browser", max=2)
    def page(number: int) -> int:
        nonlocal inside
        with lock:
            inside += 1
            peaks.append(inside)
        time.sleep(0.05)  # work
        with lock:
            inside -= 1
        if number == 3:
            raise ValueError("bad page")
        return number

    results: list[int] = []
    failures: list[BaseException] = []

    def call(number: int) -> None:
        try:
            results.append(page(number))
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(peaks), sorted(results), len(failures)) == (2, [0, 1, 2, 4, 5], 1)
    assert pool(make, "browser").used == 0


def test_six_tasks_on_two_slots(rs: Runstate, make: Make) -> None:
    inside, peaks = 0, []

    @rs.slots("browser", max=2)
    async def page(number: int) -> int:
        nonlocal inside
        inside += 1
        peaks.append(inside)
        await asyncio.sleep(0.03)
        inside -= 1
        if number == 3:
            raise ValueError("bad page")
        return number

    async def main() -> list[Any]:
        return await asyncio.gather(*(page(number) for number in range(6)), return_exceptions=True)

    results = asyncio.run(main())
    assert (max(peaks), [type(each) for each in results].count(ValueError)) == (2, 1)
    assert pool(make, "browser").used == 0


def test_the_block_is_a_context_and_gives_it(rs: Runstate, make: Make) -> None:
    with rs.slots("browser", max=1) as ctx:
        assert runstate.context() is ctx and rs.context() is ctx
        assert (ctx.run.name, ctx.attempt, ctx.key, ctx.signal.is_set()) == ("default", 1, None, False)
        assert pool(make, "browser").used == 1
        assert pool(make, "browser").holders
    assert runstate.context() is None
    assert pool(make, "browser").used == 0

    async def main() -> None:
        async with rs.slots("browser") as ctx:
            assert runstate.context() is ctx
        assert runstate.context() is None

    asyncio.run(main())
    assert pool(make, "browser").used == 0


def test_one_object_is_used_again_nested_and_shared(rs: Runstate, make: Make) -> None:
    seats = rs.slots("seats", max=4)
    assert seats.name == "seats"
    with seats as outer:
        with seats as inner:
            assert runstate.context() is inner and pool(make, "seats").used == 2
        assert runstate.context() is outer and pool(make, "seats").used == 1

        def elsewhere() -> None:
            assert runstate.context() is None, "a thread of the user's inherits nothing"
            with seats:
                assert pool(make, "seats").used == 2

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seats(lambda: pool(make, "seats").used)() == 2
    with seats:
        pass
    assert pool(make, "seats").used == 0

    async def task() -> None:
        async with seats:
            await asyncio.sleep(0.01)

    async def main() -> None:
        await asyncio.gather(*(task() for _ in range(8)))

    asyncio.run(main())
    assert pool(make, "seats").used == 0


def test_a_block_that_is_left_in_another_context_gives_its_units_back(rs: Runstate, make: Make) -> None:
    seats = rs.slots("seats", max=1)
    with contextlib.ExitStack() as stack:
        for step in (lambda: stack.enter_context(seats), stack.close):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
    assert pool(make, "seats").used == 0


def test_the_blocks_own_exception_goes_through_and_the_units_are_back(rs: Runstate, make: Make) -> None:
    for kind in (ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError):
        with pytest.raises(kind), rs.slots("browser", max=1):
            raise kind()
        assert pool(make, "browser").used == 0
    call = rs.slots("browser", lambda: (_ for _ in ()).throw(KeyboardInterrupt))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        next(call())
    eventually(lambda: pool(make, "browser").used == 0)


def test_slots_time_out(rs: Runstate, make: Make) -> None:
    with rs.slots("browser", max=1):
        for timeout in (0, "0.05s"):
            with pytest.raises(runstate.TimeoutError, match="browser"), make().slots("browser", timeout=timeout):
                pass
    with make().slots("browser", timeout=0):
        pass


def test_a_wait_for_what_it_holds_itself_times_out_at_once_and_says_why(rs: Runstate) -> None:
    with rs.slots("browser", max=1), pytest.raises(runstate.TimeoutError, match="deadlock: ") as error:
        rs.slots("browser", int, timeout="1h")()
    assert error.value.code == "DEADLOCK"


def test_a_slot_that_is_lost_sets_the_signal_and_raises_after_a_normal_return(rs: Runstate, make: Make) -> None:
    def lose(ctx: runstate.RunContext) -> None:
        (token,) = rs._connection().holds.tokens()
        rs._connection().call(wire.Release(token=token))
        rs._connection()._beat((token,))
        assert ctx.signal.wait(30)
        assert isinstance(ctx.signal.reason, runstate.LeaseLostError)

    with pytest.raises(runstate.LeaseLostError) as lost, rs.slots("browser", max=1) as ctx:
        lose(ctx)
    assert lost.value.code == "LEASE_LOST"
    with pytest.raises(ValueError, match="its own"), rs.slots("browser") as ctx:
        lose(ctx)
        raise ValueError("its own")


def test_a_run_that_ends_sets_the_signal_and_the_result_counts(rs: Runstate, make: Make) -> None:
    @rs.slots("browser", max=1)
    def work() -> str:
        ctx = runstate.context()
        make().stop()
        assert ctx is not None and ctx.signal.wait(30)
        assert isinstance(ctx.signal.reason, runstate.StoppedError)
        return "done"

    assert work() == "done"
    assert pool(make, "browser").used == 0


# ---------------------------------------------------------------------------------------------------- budget

COSTS = [
    (0.4, None, 40),
    (0.4, 0.25, 25),
    (0.4, "0.25", 25),
    (0.4, " 0.250 ", 25),
    (1, 0.1 + 0.2, 30),
    (1, 0.005, 1),
    (2, 1.005, 101),
    (0.4, 0, 0),
    (0.4, "0", 0),
    (0.4, 0.4, 40),
    (0.4, 3, 300),
    (0.4, 1000, 5000),
]


@pytest.mark.parametrize(("reserve", "cost", "spent"), COSTS)
def test_what_a_call_cost_is_charged(rs: Runstate, make: Make, reserve: Any, cost: Any, spent: int) -> None:
    options = {} if cost is None else {"cost": lambda result: result["cost"]}

    @rs.budget("model-usd", reserve=reserve, limit=50, **options)
    def call() -> dict[str, Any]:
        assert money(make, "model-usd") == (round(reserve * 100), 0)
        return {"cost": cost}

    assert call() == {"cost": cost}
    assert money(make, "model-usd") == (0, spent)


@pytest.mark.parametrize("scale", [0, 2, 6, 9])
def test_a_budget_has_its_scale(rs: Runstate, make: Make, scale: int) -> None:
    rs.budget("b", lambda: 1, reserve="3", limit="10", currency="eur", scale=scale)()
    assert money(make, "b") == (0, 3 * 10**scale)
    rs.budget("b", lambda: 1, reserve=2)()
    assert money(make, "b") == (0, 5 * 10**scale)


def test_the_scale_of_a_budget_is_asked_for_once(rs: Runstate, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rs.setup(budgets={"b": {"limit": 10, "scale": 3}, "c": {"limit": 10, "scale": 1}})
    connection = rs._connection()
    asked: list[str] = []

    def call(request: wire.Request[Any]) -> Any:
        asked.append(type(request).__name__)
        return type(connection).call(connection, request)

    monkeypatch.setattr(connection, "call", call)
    work = rs.budget("b", lambda: 1, reserve=1)
    work()
    work()
    rs.budget("b", lambda: 1, reserve=1)()
    assert asked.count("BudgetsDeclare") == 1
    rs._core.scales["b"] = 0  # as if another database had told it
    work()
    assert asked.count("BudgetsDeclare") == 2
    assert money(make, "b") == (0, 4_000)


def test_a_cost_that_is_rounded_to_nothing_is_told_once(
    rs: Runstate, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    for cost in (Decimal("0.00499"), 0, "0.00"):
        call = rs.budget("small", lambda: 1, reserve="0.40", cost=lambda result, cost=cost: cost, limit=1)
        call()
        call()
    rs.budget("small", lambda: 1, reserve="0.40", cost=lambda result: Decimal("0.005"))()
    assert money(make, "small") == (0, 1)
    [record] = caplog.records
    assert "budget small: a cost of 0.00499 is less than half of its smallest unit (scale 2)" in record.getMessage()


BROKEN = [
    lambda result: result["no"],
    lambda result: -1,
    lambda result: "1.555",
    lambda result: "much",
    lambda result: None,
    lambda result: True,
    lambda result: float("nan"),
    lambda result: 2**53,
]


@pytest.mark.parametrize("cost", BROKEN)
def test_a_broken_cost_charges_the_reserve_and_says_so(rs: Runstate, make: Make, cost: Callable[[Any], Any]) -> None:
    call = rs.budget("model-usd", dict, reserve=0.4, cost=cost, limit=50)
    with pytest.raises(runstate.ConfigError, match="cost"):
        call()
    assert money(make, "model-usd") == (0, 40)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_call_that_raises_costs_nothing(rs: Runstate, make: Make, kind: type[BaseException]) -> None:
    @rs.budget("model-usd", reserve=50, limit=50)
    def call() -> None:
        raise kind()

    for _ in range(3):
        with pytest.raises(kind):
            call()
    if kind is ValueError:
        assert money(make, "model-usd") == (0, 0), "at once"
    eventually(lambda: money(make, "model-usd") == (0, 0))


def test_what_does_not_fit_is_refused_before_the_call(rs: Runstate) -> None:
    calls: list[int] = []
    call = rs.budget("model-usd", lambda: calls.append(1), reserve="50.01", limit=50)
    with pytest.raises(runstate.BudgetExceededError) as error:
        call()
    assert (error.value.code, error.value.status, calls) == ("INSUFFICIENT_BUDGET", 409, [])
    with pytest.raises(runstate.BudgetExceededError):
        asyncio.run(rs.budget("model-usd", _nothing, reserve=51)())


async def _nothing() -> None:
    pass


def test_an_async_call_is_charged_and_a_cancelled_one_is_not(rs: Runstate, make: Make) -> None:
    @rs.budget("b", reserve=1, cost=lambda result: result, limit=50)
    async def call(pause: float) -> str:
        await asyncio.sleep(pause)
        return "0.25"

    async def main() -> None:
        assert await call(0) == "0.25"
        task = asyncio.ensure_future(call(60))
        await asyncio.to_thread(eventually, lambda: money(make, "b") == (100, 25))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    eventually(lambda: money(make, "b") == (0, 25))


# ---------------------------------------------------------------------------------------------------- queues

RESOURCES: dict[str, Any] = {
    "limits": {"rpm": {"max": 100, "per": "day"}},
    "slots": {"browser": {"max": 2}},
    "budgets": {"model-usd": {"limit": 50}},
}


def test_a_job_has_all_it_needs_and_pays_with_its_result(rs: Runstate, make: Make) -> None:
    rs.setup(**RESOURCES)

    @rs.queue(
        "review",
        slots={"name": "browser", "units": 2},
        limit={"name": "rpm", "units": 3},
        budget={"name": "model-usd", "reserve": 0.40, "cost": lambda result: result["usd"]},
        attempts=1,
        concurrency=4,
    )
    def review(doc: int) -> dict[str, Any]:
        assert (pool(make, "browser").used, money(make, "model-usd")[0]) == (2, 40)
        if doc == 3:
            raise ValueError("bad doc 3")
        return {"usd": doc * 0.1}

    with serving(rs):
        jobs = [review.send(doc) for doc in range(4)]
        assert [job.result() for job in jobs[:3]] == [{"usd": 0.0}, {"usd": 0.1}, {"usd": 0.2}]
        with pytest.raises(runstate.TaskFailedError, match="bad doc 3"):
            jobs[3].result()
        assert (used(make, "rpm"), pool(make, "browser").used, money(make, "model-usd")) == (12, 0, (0, 30))


@pytest.mark.parametrize(
    ("cost", "spent"), [(None, 40), (lambda result: 0, 0), (lambda result: 7, 700), (lambda result: result["no"], 40)]
)
def test_the_cost_of_a_job(rs: Runstate, make: Make, cost: Any, spent: int) -> None:
    rs.setup(**RESOURCES)
    budget = {"name": "model-usd", "reserve": "0.40"} | ({"cost": cost} if cost else {})
    queue = rs.queue("review", lambda doc: {"doc": doc}, budget=budget)
    with serving(rs):
        assert queue(1) == {"doc": 1}
    assert money(make, "model-usd") == (0, spent)


def test_an_async_handler_needs_resources_alike(rs: Runstate, make: Make) -> None:
    rs.setup(**RESOURCES)

    @rs.queue("areview", slots="browser", budget={"name": "model-usd", "reserve": 1}, concurrency=8)
    async def areview(doc: int) -> int:
        assert pool(make, "browser").used in (1, 2)
        return doc

    async def main() -> list[int]:
        stop = asyncio.Event()
        worker = asyncio.ensure_future(rs.aserve(signal=stop))
        results = await asyncio.gather(*(areview(doc) for doc in range(6)))
        stop.set()
        await worker
        return list(results)

    assert asyncio.run(main()) == list(range(6))
    assert (pool(make, "browser").used, money(make, "model-usd")) == (0, (0, 600))


def test_jobs_of_a_producer_need_what_the_workers_have_declared_last(rs: Runstate, make: Make) -> None:
    rs.setup(**RESOURCES)
    producer = make().queue("review", attempts=5)
    first = rs.queue("review", lambda doc: doc, budget={"name": "model-usd", "reserve": 1})
    with serving(rs, queues=[first]):
        assert producer(1) == 1
    assert money(make, "model-usd") == (0, 100)
    waiting = producer.send(2)
    second = rs.queue("review", lambda doc: doc, budget={"name": "model-usd", "reserve": 2})
    with serving(rs, queues=[second]):
        assert waiting.result() == 2
    assert money(make, "model-usd") == (0, 300)
    waiting = producer.send(3)
    with serving(rs, queues=[rs.queue("review", lambda doc: doc)]):
        assert waiting.result() == 3
    assert money(make, "model-usd") == (0, 300), "a worker without needs clears them"


def test_a_job_waits_for_its_slots_and_goes_when_they_are_free(rs: Runstate, make: Make) -> None:
    rs.setup(**RESOURCES)
    queue = rs.queue("review", lambda doc: doc, slots="browser")
    with serving(rs), make().slots("browser", units=2):
        job = queue.send(1)
        with pytest.raises(runstate.TimeoutError, match="deadlock: "):
            job.result(timeout="0.1s")
        with pytest.raises(runstate.RunstateError) as error:
            job.result()
        assert error.value.code == "DEADLOCK"
        assert pool(make, "browser").waiting == 1
        waiter = threading.Thread(target=job.result)
        waiter.start()
    waiter.join()
    assert job.result() == 1


def test_a_job_that_reserves_nothing_is_a_config_error(rs: Runstate) -> None:
    rs.setup(**RESOURCES)
    queue = rs.queue("review", lambda doc: doc, budget={"name": "model-usd", "reserve": 0.001})
    for call in (lambda: queue.send(1), rs.serve):
        with pytest.raises(runstate.ConfigError, match="reserve"):
            call()


def test_senders_are_told_of_missing_resources(rs: Runstate) -> None:
    for options in ({"slots": "no"}, {"limit": "no"}, {"budget": {"name": "no", "reserve": 1}}):
        queue = rs.queue("review", lambda doc: doc, **options)  # type: ignore[arg-type]
        with pytest.raises(runstate.RunstateError) as error:
            queue.send(1)
        assert error.value.code == "NOT_FOUND"


# ---------------------------------------------------------------------------------------------------- event loops


def test_blocking_forms_work_in_an_event_loops_thread(rs: Runstate, make: Make) -> None:
    rs.setup(**RESOURCES)
    other = make()

    async def main() -> None:
        rs.take("rpm")
        with rs.slots("browser"):
            await asyncio.sleep(0)
        assert rs.slots("browser", lambda: 1)() == 1
        assert rs.budget("model-usd", lambda: 2, reserve=1)() == 2
        rs.sleep("moment", "0s")
        rs.together("us", 1)
        rs.setup(slots={"browser": {}})
        assert rs.status().run.id == rs.run_id()
        assert next(iter(rs.events())).type == "scope.created"
        async with rs.slots("browser"):  # another unit is free, so this cannot hang
            with rs.slots("browser"):
                pass
        release = threading.Event()

        def hold() -> None:
            with other.slots("browser", units=2):
                release.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        await asyncio.to_thread(eventually, lambda: pool(make, "browser").used == 2)
        threading.Timer(0.1, release.set).start()
        with rs.slots("browser"):  # held by a thread, which can go on
            pass
        holder.join()

    asyncio.run(main())
    assert pool(make, "browser").used == 0


@pytest.mark.parametrize("style", ["async with", "with", "decorator"])
def test_a_blocking_wait_for_slots_of_a_task_of_the_same_loop_is_a_config_error(
    rs: Runstate, make: Make, style: str
) -> None:
    rs.setup(slots={"one": {"max": 1}})

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            if style == "with":
                with rs.slots("one"):
                    inside.set()
                    await done.wait()
            elif style == "async with":
                async with rs.slots("one"):
                    inside.set()
                    await done.wait()
            else:
                await rs.slots("one", work)()

        async def work() -> None:
            inside.set()
            await done.wait()

        task = asyncio.ensure_future(hold())
        await inside.wait()
        with pytest.raises(runstate.ConfigError, match="event loop"), rs.slots("one", timeout="1h"):
            pass
        done.set()
        await task
        with rs.slots("one", timeout=0):
            pass

    asyncio.run(main())
    assert pool(make, "one").used == 0


def test_slots_that_a_task_gets_while_its_loop_is_blocked_end_the_blocking_wait(rs: Runstate, make: Make) -> None:
    rs.setup(slots={"one": {"max": 1}})
    release = threading.Event()

    def hold() -> None:
        with make().slots("one"):
            release.wait(60)

    async def first() -> None:
        async with rs.slots("one"):
            pass

    async def main() -> None:
        task = asyncio.ensure_future(first())
        await asyncio.to_thread(eventually, lambda: pool(make, "one").waiting == 1)
        freed = threading.Thread(target=lambda: eventually(lambda: pool(make, "one").waiting == 2) and release.set())
        freed.start()
        with pytest.raises(runstate.ConfigError, match="event loop"), rs.slots("one", timeout="1h"):
            pass
        await task
        freed.join()

    holder = threading.Thread(target=hold)
    holder.start()
    eventually(lambda: pool(make, "one").used == 1)
    asyncio.run(main())
    holder.join()
    assert pool(make, "one").used == 0


def test_a_blocking_wait_for_a_job_that_lacks_the_slots_of_a_task_of_the_loop_is_refused(rs: Runstate) -> None:
    rs.setup(slots={"one": {"max": 1}})
    queue = rs.queue("needy", attempts=1, slots="one")

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with rs.slots("one"):
                inside.set()
                await done.wait()

        task = asyncio.ensure_future(hold())
        await inside.wait()
        job = await queue.asend(1)
        with pytest.raises(runstate.ConfigError, match="event loop"):
            job.result(timeout="1h")
        done.set()
        await task
        with pytest.raises(runstate.TimeoutError, match="had not ended"):
            job.result(timeout="10ms")

    asyncio.run(main())

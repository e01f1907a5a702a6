"""Tasks and threads that were started inside of a hold: those that go on by themselves may wait for it, those that are
awaited there may not."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import runstate
from runstate import Runstate
from tests.e2e.support import PATIENCE_S, eventually


async def somebody_waits(rs: Runstate) -> None:
    await asyncio.to_thread(eventually, lambda: bool(rs.status().waiting))


def test_a_task_started_in_a_block_of_slots_gets_them_after_the_block(rs: Runstate) -> None:
    async def use() -> str:
        async with rs.slots("browser", timeout="1m"):
            return "used"

    async def main() -> str:
        async with rs.slots("browser", max=1):
            task = asyncio.create_task(use())
            await somebody_waits(rs)
        return await task

    assert asyncio.run(main()) == "used"


def test_a_thread_with_a_copy_of_the_context_does_too(rs: Runstate) -> None:
    async def main() -> int:
        async with rs.slots("browser", max=1):
            work = rs.slots("browser", lambda: 7, timeout="1m")
            context = contextvars.copy_context()
            future = asyncio.get_running_loop().run_in_executor(None, context.run, work)
            await somebody_waits(rs)
        return await future

    assert asyncio.run(main()) == 7


def test_a_task_may_ask_for_the_result_of_the_call_that_has_started_it(rs: Runstate) -> None:
    tasks: list[asyncio.Task[int]] = []

    @rs.once
    async def work(number: int) -> int:
        tasks.append(asyncio.create_task(again(number)))
        await asyncio.sleep(0.1)
        return number + 1

    again: Callable[[int], Any] = work

    async def main() -> tuple[int, int]:
        return await work(1), await tasks[0]

    assert asyncio.run(main()) == (2, 2)


def test_the_task_itself_is_still_told_at_once(rs: Runstate) -> None:
    async def main() -> None:
        async with rs.slots("browser", max=1), rs.slots("browser", timeout="1h"):
            pass

    with pytest.raises(runstate.TimeoutError, match="deadlock: ") as error:
        asyncio.run(main())
    assert error.value.code == "DEADLOCK"


def test_a_loop_in_a_thread_that_holds_something_is_inside_of_it(rs: Runstate) -> None:
    async def main() -> None:
        async with rs.slots("browser", timeout="1h"):
            pass

    with rs.slots("browser", max=1), pytest.raises(runstate.TimeoutError, match="deadlock: "):
        asyncio.run(main())


# ------------------------------------------------------------------ tasks that are awaited


async def directly(work: Callable[[], Any]) -> Any:
    return await work()


async def gathered(work: Callable[[], Any]) -> Any:
    return (await asyncio.gather(work(), asyncio.sleep(0)))[0]


async def as_a_task(work: Callable[[], Any]) -> Any:
    return await asyncio.create_task(work())


async def shielded(work: Callable[[], Any]) -> Any:
    return await asyncio.shield(asyncio.create_task(work()))


async def waited_for(work: Callable[[], Any]) -> Any:
    return await asyncio.wait_for(asyncio.create_task(work()), 3_600)


async def waited_for_all(work: Callable[[], Any]) -> Any:
    (done,), _ = await asyncio.wait([asyncio.create_task(work())])
    return done.result()


async def in_a_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(lambda: asyncio.run(work()))


async def in_a_group(work: Callable[[], Any]) -> Any:
    try:
        async with asyncio.TaskGroup() as tasks:  # type: ignore[attr-defined]
            task = tasks.create_task(work())
    except Exception as group:
        raise group.exceptions[0] from None  # type: ignore[attr-defined]
    return task.result()


async def two_deep(work: Callable[[], Any]) -> Any:
    return await gathered(lambda: as_a_task(work))


async def later(work: Callable[[], Any]) -> Any:
    task = asyncio.create_task(work())
    await asyncio.sleep(0.3)
    return await task


WAYS = [directly, gathered, as_a_task, shielded, waited_for, waited_for_all, in_a_thread, two_deep, later]
WAYS += [in_a_group] if hasattr(asyncio, "TaskGroup") else []


@pytest.mark.parametrize("way", WAYS)
def test_a_circle_of_calls_is_refused_however_the_inner_one_is_awaited(rs: Runstate, way: Callable[..., Any]) -> None:
    started = [asyncio.Event(), asyncio.Event()]

    @rs.once(attempts=1)
    async def work(number: int) -> str:
        started[number].set()
        await started[1 - number].wait()
        return str(await way(lambda: work(1 - number)))

    async def main() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(work(0), work(1), return_exceptions=True), PATIENCE_S)

    both = asyncio.run(main())
    assert any("deadlock: " in str(error) for error in both), both


def test_a_thread_that_waits_for_the_result_of_what_it_has_submitted_is_inside_of_it(rs: Runstate) -> None:
    work = rs.slots("browser", lambda: None, timeout="1h")
    with ThreadPoolExecutor(1) as threads, rs.slots("browser", max=1):
        context = contextvars.copy_context()
        with pytest.raises(runstate.TimeoutError, match="deadlock: "):
            threads.submit(context.run, work).result()


def test_a_task_that_one_of_several_waits_for_is_not_awaited(rs: Runstate) -> None:
    async def use() -> str:
        async with rs.slots("browser", timeout="1m"):
            return "used"

    async def main() -> str:
        async with rs.slots("browser", max=1):
            task = asyncio.create_task(use())
            other = asyncio.create_task(asyncio.sleep(0.5))
            await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
        return await task

    assert asyncio.run(main()) == "used"

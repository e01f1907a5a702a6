"""Tasks and threads that were started inside of a hold and go on by themselves: they may wait for that hold."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

import runstate
from runstate import Runstate
from tests.e2e.support import eventually


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

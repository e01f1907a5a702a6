"""``context()``: where it is there, and where it is not."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Callable

import pytest

import runstate
from runstate.context import context, current, enter, inherited, leave, standing, within
from runstate.results import RunContext, RunInfo
from runstate.signals import Signal

CONTEXT = RunContext(RunInfo("r1", "run"), Signal(), 2, "k")


def test_there_is_none_outside() -> None:
    assert context() is None
    assert runstate.context() is None
    assert runstate.Runstate().context() is None
    assert (current(), within()) == (None, ())


def test_the_innermost_counts_and_the_outer_comes_back() -> None:
    inner = RunContext(CONTEXT.run, Signal(), 1, None)
    outside = enter(CONTEXT, 1)
    try:
        inside = enter(inner, 2)
        assert (context(), within()) == (inner, (1, 2))
        leave(inside)
        assert (context(), within()) == (CONTEXT, (1,))
    finally:
        leave(outside)
    assert context() is None


def test_tasks_take_it_along_and_threads_of_the_users_do_not() -> None:
    async def task() -> tuple[object, object]:
        return context(), await asyncio.to_thread(context)

    async def main() -> list[tuple[object, object]]:
        entered = enter(CONTEXT, 1)
        try:
            return await asyncio.gather(task(), asyncio.create_task(task()))
        finally:
            leave(entered)

    assert asyncio.run(main()) == [(CONTEXT, CONTEXT)] * 2
    seen: list[object] = []
    entered = enter(CONTEXT, 1)
    thread = threading.Thread(target=lambda: seen.append(context()))
    thread.start()
    thread.join()
    leave(entered)
    assert seen == [None]


Held = tuple[tuple[int, ...], tuple[int, ...]]


async def held_by_a_task(started: asyncio.Event, go_on: asyncio.Event) -> tuple[Held, Held]:
    """What a task holds outside and inside of a hold of its own."""
    started.set()
    await go_on.wait()
    before = within(), inherited()
    entered = enter(CONTEXT, 2)
    try:
        return before, (within(), inherited())
    finally:
        leave(entered)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_a_task_was_started_in_is_inherited_unless_it_is_awaited_there(is_awaited: bool) -> None:
    async def main() -> tuple[Held, Held]:
        entered = enter(CONTEXT, 1)
        started, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(held_by_a_task(started, go_on))
        task.add_done_callback(lambda _: ended.set())
        try:
            await started.wait()
            go_on.set()
            if not is_awaited:
                await ended.wait()
            return await task
        finally:
            leave(entered)

    expected = (((1,), ()), ((1, 2), ())) if is_awaited else (((), (1,)), ((2,), (1,)))
    assert asyncio.run(main()) == expected


def test_what_a_callback_refers_to_is_not_asked_for_attributes() -> None:
    class Proxy:
        """As of a request that is over: any use of it fails."""

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"{name} outside of a request")

    async def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
        entered = enter(CONTEXT, 1)
        started, go_on, ended, proxy = asyncio.Event(), asyncio.Event(), asyncio.Event(), Proxy()
        task = asyncio.create_task(held_by_a_task(started, go_on))
        task.add_done_callback(lambda _: ended.set() if proxy else None)
        task.add_done_callback(functools.partial(lambda proxy, _: None, proxy))
        try:
            await started.wait()
            go_on.set()
            await ended.wait()
            return (await task)[0]
        finally:
            leave(entered)

    assert asyncio.run(main()) == ((), (1,))


def test_how_a_task_stands_is_told_later_too() -> None:
    async def task() -> Callable[[], Held]:
        look = standing()
        assert look() == ((1,), ())
        return look

    async def main() -> None:
        entered = enter(CONTEXT, 1)
        try:
            look = await asyncio.create_task(task())
            assert look() == ((), (1,)), "nobody awaits a task that has ended"
        finally:
            leave(entered)

    asyncio.run(main())


def test_a_thread_that_runs_a_loop_holds_on_to_what_it_holds() -> None:
    async def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
        return within(), inherited()

    entered = enter(CONTEXT, 1)
    try:
        assert asyncio.run(main()) == ((1,), ())
    finally:
        leave(entered)


def test_a_process_that_was_forked_has_none() -> None:
    entered = enter(CONTEXT, 1)
    try:
        frame = current()
        assert frame is not None
        assert frame.pid == os.getpid()
        module = sys.modules["runstate.context"]  # as an attribute of the package it is the function
        other = module._frame.set(frame._replace(pid=frame.pid + 1))
        assert (context(), within()) == (None, ())
        module._frame.reset(other)
    finally:
        leave(entered)

"""``context()``: where it is there, and where it is not."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import runstate
from runstate.context import context, current, enter, inherited, leave, within
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


def test_what_a_task_was_started_in_is_inherited_and_what_it_holds_itself_is_not() -> None:
    Held = tuple[tuple[int, ...], tuple[int, ...]]

    async def task() -> tuple[Held, Held, Held]:
        before = within(), inherited()
        entered = enter(CONTEXT, 2)
        try:
            inside = within(), inherited()
            return before, inside, await asyncio.to_thread(lambda: (within(), inherited()))
        finally:
            leave(entered)

    async def main() -> tuple[Held, Held, Held]:
        entered = enter(CONTEXT, 1)
        try:
            return await asyncio.create_task(task())
        finally:
            leave(entered)

    assert asyncio.run(main()) == (((), (1,)), ((2,), (1,)), ((), (1, 2)))


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

"""Which tasks and threads cannot go on before the present one has ended: they await it.

asyncio does not tell before Python 3.14, so what is called when a task ends is followed: the tasks that await it, or
wait for it in ``gather``, ``wait``, ``wait_for``, ``shield``, a task group or ``to_thread``. A thread is seen to wait
in ``Future.result``. What is not understood here counts as not waiting.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from .signals import running_loop

FRAMES_MAX = 50  # on a thread's stack: that far down `Future.result` is looked for
ENDS_LOOP = "_run_until_complete_cb"


class Here(NamedTuple):
    """Where code runs. ``task``: the running one. ``work``: the future that an executor's thread works on."""

    thread: int
    task: weakref.ref[Any] | None
    work: Any


def flow() -> object:
    """The running task, else the thread."""
    asyncio = sys.modules.get("asyncio")
    task = None if asyncio is None or running_loop() is None else asyncio.current_task()
    return threading.get_ident() if task is None else weakref.ref(task)


def here() -> Here:
    now = flow()
    return Here(threading.get_ident(), now if isinstance(now, weakref.ref) else None, _work())


def waiting_for(place: Here, threads: set[int]) -> set[object]:
    """The flows that wait for the end of what runs there, directly or not; of threads only those named."""
    task = None if place.task is None else place.task()
    left = [place.work if task is None else task]
    found: set[object] = set()
    seen: list[Any] = []
    while left:
        future = left.pop()
        if future is None or future.done() or any(future is other for other in seen):
            continue
        seen.append(future)
        for callback in _callbacks(future):
            left += _completed_by(callback)
            waiter = getattr(callback, "__self__", None)
            if _is_task(waiter):
                found.add(weakref.ref(waiter))
                left.append(waiter)
            elif getattr(callback, "__name__", "") == ENDS_LOOP:
                left.append(place.work)  # the loop of an executor's thread ends with this task
    return found | {thread for thread in threads if any(_result_of(thread) is future for future in seen)}


def _callbacks(future: Any) -> list[Any]:
    entries = getattr(future, "_callbacks", None) or getattr(future, "_done_callbacks", None) or ()
    return [entry[0] if isinstance(entry, tuple) else entry for entry in entries]


def _completed_by(callback: Any) -> Iterator[Any]:
    """The futures that a callback completes, as far as it needs all it is called for. Any object of the user's may be
    among the values: none is asked for an attribute, for that may run its code."""
    values = [cell.cell_contents for cell in getattr(callback, "__closure__", None) or () if _is_full(cell)]
    if "FIRST_COMPLETED" in [value for value in values if isinstance(value, str)]:
        return
    values += getattr(callback, "args", ())  # of a partial
    owner = getattr(callback, "__self__", None)
    for value in (*values, owner):
        group = inspect.getattr_static(value, "_on_completed_fut", None)  # a task group's
        for future in (value, group):
            if hasattr(type(future), "add_done_callback") and not _is_task(future):
                yield future


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_task(value: Any) -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(value, asyncio.Task)


def _work() -> Any:
    """The future of the work that this thread of an executor does."""
    module = sys.modules.get("concurrent.futures.thread")
    if module is not None:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is module._WorkItem.run.__code__:
                return frame.f_locals["self"].future
            frame = frame.f_back  # type: ignore[assignment]
    return None


def _result_of(thread: int) -> Any:
    """The future whose result a thread waits for."""
    module = sys.modules.get("concurrent.futures")
    frame = None if module is None else sys._current_frames().get(thread)
    for _ in range(FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_code is module.Future.result.__code__:  # type: ignore[union-attr]
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None

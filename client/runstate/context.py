"""Where the code runs: the innermost wrapped call around it, and the tokens it holds.

The frame follows contextvars: a task takes it along, a thread that the user starts does not. A forked child holds
nothing of its parent's, so there it has no context.

What the code holds itself and what it has inherited are told apart. A task that was started inside of a hold may be
awaited there or go on by itself: it need not end before the hold does, so to wait for that hold is no deadlock.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple

from .signals import running_loop

if TYPE_CHECKING:
    from .results import RunContext


class Frame(NamedTuple):
    """``flow``: the task or thread that has entered it. ``within``: the tokens that this flow holds, outermost first;
    ``inherited``: those of the flows that started it."""

    pid: int
    context: RunContext
    flow: object
    within: tuple[int, ...]
    inherited: tuple[int, ...]


_frame: ContextVar[Frame | None] = ContextVar("runstate_frame", default=None)


def context() -> RunContext | None:
    """The context inside a wrapped function or a queue handler: run, signal, attempt, key. None elsewhere."""
    frame = current()
    return None if frame is None else frame.context


def current() -> Frame | None:
    """The frame of this process's code."""
    frame = _frame.get()
    return frame if frame is not None and frame.pid == os.getpid() else None


def within() -> tuple[int, ...]:
    """The tokens that this task or thread holds, for requests that may wait."""
    return _held()[0]


def inherited() -> tuple[int, ...]:
    """The tokens held where this task or thread was started, for requests that may wait."""
    return _held()[1]


def _held() -> tuple[tuple[int, ...], tuple[int, ...]]:
    frame = current()
    if frame is None:
        return (), ()
    if frame.flow in (threading.get_ident(), _flow()):  # a thread is blocked while a loop runs in it
        return frame.within, frame.inherited
    return (), (*frame.inherited, *frame.within)


def _flow() -> object:
    """The running task, else the thread."""
    task = None if running_loop() is None else sys.modules["asyncio"].current_task()
    return threading.get_ident() if task is None else weakref.ref(task)


def enter(context: RunContext, token: int | None = None) -> Token[Frame | None]:
    """Makes ``context`` the innermost; ``leave`` takes it back."""
    held, before = _held()
    return _frame.set(Frame(os.getpid(), context, _flow(), held if token is None else (*held, token), before))


def leave(entered: Token[Frame | None]) -> None:
    try:
        _frame.reset(entered)
    except ValueError:
        pass  # left in another context than it was entered in (a generator that was closed elsewhere)

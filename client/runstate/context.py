"""Where the code runs: the innermost wrapped call around it, and the tokens it holds.

The frame follows contextvars: a task takes it along, a thread that the user starts does not. A forked child holds
nothing of its parent's, so there it has no context.

What the code holds itself and what it has inherited are told apart. A task that was started inside of a hold may be
awaited there or go on by itself: then it need not end before the hold does, so to wait for that hold is no deadlock.
Whether it is awaited may change while it waits (see awaiting.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from . import awaiting

if TYPE_CHECKING:
    from .results import RunContext


Tokens: TypeAlias = "tuple[int, ...]"
FLOWS_MAX = (
    100  # that start each other inside of holds; what those before hold, who may have ended long ago, is left out
)
WITHIN_MAX = 256  # tokens around a call that are sent with it; of more the innermost count


class Frame(NamedTuple):
    """``flow``: the task or thread that has entered it. ``within``: the tokens that this flow holds, outermost first;
    ``around``: the flows that started it, outermost first, each with what it holds."""

    pid: int
    context: RunContext
    flow: object
    within: Tokens
    around: tuple[tuple[object, Tokens], ...]


_frame: ContextVar[Frame | None] = ContextVar("runstate_frame", default=None)


def context() -> RunContext | None:
    """The context inside a wrapped function or a queue handler: run, signal, attempt, key. None elsewhere."""
    frame = current()
    return None if frame is None else frame.context


def current() -> Frame | None:
    """The frame of this process's code."""
    frame = _frame.get()
    return frame if frame is not None and frame.pid == os.getpid() else None


def within() -> Tokens:
    """The tokens that cannot be given back before this task or thread goes on, for requests that may wait."""
    return standing()()[0]


def inherited() -> Tokens:
    """The other tokens held where this task or thread was started, for requests that may wait."""
    return standing()()[1]


def nesting() -> tuple[Tokens, Tokens]:
    """``within`` and ``inherited``."""
    return ((), ()) if _frame.get() is None else standing()()


def standing() -> Callable[[], tuple[Tokens, Tokens]]:
    """What tells, now and later, in any thread, how the code here stands: ``within`` and ``inherited``."""
    mine, around = _held()
    if not around:
        return lambda: (mine[-WITHIN_MAX:], ())
    place = awaiting.here()

    def look() -> tuple[Tokens, Tokens]:
        waiting = awaiting.waiting_for(place, {flow for flow, _ in around if isinstance(flow, int)})
        held = tuple(token for flow, tokens in around for token in tokens if flow in waiting)
        others = tuple(token for flow, tokens in around for token in tokens if flow not in waiting)
        return (*held, *mine)[-WITHIN_MAX:], others[-WITHIN_MAX:]

    return look


def _held() -> tuple[Tokens, tuple[tuple[object, Tokens], ...]]:
    """What this flow holds, and what those around it do."""
    frame = current()
    if frame is None:
        return (), ()
    if frame.flow in (threading.get_ident(), awaiting.flow()):  # a thread is blocked while a loop runs in it
        return frame.within, frame.around
    around = (*frame.around, (frame.flow, frame.within)) if frame.within else frame.around
    return (), around[-FLOWS_MAX:]


def enter(context: RunContext | None, token: int | None = None) -> Token[Frame | None] | None:
    """Makes ``context`` the innermost; ``leave`` takes it back. None: it stays as it is."""
    if context is None:
        return None
    held, around = ((), ()) if _frame.get() is None else _held()
    return _frame.set(Frame(os.getpid(), context, awaiting.flow(), held if token is None else (*held, token), around))


def leave(entered: Token[Frame | None] | None) -> None:
    if entered is None:
        return
    try:
        _frame.reset(entered)
    except ValueError:
        pass  # left in another context than it was entered in (a generator that was closed elsewhere)

"""Where the code runs: the innermost wrapped call around it, and the tokens it holds.

The frame follows contextvars: a task takes it along, a thread that the user starts does not. A forked child holds
nothing of its parent's, so there it has no context.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .results import RunContext


class Frame(NamedTuple):
    """``within``: the tokens that the code holds, outermost first."""

    pid: int
    context: RunContext
    within: tuple[int, ...]


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
    """The tokens held around here, for requests that may wait."""
    frame = current()
    return () if frame is None else frame.within


def enter(context: RunContext, token: int | None = None) -> Token[Frame | None]:
    """Makes ``context`` the innermost; ``leave`` takes it back."""
    held = within()
    return _frame.set(Frame(os.getpid(), context, held if token is None else (*held, token)))


def leave(entered: Token[Frame | None]) -> None:
    try:
        _frame.reset(entered)
    except ValueError:
        pass  # left in another context than it was entered in (a generator that was closed elsewhere)

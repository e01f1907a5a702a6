"""Tracebacks: of a user's exception they show the user's code; as text they go with a recorded failure."""

from __future__ import annotations

import traceback
from types import TracebackType

CHARACTERS_MAX = 8_000  # of a recorded traceback; the end says most, so more is kept of it
CHARACTERS_OF_START = 2_000
FRAMES_MAX = 30  # of each exception in it, the innermost
CUT = "\n  [...]\n"


def of_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this library that lead to the user's code. Those below it stay: they say
    where an error of ours was raised."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    last = max((number for number, frame in enumerate(frames) if not _is_ours(frame)), default=-1)
    found: TracebackType | None = None
    for number, frame in reversed(list(enumerate(frames))):
        if number > last or not _is_ours(frame):
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def text(error: BaseException) -> str | None:
    """The traceback with causes and notes, bounded, in what UTF-8 can carry. None where it cannot be written."""
    try:
        lines = traceback.format_exception(type(error), error, of_user(error.__traceback__), limit=-FRAMES_MAX)
    except Exception:  # what the exception says of itself is the user's own code
        return None
    whole = "".join(lines).encode("utf-8", "replace").decode()
    if len(whole) <= CHARACTERS_MAX:
        return whole
    kept = CHARACTERS_MAX - CHARACTERS_OF_START - len(CUT)
    return whole[:CHARACTERS_OF_START] + CUT + whole[-kept:]


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] == __name__.partition(".")[0]

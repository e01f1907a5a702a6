"""The daemon's log. Each record is one line, without control characters and without what users have stored or sent.

A line has its message and, of an exception, the type, our own words (``words_of``), and the places it came through:

    ... ERROR runstated.engine.faults: a request failed | ValueError at payloads.py:9 check < once.py:78 complete
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import logging.handlers
import os
import sqlite3
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from runstated import settings
from runstated.settings import Settings

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
MESSAGE_CHARS_MAX = 2_000  # of one line; whatever else is in a message, it cannot fill the log
PLACES_MAX = 12  # the innermost of a traceback
CAUSES_MAX = 4
# Line ends of every kind, the terminal's escapes, and what turns the direction of text.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS} | {0x0A: "\\n"}


class OneLine(logging.Formatter):
    """See the module."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f" | {told(record.exc_info[1])}"
        if len(message) > MESSAGE_CHARS_MAX:
            message = f"{message[:MESSAGE_CHARS_MAX]}... ({len(message)} characters)"
        record.message, record.asctime = message, self.formatTime(record)
        return self.formatMessage(record).translate(_ESCAPED)


def told(error: BaseException) -> str:
    """An exception, where it was raised and on whose behalf, and what it came from."""
    told: list[str] = []
    found: BaseException | None = error
    while found is not None and len(told) < CAUSES_MAX:
        words = words_of(found)
        places = [
            f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}" for frame, line in _frames(found)
        ]
        told.append(f"{type(found).__name__}{words and ': '}{words} at {' < '.join(places) or 'an unknown place'}")
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return ", after ".join(told)


def words_of(error: BaseException) -> str:
    """An exception's own text, where it cannot hold what users have stored or sent; else ""."""
    if isinstance(error, sqlite3.Error):
        return str(error).partition(" with text ")[0]  # of a text that is not UTF-8, which is then quoted
    is_ours = type(error).__module__.partition(".")[0] in ("runstated", "runstate")
    return str(error) if is_ours or isinstance(error, OSError | AssertionError) else ""


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    """The innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[: -PLACES_MAX - 1 : -1]


class Log(logging.handlers.RotatingFileHandler):
    """Its file is made anew where it was removed or moved away, if its directory was not."""

    def emit(self, record: logging.LogRecord) -> None:
        is_gone = self.stream is not None and os.fstat(self.stream.fileno()).st_ino != _inode(self.baseFilename)
        if is_gone and os.path.isdir(os.path.dirname(self.baseFilename)):
            self.close()  # the next record, which is this one, opens it
        super().emit(record)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def set_up(config: Settings, *, foreground: bool) -> None:
    """Everything that anybody in this process has to say goes to the log, in this form."""
    handler: logging.Handler
    if foreground:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = Log(
            config.log,
            maxBytes=settings.LOG_BYTES_MAX,
            backupCount=settings.LOG_FILES_KEPT,
            encoding="utf-8",
            errors="backslashreplace",
        )
        faulthandler.enable()  # stderr is the log, too
    handler.setFormatter(OneLine(FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # what cannot be logged (the disk is full) is dropped, not shown raw on stderr
    threading.excepthook = lambda args: log.error("a thread has failed", exc_info=args.exc_value)
    asyncio.get_running_loop().set_exception_handler(_on_loop_fault)


def _on_loop_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The first line only: the others show objects, and with them perhaps what a client has sent."""
    log.error("%s", str(context.get("message")).partition("\n")[0], exc_info=context.get("exception"))

"""What the first call needs is imported then, not with the package: nobody pays for it before. In a thread of its own.

An import takes tens of milliseconds, and Ctrl-C in the middle of it would be worse than a traceback: half-built msgspec
decoders crash the interpreter, and Python's import locks stay taken for the other threads. Signal handlers run in the
main thread only, so it waits, interruptibly, while another one imports.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType
from typing import TYPE_CHECKING, Any

from . import errors, threads

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_code: dict[str, tuple[ModuleSpec, CodeType | None]] = {}  # of serving.py, until it is run
_running = threading.Lock()
_done = threading.Event()
_starting = threading.RLock()  # so that a signal handler may call while the thread that it interrupts does
_is_started = False


def load() -> None:
    """Returns when everything is imported. Errors of an import come out of the next attempt, where it is needed.

    Raises UnavailableError in the teardown of the interpreter: no thread runs any more that could read an answer.
    """
    global _is_started
    if sys.is_finalizing():
        raise errors.UnavailableError("the interpreter is shutting down", code="UNAVAILABLE")
    if _done.is_set():
        return
    with _starting:
        if not _is_started:
            if threads.start(threading.Thread(target=_import, name="runstate-import", daemon=True)):
                _import()
            _is_started = True  # last: a second thread, after an interrupt, does no harm
    _done.wait()


def _import() -> None:
    try:
        from . import connection, failures, handler_threads, observe, recording, remote, results  # noqa: F401

        _keep_serving()
    finally:
        _done.set()


def _keep_serving() -> None:
    """Reads serving.py now, since the package may be replaced under a process that runs, but runs it later: it brings
    asyncio, which plain callers of ``once`` do not need."""
    import importlib.abc
    import importlib.util

    name = f"{__package__}.serving"
    spec = importlib.util.find_spec(name)
    if name not in sys.modules and spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader):
        _code[name] = (spec, spec.loader.get_code(name))


def serving() -> Any:
    """The module of that name."""
    import importlib.util

    name = f"{__package__}.serving"
    with _running:
        spec, code = _code.pop(name, (None, None))
        if name in sys.modules or spec is None or code is None:
            return importlib.import_module(name)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            exec(code, module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _forked() -> None:
    global _done, _is_started, _running, _starting
    _running, _starting = threading.Lock(), threading.RLock()
    if not _done.is_set():
        _done, _is_started = threading.Event(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

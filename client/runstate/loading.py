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

from . import errors

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_code: dict[str, tuple[ModuleSpec, CodeType | None]] = {}  # of serving.py, until it is run
_running = threading.Lock()
_done = threading.Event()
_started: dict[str, threading.Thread] = {}  # at most one, under "import"


def load() -> None:
    """Returns when everything is imported. Errors of an import come out of the next attempt, where it is needed.

    Raises UnavailableError in the teardown of the interpreter: no thread runs any more that could read an answer.
    """
    if sys.is_finalizing():
        raise errors.UnavailableError("the interpreter is shutting down", code="UNAVAILABLE")
    if _done.is_set():
        return
    thread = threading.Thread(target=_import, name="runstate-import", daemon=True)
    try:
        if _started.setdefault("import", thread) is thread:
            thread.start()
    except RuntimeError:  # no thread can be started any more: the interpreter is shutting down
        _import()
    except BaseException:
        _started.clear()  # it may run already; a second one beside it does no harm
        raise
    _done.wait()


def _import() -> None:
    try:
        from . import connection, failures, observe, recording, remote, results  # noqa: F401

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
    global _done, _running
    _running = threading.Lock()
    if not _done.is_set():
        _done = threading.Event()
        _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

"""Signals as a terminal gives them: for tests run by `nohup`, by a script with `&`, or by an agent that blocks some."""

from __future__ import annotations

import signal

INHERITED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD)


def reset() -> None:
    """From here on the programs that we start have every signal's default action, and none blocked.

    This process goes on to do nothing at what its parent ignored: a handler of Python's does not survive an exec, the
    ignoring would.
    """
    for number in INHERITED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _do_nothing(number: int, frame: object) -> None:
    """Ignores it."""

"""A client's run: found or created at the first call that needs it, remembered, and over for good when it has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import errors, units
from .signals import Signal
from .steps import Steps

if TYPE_CHECKING:
    from . import inbox, wire
    from .client import Core
    from .results import RunContext, RunInfo

CHILD_NAME = "(child run)"  # shown for a child run without a name


class Binding:
    """Which run a client means. ``signal`` is set when that run has ended."""

    def __init__(self, core: Core, name: str | None, deadline: units.Duration | None, parent: Binding | None) -> None:
        self._core = core
        self.name = name
        self.parent = parent
        self._deadline = deadline
        self.signal = Signal()
        self.over: errors.StoppedError | None = None
        self._info: RunInfo | None = None
        self._configured = core.configured  # when it was joined
        self._watch: inbox.RunWatch | None = None

    # ------------------------------------------------------------------ steps

    def joined(self) -> RunInfo | None:
        """The run, where it was joined. Raises StoppedError once it is over."""
        if self.over is not None:
            self.check()
        if self._configured != self._core.configured:
            self._info = None
        return self._info

    def join(self) -> Steps[RunInfo]:
        """The run, joined or created if need be. Raises StoppedError once it is over."""
        info = self.joined()
        if info is not None:
            return info
        from . import wire  # brings msgspec, which nobody needs before the first call

        deadline_ms = None
        if self._deadline is not None:
            deadline_ms = int(time.time() * 1000) + units.milliseconds(self._deadline, "deadline")
        request: wire.Request[wire.RunView]
        if self.parent is None:
            assert self.name is not None, "only a child run has no name"
            request = wire.RunsJoin(name=self.name, deadline_ms=deadline_ms)
        else:
            above = yield from self.parent.join()
            request = wire.RunsChild(parent=above.id, name=self.name, deadline_ms=deadline_ms)
        try:
            answer = yield request
        except errors.StoppedError as error:
            raise self.noted(error) from None
        view: wire.RunView = answer.reply
        if self._info is None:
            self._known(view)
            if deadline_ms not in (None, view.deadline_ms):
                _log_other_deadline(view, deadline_ms)
        elif self.parent is not None and view.run != self._info.id:
            # Another thread of this client was faster: one child run is enough.
            yield wire.RunsEnd(run=view.run, state="stopped")
        assert self._info is not None, "set above or by the faster thread"
        if view.state != "active" and self.over is not None:
            raise self._again(self.over.code, self.over.status)
        return self._info

    def known(self) -> Steps[RunInfo]:
        """The run, also when it is over; joined if need be."""
        if self._info is None:
            try:
                yield from self.join()
            except errors.StoppedError:
                if self._info is None:
                    raise
        return self.info

    def end(self, state: str) -> Steps[None]:
        """Stops or finishes the run; a repeat does nothing."""
        from . import wire

        if self.over is not None:
            return
        info = yield from self.known()
        if self.over is not None:
            return
        if self._watch is not None:
            self._core.connection().runs.forget(self._watch.run)
        answer = yield wire.RunsEnd(run=info.id, state="stopped" if state == "stopped" else "finished")
        name = self.name or info.id
        self.ended(_over(f"the run {name!r} is over: it was {answer.reply.state}", answer.reply.state))

    # ------------------------------------------------------------------ what is known

    @property
    def is_known(self) -> bool:
        """Whether the run was joined."""
        return self._info is not None

    @property
    def info(self) -> RunInfo:
        """The run that was joined."""
        assert self._info is not None, "joined before"
        return self._info

    def context(self) -> RunContext:
        """The context of code that is inside nothing but the run."""
        from .results import RunContext

        return RunContext(self.info, self.signal, 1, None)

    def check(self) -> None:
        """Raises StoppedError once the run is over, without a request."""
        if self.over is not None:
            raise self._again() from self.over

    def _again(self, code: str = "STOPPED", status: int = 0) -> errors.StoppedError:
        """An error of its own that says what ended the run; another client that it passes through is not over."""
        assert self.over is not None, "called when it is"
        again = errors.StoppedError(self.over.message, code=code, status=status)
        again.run = None if self._info is None else self._info.id
        return again

    def _told(self, error: errors.StoppedError) -> None:
        """The daemon says so. Not of a run that was joined before the last ``configure``: that one is of no account."""
        if self._configured == self._core.configured:
            self.ended(error)

    def ended(self, error: errors.StoppedError) -> None:
        """The run is over: for good, for this client."""
        if self.over is None:
            self.over = error
        self.signal._set(error)

    def cut_off(self, message: str) -> errors.StoppedError:
        """The error for work that ended with the run: why that ended, if it was told (it is, before the answer)."""
        if self.over is None:
            self.ended(_over(message, "stopped"))
        assert self.over is not None, "set above"
        return self._again(self.over.code, self.over.status)

    def noted(self, error: errors.StoppedError) -> errors.StoppedError:
        """Takes notice of an error that says that a run is over; the same error, to be raised."""
        if self._info is not None and error.run in (self._info.id, None):
            self.ended(error)
        return error

    def _known(self, view: wire.RunView) -> None:
        from . import inbox, results

        self._info = results.RunInfo(view.run, view.name or CHILD_NAME)
        self._configured = self._core.configured
        if view.state != "active":  # found by its id: it can be looked at
            self.ended(_over(f"the run {self._info.name!r} is over: it was {view.state}", view.state))
            return
        # A child run ends with the session that made it, so that session must come back by itself.
        self._watch = inbox.RunWatch(view.run, self._told, is_owned=self.parent is not None)
        self._core.connection().watch(self._watch)


def _over(message: str, state: str) -> errors.StoppedError:
    """The error for a run that has ended, with the code and status that the daemon gives it."""
    code = "DEADLINE_EXCEEDED" if state == "expired" else "SCOPE_CANCELLED"
    return errors.StoppedError(message, code=code, status=errors.STATUSES[code])


def _log_other_deadline(view: wire.RunView, wanted_ms: int | None) -> None:
    """Nobody gets an error for it: each process that names a deadline as a duration means another moment."""
    import logging

    from .observe import moment

    logging.getLogger(__name__).warning(
        "the run %s keeps its deadline of %s; the one given here, %s, is not set",
        view.name or view.run,
        moment(view.deadline_ms),
        moment(wanted_ms),
    )

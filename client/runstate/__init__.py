"""runstate: coordination between the processes of one machine.

    import runstate

    @runstate.once
    def research(company: str) -> dict: ...

The functions of this module are the methods of one default client; ``Runstate`` makes others.
"""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

from .client import Runstate
from .context import context
from .errors import (
    AuthError,
    BudgetExceededError,
    ConfigError,
    ConflictError,
    LeaseLostError,
    OnceFailedError,
    ResultTooLargeError,
    RunstateError,
    StoppedError,
    TaskFailedError,
    TimeoutError,
    UnavailableError,
    is_runstate_error,
    map_error,
)
from .queues import Job, Queue
from .signals import Signal
from .units import Amount, Duration, Per

if TYPE_CHECKING:
    from .results import RunContext, RunEvent, RunInfo, RunState, RunStatus, Waiting, WorkerStatus

_default = Runstate()

configure = _default.configure
run = _default.run
child = _default.child
run_id = _default.run_id
arun_id = _default.arun_id
once = _default.once
limit = _default.limit
take = _default.take
atake = _default.atake
slots = _default.slots
budget = _default.budget
queue = _default.queue
serve = _default.serve
aserve = _default.aserve
sleep = _default.sleep
asleep = _default.asleep
together = _default.together
atogether = _default.atogether
setup = _default.setup
asetup = _default.asetup
stop = _default.stop
astop = _default.astop
finish = _default.finish
afinish = _default.afinish
events = _default.events
aevents = _default.aevents
status = _default.status
astatus = _default.astatus

__all__ = [  # noqa: RUF022 (in the order of the hosted SDK)
    "__version__",
    "Runstate",
    "configure",
    "run",
    "child",
    "run_id",
    "arun_id",
    "context",
    "once",
    "limit",
    "take",
    "atake",
    "slots",
    "budget",
    "queue",
    "serve",
    "aserve",
    "sleep",
    "asleep",
    "together",
    "atogether",
    "setup",
    "asetup",
    "stop",
    "astop",
    "finish",
    "afinish",
    "events",
    "aevents",
    "status",
    "astatus",
    "RunContext",
    "RunInfo",
    "Signal",
    "Queue",
    "Job",
    "RunEvent",
    "RunStatus",
    "RunState",
    "WorkerStatus",
    "Waiting",
    "Amount",
    "Duration",
    "Per",
    "RunstateError",
    "ConfigError",
    "AuthError",
    "StoppedError",
    "TimeoutError",
    "OnceFailedError",
    "TaskFailedError",
    "BudgetExceededError",
    "ResultTooLargeError",
    "ConflictError",
    "LeaseLostError",
    "UnavailableError",
    "map_error",
    "is_runstate_error",
]


_RESULTS = frozenset(("RunContext", "RunEvent", "RunInfo", "RunState", "RunStatus", "Waiting", "WorkerStatus"))


def __getattr__(name: str) -> Any:
    """The result types, at first use: making seven dataclasses takes a quarter of the time of this import."""
    if name not in _RESULTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import results

    return getattr(results, name)

"""Every error the client raises, and the one table from a daemon's code to its class.

    Exception
     └─ RunstateError            anything from here; unknown codes keep their code in this class
         ├─ ConfigError          wrong options, amounts, durations, or arguments that cannot be hashed
         ├─ AuthError            the key is missing, wrong, or not allowed to do this
         ├─ StoppedError         the run was stopped, finished, or passed its deadline
         ├─ TimeoutError         a wait ran out; also the built-in TimeoutError (hence an OSError)
         ├─ OnceFailedError      a once function failed as often as it may
         ├─ TaskFailedError      a queue job failed, or a gather can no longer reach its need
         ├─ BudgetExceededError  a reservation does not fit in the budget
         ├─ ResultTooLargeError  an input or a result is over the size limit
         ├─ ConflictError        sizes in code differ from those of the existing resource
         ├─ LeaseLostError       the hold on the work was lost
         └─ UnavailableError     the daemon could not be reached

Names, constructors and codes are those of the hosted SDK, so that code written for it catches the same things here.

Rules for this file: an error survives pickle and copy with all its attributes, whatever its constructor looks like
(results cross process pools); `str(err)` is the message and nothing else; `retryable` follows from the code alone.
"""

from __future__ import annotations

import builtins
import re
from typing import Any, TypeGuard

STOPPED_TEXT = "the run is over (stopped, finished or past its deadline): call run(name) to join a new one"


class RunstateError(Exception):
    """The base of all errors of this library.

    `message` is the text, `code` a stable word to test for, `status` the HTTP status (0 when no server was asked),
    `request_id` the server's id for the request, `retry_after` the seconds to wait before another try.
    """

    message: str
    code: str
    status: int
    request_id: str | None
    retry_after: float | None
    run: str | None = None  # for the library: the run that is over, where that is the reason
    may_retry: bool = False  # for the library: the daemon says that the same request may be sent again

    def __init__(
        self,
        message: str,
        *,
        code: str = "ERROR",
        status: int = 0,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # One argument only, in every subclass: it keeps the repr plain, and OSError would read two as errno and text.
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        """Whether this is contention that passes by itself (busy, rate limited), told from the code."""
        return self.code in RETRYABLE

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which lacks keyword and extra arguments of the constructor.
        return _rebuild, (type(self), self.args), dict(self.__dict__)


class ConfigError(RunstateError):
    """A setting, option or argument is wrong; nothing was sent. The message says what to change."""

    def __init__(self, message: str, *, code: str = "CONFIG_ERROR", **kw: Any) -> None:
        super().__init__(message, code=code, **kw)


class AuthError(RunstateError):
    """The key is missing or wrong, lacks a permission, or its space or plan does not allow the call."""


class StoppedError(RunstateError):
    """The run was stopped or finished, or its deadline passed. A client that saw this keeps raising it."""

    def __init__(self, message: str = STOPPED_TEXT, *, code: str = "STOPPED", **kw: Any) -> None:
        super().__init__(message, code=code, **kw)


class TimeoutError(RunstateError, builtins.TimeoutError):
    """A wait ran out of time. `except TimeoutError` with the built-in class catches it too."""

    def __init__(self, message: str, *, code: str = "TIMEOUT", **kw: Any) -> None:
        super().__init__(message, code=code, **kw)


class FailedElsewhere(Exception):
    """Where a function has failed in another process, as text: the cause of the errors that tell of it."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]) if self.args else ""


class OnceFailedError(RunstateError):
    """A once function failed `attempts` times; the message is `<Type>: <message>` of the last failure.

    `traceback` is the last failure's as text, where it is known.
    """

    attempts: int
    traceback: str | None = None

    def __init__(self, message: str, attempts: int) -> None:
        super().__init__(message, code="ONCE_FAILED")
        self.attempts = attempts


class TaskFailedError(RunstateError):
    """A job failed for good (`job_id` is set), or a gather cannot reach its need (`job_id` is None).

    `reason` is the daemon's raw reason, the message where there is none. `traceback` is the handler's as text, where it
    is known.
    """

    job_id: str | None
    reason: str
    traceback: str | None = None

    def __init__(self, message: str, *, job_id: str | None = None, reason: str | None = None) -> None:
        super().__init__(message, code="TASK_FAILED")
        self.job_id = job_id
        self.reason = message if reason is None else reason


class BudgetExceededError(RunstateError):
    """A reservation does not fit in what is left of the budget; the function was not called."""


class ResultTooLargeError(RunstateError):
    """An input or result is larger than a payload may be. Store it elsewhere and pass a reference."""


class ConflictError(RunstateError):
    """The resource exists with other sizes, or a queue's attempts differ between processes."""


class LeaseLostError(RunstateError):
    """This process lost its hold on the work: its lease lapsed, or another process took the work over."""


class UnavailableError(RunstateError):
    """The daemon could not be reached, or could not write, after the usual retries."""


# The one table from code to class. What is not here stays a RunstateError with its code (NOT_FOUND, INTERNAL, ...).
# Nor are the codes of errors that only this library makes: nobody answers with them.
CLASSES: dict[str, type[RunstateError]] = {
    "UNAUTHENTICATED": AuthError,
    "FORBIDDEN": AuthError,
    "ENTITLEMENT_EXCEEDED": AuthError,
    "SPACE_SUSPENDED": AuthError,
    "OPERATIONS_EXHAUSTED": AuthError,
    "SCOPE_CANCELLED": StoppedError,
    "DEADLINE_EXCEEDED": StoppedError,
    "BARRIER_CANCELLED": StoppedError,
    "INSUFFICIENT_BUDGET": BudgetExceededError,
    "CONFLICT": ConflictError,
    "IDEMPOTENCY_CONFLICT": ConflictError,
    "LEASE_LOST": LeaseLostError,
    "STALE_CLAIM": LeaseLostError,
    "LEASE_RENEWALS_EXHAUSTED": LeaseLostError,
    "UNAVAILABLE": UnavailableError,
}

# The HTTP status that goes with a code in the hosted service; 0 for what no server has said.
STATUSES: dict[str, int] = {
    "VALIDATION_FAILED": 400,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "NOT_FOUND": 404,
    "CONFLICT": 409,
    "IDEMPOTENCY_CONFLICT": 409,
    "DEADLOCK": 409,
    "LEASE_LOST": 409,
    "SCOPE_CANCELLED": 409,
    "DEADLINE_EXCEEDED": 409,
    "INSUFFICIENT_BUDGET": 409,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}

# Contention: it passes by itself. UNAVAILABLE is not among them, because the outcome of such a call is unknown.
RETRYABLE = frozenset(
    {
        "RATE_LIMITED",
        "SERVICE_RATE_LIMITED",
        "CONCURRENCY_LIMITED",
        "CLAIM_HELD",
        "CAPACITY_UNAVAILABLE",
        "ALLOWANCE_EXHAUSTED",
        "ALLOWANCE_COOLDOWN",
        "BACKLOG_FULL",
    }
)

# The hosted API answers an oversized payload with the general code; only its text tells it apart.
_TOO_LARGE = re.compile(r"exceeds [0-9]+ bytes")


def failed_elsewhere(error: OnceFailedError | TaskFailedError, traceback: str | None) -> RunstateError:
    """The error, which says with its cause where the function has failed; ready to raise."""
    error.traceback = traceback
    if traceback is not None:
        error.__cause__ = FailedElsewhere(traceback)
    return error


def map_error(
    code: str, status: int, message: str, request_id: str | None = None, retry_after: float | None = None
) -> RunstateError:
    """The error for an answer of the daemon or of the HTTP API, ready to raise; it keeps all that was passed."""
    kind = CLASSES.get(code, RunstateError)
    if code == "VALIDATION_FAILED" and _TOO_LARGE.search(message):
        kind = ResultTooLargeError
    return kind(message, code=code, status=status, request_id=request_id, retry_after=retry_after)


def is_runstate_error(err: object) -> TypeGuard[RunstateError]:
    """Whether an exception came from this library."""
    return isinstance(err, RunstateError)


def _rebuild(kind: type[RunstateError], args: tuple[Any, ...]) -> RunstateError:
    """Makes an error for unpickling without its constructor; pickle then restores the attributes."""
    err = kind.__new__(kind, *args)
    err.args = args  # OSError leaves it to the constructor, which does not run here
    return err

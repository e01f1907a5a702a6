"""The error classes: constructors, the table from code to class, and that errors survive pickle and copy."""

import builtins
import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runstate import errors

CODES = [
    ("UNAUTHENTICATED", errors.AuthError),
    ("FORBIDDEN", errors.AuthError),
    ("ENTITLEMENT_EXCEEDED", errors.AuthError),
    ("SPACE_SUSPENDED", errors.AuthError),
    ("OPERATIONS_EXHAUSTED", errors.AuthError),
    ("SCOPE_CANCELLED", errors.StoppedError),
    ("DEADLINE_EXCEEDED", errors.StoppedError),
    ("BARRIER_CANCELLED", errors.StoppedError),
    ("STALE_CLAIM", errors.LeaseLostError),
    ("LEASE_RENEWALS_EXHAUSTED", errors.LeaseLostError),
    ("LEASE_LOST", errors.LeaseLostError),
    ("INSUFFICIENT_BUDGET", errors.BudgetExceededError),
    ("CONFLICT", errors.ConflictError),
    ("IDEMPOTENCY_CONFLICT", errors.ConflictError),
    ("UNAVAILABLE", errors.UnavailableError),
    ("NOT_FOUND", errors.RunstateError),
    ("DEADLOCK", errors.RunstateError),
    ("INTERNAL", errors.RunstateError),
    ("VALIDATION_FAILED", errors.RunstateError),
    ("STOPPED", errors.RunstateError),
    ("RESULT_TOO_LARGE", errors.RunstateError),
    ("CONFIG_ERROR", errors.RunstateError),
    ("TIMEOUT", errors.RunstateError),
    ("ONCE_FAILED", errors.RunstateError),
    ("TASK_FAILED", errors.RunstateError),
    ("RATE_LIMITED", errors.RunstateError),
    ("", errors.RunstateError),
]

RETRYABLE = {
    "RATE_LIMITED",
    "SERVICE_RATE_LIMITED",
    "CONCURRENCY_LIMITED",
    "CLAIM_HELD",
    "CAPACITY_UNAVAILABLE",
    "ALLOWANCE_EXHAUSTED",
    "ALLOWANCE_COOLDOWN",
    "BACKLOG_FULL",
}

AS_BASE = [
    errors.RunstateError,
    errors.AuthError,
    errors.BudgetExceededError,
    errors.ResultTooLargeError,
    errors.ConflictError,
    errors.LeaseLostError,
    errors.UnavailableError,
]
WITH_CODE = [
    (errors.ConfigError, "CONFIG_ERROR"),
    (errors.StoppedError, "STOPPED"),
    (errors.TimeoutError, "TIMEOUT"),
]
ONE_OF_EACH = [
    *[kind("text", code="X", status=409, request_id="r1", retry_after=1.5) for kind in AS_BASE],
    *[kind("text", code="X", status=409, request_id="r1", retry_after=1.5) for kind, _ in WITH_CODE],
    errors.StoppedError(),
    errors.OnceFailedError("ValueError: always", 2),
    errors.OnceFailedError(message="ValueError: always", attempts=2),
    errors.TaskFailedError("ValueError: bad", job_id="j1", reason="handler_error: ValueError: bad"),
    errors.TaskFailedError(message="cannot reach need"),
]


class Picky(errors.RunstateError):
    """What a user might derive: nothing in its constructor looks like ours."""

    def __init__(self, *, number: int) -> None:
        super().__init__(f"number {number}", code="PICKY")
        self.number = number


@pytest.mark.parametrize(("code", "kind"), CODES)
def test_a_code_maps_to_its_class_and_keeps_all_that_came_with_it(code, kind):
    err = errors.map_error(code, 409, "went wrong", "req_1", 2.5)
    assert type(err) is kind
    assert (err.code, err.status, err.message) == (code, 409, "went wrong")
    assert (err.request_id, err.retry_after) == ("req_1", 2.5)


def test_every_code_of_the_table_is_tested_here():
    assert set(errors.CLASSES) <= {code for code, _ in CODES}


@pytest.mark.parametrize("message", ["input exceeds 65536 bytes", "result exceeds 1 bytes, sorry"])
def test_a_failed_validation_that_tells_of_bytes_is_too_large(message):
    err = errors.map_error("VALIDATION_FAILED", 400, message)
    assert type(err) is errors.ResultTooLargeError
    assert err.code == "VALIDATION_FAILED"


@pytest.mark.parametrize(
    ("code", "message"), [("VALIDATION_FAILED", "exceeds many bytes"), ("NOT_FOUND", "exceeds 9 bytes")]
)
def test_other_failures_are_not_too_large(code, message):
    assert type(errors.map_error(code, 400, message)) is errors.RunstateError


@given(st.text() | st.sampled_from(sorted(RETRYABLE)))
def test_only_contention_is_retryable(code):
    assert errors.map_error(code, 429, "x").retryable is (code in RETRYABLE)


def test_an_unavailable_daemon_is_not_retryable():
    assert errors.map_error("UNAVAILABLE", 503, "gone").retryable is False


@pytest.mark.parametrize("kind", AS_BASE)
def test_defaults_of_the_classes_built_like_the_base(kind):
    err = kind("text")
    assert (err.code, err.status, err.request_id, err.retry_after, err.retryable) == ("ERROR", 0, None, None, False)


@pytest.mark.parametrize(("kind", "code"), WITH_CODE)
def test_classes_with_a_code_of_their_own_use_it_unless_another_is_given(kind, code):
    assert kind("text").code == code
    assert kind("text", code="OTHER", status=409, request_id="r", retry_after=1).code == "OTHER"


def test_a_stopped_error_has_a_text_of_its_own():
    assert "run" in str(errors.StoppedError())


def test_a_once_failure_tells_its_attempts():
    err = errors.OnceFailedError("ValueError: always", 2)
    assert (err.code, err.attempts, str(err)) == ("ONCE_FAILED", 2, "ValueError: always")


def test_a_task_failure_uses_its_message_as_the_reason_when_none_is_given():
    assert errors.TaskFailedError("m").reason == "m"
    assert errors.TaskFailedError("m").job_id is None
    err = errors.TaskFailedError("m", job_id="j", reason="")
    assert (err.code, err.job_id, err.reason) == ("TASK_FAILED", "j", "")


@pytest.mark.parametrize("err", ONE_OF_EACH, ids=repr)
def test_the_text_is_the_message_and_the_repr_is_plain(err):
    assert str(err) == err.message
    assert repr(err) == f"{type(err).__name__}({err.message!r})"


def test_the_builtin_timeout_catches_ours_and_the_text_stays():
    err = errors.TimeoutError("waited too long")
    assert isinstance(err, builtins.TimeoutError) and isinstance(err, OSError)
    assert isinstance(err, errors.RunstateError)
    assert str(err) == "waited too long"
    assert err.errno is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("err", [*ONE_OF_EACH, Picky(number=3)], ids=repr)
def test_every_error_survives_pickling(err, protocol):
    assert_same(pickle.loads(pickle.dumps(err, protocol)), err)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("err", [*ONE_OF_EACH, Picky(number=3)], ids=repr)
def test_every_error_survives_copying(err, clone):
    assert_same(clone(err), err)


def test_attributes_added_later_survive_too():
    err = errors.ConfigError("x")
    err.hint = "try y"
    assert pickle.loads(pickle.dumps(err)).hint == "try y"


def test_the_cause_is_set_by_raise_from_and_by_nothing_else():
    assert errors.OnceFailedError("x", 1).__cause__ is None
    cause = ValueError("inner")
    with pytest.raises(errors.OnceFailedError) as caught:
        raise errors.OnceFailedError("x", 1) from cause
    assert caught.value.__cause__ is cause
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("err", ONE_OF_EACH, ids=repr)
def test_our_errors_are_known_as_ours(err):
    assert errors.is_runstate_error(err) is True


@pytest.mark.parametrize("err", [ValueError("x"), TimeoutError("x"), None, "text", errors.ConfigError])
def test_nothing_else_is_known_as_ours(err):
    assert errors.is_runstate_error(err) is False


def assert_same(clone, err):
    assert clone is not err
    assert type(clone) is type(err)
    assert vars(clone) == vars(err)
    assert clone.args == err.args
    assert (str(clone), repr(clone), clone.retryable) == (str(err), repr(err), err.retryable)

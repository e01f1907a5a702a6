"""The surface of the SDK, point by point, as a suite for the hosted SDK would test it: names, signatures, defaults,
types, texts, and what each verb does in one process against a real daemon."""

from __future__ import annotations

import asyncio
import builtins
import copy
import dataclasses
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import runstate
from runstate import Runstate, wire
from tests.e2e.inside import Make, money, pool, serving, used
from tests.e2e.support import Daemon, eventually

# ---------------------------------------------------------------------------------------------------- signatures

SIGNATURES = {
    "Runstate": "*, api_key=None, space_id=None, base_url=None, run=None, worker=None, timeout=None, retries=None",
    "configure": "**options",
    "run": "name, *, deadline=None",
    "child": "name=None, *, deadline=None",
    "run_id": "",
    "stop": "",
    "finish": "",
    "context": "",
    "once": "fn=None, *, name=None, key=None, attempts=None, lease=None",
    "limit": "name, fn=None, *, max=None, per=None, units=None, timeout=None",
    "take": "name, *, units=None, timeout=None",
    "slots": "name, fn=None, *, max=None, units=None, timeout=None, lease=None",
    "budget": "name, fn=None, *, reserve=None, cost=None, limit=None, currency=None, scale=None",
    "queue": "name, handler=None, *, slots=None, limit=None, budget=None, attempts=None, lease=None, concurrency=None,"
    " key=None",
    "serve": "*, concurrency=None, queues=None, signal=None",
    "sleep": "name, duration=None, *, until=None",
    "together": "name, count, *, timeout=None",
    "setup": "*, limits=None, slots=None, budgets=None",
    "events": "*, types=None, signal=None",
    "status": "",
}
WITH_ASYNC_FORM = ["run_id", "stop", "finish", "take", "serve", "sleep", "together", "setup", "events", "status"]
OF_A_QUEUE = {
    "__call__": "input",
    "acall": "input",
    "send": "input",
    "asend": "input",
    "gather": "inputs, *, need='all', accept=None, timeout=None",
    "agather": "inputs, *, need='all', accept=None, timeout=None",
}
OF_A_JOB = {"result": "timeout=None", "aresult": "timeout=None"}


def plain(function: Any) -> str:
    """A signature without types and without self."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_and_the_defaults_are_those_of_the_hosted_sdk(name: str) -> None:
    assert plain(getattr(runstate, name)) == SIGNATURES[name]
    if name != "Runstate":
        assert plain(getattr(Runstate, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", WITH_ASYNC_FORM)
def test_the_async_form_has_the_same_signature(name: str) -> None:
    other = getattr(Runstate, f"a{name}")
    assert plain(other) == plain(getattr(runstate, f"a{name}")) == SIGNATURES[name]
    assert inspect.iscoroutinefunction(other) is (name != "events")


@pytest.mark.parametrize(("kind", "methods"), [(runstate.Queue, OF_A_QUEUE), (runstate.Job, OF_A_JOB)])
def test_queues_and_jobs_have_the_methods_of_the_hosted_sdk(kind: type, methods: dict[str, str]) -> None:
    assert {name: plain(getattr(kind, name)) for name in methods} == methods
    properties = {name for name in vars(kind) if isinstance(vars(kind)[name], property)}
    assert properties == ({"name", "servable"} if kind is runstate.Queue else {"id"})


def test_map_error_and_is_runstate_error_have_the_signatures_of_the_hosted_sdk() -> None:
    assert plain(runstate.map_error) == "code, status, message, request_id=None, retry_after=None"
    assert plain(runstate.is_runstate_error) == "err"


def test_every_wrapping_verb_takes_its_function_as_an_argument_too(rs: Runstate) -> None:
    def work(value: int = 1) -> int:
        return value

    assert rs.once(work)(1) == rs.once(work, name="other")(1) == 1
    assert rs.limit("l", work, max=9, per="hour")() == 1
    assert rs.slots("s", work, max=1)() == 1
    assert rs.budget("b", work, reserve=1, limit=5)() == 1
    assert rs.queue("q", work).servable
    for wrapped in (rs.once(work), rs.limit("l", work), rs.slots("s", work), rs.budget("b", work, reserve=1)):
        assert (wrapped.__name__, wrapped.__wrapped__, inspect.signature(wrapped)) == (
            "work",
            work,
            inspect.signature(work),
        )
        assert not inspect.iscoroutinefunction(wrapped)


def test_an_async_function_stays_a_coroutine_function(rs: Runstate) -> None:
    async def work() -> int:
        return 1

    wrapped = [rs.once(work), rs.limit("l", max=9, per="hour")(work), rs.slots("s", max=1)(work)]
    wrapped.append(rs.budget("b", reserve=1, limit=5)(work))
    assert all(inspect.iscoroutinefunction(each) for each in wrapped)

    async def main() -> list[int]:
        return [await each() for each in wrapped]

    assert asyncio.run(main()) == [1, 1, 1, 1]


FIELDS = {
    "RunInfo": "id name",
    "RunContext": "run signal attempt key",
    "RunEvent": "id type at data",
    "RunState": "id name state deadline",
    "WorkerStatus": "worker holding lease_expires_at",
    "Waiting": "kind name units",
    "RunStatus": "run workers waiting",
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_result_types_are_frozen_dataclasses_with_these_fields_first(name: str) -> None:
    kind = getattr(runstate, name)
    fields = [field.name for field in dataclasses.fields(kind)]
    assert fields[: len(FIELDS[name].split())] == FIELDS[name].split()
    assert kind.__dataclass_params__.frozen


def test_an_event_without_a_payload_has_an_empty_one() -> None:
    at = datetime.now(timezone.utc)
    assert runstate.RunEvent("1", "x", at).data == runstate.RunEvent("1", "x", at, None).data == {}  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- errors

ONE_OF_EACH = [
    runstate.RunstateError("text"),
    runstate.ConfigError("text"),
    runstate.AuthError("text", code="FORBIDDEN", status=403),
    runstate.StoppedError(),
    runstate.TimeoutError("text"),
    runstate.OnceFailedError("text", 3),
    runstate.TaskFailedError("text", job_id="j1", reason="handler_error: text"),
    runstate.BudgetExceededError("text", code="INSUFFICIENT_BUDGET", status=409, request_id="r", retry_after=2.0),
    runstate.ResultTooLargeError("text"),
    runstate.ConflictError("text"),
    runstate.LeaseLostError("text"),
    runstate.UnavailableError("text"),
]
DEFAULT_CODES = {
    "RunstateError": "ERROR",
    "ConfigError": "CONFIG_ERROR",
    "StoppedError": "STOPPED",
    "TimeoutError": "TIMEOUT",
    "OnceFailedError": "ONCE_FAILED",
    "TaskFailedError": "TASK_FAILED",
}


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_has_its_attributes_and_survives_pickle_and_copy(error: runstate.RunstateError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        for name in ("message", "code", "status", "request_id", "retry_after", "retryable"):
            assert getattr(other, name) == getattr(error, name)
        assert vars(other) == vars(error)
    assert str(error) == error.message
    assert repr(error) == f"{type(error).__name__}({error.message!r})"
    assert runstate.is_runstate_error(error) and not runstate.is_runstate_error(ValueError())
    name = type(error).__name__
    if name in DEFAULT_CODES:
        assert (error.code, error.status, error.request_id, error.retry_after) == (DEFAULT_CODES[name], 0, None, None)


def test_texts_that_are_fixed() -> None:
    error = runstate.TimeoutError("waited too long")
    assert (str(error), error.code) == ("waited too long", "TIMEOUT")
    assert isinstance(error, builtins.TimeoutError) and isinstance(error, OSError)
    failed = runstate.TaskFailedError("m")
    assert (failed.job_id, failed.reason) == (None, "m")
    with pytest.raises(runstate.ConfigError):
        Runstate().configure(apiKey="x")


def test_an_error_of_the_daemon_keeps_its_code_and_status(rs: Runstate) -> None:
    rs.setup(slots={"s": {"max": 1}})
    with pytest.raises(runstate.ConflictError) as conflict:
        rs.setup(slots={"s": {"max": 2}})
    assert (conflict.value.code, conflict.value.status, conflict.value.retryable) == ("CONFLICT", 409, False)
    with pytest.raises(runstate.RunstateError) as absent:
        rs.take("nothing")
    assert (type(absent.value), absent.value.code, absent.value.status) == (runstate.RunstateError, "NOT_FOUND", 404)


# ---------------------------------------------------------------------------------------------------- configuration


def test_nothing_is_read_before_the_first_call() -> None:
    client = Runstate(base_url="nonsense", run="x" * 300, timeout="never", retries=-1)
    assert repr(client) == f"<Runstate run={'x' * 300}>"
    for call in (client.run_id, client.status, lambda: client.take("x"), lambda: client.setup(slots={"a": {}})):
        with pytest.raises(runstate.ConfigError):
            call()


@pytest.mark.parametrize("name", ["apiKey", "spaceId", "url", "handler"])
def test_configure_refuses_unknown_names(name: str) -> None:
    with pytest.raises(runstate.ConfigError, match=name):
        Runstate().configure(**{name: "x"})


def test_configure_merges_joins_anew_and_changes_the_session(rs: Runstate) -> None:
    first = rs.run_id()
    rs.configure(run=None)
    assert rs.run_id() == first, "None leaves it; the run is joined again"
    rs.configure(run="another")
    assert rs.run_id() != first
    rs.configure(worker="me")
    assert rs.status().run.name == "another"


def test_configure_does_not_revive_a_stopped_client(rs: Runstate) -> None:
    rs.stop()
    rs.configure(run="another")
    with pytest.raises(runstate.StoppedError):
        rs.take("x")
    assert rs.run("another").run_id()


def test_the_environment_is_trimmed_and_code_goes_first(
    shared: Daemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNSTATE_RUN", "  from-environment ")
    assert make().status().run.name == "from-environment"
    assert make(run="from-code").status().run.name == "from-code"
    monkeypatch.setenv("RUNSTATE_RUN", "   ")
    assert make().status().run.name == "default"
    monkeypatch.setenv("RUNSTATE_BASE_URL", f" unix://{shared.socket}/ ")
    assert Runstate(space_id="environment").run_id()


def test_how_things_are_shown(rs: Runstate) -> None:
    async def handler(input: int) -> int:
        return input

    queue = rs.queue("review")
    assert repr(queue) == "<Queue review (producer-only)>"
    assert repr(rs.queue("review", handler)) == "<Queue review (handler)>"
    rs.queue("jobs", attempts=2)
    job = rs.queue("jobs", attempts=2).send(1)
    assert repr(job) == f"<Job {job.id} in jobs>"
    assert repr(rs) == "<Runstate run=(default run)>"
    assert repr(rs.run("nightly")) == "<Runstate run=nightly>"
    assert repr(rs.child()) == "<Runstate run=(child run)>"


# ---------------------------------------------------------------------------------------------------- wrong options

WRONG = [
    lambda rs: rs.limit("l", max=1),
    lambda rs: rs.limit("l", per="minute"),
    lambda rs: rs.limit("l", max=0, per="minute"),
    lambda rs: rs.limit("l", max=True, per="minute"),
    lambda rs: rs.limit("l", max=1.0, per="minute"),
    lambda rs: rs.limit("l", max=1, per="week"),
    lambda rs: rs.limit("l", max=1, per=0.5),
    lambda rs: rs.limit("l", max=1, per=86401),
    lambda rs: rs.limit("l", units=0),
    lambda rs: rs.limit("", max=1, per=1),
    lambda rs: rs.limit("x" * 257, max=1, per=1),
    lambda rs: rs.limit(7),
    lambda rs: rs.limit("l", 7),
    lambda rs: rs.take("l", units=0),
    lambda rs: rs.take("l", timeout="soon"),
    lambda rs: rs.take("l", timeout=-1),
    lambda rs: rs.take(None),
    lambda rs: rs.slots("s", max=0),
    lambda rs: rs.slots("s", units=True),
    lambda rs: rs.slots("s", lease="long"),
    lambda rs: rs.slots("s", 7),
    lambda rs: rs.slots("s")(None),
    lambda rs: rs.budget("b"),
    lambda rs: rs.budget("b", reserve="-1"),
    lambda rs: rs.budget("b", reserve=float("nan")),
    lambda rs: rs.budget("b", reserve=True),
    lambda rs: rs.budget("b", reserve=1, cost=3),
    lambda rs: rs.budget("b", reserve=1, currency="USD"),
    lambda rs: rs.budget("b", reserve=1, scale=2),
    lambda rs: rs.budget("b", reserve=1, limit=0),
    lambda rs: rs.budget("b", reserve=1, limit="1.555"),
    lambda rs: rs.budget("b", reserve=1, limit=1, scale=10),
    lambda rs: rs.budget("b", reserve=1, limit=1, currency="EURO"),
    lambda rs: rs.budget("b", 7, reserve=1),
    lambda rs: rs.budget("b", lambda: 1, reserve=0, limit=5)(),
    lambda rs: rs.budget("b", lambda: 1, reserve="0.001", limit=5)(),
    lambda rs: rs.queue("q", slots=7),
    lambda rs: rs.queue("q", slots={"units": 1}),
    lambda rs: rs.queue("q", limit={"name": "l", "units": 0}),
    lambda rs: rs.queue("q", budget="b"),
    lambda rs: rs.queue("q", budget={"name": "b"}),
    lambda rs: rs.queue("q", budget={"reserve": 1}),
    lambda rs: rs.queue("q", budget={"name": "b", "reserve": 1, "cost": 7}),
    lambda rs: rs.queue("q", attempts=0),
    lambda rs: rs.queue("q", attempts=101),
    lambda rs: rs.queue("q", concurrency=0),
    lambda rs: rs.queue("q", key="k"),
    lambda rs: rs.sleep("n"),
    lambda rs: rs.sleep("n", 1, until=datetime.now()),
    lambda rs: rs.sleep("n", "-1s"),
    lambda rs: rs.sleep("n", until="tomorrow"),
    lambda rs: rs.sleep("", 1),
    lambda rs: rs.together("n", 0),
    lambda rs: rs.together("n", True),
    lambda rs: rs.together("n", 1.0),
    lambda rs: rs.together("n", 2, timeout="x"),
    lambda rs: rs.setup(limits={"l": {"max": 1}}),
    lambda rs: rs.setup(limits={"l": {"max": 1, "per": "minute", "units": 1}}),
    lambda rs: rs.setup(slots={"": {"max": 1}}),
    lambda rs: rs.setup(slots={"s": 5}),
    lambda rs: rs.setup(budgets={"b": {"currency": "USD"}}),
    lambda rs: rs.setup(budgets=[("b", {})]),
    lambda rs: rs.run(""),
    lambda rs: rs.child("x" * 257),
    lambda rs: rs.run("r", deadline="1h30m").run_id(),
    lambda rs: rs.child(deadline="10S").run_id(),
    lambda rs: next(rs.events(types="task.failed")),
    lambda rs: next(rs.events(signal=7)),
    lambda rs: rs.queue("q", attempts=1).gather([1, 2], need=3),
    lambda rs: rs.queue("q", attempts=1).gather([1, 2], need=0),
    lambda rs: rs.queue("q", attempts=1).gather([1, 2], need=True),
    lambda rs: rs.queue("q", attempts=1).gather([1, 2], need="most"),
    lambda rs: rs.queue("q", attempts=1).gather(range(101)),
    lambda rs: rs.queue("q", attempts=1).send({1, 2}),
]


@pytest.mark.parametrize("call", WRONG, ids=lambda call: inspect.getsource(call).strip()[11:-1])
def test_what_cannot_be_meant_is_a_config_error(rs: Runstate, call: Callable[[Runstate], Any]) -> None:
    with pytest.raises(runstate.ConfigError):
        call(rs)


def test_deadlines_and_timeouts_are_parsed_at_first_use_and_other_options_at_once(rs: Runstate) -> None:
    child = rs.child(deadline="nonsense")
    wrapped = rs.limit("l", lambda: 1, max=1, per="hour", timeout="nonsense")
    pool = rs.slots("s", max=1, timeout="nonsense")
    for call in (child.run_id, wrapped, pool.__enter__):
        with pytest.raises(runstate.ConfigError):
            call()


# ---------------------------------------------------------------------------------------------------- context

WORK_KEY = r"work:[0-9a-f]{32}"


def seen() -> tuple[str | None, int, str] | None:
    ctx = runstate.context()
    return None if ctx is None else (ctx.key and ctx.key.partition(":")[0], ctx.attempt, ctx.run.name)


def test_every_wrapper_around_nothing_shows_the_run(rs: Runstate) -> None:
    rs.setup(limits={"l": {"max": 99, "per": "hour"}}, slots={"s": {"max": 9}}, budgets={"b": {"limit": 9}})
    for wrap in (rs.limit("l"), rs.slots("s"), rs.budget("b", reserve=1)):
        assert wrap(seen)() == (None, 1, "default")
        assert seen() is None

    async def aseen() -> Any:
        return seen()

    for wrap in (rs.limit("l"), rs.slots("s"), rs.budget("b", reserve=1)):
        assert asyncio.run(wrap(aseen)()) == (None, 1, "default")


def test_limit_slots_and_budget_show_the_enclosing_key(rs: Runstate) -> None:
    rs.setup(limits={"l": {"max": 99, "per": "hour"}}, slots={"s": {"max": 9}}, budgets={"b": {"limit": 9}})
    inner = rs.limit("l")(rs.slots("s")(rs.budget("b", reserve=1)(seen)))

    @rs.once(name="work")
    def work(number: int) -> Any:
        outer = runstate.context()
        assert outer is not None and outer.key is not None
        assert re.fullmatch(WORK_KEY, outer.key)
        assert (outer.attempt, outer.signal.is_set(), outer.run.id) == (1, False, rs.run_id())
        found = [wrap(runstate.context)() for wrap in (rs.limit("l"), rs.budget("b", reserve=1), rs.slots("s"))]
        assert found[0] is outer and found[1] is outer
        assert found[2] is not outer and (found[2].key, found[2].run) == (outer.key, outer.run)
        assert runstate.context() is outer
        return [inner(), seen()]

    assert work(1) == [["work", 1, "default"]] * 2
    assert runstate.context() is None


def test_the_innermost_holder_counts(rs: Runstate) -> None:
    rs.setup(slots={"s": {"max": 9}})

    @rs.once(name="inner")
    def inner() -> Any:
        return seen()

    @rs.once(name="outer")
    def outer() -> Any:
        with rs.slots("s"):
            assert seen() == ("outer", 1, "default")
            return [inner(), seen()]

    assert outer() == [["inner", 1, "default"], ["outer", 1, "default"]]


def test_a_job_shows_its_key_inside_of_other_wrappers(rs: Runstate) -> None:
    rs.setup(limits={"l": {"max": 99, "per": "hour"}}, slots={"s": {"max": 9}})
    inner = rs.limit("l")(rs.slots("s")(seen))

    @rs.queue("review")
    def review(input: int) -> Any:
        ctx = runstate.context()
        assert ctx is not None and ctx.key is not None and re.fullmatch(r"review:[0-9a-f]{32}", ctx.key)
        return [seen(), inner()]

    @rs.queue("areview")
    async def areview(input: int) -> Any:
        async with rs.slots("s"):
            return [seen()]

    with serving(rs):
        assert review(1) == [["review", 1, "default"]] * 2
        assert asyncio.run(areview(1)) == [["areview", 1, "default"]]


# ---------------------------------------------------------------------------------------------------- setup


def test_setup_creates_verifies_and_spends_nothing(rs: Runstate, make: Make) -> None:
    everything: dict[str, Any] = {
        "limits": {"search-api": {"max": 60, "per": "minute"}},
        "slots": {"browser": {"max": 5}},
        "budgets": {"model-usd": {"limit": 50, "currency": "USD", "scale": 2}},
    }
    rs.setup(**everything)
    rs.setup(**everything)
    asyncio.run(make().asetup(**everything))
    rs.setup(limits={"search-api": {}}, slots={"browser": {}}, budgets={"model-usd": {}})
    rs.setup()
    assert (used(make, "search-api"), pool(make, "browser").used, money(make, "model-usd")) == (0, 0, (0, 0))
    for other in (
        {"limits": {"search-api": {"max": 61, "per": "minute"}}},
        {"slots": {"browser": {"max": 6}}},
        {"budgets": {"model-usd": {"limit": "50.01"}}},
    ):
        with pytest.raises(runstate.ConflictError):
            rs.setup(**other)


def test_setup_validates_everything_before_it_sends_anything(rs: Runstate) -> None:
    with pytest.raises(runstate.ConfigError):
        rs.setup(slots={"new": {"max": 1}}, budgets={"b": {"limit": -1}})
    with pytest.raises(runstate.RunstateError) as absent:
        rs.setup(slots={"new": {}})
    assert absent.value.code == "NOT_FOUND"


def test_setup_does_not_join_the_run(make: Make, shared: Daemon) -> None:
    client = make(space_id="setup-only")
    client.setup(slots={"s": {"max": 1}})
    looked = client._connection().call(wire.StatusGet()).reply
    assert looked.runs == ()


# ---------------------------------------------------------------------------------------------------- runs, status


def test_runs_end_and_clients_with_them(rs: Runstate, make: Make) -> None:
    first = rs.run_id()
    assert (rs.status().run.state, rs.status().run.id, rs.status().run.deadline) == ("running", first, None)
    assert make().run_id() == first
    rs.stop()
    rs.stop()
    rs.finish()
    assert (rs.status().run.state, rs.status().run.id) == ("stopped", first)
    wrapped = [rs.once(seen), rs.slots("s", seen, max=1), rs.limit("l", seen, max=1, per=1)]
    wrapped += [rs.budget("b", seen, reserve=1, limit=1), lambda: rs.take("l"), lambda: rs.sleep("n", 1), rs.run_id]
    wrapped += [lambda: rs.together("n", 1), lambda: rs.queue("q").send(1), lambda: rs.queue("q").gather([1])]
    wrapped += [rs.child().run_id]
    for call in wrapped:
        with pytest.raises(runstate.StoppedError) as error:
            call()
        assert (error.value.code, error.value.status) == ("STOPPED", 0)
        assert error.value.__cause__ is not None
    new = make()
    assert new.status().run.state == "running" and new.run_id() != first
    new.finish()
    assert new.status().run.state == "finished"


def test_the_first_error_of_a_stopped_run_is_the_daemons_and_later_ones_are_ours(rs: Runstate, make: Make) -> None:
    rs.setup(slots={"s": {"max": 1}})
    held = make(run="other")
    with held.slots("s"):
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                with rs.slots("s"):
                    pass
            except runstate.StoppedError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: pool(make, "s").waiting == 1)
        make().stop()
        thread.join()
    (error,) = raised
    assert isinstance(error, runstate.StoppedError) and (error.code, error.status) == ("SCOPE_CANCELLED", 409)
    with pytest.raises(runstate.StoppedError) as later:
        rs.run_id()
    assert (later.value.code, str(later.value)) == ("STOPPED", str(error))
    cause = later.value.__cause__
    assert isinstance(cause, runstate.StoppedError) and cause.code == "SCOPE_CANCELLED"


def test_children_are_new_runs_that_end_with_their_parent(rs: Runstate) -> None:
    child, other = rs.child("batch"), rs.child("batch")
    assert len({rs.run_id(), child.run_id(), other.run_id()}) == 3
    assert child.run_id() == child.run_id()
    grandchild = child.child()
    assert grandchild.status().run.name == "(child run)" and child.status().run.name == "batch"
    child.stop()
    assert (grandchild.status().run.state, child.status().run.state) == ("stopped", "stopped")
    assert rs.status().run.state == other.status().run.state == "running"
    rs.finish()
    assert (rs.status().run.state, other.status().run.state) == ("finished", "stopped")


@pytest.mark.parametrize("deadline", [3600, 3600.0, "1h", " 60 m "])
def test_deadlines_are_numbers_and_strings(rs: Runstate, deadline: Any) -> None:
    for client in (rs.run("nightly", deadline=deadline), rs.child(deadline=deadline)):
        found = client.status().run.deadline
        assert found is not None and found.tzinfo is not None
        assert abs(found - datetime.now(timezone.utc) - timedelta(hours=1)) < timedelta(minutes=1)
    assert rs.run("nightly", deadline="2h").status().run.deadline == rs.run("nightly").status().run.deadline


def test_status_shows_who_holds_and_what_waits(rs: Runstate, make: Make) -> None:
    holder = make(worker="holder")
    go_on = threading.Event()

    @holder.once
    def work() -> int:
        assert go_on.wait(60)
        return 1

    empty = rs.status()
    assert (empty.workers, empty.waiting) == ([], [])
    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: rs.status().workers)
    (worker,) = rs.status().workers
    assert (worker.worker, worker.holding) == ("holder", 1)
    assert worker.lease_expires_at is not None
    assert timedelta(0) < worker.lease_expires_at - datetime.now(timezone.utc) < timedelta(seconds=31)
    rs.setup(slots={"s": {"max": 2}})
    with rs.slots("s"):
        waiter = threading.Thread(target=make().slots("s", lambda: 1, units=2))
        waiter.start()
        found = eventually(lambda: (status := asyncio.run(rs.astatus())).waiting and status)
        assert found.waiting == [runstate.Waiting("slots", "s", 2)]
        assert sorted(each.holding for each in found.workers) == [1, 1]
    waiter.join()
    go_on.set()
    thread.join()
    assert rs.status().workers == []


# ---------------------------------------------------------------------------------------------------- fixed texts


def test_texts_of_once_and_of_failing_jobs(rs: Runstate) -> None:
    @rs.once(attempts=1)
    def not_json() -> Any:
        return {1, 2}

    with pytest.raises(runstate.ConfigError, match="JSON"):
        not_json()
    with pytest.raises(runstate.OnceFailedError, match="JSON"):
        not_json()

    @rs.once(attempts=2)
    def always() -> None:
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        always()
    for _ in range(2):
        with pytest.raises(runstate.OnceFailedError, match="always") as failed:
            always()
        assert (failed.value.attempts, str(failed.value)) == (2, "ValueError: always")

    @rs.queue("review", attempts=1)
    def review(doc: int) -> None:
        raise ValueError(f"cannot review doc {doc}")

    with serving(rs):
        with pytest.raises(runstate.TaskFailedError) as error:
            review(99)
        assert str(error.value) == "ValueError: cannot review doc 99"
        assert error.value.reason == "handler_error: ValueError: cannot review doc 99"
        assert error.value.job_id == review.send(99).id


def test_a_producer_in_an_event_loop_gives_an_awaitable(rs: Runstate) -> None:
    worker = rs.queue("double", lambda number: 2 * number, attempts=3)

    async def main() -> list[int]:
        calling = rs.queue("double")(4)
        assert inspect.isawaitable(calling)
        job = await rs.queue("double").asend(5)
        return [await calling, await rs.queue("double").acall(4), await job.aresult("1m")]

    with serving(rs):
        assert worker(4) == 8
        assert asyncio.run(main()) == [8, 8, 10]
        assert rs.queue("double", attempts=3)(6) == 12


def test_a_producer_of_an_unknown_queue_is_told(rs: Runstate) -> None:
    with pytest.raises(runstate.RunstateError) as error:
        rs.queue("review").send(1)
    assert (type(error.value), error.value.code, str(error.value)) == (
        runstate.RunstateError,
        "NOT_FOUND",
        "queue review not found",
    )

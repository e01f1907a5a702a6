"""What goes wrong in a worker is seen: in its own log, with the traceback, and by those who wait for the work."""

from __future__ import annotations

import logging
import pickle
import re
import sys
import traceback
from contextvars import ContextVar
from typing import Any

import pytest

import runstate
from runstate import Runstate, tracebacks
from tests.e2e.inside import Make, serving
from tests.e2e.support import Daemon

tenant: ContextVar[str | None] = ContextVar("tenant", default=None)


def boom(input: Any) -> None:
    try:
        {}["missing"]
    except KeyError as error:
        worse = ValueError("no title")
        if sys.version_info >= (3, 11):
            worse.add_note("look at the form")
        raise worse from error


async def aboom(input: Any) -> None:
    boom(input)


@pytest.mark.parametrize("handler", [boom, aboom])
def test_each_failure_is_logged_with_its_traceback_and_told_to_the_caller(
    rs: Runstate, handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rs.queue("q", handler, attempts=2)
    with serving(rs), pytest.raises(runstate.TaskFailedError, match=r"^ValueError: no title$") as failed:
        queue.send(1).result(20)
    records = [record for record in caplog.records if record.name == "runstate.failures"]
    assert [re.sub(r"j\w+-\w+", "j", record.getMessage()) for record in records] == [
        f"queue q: attempt {attempt} of job j ({record.getMessage().split('(')[1].split(')')[0]}) failed"
        for attempt, record in zip((1, 2), records, strict=True)
    ]
    for record in records:
        assert record.levelno == logging.ERROR
        text = logging.Formatter().format(record)
        assert "raise worse from error" in text and "KeyError: 'missing'" in text
        assert "/runstate/" not in text
    shown = "".join(traceback.format_exception(failed.value))
    for part in (__file__, "in boom", "KeyError: 'missing'", "direct cause", "ValueError: no title"):
        assert part in (failed.value.traceback or "") and part in shown
    assert ("look at the form" in shown) is (sys.version_info >= (3, 11))
    assert pickle.loads(pickle.dumps(failed.value)).traceback == failed.value.traceback


def test_failures_go_to_stderr_where_logging_is_not_configured(shared: Daemon) -> None:
    program = shared.program(
        """
@runstate.queue("q", attempts=1)
def handle(input):
    raise ValueError("seen here")
threading.Thread(target=runstate.serve, daemon=True).start()
say(name(handle, 1))
"""
    )
    told = program.errors_at_the_end()
    assert "queue q: attempt 1 of job" in told and "in handle" in told and "ValueError: seen here" in told


def test_what_a_once_function_raised_is_told_with_its_traceback_to_all_callers(rs: Runstate, make: Make) -> None:
    def work() -> None:
        boom(1)

    with pytest.raises(runstate.OnceFailedError) as own:
        rs.once(work, attempts=1)()
    assert isinstance(own.value.__cause__, ValueError)
    with pytest.raises(runstate.OnceFailedError, match=r"^ValueError: no title$") as told:
        make().once(work, attempts=1)()
    assert own.value.traceback == told.value.traceback
    assert "in boom" in "".join(traceback.format_exception(told.value))


def test_a_gather_that_cannot_reach_its_need_says_where_the_first_handler_failed(rs: Runstate) -> None:
    queue = rs.queue("q", boom, attempts=1)
    with serving(rs), pytest.raises(runstate.TaskFailedError, match="cannot reach 1: ValueError: no title") as failed:
        queue.gather([1], need=1)
    assert "in boom" in "".join(traceback.format_exception(failed.value))


def test_a_recorded_traceback_is_bounded() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise ValueError("x" * 100_000)
        deep(n - 1)

    error: BaseException = ValueError("first")
    for _ in range(50):
        try:
            try:
                raise error
            except BaseException as before:
                deep(50)
                raise AssertionError from before
        except BaseException as after:
            error = after
    text = tracebacks.text(error)
    assert text is not None
    assert len(text) == tracebacks.CHARACTERS_MAX
    assert text.startswith("Traceback") and "ValueError: first" in text and text.endswith("x\n")


def test_an_exception_that_cannot_be_written_is_recorded_without_a_traceback(rs: Runstate) -> None:
    class Wrong(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError

    def fails(input: Any) -> None:
        raise Wrong

    queue = rs.queue("q", fails, attempts=1)
    with serving(rs), pytest.raises(runstate.TaskFailedError, match="Wrong"):
        queue.send(1).result(20)


def test_plain_handlers_see_the_context_variables_of_serve_as_coroutines_do(rs: Runstate) -> None:
    async def coroutine(input: Any) -> str | None:
        return tenant.get()

    queues = [rs.queue("plain", lambda input: tenant.get()), rs.queue("coroutine", coroutine)]

    class Tenant(serving):
        def _serve(self, client: Runstate, options: dict[str, Any]) -> None:
            tenant.set("acme")
            super()._serve(client, options)

    with Tenant(rs):
        assert [queue.send(1).result(20) for queue in queues] == ["acme", "acme"]
    assert tenant.get() is None


# ---------------------------------------------------------------------------------------------------- two handlers


def test_of_two_handlers_of_a_queue_the_last_one_serves(rs: Runstate, caplog: pytest.LogCaptureFixture) -> None:
    def cell(version: str) -> Any:
        @rs.queue("price")
        def price(input: Any) -> str:
            return version

        return price

    cell("old")
    price = cell("new")
    assert "queue price has a new handler" in caplog.text
    with serving(rs):
        assert {price.send(n).result(20) for n in range(10)} == {"new"}
        cell("newer")  # while it is served
        assert {price.send(n).result(20) for n in range(10, 20)} == {"newer"}
    with serving(rs, queues=[price]):  # one that is named is meant
        assert price.send(20).result(20) == "new"


def test_handlers_of_one_queue_in_different_runs_all_serve(rs: Runstate) -> None:
    names = ["a", "b", "a"]
    for number, name in enumerate(names):
        rs.run(name).queue("q", lambda input, number=number: number)
    with serving(rs):
        assert [rs.run(name).queue("q", attempts=5).send(1).result(20) for name in ("a", "b")] == [2, 1]


def test_of_two_clients_of_one_run_the_last_handler_serves(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rs = make(run="same")
    rs.queue("q", lambda input: "first")
    rs.run("same").queue("q", lambda input: "last")
    with serving(rs):
        assert {rs.queue("q", attempts=5).send(n).result(20) for n in range(10)} == {"last"}
    assert "has a new handler" in caplog.text


# ---------------------------------------------------------------------------------------------------- other trouble


def test_takeovers_lost_holds_refused_outcomes_and_reconnects_are_logged(daemon: Daemon) -> None:
    source = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
@runstate.once(lease="5s")
def work():
    say("works")
    return hear()
@runstate.queue("q")
def handle(input):
    say("handles")
    return hear()
"""
    died = [daemon.program(source + call) for call in ("work()", "runstate.serve()")]
    died[0].expect("works")
    daemon.program("runstate.queue('q', attempts=5).send(1)").ends_well()
    died[1].expect("handles")
    holders = [daemon.program(source + call) for call in ("work()", "runstate.serve()")]
    daemon.waits(2)
    for program in died:
        program.kill()
    assert re.fullmatch(r"WARNING once: taking over work:\w+, whose last holder died or fell silent", holders[0].hear())
    holders[0].expect("works")
    assert re.fullmatch(r"WARNING queue q: taking over job j\S+ \(q:\w+\), whose .* silent", holders[1].hear())
    holders[1].expect("handles")
    daemon.restart()
    for program in holders:
        program.expect("WARNING the connection to runstated was lost; it is back")
    daemon.program("runstate.stop()").ends_well()
    holders[1].say("late")
    assert re.fullmatch(r"WARNING queue q: the outcome of job j\S+ \(q:\w+\) is not taken: .* over", holders[1].hear())
    holders[0].say("late")
    assert holders[0].end() == 1  # StoppedError, as a traceback


def test_serve_waits_for_what_its_queues_need_and_says_so(
    rs: Runstate, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rs.queue(
        "late", lambda input: "late", slots="s", limit="l", budget={"name": "b", "reserve": 1, "cost": lambda result: 1}
    )
    soon = rs.queue("soon", lambda input: "soon")
    with serving(rs):
        assert soon.send(1).result(20) == "soon"  # nobody else waits
        job = make().queue("late").send(1)  # the queue is there already
        make().setup(slots={"s": {"max": 1}}, limits={"l": {"max": 1, "per": "day"}}, budgets={"b": {"limit": 5}})
        assert job.result(20) == "late"
    said = [record.getMessage() for record in caplog.records if record.name == "runstate.serving"]
    assert said[0].startswith("queue late: waits for what its jobs need: ")
    assert said[1:] == ["queue late: what its jobs need is there"]
    with serving(rs, queues=[rs.queue("never", lambda input: 1, slots="never")]):
        pass  # it can be stopped


def test_more_places_than_the_wire_allows_are_refused(rs: Runstate) -> None:
    rs.queue("q", boom, concurrency=1_000)
    for call in (lambda: rs.queue("q", boom, concurrency=1_001), lambda: rs.serve(concurrency=1_001)):
        with pytest.raises(runstate.ConfigError, match="concurrency"):
            call()

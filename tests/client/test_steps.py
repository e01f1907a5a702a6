"""The two drivers of a verb's steps: the same steps, the same outcome; errors go in, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from runstate import wire
from runstate.calls import Answer
from runstate.context import context, enter, leave, within
from runstate.results import RunContext, RunInfo
from runstate.signals import Signal
from runstate.steps import Run, adrive, drive

CONTEXT = RunContext(RunInfo("r", "run"), Signal(), 1, "key")


class FakeConnection:
    """Answers from a list; an exception in it is raised."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[Any] = []
        self._answers = list(answers)

    def call(self, request: Any) -> Any:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return Answer(answer, {})

    async def acall(self, request: Any) -> Any:
        await asyncio.sleep(0)
        return self.call(request)


def blocking(connection: FakeConnection, steps: Any) -> Any:
    return drive(lambda: connection, steps)  # type: ignore[arg-type, return-value]


def awaited(connection: FakeConnection, steps: Any) -> Any:
    return asyncio.run(adrive(lambda: connection, steps))  # type: ignore[arg-type, return-value]


both = pytest.mark.parametrize("driver", [blocking, awaited])
Driver = Callable[[FakeConnection, Any], Any]


@both
def test_requests_are_answered_and_functions_are_run_in_their_context(driver: Driver) -> None:
    def steps() -> Any:
        answer = yield wire.RunsGet(run="a")
        ran = yield Run(lambda *args, **more: (args, more, context(), within()), (1,), {"b": 2}, CONTEXT, 7)
        return answer.reply, ran

    connection = FakeConnection(wire.Ok())
    assert driver(connection, steps()) == (wire.Ok(), ((1,), {"b": 2}, CONTEXT, (7,)))
    assert connection.asked == [wire.RunsGet(run="a")]
    assert context() is None


@both
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_of_a_step_can_be_handled_by_the_steps(driver: Driver, error: BaseException) -> None:
    def steps() -> Any:
        try:
            yield wire.RunsGet(run="a")
        except BaseException as caught:
            return caught

    assert driver(FakeConnection(error), steps()) is error


@both
def test_an_error_that_nobody_handles_comes_out_and_the_steps_are_closed(driver: Driver) -> None:
    closed = []

    def steps() -> Any:
        try:
            yield wire.RunsGet(run="a")
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="x"):
        driver(FakeConnection(ValueError("x")), steps())
    assert closed == [True]


@both
def test_the_users_function_may_raise_anything(driver: Driver) -> None:
    def fails() -> None:
        raise LookupError("its own")

    def steps() -> Any:
        yield Run(fails, (), {}, CONTEXT)

    with pytest.raises(LookupError, match="its own"):
        driver(FakeConnection(), steps())
    assert context() is None


def test_a_coroutine_function_is_awaited_in_its_context() -> None:
    async def work() -> tuple[int, ...]:
        await asyncio.sleep(0)
        return within()

    def steps() -> Any:
        return (yield Run(work, (), {}, CONTEXT, 3))

    assert awaited(FakeConnection(), steps()) == (3,)


def test_tokens_pile_up_from_outside_to_inside() -> None:
    outer = enter(CONTEXT, 1)
    inner = enter(CONTEXT, 2)
    plain = enter(CONTEXT)
    assert within() == (1, 2)
    for entered in (plain, inner, outer):
        leave(entered)
    assert within() == ()


def test_a_traceback_that_is_kept_keeps_no_answer() -> None:
    """It would keep what is held: a handle that still exists is renewed."""

    def steps() -> Any:
        yield wire.RunsGet(run="a")
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as caught:
        blocking(FakeConnection(wire.Ok()), steps())
    frames = []
    trace = caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    held = [value for frame in frames if frame.f_code.co_name == "drive" for value in frame.f_locals.values()]
    assert not [value for value in held if isinstance(value, Answer)]

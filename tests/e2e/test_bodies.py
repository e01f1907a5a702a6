"""What is held is held for as long as the decorated body runs, whatever kind of function it is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import runstate
from runstate import Runstate
from tests.e2e.inside import Make, money, pool, serving, used

Decorate = Callable[[Callable[..., Any]], Any]
DECORATORS = ("slots", "limit", "budget")


def decorator(rs: Runstate, what: str, **options: Any) -> Decorate:
    made: Decorate = {
        "slots": lambda: rs.slots("s", max=1, timeout=0, **options),
        "limit": lambda: rs.limit("l", max=100, per="day", **options),
        "budget": lambda: rs.budget("b", reserve="1.00", limit="50.00", **options),
    }[what]()
    return made


def held(make: Make, what: str) -> int:
    """What is held, or taken, of the decorator's resource."""
    if what == "slots":
        return pool(make, "s").used
    return used(make, "l") if what == "limit" else money(make, "b")[0]


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another decorator: a plain function around any kind of function."""

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


class Numbers:
    def __call__(self, n: int) -> Iterator[int]:
        yield from range(n)

    def method(self, n: int) -> Iterator[int]:
        yield from range(n)


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


GENERATORS = [
    numbers,
    functools.partial(numbers, 3),
    Numbers(),
    Numbers().method,
    passed_on(numbers),
    passed_on(passed_on(numbers)),
    lambda n: (i for i in range(n)),
]


@pytest.mark.parametrize("function", GENERATORS, ids=lambda each: getattr(each, "__name__", type(each).__name__))
@pytest.mark.parametrize("what", DECORATORS)
def test_a_generator_holds_until_it_has_ended(rs: Runstate, make: Make, what: str, function: Any) -> None:
    wrapped = decorator(rs, what)(function)
    args = () if isinstance(function, functools.partial) else (3,)
    for number, stop in enumerate((lambda it: list(it), lambda it: it.close())):
        reading = iter(wrapped(*args))
        assert next(reading) == 0
        assert held(make, what) == {"slots": 1, "limit": number + 1, "budget": 100}[what]
        stop(reading)
        assert held(make, what) == (number + 1 if what == "limit" else 0)


def test_generators_hold_nothing_before_their_first_next_and_give_back_when_dropped(rs: Runstate, make: Make) -> None:
    wrapped = decorator(rs, "slots")(numbers)
    waiting = wrapped(3)
    for _ in wrapped(3):  # would be refused, with a time-out of 0, if the first one held the slot
        break
    gc.collect()
    assert next(waiting) == 0
    del waiting
    gc.collect()
    assert list(wrapped(2)) == [0, 1]


def test_a_generator_is_sent_to_thrown_into_and_returns_as_undecorated(rs: Runstate) -> None:
    @decorator(rs, "slots")
    def echo(first: str) -> Any:
        said = [first]
        while True:
            try:
                said.append((yield said[-1]))
            except KeyError as error:
                said.append(f"caught {error}")
            if said[-1] is None:
                return said

    body = echo("a")
    assert [next(body), body.send("b"), body.throw(KeyError("k"))] == ["a", "b", "caught 'k'"]
    with pytest.raises(StopIteration) as stop:
        body.send(None)
    assert stop.value.value == ["a", "b", "caught 'k'", None]


def test_the_context_is_entered_for_the_pieces_of_a_body_and_left_for_its_reader(rs: Runstate) -> None:
    keys: list[Any] = []

    @decorator(rs, "slots")
    def body() -> Iterator[int]:
        keys.append(runstate.context())
        yield 1
        keys.append(runstate.context())

    for _ in body():
        assert runstate.context() is None
    assert keys[0] is keys[1] is not None
    assert not keys[0].signal.is_set()


async def _letters(n: int) -> AsyncIterator[str]:
    for i in range(n):
        await asyncio.sleep(0)
        yield "abc"[i]


@pytest.mark.parametrize("function", [_letters, functools.partial(_letters, 3), passed_on(_letters)])
@pytest.mark.parametrize("what", DECORATORS)
def test_an_async_generator_holds_until_it_has_ended(rs: Runstate, make: Make, what: str, function: Any) -> None:
    wrapped = decorator(rs, what)(function)
    args = () if isinstance(function, functools.partial) else (3,)

    async def main() -> None:
        for number, early in enumerate((False, True)):
            reading = wrapped(*args)
            assert await reading.__anext__() == "a"
            assert held(make, what) == {"slots": 1, "limit": number + 1, "budget": 100}[what]
            if early:
                await reading.aclose()
            else:
                assert [letter async for letter in reading] == ["b", "c"]
            assert held(make, what) == (number + 1 if what == "limit" else 0)

    asyncio.run(main())


def test_as_many_streams_as_there_are_slots(make: Make) -> None:
    inside = most = 0
    rs = make()

    @rs.slots("gpu", max=2)
    async def stream(n: int) -> AsyncIterator[int]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            for i in range(3):
                await asyncio.sleep(0.002)
                yield n + i
        finally:
            inside -= 1

    async def read(n: int) -> list[int]:
        return [each async for each in stream(n)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read(n) for n in range(6)))

    assert asyncio.run(main()) == [[n, n + 1, n + 2] for n in range(6)]
    assert most == 2
    assert pool(make, "gpu").used == 0


@pytest.mark.parametrize("hidden", [False, True], ids=["marked by wraps", "a lambda"])
def test_a_coroutine_under_another_decorator_holds_while_it_runs(make: Make, hidden: bool) -> None:
    inside = most = 0
    rs = make()

    async def work(n: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.002)
        inside -= 1
        return n

    wrapped = rs.slots("gpu", max=1 if not hidden else 4)((lambda n: work(n)) if hidden else passed_on(work))
    assert not inspect.iscoroutinefunction(wrapped)

    async def main() -> list[int]:
        return await asyncio.gather(*(wrapped(n) for n in range(4)))

    assert asyncio.run(main()) == [0, 1, 2, 3]
    assert most == (4 if hidden else 1)
    assert asyncio.run(wrapped(7)) == 7  # made where no loop runs
    assert pool(make, "gpu").used == 0


def test_a_plain_function_around_a_coroutine_function_stays_plain(rs: Runstate) -> None:
    async def work(n: int) -> int:
        return n

    @functools.wraps(work)
    def waits(n: int) -> int:
        return asyncio.run(work(n))

    assert rs.once(waits)(3) == 3
    assert decorator(rs, "slots")(waits)(4) == 4


def test_a_once_coroutine_that_a_lambda_gives_is_no_hang_for_its_loop(rs: Runstate) -> None:
    async def work() -> int:
        return 1

    wrapped = rs.once(lambda: work(), name="work")

    async def main() -> Any:
        first = wrapped()
        with pytest.raises(runstate.ConfigError, match="async form"):
            wrapped()
        return await first

    assert asyncio.run(main()) == 1


# ---------------------------------------------------------------------------------------------------- cost


def test_cost_gets_what_a_generator_returned_or_yielded_last(rs: Runstate, make: Make) -> None:
    seen: list[Any] = []

    def cost(result: Any) -> str:
        seen.append(result)
        return "0.25"

    charge = decorator(rs, "budget", cost=cost)

    @charge
    def returns() -> Any:
        yield "a"
        return {"tokens": 7}

    @charge
    def yields() -> Any:
        yield "b"
        yield "c"

    @charge
    async def letters() -> AsyncIterator[str]:
        yield "x"
        yield "y"

    async def read(early: bool) -> None:
        body = letters()
        async for _ in body:
            if early:
                break
        await body.aclose()

    assert [*returns(), *yields()] == ["a", "b", "c"]
    early = yields()
    assert next(early) == "b"
    early.close()
    assert list(charge(lambda: (i for i in ()))()) == []
    for stops in (False, True):
        asyncio.run(read(stops))
    assert seen == [{"tokens": 7}, "c", "b", None, "y", "x"]
    assert money(make, "b") == (0, 6 * 25)


def test_a_generator_that_raises_costs_nothing(rs: Runstate, make: Make) -> None:
    @decorator(rs, "budget", cost=lambda result: 1)
    def stream() -> Iterator[str]:
        yield "a"
        raise ConnectionError("hung up")

    body = stream()
    assert next(body) == "a"
    assert money(make, "b") == (100, 0)
    with pytest.raises(ConnectionError):
        next(body)
    assert money(make, "b") == (0, 0)


# ---------------------------------------------------------------------------------------------------- refused


class Handlers:
    def two(self, input: Any, other: Any) -> None: ...

    def one(self, input: Any) -> str:
        return f"one {input}"


def test_what_cannot_be_held_or_called_is_refused_at_decoration(rs: Runstate) -> None:
    async def coroutine(result: Any) -> int:
        return 1

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        yield

    refused: list[Callable[[], object]] = [
        lambda: rs.once(numbers),
        lambda: rs.once(_letters),
        lambda: rs.once(name="f", key=coroutine)(lambda: 1),
        *(functools.partial(lambda what: decorator(rs, what)(block), what) for what in DECORATORS),
        *(functools.partial(lambda what: decorator(rs, what)(classmethod(block)), what) for what in DECORATORS),
        lambda: rs.budget("b", reserve=1, cost=coroutine),
        lambda: rs.budget("b", reserve=1, cost=numbers),
        lambda: rs.budget("b", reserve=1, cost=lambda: 1),
        lambda: rs.queue("q", budget={"name": "b", "reserve": 1, "cost": lambda a, b: 1}),
        lambda: rs.queue("q", key=lambda a, b: ""),
        lambda: rs.queue("q", key=coroutine),
        lambda: rs.queue("q", numbers),
        lambda: rs.queue("q", _letters),
        lambda: rs.queue("q", lambda: 1),
        lambda: rs.queue("q", lambda a, b: 1),
        lambda: rs.queue("q", lambda *, input: 1),
        lambda: rs.queue("q", Handlers.one),
        lambda: rs.queue("q", Handlers().two),
        lambda: rs.queue("q")(functools.partial(lambda a: a, 1)),
        lambda: rs.queue("q", attempts=1).gather([1], accept=lambda result: True),
        lambda: rs.queue("q", attempts=1).gather([1], accept=numbers),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(runstate.ConfigError):
            pytest.fail(f"{number} was taken: {call()}")


def test_handlers_of_every_shape_that_takes_one_input_are_served(rs: Runstate) -> None:
    async def coroutine(input: Any) -> str:
        return f"async {input}"

    class Async:
        async def __call__(self, input: Any, more: int = 1) -> str:
            return f"object {input}"

    handlers = [
        Handlers().one,
        functools.partial(lambda more, input: f"{more} {input}", "partial"),
        functools.partial(coroutine),
        functools.partial(Async()),
        passed_on(coroutine),
        lambda *all: f"all {all[0]}",
        str,
    ]
    queues = [rs.queue(f"q{number}", handler) for number, handler in enumerate(handlers)]
    with serving(rs):
        results = [queue.send(7).result(20) for queue in queues]
    assert results == ["one 7", "partial 7", "async 7", "object 7", "async 7", "all 7", "7"]


def test_inspect_sees_what_it_sees_of_the_function(rs: Runstate) -> None:
    async def coroutine(a: int, *, b: str = "") -> None: ...

    plain = passed_on(lambda a: a)
    for function in (numbers, _letters, coroutine, plain):
        for wrapped in (decorator(rs, what)(function) for what in DECORATORS):
            for look in (
                inspect.iscoroutinefunction,
                inspect.isgeneratorfunction,
                inspect.isasyncgenfunction,
                inspect.signature,
            ):
                assert look(wrapped) == look(function)
            assert wrapped.__name__ == function.__name__
            assert wrapped.__wrapped__ is function


def test_a_static_method_stays_one(rs: Runstate) -> None:
    class Calls:
        @decorator(rs, "slots")
        @staticmethod
        def over(n: int) -> int:
            return n

        @staticmethod
        @decorator(rs, "slots")
        def under(n: int) -> int:
            return n

    assert [Calls.over(1), Calls().over(2), Calls.under(3), Calls().under(4)] == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------- tracebacks


def test_a_users_exception_shows_at_most_three_frames_of_ours(rs: Runstate) -> None:
    def fails() -> int:
        raise KeyError("k")

    async def afails() -> int:
        raise KeyError("k")

    def stream() -> Iterator[int]:
        yield 1
        raise KeyError("k")

    def all_of(function: Callable[..., Any]) -> Any:
        return decorator(rs, "budget")(decorator(rs, "limit")(decorator(rs, "slots")(function)))

    calls: list[Callable[[], object]] = [
        rs.once(fails),
        all_of(fails),
        all_of(rs.once(name="again")(fails)),
        lambda: asyncio.run(rs.once(afails)()),
        lambda: asyncio.run(all_of(afails)()),
        lambda: list(all_of(stream)()),
    ]
    for call in calls:
        with pytest.raises(KeyError) as raised:
            call()
        names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
        assert len([name for name in names if name.startswith("runstate.")]) <= 3, names
        assert names[-1] == __name__

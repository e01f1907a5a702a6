"""What goes wrong quietly elsewhere is said here: in an error before anything is done, or in the log, once."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import runstate
from runstate import Runstate, greeting, wire
from tests.e2e.inside import Make, serving
from tests.e2e.support import Daemon


def said(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


# ---------------------------------------------------------------------------------------------------- keys


def test_numbers_that_share_their_key_are_warned_of_once(rs: Runstate, caplog: pytest.LogCaptureFixture) -> None:
    post = rs.once(lambda id: id, name="post-large")
    queue = rs.queue("posts-large", attempts=1)
    for number in (2**53, -(2**53)):
        post(number)
    assert said(caplog, "runstate.keys") == []
    for number in (2**60, 2**60 + 1):
        post(number)
        queue.send({"id": [number]})
    first, second = said(caplog, "runstate.keys")
    assert first.startswith("post-large: $[0] is a whole number above 2^53") and "string" in first
    assert second.startswith("posts-large: $[0].id[0] is")


def test_once_functions_of_one_name_are_warned_of_once(rs: Runstate, caplog: pytest.LogCaptureFixture) -> None:
    def make(factor: int) -> Any:
        @rs.once
        def scale(x: int) -> int:
            return x * factor

        return scale

    make(2), make(2)
    assert said(caplog, "runstate.once") == []
    make(3), make(4)

    class Flights:
        @staticmethod
        @rs.once
        def load(day: str) -> str:
            return "flight"

    class Hotels:
        @staticmethod
        @rs.once
        def load(day: str) -> str:
            return "hotel"

    rs.once(Hotels.load.__wrapped__, name="load")  # on purpose
    told = said(caplog, "runstate.once")
    assert len(told) == 2
    assert "two once functions are called scale" in told[0] and "name=" in told[0]
    assert "Flights.load" in told[1] and "Hotels.load" in told[1]


def test_once_on_a_method_says_that_self_is_no_part_of_a_key(rs: Runstate) -> None:
    class Loader:
        @rs.once
        def load(self, day: str) -> str:
            return day

        @rs.once(key=lambda self, day: day)
        def keyed(self, day: str) -> str:
            return day

    with pytest.raises(runstate.ConfigError, match=r"once on the method load: `self` .*key=lambda self"):
        Loader().load("mon")
    assert Loader().keyed("mon") == "mon"
    with pytest.raises(runstate.ConfigError, match=r"^\$\[0\] is of type object"):
        rs.once(lambda x: x, name="f")(object())


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, [{"x": ({True: 1, "true": 2},)}], {None: 1, "null": 2}])
def test_keys_that_are_one_in_json_are_refused(rs: Runstate, value: Any) -> None:
    with pytest.raises(runstate.ConfigError, match="same in JSON"):
        rs.once(lambda: value, name="f", attempts=1)()


def test_keys_that_are_different_in_json_are_taken(rs: Runstate) -> None:
    assert rs.once(lambda: [{1: "a", 2: "b", "c": {None: 1}}], name="f")() == [{"1": "a", "2": "b", "c": {"null": 1}}]


# ---------------------------------------------------------------------------------------------------- surroundings


def test_async_forms_say_that_they_need_asyncio(rs: Runstate) -> None:
    async def work() -> int:
        return 1

    async def stream() -> Any:
        yield 1

    for coroutine in (
        rs.once(work)(),
        rs.arun_id(),
        rs.aserve(),
        rs.aevents().__anext__(),
        rs.limit("l", max=1, per="day")(stream)().__anext__(),
    ):
        with pytest.raises(runstate.ConfigError, match=r"asyncio.*trio\.to_thread"):
            coroutine.__await__().send(None)


def test_a_loop_that_another_greenlet_runs_is_not_that_of_this_one(rs: Runstate) -> None:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        if not hasattr(loop, "_thread_id"):
            pytest.skip("this loop does not say who runs it")
        loop._thread_id = threading.get_ident() + 1  # as under gevent, where greenlets have idents of their own
        try:
            return rs.queue("q", attempts=1)(1)
        finally:
            loop._thread_id = threading.get_ident()

    queue = rs.queue("q", lambda input: input + 1, attempts=1)
    with serving(rs, queues=[queue]):
        assert asyncio.run(main()) == 2


def test_both_packages_at_once_are_named_with_where_ours_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runstate_sdk-0.3.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(greeting, "_twin_looked_for", False)
    with pytest.raises(runstate.ConfigError, match="pip uninstall runstate-sdk") as error:
        greeting._refuse_twin()
    assert "--no-deps" in str(error.value) and "--force-reinstall runstated" not in str(error.value)


def test_what_later_verbs_need_is_loaded_with_the_first(shared: Daemon, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(Path(runstate.__file__).parent, tmp_path / "runstate")
    program = shared.command_program(
        sys.executable,
        "-c",
        """
import runstate, shutil, sys, threading
assert runstate.__file__.startswith(sys.argv[1])
work, queue = runstate.once(lambda: 1, name="work"), runstate.queue("q", lambda input: input)
work()
assert "asyncio" not in sys.modules
shutil.rmtree(sys.argv[1])
stop = threading.Event()
stop.set()
runstate.status(), next(runstate.events()), runstate.serve(signal=stop), runstate.sleep("s", 0), queue.send(1)
print("works")
""",
        str(tmp_path / "runstate"),
        PYTHONPATH=str(tmp_path),
    )
    assert program.ends_well() == ["works"]


# ---------------------------------------------------------------------------------------------------- pickles


@Runstate(run="pickled").queue("here")
def here(input: Any) -> Any:
    return input


def test_what_names_a_thing_of_the_daemon_goes_through_a_pickle(make: Make) -> None:
    rs = make(run="pickled")
    named = pickle.loads(pickle.dumps(here))
    assert named is here

    local = rs.queue("q", lambda input: input, attempts=2, budget={"name": "b", "reserve": 1, "cost": lambda r: 1})
    rs.setup(budgets={"b": {"limit": 5}})
    with serving(rs):
        copy = pickle.loads(pickle.dumps(local))
        assert (copy.name, copy.servable, copy(7)) == ("q", False, 7)
        job = pickle.loads(pickle.dumps(local.send(7)))
        assert (job.id, job.result(20)) == (local.send(7).id, 7)
    for client in (rs, rs.run("other")):
        assert pickle.loads(pickle.dumps(client)).run_id() == client.run_id()
    child = rs.child()
    with pytest.raises(TypeError, match="run_id"):
        pickle.dumps(child)
    assert child.run_id() == pickle.loads(pickle.dumps(child)).run_id()
    with pickle.loads(pickle.dumps(rs.slots("s", max=1, timeout=0))), pytest.raises(runstate.TimeoutError):
        rs.slots("s", timeout=0).__enter__()
    assert pickle.loads(pickle.dumps(runstate.take)).__self__ is runstate._default


# ---------------------------------------------------------------------------------------------------- codes


def test_stopped_and_lost_have_one_code_and_status_on_every_path(make: Make) -> None:
    rs = make(run="codes")
    signals: list[Any] = []

    def stops() -> None:
        signals.append(runstate.context().signal)  # type: ignore[union-attr]
        rs.stop()

    with pytest.raises(runstate.StoppedError) as first:
        rs.once(stops)()
    own = make(run="codes")
    own.run_id()
    own.finish()
    assert (signals[0].reason.code, signals[0].reason.status) == ("SCOPE_CANCELLED", 409)
    assert (first.value.code, first.value.status) in (("SCOPE_CANCELLED", 409), ("STOPPED", 0))
    with pytest.raises(runstate.StoppedError) as later:
        own.run_id()
    assert (later.value.code, later.value.status) == ("STOPPED", 0)
    assert isinstance(later.value.__cause__, runstate.StoppedError)
    assert (later.value.__cause__.code, later.value.__cause__.status) == ("SCOPE_CANCELLED", 409)

    lost = make(run="lost")

    def loses() -> None:
        (hold,) = lost._connection().holds.live()
        lost._connection().call(wire.Release(token=hold.token))

    with pytest.raises(runstate.LeaseLostError) as error:
        lost.once(loses)()
    assert (error.value.code, error.value.status) == ("LEASE_LOST", 0)

"""What came of work is offered until it is recorded: over a disk that is full, and over a daemon that is away."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import runstate
from runstate import Runstate, wire
from runstate.steps import Deliver
from tests.e2e.inside import Make, money, pool, serving
from tests.e2e.support import Daemon, eventually

FAULT_S = 1.5  # longer than a call is repeated


@contextlib.contextmanager
def trouble(daemon: Daemon, how: str) -> Iterator[None]:
    with daemon.without_writes() if how == "no writes" else daemon.away():
        yield
        time.sleep(FAULT_S)


both = pytest.mark.parametrize("how", ["no writes", "away"])


class Ends:
    """Functions that begin before the trouble and end in it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.over = threading.Event()
        self.runs: list[str] = []

    def __call__(self, what: str) -> str:
        self.runs.append(what)
        self.begun.release()
        assert self.over.wait(30)
        return what


@both
def test_what_ends_in_trouble_is_recorded_after_it(shared: Daemon, make: Make, how: str) -> None:
    ends, client = Ends(), make()
    jobs = client.queue("jobs", ends, attempts=1, concurrency=2, lease="10s")

    async def handle(what: str) -> str:
        return await asyncio.to_thread(ends, what) + " by a coroutine"

    ajobs = client.queue("ajobs", handle, attempts=1)
    once = client.once(ends, name="once")

    def fails(what: str) -> None:
        raise ValueError(ends(what))

    failing = client.once(fails, name="failing", attempts=1)
    client.setup(budgets={"money": {"limit": 10}})  # two use it at once, and only one says how much it is
    pays = client.budget("money", ends, reserve=5, cost=lambda result: 4, limit=10)
    wasted = client.budget("money", fails, reserve=2)

    def inside() -> bool:
        with client.slots("pool", max=1):
            ends("slots")
        return True

    def gathers() -> Any:
        return make().queue("jobs").gather(["gathered"], need=1, timeout="30s")

    with serving(client), ThreadPoolExecutor() as threads:
        sent = [jobs.send("job"), ajobs.send("ajob")]
        calls: list[Future[Any]] = [
            threads.submit(call) for call in (lambda: once("once"), lambda: pays("cost"), inside, gathers)
        ]
        failed = [threads.submit(failing, "failing"), threads.submit(wasted, "wasted")]
        for _ in range(8):
            assert ends.begun.acquire(timeout=30)
        look = make()._connection()
        # A call that begins while nothing of its session is open is told at once that nobody listens.
        eventually(lambda: "group" in {wait.kind for wait in look.call(wire.StatusGet()).reply.waits})
        with trouble(shared, how):
            ends.over.set()
        assert [call.result(30) for call in calls] == ["once", "cost", True, ["gathered"]]
        assert isinstance(failed[0].exception(30), runstate.OnceFailedError)
        assert isinstance(failed[1].exception(30), ValueError)
        assert [job.result("30s") for job in sent] == ["job", "ajob by a coroutine"]
    assert once("once") == "once"
    assert sorted(ends.runs) == ["ajob", "cost", "failing", "gathered", "job", "once", "slots", "wasted"]
    eventually(lambda: money(make, "money") == (0, 400))
    assert pool(make, "pool").used == 0


def test_who_waits_for_jobs_goes_on_while_the_daemon_cannot_write(shared: Daemon, make: Make) -> None:
    client = make()
    queue = client.queue("q", lambda n: n, attempts=1)
    with ThreadPoolExecutor() as threads:
        job = queue.send(0)
        with shared.without_writes():
            with pytest.raises(runstate.UnavailableError):
                make(retries=0, timeout="300ms").run("new").run_id()  # from now on all is refused
            results = [threads.submit(call) for call in (job.result, lambda: job.result("60s"))]
            time.sleep(FAULT_S)
            assert not any(result.done() for result in results)
        with serving(client):
            assert [result.result(30) for result in results] == [0, 0]


@both
def test_a_caller_whose_time_is_over_goes_on_and_its_outcome_is_recorded_all_the_same(
    shared: Daemon, make: Make, how: str
) -> None:
    ends, client = Ends(), make(timeout="300ms")
    once = client.once(ends, name="once")
    pays = client.budget("money", ends, reserve=5, cost=lambda result: 4, limit=10)
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(once, "once"), threads.submit(pays, "cost")]
        for _ in calls:
            assert ends.begun.acquire(timeout=30)
        with trouble(shared, how):
            ends.over.set()
            told = calls[0].exception(30)
            assert isinstance(told, runstate.UnavailableError)
            assert "is offered again" in told.message
            assert calls[1].result(30) == "cost", "the result counts"
    eventually(lambda: money(make, "money") == (0, 400))
    assert make().once(ends, name="once")("once") == "once"
    assert ends.runs.count("once") == 1


@both
def test_a_process_that_ends_before_its_cost_is_recorded_is_charged_what_is_known_of_it(
    shared: Daemon, make: Make, how: str
) -> None:
    """What it has said the daemon keeps until it can write; without a daemon nobody has heard it."""
    spent = 400 if how == "no writes" else 500
    program = shared.program(
        """
runstate.configure(timeout="300ms")
@runstate.budget("money", reserve=5, cost=lambda result: 4, limit=10)
def pay():
    say("pays"); hear()
    return "paid"
say(pay())
""",
        RUNSTATE_AUTOSTART="0",
    )
    program.expect("pays")
    looker = make(space_id=shared.space)
    with trouble(shared, how):
        program.say()
        assert program.ends_well() == ["paid"]
    eventually(lambda: looker._connection().call(wire.BudgetsGet(budget="money")).reply.spent_minor == spent)
    events = looker._connection().call(wire.EventsRead(run=looker.run_id())).reply.events
    assumed = [event.data["chargedMinor"] for event in events if event.type == "budget.assumed"]
    assert assumed == ([] if how == "no writes" else ["500"])


def test_what_a_daemon_cannot_write_down_is_given_back_as_soon_as_it_can(shared: Daemon, make: Make) -> None:
    """Also without anybody who waits for an answer."""
    client = make()
    connection, run = client._connection(), client.run_id()
    connection.call(wire.SlotsDeclare(pool="pool", max=1))
    answer = connection.call(wire.SlotsAcquire(run=run, pool="pool", lease_ms=wire.LEASE_MS_MAX))
    with shared.without_writes():
        with contextlib.suppress(runstate.UnavailableError):
            make(timeout="300ms").run("r").run_id()  # it knows by now that it cannot write
        del answer
        eventually(lambda: not connection.holds.given, "it was sent")
    eventually(lambda: connection.call(wire.SlotsGet(pool="pool")).reply.used == 0)


def test_a_daemon_that_ends_while_the_disk_refuses_says_how_much_is_not_recorded(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
def work(n):
    say("works"); hear()
    return n
say(work(1))
"""
    )
    program.expect("works")
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # until its end
    program.say()
    time.sleep(FAULT_S)  # for the outcome to come, and for the disk to refuse it
    assert daemon._end(signal.SIGTERM) == 75
    daemon.start()
    assert program.ends_well() == ["1"], "it was offered again"


def test_a_session_that_nobody_needs_any_more_ends_when_all_that_it_owes_is_recorded(
    shared: Daemon, make: Make
) -> None:
    client = make()
    connection, run = client._connection(), client.run_id()
    ends = Deliver(wire.RunsEnd(run=run, state="stopped"), None, patient=False)
    with shared.without_writes():
        with pytest.raises(runstate.UnavailableError):
            connection.outcomes.deliver(ends)
        assert connection.outcomes._owed
        connection.retire()
        time.sleep(FAULT_S)
        assert connection.outcomes._owed, "its answer is held"
    looker = make()._connection()
    eventually(lambda: looker.call(wire.RunsGet(run=run)).reply.state == "stopped")
    eventually(lambda: connection._stream is None, "the session has ended")


def test_a_cost_that_cannot_be_is_charged_as_the_reserve_and_the_result_counts(rs: Runstate, make: Make) -> None:
    rs.setup(budgets={"money": {"limit": 50, "scale": 9}})
    runs: list[int] = []

    def handle(n: int) -> int:
        runs.append(n)
        return n

    budget = {"name": "money", "reserve": 1, "cost": lambda result: 10_000_000}
    queue = rs.queue("q", handle, attempts=2, budget=budget)
    with serving(rs):
        assert queue.send(1).result("30s") == 1
    assert runs == [1]
    assert money(make, "money") == (0, 10**9)


def test_a_cost_that_is_interrupted_is_charged_as_the_reserve(rs: Runstate, make: Make) -> None:
    def cost(result: int) -> int:
        raise KeyboardInterrupt

    pays = rs.budget("money", lambda: 1, reserve=5, cost=cost, limit=10)
    with pytest.raises(KeyboardInterrupt):
        pays()
    assert money(make, "money") == (0, 500)


class Model:
    def model_dump(self) -> dict[str, int]:
        return {"n": 1}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({1, 2}, "set"),
        (float("nan"), "JSON"),
        (Model(), "Model is not JSON: use its .model_dump()"),
        ("x" * 70_000, "65536 bytes"),
    ],
)
def test_a_result_that_cannot_be_recorded_fails_its_job_at_once(rs: Runstate, result: Any, said: str) -> None:
    runs: list[int] = []

    def handle(n: int) -> Any:
        runs.append(n)
        return result

    queue = rs.queue("q", handle, attempts=5)
    with serving(rs), pytest.raises(runstate.TaskFailedError, match=said):
        queue.send(1).result("30s")
    assert runs == [1]


def test_an_outcome_goes_through_the_session_that_holds_the_work(rs: Runstate, make: Make) -> None:
    def work() -> int:
        rs.configure(timeout="10s")
        return 1

    assert rs.once(work)() == 1
    assert rs.once(work)() == 1


def test_a_hold_that_its_own_outcome_has_ended_is_not_said_to_be_lost(
    rs: Runstate, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restart: the outcome was recorded, its answer got lost, and both it and a beat are sent again."""
    connection = rs._connection()
    held = [rs.slots(name, max=1) for name in ("ends", "is-lost")]
    holds = [slots.__enter__() and slots._entered[-1].hold for slots in held]
    holds[0].is_owed = True
    for hold in holds:
        connection.call(wire.Release(token=hold.token))
    connection._beat(tuple(hold.token for hold in holds))
    assert all(hold.signal.wait(30) for hold in holds)
    assert [record.args[0] for record in caplog.records if "lost the hold" in record.msg] == [holds[1].token]
    holds[0].is_owed = False
    for slots in reversed(held):  # the innermost first: the context goes back as it came
        with pytest.raises(runstate.LeaseLostError):
            slots.__exit__(None, None, None)


def test_a_newcomer_is_told_why_while_the_daemon_cannot_write(shared: Daemon, make: Make) -> None:
    with shared.without_writes():
        with pytest.raises(runstate.UnavailableError):
            make(retries=0, timeout="300ms").run("first").run_id()  # from now on it knows
        with pytest.raises(runstate.UnavailableError, match="cannot write to its database"):
            make(timeout="1s").run_id()

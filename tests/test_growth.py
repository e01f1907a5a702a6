"""What a request costs does not grow with what is stored: steps of SQLite's machine beside few rows and many."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from runstate import wire
from tests.harness import Harness

FEW, MANY = 30, 3_000
GROWTH_MAX = 1.5
SLACK = 300  # steps; a deeper tree of an index costs some more

# n rows of everything that stays: ended runs, keys, jobs, limits, money, events, answers, leases of others.
FILL = (
    "INSERT INTO runs (run, space, name, parent, path, state, owner, created_ms, ended_ms, tidied, is_group)"
    " SELECT 'g' || i, 'default', NULL, :run, :path || 'g' || i || '/', 'stopped', 's', 1, 1700000000000, i % 2, 1"
    " FROM n",
    "INSERT INTO runs (run, space, name, path, state, owner, created_ms, tidied, is_group)"
    " SELECT 'a' || i, 'default', 'a' || i, '/a' || i || '/', 'active', NULL, 1, 0, 0 FROM n",
    "INSERT INTO sessions (session, space, worker, process, pid, command, key, transport, opened_ms)"
    " SELECT 's' || i, 'default', 'w', '', i, 'c', '', 'unix', 1 FROM n",
    "INSERT INTO leases (token, space, kind, subject, run, session, request, length_ms, granted_ms, units, needs,"
    " fingerprint, proof)"
    " SELECT 1000000 + i, 'default', 'once', 'k' || i, 'a' || i, 's' || i, 1, 600000, 1, 0, 0, 'f', '' FROM n",
    "INSERT INTO once_keys (run, key, state, failures, takeovers) SELECT :run, 'open' || i, 'open', 1, 0 FROM n",
    "INSERT INTO once_keys (run, key, state, failures, takeovers, result)"
    " SELECT :run, 'done' || i, 'done', 0, 0, '1' FROM n",
    "INSERT INTO queues (space, queue, attempts, needs) SELECT 'default', 'other' || i, 3, 0 FROM n",
    "INSERT INTO jobs (job, space, queue, run, key, state, attempt, needs, age, input, result, created_ms, ended_ms,"
    " finish) SELECT 'j' || (5000000 + i) || '-test', 'default', 'q', :run, 'o' || i, 'succeeded', 1, 0, i, '1', '1',"
    " 1, 1700000000000, i FROM n",
    "INSERT INTO job_counts (run, queue, state, jobs, finish) SELECT :run, 'q', 'succeeded', max(i), max(i) FROM n",
    "INSERT INTO jobs (job, space, queue, run, key, state, attempt, needs, age, input, created_ms)"
    " SELECT 'j' || (6000000 + i) || '-test', 'default', 'q', 'g' || i, 'e' || i, 'ready', 0, 0, i, '1', 1 FROM n",
    "INSERT INTO job_counts (run, queue, state, jobs, finish) SELECT 'g' || i, 'q', 'ready', 1, 0 FROM n",
    "INSERT INTO limits (id, space, name, max, per_seconds, window_ms, used)"
    " SELECT 'l' || i, 'default', 'l' || i, 10, 86400, 1699920000000, 1 FROM n",
    "INSERT INTO pools (id, space, name, max) SELECT 'p' || i, 'default', 'p' || i, 10 FROM n",
    "INSERT INTO budgets (id, space, name, currency, scale, limit_minor, spent_minor, reserved_minor)"
    " SELECT 'm' || i, 'default', 'm' || i, 'USD', 2, 1000, 0, 0 FROM n",
    "INSERT INTO reservations (reservation, space, budget, run, path, token, state, left_minor, amount_minor,"
    " settle_by_ms, session, proof, charged_minor, assumed_minor, ended_ms, is_held)"
    " SELECT 'b' || i, 'default', 'm' || i, :run, :path, i, 'settled', 0, 0, i, 's', '', 0, 0, 1700000000000, 0 FROM n",
    "INSERT INTO timers (run, name, fire_ms, fired, acked) SELECT 'a' || i, 't' || i, 4000000000000, 0, 0 FROM n",
    "INSERT INTO events (event, space, run, path, type, at_ms, data)"
    " SELECT 1000000 + i, 'default', 'a' || i, '/a' || i || '/', 't', 1700000000000, '{}' FROM n",
    "INSERT INTO replies (session, request, space, fingerprint, reply, until_ms, bytes)"
    " SELECT 's' || i, i, 'default', '', '', 4000000000000, 0 FROM n",
)


class World:
    """A daemon with n rows of everything, and one client in it."""

    def __init__(self, n: int) -> None:
        self.h = Harness()
        a = self.h.session("a")
        self.run = a.ask(wire.RunsJoin(name="r")).run
        a.ask(wire.QueuesDeclare(queue="q", attempts=3))
        connection: sqlite3.Connection = self.h.connection
        for statement in FILL:
            connection.execute(
                f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {n}) {statement}",
                {"run": self.run, "path": f"/{self.run}/"},
            )
        self.h.start()  # the memory is what the file says
        self.a = a
        self.a.resume()
        self.h.tick_if_due()

    def steps(self, work: Callable[[], Any]) -> int:
        """How many steps of its machine SQLite takes for it."""
        taken = 0

        def count() -> int:
            nonlocal taken
            taken += 1
            return 0

        self.h.connection.set_progress_handler(count, 1)
        try:
            work()
        finally:
            self.h.connection.set_progress_handler(None, 0)
        return taken


def once(w: World) -> Callable[[], Any]:
    def work() -> None:
        for key in ("done", "fails"):
            w.a.ask(wire.OnceGet(run=w.run, key=key))
        token = w.a.ask(wire.OnceAcquire(run=w.run, key="done")).token
        w.a.ask(wire.Renew(token=token, lease_ms=60_000))
        w.a.ask(wire.OnceComplete(run=w.run, key="done", token=token, result="1"))
        w.a.ask(wire.OnceFail(run=w.run, key="f", token=w.a.ask(wire.OnceAcquire(run=w.run, key="f")).token, error="E"))

    return work


def jobs(w: World) -> Callable[[], Any]:
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=w.run, queue="q"),))

    def work() -> None:
        waits = w.a.submit(admit)
        job = w.a.ask(wire.QueuesSend(run=w.run, queue="q", key="new", input="1")).job
        (grant,) = waits.reply.jobs
        w.a.ask(wire.Release(token=grant.token))
        (grant,) = w.a.ask(admit).jobs
        w.a.ask(wire.QueuesFail(job=job, token=grant.token, error="E"))
        w.h.pass_ms(1_000)
        (grant,) = w.a.ask(admit).jobs
        w.a.ask(wire.QueuesComplete(job=job, token=grant.token, result="1"))
        w.a.ask(wire.QueuesResult(job=job))
        w.a.ask(wire.QueuesDeclare(queue="q", needs=wire.Needs()))

    return work


def resources(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.a.ask(wire.LimitsTake(run=w.run, limit="mine", max=2, per_seconds=60))
        w.a.ask(wire.LimitsGet(limit="mine"))
        token = w.a.ask(wire.SlotsAcquire(run=w.run, pool="mine", max=1)).token
        waits = w.a.waits(wire.SlotsAcquire(run=w.run, pool="mine"))
        w.a.ask(wire.SlotsGet(pool="mine"))
        w.a.ask(wire.Release(token=token))
        assert isinstance(waits.reply, wire.SlotsGranted)

    return work


def money(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.a.ask(wire.BudgetsDeclare(budget="mine", limit_minor=100))
        reserved = [w.a.ask(wire.BudgetsReserve(run=w.run, budget="mine", amount_minor=10)) for _ in range(2)]
        w.a.ask(wire.BudgetsSettle(reservation=reserved[0].reservation, cost_minor=5, work_key="w"))
        w.a.ask(wire.BudgetsRelease(reservation=reserved[1].reservation))
        w.a.ask(wire.BudgetsGet(budget="mine", reservations=9))

    return work


def trees(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.a.ask(wire.RunsJoin(name="r"))
        child = w.a.ask(wire.RunsChild(parent=w.run)).run
        w.a.ask(wire.RunsEnd(run=child, state="finished"))
        members = (wire.NewJob(key="one", input="1"),)
        group = w.a.ask(wire.GroupsSubmit(run=w.run, queue="q", members=members)).run
        w.a.waits(wire.GroupsEnded(run=group))
        w.a.ask(wire.RunsEnd(run=group, state="stopped"))

    return work


def timing(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.a.waits(wire.TimersSleep(run=w.run, name="t", after_ms=1_000))
        w.h.pass_ms(1_000)
        w.a.ask(wire.TimersAck(run=w.run, name="t"))
        w.a.ask(wire.BarriersArrive(run=w.run, name="b", count=1, worker="w"))

    return work


def events(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.a.ask(wire.RunsChild(parent=w.run))
        newest = w.h.value("SELECT max(event) FROM events")
        w.a.ask(wire.EventsRead(run=w.run, after=newest - 1))

    return work


def ends(w: World) -> Callable[[], Any]:
    """A session with child runs, one of which somebody else holds something in, and the ticks after that."""
    b, c = w.h.session("b"), w.h.session("c")
    kept, left = (b.ask(wire.RunsChild(parent=w.run)).run for _ in range(2))
    token = c.ask(wire.OnceAcquire(run=kept, key="k")).token

    def work() -> None:
        b.die()
        w.h.tick()
        c.ask(wire.Release(token=token))
        w.h.tick_if_due()
        assert {w.h.value("SELECT state FROM runs WHERE run = :r", r=run) for run in (kept, left)} == {"stopped"}

    return work


def ticks(w: World) -> Callable[[], Any]:
    def work() -> None:
        w.h.core().due(w.h.clock.wall_ms())
        w.h.tick()

    return work


STORIES = (once, jobs, resources, money, trees, timing, events, ends, ticks)


@pytest.fixture(scope="module")
def worlds() -> tuple[World, World]:
    return World(FEW), World(MANY)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_what_a_verb_costs_does_not_grow_with_what_is_stored(
    worlds: tuple[World, World], story: Callable[[World], Callable[[], Any]]
) -> None:
    few, many = (world.steps(story(world)) for world in worlds)
    assert few > 0
    assert many <= GROWTH_MAX * few + SLACK, f"{few} steps beside {FEW} rows, {many} beside {MANY}"


def test_one_process_of_many_child_runs_ends_in_steps() -> None:
    h = Harness()
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="r")).run
    for _ in range(120):
        a.ask(wire.RunsChild(parent=run))
    a.die()
    active = "SELECT count(*) FROM runs WHERE state = 'active'"
    assert 1 < h.value(active) < 121, "some, not all, in the step of its end"
    h.tick_if_due()
    assert h.value(active) == 1
    h.check()

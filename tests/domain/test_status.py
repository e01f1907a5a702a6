from __future__ import annotations

from runstate import wire
from runstated.domain.access import Access
from tests.harness import Harness


def test_status_shows_active_runs_workers_with_what_they_hold_and_queues(h: Harness) -> None:
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="job")).run
    over = a.ask(wire.RunsJoin(name="over")).run
    a.ask(wire.RunsEnd(run=over, state="finished"))
    a.ask(wire.QueuesSend(run=run, queue="q", key="the-key", input="1", attempts=3))
    a.ask(wire.QueuesSend(run=run, queue="q", key="2", input="1", attempts=3))
    (grant,) = b.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    since = h.clock.wall_ms()
    h.pass_ms(1_000)
    token = b.ask(wire.OnceAcquire(run=run, key="k")).token
    seen = a.ask(wire.StatusGet())
    assert [(found.run, found.state) for found in seen.runs] == [(run, "active")]
    assert [(found.session, found.pid, found.command) for found in seen.workers] == [
        ("a", 100, "python x"),
        ("b", 101, "python x"),
    ]
    assert seen.workers[1].holdings == (
        wire.Holding(token=grant.token, kind="job", name="the-key", run=run, since_ms=since),
        wire.Holding(token=token, kind="once", name="k", run=run, since_ms=since + 1_000),
    )
    assert seen.queues == (wire.QueueView(queue="q", attempts=3, counts={"ready": 1, "running": 1}),)
    assert seen.more == ()


def test_status_shows_no_run_that_is_over_by_the_clock(h: Harness) -> None:
    a = h.session("a")
    a.ask(wire.RunsJoin(name="short", deadline_ms=h.clock.wall_ms() + 5))
    h.clock.pass_ms(5)
    assert a.ask(wire.StatusGet()).runs == ()


def test_status_shows_nothing_of_another_space(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    a.ask(wire.OnceAcquire(run=run, key="k"))
    seen = h.session("o", space="other").ask(wire.StatusGet())
    assert (seen.runs, seen.queues, [found.session for found in seen.workers]) == ((), (), ["o"])
    assert seen.workers[0].holdings == ()


def test_status_cuts_each_list_and_says_which(h: Harness) -> None:
    a = h.session("a")
    for number in range(3):
        h.session(f"s{number}")
        h.pass_ms(1)
        a.ask(wire.RunsJoin(name=f"n{number}"))
        a.ask(wire.QueuesDeclare(queue=f"q{number}", attempts=3))
    seen = a.ask(wire.StatusGet(limit=2))
    assert [found.name for found in seen.runs] == ["n2", "n1"], "the youngest"
    assert (len(seen.workers), len(seen.queues)) == (2, 2)
    assert seen.more == ("runs", "workers", "queues")
    assert a.ask(wire.StatusGet(limit=4)).more == ()


# ------------------------------------------------------------------ one run


def test_the_status_of_a_run_shows_who_holds_what_in_it_and_below(h: Harness) -> None:
    a, b, c = h.session("a"), h.session("b"), h.session("c")
    run = a.ask(wire.RunsJoin(name="job")).run
    below = a.ask(wire.RunsChild(parent=run)).run
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(wire.OnceAcquire(run=run, key="k", lease_ms=30_000))
    h.pass_ms(1_000)
    b.ask(wire.SlotsAcquire(run=below, pool="gpu", max=2, lease_ms=10_000))
    b.ask(wire.SlotsAcquire(run=run, pool="gpu", lease_ms=60_000))
    c.ask(wire.OnceAcquire(run=other, key="k"))
    now = h.clock.wall_ms()
    seen = a.ask(wire.RunsStatus(run=run))
    assert (seen.run.run, seen.run.state) == (run, "active")
    assert seen.workers == (
        wire.HolderView(worker="worker-a", holding=1, lease_expires_ms=now + 29_000, names=("k",)),
        wire.HolderView(worker="worker-b", holding=2, lease_expires_ms=now + 10_000, names=("gpu", "gpu")),
    )
    assert [view.worker for view in a.ask(wire.RunsStatus(run=below)).workers] == ["worker-b"]
    a.ask(wire.QueuesSend(run=below, queue="q", key="the-key", input="1", attempts=3))
    b.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),)))
    assert a.ask(wire.RunsStatus(run=run)).workers[1].names == ("gpu", "gpu", "the-key")
    assert seen.waiting == ()


def test_a_reservation_is_no_hold_in_the_status_of_a_run(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    a.ask(wire.BudgetsReserve(run=run, budget="llm", amount_minor=1, limit_minor=10))
    assert a.ask(wire.RunsStatus(run=run)).workers == ()


def test_the_status_of_a_run_shows_what_waits_in_it_and_below(h: Harness) -> None:
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="job")).run
    below = a.ask(wire.RunsChild(parent=run)).run
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(wire.OnceAcquire(run=run, key="k"))
    a.ask(wire.SlotsAcquire(run=run, pool="gpu", max=2, units=2))
    a.ask(wire.LimitsTake(run=run, limit="api", max=3, per_seconds=60, units=3))
    b.waits(wire.SlotsAcquire(run=below, pool="gpu", units=2))
    b.waits(wire.LimitsTake(run=run, limit="api", units=3))
    b.waits(wire.OnceAcquire(run=run, key="k"))
    b.waits(wire.OnceGet(run=run, key="k"))
    b.waits(wire.SlotsAcquire(run=other, pool="gpu"))
    assert a.ask(wire.RunsStatus(run=run)).waiting == (
        wire.WaitingView(kind="slots", name="gpu", units=2),
        wire.WaitingView(kind="limit", name="api", units=3),
        wire.WaitingView(kind="once", name="k"),
        wire.WaitingView(kind="once", name="k"),
    )


def test_the_status_of_an_ended_run_can_be_read_and_that_of_another_space_cannot(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert a.ask(wire.RunsStatus(run=run)).run.state == "finished"
    h.session("o", space="other").refused("NOT_FOUND", wire.RunsStatus(run=run))


def test_command_lines_are_shown_to_the_owner_only(h: Harness) -> None:
    a, b = h.session("a"), h.session("b", access=Access(key="k1"))
    assert [worker.command for worker in a.ask(wire.StatusGet()).workers] == ["python x", "python x"]
    assert [worker.command for worker in b.ask(wire.StatusGet()).workers] == ["", ""]


def test_jobs_of_a_run_that_is_over_are_not_counted(h: Harness) -> None:
    a = h.session("a")
    now = h.clock.wall_ms()
    stopped, expires, active = (
        a.ask(wire.RunsJoin(name=name, deadline_ms=deadline)).run
        for name, deadline in (("stopped", None), ("expires", now + 1_000), ("active", None))
    )
    below = a.ask(wire.RunsChild(parent=stopped)).run
    for run in (stopped, below, expires, active):
        a.ask(wire.QueuesSend(run=run, queue="q", key="k", input="1", attempts=3))
    counts = lambda: a.ask(wire.StatusGet()).queues[0].counts  # noqa: E731
    assert counts() == {"ready": 4}
    a.ask(wire.RunsEnd(run=stopped, state="stopped"))
    assert counts() == {"ready": 2}
    h.clock.pass_ms(1_000)  # the clock says so, before any tick
    assert counts() == {"ready": 1}
    h.pass_ms(24 * 3_600_000)
    assert counts() == {"ready": 1}
    assert h.rows("SELECT run, jobs FROM job_counts") == [(active, 1)]

from __future__ import annotations

import pytest

from runstate import wire
from runstated.domain.jobs import JOBS
from runstated.domain.runs import RUNS, Runs
from runstated.engine import retention
from runstated.engine.evicting import CLEARED_IN_ONE_STEP
from tests.harness import Client, Harness


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


def join(client: Client, name: str = "job", **more: int) -> wire.RunView:
    view = client.ask(wire.RunsJoin(name=name, **more))  # type: ignore[arg-type]
    assert isinstance(view, wire.RunView), view
    return view


def child(client: Client, parent: str, **more: object) -> wire.RunView:
    view = client.ask(wire.RunsChild(parent=parent, **more))  # type: ignore[arg-type]
    assert isinstance(view, wire.RunView), view
    return view


# ------------------------------------------------------------------ join


def test_join_creates_a_run_and_then_joins_it(h: Harness, a: Client) -> None:
    first = join(a)
    assert (first.name, first.state, first.parent, first.created_ms) == ("job", "active", None, h.clock.wall_ms())
    assert join(h.session("b")) == first


def test_join_after_the_end_of_a_run_creates_a_new_one(a: Client) -> None:
    first = join(a)
    a.ask(wire.RunsEnd(run=first.run, state="finished"))
    assert join(a).run != first.run


def test_join_finds_no_run_of_another_space(h: Harness, a: Client) -> None:
    assert join(a).run != join(h.session("b", space="other")).run


def test_a_run_keeps_the_deadline_that_it_has(h: Harness, a: Client) -> None:
    deadline = h.clock.wall_ms() + 1_000
    assert join(a, deadline_ms=deadline).deadline_ms == deadline
    assert join(a, deadline_ms=deadline + 5).deadline_ms == deadline


def test_join_does_not_find_a_child_of_that_name(a: Client) -> None:
    root = join(a)
    below = child(a, root.run, name="inner")
    assert join(a, "inner").run != below.run


def test_a_deadline_in_the_past_is_refused(h: Harness, a: Client) -> None:
    error = a.refused("VALIDATION_FAILED", wire.RunsJoin(name="late", deadline_ms=1_000_000_000_007))
    assert error.message.startswith(
        "the deadline of the run late has passed already: it was 2001-09-09T01:46:40.007+00:00, and it is 20"
    )
    a.refused("VALIDATION_FAILED", wire.RunsJoin(name="late", deadline_ms=h.clock.wall_ms()))
    run = join(a).run
    error = a.refused("VALIDATION_FAILED", wire.RunsChild(parent=run, deadline_ms=h.clock.wall_ms()))
    assert "the child run without a name" in error.message
    assert h.value("SELECT count(*) FROM runs") == 1


# ------------------------------------------------------------------ child


def test_a_child_belongs_to_its_parent(a: Client) -> None:
    root = join(a)
    below = child(a, root.run, name="c")
    assert (below.parent, below.name, below.state) == (root.run, "c", "active")


def test_every_child_is_a_new_run_even_under_one_name(a: Client) -> None:
    root = join(a)
    assert child(a, root.run, name="c").run != child(a, root.run, name="c").run


def test_a_child_has_at_most_its_parents_deadline(h: Harness, a: Client) -> None:
    now = h.clock.wall_ms()
    root = join(a, deadline_ms=now + 1_000)
    assert child(a, root.run).deadline_ms == now + 1_000
    assert child(a, root.run, deadline_ms=now + 5_000).deadline_ms == now + 1_000
    assert child(a, root.run, deadline_ms=now + 500).deadline_ms == now + 500


def test_a_repeat_of_child_gives_the_same_run(h: Harness, a: Client) -> None:
    root = join(a)
    asked = a.submit(wire.RunsChild(parent=root.run))
    assert asked.repeat().reply == asked.reply
    assert h.value("SELECT count(*) FROM runs") == 2


def test_a_child_of_an_unknown_run_or_of_another_space_is_refused(h: Harness, a: Client) -> None:
    root = join(a)
    a.refused("NOT_FOUND", wire.RunsChild(parent="r999-test"))
    h.session("b", space="other").refused("NOT_FOUND", wire.RunsChild(parent=root.run))


def test_a_child_of_an_ended_run_is_refused(a: Client) -> None:
    root = join(a)
    a.ask(wire.RunsEnd(run=root.run, state="stopped"))
    assert a.refused("SCOPE_CANCELLED", wire.RunsChild(parent=root.run)).run == root.run


# ------------------------------------------------------------------ end


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_end_ends_a_run_once_and_for_all(h: Harness, a: Client, state: str) -> None:
    run = join(a).run
    assert a.ask(wire.RunsEnd(run=run, state=state)).state == state  # type: ignore[arg-type]
    other = {"stopped": "finished", "finished": "stopped"}[state]
    assert a.ask(wire.RunsEnd(run=run, state=other)).state == state  # type: ignore[arg-type]
    assert a.ask(wire.RunsGet(run=run)).state == state
    assert h.events(run) == ["scope.created", {"stopped": "scope.cancelled", "finished": "scope.completed"}[state]]


def test_end_stops_all_below_and_nothing_beside(a: Client) -> None:
    root = join(a)
    middle, beside = child(a, root.run), child(a, root.run)
    leaf = child(a, middle.run)
    a.ask(wire.RunsEnd(run=middle.run, state="finished"))
    states = [a.ask(wire.RunsGet(run=run.run)).state for run in (root, middle, leaf, beside)]
    assert states == ["active", "finished", "stopped", "active"]


def test_end_does_not_touch_a_run_whose_path_only_begins_alike(h: Harness, a: Client) -> None:
    runs = [join(a, f"n{number}").run for number in range(12)]  # r1, r10, r11
    assert [run.partition("-")[0] for run in (runs[0], runs[9], runs[10])] == ["r1", "r10", "r11"]
    a.ask(wire.RunsEnd(run=runs[0], state="stopped"))
    assert h.value("SELECT count(*) FROM runs WHERE state = 'active'") == 11


def test_end_of_a_parent_keeps_the_state_of_a_child_that_ended_before(a: Client) -> None:
    root = join(a)
    below = child(a, root.run)
    a.ask(wire.RunsEnd(run=below.run, state="finished"))
    a.ask(wire.RunsEnd(run=root.run, state="stopped"))
    assert a.ask(wire.RunsGet(run=below.run)).state == "finished"


def test_end_is_pushed_once_to_every_session_that_joined(h: Harness, a: Client) -> None:
    b, c = h.session("b"), h.session("c")
    run = join(a).run
    for client in (a, b, b):
        join(client)
    c.ask(wire.RunsEnd(run=run, state="stopped"))
    ended = wire.RunEnded(run=run, state="stopped", message="the run 'job' was stopped")
    assert [client.told(wire.RunEnded) for client in (a, b, c)] == [[ended], [ended], []]


def test_end_of_a_parent_is_pushed_to_those_who_know_only_the_child(h: Harness, a: Client) -> None:
    b = h.session("b")
    root = join(a)
    below = child(b, root.run)
    a.ask(wire.RunsEnd(run=root.run, state="finished"))
    assert [(push.run, push.state) for push in b.told(wire.RunEnded)] == [(below.run, "stopped")]


def test_end_answers_all_that_wait_in_the_tree(h: Harness, a: Client) -> None:
    b, c = h.session("b"), h.session("c")
    root = join(a)
    below = child(a, root.run)
    a.ask(wire.OnceAcquire(run=root.run, key="k"))
    job = a.ask(wire.QueuesSend(run=below.run, queue="q", key="1", input="1", attempts=3)).job
    waits = [
        b.waits(wire.OnceAcquire(run=root.run, key="k")),
        b.waits(wire.GroupsEnded(run=below.run)),
        c.waits(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=root.run, queue="other"),))),
    ]
    result = b.waits(wire.QueuesResult(job=job))
    a.ask(wire.RunsEnd(run=root.run, state="stopped"))
    assert result.reply == wire.JobView(job=job, state="cancelled", reason="scope_cancelled")
    assert [(wait.reply.code, wait.reply.run) for wait in waits] == [
        ("SCOPE_CANCELLED", root.run),
        ("SCOPE_CANCELLED", below.run),
        ("SCOPE_CANCELLED", root.run),
    ]
    assert not h.core().lines.calls


def test_end_of_an_unknown_run_is_refused(h: Harness, a: Client) -> None:
    run = join(a).run
    a.refused("NOT_FOUND", wire.RunsEnd(run="r9-test", state="stopped"))
    h.session("b", space="other").refused("NOT_FOUND", wire.RunsEnd(run=run, state="stopped"))
    h.clients["b"].refused("NOT_FOUND", wire.RunsGet(run=run))


# ------------------------------------------------------------------ deadlines


def test_a_deadline_counts_by_the_clock_before_any_tick(h: Harness, a: Client) -> None:
    run = join(a, deadline_ms=h.clock.wall_ms() + 1_000).run
    h.clock.pass_ms(999)
    assert a.ask(wire.RunsGet(run=run)).state == "active"
    h.clock.pass_ms(1)
    assert a.ask(wire.RunsGet(run=run)).state == "expired"
    a.refused("DEADLINE_EXCEEDED", wire.RunsChild(parent=run))
    assert h.value("SELECT state FROM runs") == "active", "no tick has run"
    h.tick()
    assert h.value("SELECT state FROM runs") == "expired"


def test_a_deadline_is_pushed_and_answered_when_it_comes(h: Harness, a: Client) -> None:
    run = join(a, deadline_ms=h.clock.wall_ms() + 1_000).run
    a.ask(wire.OnceAcquire(run=run, key="k"))
    waits = h.session("b").waits(wire.OnceAcquire(run=run, key="k"))
    h.pass_ms(999)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply.code == "DEADLINE_EXCEEDED"
    assert [push.state for push in a.told(wire.RunEnded)] == ["expired"]
    assert h.events(run)[-1] == "scope.expired"


def test_a_deadline_passes_in_suspend(h: Harness, a: Client) -> None:
    run = join(a, deadline_ms=h.clock.wall_ms() + 60_000).run
    h.suspend(60_000)
    assert a.ask(wire.RunsGet(run=run)).state == "expired"
    assert a.told(wire.RunEnded)


def test_join_of_an_expired_run_creates_a_new_one_before_any_tick(h: Harness, a: Client) -> None:
    run = join(a, deadline_ms=h.clock.wall_ms() + 1_000).run
    h.clock.pass_ms(1_000)
    assert join(a).run != run
    assert a.told(wire.RunEnded)[0].run == run


def test_end_of_an_expired_run_says_expired(h: Harness, a: Client) -> None:
    run = join(a, deadline_ms=h.clock.wall_ms() + 1_000).run
    h.clock.pass_ms(1_000)
    assert a.ask(wire.RunsEnd(run=run, state="finished")).state == "expired"


def test_children_expire_with_their_parent(h: Harness, a: Client) -> None:
    root = join(a, deadline_ms=h.clock.wall_ms() + 1_000)
    below = child(a, root.run)
    h.pass_ms(1_000)
    assert [a.ask(wire.RunsGet(run=run.run)).state for run in (root, below)] == ["expired", "expired"]


def test_more_deadlines_than_one_step_takes_are_all_kept(h: Harness, a: Client) -> None:
    for number in range(120):
        join(a, f"n{number}", deadline_ms=h.clock.wall_ms() + 1_000)
    h.pass_ms(1_000)
    assert h.rows("SELECT state, count(*) FROM runs GROUP BY state") == [("expired", 120)]
    assert len(a.told(wire.RunEnded)) == 120


# ------------------------------------------------------------------ the owner of a child


def test_a_child_ends_with_its_owners_session_when_nothing_in_it_is_held(h: Harness, a: Client) -> None:
    root = join(a)
    below = child(a, root.run)
    leaf = child(h.session("b"), below.run)
    a.die()
    b = h.clients["b"]
    assert [b.ask(wire.RunsGet(run=run.run)).state for run in (root, below, leaf)] == ["active", "stopped", "stopped"]
    assert [push.run for push in b.told(wire.RunEnded)] == [leaf.run]


def test_a_child_outlives_its_owner_while_somebody_holds_something_below_it(h: Harness, a: Client) -> None:
    root = join(a)
    below = child(a, root.run)
    b = h.session("b")
    leaf = child(b, below.run)
    b.ask(wire.OnceAcquire(run=leaf.run, key="k"))
    a.die()
    assert b.ask(wire.RunsGet(run=below.run)).state == "active"


def test_a_child_in_which_only_its_owner_held_something_ends_with_it(h: Harness, a: Client) -> None:
    below = child(a, join(a).run)
    a.ask(wire.OnceAcquire(run=below.run, key="k"))
    waits = h.session("b").waits(wire.OnceAcquire(run=below.run, key="k"))
    a.die()
    assert waits.reply.code == "SCOPE_CANCELLED"
    assert h.clients["b"].ask(wire.RunsGet(run=below.run)).state == "stopped"


def test_a_root_run_outlives_all_its_sessions(h: Harness, a: Client) -> None:
    run = join(a).run
    a.bye()
    assert join(h.session("b")).run == run


# ------------------------------------------------------------------ a large tree


def test_a_tree_of_100_runs_with_10000_jobs_is_stopped_in_one_batch_and_tidied_in_small_steps(h: Harness) -> None:
    a = h.session("a")
    root = a.ask(wire.RunsJoin(name="root")).run
    runs_ = [root]
    while len(runs_) < 100:
        runs_.append(a.ask(wire.RunsChild(parent=runs_[(len(runs_) - 1) // 3])).run)
    for run in runs_:
        for number in range(100):
            a.ask(wire.QueuesSend(run=run, queue="q", key=str(number), input="1", attempts=3))
    jobs = dict(h.rows("SELECT run, min(job) FROM jobs GROUP BY run"))
    other = h.session("o").ask(wire.RunsJoin(name="other")).run
    a.ask(wire.SlotsAcquire(run=other, pool="gpu", max=1))
    waits, results = [], []
    for number, run in enumerate(runs_):
        w = h.session(f"w{number}")
        results.append(w.waits(wire.QueuesResult(job=jobs[run])))
        waits.append(w.waits(wire.SlotsAcquire(run=run, pool="gpu")))
        waits.append(w.waits(wire.TimersSleep(run=run, name="t", after_ms=3_600_000)))
        waits.append(w.waits(wire.BarriersArrive(run=run, name="b", count=2, worker="w")))
        waits.append(w.waits(wire.GroupsEnded(run=run)))
    commits = 0

    def count(sql: str) -> None:
        nonlocal commits
        commits += sql == "COMMIT"

    h.connection.before = count
    changed = h.connection.total_changes
    a.ask(wire.RunsEnd(run=root, state="stopped"))
    assert commits == 1
    assert {request.reply.code for request in waits} == {"SCOPE_CANCELLED"}
    assert {request.reply.state for request in results} == {"cancelled"}
    assert h.connection.total_changes - changed < 500, "the rows of the jobs are left for later"
    while h.core().clearing:  # as long as there is more to do at once
        had = len(h.core().live(JOBS))
        h.tick()
        assert had - len(h.core().live(JOBS)) <= CLEARED_IN_ONE_STEP
    assert not h.core().live(JOBS)
    h.clock.pass_ms(retention.KEPT_MS)
    steps, left = 0, 10_000
    while left:
        h.pass_ms(retention.PAUSE_MS)
        now = h.value("SELECT count(*) FROM jobs")
        assert left - now <= 2 * retention.ROWS_IN_ONE_STEP
        assert h.clients["o"].ask(wire.RunsJoin(name="other")).run == other, "others get their turn in between"
        steps, left = steps + 1, now
    assert steps >= 10_000 // (2 * retention.ROWS_IN_ONE_STEP)


def test_a_group_ends_with_its_session_also_while_something_is_held_in_it(h: Harness) -> None:
    a, b = h.session("a"), h.session("b")
    root = b.ask(wire.RunsJoin(name="root")).run
    child = a.ask(wire.RunsChild(parent=root)).run
    group = a.ask(wire.GroupsSubmit(run=root, queue="q", attempts=1, members=(wire.NewJob(key="1", input="1"),))).run
    assert h.rows("SELECT run, is_group FROM runs ORDER BY created_ms, run") == [(root, 0), (child, 0), (group, 1)]
    for run in (child, group):
        b.ask(wire.OnceAcquire(run=run, key="k"))
    a.die()
    assert h.rows("SELECT run FROM runs WHERE state = 'active' ORDER BY run") == [(root,), (child,)]


@pytest.mark.parametrize("how", ["complete", "release", "lapse", "death", "restart"])
def test_a_child_run_whose_session_is_gone_ends_with_the_last_hold_in_it(h: Harness, a: Client, how: str) -> None:
    owner, w = h.session("owner"), h.session("w")
    root = join(a).run
    run = owner.ask(wire.RunsChild(parent=root)).run
    below = w.ask(wire.RunsChild(parent=run)).run
    first = w.ask(wire.OnceAcquire(run=run, key="1")).token
    last = w.ask(wire.OnceAcquire(run=below, key="2", lease_ms=40_000)).token
    waits = a.waits(wire.OnceAcquire(run=run, key="1"))
    owner.die()
    h.tick_if_due()
    state = lambda: a.ask(wire.RunsGet(run=run)).state  # noqa: E731
    assert state() == "active", "something in it is held"
    waits.cancel()
    w.ask(wire.OnceComplete(run=run, key="1", token=first, result="1"))
    h.tick_if_due()
    assert state() == "active"
    if how == "restart":
        h.start()
        h.tick_if_due()
    if how in ("complete", "restart"):
        w.submit(wire.OnceComplete(run=below, key="2", token=last, result="1"))
    elif how == "release":
        w.ask(wire.Release(token=last))
    elif how == "death":
        w.die()
    else:
        h.pass_ms(40_000)
    h.tick_if_due()
    assert state() == "stopped"
    assert a.ask(wire.RunsGet(run=root)).state == "active"
    assert h.core().looked_after == {}


def test_a_run_that_is_over_counts_as_long_as_something_is_held_below_it(h: Harness, a: Client) -> None:
    """The run in between is over and holds nothing itself, and neither a restart makes anything of that."""
    owner, w = h.session("owner"), h.session("w")
    top = owner.ask(wire.RunsChild(parent=join(a).run)).run
    middle = child(w, top).run
    below = child(w, middle).run
    token = w.ask(wire.OnceAcquire(run=below, key="k")).token
    a.ask(wire.RunsEnd(run=middle, state="stopped"))
    owner.die()
    for _ in range(2):
        assert [view.worker for view in a.ask(wire.RunsStatus(run=top)).workers] == ["worker-w"]
        assert a.ask(wire.RunsGet(run=top)).state == "active", "something below it is held"
        h.start()
        h.tick_if_due()
    w.ask(wire.Release(token=token))
    h.tick_if_due()
    assert a.ask(wire.RunsGet(run=top)).state == "stopped"
    assert len(h.core().live(RUNS)) == 1, "all others have left memory"


def test_the_deadlines_of_runs_that_end_early_do_not_pile_up_in_memory(h: Harness, a: Client) -> None:
    for number in range(300):
        run = join(a, f"n{number}", deadline_ms=h.clock.wall_ms() + 1_000_000).run
        a.ask(wire.RunsEnd(run=run, state="finished"))
    assert len(h.core().index(Runs).due) < 70


# ------------------------------------------------------------------ joined again


def test_a_deadline_is_set_where_a_run_has_none_and_reaches_all_below_it(h: Harness, a: Client) -> None:
    now = h.clock.wall_ms()
    root = join(a).run
    late, free = (child(a, root, deadline_ms=deadline).run for deadline in (now + 9_000, None))
    early = child(a, root, deadline_ms=now + 10).run
    token = a.ask(wire.OnceAcquire(run=free, key="k")).token
    a.ask(wire.OnceComplete(run=free, key="k", token=token, result="1"))
    assert join(a, deadline_ms=now + 1_000).deadline_ms == now + 1_000
    deadlines = [a.ask(wire.RunsGet(run=run)).deadline_ms for run in (root, late, free, early)]
    assert deadlines == [now + 1_000, now + 1_000, now + 1_000, now + 10]
    h.pass_ms(1_000)
    a.refused("DEADLINE_EXCEEDED", wire.OnceAcquire(run=free, key="k"))
    assert a.ask(wire.RunsGet(run=late)).state == "expired"


def test_a_deadline_in_the_past_is_refused_where_it_would_be_set_and_ignored_elsewhere(h: Harness, a: Client) -> None:
    join(a)
    a.refused("VALIDATION_FAILED", wire.RunsJoin(name="job", deadline_ms=h.clock.wall_ms()))
    deadline = join(a, deadline_ms=h.clock.wall_ms() + 5).deadline_ms
    assert join(a, deadline_ms=1).deadline_ms == deadline


def test_a_runs_id_as_its_name_gives_that_run_and_never_a_new_one(h: Harness, a: Client) -> None:
    root = join(a)
    below = child(a, root.run)
    for run in (root, below):
        assert join(a, run.run) == run
    a.ask(wire.RunsEnd(run=root.run, state="finished"))
    assert join(a, root.run).state == "finished"
    assert join(a, below.run).state == "stopped"
    a.refused("NOT_FOUND", wire.RunsJoin(name=root.run.replace("r", "r99")))
    h.session("b", space="other").refused("NOT_FOUND", wire.RunsJoin(name=root.run))
    assert join(a, root.run.replace("-", "-0")).state == "active", "the id of another database is a name"
    assert len(h.rows("SELECT run FROM runs")) == 3

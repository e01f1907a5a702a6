from __future__ import annotations

import msgspec
import pytest

from runstate import wire
from tests.harness import Client, Harness


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def w(h: Harness) -> Client:
    return h.session("w")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def submit(run: str, keys: str = "123", attempts: int | None = 1) -> wire.GroupsSubmit:
    members = tuple(wire.NewJob(key=key, input=f'"{key}"') for key in keys)
    return wire.GroupsSubmit(run=run, queue="q", members=members, attempts=attempts)


def work(w: Client, run: str, many: int = 1) -> list[wire.JobGrant]:
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=many),))
    return list(w.ask(admit).jobs)


def complete(w: Client, grant: wire.JobGrant) -> None:
    w.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result=f'"{grant.key}!"'))


def state(h: Harness, run: str) -> str:
    return str(h.value("SELECT state FROM runs WHERE run = :run", run=run))


def test_submit_makes_a_run_of_its_own_with_all_the_jobs(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run))
    assert a.ask(wire.RunsGet(run=group.run)).parent == run
    assert [(grant.job, grant.key, grant.run) for grant in work(w, run, 9)] == [
        (job, key, group.run) for job, key in zip(group.jobs, "123", strict=True)
    ]


def test_the_same_input_twice_is_one_job(a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run, "121"))
    assert group.jobs[0] == group.jobs[2] != group.jobs[1]
    assert len(work(w, run, 9)) == 2


def test_the_same_input_in_two_groups_is_different_work(a: Client, run: str) -> None:
    assert not set(a.ask(submit(run)).jobs) & set(a.ask(submit(run)).jobs)


def test_a_repeat_of_submit_submits_once(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(submit(run))
    assert asked.repeat().reply == asked.reply
    assert h.value("SELECT count(*) FROM jobs") == 3


def test_submit_is_refused_whole(h: Harness, a: Client, run: str) -> None:
    a.refused("NOT_FOUND", submit(run, attempts=None))
    a.ask(wire.QueuesDeclare(queue="q", attempts=5))
    a.refused("CONFLICT", submit(run, attempts=3))
    big = wire.NewJob(key="2", input="x" * 65_537)
    members = (wire.NewJob(key="1", input="1"), big)
    a.refused("VALIDATION_FAILED", wire.GroupsSubmit(run=run, queue="q", members=members))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", submit(run, attempts=5))
    assert h.value("SELECT count(*) FROM runs") == 1
    assert h.value("SELECT count(*) FROM jobs") == 0


def test_results_come_in_the_order_in_which_the_jobs_end(a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run))
    one, two, three = work(w, run, 3)
    waits = a.waits(wire.GroupsEnded(run=group.run))
    complete(w, two)
    assert [(view.job, view.result) for view in waits.reply.jobs] == [(two.job, '"2!"')]
    complete(w, three)
    w.ask(wire.QueuesFail(job=one.job, token=one.token, error="E: x"))
    rest = a.ask(wire.GroupsEnded(run=group.run, after=waits.reply.cursor))
    assert [(view.job, view.state) for view in rest.jobs] == [(three.job, "succeeded"), (one.job, "failed")]
    assert rest.jobs[1].reason == "handler_error: E: x"
    all_of_them = a.ask(wire.GroupsEnded(run=group.run))
    assert [view.job for view in all_of_them.jobs] == [two.job, three.job, one.job]
    assert all_of_them.cursor == rest.cursor


def test_many_results_come_in_parts_none_left_out_and_none_twice(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run, "")).run
    members = tuple(wire.NewJob(key=str(number), input="1") for number in range(230))
    a.ask(wire.QueuesSendMany(run=group, queue="q", members=members))
    ended: list[str] = []
    while len(ended) < 230:
        for grant in work(w, run, 50):
            complete(w, grant)
            ended.append(grant.job)
    seen: list[str] = []
    cursor = 0
    while len(seen) < 230:
        part = a.ask(wire.GroupsEnded(run=group, after=cursor))
        assert 0 < len(part.jobs) <= 100
        seen += [view.job for view in part.jobs]
        cursor = part.cursor
    assert seen == ended
    a.waits(wire.GroupsEnded(run=group, after=cursor))


def test_results_are_handed_out_after_a_restart_of_the_daemon(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run))
    one, two, three = work(w, run, 3)
    complete(w, two)
    first = a.ask(wire.GroupsEnded(run=group.run))
    complete(w, one)
    h.start()
    a.resume()
    rest = a.ask(wire.GroupsEnded(run=group.run, after=first.cursor))
    assert [(view.job, view.result) for view in rest.jobs] == [(one.job, '"1!"')]
    waits = a.waits(wire.GroupsEnded(run=group.run, after=rest.cursor))
    complete(w, three)
    assert [view.job for view in waits.reply.jobs] == [three.job]


def test_who_was_away_while_a_job_ended_hears_of_it_when_back(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run))
    waits = a.waits(wire.GroupsEnded(run=group.run))
    a.lose()
    one, two, _ = work(w, run, 3)
    complete(w, one)
    complete(w, two)
    assert waits.reply is None
    a.resume()
    assert [view.job for view in waits.reply.jobs] == [one.job, two.job]


def test_a_job_that_will_be_tried_again_has_not_ended(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run, "1", attempts=2))
    waits = a.waits(wire.GroupsEnded(run=group.run))
    (grant,) = work(w, run)
    w.ask(wire.QueuesFail(job=grant.job, token=grant.token, error="E"))
    assert waits.reply is None
    h.pass_ms(1_000)
    (again,) = work(w, run)
    w.die()
    assert [(view.job, view.reason) for view in waits.reply.jobs] == [(again.job, "worker_died")]


def test_a_wait_that_is_over_has_no_jobs_and_the_same_cursor(h: Harness, a: Client, run: str) -> None:
    group = a.ask(submit(run))
    waits = a.waits(wire.GroupsEnded(run=group.run, after=7, wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.GroupEnded(cursor=7)


@pytest.mark.parametrize("ended", ["group", "parent"])
def test_the_end_of_the_run_answers_who_waits_and_cancels_the_rest(a: Client, w: Client, run: str, ended: str) -> None:
    group = a.ask(submit(run))
    waits = a.waits(wire.GroupsEnded(run=group.run))
    job = w.waits(wire.QueuesResult(job=group.jobs[0]))
    a.ask(wire.RunsEnd(run=group.run if ended == "group" else run, state="stopped"))
    assert (waits.reply.code, waits.reply.run) == ("SCOPE_CANCELLED", group.run)
    assert job.reply.state == "cancelled"
    a.refused("SCOPE_CANCELLED", wire.GroupsEnded(run=group.run))


@pytest.mark.parametrize("how", ["die", "bye"])
def test_a_group_ends_with_its_callers_session_whatever_is_held_in_it(
    h: Harness, a: Client, w: Client, how: str
) -> None:
    run = w.ask(wire.RunsJoin(name="job")).run
    group = a.ask(submit(run))
    child = a.ask(wire.RunsChild(parent=run)).run
    w.ask(wire.OnceAcquire(run=child, key="k"))
    (grant,) = work(w, run)
    a.die() if how == "die" else a.bye()
    assert (state(h, group.run), state(h, child)) == ("stopped", "active")
    assert [push.run for push in w.told(wire.RunEnded)] == [group.run], "its worker hears of it"
    w.refused("LEASE_LOST", wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))


def test_a_group_outlives_a_lost_connection_and_a_restart(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(submit(run))
    a.lose()
    a.resume()
    waits = a.waits(wire.GroupsEnded(run=group.run))
    h.start()
    a.resume()
    w.resume()
    again = waits.repeat()
    complete(w, work(w, run)[0])
    assert len(again.reply.jobs) == 1
    assert state(h, group.run) == "active"


def test_an_empty_group_gets_its_jobs_one_by_one(h: Harness, a: Client, w: Client, run: str) -> None:
    group = a.ask(wire.GroupsSubmit(run=run, queue="q", attempts=2))
    assert group.jobs == ()
    assert a.ask(wire.QueuesDeclare(queue="q")).attempts == 2
    sent = a.ask(wire.QueuesSend(run=group.run, queue="q", key="1", input="1"))
    waits = a.waits(wire.GroupsEnded(run=group.run))
    (grant,) = work(w, run, 9)
    complete(w, grant)
    assert [view.job for view in waits.reply.jobs] == [sent.job]


def test_an_empty_group_of_a_queue_that_is_not_there_leaves_no_run(h: Harness, a: Client, run: str) -> None:
    before = h.value("SELECT count(*) FROM runs")
    a.refused("NOT_FOUND", wire.GroupsSubmit(run=run, queue="none"))
    assert h.value("SELECT count(*) FROM runs") == before


@pytest.mark.parametrize("how", ["die", "bye"])
@pytest.mark.parametrize("keys", ["", "12"])
def test_what_is_not_owned_survives_its_session_and_ends_with_the_run_above_it(
    h: Harness, a: Client, w: Client, how: str, keys: str
) -> None:
    run = w.ask(wire.RunsJoin(name="job")).run
    group = a.ask(msgspec.structs.replace(submit(run, keys), owned=False)).run
    child = a.ask(wire.RunsChild(parent=run, owned=False)).run
    a.die() if how == "die" else a.bye()
    h.pass_ms(60_000)
    assert (state(h, group), state(h, child)) == ("active", "active")
    w.ask(wire.QueuesSend(run=group, queue="q", key="3", input="1"))
    assert [grant.key for grant in work(w, run, 9)] == [*keys, "3"]
    w.ask(wire.RunsEnd(run=run, state="finished"))
    assert (state(h, group), state(h, child)) == ("stopped", "stopped")

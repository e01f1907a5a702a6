"""Deadlocks, as requests: which waits are refused, which are not, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from runstate import wire
from runstated.engine.circles import REACT_MS
from runstated.engine.entries import Nested
from tests.harness import Client, Harness, Request

MINUTE_MS = 60_000
LONG_MS = 600_000  # a lease that does not lapse here


@pytest.fixture
def p(h: Harness) -> Client:
    p = h.session("p")
    p.ask(wire.SlotsDeclare(pool="one", max=1))
    p.ask(wire.SlotsDeclare(pool="two", max=2))
    p.ask(wire.SlotsDeclare(pool="three", max=3))
    p.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=60))
    p.ask(wire.QueuesDeclare(queue="q", attempts=9))
    return p


@pytest.fixture
def q(h: Harness) -> Client:
    return h.session("q")


@pytest.fixture
def w(h: Harness) -> Client:
    return h.session("w")


@pytest.fixture
def run(p: Client) -> str:
    return str(p.ask(wire.RunsJoin(name="r")).run)


def slots(run: str, pool: str, units: int = 1, **more: Any) -> wire.SlotsAcquire:
    return wire.SlotsAcquire(run=run, pool=pool, units=units, lease_ms=LONG_MS, **more)


def once(run: str, key: str, **more: Any) -> wire.OnceAcquire:
    return wire.OnceAcquire(run=run, key=key, lease_ms=LONG_MS, **more)


def hold(client: Client, run: str, pool: str, units: int = 1, **more: Any) -> int:
    return int(client.ask(slots(run, pool, units, **more)).token)


def of(**pools: int) -> wire.Needs:
    return wire.Needs(slots=tuple(wire.UnitsNeeded(name=name, units=units) for name, units in pools.items()))


def send(client: Client, run: str, key: str, needs: wire.Needs | None = None) -> str:
    return str(client.ask(wire.QueuesSend(run=run, queue="q", key=key, input="1", needs=needs)).job)


def result(job: str, *within: int, **more: Any) -> wire.QueuesResult:
    return wire.QueuesResult(job=job, within=within, **more)


def admit(run: str, **more: Any) -> wire.QueuesAdmit:
    return wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", lease_ms=LONG_MS),), **more)


def give_back(client: Client, token: int) -> None:
    assert client.ask(wire.Release(token=token)).held


def is_refused(request: Request) -> bool:
    return isinstance(request.reply, wire.Error) and request.reply.code == "DEADLOCK"


# ------------------------------------------------------------------ waits that end


@pytest.mark.parametrize("mine_ms", [None, MINUTE_MS])
def test_a_circle_that_the_time_out_of_another_opens_is_none(
    h: Harness, p: Client, q: Client, run: str, mine_ms: int | None
) -> None:
    x, y = hold(p, run, "one"), hold(q, run, "two", 2)
    short = p.waits(slots(run, "two", within=(x,), wait_ms=MINUTE_MS - REACT_MS))
    waits = q.waits(slots(run, "one", within=(y,), wait_ms=mine_ms))
    h.pass_ms(MINUTE_MS - REACT_MS)
    assert short.reply == wire.SlotsBusy()
    give_back(p, x)
    assert isinstance(waits.reply, wire.SlotsGranted)


def test_a_wait_whose_own_time_out_comes_first_is_in_vain_and_refused(p: Client, q: Client, run: str) -> None:
    x, y = hold(p, run, "one"), hold(q, run, "two", 2)
    p.waits(slots(run, "two", within=(x,), wait_ms=MINUTE_MS))
    q.refused("DEADLOCK", slots(run, "one", within=(y,), wait_ms=MINUTE_MS + REACT_MS - 1))


def test_a_circle_through_a_session_that_is_away_is_refused_when_it_is_back(p: Client, q: Client, run: str) -> None:
    x, y = hold(p, run, "one"), hold(q, run, "two", 2)
    mine = p.waits(slots(run, "two", within=(x,)))
    p.lose()
    waits = q.waits(slots(run, "one", within=(y,)))
    p.resume()
    assert is_refused(mine)
    assert waits.reply is None


def test_a_job_that_waits_for_a_window_of_a_limit_is_waited_for(h: Harness, p: Client, w: Client, run: str) -> None:
    x = hold(p, run, "one")
    p.ask(wire.LimitsTake(run=run, limit="api", units=2))
    job = send(p, run, "1", wire.Needs(limits=(wire.UnitsNeeded(name="api"),)))
    waits = p.waits(result(job, x))
    worker = w.waits(admit(run))
    h.pass_ms(MINUTE_MS)
    w.ask(wire.QueuesComplete(job=job, token=worker.reply.jobs[0].token, result="1"))
    assert waits.reply.state == "succeeded"


# ------------------------------------------------------------------ units


def test_the_units_of_those_that_can_end_must_be_enough(p: Client, q: Client, run: str) -> None:
    x = hold(p, run, "three")
    hold(q, run, "three", 2)
    p.waits(slots(run, "three", 2, within=(x,)))
    error = p.refused("DEADLOCK", slots(run, "three", 3, within=(x,)))
    assert error.message == "deadlock: worker-p (pid 100) waits for slots three, held by worker-p itself"


def test_the_line_before_a_call_counts(p: Client, q: Client, run: str) -> None:
    x, key = hold(p, run, "three"), q.ask(once(run, "k")).token
    q.waits(slots(run, "three", 3, within=(key,)))
    error = p.refused("DEADLOCK", slots(run, "three", 2, within=(x,)))
    assert error.message == (
        "deadlock: worker-p (pid 100) waits for slots three, behind worker-q (pid 101), which waits for worker-p"
        " (slots three)"
    )


def test_a_newcomer_that_would_stand_before_what_its_holder_waits_for_is_refused(
    p: Client, q: Client, run: str
) -> None:
    x, key = hold(p, run, "two"), q.ask(once(run, "k")).token
    waits = p.waits(result(send(p, run, "1", of(two=1)), x))
    q.refused("DEADLOCK", slots(run, "two", 2, within=(key,)))
    assert waits.reply is None


# ------------------------------------------------------------------ jobs


def test_the_holder_of_what_a_delayed_job_will_need_does_not_wait_for_it(p: Client, w: Client, run: str) -> None:
    job = send(p, run, "1", of(one=1))
    (grant,) = w.ask(admit(run)).jobs
    w.ask(wire.QueuesFail(job=job, token=grant.token, error="E: x"))
    error = p.refused("DEADLOCK", result(job, hold(p, run, "one")))
    assert error.message == (
        f"deadlock: worker-p (pid 100) waits for slots one, which job {job} of q needs, held by worker-p itself"
    )


@pytest.mark.parametrize("holders", [2, 3])
def test_of_several_holders_of_a_pool_that_wait_for_one_job_the_last_is_refused(
    h: Harness, p: Client, run: str, holders: int
) -> None:
    job = send(p, run, "1", wire.Needs(slots=(wire.UnitsNeeded(name={2: "two", 3: "three"}[holders]),)))
    others = [h.session(f"h{number}") for number in range(holders)]
    requests = [other.submit(result(job, hold(other, run, {2: "two", 3: "three"}[holders]))) for other in others]
    assert [is_refused(request) for request in requests] == [False] * (holders - 1) + [True]


def test_a_job_that_needs_more_from_now_on_is_waited_for_no_longer(p: Client, w: Client, run: str) -> None:
    x = hold(p, run, "one")
    waits = p.waits(result(send(p, run, "1"), x))
    w.ask(wire.QueuesDeclare(queue="q", needs=of(one=1)))
    assert is_refused(waits)


def test_a_job_that_has_failed_and_needs_more_now_is_waited_for_no_longer(p: Client, w: Client, run: str) -> None:
    x, job = hold(p, run, "one"), send(p, run, "1")
    (grant,) = w.ask(admit(run)).jobs
    waits = p.waits(result(job, x))
    w.ask(wire.QueuesDeclare(queue="q", needs=of(one=1)))
    assert waits.reply is None, "it runs"
    w.ask(wire.QueuesFail(job=job, token=grant.token, error="E: x"))
    assert is_refused(waits)


def test_a_worker_that_comes_to_stand_there_for_an_older_job_closes_a_circle(p: Client, w: Client, run: str) -> None:
    x = hold(p, run, "two")
    send(p, run, "1", of(two=2))
    waits = p.waits(result(send(p, run, "2", of(two=1)), x))
    w.waits(admit(run))
    assert is_refused(waits)


def test_whoever_holds_what_all_jobs_of_its_group_need_is_refused(p: Client, run: str) -> None:
    members = tuple(wire.NewJob(key=str(number), input="1") for number in range(2))
    x = hold(p, run, "one")
    for needs, is_circle in ((of(one=1), True), (of(two=1), False)):
        group = p.ask(wire.GroupsSubmit(run=run, queue="q", members=members, needs=needs)).run
        assert is_refused(p.submit(wire.GroupsEnded(run=group, within=(x,)))) is is_circle


def test_a_worker_inside_of_what_its_jobs_need_may_get_others(p: Client, run: str) -> None:
    x = hold(p, run, "one")
    send(p, run, "1", of(one=1))
    waits = p.waits(admit(run, within=(x,)))
    send(p, run, "2", of(two=1))
    assert [grant.key for grant in waits.reply.jobs] == ["2"]


# ------------------------------------------------------------------ the rest


def test_a_long_chain_of_waits_is_followed_to_its_end(p: Client, run: str) -> None:
    tokens = [p.ask(once(run, str(number))).token for number in range(1_000)]
    for number, token in enumerate(tokens[:-1]):
        p.waits(once(run, str(number + 1), within=(token,)))
    error = p.refused("DEADLOCK", once(run, "0", within=(tokens[-1],)))
    assert error.message.count("which waits for") == 999


def test_two_waits_inside_of_one_hold_must_both_end(p: Client, q: Client, run: str) -> None:
    x, y = p.ask(once(run, "x")).token, q.ask(once(run, "y")).token
    hold(q, run, "one")
    p.waits(slots(run, "one", within=(x,)))
    p.waits(once(run, "y", within=(x,)))
    q.refused("DEADLOCK", once(run, "x", within=(y,)))


def test_a_run_that_is_over_leaves_no_circle(p: Client, q: Client, run: str) -> None:
    x, y = p.ask(once(run, "x")).token, q.ask(once(run, "y")).token
    waits = p.waits(once(run, "y", within=(x,)))
    p.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply.code == "SCOPE_CANCELLED"
    assert q.ask(once(run, "x", within=(y,))).code == "SCOPE_CANCELLED"


@pytest.mark.parametrize("repeats", [False, True])
def test_a_wait_that_comes_to_be_awaited_inside_of_a_hold_closes_a_circle_then(
    h: Harness, p: Client, q: Client, run: str, repeats: bool
) -> None:
    x, y = p.ask(once(run, "x")).token, q.ask(once(run, "y")).token
    task = p.waits(once(run, "y", inherited=(x,)))
    q.waits(once(run, "x", within=(y,)))
    if repeats:
        task = task.repeat(within=(x,), inherited=())
    else:
        h.run(Nested("p", wire.Nested(call=task.id, within=(x,))))
    assert is_refused(task)
    h.run(Nested("p", wire.Nested(call=task.id)))  # it waits no longer


def test_a_wait_that_is_awaited_no_longer_opens_a_circle(h: Harness, p: Client, q: Client, run: str) -> None:
    x, y = p.ask(once(run, "x")).token, q.ask(once(run, "y")).token
    task = p.waits(once(run, "y", within=(x,)))
    q.refused("DEADLOCK", once(run, "x", within=(y,)))
    h.run(Nested("p", wire.Nested(call=task.id, inherited=(x,))))
    q.waits(once(run, "x", within=(y,)))
    give_back(p, x)
    assert task.reply is None

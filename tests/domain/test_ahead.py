from __future__ import annotations

import pytest

from runstate import wire
from tests.harness import Client, Harness

LEASE_MS = 30_000


@pytest.fixture
def a(h: Harness) -> Client:
    """The producer."""
    return h.session("a")


@pytest.fixture
def w(h: Harness) -> Client:
    """The worker that takes jobs ahead."""
    return h.session("w")


@pytest.fixture
def x(h: Harness) -> Client:
    """Another worker."""
    return h.session("x")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def send(a: Client, run: str, *keys: str, attempts: int = 2, **more: wire.Needs) -> tuple[str, ...]:
    members = tuple(wire.NewJob(key=key, input="1") for key in keys)
    sent = a.ask(wire.QueuesSendMany(run=run, queue="q", members=members, attempts=attempts, **more))
    return tuple(sent.jobs)


def admit(run: str, places: int = 1, ahead: int = 0, below: bool = True) -> wire.QueuesAdmit:
    return wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=places, ahead=ahead, below=below),))


def take(client: Client, run: str, places: int = 1, ahead: int = 0) -> list[wire.JobGrant]:
    return list(client.ask(admit(run, places, ahead)).jobs)


def started(*grants: wire.JobGrant) -> wire.QueuesStarted:
    return wire.QueuesStarted(tokens=tuple(grant.token for grant in grants))


def complete(grant: wire.JobGrant) -> wire.QueuesComplete:
    return wire.QueuesComplete(job=grant.job, token=grant.token, result="1")


def view(client: Client, job: str) -> tuple[str, int]:
    found = client.ask(wire.QueuesResult(job=job, wait_ms=0))
    return found.state, found.attempt


def asked_back(client: Client) -> list[int]:
    return [token for push in client.told(wire.JobsReturn) for token in push.tokens]


def test_jobs_are_taken_ahead_besides_those_of_the_places_and_are_ready_to_others(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    jobs = send(a, run, *"12345")
    grants = take(w, run, places=1, ahead=3)
    assert [(grant.key, grant.ahead, grant.attempt) for grant in grants] == [
        ("1", False, 1),
        ("2", True, 1),
        ("3", True, 1),
        ("4", True, 1),
    ]
    assert [view(a, job) for job in jobs[:2]] == [("running", 1), ("ready", 0)]
    assert a.ask(wire.StatusGet()).queues[0].counts == {"running": 1, "ready": 4}
    assert h.held().keys() == {grant.token for grant in grants}


def test_a_job_that_is_begun_counts_and_a_repeat_of_that_counts_once(a: Client, w: Client, run: str) -> None:
    _, job = send(a, run, *"12")
    one, two = take(w, run, ahead=1)
    for _ in range(2):
        assert w.ask(started(one, two)) == wire.Ok()
        assert view(a, job) == ("running", 1)
    assert w.ask(complete(two)).attempt == 1
    assert w.ask(started(two)) == wire.Ok()
    assert view(a, job) == ("succeeded", 1)


def test_an_outcome_says_that_a_job_was_begun(h: Harness, a: Client, w: Client, run: str) -> None:
    _, done, failed = send(a, run, *"123")
    _, two, three = take(w, run, ahead=2)
    assert w.ask(complete(two)).attempt == 1
    fail = wire.QueuesFail(job=three.job, token=three.token, error="E: x")
    assert w.ask(fail).state == "delayed"
    assert (view(a, done), view(a, failed)) == (("succeeded", 1), ("delayed", 1))
    h.pass_ms(1_000)
    (again,) = take(w, run)
    assert (again.key, again.attempt) == ("3", 2)


@pytest.mark.parametrize("how", ["died", "lapsed", "released", "bye"])
def test_without_being_begun_it_is_ready_again_and_no_attempt_is_counted(
    h: Harness, a: Client, w: Client, x: Client, run: str, how: str
) -> None:
    send(a, run, *"12", attempts=1)
    one, two = take(w, run, ahead=1)
    w.ask(complete(one))
    if how == "lapsed":
        h.pass_ms(LEASE_MS)
        assert w.told(wire.LeaseLost)[0].token == two.token
    elif how == "released":
        w.ask(wire.Release(token=two.token))
    else:
        w.die() if how == "died" else w.bye()
    (again,) = take(x, run)
    assert (again.key, again.attempt, again.ahead, again.reason) == ("2", 1, False, None)


def test_who_has_no_place_takes_ahead_and_does_not_wait(a: Client, w: Client, run: str) -> None:
    assert take(w, run, places=0, ahead=2) == []
    send(a, run, *"123")
    assert [(grant.key, grant.ahead) for grant in take(w, run, places=0, ahead=2)] == [("1", True), ("2", True)]


def test_nothing_is_taken_ahead_while_another_worker_waits_for_it(a: Client, w: Client, x: Client, run: str) -> None:
    first, second = w.waits(admit(run, ahead=5)), x.waits(admit(run))
    send(a, run, *"12")
    assert [grant.key for grant in first.reply.jobs] == ["1"]
    assert [grant.key for grant in second.reply.jobs] == ["2"]
    below = a.ask(wire.RunsChild(parent=run)).run
    first = w.waits(admit(run, ahead=5))
    x.waits(admit(below))
    send(a, run, *"34")
    assert [grant.key for grant in first.reply.jobs] == ["3", "4"], "nobody else waits for these"


def test_who_waits_gets_what_others_have_taken_ahead_and_not_begun(
    h: Harness, a: Client, w: Client, x: Client, run: str
) -> None:
    send(a, run, *"1234")
    _, two, three, four = take(w, run, ahead=3)
    waits = x.waits(admit(run, places=2))
    assert asked_back(w) == [four.token, three.token], "those that are begun last"
    assert waits.reply is None
    w.ask(started(three))
    assert waits.reply is None
    w.ask(wire.Release(token=four.token))
    assert [(grant.key, grant.attempt) for grant in waits.reply.jobs] == [("4", 1)]
    h.session("y").waits(admit(run))
    assert asked_back(w) == [four.token, three.token, two.token]


def test_a_worker_is_not_asked_for_what_it_holds_itself(a: Client, w: Client, run: str) -> None:
    send(a, run, *"12")
    take(w, run, ahead=1)
    w.waits(admit(run))
    assert asked_back(w) == []


def test_what_was_asked_for_while_the_worker_was_away_is_asked_again(
    h: Harness, a: Client, w: Client, x: Client, run: str
) -> None:
    send(a, run, *"12")
    _, two = take(w, run, ahead=1)
    w.lose()
    x.waits(admit(run))
    w.pushes.clear()
    w.resume()
    assert asked_back(w) == [two.token]


@pytest.mark.parametrize("what", ["job", "group"])
def test_a_handler_that_waits_for_what_its_own_worker_holds_gets_it_back(
    h: Harness, a: Client, w: Client, x: Client, run: str, what: str
) -> None:
    send(a, run, "outer")
    (outer,) = take(w, run)
    members = (wire.NewJob(key="inner", input="1"),)
    group = w.ask(wire.GroupsSubmit(run=run, queue="q", members=members))
    (inner,) = take(w, run, places=0, ahead=1)
    within = (outer.token,)
    waits = w.waits(
        wire.QueuesResult(job=inner.job, within=within)
        if what == "job"
        else wire.GroupsEnded(run=group.run, within=within)
    )
    assert asked_back(w) == [inner.token]
    w.ask(wire.Release(token=inner.token))
    x.ask(complete(take(x, run)[0]))
    assert waits.reply is not None


def test_only_jobs_without_needs_are_taken_ahead(a: Client, w: Client, run: str) -> None:
    a.ask(wire.SlotsDeclare(pool="gpu", max=9))
    needs = wire.Needs(slots=(wire.UnitsNeeded(name="gpu"),))
    send(a, run, "needs", needs=needs)
    send(a, run, *"12")
    assert [grant.key for grant in take(w, run, places=0, ahead=9)] == ["1", "2"]
    send(a, run, "3")
    a.ask(wire.QueuesDeclare(queue="q", needs=needs))
    assert take(w, run, places=0, ahead=9) == []
    assert len(asked_back(w)) == 2, "they may need something now"


def test_the_end_of_the_run_cancels_what_is_taken_ahead(h: Harness, a: Client, w: Client, run: str) -> None:
    _, job = send(a, run, *"12")
    _, two = take(w, run, ahead=1)
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert view(a, job) == ("cancelled", 0)
    assert w.ask(started(two)) == wire.Ok()
    w.refused("LEASE_LOST", complete(two))
    assert view(a, job) == ("cancelled", 0)


def test_after_a_restart_of_the_daemon_it_is_still_taken_ahead(
    h: Harness, a: Client, w: Client, x: Client, run: str
) -> None:
    _, job = send(a, run, *"12")
    asked = w.submit(admit(run, ahead=1))
    h.start()
    for client in (a, w, x):
        client.resume()
    assert asked.repeat().reply == asked.reply
    _, two = asked.reply.jobs
    x.waits(admit(run))
    assert asked_back(w) == [two.token]
    w.ask(started(two))
    assert view(a, job) == ("running", 1)


def test_a_token_of_another_session_begins_nothing(a: Client, w: Client, x: Client, run: str) -> None:
    _, job = send(a, run, *"12")
    _, two = take(w, run, ahead=1)
    x.ask(started(two))
    assert view(a, job) == ("ready", 0)

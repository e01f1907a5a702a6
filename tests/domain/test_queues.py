from __future__ import annotations

import msgspec
import pytest

from runstate import wire
from runstated.domain import jobs
from tests.harness import Client, Harness

LEASE_MS = 30_000


@pytest.fixture
def a(h: Harness) -> Client:
    """The producer."""
    return h.session("a")


@pytest.fixture
def w(h: Harness) -> Client:
    """The worker."""
    return h.session("w")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def send(run: str, key: str = "1", queue: str = "q", attempts: int | None = 3, **more: str) -> wire.QueuesSend:
    return wire.QueuesSend(run=run, queue=queue, key=key, input=more.get("input", key), attempts=attempts)


def admit(run: str, *queues: str, places: int = 1, **more: int) -> wire.QueuesAdmit:
    entries = tuple(wire.AdmitFrom(run=run, queue=queue, places=places) for queue in queues or ("q",))
    return wire.QueuesAdmit(queues=entries, **more)  # type: ignore[arg-type]


def complete(grant: wire.JobGrant, result: str = "1") -> wire.QueuesComplete:
    return wire.QueuesComplete(job=grant.job, token=grant.token, result=result)


def fail(grant: wire.JobGrant, error: str = "ValueError: no", retry: bool = True) -> wire.QueuesFail:
    return wire.QueuesFail(job=grant.job, token=grant.token, error=error, retry=retry)


def take(client: Client, run: str, *queues: str) -> wire.JobGrant:
    (grant,) = client.ask(admit(run, *queues)).jobs
    assert isinstance(grant, wire.JobGrant)
    return grant


def view(client: Client, job: str) -> wire.JobView:
    found = client.submit(wire.QueuesResult(job=job, wait_ms=0)).reply
    assert isinstance(found, wire.JobView)
    return found


# ------------------------------------------------------------------ declare


def test_declare_creates_a_queue_and_then_verifies_it(a: Client) -> None:
    assert a.ask(wire.QueuesDeclare(queue="q", attempts=5)) == wire.QueueView(queue="q", attempts=5)
    assert a.ask(wire.QueuesDeclare(queue="q", attempts=5)).attempts == 5
    assert a.ask(wire.QueuesDeclare(queue="q")).attempts == 5


def test_declare_with_other_attempts_is_a_conflict(a: Client) -> None:
    a.ask(wire.QueuesDeclare(queue="q", attempts=5))
    a.refused("CONFLICT", wire.QueuesDeclare(queue="q", attempts=4))
    assert a.ask(wire.QueuesDeclare(queue="q")).attempts == 5


def test_declare_without_attempts_finds_no_new_queue(a: Client) -> None:
    assert a.refused("NOT_FOUND", wire.QueuesDeclare(queue="review")).message == "queue review not found"


def test_a_queue_belongs_to_its_space(h: Harness, a: Client) -> None:
    a.ask(wire.QueuesDeclare(queue="q", attempts=5))
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", wire.QueuesDeclare(queue="q"))
    assert other.ask(wire.QueuesDeclare(queue="q", attempts=2)).attempts == 2


# ------------------------------------------------------------------ send


def test_send_submits_a_ready_job(h: Harness, a: Client, run: str) -> None:
    job = a.ask(send(run))
    assert (job.state, job.attempt) == ("ready", 0)
    assert h.counted() == {(run, "q", "ready"): 1}
    assert h.events(run) == ["scope.created", "task.submitted"]


def test_send_of_the_same_key_is_the_same_job_whatever_has_become_of_it(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    job = a.ask(send(run)).job
    seen = [a.ask(send(run)).state]
    grant = take(w, run)
    seen.append(a.ask(send(run)).state)
    w.ask(fail(grant))
    seen.append(a.ask(send(run)).state)
    h.pass_ms(1_000)
    w.ask(complete(take(w, run), '"r"'))
    last = a.ask(send(run, input='"another input"'))
    assert [*seen, last.state] == ["ready", "running", "delayed", "succeeded"]
    assert (last.job, last.result) == (job, '"r"')
    assert h.value("SELECT count(*) FROM jobs") == 1


def test_send_of_the_key_of_a_failed_job_is_that_failed_job(a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run)).job
    w.ask(fail(take(w, run), retry=False))
    again = a.ask(send(run))
    assert (again.job, again.state, again.reason) == (job, "failed", "handler_error: ValueError: no")


def test_the_same_key_in_another_run_or_queue_is_another_job(a: Client, run: str) -> None:
    other = a.ask(wire.RunsJoin(name="other")).run
    jobs = {a.ask(send(run)).job, a.ask(send(other)).job, a.ask(send(run, queue="p")).job}
    assert len(jobs) == 3


def test_send_to_a_queue_that_nobody_declared_is_refused(a: Client, run: str) -> None:
    error = a.refused("NOT_FOUND", send(run, queue="review", attempts=None))
    assert error.message == "queue review not found"


def test_send_with_other_attempts_than_the_queues_is_a_conflict_and_leaves_no_job(
    h: Harness, a: Client, run: str
) -> None:
    a.ask(wire.QueuesDeclare(queue="q", attempts=5))
    a.refused("CONFLICT", send(run, attempts=3))
    assert h.value("SELECT count(*) FROM jobs") == 0


def test_send_into_an_ended_run_is_refused(a: Client, run: str) -> None:
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", send(run))


def test_send_after_the_deadline_is_refused_before_any_tick(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="short", deadline_ms=h.clock.wall_ms() + 5)).run
    h.clock.pass_ms(5)
    a.refused("DEADLINE_EXCEEDED", send(run))


@pytest.mark.parametrize("character", ["x", "ä", "€", "😀"])
def test_an_input_may_have_65536_bytes_of_utf8_and_no_more(a: Client, run: str, character: str) -> None:
    width = len(character.encode())
    limit = character * (65_536 // width) + "x" * (65_536 % width)
    a.refused("VALIDATION_FAILED", send(run, input=limit + "x"))
    assert a.ask(send(run, input=limit)).state == "ready"


def test_a_result_may_have_65536_bytes_of_utf8_and_no_more(a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    grant = take(w, run)
    w.refused("VALIDATION_FAILED", complete(grant, "ä" * 32_768 + "x"))
    assert w.beat(grant.token) == [True]
    assert w.ask(complete(grant, "ä" * 32_768)).state == "succeeded"


# ------------------------------------------------------------------ send many


def send_many(run: str, *keys: str, attempts: int | None = 3, needs: wire.Needs | None = None) -> wire.QueuesSendMany:
    members = tuple(wire.NewJob(key=key, input=f'"{key}"') for key in keys)
    return wire.QueuesSendMany(run=run, queue="q", members=members, attempts=attempts, needs=needs)


def test_send_many_submits_each_job_and_they_start_in_their_order(h: Harness, a: Client, w: Client, run: str) -> None:
    keys = [str(number) for number in range(30)]
    waits = w.waits(admit(run, places=50))
    sent = a.ask(send_many(run, *keys)).jobs
    assert [(grant.job, grant.key, grant.input) for grant in waits.reply.jobs] == [
        (job, key, f'"{key}"') for job, key in zip(sent, keys, strict=True)
    ]
    assert h.events(run) == ["scope.created", *["task.submitted"] * 30]


def test_send_many_gives_the_jobs_there_are_and_a_key_said_twice_is_one_job(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    done, running = a.ask(send_many(run, "1", "2")).jobs
    w.ask(complete(take(w, run)))
    take(w, run)
    asked = a.submit(send_many(run, "3", "2", "4", "1", "3"))
    three, *known, last = asked.reply.jobs
    assert (known[0], known[2], last) == (running, done, three)
    assert len({done, running, three, known[1]}) == 4
    assert asked.repeat().reply == asked.reply
    assert h.counted() == {(run, "q", "succeeded"): 1, (run, "q", "running"): 1, (run, "q", "ready"): 2}


def test_send_many_is_refused_as_a_whole(h: Harness, a: Client, run: str) -> None:
    big = wire.NewJob(key="big", input="x" * 65_537)
    a.refused("VALIDATION_FAILED", wire.QueuesSendMany(run=run, queue="q", members=(big,), attempts=3))
    fine = tuple(wire.NewJob(key=str(number), input="1") for number in range(56))
    a.refused("VALIDATION_FAILED", wire.QueuesSendMany(run=run, queue="q", members=(*fine, big), attempts=3))
    unknown = wire.Needs(slots=(wire.UnitsNeeded(name="gpu"),))
    a.refused("NOT_FOUND", send_many(run, "1", needs=unknown))
    a.refused("NOT_FOUND", send_many(run, "1", attempts=None))
    a.refused("NOT_FOUND", wire.QueuesDeclare(queue="q"))
    a.ask(send(run, "1"))
    a.refused("CONFLICT", send_many(run, "1", "2", attempts=4))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", send_many(run, "2"))
    assert h.value("SELECT count(*) FROM jobs") == 1


# ------------------------------------------------------------------ admit


def test_admit_gives_the_oldest_job_with_its_input(a: Client, w: Client, run: str) -> None:
    first = a.ask(send(run, "1", input='{"n": 1}')).job
    a.ask(send(run, "2"))
    grant = take(w, run)
    assert grant == wire.JobGrant(
        token=grant.token, job=first, run=run, run_name="job", key="1", input='{"n": 1}', attempt=1, secret=grant.secret
    )


def test_admit_gives_up_to_the_free_places(h: Harness, a: Client, w: Client, run: str) -> None:
    for key in "12345":
        a.ask(send(run, key))
    assert [grant.key for grant in w.ask(admit(run, places=3)).jobs] == ["1", "2", "3"]
    assert [grant.key for grant in w.ask(admit(run, places=3)).jobs] == ["4", "5"]
    assert h.counted() == {(run, "q", "running"): 5}


def test_admit_waits_until_a_job_is_sent(a: Client, w: Client, run: str) -> None:
    waits = w.waits(admit(run))
    job = a.ask(send(run)).job
    assert [grant.job for grant in waits.reply.jobs] == [job]


def test_admit_from_several_queues_says_which_one_a_job_is_of(a: Client, w: Client, run: str) -> None:
    a.ask(send(run, "1", queue="p"))
    a.ask(send(run, "2", queue="q"))
    grants = w.ask(admit(run, "empty", "q", "p")).jobs
    assert [(grant.key, grant.source) for grant in grants] == [("2", 1), ("1", 2)]


def test_admit_whose_time_is_over_gets_no_jobs(h: Harness, w: Client, run: str) -> None:
    waits = w.waits(admit(run, wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.JobsGranted()


def test_one_job_goes_to_one_worker_and_the_longest_waiting_first(h: Harness, a: Client, w: Client, run: str) -> None:
    first, second = w.waits(admit(run)), h.session("w2").waits(admit(run))
    a.ask(send(run, "1"))
    assert [grant.key for grant in first.reply.jobs] == ["1"]
    assert second.reply is None
    a.ask(send(run, "2"))
    assert [grant.key for grant in second.reply.jobs] == ["2"]


def test_a_worker_takes_jobs_of_child_runs_too_oldest_first(a: Client, w: Client, run: str) -> None:
    below = a.ask(wire.RunsChild(parent=run, name="c")).run
    leaf = a.ask(wire.RunsChild(parent=below)).run
    for where, key in ((leaf, "1"), (run, "2"), (below, "3"), (leaf, "4")):
        a.ask(send(where, key))
    grants = w.ask(admit(run, places=9)).jobs
    assert [(grant.key, grant.run, grant.run_name) for grant in grants] == [
        ("1", leaf, None),
        ("2", run, "job"),
        ("3", below, "c"),
        ("4", leaf, None),
    ]


def test_a_job_of_a_child_run_wakes_the_workers_of_all_runs_above_it(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    beside = a.ask(wire.RunsChild(parent=run)).run
    above, at, other = w.waits(admit(run)), w.waits(admit(below)), w.waits(admit(beside))
    a.ask(send(below, "1"))
    a.ask(send(below, "2"))
    answered = [request.reply is not None for request in (above, at, other)]
    assert answered == [True, True, False]


def test_a_worker_of_one_run_does_not_hold_up_a_worker_of_another(h: Harness, a: Client, w: Client, run: str) -> None:
    other = a.ask(wire.RunsJoin(name="other")).run
    w.waits(admit(run))
    waits = h.session("w2").waits(admit(other))
    a.ask(send(other))
    assert len(waits.reply.jobs) == 1


def test_admit_skips_the_jobs_of_a_child_run_that_is_over_by_the_clock(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    short = a.ask(wire.RunsChild(parent=run, deadline_ms=h.clock.wall_ms() + 5)).run
    a.ask(send(short, "1"))
    a.ask(send(run, "2"))
    h.clock.pass_ms(5)
    assert [grant.key for grant in w.ask(admit(run, places=9)).jobs] == ["2"]


def test_admit_in_an_ended_run_is_refused_and_names_it(a: Client, w: Client, run: str) -> None:
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert w.refused("SCOPE_CANCELLED", admit(run)).run == run


def test_admit_from_another_space_is_refused_and_its_queue_is_another(h: Harness, a: Client, run: str) -> None:
    job = a.ask(send(run)).job
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", admit(run))
    other.refused("NOT_FOUND", wire.QueuesResult(job=job, wait_ms=0))
    theirs = other.ask(wire.RunsJoin(name="job")).run
    assert other.ask(admit(theirs, wait_ms=0)) == wire.JobsGranted()


def test_a_repeat_of_admit_gives_the_same_jobs(h: Harness, a: Client, w: Client, run: str) -> None:
    for key in "123":
        a.ask(send(run, key))
    asked = w.submit(admit(run, places=2))
    assert asked.repeat().reply == asked.reply
    assert h.counted() == {(run, "q", "ready"): 1, (run, "q", "running"): 2}


def test_a_repeat_of_admit_after_a_restart_of_the_daemon_is_told_the_same(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run, name="c")).run
    a.ask(send(run, "1", queue="p", attempts=3))
    a.ask(send(below, "2"))
    w.ask(fail(take(w, run, "p"), "E: 1"))
    h.pass_ms(1_000)
    asked = w.submit(admit(run, "empty", "q", "p", places=2))
    assert [(grant.key, grant.source, grant.attempt) for grant in asked.reply.jobs] == [("2", 1, 1), ("1", 2, 2)]
    assert asked.reply.jobs[1].reason == "handler_error: E: 1"
    h.start()
    again = asked.repeat()
    assert again.reply == asked.reply
    for grant in again.reply.jobs:
        w.ask(complete(grant))
    assert h.counted() == {(run, "p", "succeeded"): 1, (below, "q", "succeeded"): 1}


def test_a_repeat_of_admit_is_told_only_what_is_still_held(a: Client, w: Client, run: str) -> None:
    for key in "12":
        a.ask(send(run, key))
    asked = w.submit(admit(run, places=2))
    one, two = asked.reply.jobs
    w.ask(complete(one))
    assert asked.repeat().reply == wire.JobsGranted(jobs=(two,))


def test_admit_from_two_runs_of_which_one_is_over_starts_nothing(h: Harness, a: Client, w: Client, run: str) -> None:
    over = a.ask(wire.RunsJoin(name="over")).run
    a.ask(send(run))
    a.ask(wire.RunsEnd(run=over, state="stopped"))
    both = (wire.AdmitFrom(run=run, queue="q"), wire.AdmitFrom(run=over, queue="q"))
    assert w.refused("SCOPE_CANCELLED", wire.QueuesAdmit(queues=both)).run == over
    assert h.counted() == {(run, "q", "ready"): 1}


def test_a_session_gets_no_more_jobs_than_it_may_hold(
    h: Harness, a: Client, w: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HELD_MAX", 3)
    for key in "12345":
        a.ask(send(run, key))
    grants = w.ask(admit(run, places=5)).jobs
    assert [grant.key for grant in grants] == ["1", "2", "3"]
    w.refused("UNAVAILABLE", admit(run))
    w.ask(complete(grants[0]))
    assert [grant.key for grant in w.ask(admit(run, places=5)).jobs] == ["4"]


def test_a_repeat_of_an_admit_that_got_nothing_asks_anew(a: Client, w: Client, run: str) -> None:
    asked = w.submit(admit(run, wait_ms=0))
    assert asked.reply == wire.JobsGranted()
    a.ask(send(run))
    assert len(asked.repeat().reply.jobs) == 1


def test_a_cancelled_admit_gives_its_jobs_back_uncounted(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    w.submit(admit(run)).cancel()
    assert take(w, run).attempt == 1


def test_the_jobs_of_one_reply_fit_into_a_frame(h: Harness, a: Client, w: Client, run: str) -> None:
    for number in range(150):
        a.ask(send(run, str(number), input="😀" * 16_384))
    got = w.ask(admit(run, places=1_000)).jobs
    assert 0 < sum(len(grant.input.encode()) for grant in got) <= 4 * 1024 * 1024
    assert len(got) + len(w.ask(admit(run, places=1_000)).jobs) < 150
    assert len(w.ask(admit(run, places=1_000)).jobs) > 0


# ------------------------------------------------------------------ complete


def test_complete_ends_the_job_and_answers_all_who_wait_for_it(h: Harness, a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run)).job
    waits = [h.session(f"c{number}").waits(wire.QueuesResult(job=job)) for number in range(3)]
    done = wire.JobView(job=job, state="succeeded", attempt=1, result='"r"')
    assert w.ask(complete(take(w, run), '"r"')) == done
    assert [request.replies for request in waits] == [[done]] * 3
    assert a.ask(wire.QueuesResult(job=job)) == done
    assert h.counted() == {(run, "q", "succeeded"): 1}


def test_complete_by_the_same_token_again_is_answered_alike(a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    grant = take(w, run)
    done = w.ask(complete(grant, "1"))
    assert w.ask(complete(grant, "2")) == done


def test_a_late_result_is_dropped(h: Harness, a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run)).job
    late = take(w, run)
    h.pass_ms(LEASE_MS)
    w.refused("LEASE_LOST", complete(late, '"late"'))
    second = take(h.session("w2"), run)
    w.refused("LEASE_LOST", complete(late, '"late"'))
    w.refused("LEASE_LOST", fail(late))
    assert view(a, job).state == "running"
    h.clients["w2"].ask(complete(second, '"right"'))
    w.refused("LEASE_LOST", complete(late, '"late"'))
    assert view(a, job).result == '"right"'


def test_a_token_of_something_else_ends_no_job_and_stays_held(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run, "1"))
    a.ask(send(run, "2"))
    one, two = w.ask(admit(run, places=2)).jobs
    key = w.ask(wire.OnceAcquire(run=run, key="k")).token
    for token in (two.token, key):
        w.refused("VALIDATION_FAILED", wire.QueuesComplete(job=one.job, token=token, result="1"))
        w.refused("VALIDATION_FAILED", wire.QueuesFail(job=one.job, token=token, error="E"))
    assert w.beat(one.token, two.token, key) == [True, True, True]


def test_complete_of_an_unknown_job_is_refused(a: Client) -> None:
    a.refused("NOT_FOUND", wire.QueuesComplete(job="j9-test", token=1, result="1"))
    a.refused("NOT_FOUND", wire.QueuesFail(job="j9-test", token=1, error="E"))
    a.refused("NOT_FOUND", wire.QueuesResult(job="j9-test"))


# ------------------------------------------------------------------ fail, attempts, backoff


def test_fail_delays_the_job_and_it_comes_back_when_its_pause_is_over(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    job = a.ask(send(run)).job
    assert w.ask(fail(take(w, run))).state == "delayed"
    waits = w.waits(admit(run))
    pause = jobs.backoff_ms(job, 1)
    h.pass_ms(pause - 1)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply.jobs[0].attempt == 2
    assert h.events(run)[-1] == "task.retried"


def test_a_pause_passes_in_suspend(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    w.ask(fail(take(w, run)))
    waits = w.waits(admit(run))
    h.suspend(60_000)
    assert waits.reply.jobs[0].attempt == 2


def test_a_job_fails_for_good_after_its_queues_attempts(h: Harness, a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run, attempts=2)).job
    w.ask(fail(take(w, run), "E: 1"))
    waits = a.waits(wire.QueuesResult(job=job))
    h.pass_ms(1_000)
    failed = wire.JobView(job=job, state="failed", attempt=2, reason="handler_error: E: 2")
    assert w.ask(fail(take(w, run), "E: 2")) == failed
    assert waits.reply == failed
    assert h.counted() == {(run, "q", "failed"): 1}


def test_a_failure_that_must_not_be_retried_is_final(a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    assert w.ask(fail(take(w, run), retry=False)).state == "failed"


def test_a_repeat_of_fail_counts_once(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    failed = w.submit(fail(take(w, run)))
    assert failed.repeat().reply == failed.reply
    h.pass_ms(1_000)
    assert failed.repeat().reply == failed.reply
    assert take(w, run).attempt == 2


def test_more_due_jobs_than_one_step_takes_all_become_ready(h: Harness, a: Client, w: Client, run: str) -> None:
    for number in range(250):
        a.ask(send(run, str(number)))
    for grant in w.ask(admit(run, places=250)).jobs:
        w.ask(fail(grant))
    h.pass_ms(1_000)
    assert h.counted() == {(run, "q", "ready"): 250}


def test_the_pause_doubles_from_half_a_second_to_half_a_minute_with_jitter() -> None:
    for attempt, middle in ((1, 500), (2, 1_000), (3, 2_000), (6, 16_000), (7, 30_000), (50, 30_000)):
        pauses = {jobs.backoff_ms(f"j{number}-test", attempt) for number in range(200)}
        assert min(pauses) >= max(500, middle * 0.75)
        assert max(pauses) <= min(30_000, middle * 1.25)
        assert len(pauses) > 50, "jobs that failed together must not return together"


# ------------------------------------------------------------------ lapse, death, given back


def test_a_dead_workers_job_is_ready_at_once_with_the_next_attempt(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    take(w, run)
    waits = h.session("w2").waits(admit(run))
    w.die()
    assert [grant.attempt for grant in waits.reply.jobs] == [2]


def test_a_lapsed_delivery_counts(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run))
    grant = take(w, run)
    waits = h.session("w2").waits(admit(run))
    h.pass_ms(LEASE_MS)
    assert [grant.attempt for grant in waits.reply.jobs] == [2]
    assert [push.token for push in w.told(wire.LeaseLost)] == [grant.token]


@pytest.mark.parametrize(("how", "reason"), [("died", "worker_died"), ("lapsed", "lease_expired")])
def test_a_job_that_kills_its_workers_ends(h: Harness, a: Client, run: str, how: str, reason: str) -> None:
    job = a.ask(send(run, attempts=2)).job
    waits = a.waits(wire.QueuesResult(job=job))
    for number in range(2):
        worker = h.session(f"w{number}")
        take(worker, run)
        worker.die() if how == "died" else h.pass_ms(LEASE_MS)
    assert waits.reply == wire.JobView(job=job, state="failed", attempt=2, reason=reason)


@pytest.mark.parametrize("how", ["release", "bye"])
def test_a_job_that_was_given_back_has_not_used_an_attempt(h: Harness, a: Client, run: str, how: str) -> None:
    a.ask(send(run, attempts=1))
    for number in range(3):
        worker = h.session(f"w{number}")
        grant = take(worker, run)
        assert grant.attempt == 1
        worker.ask(wire.Release(token=grant.token)) if how == "release" else worker.bye()
    assert take(h.session("last"), run).attempt == 1


def test_a_job_that_was_given_back_keeps_its_age(a: Client, w: Client, run: str) -> None:
    a.ask(send(run, "1"))
    a.ask(send(run, "2"))
    w.ask(wire.Release(token=take(w, run).token))
    assert take(w, run).key == "1"


# ------------------------------------------------------------------ the end of a run


@pytest.mark.parametrize("state", ["ready", "running", "delayed"])
@pytest.mark.parametrize("how", ["stopped", "finished", "expired"])
def test_a_job_that_is_cut_off_is_cancelled_for_those_who_wait_and_those_who_ask(
    h: Harness, a: Client, w: Client, state: str, how: str
) -> None:
    run = a.ask(wire.RunsJoin(name="short", deadline_ms=h.clock.wall_ms() + 100)).run
    job = a.ask(send(run)).job
    if state != "ready":
        grant = take(w, run)
        if state == "delayed":
            w.ask(fail(grant, "E: 1"))
    waits = [h.session(name).waits(wire.QueuesResult(job=job)) for name in ("c1", "c2")]
    away = h.session("c3").waits(wire.QueuesResult(job=job))
    away.client.lose()
    h.pass_ms(100) if how == "expired" else a.ask(wire.RunsEnd(run=run, state=how))  # type: ignore[arg-type]
    cut_off = wire.JobView(job=job, state="cancelled", attempt=state != "ready", reason="scope_cancelled")
    assert [wait.reply for wait in waits] == [cut_off, cut_off]
    assert a.ask(wire.QueuesResult(job=job)) == cut_off
    away.client.resume()
    assert away.reply == cut_off


def test_when_the_time_is_over_the_job_is_shown_as_it_is_then(h: Harness, a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run)).job
    waits = [h.session(f"c{n}").waits(wire.QueuesResult(job=job, wait_ms=n * 1_000)) for n in (1, 2)]
    grant = take(w, run)
    h.pass_ms(1_000)
    assert waits[0].reply == wire.JobView(job=job, state="running", attempt=1)
    w.ask(fail(grant, "E: 1"))
    h.pass_ms(2_000)
    assert (waits[1].reply.state, waits[1].reply.attempt, waits[1].reply.reason) == ("ready", 1, "handler_error: E: 1")


def test_a_running_job_of_an_ended_run_can_be_ended_by_nobody_and_counts_as_cancelled(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    job = a.ask(send(run)).job
    grant = take(w, run)
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    cancelled = wire.JobView(job=job, state="cancelled", attempt=1, reason="scope_cancelled")
    assert a.ask(wire.QueuesResult(job=job)) == cancelled
    error = w.refused("LEASE_LOST", complete(grant))
    assert error.run is None, "the end of a child run is not the end of the worker's own"
    assert not h.held()
    assert a.ask(wire.QueuesResult(job=job)) == cancelled


def test_a_failure_in_an_ended_run_counts_nothing_and_gives_the_job_back(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    a.ask(send(run))
    grant = take(w, run)
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    w.refused("LEASE_LOST", fail(grant))
    assert not h.held()


@pytest.mark.parametrize("how", ["died", "lapsed", "released"])
def test_a_worker_that_lets_go_after_the_end_of_the_run_changes_nothing(
    h: Harness, a: Client, w: Client, run: str, how: str
) -> None:
    job = a.ask(send(run)).job
    grant = take(w, run)
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    if how == "died":
        w.die()
    elif how == "lapsed":
        h.pass_ms(LEASE_MS)
    else:
        w.ask(wire.Release(token=grant.token))
    assert not h.held()
    assert view(a, job).state == "cancelled"


def test_jobs_that_ended_before_their_run_keep_their_answers(a: Client, w: Client, run: str) -> None:
    done, failed = a.ask(send(run, "1")).job, a.ask(send(run, "2")).job
    w.ask(complete(take(w, run), '"r"'))
    w.ask(fail(take(w, run), retry=False))
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert [view(a, job).state for job in (done, failed)] == ["succeeded", "failed"]


def test_the_end_of_a_child_run_leaves_the_workers_of_the_run_above_waiting(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    waits = w.waits(admit(run))
    a.ask(wire.RunsEnd(run=below, state="stopped"))
    assert waits.reply is None
    a.ask(send(run))
    assert len(waits.reply.jobs) == 1


def test_a_delayed_job_of_an_ended_run_wakes_nobody(h: Harness, a: Client, w: Client, run: str) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    a.ask(send(below))
    w.ask(fail(take(w, run)))
    waits = w.waits(admit(run))
    a.ask(wire.RunsEnd(run=below, state="stopped"))
    h.pass_ms(60_000)
    assert waits.reply is None


def test_a_worker_of_one_run_alone_takes_no_jobs_of_those_under_it(h: Harness, a: Client, w: Client, run: str) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    beside = a.ask(wire.RunsJoin(name="other")).run
    for where, key in ((below, "1"), (beside, "2"), (run, "3"), (run, "4")):
        a.ask(send(where, key))
    alone = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=9, below=False),))
    assert [grant.key for grant in w.ask(alone).jobs] == ["3", "4"]
    waits = w.waits(alone)
    a.ask(send(below, "5"))
    assert waits.reply is None, "a job below wakes it for nothing"
    a.ask(send(run, "6"))
    assert [grant.key for grant in waits.reply.jobs] == ["6"]
    assert [grant.key for grant in w.ask(admit(run, places=9)).jobs] == ["1", "5"]


def test_a_worker_that_wants_nothing_of_below_does_not_hold_up_one_that_does(a: Client, w: Client, run: str) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    alone = w.waits(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", below=False),)))
    behind = w.waits(admit(run))
    a.ask(send(below, "1"))
    assert alone.reply is None
    assert [grant.key for grant in behind.reply.jobs] == ["1"]


@pytest.mark.parametrize("first", [True, False])
def test_a_job_of_a_run_goes_to_its_oldest_worker_whether_it_takes_those_below_or_not(
    a: Client, w: Client, run: str, first: bool
) -> None:
    waits = [
        w.waits(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", below=below),)))
        for below in (first, not first, first)
    ]
    for number in range(3):
        a.ask(send(run, str(number)))
        assert [len(request.reply.jobs) if request.reply else 0 for request in waits] == [1] * (number + 1) + [0] * (
            2 - number
        )


def test_a_delivery_says_what_ended_the_one_before(h: Harness, a: Client, w: Client, run: str) -> None:
    a.ask(send(run, attempts=5))
    assert take(w, run).reason is None
    h.pass_ms(LEASE_MS)
    lapsed = take(w, run)
    assert lapsed.reason == "lease_expired"
    w.ask(fail(lapsed))
    h.pass_ms(60_000)
    failed = take(w, run)
    assert failed.reason == "handler_error: ValueError: no"
    w.die()
    died = take(h.session("other"), run)
    assert (died.reason, died.attempt) == ("worker_died", failed.attempt + 1)


def test_a_job_that_failed_keeps_the_traceback_of_its_last_failure(h: Harness, a: Client, w: Client, run: str) -> None:
    job = a.ask(send(run)).job
    again = msgspec.structs.replace(fail(take(w, run)), traceback="first")
    assert w.ask(again).traceback is None
    h.pass_ms(60_000)
    w.ask(msgspec.structs.replace(fail(take(w, run), retry=False), traceback="second"))
    assert view(a, job).traceback == "second"

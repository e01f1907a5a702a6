from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated import batch, dispatch, replies
from runstated.batch import Ask, Cancelled, Ended, Lost, Reread, Tick
from runstated.domain import once, sessions
from runstated.store.tx import Access, Refusal, Tx
from tests.harness import Client, Harness, Request, nothing, snapshot


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not make two batches of one."""
    monkeypatch.setattr(batch, "BATCH_VERBS_MS", 60_000)


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def b(h: Harness) -> Client:
    return h.session("b")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def acquire(run: str, key: str = "k", **more: Any) -> wire.OnceAcquire:
    return wire.OnceAcquire(run=run, key=key, **more)


def send(run: str, key: str) -> wire.QueuesSend:
    return wire.QueuesSend(run=run, queue="q", key=key, input="1", attempts=3)


def put(monkeypatch: pytest.MonkeyPatch, request: type, verb: Callable[[Tx, Any], Any]) -> None:
    monkeypatch.setattr(dispatch, "VERBS", {**dispatch.VERBS, request: verb})


def together(*requests: tuple[Client, wire.Request[Any]]) -> list[Request]:
    """Requests in one batch."""
    asked = [client.request(request) for client, request in requests]
    asked[0].client.h.run(*(request.client.entry(request) for request in asked))
    return asked


# ------------------------------------------------------------------ savepoints


def test_a_refusal_takes_back_its_own_and_nothing_else(h: Harness, a: Client, run: str) -> None:
    a.ask(wire.QueuesDeclare(queue="q", attempts=3))
    conflict = wire.QueuesSend(run=run, queue="q", key="2", input="1", attempts=4)
    first, refused, last = together((a, send(run, "1")), (a, conflict), (a, send(run, "3")))
    assert [first.reply.state, refused.reply.code, last.reply.state] == ["ready", "CONFLICT", "ready"]
    assert h.rows("SELECT key FROM jobs ORDER BY age") == [("1",), ("3",)]


def test_a_verb_that_fails_is_answered_internal_logged_and_taken_back(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    acquire_for_real = dispatch.VERBS[wire.OnceAcquire]

    def breaks(tx: Tx, request: wire.OnceAcquire) -> Any:
        answer = acquire_for_real(tx, request)
        tx.answer(("run", run), wire.Ok(), wire.RunEnded(run=run, state="stopped", message=""))
        assert request.key != "bad", "an assertion of ours"
        return answer

    put(monkeypatch, wire.OnceAcquire, breaks)
    good, bad, good_too = together((a, acquire(run, "1")), (a, acquire(run, "bad")), (a, acquire(run, "2")))
    assert bad.reply.code == "INTERNAL"
    assert "AssertionError" in bad.reply.message
    assert not bad.reply.retryable
    assert "an assertion of ours" in caplog.text
    assert h.rows("SELECT key FROM once_keys ORDER BY key") == [("1",), ("2",)]
    assert [good.reply.token in h.memory.holds, good_too.reply.token in h.memory.holds] == [True, True]
    assert len(h.memory.holds) == 2
    assert len(a.told(wire.RunEnded)) == 1, "what the failing verb pushed is taken back, too"


def test_a_constraint_that_fails_is_our_fault(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, wire.RunsGet, lambda tx, request: tx.run("INSERT INTO counters VALUES ('x', 0)"))
    a.refused("INTERNAL", wire.RunsGet(run=run))
    assert "CHECK constraint failed" in caplog.text


def test_a_returned_refusal_keeps_what_the_verb_wrote_and_a_raised_one_does_not(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verb(tx: Tx, request: wire.RunsGet) -> Any:
        tx.run("INSERT INTO counters VALUES (:counter, 1)", counter=request.run)
        if request.run == "raised":
            raise Refusal("no")
        return Refusal("no")

    put(monkeypatch, wire.RunsGet, verb)
    for name in ("raised", "returned"):
        a.refused("VALIDATION_FAILED", wire.RunsGet(run=name))
    assert h.value("SELECT counter FROM counters WHERE counter IN ('raised', 'returned')") == "returned"


def test_a_number_that_sqlite_cannot_hold_is_the_callers_fault(h: Harness, a: Client, run: str) -> None:
    for request in (
        wire.Release(token=2**63),
        wire.OnceComplete(run=run, key="k", token=2**64 - 1, result="1"),
        wire.RunsJoin(name="late", deadline_ms=2**63),
    ):
        a.refused("VALIDATION_FAILED", request)


def test_a_waiting_call_that_fails_when_it_is_run_again_leaves_the_line_to_the_next(
    h: Harness, a: Client, b: Client, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = a.ask(acquire(run)).token
    first, second = b.waits(acquire(run)), h.session("c").waits(acquire(run))
    acquire_for_real = dispatch.VERBS[wire.OnceAcquire]

    def breaks(tx: Tx, request: wire.OnceAcquire) -> Any:
        assert tx.caller.session != "b"
        return acquire_for_real(tx, request)

    put(monkeypatch, wire.OnceAcquire, breaks)
    a.ask(wire.Release(token=token))
    assert first.reply.code == "INTERNAL"
    assert isinstance(second.reply, wire.OnceGranted)


def test_a_fault_in_one_lapse_or_tick_holds_up_no_other(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(tx: Tx, lease: Any, how: str) -> None:
        assert lease.subject != "bad"
        once.gone(tx, lease, how)

    monkeypatch.setattr(sessions, "GONE", {**sessions.GONE, "once": breaks})
    ticks: list[str] = []

    def bad_tick(tx: Tx) -> int | None:
        raise AssertionError("a tick of ours")

    def good_tick(tx: Tx) -> int | None:
        ticks.append("good")
        return None

    monkeypatch.setattr(dispatch, "TICKS", (bad_tick, good_tick))
    bad, good = a.ask(acquire(run, "bad")).token, a.ask(acquire(run, "good")).token
    late = a.waits(acquire(run, "good", wait_ms=30_000))
    h.memory.due(h.clock.wall_ms() + 30_000)
    h.clock.pass_ms(30_000)
    h.tick()
    assert [push.token for push in a.told(wire.LeaseLost)] == [good]
    assert list(h.memory.holds) == [bad]
    assert late.reply == wire.OnceHeld()
    assert ticks == ["good"]
    h.memory.let_go(bad)
    h.connection.execute("DELETE FROM leases")
    h.connection.execute("DELETE FROM once_keys")


# ------------------------------------------------------------------ order and bounds


def test_a_batch_ends_when_its_time_is_over_and_what_is_left_is_not_lost(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BATCH_VERBS_MS", 0)
    entries = [a.entry(a.request(send(run, str(number)))) for number in range(3)]
    assert h.executor.run(h.connection, entries) == 1
    h.deliver()
    assert h.value("SELECT count(*) FROM jobs") == 1
    h.run(*entries[1:])
    assert h.value("SELECT count(*) FROM jobs") == 3


def test_a_signal_answers_all_who_wait_for_it_with_one_reply(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = [h.session(f"s{number}").waits(acquire(run)) for number in range(20)]
    request = wire.OnceComplete(run=run, key="k", token=token, result="1")
    h.executor.run(h.connection, [a.entry(a.request(request))])
    assert [len(keys) for keys, _ in h.memory.replies] == [20, 1]
    h.deliver()
    assert all(request.reply == wire.OnceDone(result="1") for request in waits)


def test_a_key_passes_from_hand_to_hand_in_one_transaction(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    begun: list[str] = []
    h.connection.set_trace_callback(lambda sql: begun.append(sql) if sql.startswith(("BEGIN", "COMMIT")) else None)
    c = h.session("c")
    begun.clear()
    third = c.request(acquire(run))
    h.run(a.entry(a.request(wire.Release(token=token))), c.entry(third))
    assert begun == ["BEGIN IMMEDIATE", "COMMIT"]
    assert isinstance(waits.reply, wire.OnceGranted)
    assert third.reply is None, "no gap for a third party"


def test_of_a_line_no_more_are_looked_at_than_can_go_on_and_the_next(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = a.ask(acquire(run)).token
    for number in range(20):
        h.session(f"s{number}").waits(acquire(run))
    looked: list[str] = []
    acquire_for_real = dispatch.VERBS[wire.OnceAcquire]

    def counts(tx: Tx, request: wire.OnceAcquire) -> Any:
        looked.append(tx.caller.session)
        return acquire_for_real(tx, request)

    put(monkeypatch, wire.OnceAcquire, counts)
    a.ask(wire.Release(token=token))
    assert looked == ["s0", "s1"]


def test_nothing_goes_out_before_the_commit(h: Harness, a: Client, run: str) -> None:
    asked = a.request(acquire(run))
    h.connection.before = fails_at_commit
    with pytest.raises(Lost) as lost:
        h.executor.run(h.connection, [a.entry(asked)])
    h.deliver()
    assert lost.value.index is None
    assert asked.reply is None
    h.connection.before = nothing
    h.run(a.entry(asked))
    assert asked.reply.token == 2, "a token is not given twice, though one was lost"


def fails_at_commit(sql: str) -> None:
    if sql == "COMMIT":
        raise sqlite3.OperationalError("disk I/O error")


# ------------------------------------------------------------------ circles


def test_a_circle_through_three_sessions_is_refused_and_told(h: Harness, run: str) -> None:
    clients = [h.session(name) for name in "xyz"]
    tokens = [client.ask(acquire(run, client.name)).token for client in clients]
    x, y, z = clients
    x.waits(acquire(run, "y", within=(tokens[0],)))
    y.waits(acquire(run, "z", within=(tokens[1],)))
    error = z.refused("DEADLOCK", acquire(run, "x", within=(tokens[2],)))
    assert error.message == (
        "deadlock: worker-z (pid 103) waits for once x, held by worker-x (pid 101), which waits for once y,"
        " held by worker-y (pid 102), which waits for worker-z (once z)"
    )
    assert len(h.memory.calls) == 2
    z.ask(wire.OnceComplete(run=run, key="z", token=tokens[2], result="1"))
    assert h.clients["y"].open[3].reply == wire.OnceDone(result="1")


def test_a_circle_through_a_job_is_refused(h: Harness, a: Client, b: Client, run: str) -> None:
    key = a.ask(acquire(run)).token
    job = a.ask(send(run, "1")).job
    (grant,) = b.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    a.waits(wire.QueuesResult(job=job, within=(key,)))
    assert "job" in b.refused("DEADLOCK", acquire(run, within=(grant.token,))).message


def test_a_wait_that_does_not_have_to_is_no_circle(h: Harness, a: Client, b: Client, run: str) -> None:
    x, y = a.ask(acquire(run, "x")).token, b.ask(acquire(run, "y")).token
    a.waits(acquire(run, "y", within=(x,)))
    assert b.ask(acquire(run, "x", within=(y,), wait_ms=0)) == wire.OnceHeld()


# ------------------------------------------------------------------ replies


def test_a_repeat_under_the_id_of_another_request_is_refused(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(acquire(run))
    asked.request = acquire(run, "another")
    assert asked.repeat().reply.code == "IDEMPOTENCY_CONFLICT"
    assert h.value("SELECT count(*) FROM replies") == 1


def test_a_repeat_may_differ_in_what_is_left_of_its_time_and_in_its_ticket(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(acquire(run, wait_ms=1_000))
    assert asked.repeat(wait_ms=10, ticket=7).reply == asked.reply


def test_only_what_would_do_harm_twice_is_kept(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(acquire(run))
    a.ask(wire.OnceFail(run=run, key="k", token=asked.reply.token, error="E"))
    child = a.submit(wire.RunsChild(parent=run))
    a.ask(send(run, "1"))
    a.ask(wire.QueuesDeclare(queue="q"))
    a.ask(wire.StatusGet())
    a.submit(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="none"),), wait_ms=0))
    kept = h.rows("SELECT request, reply FROM replies ORDER BY request")
    assert [request for request, _ in kept] == [asked.id + 1, child.id]
    child.ack()
    assert child.repeat().reply.run != child.reply.run


def test_replies_of_another_session_are_not_given(h: Harness, a: Client, b: Client, run: str) -> None:
    mine = a.submit(wire.RunsChild(parent=run))
    theirs = Request(b, mine.id, wire.RunsChild(parent=run))
    assert theirs.repeat().reply != mine.reply


# ------------------------------------------------------------------ replies that are kept for a day

DAY_MS = 24 * 3_600_000


def again(client: Client, asked: Request) -> Any:
    """The reply to a repeat of a request, perhaps of another session object under the same id."""
    repeated = Request(client, asked.id, msgspec.structs.replace(asked.request, again=True))
    client.open[asked.id] = repeated
    client.h.run(client.entry(repeated))
    return repeated.reply


def begun_anew(h: Harness, client: Client) -> Client:
    """The session has ended, and begins anew under its id."""
    client.bye()
    return h.session(client.name)


def test_who_asks_for_it_has_any_reply_kept_beyond_the_end_of_its_session(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(wire.RunsChild(parent=run, owned=False, keep=True))
    plain = a.submit(wire.RunsChild(parent=run, owned=False))
    declared = a.submit(wire.QueuesDeclare(queue="q", attempts=3, keep=True))
    a = begun_anew(h, a)
    assert again(a, asked) == asked.reply
    assert again(a, declared) == declared.reply
    assert again(a, plain) != plain.reply, "this one was the session's"
    asked.cancel()
    assert again(a, asked) == asked.reply, "who has gone may come again"


def test_a_kept_reply_is_tidied_after_a_day(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(wire.RunsChild(parent=run, owned=False, keep=True))
    h.pass_ms(DAY_MS - 1)
    assert again(a, asked) == asked.reply
    h.pass_ms(1)
    assert not h.rows("SELECT request FROM replies")
    assert again(a, asked) != asked.reply


def test_kept_replies_are_tidied_also_after_a_restart(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(wire.RunsChild(parent=run, owned=False, keep=True))
    h.start()
    a.resume()
    h.pass_ms(DAY_MS - 1)
    assert again(a, asked) == asked.reply
    h.pass_ms(1)
    assert not h.rows("SELECT request FROM replies")


def test_the_oldest_of_too_many_kept_replies_go(h: Harness, a: Client, run: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(replies, "KEPT_MAX", 3)
    monkeypatch.setattr(replies, "LOOK_EACH", 5)
    plain = a.submit(wire.RunsChild(parent=run))
    asked = []
    for _ in range(5):
        asked.append(a.submit(wire.RunsChild(parent=run, keep=True)))
        h.pass_ms(1)
    kept = [request for (request,) in h.rows("SELECT request FROM replies ORDER BY request")]
    assert kept == [plain.id, *(request.id for request in asked[2:])]
    assert h.memory.keeps_for == {"a": 2}, "how long they are kept now, in ms"


def test_kept_replies_go_by_their_bytes_too(h: Harness, a: Client, run: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(replies, "KEPT_BYTES_MAX", 1_000)
    monkeypatch.setattr(replies, "LOOK_EACH", 2)
    for _ in range(100):
        a.submit(wire.RunsChild(parent=run, keep=True))
    assert h.value("SELECT sum(length(reply)) FROM replies") <= 1_000


def test_one_caller_does_not_push_out_the_replies_of_another(
    h: Harness, a: Client, b: Client, run: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(replies, "KEPT_MAX", 10)
    asked = a.submit(wire.RunsChild(parent=run, owned=False, keep=True))
    for _ in range(2 * replies.LOOK_EACH):
        b.ask(wire.RunsJoin(name="job", keep=True))
    h.pass_ms(DAY_MS - 1)
    assert again(a, asked) == asked.reply
    assert h.value("SELECT count(*) FROM replies WHERE session = 'b'") == 10


def test_errors_and_replies_without_an_effect_are_not_kept(h: Harness, a: Client, b: Client, run: str) -> None:
    b.ask(acquire(run, "held"))
    b.ask(wire.SlotsAcquire(run=run, pool="gpu", max=1))
    b.ask(wire.LimitsTake(run=run, limit="api", max=1, per_seconds=86_400))
    b.ask(wire.OnceFail(run=run, key="no", token=b.ask(acquire(run, "no")).token, error="E", attempts=1))
    requests: list[wire.Request[Any]] = [
        wire.RunsGet(run="r99-test", keep=True),
        acquire(run, "held", wait_ms=0, keep=True),
        acquire(run, "no", keep=True),
        wire.OnceGet(run=run, key="open", keep=True),
        wire.SlotsAcquire(run=run, pool="gpu", wait_ms=0, keep=True),
        wire.LimitsTake(run=run, limit="api", wait_ms=0, keep=True),
        wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),), wait_ms=0, keep=True),
    ]
    said = [type(a.ask(request)).__name__ for request in requests]
    assert said == ["Error", "OnceHeld", "OnceFailed", "OnceOpen", "SlotsBusy", "LimitBusy", "JobsGranted"]
    assert not h.rows("SELECT request FROM replies WHERE session = 'a'")


@pytest.mark.parametrize("is_repeat", [True, False])
def test_another_request_under_the_id_of_a_kept_reply_is_refused_and_does_nothing(
    h: Harness, a: Client, run: str, is_repeat: bool
) -> None:
    asked = a.submit(wire.RunsChild(parent=run, owned=False, keep=True))
    a = begun_anew(h, a)
    before = h.rows("SELECT run FROM runs")
    other = Request(a, asked.id, wire.RunsChild(parent=run, name="other", owned=False, keep=True, again=is_repeat))
    a.open[asked.id] = other
    h.run(a.entry(other))
    assert other.reply.code == "IDEMPOTENCY_CONFLICT"
    assert h.rows("SELECT run FROM runs") == before
    assert again(a, asked) == asked.reply


def test_a_kept_reply_that_gave_a_token_goes_with_the_lease(h: Harness, a: Client, run: str) -> None:
    once_key = a.submit(acquire(run, keep=True))
    slots = a.submit(wire.SlotsAcquire(run=run, pool="gpu", max=1, keep=True))
    assert again(a, once_key) == once_key.reply
    h.pass_ms(30_000)
    assert not h.rows("SELECT request FROM replies")
    assert again(a, once_key).token > slots.reply.token
    a = begun_anew(h, a)
    assert not h.rows("SELECT request FROM replies")


@pytest.mark.parametrize("how", ["settled", "released", "late", "bye"])
def test_a_kept_reply_that_names_a_reservation_stays(h: Harness, a: Client, run: str, how: str) -> None:
    asked = a.submit(wire.BudgetsReserve(run=run, budget="llm", amount_minor=40, limit_minor=100, keep=True))
    plain = a.submit(wire.BudgetsReserve(run=run, budget="llm", amount_minor=1))
    for held in (asked.reply.reservation, plain.reply.reservation):
        if how == "settled":
            a.ask(wire.BudgetsSettle(reservation=held, cost_minor=1, work_key="w"))
        elif how == "released":
            a.ask(wire.BudgetsRelease(reservation=held))
    if how == "late":
        h.pass_ms(wire.SETTLE_BY_MS)
    if how == "bye":
        a = begun_anew(h, a)
    assert h.rows("SELECT request FROM replies") == [(asked.id,)]
    assert again(a, asked) == asked.reply


def test_what_is_kept_for_a_day_is_without_its_payload(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    done = a.submit(wire.OnceComplete(run=run, key="k", token=token, result='"long"', keep=True))
    a.ask(send(run, "1"))
    (grant,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    job = a.submit(wire.QueuesComplete(job=grant.job, token=grant.token, result='"long"', keep=True))
    assert (done.reply, job.reply.result) == (wire.OnceDone(result='"long"'), '"long"')
    assert again(a, done) == wire.OnceDone(result="null")
    assert again(a, job) == msgspec.structs.replace(job.reply, result=None)
    assert not [reply for (reply,) in h.rows("SELECT reply FROM replies") if "long" in reply]


def test_an_ack_forgets_also_what_is_kept_for_a_day(h: Harness, a: Client, run: str) -> None:
    a.submit(wire.RunsChild(parent=run, keep=True)).ack()
    assert not h.rows("SELECT request FROM replies")


# ------------------------------------------------------------------ sessions


def test_a_request_of_a_session_that_has_just_ended_gets_nothing(h: Harness, a: Client, b: Client, run: str) -> None:
    asked = b.request(acquire(run))
    h.run(Ended("b", "died"), b.entry(asked))
    assert asked.reply.code == "UNAVAILABLE"
    assert not h.memory.holds
    assert isinstance(a.ask(acquire(run)), wire.OnceGranted)


def test_what_a_session_gave_back_before_it_ended_counts(h: Harness, a: Client, b: Client, run: str) -> None:
    token = b.ask(acquire(run)).token
    done = b.request(wire.OnceComplete(run=run, key="k", token=token, result="1"))
    h.run(b.entry(done), Ended("b", "died"))
    assert a.ask(acquire(run)) == wire.OnceDone(result="1")


def test_a_cancel_of_an_unknown_request_is_no_error(h: Harness, a: Client) -> None:
    h.run(Cancelled("a", 99), Cancelled("nobody", 1))


# ------------------------------------------------------------------ counters


def test_counters_are_written_in_the_transaction_that_used_them(h: Harness, a: Client, run: str) -> None:
    a.ask(acquire(run))
    assert dict(h.rows("SELECT counter, value FROM counters"))["token"] == 1
    assert not h.memory.counters_changed


# ------------------------------------------------------------------ an unknown outcome


def test_after_an_unknown_commit_the_memory_follows_the_file(h: Harness, a: Client, b: Client, run: str) -> None:
    """The commit took place, but nobody knows: the memory still is as before."""
    c = h.session("c")
    h.session("d")
    done, held = a.ask(acquire(run, "done")).token, a.ask(acquire(run, "held")).token
    job = a.ask(send(run, "1")).job
    short = a.ask(wire.RunsChild(parent=run)).run
    token = c.ask(acquire(short, "x")).token
    waits = [
        b.waits(acquire(run, "done")),
        b.waits(acquire(run, "held")),
        b.waits(wire.QueuesResult(job=job)),
        b.waits(acquire(short, "x")),
    ]
    (grant,) = c.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    entries = [
        Ask("a", Access(), 50, wire.OnceComplete(run=run, key="done", token=done, result="1"), 90, 0),
        Ask("a", Access(), 51, wire.Release(token=held), 91, 0),
        Ask("c", Access(), 52, wire.QueuesComplete(job=grant.job, token=grant.token, result="2"), 92, 0),
        Ask("d", Access(), 53, acquire(run, "new"), 93, 0),
        Ask("d", Access(), 54, wire.RunsEnd(run=short, state="stopped"), 94, 0),
    ]
    h.connection.after = fails_at_commit
    with pytest.raises(Lost):
        h.executor.run(h.connection, entries)
    h.connection.after = nothing
    h.deliver()
    assert not any(request.replies for request in waits)
    h.run(Reread())
    assert waits[0].reply == wire.OnceDone(result="1")
    assert isinstance(waits[1].reply, wire.OnceGranted)
    assert waits[2].reply == wire.JobView(job=job, state="succeeded", attempt=1, result="2")
    assert waits[3].reply.code == "SCOPE_CANCELLED"
    assert [push.run for push in a.told(wire.RunEnded)] == [short]
    assert sorted(hold.subject[-1] for hold in h.memory.holds.values()) == ["held", "new", "x"]
    assert token in h.memory.holds


def test_after_an_unknown_end_of_a_session_it_is_gone(h: Harness, a: Client, b: Client, run: str) -> None:
    b.ask(acquire(run))
    b.waits(acquire(run))
    h.connection.after = fails_at_commit
    with pytest.raises(Lost):
        h.executor.run(h.connection, [Ended("b", "died")])
    h.connection.after = nothing
    h.run(Reread(), Ended("b", "died"), Tick())
    assert list(h.memory.sessions) == ["a"]
    assert not h.memory.calls
    assert not h.memory.holds


def test_reading_again_changes_nothing_when_nothing_was_missed(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    b.waits(acquire(run))
    before = snapshot(h.memory)
    h.run(Reread())
    after = snapshot(h.memory)
    assert {key: value[1:] for key, value in after["calls"].items()} == {
        key: value[1:] for key, value in before["calls"].items()
    }
    assert {**after, "calls": None} == {**before, "calls": None}


def test_a_lost_batch_names_the_entry_at_fault(h: Harness, a: Client, run: str) -> None:
    connection: sqlite3.Connection = h.connection
    entries = [a.entry(a.request(request)) for request in (acquire(run, "1"), acquire(run, "2"), acquire(run, "3"))]
    acquire_for_real = dispatch.VERBS[wire.OnceAcquire]

    def verb(tx: Tx, request: wire.OnceAcquire) -> Any:
        if request.key == "2":
            connection.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")
        return acquire_for_real(tx, request)

    with pytest.MonkeyPatch.context() as patch:
        put(patch, wire.OnceAcquire, verb)
        with pytest.raises(Lost) as lost:
            h.executor.run(connection, entries)
    assert lost.value.index == 1
    assert not h.memory.holds
    assert not h.memory.replies
    h.run(*entries)
    assert len(h.memory.holds) == 3


def test_logs_are_quiet_for_refusals(h: Harness, a: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        a.refused("NOT_FOUND", wire.RunsGet(run="r99-test"))
    assert not caplog.records

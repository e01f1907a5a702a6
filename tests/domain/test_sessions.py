from __future__ import annotations

import pytest

from runstate import wire
from runstated.domain import sessions
from runstated.engine.entries import Ended, Opened, Tick
from tests.harness import Harness


def test_hello_writes_who_it_is(h: Harness) -> None:
    h.session("a")
    assert h.rows("SELECT session, space, worker, pid, command FROM sessions") == [
        ("a", "default", "worker-a", 100, "python x")
    ]


def test_a_session_that_comes_back_is_the_same_and_may_change_its_label(h: Harness) -> None:
    a = h.session("a")
    opened_ms = h.clock.wall_ms()
    h.pass_ms(1_000)
    row = sessions.Session("a", "default", "renamed", "", 100, "python x")
    h.run(Opened(row, a.request(wire.StatusGet()).id, (), wire.Welcome(protocol=1, version="test", pid=1)))
    assert h.rows("SELECT session, worker, opened_ms FROM sessions") == [("a", "renamed", opened_ms)]
    assert [seen.worker for seen in a.ask(wire.StatusGet()).workers] == ["renamed"]


def test_hello_tells_which_of_the_named_runs_are_over(h: Harness) -> None:
    a = h.session("a")
    over, lives = (a.ask(wire.RunsJoin(name=name)).run for name in ("over", "lives"))
    expired = a.ask(wire.RunsJoin(name="expired", deadline_ms=h.clock.wall_ms() + 5)).run
    a.ask(wire.RunsEnd(run=over, state="finished"))
    h.clock.pass_ms(5)
    b = h.session("b", runs=(over, lives, expired, "r99-test"))
    assert [(ended.run, ended.state) for ended in b.ended] == [
        (over, "finished"),
        (expired, "expired"),
        ("r99-test", "stopped"),
    ]


def test_hello_subscribes_to_the_named_runs_that_live(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    b = h.session("b", runs=(run,))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert [push.run for push in b.told(wire.RunEnded)] == [run]


def test_hello_does_not_tell_of_runs_of_another_space(h: Harness) -> None:
    run = h.session("a").ask(wire.RunsJoin(name="job")).run
    b = h.session("b", space="other", runs=(run,))
    assert [ended.message for ended in b.ended] == [f"the run {run} is not known any more"]


def test_the_end_of_a_session_hands_on_all_it_held_in_one_step(h: Harness) -> None:
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="job")).run
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),)))
    a.ask(wire.OnceAcquire(run=run, key="k"))
    waits = [
        b.waits(wire.OnceAcquire(run=run, key="k")),
        b.waits(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))),
    ]
    a.die()
    assert all(request.reply is not None for request in waits)
    assert {lease.session for lease in h.core().holds.of_token.values()} == {"b"}
    assert h.rows("SELECT session FROM sessions") == [("b",)]


def test_the_end_of_a_session_removes_its_kept_replies(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    a.ask(wire.RunsChild(parent=run))
    assert h.value("SELECT count(*) FROM replies") == 1
    a.bye()
    assert h.value("SELECT count(*) FROM replies") == 0


def test_the_end_of_a_session_ends_its_waits_and_subscriptions(h: Harness) -> None:
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="job")).run
    b.ask(wire.RunsJoin(name="job"))
    a.ask(wire.OnceAcquire(run=run, key="k"))
    b.waits(wire.OnceAcquire(run=run, key="k"))
    b.die()
    assert not h.core().lines.calls
    assert list(h.core().lines._subscriptions) == ["a"]


def test_the_end_of_an_unknown_session_is_no_error(h: Harness) -> None:
    h.run(Ended("nobody", "died"))
    a = h.session("a")
    h.run(Ended("a", "died"), Ended("a", "died"))
    assert a.told(wire.LeaseLost) == []


def test_a_lapse_of_a_token_that_is_gone_says_nothing(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="job")).run
    token = a.ask(wire.OnceAcquire(run=run, key="k", lease_ms=5_000)).token
    h.clock.pass_ms(5_000)
    release = a.request(wire.Release(token=token))
    h.run(a.entry(release), Tick())
    assert release.reply == wire.Released(held=True)
    assert a.told(wire.LeaseLost) == []


def test_one_session_holds_and_awaits_no_more_than_it_may(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELD_MAX", 3)
    monkeypatch.setattr(wire, "WAITING_MAX", 2)
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="r")).run
    tokens = [a.ask(wire.OnceAcquire(run=run, key=str(n))).token for n in range(3)]
    assert not a.refused("UNAVAILABLE", wire.OnceAcquire(run=run, key="one more")).retryable
    a.refused("UNAVAILABLE", wire.SlotsAcquire(run=run, pool="p", max=1))
    a.ask(wire.Release(token=tokens[2]))
    a.ask(wire.OnceAcquire(run=run, key="one more"))
    waits = [b.waits(wire.OnceAcquire(run=run, key="0")) for _ in range(2)]
    b.refused("UNAVAILABLE", wire.OnceAcquire(run=run, key="1"))
    waits[0].repeat()
    waits[0].cancel()
    b.waits(wire.OnceAcquire(run=run, key="1"))

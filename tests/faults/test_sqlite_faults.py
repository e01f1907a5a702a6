"""The n-th statement fails: what is written again is the same, and so is all that anybody is told."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runstate import wire
from runstated.domain import nouns
from runstated.engine import turns
from runstated.engine.entries import Acked, Away, Cancelled, Ended
from runstated.store.database import CommitFailed
from runstated.store.files import BATCH
from tests.harness import Client, Harness, Request, nothing

LEASE_MS = 30_000


# ------------------------------------------------------------------ a story with every verb


class Faulty(Harness):
    """Fails at one statement, and does what the engine does then: it writes again, and only then says anything."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.fail_at = 0
        self.kind = ""
        self.failed = ""

    def arm(self, kind: str, fail_at: int) -> None:
        self.kind, self.fail_at = kind, fail_at
        self.connection.before = self.before
        self.connection.after = self.after

    def before(self, sql: str) -> None:
        self.seen += 1
        if self.kind != "after the commit":
            self.maybe_fail(sql)

    def after(self, sql: str) -> None:
        if self.kind == "after the commit" and sql == "COMMIT":
            self.maybe_fail(sql)

    def maybe_fail(self, sql: str) -> None:
        if self.failed or self.seen < self.fail_at or sql.startswith("SELECT"):
            return
        self.failed = sql
        if self.kind == "transaction gone" and self.connection.in_transaction:
            sqlite3.Connection.execute(self.connection, "ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    def commit(self) -> None:
        owed = self.turns.take_batch()
        before = stored(self) if not self.failed and self.seen + WITHIN >= self.fail_at else None
        try:
            self.database.commit(owed)
        except CommitFailed as failed:
            assert failed.took_place == (self.kind == "after the commit")
            assert failed.took_place or before is None or stored(self) == before, "half of a batch is on disk"
            self.database.commit(owed)


WITHIN = 1_000  # statements of one batch


def stored(h: Harness) -> dict[str, list[tuple[Any, ...]]]:
    """All that is on disk, without a statement that counts."""

    def rows(sql: str) -> list[tuple[Any, ...]]:
        return sqlite3.Connection.execute(h.connection, sql).fetchall()

    tables = rows("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name: rows(f"SELECT * FROM {name}") for (name,) in tables}


def answered(request: Request) -> Any:
    """The reply."""
    assert request.reply is not None
    return request.reply


def ask(client: Client, request: wire.Request[Any]) -> Any:
    return client.ask(request)


def start(client: Client, request: wire.Request[Any]) -> Request:
    """A request that may wait."""
    return client.submit(request)


def story(h: Faulty) -> list[Any]:
    """Every verb and every entry; what everybody was told, without tokens."""
    a, b, c = h.session("a"), h.session("b"), h.session("c")
    said: list[Any] = []
    run = ask(a, wire.RunsJoin(name="job")).run
    made = ask(a, wire.KeysCreate(space="other", permissions=("work",)))  # not told: its secret is random
    ask(a, wire.KeysRevoke(key=made.id))
    ask(a, wire.KeysList())
    below = ask(a, wire.RunsChild(parent=run, name="below", deadline_ms=h.clock.wall_ms() + 90_000)).run
    # once: a result for all, a failure, a death, a lapse, a cancel
    acquire = wire.OnceAcquire(run=run, key="k")
    token = ask(a, acquire).token
    waits = [start(b, acquire), start(c, acquire)]
    said.append(ask(a, wire.OnceComplete(run=run, key="k", token=token, result="1")))
    said += [answered(request) for request in waits]
    failing = wire.OnceAcquire(run=run, key="fails")
    token = ask(a, failing).token
    ask(c, wire.Renew(token=token, lease_ms=LEASE_MS))
    said.append(ask(c, wire.OnceGet(run=run, key="fails", wait_ms=0)))
    waits = [start(b, failing), start(c, failing)]
    said.append(ask(a, wire.OnceFail(run=run, key="fails", token=token, error="E")))
    b.die()
    said.append(answered(waits[1]).attempt)
    b = h.session("b2")
    lapsing = wire.OnceAcquire(run=below, key="lapses")
    ask(a, lapsing)
    waits = [start(b, lapsing)]
    h.pass_ms(LEASE_MS)
    said.append(waits[0].reply.attempt)
    waits[0].cancel()
    # queues: all outcomes
    said.append(ask(a, wire.QueuesDeclare(queue="q", attempts=2)))
    jobs = [ask(a, wire.QueuesSend(run=run, queue="q", key=str(n), input="1")).job for n in range(4)]
    jobs.append(ask(a, wire.QueuesSend(run=below, queue="q", key="below", input="1", attempts=2)).job)
    both = ask(a, wire.QueuesSendMany(run=run, queue="unused", attempts=1, members=(wire.NewJob(key="1", input="1"),)))
    said.append(ask(a, wire.QueuesResult(job=both.jobs[0], wait_ms=0)).state)
    members = tuple(wire.NewJob(key=key, input="1") for key in "12")
    ask(a, wire.QueuesSendMany(run=run, queue="ahead", attempts=1, members=members))
    taken = ask(c, wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="ahead", ahead=1),))).jobs
    said.append(ask(c, wire.QueuesStarted(tokens=tuple(grant.token for grant in taken if grant.ahead))))
    said.append([ask(c, wire.QueuesComplete(job=each.job, token=each.token, result="1")).state for each in taken])
    results = [start(a, wire.QueuesResult(job=job)) for job in jobs]
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", places=4),))
    one, two, three, four = ask(c, admit).jobs
    idle = start(b, wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),)))
    said.append([grant.attempt for grant in idle.reply.jobs])
    said.append(ask(c, wire.QueuesComplete(job=one.job, token=one.token, result='"r"')))
    said.append(ask(c, wire.QueuesFail(job=two.job, token=two.token, error="E: 1", retry=True)).state)
    said.append(ask(c, wire.QueuesFail(job=three.job, token=three.token, error="E: 2", retry=False)).state)
    said.append(ask(c, wire.Release(token=four.token)))
    h.pass_ms(2_000)
    idle = start(b, admit)
    said.append(sorted((grant.job, grant.attempt) for grant in idle.reply.jobs))
    h.run(Acked("b2", (idle.id,)), Away("c", True), Away("c", False), Cancelled("c", 999))
    b.die()
    said.append([result.reply and result.reply.state for result in results])
    said.append(sorted((row.key, row.attempt) for row in ask(c, admit).jobs))
    h.run(Ended("c", "released"))
    said += shared_things(h, a, run)
    said.append(ask(a, wire.StatusGet()).queues)
    h.pass_ms(90_000)
    said.append(ask(a, wire.RunsGet(run=below)).state)
    said.append(ask(a, wire.RunsEnd(run=run, state="finished")).state)
    h.pass_ms(11 * 60_000)
    return said


def shared_things(h: Faulty, a: Client, run: str) -> list[Any]:
    """Limits, slots, budgets, needs, groups, timers, barriers, events."""
    said: list[Any] = []
    d, e = h.session("d"), h.session("e")
    h.pass_ms(60_000 - h.clock.wall_ms() % 60_000)
    said.append(ask(a, wire.LimitsDeclare(limit="api", max=2, per_seconds=60)))
    said.append(ask(a, wire.SlotsDeclare(pool="gpu", max=2)))
    said.append(ask(a, wire.BudgetsDeclare(budget="llm", limit_minor=100)))
    ask(d, wire.LimitsTake(run=run, limit="api", units=2))
    token = ask(d, wire.SlotsAcquire(run=run, pool="gpu", units=2, lease_ms=wire.LEASE_MS_MAX)).token
    waits = [
        start(e, wire.LimitsTake(run=run, limit="api")),
        start(e, wire.SlotsAcquire(run=run, pool="gpu", lease_ms=wire.LEASE_MS_MAX)),
        start(e, wire.TimersSleep(run=run, name="t", after_ms=59_000)),
        start(e, wire.BarriersArrive(run=run, name="b", count=2, worker="e")),
    ]
    said.append([ask(a, wire.LimitsGet(limit="api")).waiting, ask(a, wire.SlotsGet(pool="gpu")).holders])
    said.append(ask(a, wire.BarriersDeclare(run=run, name="b", count=2)))
    ask(d, wire.BarriersArrive(run=run, name="b", count=2, worker="d"))
    said.append(ask(a, wire.BarriersGet(run=run, name="b")))
    ask(d, wire.Release(token=token))
    # A job with three needs, blocked by a limit; served by the next window.
    needs = wire.Needs(
        slots=(wire.UnitsNeeded(name="gpu"),),
        limits=(wire.UnitsNeeded(name="api"),),
        budgets=(wire.MoneyNeeded(name="llm", reserve_minor=40),),
    )
    ask(a, wire.QueuesDeclare(queue="shared", attempts=2, needs=needs))
    group = ask(a, wire.GroupsSubmit(run=run, queue="shared", members=(wire.NewJob(key="1", input="1"),)))
    ended = start(a, wire.GroupsEnded(run=group.run))
    heard = start(a, wire.EventsWait(run=run, after=ask(a, wire.EventsRead(run=run, limit=500)).cursor))
    wanted = wire.AdmitFrom(run=run, queue="shared", lease_ms=wire.LEASE_MS_MAX)
    admit = start(d, wire.QueuesAdmit(queues=(wanted,)))
    h.pass_ms(60_000)
    (grant,) = answered(admit).jobs
    costs = {grant.reservations[0]: 25}
    said.append(ask(d, wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs=costs)))
    said.append([type(answered(request)).__name__ for request in (*waits, ended, heard)])
    said.append(ask(a, wire.TimersAck(run=run, name="t")))
    # Money: settled in parts, over what is left, released, left behind by the dead.
    held = [ask(d, wire.BudgetsReserve(run=run, budget="llm", amount_minor=n)) for n in (10, 20, 30)]
    settle = wire.BudgetsSettle(reservation=held[0].reservation, cost_minor=5, work_key="1", keep_rest=True)
    said.append([ask(d, settle), ask(d, settle)])
    said.append(ask(d, wire.BudgetsRelease(reservation=held[1].reservation)))
    d.die()
    shown = {"reservation": held[2].reservation, "secret": held[2].secret}
    said.append(ask(a, wire.BudgetsSettle(**shown, cost_minor=500, work_key="1")))
    said.append(ask(a, wire.BudgetsGet(budget="llm")))
    said.append([(view.worker, view.holding) for view in ask(a, wire.RunsStatus(run=run)).workers])
    return said


@dataclass(frozen=True)
class Undisturbed:
    """The story without a failure."""

    said: list[Any]
    state: dict[str, list[tuple[Any, ...]]]
    statements: int
    some: tuple[int, ...]
    commits: tuple[int, ...]


def some(places: dict[str, list[int]]) -> list[int]:
    """Where to fail: each kind of statement in the first and the last transaction that has it. For all, take all."""
    return sorted({at for known in places.values() for at in (known[0], known[-1])})


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    h = Faulty()
    h.arm("none", 10**9)
    commits: list[int] = []
    places: dict[str, list[int]] = {}  # of each kind of statement, one in each transaction

    def after(sql: str) -> None:
        known = places.setdefault(sql, [])
        if not known or known[-1] <= max(commits, default=0):
            known.append(h.seen)
        if sql == "COMMIT":
            commits.append(h.seen)

    h.connection.after = after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "TURN_MS", 60_000)  # as in the stories with a failure, on a slow machine, too
        said = story(h)
    statements = h.seen
    h.connection.before = h.connection.after = nothing
    state = without_batch(stored(h))
    h.close()
    return Undisturbed(said, state, statements, tuple(some(places)), tuple(commits))


def check_one_failure(undisturbed: Undisturbed, kind: str, at: int) -> bool:
    """Plays the story with one failure; False when it was over before."""
    h = Faulty()
    h.arm(kind, at)
    try:
        assert story(h) == undisturbed.said
        h.connection.before = h.connection.after = nothing
        assert without_batch(stored(h)) == undisturbed.state
        h.check()
    except BaseException:
        print(f"{kind}: statement {at} failed: {h.failed}")
        raise
    finally:
        h.close()
    return bool(h.failed)


def test_whatever_statement_fails_nothing_is_lost_or_done_twice(
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "TURN_MS", 60_000)
    caplog.set_level(logging.CRITICAL)
    kinds = itertools.cycle(("transaction alive", "transaction gone"))
    for at, kind in zip(undisturbed.some, kinds, strict=False):
        assert check_one_failure(undisturbed, kind, at), at
    assert not check_one_failure(undisturbed, "transaction gone", undisturbed.statements + 1)


def test_whatever_commit_is_told_to_have_failed_nothing_is_lost_or_done_twice(
    undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "TURN_MS", 60_000)
    caplog.set_level(logging.CRITICAL)
    for at in undisturbed.commits:
        assert check_one_failure(undisturbed, "after the commit", at), at


def without_batch(state: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """But for the number of the last commit, and what is random."""
    random = (BATCH, "ticket_secret", "lease_secret")
    counters = [row for row in state["counters"] if row[0] not in random]
    return {**state, "counters": counters, "keys": [(*key[:4], *key[5:]) for key in state["keys"]]}


def test_the_story_knows_every_verb() -> None:
    text = Path(__file__).read_text()
    missing = [kind.__name__ for kind in nouns.VERBS if f"wire.{kind.__name__}(" not in text]
    assert not missing

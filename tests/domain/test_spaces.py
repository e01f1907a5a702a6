"""Spaces: nothing of one space can be seen or touched from another. Each verb is tried with every id of the other one.

And keys: what a key lacks a permission for is refused, and only that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated import dispatch
from runstated.store.tx import Access
from tests.harness import Client, Harness

NOT_FOUND, LEASE_LOST = "NOT_FOUND", "LEASE_LOST"


@dataclass(frozen=True)
class Theirs:
    """One of everything in the space of the session ``a``, and a run of the intruder's own."""

    run: str
    key: int
    job: str
    job_token: int
    slots: int
    reservation: str
    group: str
    own: str


@pytest.fixture
def theirs(h: Harness) -> Theirs:
    a, intruder = h.session("a"), h.session("x", space="other")
    run = a.ask(wire.RunsJoin(name="job")).run
    key = a.ask(wire.OnceAcquire(run=run, key="k")).token
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input='"secret"', attempts=3))
    (job,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    slots = a.ask(wire.SlotsAcquire(run=run, pool="gpu", max=1)).token
    a.ask(wire.LimitsTake(run=run, limit="api", max=5, per_seconds=60))
    a.ask(wire.TimersSleep(run=run, name="t", after_ms=0))
    a.ask(wire.BarriersDeclare(run=run, name="b", count=1))
    money = a.ask(wire.BudgetsReserve(run=run, budget="llm", amount_minor=40, limit_minor=100))
    group = a.ask(wire.GroupsSubmit(run=run, queue="q", members=(wire.GroupMember(key="2", input="1"),))).run
    own = intruder.ask(wire.RunsJoin(name="mine")).run
    return Theirs(run, key, job.job, job.token, slots, money.reservation, group, own)


CASES: tuple[tuple[type, Callable[[Theirs], wire.Request[Any]], str], ...] = (
    (wire.Renew, lambda t: wire.Renew(token=t.key, lease_ms=60_000), LEASE_LOST),
    (wire.Renew, lambda t: wire.Renew(token=t.job_token, lease_ms=60_000), LEASE_LOST),
    (wire.Renew, lambda t: wire.Renew(token=t.slots, lease_ms=60_000), LEASE_LOST),
    (wire.RunsChild, lambda t: wire.RunsChild(parent=t.run), NOT_FOUND),
    (wire.RunsEnd, lambda t: wire.RunsEnd(run=t.run, state="stopped"), NOT_FOUND),
    (wire.RunsGet, lambda t: wire.RunsGet(run=t.run), NOT_FOUND),
    (wire.RunsStatus, lambda t: wire.RunsStatus(run=t.run), NOT_FOUND),
    (wire.OnceAcquire, lambda t: wire.OnceAcquire(run=t.run, key="k"), NOT_FOUND),
    (wire.OnceGet, lambda t: wire.OnceGet(run=t.run, key="k"), NOT_FOUND),
    (wire.OnceComplete, lambda t: wire.OnceComplete(run=t.run, key="k", token=t.key, result="1"), NOT_FOUND),
    (wire.OnceComplete, lambda t: wire.OnceComplete(run=t.own, key="k", token=t.key, result="1"), LEASE_LOST),
    (wire.OnceFail, lambda t: wire.OnceFail(run=t.run, key="k", token=t.key, error="E"), NOT_FOUND),
    (wire.OnceFail, lambda t: wire.OnceFail(run=t.own, key="k", token=t.key, error="E"), LEASE_LOST),
    (wire.QueuesDeclare, lambda t: wire.QueuesDeclare(queue="q"), NOT_FOUND),
    (wire.QueuesSend, lambda t: wire.QueuesSend(run=t.run, queue="q", key="1", input="1", attempts=3), NOT_FOUND),
    (wire.QueuesSend, lambda t: wire.QueuesSend(run=t.own, queue="q", key="1", input="1"), NOT_FOUND),
    (wire.QueuesResult, lambda t: wire.QueuesResult(job=t.job), NOT_FOUND),
    (wire.QueuesAdmit, lambda t: wire.QueuesAdmit(queues=(wire.AdmitFrom(run=t.run, queue="q"),)), NOT_FOUND),
    (wire.QueuesComplete, lambda t: wire.QueuesComplete(job=t.job, token=t.job_token, result="1"), NOT_FOUND),
    (wire.QueuesFail, lambda t: wire.QueuesFail(job=t.job, token=t.job_token, error="E"), NOT_FOUND),
    (wire.LimitsDeclare, lambda t: wire.LimitsDeclare(limit="api"), NOT_FOUND),
    (wire.LimitsGet, lambda t: wire.LimitsGet(limit="api"), NOT_FOUND),
    (wire.LimitsTake, lambda t: wire.LimitsTake(run=t.run, limit="api"), NOT_FOUND),
    (wire.LimitsTake, lambda t: wire.LimitsTake(run=t.own, limit="api"), NOT_FOUND),
    (wire.SlotsDeclare, lambda t: wire.SlotsDeclare(pool="gpu"), NOT_FOUND),
    (wire.SlotsGet, lambda t: wire.SlotsGet(pool="gpu"), NOT_FOUND),
    (wire.SlotsAcquire, lambda t: wire.SlotsAcquire(run=t.run, pool="gpu"), NOT_FOUND),
    (wire.SlotsAcquire, lambda t: wire.SlotsAcquire(run=t.own, pool="gpu"), NOT_FOUND),
    (wire.BudgetsDeclare, lambda t: wire.BudgetsDeclare(budget="llm"), NOT_FOUND),
    (wire.BudgetsGet, lambda t: wire.BudgetsGet(budget="llm"), NOT_FOUND),
    (wire.BudgetsReserve, lambda t: wire.BudgetsReserve(run=t.own, budget="llm", amount_minor=1), NOT_FOUND),
    (wire.BudgetsReserve, lambda t: wire.BudgetsReserve(run=t.run, budget="llm", amount_minor=1), NOT_FOUND),
    (
        wire.BudgetsSettle,
        lambda t: wire.BudgetsSettle(reservation=t.reservation, cost_minor=1, work_key="w"),
        NOT_FOUND,
    ),
    (wire.BudgetsRelease, lambda t: wire.BudgetsRelease(reservation=t.reservation), NOT_FOUND),
    (
        wire.GroupsSubmit,
        lambda t: wire.GroupsSubmit(run=t.run, queue="q", members=(wire.GroupMember(key="1", input="1"),), attempts=3),
        NOT_FOUND,
    ),
    (wire.GroupsEnded, lambda t: wire.GroupsEnded(run=t.group), NOT_FOUND),
    (wire.TimersSleep, lambda t: wire.TimersSleep(run=t.run, name="t", after_ms=0), NOT_FOUND),
    (wire.TimersAck, lambda t: wire.TimersAck(run=t.run, name="t"), NOT_FOUND),
    (wire.BarriersDeclare, lambda t: wire.BarriersDeclare(run=t.run, name="b", count=1), NOT_FOUND),
    (wire.BarriersGet, lambda t: wire.BarriersGet(run=t.run, name="b"), NOT_FOUND),
    (wire.BarriersArrive, lambda t: wire.BarriersArrive(run=t.run, name="b", count=1, worker="w"), NOT_FOUND),
    (wire.EventsRead, lambda t: wire.EventsRead(run=t.run), NOT_FOUND),
    (wire.EventsWait, lambda t: wire.EventsWait(run=t.run), NOT_FOUND),
)
NAMES_NOTHING = {wire.RunsJoin, wire.StatusGet, wire.Release}  # tried below, in tests of their own


def state(h: Harness) -> list[Any]:
    tables = ("runs", "leases", "once_keys", "jobs", "pools", "limits", "budgets", "reservations", "units")
    return [h.rows(f"SELECT * FROM {table}") for table in (*tables, "timers", "barriers", "ledger", "events")]


@pytest.mark.parametrize(("kind", "make", "code"), CASES, ids=[f"{kind.__name__}-{code}" for kind, _, code in CASES])
def test_nothing_of_another_space_is_seen_or_touched(
    h: Harness, theirs: Theirs, kind: type, make: Callable[[Theirs], wire.Request[Any]], code: str
) -> None:
    before = state(h)
    refusal = h.clients["x"].refused(code, make(theirs))
    assert state(h) == before
    assert "secret" not in refusal.message


def test_every_verb_is_tried() -> None:
    known = {kind for kind in dispatch.VERBS if kind.__name__ not in ("KeysCreate", "KeysList", "KeysRevoke")}
    assert known == {kind for kind, _, _ in CASES} | NAMES_NOTHING


def test_a_token_of_another_space_is_gone(h: Harness, theirs: Theirs) -> None:
    x, before = h.clients["x"], state(h)
    for token in (theirs.key, theirs.job_token, theirs.slots):
        assert x.ask(wire.Release(token=token)) == wire.Released(held=False)
        assert x.beat(token) == [False]
    assert state(h) == before


def test_a_token_of_another_space_puts_nobody_first(h: Harness, theirs: Theirs) -> None:
    x, y = h.clients["x"], h.session("y", space="other")
    held = x.ask(wire.SlotsAcquire(run=theirs.own, pool="gpu", max=1)).token
    first = y.waits(wire.SlotsAcquire(run=theirs.own, pool="gpu"))
    pushy = h.session("z", space="other").waits(
        wire.SlotsAcquire(run=theirs.own, pool="gpu", within=(theirs.key, theirs.slots))
    )
    x.ask(wire.Release(token=held))
    assert isinstance(first.reply, wire.SlotsGranted)
    assert pushy.reply is None


def test_a_run_of_the_same_name_is_another_run(h: Harness, theirs: Theirs) -> None:
    assert h.clients["x"].ask(wire.RunsJoin(name="job")).run != theirs.run


def test_the_status_shows_one_space(h: Harness, theirs: Theirs) -> None:
    seen = h.clients["x"].ask(wire.StatusGet())
    assert [run.run for run in seen.runs] == [theirs.own]
    assert [worker.session for worker in seen.workers] == ["x"]
    assert seen.queues == ()
    assert not any(worker.holdings for worker in seen.workers)


# ---------------------------------------------------------------------------------------------------- permissions

CREATES: tuple[Callable[[str], wire.Request[Any]], ...] = (
    lambda run: wire.QueuesDeclare(queue="new", attempts=3),
    lambda run: wire.QueuesSend(run=run, queue="new", key="1", input="1", attempts=3),
    lambda run: wire.LimitsDeclare(limit="new", max=1, per_seconds=1),
    lambda run: wire.LimitsTake(run=run, limit="new", max=1, per_seconds=1),
    lambda run: wire.SlotsDeclare(pool="new", max=1),
    lambda run: wire.SlotsAcquire(run=run, pool="new", max=1),
    lambda run: wire.BudgetsDeclare(budget="new", limit_minor=5),
    lambda run: wire.BudgetsReserve(run=run, budget="new", amount_minor=1, limit_minor=5),
)


def keyed(h: Harness, *permissions: str) -> Client:
    return h.session("-".join(("key", *permissions)), access=Access(permissions=frozenset(permissions), key="k1"))


@pytest.mark.parametrize("make", CREATES)
def test_to_create_a_resource_a_key_needs_resource_config(h: Harness, make: Callable[[str], wire.Request[Any]]) -> None:
    run = h.session("a").ask(wire.RunsJoin(name="job")).run
    worker, admin = keyed(h, "work"), keyed(h, "work", "resource_config")
    refusal = worker.refused("FORBIDDEN", make(run))
    assert "resource_config" in refusal.message
    assert "new" in refusal.message
    assert not isinstance(admin.ask(make(run)), wire.Error)
    worker.submit(make(run))  # it exists: looked up and verified by anybody
    assert not [event for event in h.events(run) if "forbidden" in event]


@pytest.mark.parametrize("kind", [kind for kind in dispatch.VERBS if kind.permission])  # type: ignore[attr-defined]
def test_a_verb_says_which_permission_it_needs(h: Harness, theirs: Theirs, kind: type) -> None:
    others = frozenset(wire.PERMISSIONS) - {kind.permission}  # type: ignore[attr-defined]
    client = h.session("k", access=Access(permissions=others, key="k1"))
    made = [make for each, make, _ in CASES if each is kind]
    plain: dict[type, wire.Request[Any]] = {
        wire.Release: wire.Release(token=theirs.key),
        wire.StatusGet: wire.StatusGet(),
    }
    request = made[0](theirs) if made else plain[kind]
    before = state(h)
    assert kind.permission in client.refused("FORBIDDEN", request).message  # type: ignore[attr-defined]
    assert state(h) == before
    assert msgspec.structs.asdict(request)


def test_a_key_without_work_joins_a_run_that_is_there_and_makes_none(h: Harness, theirs: Theirs) -> None:
    looker = keyed(h, "usage")
    assert looker.ask(wire.RunsJoin(name="job")).run == theirs.run
    assert "work" in looker.refused("FORBIDDEN", wire.RunsJoin(name="new")).message
    assert looker.ask(wire.RunsStatus(run=theirs.run)).run.run == theirs.run

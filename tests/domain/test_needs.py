from __future__ import annotations

import sys
from typing import Any

import pytest

from runstate import wire
from runstated.domain import needs
from tests.harness import Client, Harness, Request

MINUTE_MS = 60_000
LEASE_MS = 30_000
STEPS_MAX = 3_000  # of Python, for an admission of two jobs


@pytest.fixture
def a(h: Harness) -> Client:
    """The producer, who declares what there is: two slots, two units a minute, a hundred of money."""
    a = h.session("a")
    h.pass_ms(MINUTE_MS - h.clock.wall_ms() % MINUTE_MS)
    a.ask(wire.SlotsDeclare(pool="gpu", max=2))
    a.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=60))
    a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=100))
    a.ask(wire.QueuesDeclare(queue="q", attempts=3))
    return a


@pytest.fixture
def w(h: Harness) -> Client:
    return h.session("w")


@pytest.fixture
def d(h: Harness) -> Client:
    """A direct caller."""
    return h.session("d")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def of(gpu: int = 0, api: int = 0, llm: int = 0) -> wire.Needs:
    return wire.Needs(
        slots=(wire.UnitsNeeded(name="gpu", units=gpu),) if gpu else (),
        limits=(wire.UnitsNeeded(name="api", units=api),) if api else (),
        budgets=(wire.MoneyNeeded(name="llm", reserve_minor=llm),) if llm else (),
    )


def send(client: Client, run: str, key: str, needs: wire.Needs | None = None, queue: str = "q") -> str:
    return str(client.ask(wire.QueuesSend(run=run, queue=queue, key=key, input="1", attempts=3, needs=needs)).job)


def admit(run: str, places: int = 1, queue: str = "q", **more: Any) -> wire.QueuesAdmit:
    return wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue=queue, places=places, lease_ms=LEASE_MS),), **more)


def slots(run: str, units: int = 1, **more: Any) -> wire.SlotsAcquire:
    return wire.SlotsAcquire(run=run, pool="gpu", units=units, **more)


def units(run: str, units: int = 1, **more: Any) -> wire.LimitsTake:
    return wire.LimitsTake(run=run, limit="api", units=units, **more)


def reserve(run: str, amount: int) -> wire.BudgetsReserve:
    return wire.BudgetsReserve(run=run, budget="llm", amount_minor=amount)


def start(client: Client, run: str) -> wire.JobGrant:
    (grant,) = client.ask(admit(run)).jobs
    assert isinstance(grant, wire.JobGrant)
    return grant


def keys(request: Request) -> list[str]:
    return [] if request.reply is None else [grant.key for grant in request.reply.jobs]


def used(client: Client) -> tuple[int, int, int, int]:
    """Slots and units in use; money reserved and spent."""
    money = client.ask(wire.BudgetsGet(budget="llm"))
    return (
        client.ask(wire.SlotsGet(pool="gpu")).used,
        client.ask(wire.LimitsGet(limit="api")).used,
        money.reserved_minor,
        money.spent_minor,
    )


# ------------------------------------------------------------------ declared needs


@pytest.mark.parametrize("kind", ["slots", "limits", "budgets"])
def test_what_does_not_exist_is_not_found(a: Client, run: str, kind: str) -> None:
    nothing = wire.MoneyNeeded(name="x", reserve_minor=1) if kind == "budgets" else wire.UnitsNeeded(name="x")
    wanted = wire.Needs(**{kind: (nothing,)})  # type: ignore[arg-type]
    a.refused("NOT_FOUND", wire.QueuesDeclare(queue="q", needs=wanted))
    a.refused("NOT_FOUND", wire.QueuesSend(run=run, queue="q", key="1", input="1", needs=wanted))


@pytest.mark.parametrize(
    ("wanted", "name", "sizes"),
    [
        (of(gpu=3), "gpu", ("3", "2")),
        (of(api=3), "api", ("3", "2")),
        (of(llm=101), "llm", ("101", "100")),
    ],
)
def test_more_than_there_is_in_all_is_refused_at_once(
    a: Client, run: str, wanted: wire.Needs, name: str, sizes: tuple[str, str]
) -> None:
    members = (wire.NewJob(key="1", input="1"),)
    for request in (
        wire.QueuesDeclare(queue="q", needs=wanted),
        wire.QueuesSend(run=run, queue="q", key="1", input="1", needs=wanted),
        wire.GroupsSubmit(run=run, queue="q", members=members, needs=wanted),
    ):
        message = a.refused("VALIDATION_FAILED", request).message
        assert all(f" {word}" in message for word in ("q", name, *sizes)), message
    assert a.h.value("SELECT count(*) FROM jobs") == 0


def test_all_that_there_is_may_be_needed(a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=2, api=2, llm=100))
    assert len(w.ask(admit(run)).jobs) == 1


@pytest.mark.parametrize("kind", ["slots", "limits", "budgets"])
def test_the_same_name_twice_is_refused(a: Client, run: str, kind: str) -> None:
    names = {"slots": "gpu", "limits": "api", "budgets": "llm"}
    one = wire.MoneyNeeded(name="llm", reserve_minor=60) if kind == "budgets" else wire.UnitsNeeded(name=names[kind])
    a.refused("VALIDATION_FAILED", wire.QueuesDeclare(queue="q", needs=wire.Needs(**{kind: (one, one)})))  # type: ignore[arg-type]


def test_a_set_of_needs_is_stored_once(h: Harness, a: Client, run: str) -> None:
    for number in range(3):
        send(a, run, str(number), of(gpu=1))
    a.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=1)))
    assert h.value("SELECT count(*) FROM needs") == 1


def test_the_latest_declaration_wins_and_is_read_when_the_job_starts(a: Client, w: Client, run: str) -> None:
    a.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=2)))
    send(a, run, "1")
    a.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=1)))
    a.ask(wire.QueuesDeclare(queue="q", attempts=3))
    start(w, run)
    assert used(a)[0] == 1


def test_a_declaration_frees_those_who_wait_for_what_was_declared_before(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    d.ask(slots(run, 2))
    a.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=1)))
    send(a, run, "1")
    waits = w.waits(admit(run))
    a.ask(wire.QueuesDeclare(queue="q", needs=wire.Needs()))
    assert keys(waits) == ["1"], "an explicit empty set clears"


def test_a_job_that_says_itself_what_it_needs_is_not_asked_of_its_queue(a: Client, w: Client, run: str) -> None:
    a.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=2, llm=50)))
    send(a, run, "own", of(gpu=1))
    send(a, run, "none", wire.Needs())
    start(w, run)
    assert used(a) == (1, 0, 0, 0)
    start(w, run)
    assert used(a) == (1, 0, 0, 0)


def test_a_group_may_say_what_its_jobs_need(a: Client, w: Client, run: str) -> None:
    members = tuple(wire.NewJob(key=key, input="1") for key in "123")
    a.ask(wire.GroupsSubmit(run=run, queue="q", members=members, needs=of(gpu=1)))
    assert len(w.ask(admit(run, places=3)).jobs) == 2
    assert used(a)[0] == 2


# ------------------------------------------------------------------ one step, or not at all


def test_a_job_takes_all_it_needs_in_one_step(h: Harness, a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=2, api=1, llm=40))
    grant = start(w, run)
    assert used(a) == (2, 1, 40, 0)
    assert len(grant.reservations) == 1
    assert a.ask(wire.SlotsGet(pool="gpu")).holders == ("worker-w",)


@pytest.mark.parametrize("taken", ["gpu", "api", "llm"])
def test_a_job_that_lacks_one_thing_takes_nothing(a: Client, w: Client, d: Client, run: str, taken: str) -> None:
    d.ask({"gpu": slots(run), "api": units(run), "llm": reserve(run, 61)}[taken])
    before = used(a)
    send(a, run, "1", of(gpu=2, api=2, llm=40))
    w.waits(admit(run))
    assert used(a) == before


def test_what_lacks_budget_holds_up_nobody(a: Client, w: Client, d: Client, run: str) -> None:
    held = d.ask(reserve(run, 80))
    send(a, run, "1", of(gpu=2, api=2, llm=40))
    waits = w.waits(admit(run))
    slot = d.ask(slots(run, 2))
    assert d.ask(units(run, 2)) == wire.LimitTaken()
    d.ask(wire.BudgetsRelease(reservation=held.reservation))
    d.ask(wire.Release(token=slot.token))
    assert keys(waits) == []


@pytest.mark.parametrize("how", ["release", "settle", "bye", "settle-by"])
def test_what_lacked_budget_starts_as_soon_as_it_is_there(
    h: Harness, a: Client, w: Client, d: Client, run: str, how: str
) -> None:
    held = d.ask(reserve(run, 80))
    send(a, run, "1", of(gpu=2, llm=40))
    waits = w.waits(admit(run))
    if how == "release":
        d.ask(wire.BudgetsRelease(reservation=held.reservation))
    elif how == "settle":
        d.ask(wire.BudgetsSettle(reservation=held.reservation, cost_minor=60, work_key="w"))
    elif how == "bye":
        d.bye()
    else:
        h.suspend(wire.SETTLE_BY_MS)
    assert keys(waits) == ["1"]


def test_what_lacks_a_limit_holds_up_nobody_in_this_window_and_goes_first_in_the_next(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    d.ask(units(run, 1))
    send(a, run, "1", of(gpu=2, api=2, llm=50))
    waits = w.waits(admit(run))
    slot = d.ask(slots(run, 2)).token
    d.ask(reserve(run, 1))
    assert d.ask(units(run, 1)) == wire.LimitTaken()
    behind = d.waits(units(run, 1))
    d.ask(wire.Release(token=slot))
    assert keys(waits) == []
    h.pass_ms(MINUTE_MS)
    assert keys(waits) == ["1"]
    assert behind.reply is None


def test_what_lacks_only_slots_holds_up_those_and_exactly_its_units_are_set_aside_in_each_window(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    token = d.ask(slots(run, 1, lease_ms=wire.LEASE_MS_MAX)).token
    send(a, run, "1", of(gpu=2, api=1))
    waits = w.waits(admit(run))
    one, two = d.waits(slots(run)), d.waits(units(run, 2))
    for _ in range(3):
        assert d.ask(units(run, 1)) == wire.LimitTaken()
        assert d.ask(units(run, 1, wait_ms=0)) == wire.LimitBusy()
        h.pass_ms(MINUTE_MS)
        assert (one.reply, two.reply, keys(waits)) == (None, None, [])
    d.ask(wire.Release(token=token))
    assert keys(waits) == ["1"]
    assert (one.reply, two.reply) == (None, None)
    h.pass_ms(MINUTE_MS)
    assert two.reply == wire.LimitTaken()


def test_a_job_stands_in_line_by_its_own_age_and_not_by_its_workers(a: Client, w: Client, d: Client, run: str) -> None:
    token = a.ask(slots(run, 2)).token
    send(a, run, "1", of(gpu=2))
    direct = d.waits(slots(run, 2))
    waits = w.waits(admit(run))
    a.ask(wire.Release(token=token))
    assert keys(waits) == ["1"]
    assert direct.reply is None


def test_an_older_direct_caller_goes_before_a_job(a: Client, w: Client, d: Client, run: str) -> None:
    token = a.ask(slots(run, 2)).token
    direct = d.waits(slots(run, 2))
    send(a, run, "1", of(gpu=2))
    waits = w.waits(admit(run))
    a.ask(wire.Release(token=token))
    assert isinstance(direct.reply, wire.SlotsGranted)
    assert keys(waits) == []


def test_a_job_without_a_worker_holds_up_nobody(a: Client, d: Client, run: str) -> None:
    token = d.ask(slots(run, 1)).token
    send(a, run, "1", of(gpu=2))
    d.ask(wire.Release(token=token))
    d.ask(slots(run, 2))


# ------------------------------------------------------------------ what others do meanwhile


@pytest.mark.parametrize("how", ["a nested call", "an older job"])
def test_a_job_whose_set_aside_units_were_taken_holds_up_slots_no_more(
    h: Harness, a: Client, w: Client, d: Client, run: str, how: str
) -> None:
    """It has its units and lacks slots, until who goes before it takes the units: now it lacks a limit."""
    if how == "an older job":
        send(a, run, "old", of(api=2), queue="p")
    token = d.ask(wire.OnceAcquire(run=run, key="k")).token
    d.ask(slots(run, 1))
    send(a, run, "1", of(gpu=2, api=1))
    w.waits(admit(run))
    small = d.waits(slots(run, 1))
    if how == "an older job":
        assert keys(h.session("v").submit(admit(run, queue="p"))) == ["old"]
    else:
        assert d.ask(units(run, 2, within=(token,))) == wire.LimitTaken()
    assert isinstance(small.reply, wire.SlotsGranted)


@pytest.mark.parametrize("how", ["reserve", "overrun"])
@pytest.mark.parametrize("holds_up", ["slots", "limit"])
def test_a_job_whose_money_was_taken_holds_up_nothing_more(
    h: Harness, a: Client, w: Client, d: Client, run: str, how: str, holds_up: str
) -> None:
    held = d.ask(reserve(run, 10))
    d.ask(slots(run, 1))
    send(a, run, "1", of(gpu=2, api=1, llm=80))
    w.waits(admit(run))
    waits = d.waits(slots(run, 1) if holds_up == "slots" else units(run, 2))
    if how == "reserve":
        d.ask(reserve(run, 50))
    else:
        d.ask(wire.BudgetsSettle(reservation=held.reservation, cost_minor=60, work_key="w"))
    assert waits.reply is not None


@pytest.mark.parametrize("how", ["stopped", "expired"])
def test_a_job_whose_run_ended_holds_up_nobody(h: Harness, a: Client, w: Client, d: Client, run: str, how: str) -> None:
    deadline = h.clock.wall_ms() + 5_000 if how == "expired" else None
    below = a.ask(wire.RunsChild(parent=run, deadline_ms=deadline)).run
    d.ask(slots(run, 1))
    send(a, below, "1", of(gpu=2))
    w.waits(admit(run))
    small = d.waits(slots(run, 1))
    if how == "stopped":
        a.ask(wire.RunsEnd(run=below, state="stopped"))
    else:
        h.pass_ms(5_000)
    assert isinstance(small.reply, wire.SlotsGranted)


def test_a_worker_whose_job_is_gone_stands_for_its_next_one_and_lets_those_between_go(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    d.ask(slots(run, 1))
    send(a, below, "1", of(gpu=2))
    w.waits(admit(run))
    small = d.waits(slots(run, 1))
    send(a, run, "2", of(gpu=2))
    a.ask(wire.RunsEnd(run=below, state="stopped"))
    assert isinstance(small.reply, wire.SlotsGranted)


def test_a_worker_that_moves_forward_in_a_line_makes_those_it_overtakes_look_again(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    """What they had set aside is its now: they hold up other lines no more."""
    a.ask(wire.SlotsDeclare(pool="disk", max=2))
    disk = wire.SlotsAcquire(run=run, pool="disk", lease_ms=LEASE_MS)
    send(a, run, "old", queue="p")
    (old,) = h.session("o").ask(admit(run, queue="p")).jobs
    a.ask(wire.QueuesDeclare(queue="p", needs=of(gpu=1, api=1)))
    d.ask(slots(run, 2))
    d.ask(disk)
    two_disks = wire.Needs(
        slots=(wire.UnitsNeeded(name="disk", units=2),), limits=(wire.UnitsNeeded(name="api", units=2),)
    )
    send(a, run, "middle", two_disks)
    w.waits(admit(run))
    send(a, run, "young", queue="p")
    h.session("v").waits(admit(run, queue="p"))
    small = d.waits(disk)
    h.clients["o"].ask(wire.Release(token=old.token))
    assert isinstance(small.reply, wire.SlotsGranted)


def test_each_worker_that_lacks_budget_is_looked_at(h: Harness, a: Client, w: Client, d: Client, run: str) -> None:
    held = d.ask(reserve(run, 100))
    send(a, run, "big", of(llm=90))
    send(a, run, "small", of(llm=30), queue="p")
    big, small = w.waits(admit(run)), h.session("v").waits(admit(run, queue="p"))
    d.ask(wire.BudgetsSettle(reservation=held.reservation, cost_minor=60, work_key="w"))
    assert (keys(big), keys(small)) == ([], ["small"])


@pytest.mark.parametrize("how", ["cancel", "die", "away", "late"])
def test_a_worker_that_goes_holds_up_nobody(h: Harness, a: Client, w: Client, d: Client, run: str, how: str) -> None:
    d.ask(slots(run, 1))
    send(a, run, "1", of(gpu=2, api=1))
    waits = w.waits(admit(run, wait_ms=5_000))
    small, unit = d.waits(slots(run, 1)), d.waits(units(run, 2))
    if how == "cancel":
        waits.cancel()
    elif how == "die":
        w.die()
    elif how == "away":
        w.lose()
    else:
        h.pass_ms(5_000)
    assert isinstance(small.reply, wire.SlotsGranted)
    assert unit.reply == wire.LimitTaken()


def test_a_job_that_comes_back_goes_before_those_that_were_younger(
    h: Harness, a: Client, w: Client, d: Client, run: str
) -> None:
    """It is older than the job for which the worker stands: those behind it look again, too."""
    send(a, run, "old", of(gpu=2))
    old = start(w, run)
    send(a, run, "young", of(gpu=1))
    waits = h.session("v").waits(admit(run))
    w.ask(wire.Release(token=old.token))
    assert keys(waits) == ["old"]


# ------------------------------------------------------------------ sets of needs


def test_sets_of_needs_do_not_block_each_other(a: Client, w: Client, d: Client, run: str) -> None:
    d.ask(slots(run, 2))
    for number in range(3):
        send(a, run, f"gpu {number}", of(gpu=1))
    send(a, run, "api", of(api=1))
    send(a, run, "plain")
    assert keys(w.submit(admit(run, places=5))) == ["api", "plain"]


def test_an_older_set_of_the_same_queue_holds_up_a_younger_one_that_wants_the_same(
    a: Client, w: Client, d: Client, run: str
) -> None:
    """Or small jobs would pass a big one for ever."""
    d.ask(slots(run, 1))
    send(a, run, "big", of(gpu=2))
    for number in range(3):
        send(a, run, f"small {number}", of(gpu=1))
    waits = w.waits(admit(run))
    assert keys(waits) == []
    waits.cancel()
    assert keys(w.submit(admit(run, wait_ms=0))) == []


def test_small_jobs_do_not_starve_a_big_one(h: Harness, a: Client, w: Client, run: str) -> None:
    send(a, run, "s0", of(gpu=1))
    send(a, run, "s1", of(gpu=1))
    running = [start(w, run), start(w, run)]
    send(a, run, "big", of(gpu=2))
    seen: list[str] = []
    for number in range(2, 12):
        send(a, run, f"s{number}", of(gpu=1))
        waits = w.submit(admit(run))
        if running:
            grant = running.pop(0)
            w.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))
        seen += keys(waits)
        if "big" in seen:
            break
        waits.cancel()
    assert seen == ["big"]


@pytest.mark.parametrize("jobs", [10, 1_000])
def test_many_blocked_jobs_are_not_looked_at(h: Harness, a: Client, w: Client, d: Client, run: str, jobs: int) -> None:
    """One queue, three sets of needs, one of them blocked: an admission takes the same steps."""
    d.ask(slots(run, 2))
    for number in range(jobs):
        send(a, run, f"blocked {number}", of(gpu=1))
    for number in range(20):
        send(a, run, f"api {number}", of(llm=1))
        send(a, run, f"plain {number}")
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    for _ in range(20):
        assert len(w.ask(admit(run, places=2)).jobs) == 2
    sys.setprofile(None)
    assert steps < 20 * STEPS_MAX, f"{steps} calls and returns for {jobs} jobs"


# ------------------------------------------------------------------ the end of a job


def test_costs_are_settled_with_the_result(h: Harness, a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=1, llm=40))
    grant = start(w, run)
    (reservation,) = grant.reservations
    done = wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs={reservation: 25})
    assert w.ask(done).state == "succeeded"
    assert used(a) == (0, 0, 0, 25)
    assert w.ask(done).state == "succeeded"
    assert used(a) == (0, 0, 0, 25)


@pytest.mark.parametrize(("cost", "spent"), [(None, 40), (0, 0), (40, 40), (60, 60), (500, 100)])
def test_what_a_job_costs(a: Client, w: Client, run: str, cost: int | None, spent: int) -> None:
    """Without a cost the whole reservation; more than that as far as the budget reaches."""
    send(a, run, "1", of(llm=40))
    grant = start(w, run)
    costs = {} if cost is None else {grant.reservations[0]: cost}
    w.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs=costs))
    assert used(a) == (0, 0, 0, spent)


def test_a_result_may_leave_its_reservations_to_be_settled_later(a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=1, llm=40))
    grant = start(w, run)
    w.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1", keep_reserved=True))
    assert used(a) == (0, 0, 40, 0)
    w.ask(wire.BudgetsSettle(reservation=grant.reservations[0], cost_minor=5, work_key="w"))
    assert used(a) == (0, 0, 0, 5)


@pytest.mark.parametrize("how", ["fail", "fail for good", "release", "die", "lapse", "bye", "cancel"])
def test_a_delivery_without_a_result_gives_all_back_but_what_it_may_have_cost(
    h: Harness, a: Client, w: Client, run: str, how: str
) -> None:
    send(a, run, "1", of(gpu=2, api=1, llm=40))
    asked = w.submit(admit(run))
    (grant,) = asked.reply.jobs
    waits = h.session("d").waits(slots(run, 2))
    if how.startswith("fail"):
        w.ask(wire.QueuesFail(job=grant.job, token=grant.token, error="E", retry=how == "fail"))
    elif how == "release":
        w.ask(wire.Release(token=grant.token))
    elif how == "lapse":
        h.pass_ms(LEASE_MS)
    elif how == "cancel":
        asked.cancel()
    else:
        w.die() if how == "die" else w.bye()
    assert isinstance(waits.reply, wire.SlotsGranted)
    is_silent = how in ("die", "lapse")
    assert used(a)[1:] == (1, 0, 40 * is_silent), "units of a limit are spent"
    assert h.value("SELECT count(*) FROM events WHERE type = 'budget.assumed'") == is_silent


def test_a_worker_that_has_lost_its_job_says_what_it_has_cost_all_the_same(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    send(a, run, "1", of(llm=40))
    grant = start(w, run)
    h.pass_ms(LEASE_MS)
    w.refused("LEASE_LOST", wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))
    assert used(a)[2:] == (0, 40)
    w.ask(wire.BudgetsSettle(reservation=grant.reservations[0], cost_minor=5, work_key=f"job:{grant.token}"))
    assert used(a)[2:] == (0, 5)


@pytest.mark.parametrize("cost", [None, 70])
def test_a_job_that_takes_longer_than_its_reservation_is_charged(
    h: Harness, a: Client, w: Client, run: str, cost: int | None
) -> None:
    send(a, run, "1", of(llm=40))
    grant = start(w, run)
    for _ in range(3 * wire.SETTLE_BY_MS // LEASE_MS):
        h.pass_ms(LEASE_MS // 2)
        assert w.beat(grant.token) == [True]
    assert used(a)[2:] == (0, 0), "released"
    costs = {} if cost is None else {grant.reservations[0]: cost}
    w.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs=costs))
    assert used(a)[2:] == (0, cost or 40)


def test_the_next_delivery_takes_everything_anew(h: Harness, a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=2, api=1, llm=40))
    first = start(w, run)
    w.ask(wire.Release(token=first.token))
    second = start(w, run)
    assert used(a) == (2, 2, 40, 0)
    assert second.reservations != first.reservations


def test_the_slots_of_a_job_whose_run_ended_stay_held_until_its_worker_lets_go(
    h: Harness, a: Client, w: Client, run: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    send(a, below, "1", of(gpu=2, llm=40))
    grant = start(w, run)
    waits = h.session("d").waits(slots(run))
    a.ask(wire.RunsEnd(run=below, state="stopped"))
    assert waits.reply is None
    assert w.beat(grant.token) == [True]
    w.refused("LEASE_LOST", wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))
    assert isinstance(waits.reply, wire.SlotsGranted)
    assert used(a)[2:] == (0, 40), "it was done, and is paid"


@pytest.mark.parametrize("outcome", ["complete", "fail"])
def test_a_worker_that_comes_after_its_job_was_tidied_lets_go_all_the_same(
    h: Harness, a: Client, w: Client, run: str, outcome: str
) -> None:
    below = a.ask(wire.RunsChild(parent=run)).run
    send(a, below, "1", of(gpu=2, llm=40))
    grant = start(w, run)
    a.ask(wire.RunsEnd(run=below, state="stopped"))
    for _ in range(45):
        h.pass_ms(LEASE_MS // 2)
        assert w.beat(grant.token) == [True]
    if outcome == "complete":
        w.refused("NOT_FOUND", wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))
    else:
        w.refused("NOT_FOUND", wire.QueuesFail(job=grant.job, token=grant.token, error="E"))
    assert used(a) == (0, 0, 0, 40 * (outcome == "complete"))
    assert not h.held()


def test_a_repeat_of_admit_takes_once(h: Harness, a: Client, w: Client, run: str) -> None:
    send(a, run, "1", of(gpu=1, api=1, llm=40))
    asked = w.submit(admit(run))
    assert asked.repeat().reply == asked.reply
    assert used(a) == (1, 1, 40, 0)


def test_a_set_of_needs_that_wants_nothing_is_nothing() -> None:
    assert not needs.Wants()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_stands_in_a_line_for_an_older_job_does_not_hold_up_its_younger_one(
    h: Harness, a: Client, d: Client, run: str, workers: int
) -> None:
    a.ask(wire.LimitsDeclare(limit="slow", max=1, per_seconds=3600))
    d.ask(wire.LimitsTake(run=run, limit="slow"))
    d.ask(units(run, 2))
    both = wire.Needs(limits=(wire.UnitsNeeded(name="api"), wire.UnitsNeeded(name="slow")))
    send(a, run, "older", both)
    younger = send(a, run, "younger", of(api=1))
    waits = [h.session(f"w{number}").waits(admit(run)) for number in range(workers)]
    h.pass_ms(MINUTE_MS)  # a new window of the one limit: only the younger job has all it needs
    assert [job.job for wait in waits if wait.reply for job in wait.reply.jobs] == [younger]


# ------------------------------------------------------------------ who waits for a job waits for what it lacks


def test_who_waits_for_a_job_is_behind_those_who_hold_the_slots_it_lacks(
    a: Client, w: Client, d: Client, run: str
) -> None:
    held = d.ask(slots(run, 2)).token
    a.waits(wire.QueuesResult(job=send(a, run, "1", of(gpu=1))))
    assert a.told(wire.Parked)[-1].behind == (held,)
    w.ask(wire.QueuesDeclare(queue="q", needs=of(gpu=1)))
    a.waits(wire.QueuesResult(job=send(a, run, "2")))
    assert a.told(wire.Parked)[-1].behind == (held,), "also when it needs what its queue's workers have declared"


def test_who_waits_for_a_job_is_behind_nobody_whose_slots_it_does_not_lack(a: Client, d: Client, run: str) -> None:
    d.ask(slots(run, 1))
    for key, wanted in (("1", of(gpu=1)), ("2", of(llm=1)), ("3", None)):
        a.waits(wire.QueuesResult(job=send(a, run, key, wanted)))
        assert a.told(wire.Parked)[-1].behind == ()


def test_a_wait_for_a_job_that_lacks_the_slots_one_holds_oneself_is_refused(a: Client, run: str) -> None:
    held = a.ask(slots(run, 2)).token
    job = send(a, run, "1", of(gpu=1))
    assert "waits for slots" in a.refused("DEADLOCK", wire.QueuesResult(job=job, within=(held,))).message
    a.ask(wire.Release(token=held))
    a.waits(wire.QueuesResult(job=job, within=(held,)))


def test_a_circle_through_the_slots_that_a_job_lacks_is_refused(a: Client, d: Client, run: str) -> None:
    mine = a.ask(wire.OnceAcquire(run=run, key="k")).token
    theirs = d.ask(slots(run, 2)).token
    waits = a.waits(wire.QueuesResult(job=send(a, run, "1", of(gpu=1)), within=(mine,)))
    error = d.refused("DEADLOCK", wire.OnceAcquire(run=run, key="k", within=(theirs,)))
    assert "held by worker-a (pid 100), which waits for worker-d (slots gpu, which job" in error.message
    d.ask(wire.Release(token=theirs))
    assert waits.reply is None


# ------------------------------------------------------------------ workers of one run alone


@pytest.mark.parametrize("first_dies", [False, True])
def test_a_worker_of_one_run_alone_is_looked_at_again_when_the_one_before_it_has_left(
    h: Harness, a: Client, w: Client, d: Client, run: str, first_dies: bool
) -> None:
    held = d.ask(slots(run, 2)).token
    for key in ("1", "2"):
        send(a, run, key, of(gpu=1))
    first = w.waits(admit(run))
    alone = wire.AdmitFrom(run=run, queue="q", lease_ms=LEASE_MS, below=False)
    second = d.waits(wire.QueuesAdmit(queues=(alone,)))
    if first_dies:
        w.die()
    d.ask(wire.Release(token=held))
    assert keys(second) == (["1"] if first_dies else ["2"])
    assert keys(first) == ([] if first_dies else ["1"])

from __future__ import annotations

import json

import pytest

from runstate import wire
from runstated.domain import budgets
from runstated.domain.money import BUDGETS
from runstated.engine.faults import Fault
from tests.harness import Client, Harness

SETTLE_BY_MS = wire.SETTLE_BY_MS


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


@pytest.fixture
def money(a: Client) -> wire.BudgetView:
    made = a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=100))
    assert isinstance(made, wire.BudgetView)
    return made


def reserve(run: str, amount: int = 40, **more: object) -> wire.BudgetsReserve:
    return wire.BudgetsReserve(run=run, budget="llm", amount_minor=amount, **more)  # type: ignore[arg-type]


def settle(held: wire.BudgetReserved, cost: int, key: str = "w", keep_rest: bool = False) -> wire.BudgetsSettle:
    return wire.BudgetsSettle(reservation=held.reservation, cost_minor=cost, work_key=key, keep_rest=keep_rest)


def sums(client: Client) -> tuple[int, int]:
    """What is reserved and what is spent."""
    seen = client.ask(wire.BudgetsGet(budget="llm"))
    return seen.reserved_minor, seen.spent_minor


def ledger(h: Harness) -> list[tuple[str, int, int]]:
    return [tuple(row) for row in h.rows("SELECT kind, change_minor, balance_minor FROM ledger ORDER BY entry")]  # type: ignore[misc]


# ------------------------------------------------------------------ declare


def test_declare_creates_a_budget_and_then_verifies_it(a: Client, money: wire.BudgetView) -> None:
    assert (money.budget, money.currency, money.scale, money.limit_minor) == ("llm", "USD", 2, 100)
    assert a.ask(wire.BudgetsDeclare(budget="llm")) == money
    assert a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=100, currency="USD", scale=2)) == money


@pytest.mark.parametrize("other", [{"limit_minor": 99}, {"currency": "EUR"}, {"scale": 3}])
def test_another_limit_currency_or_scale_is_a_conflict(
    a: Client, run: str, money: object, other: dict[str, object]
) -> None:
    declared = {"limit_minor": 100, **other}
    a.refused("CONFLICT", wire.BudgetsDeclare(budget="llm", **declared))  # type: ignore[arg-type]
    a.refused("CONFLICT", reserve(run, **declared))


def test_a_budget_that_nobody_declared_is_not_found(a: Client, run: str) -> None:
    for request in (wire.BudgetsDeclare(budget="llm"), wire.BudgetsGet(budget="llm"), reserve(run)):
        assert a.refused("NOT_FOUND", request).message.startswith("budget llm not found")


def test_an_unknown_reservation_is_not_found(a: Client, money: object) -> None:
    a.refused("NOT_FOUND", wire.BudgetsSettle(reservation="b9-test", cost_minor=1, work_key="w"))
    a.refused("NOT_FOUND", wire.BudgetsRelease(reservation="b9-test"))


def test_a_budget_and_its_reservations_belong_to_their_space(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run))
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", wire.BudgetsGet(budget="llm"))
    other.refused("NOT_FOUND", settle(held, 1))
    other.refused("NOT_FOUND", wire.BudgetsRelease(reservation=held.reservation))
    other.refused("NOT_FOUND", reserve(run))


# ------------------------------------------------------------------ reserve


def test_reserve_holds_the_amount_and_tells_the_scale(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    assert held.scale == 2
    assert sums(a) == (40, 0)
    assert ledger(h) == [("reserve", -40, 60)]


def test_reserve_declares_on_the_way(a: Client, run: str) -> None:
    assert a.ask(reserve(run, 40, limit_minor=1_000, currency="EUR", scale=3)).scale == 3
    assert a.ask(wire.BudgetsGet(budget="llm")).currency == "EUR"


def test_what_the_budget_cannot_cover_is_refused_and_writes_nothing(
    h: Harness, a: Client, run: str, money: object
) -> None:
    a.ask(reserve(run, 60))
    error = a.refused("INSUFFICIENT_BUDGET", reserve(run, 41))
    assert "40 minor units of USD left" in error.message
    assert not error.retryable
    assert (sums(a), len(ledger(h)), len(h.held())) == ((60, 0), 1, 1)
    a.ask(reserve(run, 40))
    a.refused("INSUFFICIENT_BUDGET", reserve(run, 1))


def test_reserve_in_a_run_that_is_over_is_refused(a: Client, run: str, money: object) -> None:
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", reserve(run))


def test_a_repeat_of_reserve_holds_once(h: Harness, a: Client, run: str, money: object) -> None:
    asked = a.submit(reserve(run))
    assert asked.repeat().reply == asked.reply
    assert sums(a) == (40, 0)


def test_a_cancelled_reserve_is_given_back(a: Client, run: str, money: object) -> None:
    a.submit(reserve(run)).cancel()
    assert sums(a) == (0, 0)


# ------------------------------------------------------------------ settle


def test_settle_charges_the_cost_and_releases_the_rest(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    assert a.ask(settle(held, 25)) == wire.BudgetSettled(state="settled", charged_minor=25, left_minor=0)
    assert sums(a) == (0, 25)
    assert ledger(h) == [("reserve", -40, 60), ("charge", 0, 60), ("release", 15, 75)]
    assert not h.held()


def test_a_cost_of_nothing_releases_all(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    assert a.ask(settle(held, 0)) == wire.BudgetSettled(state="released", charged_minor=0, left_minor=0)
    assert sums(a) == (0, 0)
    assert not h.held()


def test_settle_is_idempotent_by_its_work_key(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    first = a.ask(settle(held, 10, "w"))
    rows = ledger(h)
    assert a.ask(settle(held, 10, "w")) == first
    assert a.ask(settle(held, 99, "w")) == first
    assert ledger(h) == rows


def test_settle_may_keep_the_rest_for_later(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    kept = wire.BudgetSettled(state="active", charged_minor=10, left_minor=30)
    assert a.ask(settle(held, 10, "1", keep_rest=True)) == kept
    assert a.ask(settle(held, 10, "1", keep_rest=True)) == kept
    assert a.beat(held.token) == [True]
    assert sums(a) == (30, 10)
    assert a.ask(settle(held, 5, "2")) == wire.BudgetSettled(state="settled", charged_minor=15, left_minor=0)
    assert sums(a) == (0, 15)


def test_settle_that_keeps_a_rest_of_nothing_ends_the_hold(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    assert a.ask(settle(held, 40, keep_rest=True)).state == "settled"
    assert not h.held()


def test_an_overrun_charges_what_is_left_and_says_so(h: Harness, a: Client, run: str, money: object) -> None:
    held, other = a.ask(reserve(run, 40)), a.ask(reserve(run, 30))
    assert a.ask(settle(held, 60)).charged_minor == 60, "as far as the budget reaches"
    assert sums(a) == (30, 60)
    assert a.ask(settle(other, 50)).charged_minor == 40
    assert sums(a) == (0, 100)
    (data,) = h.rows("SELECT data FROM events WHERE type = 'budget.overrun'")[0]
    assert '"amountMinor":"50"' in data and '"chargedMinor":"40"' in data and '"overrunMinor":"10"' in data
    assert [row[2] for row in ledger(h)] == [60, 30, 10, 0], "never below nothing"


# ------------------------------------------------------------------ release


def test_release_gives_all_back_and_a_repeat_changes_nothing(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    void = wire.BudgetsRelease(reservation=held.reservation)
    released = wire.BudgetSettled(state="released", charged_minor=0, left_minor=0)
    assert [a.ask(void), a.ask(void)] == [released, released]
    assert ledger(h) == [("reserve", -40, 60), ("release", 40, 100)]
    assert not h.held()
    assert "budget.released" not in h.events(run), "an orderly release is no loss"


def test_work_that_was_done_is_paid_after_its_reservation_was_released(
    h: Harness, a: Client, run: str, money: object
) -> None:
    held = a.ask(reserve(run, 40))
    a.ask(wire.BudgetsRelease(reservation=held.reservation))
    assert a.ask(settle(held, 25)) == wire.BudgetSettled(state="settled", charged_minor=25, left_minor=0)
    assert a.ask(settle(held, 25)).charged_minor == 25
    assert sums(a) == (0, 25)


def test_work_that_was_done_is_paid_after_the_end_of_its_run(a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert a.ask(settle(held, 25)).charged_minor == 25
    assert sums(a) == (0, 25)


def test_a_session_that_ends_in_good_order_releases_what_it_has_reserved(
    h: Harness, a: Client, run: str, money: object
) -> None:
    b = h.session("b")
    held = b.ask(reserve(run, 40))
    b.bye()
    assert sums(a) == (0, 0)
    assert h.value("SELECT count(*) FROM events WHERE type LIKE 'budget.%'") == 0
    assert b.ask(settle(held, 25)).charged_minor == 25, "work that was done is paid"


@pytest.mark.parametrize("how", ["died", "lapsed"])
def test_what_nobody_can_say_any_more_is_charged_whole_and_an_event_says_so(
    h: Harness, a: Client, run: str, money: wire.BudgetView, how: str
) -> None:
    b = h.session("b")
    held = b.ask(reserve(run, 40))
    a.ask(reserve(run, 10))
    b.die() if how == "died" else h.pass_ms(SETTLE_BY_MS)
    assert sums(a)[1] == (40 if how == "died" else 50)
    data = json.loads(h.value("SELECT data FROM events WHERE type = 'budget.assumed' ORDER BY event"))
    assert data == {
        "scopeId": run,
        "budgetId": money.id,
        "budget": "llm",
        "reservationId": held.reservation,
        "chargedMinor": "40",
        "reason": how,
    }


@pytest.mark.parametrize(("cost", "charged"), [(25, 25), (0, 0), (60, 60), (150, 100)])
def test_what_was_assumed_is_corrected_by_whoever_knows_better(
    h: Harness, a: Client, run: str, money: object, cost: int, charged: int
) -> None:
    held = a.ask(reserve(run, 40))
    a.die()
    a.hello()
    first = a.ask(settle(held, cost))
    assert (first.charged_minor, sums(a)) == (charged, (0, charged))
    assert a.ask(settle(held, cost)) == first
    assert [row[1] for row in ledger(h)][:3] == [-40, 0, 40]


def test_what_was_assumed_is_given_back_when_nothing_was_spent(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    a.die()
    a.hello()
    assert a.ask(wire.BudgetsRelease(reservation=held.reservation)).state == "released"
    assert sums(a) == (0, 0)


def test_what_was_settled_in_part_is_assumed_for_the_rest_only(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    a.ask(settle(held, 10, "part", keep_rest=True))
    a.die()
    a.hello()
    assert sums(a) == (0, 40)
    assert a.ask(settle(held, 5, "rest")).charged_minor == 15


@pytest.mark.parametrize("transport", ["http", "unix"])
def test_reservations_over_http_and_those_with_a_time_of_their_own_are_released(
    h: Harness, a: Client, run: str, money: object, transport: str
) -> None:
    caller = h.session("http/key/worker") if transport == "http" else a
    caller.ask(reserve(run, 40, settle_by_ms=None if transport == "http" else h.clock.wall_ms() + 5_000))
    h.pass_ms(SETTLE_BY_MS)
    assert sums(a) == (0, 0)
    assert "budget.released" in h.events(run)


def test_what_is_not_settled_in_an_hour_is_released_with_an_event(
    h: Harness, a: Client, run: str, money: object
) -> None:
    held = a.ask(reserve(run, 40))
    for _ in range(4):
        h.pass_ms(SETTLE_BY_MS // 4 - 1)
        a.beat(held.token)
    assert sums(a) == (40, 0)
    h.pass_ms(4)
    assert sums(a) == (0, 0)
    assert h.events(run)[-1] == "budget.released"
    assert a.ask(settle(held, 25)).charged_minor == 25
    assert not h.held()


def test_more_than_one_step_of_late_reservations_all_go(h: Harness, a: Client, run: str) -> None:
    a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=1_000))
    for _ in range(budgets.RELEASED_IN_ONE_STEP + 1):
        a.ask(reserve(run, 1))
    h.suspend(SETTLE_BY_MS)
    assert sums(a) == (0, 0)


def test_a_reservation_outlives_a_restart_of_the_daemon(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    h.start()
    a.resume()
    assert a.beat(held.token) == [True]
    assert a.ask(settle(held, 25)).state == "settled"


def test_sums_that_do_not_add_up_are_a_fault_and_change_nothing(h: Harness, a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    (budget,) = h.core().live(BUDGETS).values()
    budget.reserved_minor = 39
    with pytest.raises(Fault):
        a.ask(settle(held, 40))
    h.start()
    assert sums(a) == (40, 0)


# ------------------------------------------------------------------ strict callers, own times


def test_without_overrun_a_cost_above_what_is_reserved_is_a_conflict(
    h: Harness, a: Client, run: str, money: object
) -> None:
    held = a.ask(reserve(run, 40))
    strict = wire.BudgetsSettle(reservation=held.reservation, cost_minor=41, work_key="w", overrun=False)
    assert "40 minor units" in a.refused("CONFLICT", strict).message
    assert sums(a) == (40, 0)
    a.ask(settle(held, 30, "part", keep_rest=True))
    more = wire.BudgetsSettle(reservation=held.reservation, cost_minor=11, work_key="w", overrun=False)
    a.refused("CONFLICT", more)
    last = wire.BudgetsSettle(reservation=held.reservation, cost_minor=10, work_key="w", overrun=False, late=False)
    assert a.ask(last) == wire.BudgetSettled(state="settled", charged_minor=40, left_minor=0)
    assert a.ask(last).charged_minor == 40, "a repeat is no second cost, and no conflict"
    assert sums(a) == (0, 40)


@pytest.mark.parametrize("how", ["settled", "released"])
def test_without_late_a_reservation_that_is_over_is_a_conflict(a: Client, run: str, money: object, how: str) -> None:
    held = a.ask(reserve(run, 40))
    a.ask(settle(held, 40, "1") if how == "settled" else wire.BudgetsRelease(reservation=held.reservation))
    before = sums(a)
    late = wire.BudgetsSettle(reservation=held.reservation, cost_minor=1, work_key="2", late=False)
    assert how in a.refused("CONFLICT", late).message
    assert how in a.refused("CONFLICT", wire.BudgetsRelease(reservation=held.reservation, late=False)).message
    assert sums(a) == before
    assert a.ask(wire.BudgetsRelease(reservation=held.reservation)).state == how


def test_a_release_in_time_is_no_conflict(a: Client, run: str, money: object) -> None:
    held = a.ask(reserve(run, 40))
    assert a.ask(wire.BudgetsRelease(reservation=held.reservation, late=False)).state == "released"


@pytest.mark.parametrize("length_ms", [5_000, 2 * SETTLE_BY_MS])
def test_what_is_not_settled_by_its_own_time_is_released(
    h: Harness, a: Client, run: str, money: object, length_ms: int
) -> None:
    held = a.ask(reserve(run, 40, settle_by_ms=h.clock.wall_ms() + length_ms))
    for _ in range(4):
        h.pass_ms(length_ms // 4 - 1)
        assert a.beat(held.token) == [True]
    h.pass_ms(3)
    assert sums(a) == (40, 0)
    h.pass_ms(1)
    assert sums(a) == (0, 0)
    assert h.events(run)[-1] == "budget.released"


def test_a_time_to_settle_by_that_has_passed_is_refused(h: Harness, a: Client, run: str, money: object) -> None:
    a.refused("VALIDATION_FAILED", reserve(run, 40, settle_by_ms=h.clock.wall_ms()))
    assert sums(a) == (0, 0)


def test_a_budget_tells_of_its_newest_reservations_if_asked(h: Harness, a: Client, run: str, money: object) -> None:
    a.ask(wire.BudgetsDeclare(budget="other", limit_minor=100))
    a.ask(wire.BudgetsReserve(run=run, budget="other", amount_minor=1))
    held = []
    for amount in (10, 20, 30):
        held.append(a.ask(reserve(run, amount)))
        h.pass_ms(1)
    a.ask(settle(held[1], 5))
    a.ask(wire.BudgetsRelease(reservation=held[2].reservation))
    assert a.ask(wire.BudgetsGet(budget="llm")).reservations == ()
    seen = a.ask(wire.BudgetsGet(budget="llm", reservations=3)).reservations
    assert seen == (
        wire.ReservationView(reservation=held[2].reservation, run=run, state="released", left_minor=0, charged_minor=0),
        wire.ReservationView(reservation=held[1].reservation, run=run, state="settled", left_minor=0, charged_minor=5),
        wire.ReservationView(reservation=held[0].reservation, run=run, state="active", left_minor=10, charged_minor=0),
    )
    assert a.ask(wire.BudgetsGet(budget="llm", reservations=2)).reservations == seen[:2]

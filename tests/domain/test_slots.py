from __future__ import annotations

import pytest

from runstate import wire
from tests.harness import Client, Harness, Request

LEASE_MS = 30_000


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def b(h: Harness) -> Client:
    return h.session("b")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def acquire(run: str, units: int = 1, most: int | None = 2, **more: object) -> wire.SlotsAcquire:
    return wire.SlotsAcquire(run=run, pool="gpu", units=units, max=most, **more)  # type: ignore[arg-type]


def view(client: Client) -> wire.SlotsView:
    seen = client.ask(wire.SlotsGet(pool="gpu"))
    assert isinstance(seen, wire.SlotsView)
    return seen


def granted(*requests: Request) -> list[bool]:
    return [isinstance(request.reply, wire.SlotsGranted) for request in requests]


# ------------------------------------------------------------------ declare


def test_declare_creates_a_pool_and_then_verifies_it(a: Client) -> None:
    made = a.ask(wire.SlotsDeclare(pool="gpu", max=2))
    assert (made.pool, made.max, made.used, made.waiting, made.holders) == ("gpu", 2, 0, 0, ())
    assert a.ask(wire.SlotsDeclare(pool="gpu", max=2)) == made == a.ask(wire.SlotsDeclare(pool="gpu"))


def test_another_max_is_a_conflict_that_names_both(a: Client, run: str) -> None:
    a.ask(wire.SlotsDeclare(pool="gpu", max=2))
    for request in (wire.SlotsDeclare(pool="gpu", max=3), acquire(run, 1, 3)):
        assert a.refused("CONFLICT", request).message == "slots gpu exist with max=2, this process declares max=3"


def test_a_pool_that_nobody_declared_is_not_found(a: Client, run: str) -> None:
    for request in (wire.SlotsDeclare(pool="gpu"), wire.SlotsGet(pool="gpu"), acquire(run, 1, None)):
        assert a.refused("NOT_FOUND", request).message.startswith("slots gpu not found")


def test_a_pool_belongs_to_its_space(h: Harness, a: Client, run: str) -> None:
    a.ask(acquire(run, 2))
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", wire.SlotsGet(pool="gpu"))
    other.refused("NOT_FOUND", acquire(run))
    assert other.ask(acquire(other.ask(wire.RunsJoin(name="job")).run, 2)).token


def test_runs_of_a_space_share_a_pool(a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run, 2))
    b.waits(acquire(b.ask(wire.RunsJoin(name="other")).run))


# ------------------------------------------------------------------ acquire


def test_acquire_holds_units_until_they_are_released(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2)).token
    waits = b.waits(acquire(run))
    assert view(a) == wire.SlotsView(id=view(a).id, pool="gpu", max=2, used=2, waiting=1, holders=("worker-a",))
    assert a.ask(wire.Release(token=token)) == wire.Released(held=True)
    assert granted(waits) == [True]
    assert (view(a).used, view(a).waiting, view(a).holders) == (1, 0, ("worker-b",))


def test_more_units_than_the_pool_has_are_refused_at_once(h: Harness, a: Client, run: str) -> None:
    a.refused("VALIDATION_FAILED", acquire(run, 3))
    assert h.rows("SELECT token FROM leases") == []


def test_a_release_frees_the_units_once_however_often_it_is_sent(a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    b.ask(acquire(run))
    for held in (True, False, False):
        assert a.ask(wire.Release(token=token)) == wire.Released(held=held)
    a.ask(acquire(run))
    b.waits(acquire(run))


def test_nobody_without_the_secret_can_release(a: Client, b: Client, run: str) -> None:
    held = a.ask(acquire(run))
    assert b.ask(wire.Release(token=held.token)) == wire.Released(held=False)
    assert view(a).used == 1
    assert b.ask(wire.Release(token=held.token, secret=held.secret)) == wire.Released(held=True)
    assert (view(a).used, a.beat(held.token)) == (0, [False])


def test_a_wait_that_is_over_is_busy(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run, 2))
    assert b.ask(acquire(run, wait_ms=0)) == wire.SlotsBusy()
    waits = b.waits(acquire(run, wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.SlotsBusy()
    assert view(a).waiting == 0


def test_a_repeat_of_acquire_holds_once(a: Client, b: Client, run: str) -> None:
    first = a.submit(acquire(run))
    assert first.repeat().reply == first.reply
    second = b.submit(acquire(run))
    waits = b.waits(acquire(run))
    again = waits.repeat()
    a.ask(wire.Release(token=first.reply.token))
    assert granted(again) == [True]
    assert again.repeat().reply == again.reply != second.reply
    assert view(a).used == 2


def test_a_repeat_after_the_release_acquires_anew(a: Client, run: str) -> None:
    asked = a.submit(acquire(run))
    token = asked.reply.token
    a.ask(wire.Release(token=token))
    assert asked.repeat().reply.token != token


def test_a_cancelled_acquire_gives_back_what_it_got(a: Client, b: Client, run: str) -> None:
    asked = a.submit(acquire(run, 2))
    waits = b.waits(acquire(run))
    asked.cancel()
    assert granted(waits) == [True]


def test_the_end_of_the_run_answers_who_waits_and_takes_no_slot_from_who_holds(
    h: Harness, a: Client, b: Client, run: str
) -> None:
    token = a.ask(acquire(run, 2)).token
    waits = b.waits(acquire(run))
    other = b.waits(acquire(b.ask(wire.RunsJoin(name="other")).run))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply.code == "SCOPE_CANCELLED"
    a.refused("SCOPE_CANCELLED", acquire(run))
    assert granted(other) == [False], "never more than the maximum inside"
    assert a.beat(token) == [True]
    a.ask(wire.Release(token=token))
    assert granted(other) == [True]


# ------------------------------------------------------------------ death, lapse


@pytest.mark.parametrize("how", ["die", "bye"])
def test_all_units_of_a_session_that_ends_are_handed_on_in_one_step(
    h: Harness, a: Client, b: Client, run: str, how: str
) -> None:
    for _ in range(3):
        a.ask(acquire(run, 1, 3))
    big = b.waits(acquire(run, 3, 3))
    batches = h.connection.total_changes
    a.die() if how == "die" else a.bye()
    assert granted(big) == [True]
    assert h.connection.total_changes > batches
    assert h.events(run).count("lease.lost") == (3 if how == "die" else 0)


def test_a_lapse_frees_the_units_and_tells_the_holder(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2, lease_ms=LEASE_MS)).token
    waits = b.waits(acquire(run))
    h.pass_ms(LEASE_MS - 1)
    assert granted(waits) == [False]
    h.pass_ms(1)
    assert granted(waits) == [True]
    assert [push.token for push in a.told(wire.LeaseLost)] == [token]
    assert a.ask(wire.Release(token=token)) == wire.Released(held=False)
    assert view(a).used == 1


def test_a_beat_keeps_the_units(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2, lease_ms=LEASE_MS)).token
    waits = b.waits(acquire(run))
    for _ in range(4):
        h.pass_ms(LEASE_MS - 1)
        assert a.beat(token) == [True]
    assert granted(waits) == [False]


def test_a_suspend_of_eight_hours_loses_no_slot(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run, lease_ms=LEASE_MS)).token
    h.suspend(8 * 3_600_000)
    assert a.beat(token) == [True]


def test_units_outlive_a_restart_of_the_daemon(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2)).token
    h.start()
    a.resume()
    b.resume()
    waits = b.waits(acquire(run))
    a.ask(wire.Release(token=token))
    assert granted(waits) == [True]


# ------------------------------------------------------------------ the line


def test_the_line_is_served_by_age_and_its_head_holds_up_those_behind(a: Client, b: Client, run: str) -> None:
    one, two = a.ask(acquire(run)).token, a.ask(acquire(run)).token
    big, small = b.waits(acquire(run, 2)), a.waits(acquire(run))
    a.ask(wire.Release(token=one))
    assert granted(big, small) == [False, False], "who is older goes first, and what it needs is kept for it"
    a.ask(wire.Release(token=two))
    assert granted(big, small) == [True, False]


def test_a_newcomer_stands_behind_who_waits(a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    b.waits(acquire(run, 2))
    a.waits(acquire(run))


@pytest.mark.parametrize("how", ["cancel", "late", "bye", "die", "away"])
def test_who_leaves_the_line_lets_the_next_go_on(h: Harness, a: Client, b: Client, run: str, how: str) -> None:
    a.ask(acquire(run, lease_ms=wire.LEASE_MS_MAX))
    big = b.waits(acquire(run, 2, wait_ms=5_000))
    small = a.waits(acquire(run))
    if how == "cancel":
        big.cancel()
    elif how == "late":
        h.pass_ms(5_000)
    elif how == "away":
        b.lose()
    else:
        b.bye() if how == "bye" else b.die()
    assert granted(small) == [True]


def test_who_is_back_has_kept_its_place(a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2)).token
    waits = b.waits(acquire(run, 2))
    b.lose()
    later = a.waits(acquire(run, 2))
    b.resume()
    a.ask(wire.Release(token=token))
    assert granted(waits, later) == [True, False]


def test_calls_made_inside_a_hold_go_first(h: Harness, a: Client, b: Client, run: str) -> None:
    held = a.ask(acquire(run, 2)).token
    key = b.ask(wire.OnceAcquire(run=run, key="k")).token
    outer = a.waits(acquire(run, 2))
    inner = b.waits(acquire(run, 1, within=(key,)))
    a.ask(wire.Release(token=held))
    assert granted(inner, outer) == [True, False]


def test_what_is_inherited_counts_for_the_place_and_closes_no_circle(
    h: Harness, a: Client, b: Client, run: str
) -> None:
    """A task that was started inside of a hold need not end before the hold does."""
    held = a.ask(acquire(run, 2)).token
    outer = b.waits(acquire(run, 1))
    task = a.waits(acquire(run, 2, inherited=(held,)))
    a.ask(wire.Release(token=held))
    assert granted(task, outer) == [True, False]


def test_within_a_token_that_is_gone_is_no_hold(h: Harness, a: Client, b: Client, run: str) -> None:
    held = a.ask(acquire(run, 2)).token
    key = b.ask(wire.OnceAcquire(run=run, key="k")).token
    b.ask(wire.Release(token=key))
    outer = a.waits(acquire(run, 2))
    inner = b.waits(acquire(run, 2, within=(key,)))
    a.ask(wire.Release(token=held))
    assert granted(outer, inner) == [True, False]


def test_a_wait_for_the_slots_one_holds_oneself_is_refused_with_the_circle(a: Client, run: str) -> None:
    token = a.ask(acquire(run, 2)).token
    error = a.refused("DEADLOCK", acquire(run, 1, within=(token,)))
    assert "worker-a (pid 100) waits for slots" in error.message


def test_a_wait_that_closes_a_circle_over_two_sessions_and_two_pools_is_refused(a: Client, b: Client, run: str) -> None:
    mine = a.ask(acquire(run, 2)).token
    theirs = b.ask(wire.SlotsAcquire(run=run, pool="disk", max=1)).token
    waits = b.waits(acquire(run, 1, within=(theirs,)))
    disk = wire.SlotsAcquire(run=run, pool="disk", max=1, within=(mine,))
    assert "worker-b" in a.refused("DEADLOCK", disk).message
    a.ask(wire.Release(token=mine))
    assert granted(waits) == [True]


def test_the_parked_call_is_told_behind_whom_it_waits(a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run, 2)).token
    b.waits(acquire(run))
    assert b.told(wire.Parked)[-1].behind == (token,)

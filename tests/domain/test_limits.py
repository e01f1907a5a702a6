from __future__ import annotations

import pytest

from runstate import wire
from tests.harness import Client, Harness, Request

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def b(h: Harness) -> Client:
    return h.session("b")


@pytest.fixture
def run(h: Harness, a: Client) -> str:
    """A run, at the beginning of an hour."""
    h.pass_ms(HOUR_MS - h.clock.wall_ms() % HOUR_MS)
    return str(a.ask(wire.RunsJoin(name="job")).run)


def take(
    run: str, units: int = 1, most: int | None = 2, per_seconds: int | None = 60, **more: object
) -> wire.LimitsTake:
    return wire.LimitsTake(run=run, limit="api", units=units, max=most, per_seconds=per_seconds, **more)  # type: ignore[arg-type]


def used(client: Client, name: str = "api") -> int:
    return int(client.ask(wire.LimitsGet(limit=name)).used)


def answered(*requests: Request) -> list[bool]:
    return [request.reply == wire.LimitTaken() for request in requests]


# ------------------------------------------------------------------ declare


def test_declare_creates_a_limit_and_then_verifies_it(a: Client) -> None:
    made = a.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=60))
    assert (made.limit, made.max, made.per_seconds, made.used, made.waiting) == ("api", 2, 60, 0, 0)
    assert a.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=60)) == made
    assert a.ask(wire.LimitsDeclare(limit="api")) == made


@pytest.mark.parametrize("sizes", [(3, 60), (2, 61)])
def test_declare_with_other_sizes_is_a_conflict(a: Client, run: str, sizes: tuple[int, int]) -> None:
    a.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=60))
    error = a.refused("CONFLICT", wire.LimitsDeclare(limit="api", max=sizes[0], per_seconds=sizes[1]))
    assert "2 units per 60 s" in error.message
    a.refused("CONFLICT", take(run, 1, *sizes))


def test_a_limit_that_nobody_declared_is_not_found(a: Client, run: str) -> None:
    for request in (wire.LimitsDeclare(limit="api"), wire.LimitsGet(limit="api"), take(run, 1, None, None)):
        assert a.refused("NOT_FOUND", request).message.startswith("limit api not found")


def test_half_of_the_sizes_is_refused(a: Client) -> None:
    a.refused("VALIDATION_FAILED", wire.LimitsDeclare(limit="api", max=2))
    a.refused("VALIDATION_FAILED", wire.LimitsDeclare(limit="api", per_seconds=2))


def test_a_limit_belongs_to_its_space(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    other = h.session("o", space="other")
    other.refused("NOT_FOUND", wire.LimitsGet(limit="api"))
    theirs = other.ask(wire.RunsJoin(name="job")).run
    assert other.ask(take(theirs, 2)) == wire.LimitTaken()
    other.refused("NOT_FOUND", take(run))


def test_runs_of_a_space_share_a_limit(a: Client, b: Client, run: str) -> None:
    a.ask(take(run, 2))
    b.waits(take(b.ask(wire.RunsJoin(name="other")).run))


# ------------------------------------------------------------------ take


def test_take_spends_units_of_the_window(a: Client, run: str) -> None:
    a.ask(take(run))
    a.ask(take(run))
    assert used(a) == 2
    waits = a.waits(take(run))
    assert a.ask(wire.LimitsGet(limit="api")).waiting == 1
    waits.cancel()
    assert a.ask(wire.LimitsGet(limit="api")).waiting == 0


def test_more_units_than_the_limit_has_are_refused_at_once(a: Client, run: str) -> None:
    a.refused("VALIDATION_FAILED", take(run, 3))
    assert used(a, "api") == 0 if a.submit(wire.LimitsDeclare(limit="api", max=2, per_seconds=60)).reply else False


def test_units_stay_spent_when_their_taker_dies(h: Harness, a: Client, b: Client, run: str) -> None:
    b.ask(take(run, 2))
    b.die()
    assert used(a) == 2
    a.waits(take(run))


def test_take_in_a_run_that_is_over_is_refused_and_its_end_answers_who_waits(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    waits = a.waits(take(run))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply.code == "SCOPE_CANCELLED"
    a.refused("SCOPE_CANCELLED", take(run))


def test_a_wait_that_is_over_is_busy_and_takes_nothing(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    assert a.ask(take(run, wait_ms=0)) == wire.LimitBusy()
    waits = a.waits(take(run, wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.LimitBusy()
    h.pass_ms(MINUTE_MS)
    assert used(a) == 0


def test_a_repeat_of_take_takes_once(h: Harness, a: Client, run: str) -> None:
    first = a.submit(take(run))
    assert first.repeat().reply == wire.LimitTaken()
    assert used(a) == 1
    a.ask(take(run))
    second = a.waits(take(run))
    again = second.repeat()
    h.pass_ms(MINUTE_MS)
    assert again.reply == wire.LimitTaken()
    assert again.repeat().reply == wire.LimitTaken()
    assert used(a) == 1


# ------------------------------------------------------------------ windows


def test_windows_are_fixed_and_begin_at_multiples_of_their_length(h: Harness, a: Client, run: str) -> None:
    h.pass_ms(59_999)
    a.ask(take(run, 2))
    waits = a.waits(take(run, 2))
    h.pass_ms(1)
    assert answered(waits) == [True]
    next_window = a.waits(take(run))
    h.pass_ms(59_999)
    assert answered(next_window) == [False]
    h.pass_ms(1)
    assert answered(next_window) == [True]


def test_what_is_used_is_nothing_once_the_window_is_over_whoever_looks(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    h.clock.pass_ms(MINUTE_MS)
    assert used(a) == 0
    assert a.ask(wire.LimitsDeclare(limit="api")).used == 0
    assert a.ask(take(run, 2)) == wire.LimitTaken()


@pytest.mark.parametrize("newcomer", ["take", "declare", "a job"])
def test_those_who_wait_are_served_by_whoever_comes_first_to_the_new_window(
    h: Harness, a: Client, b: Client, run: str, newcomer: str
) -> None:
    """The window's end is noticed by a request before the tick comes to it."""
    a.ask(take(run, 2))
    waits = a.waits(take(run))
    h.clock.pass_ms(MINUTE_MS)
    if newcomer == "take":
        b.submit(take(run))
    elif newcomer == "declare":
        b.ask(wire.LimitsDeclare(limit="api"))
    else:
        needs = wire.Needs(limits=(wire.UnitsNeeded(name="api"),))
        b.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=1, needs=needs))
        b.submit(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),)))
    assert answered(waits) == [True]
    h.tick_if_due()


def test_units_that_are_left_do_not_carry_over(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run))
    h.pass_ms(MINUTE_MS)
    a.ask(take(run, 2))
    a.waits(take(run))


@pytest.mark.parametrize(
    ("per_seconds", "back_ms"), [(60, HOUR_MS), (3_600, HOUR_MS), (3_600, 3 * HOUR_MS), (3_600, 1_800_000)]
)
@pytest.mark.parametrize("waits_before", [True, False])
def test_a_wall_clock_that_goes_back_ends_the_window_after_its_length_of_steady_time(
    h: Harness, a: Client, run: str, per_seconds: int, back_ms: int, waits_before: bool
) -> None:
    h.pass_ms(20_000)
    opened = h.clock.steady_ms()
    a.ask(take(run, 2, 2, per_seconds))
    h.pass_ms(20_000)
    request = take(run, 1, 2, per_seconds)
    waits = a.waits(request) if waits_before else None
    h.clock.jump_wall(-back_ms)
    h.tick()
    waits = waits or a.waits(request)
    left = opened + per_seconds * 1_000 - h.clock.steady_ms()
    h.pass_ms(left - 1)
    assert answered(waits) == [False], "never opened twice"
    h.pass_ms(1)
    assert answered(waits) == [True]
    assert used(a) == 1


def test_windows_go_on_one_by_one_while_the_wall_clock_is_behind(h: Harness, a: Client, run: str) -> None:
    h.pass_ms(20_000)
    a.ask(take(run, 2))
    h.clock.jump_wall(-HOUR_MS)
    served = [a.waits(take(run)) for _ in range(6)]
    for pairs in range(4):
        assert sum(answered(*served)) == min(6, 2 * pairs)
        h.pass_ms(MINUTE_MS - 1)
        assert sum(answered(*served)) == min(6, 2 * pairs), "each lasts its length, whatever the wall shows"
        h.pass_ms(1)
    h.pass_ms(HOUR_MS)
    assert a.ask(take(run, 2)) == wire.LimitTaken()


def test_a_wall_clock_that_goes_forward_ends_the_window_at_once(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    waits = a.waits(take(run))
    h.clock.jump_wall(HOUR_MS)
    h.tick_if_due()
    assert answered(waits) == [True]


def test_a_clock_put_forward_and_back_again_opens_no_window_a_second_time(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    h.clock.jump_wall(MINUTE_MS)
    a.ask(take(run, 2))
    h.clock.jump_wall(-MINUTE_MS)
    waits = a.waits(take(run))
    h.pass_ms(MINUTE_MS - 1)
    assert answered(waits) == [False]
    h.pass_ms(1)
    assert answered(waits) == [True]


def test_a_wall_clock_that_is_slewed_ends_no_window_early(h: Harness, a: Client, run: str) -> None:
    """A correction of a fraction of a second is no clock that went back: the wall boundary is waited for."""
    a.ask(take(run, 2))
    waits = a.waits(take(run))
    h.clock.jump_wall(-300)
    h.pass_ms(MINUTE_MS + 299)
    assert answered(waits) == [False]
    h.pass_ms(1)
    assert answered(waits) == [True]


def test_a_suspend_ends_the_window(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    waits = a.waits(take(run))
    h.suspend(8 * HOUR_MS)
    assert answered(waits) == [True]


def test_after_a_restart_the_window_is_the_same(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    h.start()
    a.resume()
    assert used(a) == 2
    waits = a.waits(take(run))
    h.pass_ms(MINUTE_MS)
    assert answered(waits) == [True]


def test_after_a_restart_with_a_clock_that_went_back_a_whole_window_passes(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    h.pass_ms(30_000)
    h.clock.jump_wall(-HOUR_MS)
    h.start()
    a.resume()
    waits = a.waits(take(run))
    h.pass_ms(MINUTE_MS - 1)
    assert answered(waits) == [False]
    h.pass_ms(1)
    assert answered(waits) == [True]


def test_a_limit_for_which_nobody_waits_wakes_nobody(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run))
    h.pass_ms(0)
    assert (h.core().due_ms, h.core().next_lease()) == (None, None)


# ------------------------------------------------------------------ the line


def test_each_window_is_served_by_age_and_who_fits_has_the_rest(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(take(run, 4, 4))
    big, middle, small = a.waits(take(run, 3, 4)), b.waits(take(run, 2, 4)), b.waits(take(run, 1, 4))
    h.pass_ms(MINUTE_MS)
    assert answered(big, middle, small) == [True, False, True]
    h.pass_ms(MINUTE_MS)
    assert answered(middle) == [True]


def test_who_waits_for_the_next_window_holds_up_nobody_in_this_one(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(take(run, 3, 4))
    big = a.waits(take(run, 4, 4))
    assert b.ask(take(run, 1, 4)) == wire.LimitTaken()
    small = b.waits(take(run, 1, 4))
    h.pass_ms(MINUTE_MS)
    assert answered(big, small) == [True, False]


def test_as_many_as_fit_are_served_in_each_window(h: Harness, a: Client, run: str) -> None:
    a.ask(take(run, 2))
    waits = [a.waits(take(run)) for _ in range(5)]
    for many in (2, 4, 5):
        h.pass_ms(MINUTE_MS)
        assert answered(*waits) == [True] * many + [False] * (5 - many)


@pytest.mark.parametrize("how", ["cancel", "late", "bye", "die", "away"])
def test_who_leaves_the_line_takes_nothing_from_the_next(h: Harness, a: Client, b: Client, run: str, how: str) -> None:
    a.ask(take(run, 2))
    big = b.waits(take(run, 2, wait_ms=5_000))
    small = a.waits(take(run, 1))
    if how == "cancel":
        big.cancel()
    elif how == "late":
        h.pass_ms(5_000)
    elif how == "away":
        b.lose()
    else:
        b.bye() if how == "bye" else b.die()
    h.pass_ms(MINUTE_MS)
    assert answered(small) == [True]
    assert used(a) == 1


def test_calls_made_inside_a_hold_go_first(h: Harness, a: Client, b: Client, run: str) -> None:
    token = b.ask(wire.OnceAcquire(run=run, key="k", lease_ms=wire.LEASE_MS_MAX)).token
    a.ask(take(run, 1))
    outer = a.waits(take(run, 2))
    assert b.ask(take(run, 1, within=(token,))) == wire.LimitTaken()
    inner = b.waits(take(run, 2, within=(token,)))
    h.pass_ms(MINUTE_MS)
    assert answered(inner, outer) == [True, False]

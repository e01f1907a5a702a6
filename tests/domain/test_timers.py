from __future__ import annotations

import pytest

from runstate import wire
from runstated.domain import timers
from tests.harness import Client, Harness

HOUR_MS = 3_600_000


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def sleep(run: str, after_ms: int | None = 10_000, name: str = "t", **more: object) -> wire.TimersSleep:
    return wire.TimersSleep(run=run, name=name, after_ms=after_ms, **more)  # type: ignore[arg-type]


def test_a_sleep_ends_exactly_when_its_time_has_come(h: Harness, a: Client, run: str) -> None:
    at = h.clock.wall_ms() + 10_000
    waits = a.waits(sleep(run))
    h.pass_ms(9_999)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply == wire.TimerView(fired=True, fire_ms=at)
    assert h.events(run)[-1] == "timer.fired"


def test_a_fired_name_lets_everybody_pass(h: Harness, a: Client, run: str) -> None:
    a.waits(sleep(run))
    h.pass_ms(10_000)
    assert h.session("b").ask(sleep(run, 99_999)).fired
    assert h.events(run).count("timer.fired") == 1


def test_the_first_call_fixes_the_time_for_all(h: Harness, a: Client, run: str) -> None:
    first = a.waits(sleep(run, 10_000))
    h.pass_ms(4_000)
    second = h.session("b").waits(sleep(run, 1))
    h.pass_ms(5_999)
    assert (first.reply, second.reply) == (None, None)
    h.pass_ms(1)
    assert first.reply.fired and second.reply.fired


def test_another_name_or_run_is_another_timer(h: Harness, a: Client, run: str) -> None:
    a.waits(sleep(run))
    h.pass_ms(10_000)
    other = a.ask(wire.RunsChild(parent=run)).run
    a.waits(sleep(run, name="u"))
    a.waits(sleep(other))


def test_a_sleep_until_a_time_that_has_passed_returns_at_once(h: Harness, a: Client, run: str) -> None:
    now = h.clock.wall_ms()
    assert a.ask(wire.TimersSleep(run=run, name="t", at_ms=now - 5)) == wire.TimerView(fired=True, fire_ms=now - 5)
    assert a.ask(sleep(run, 0, "u")).fired
    assert a.ask(wire.TimersSleep(run=run, name="v", at_ms=0)).fired


def test_a_sleep_until_a_time(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(wire.TimersSleep(run=run, name="t", at_ms=h.clock.wall_ms() + HOUR_MS))
    h.pass_ms(HOUR_MS - 1)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply.fired


@pytest.mark.parametrize("times", [{}, {"after_ms": 1, "at_ms": 1}])
def test_a_timer_needs_one_time(a: Client, run: str, times: dict[str, int]) -> None:
    a.refused("VALIDATION_FAILED", wire.TimersSleep(run=run, name="t", **times))


def test_one_who_comes_between_the_time_and_the_tick_wakes_all(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run))
    h.clock.pass_ms(10_000)
    assert h.session("b").ask(sleep(run)).fired
    assert waits.reply is not None and waits.reply.fired
    assert h.events(run).count("timer.fired") == 1
    h.tick_if_due()


def test_a_wait_that_is_over_leaves_the_timer(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run, wait_ms=4_000))
    h.pass_ms(4_000)
    assert not waits.reply.fired
    h.pass_ms(6_000)
    assert a.ask(sleep(run)).fired


def test_a_timer_outlives_its_caller_and_a_restart(h: Harness, a: Client, run: str) -> None:
    b = h.session("b")
    b.waits(sleep(run))
    b.die()
    h.pass_ms(5_000)
    h.start()
    a.resume()
    waits = a.waits(sleep(run))
    h.pass_ms(5_000)
    assert waits.reply.fired


def test_a_timer_that_came_due_while_the_daemon_was_away_fires_at_its_start(h: Harness, a: Client, run: str) -> None:
    a.waits(sleep(run))
    h.clock.pass_ms(HOUR_MS)
    h.start()
    h.pass_ms(0)
    assert h.events(run)[-1] == "timer.fired"


def test_a_suspend_past_the_moment_fires_at_once_on_resume(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run, HOUR_MS))
    h.suspend(8 * HOUR_MS)
    assert waits.reply.fired


def test_a_wall_clock_put_forward_past_the_moment_fires(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run, HOUR_MS))
    h.clock.jump_wall(HOUR_MS)
    h.tick_if_due()
    assert waits.reply.fired


def test_a_wall_clock_put_back_delays(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run, 10_000))
    h.clock.jump_wall(-HOUR_MS)
    h.pass_ms(HOUR_MS + 9_999)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply.fired


def test_the_end_of_the_run_answers_who_sleeps_and_its_timers_fire_no_more(h: Harness, a: Client, run: str) -> None:
    waits = a.waits(sleep(run))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert waits.reply.code == "SCOPE_CANCELLED"
    a.refused("SCOPE_CANCELLED", sleep(run))
    h.pass_ms(HOUR_MS)
    assert "timer.fired" not in h.events(run)
    assert h.value("SELECT count(*) FROM timers") == 0, "tidied"


def test_timers_of_runs_that_end_early_do_not_pile_up_in_memory(h: Harness, a: Client) -> None:
    for number in range(300):
        run = a.ask(wire.RunsJoin(name=f"n{number}")).run
        a.waits(sleep(run, HOUR_MS))
        a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert len(h.core().index(timers.Timers).due) < 70


def test_a_timer_of_a_run_past_its_deadline_is_refused(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="short", deadline_ms=h.clock.wall_ms() + 5_000)).run
    waits = a.waits(sleep(run, 5_000))
    h.pass_ms(5_000)
    assert waits.reply.code == "DEADLINE_EXCEEDED"


def test_more_due_timers_than_one_step_fires_all_fire(h: Harness, a: Client, run: str) -> None:
    waits = [a.waits(sleep(run, name=str(number))) for number in range(timers.FIRED_IN_ONE_STEP + 5)]
    h.pass_ms(10_000)
    assert all(request.reply.fired for request in waits)


def test_the_first_who_goes_on_after_a_timer_says_so_and_nobody_else(h: Harness, a: Client, run: str) -> None:
    ack = wire.TimersAck(run=run, name="t")
    a.refused("CONFLICT", ack)
    waits = a.waits(sleep(run))
    assert "has not ended" in a.refused("CONFLICT", ack).message
    h.pass_ms(10_000)
    assert not waits.reply.acked
    acked = a.ask(ack)
    assert acked == wire.TimerView(fired=True, fire_ms=waits.reply.fire_ms, acked=True)
    h.session("b").refused("CONFLICT", ack)
    assert a.ask(sleep(run)) == acked, "later sleepers see it"
    a.ask(sleep(run, 0, "other"))
    assert not a.ask(sleep(run, 0, "other")).acked, "each has its own"


def test_a_timer_is_acknowledged_also_after_the_end_of_its_run(a: Client, run: str) -> None:
    a.ask(sleep(run, 0))
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert a.ask(wire.TimersAck(run=run, name="t")).acked

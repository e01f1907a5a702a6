from __future__ import annotations

import pytest

from runstate import wire
from tests.harness import Client, Harness, Request

LEASE_MS = 30_000


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    return str(a.ask(wire.RunsJoin(name="job")).run)


def hold(client: Client, run: str, key: str = "k", lease_ms: int = LEASE_MS) -> int:
    return int(client.ask(wire.OnceAcquire(run=run, key=key, lease_ms=lease_ms)).token)


def test_a_lease_lapses_exactly_when_its_length_has_passed(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    h.pass_ms(LEASE_MS - 1)
    assert not a.told(wire.LeaseLost)
    h.pass_ms(1)
    assert [push.token for push in a.told(wire.LeaseLost)] == [token]
    assert not h.rows("SELECT token FROM leases")


def test_a_beat_gives_the_full_length_again(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    for _ in range(5):
        h.pass_ms(LEASE_MS - 1)
        assert a.beat(token) == [True]
    h.pass_ms(LEASE_MS)
    assert a.beat(token) == [False]


def test_a_beat_renews_the_tokens_it_names_and_no_others(h: Harness, a: Client, run: str) -> None:
    kept, lost = hold(a, run, "kept"), hold(a, run, "lost")
    h.pass_ms(20_000)
    a.beat(kept)
    h.pass_ms(20_000)
    assert [push.token for push in a.told(wire.LeaseLost)] == [lost]
    assert list(h.held()) == [kept]


def test_a_beat_of_another_session_renews_nothing(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    b = h.session("b")
    h.pass_ms(20_000)
    assert b.beat(token) == [False]
    h.pass_ms(10_000)
    assert not h.held()


def test_each_lease_has_a_length_of_its_own(h: Harness, a: Client, run: str) -> None:
    short, long = hold(a, run, "short", wire.LEASE_MS_MIN), hold(a, run, "long", wire.LEASE_MS_MAX)
    h.pass_ms(wire.LEASE_MS_MIN)
    assert [push.token for push in a.told(wire.LeaseLost)] == [short]
    h.pass_ms(wire.LEASE_MS_MAX - wire.LEASE_MS_MIN)
    assert [push.token for push in a.told(wire.LeaseLost)] == [short, long]


def test_a_lease_outlives_a_suspend_of_the_machine(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    h.suspend(8 * 3_600_000)
    assert a.beat(token) == [True]


def test_a_lease_outlives_a_daemon_that_was_stopped(h: Harness, a: Client, run: str) -> None:
    beaten, silent, longer = hold(a, run, "1"), hold(a, run, "2"), hold(a, run, "3", LEASE_MS + 10_000)
    h.pass_ms(1_000)
    h.stall(10 * LEASE_MS, arrived=lambda: a.beat(beaten))
    h.pass_ms(LEASE_MS - 1_001)
    assert list(h.held()) == [beaten, silent, longer], "what was overslept is no silence"
    h.pass_ms(1)
    assert [push.token for push in a.told(wire.LeaseLost)] == [silent]
    h.pass_ms(10_000)
    assert not h.held()


@pytest.mark.parametrize("before_ms", [0, 1, LEASE_MS // 3, LEASE_MS - 1])
def test_after_a_sleep_every_lease_has_the_time_for_a_beat(h: Harness, a: Client, run: str, before_ms: int) -> None:
    """Whoever was frozen with the daemon has not beaten yet, however little of its lease was left."""
    token = hold(a, run)
    h.pass_ms(before_ms)
    h.stall(10 * LEASE_MS)
    h.pass_ms(LEASE_MS // 3)
    assert a.beat(token) == [True]
    h.pass_ms(LEASE_MS - 1)
    assert list(h.held()) == [token]
    h.pass_ms(1)
    assert not h.held(), "one beat of grace, not more"


def test_a_wait_keeps_the_time_that_the_daemon_slept(h: Harness, a: Client, run: str) -> None:
    b = h.session("b")
    hold(a, run, lease_ms=wire.LEASE_MS_MAX)
    for slept_before_ms in (0, 500, 3_999):
        waits = b.waits(wire.OnceAcquire(run=run, key="k", wait_ms=4_000))
        h.pass_ms(slept_before_ms)
        h.stall(6_000)
        h.pass_ms(4_000 - slept_before_ms - 1)
        assert waits.reply is None
        h.pass_ms(1)
        assert waits.reply == wire.OnceHeld()


def test_a_lease_stands_while_writes_fail(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    h.clock.freeze()
    h.pass_ms(10 * LEASE_MS)
    h.clock.thaw()
    assert a.beat(token) == [True]


def test_a_lease_gets_its_full_length_again_after_a_restart(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    h.pass_ms(LEASE_MS - 1)
    h.start()
    a.resume()
    h.pass_ms(LEASE_MS - 1)
    assert token in h.held()
    h.pass_ms(1)
    assert token not in h.held()


def test_a_token_is_never_given_twice_even_after_its_row_is_gone_and_the_daemon_was_restarted(
    h: Harness, a: Client, run: str
) -> None:
    tokens = []
    for _ in range(3):
        tokens.append(hold(a, run))
        a.ask(wire.Release(token=tokens[-1]))
        h.start()
        a.resume()
    assert len(set(tokens)) == 3


def test_a_release_gives_back_without_an_outcome(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    assert a.ask(wire.Release(token=token)) == wire.Released(held=True)
    assert a.ask(wire.OnceGet(run=run, key="k")) == wire.OnceOpen()
    assert a.ask(wire.OnceAcquire(run=run, key="k")).takeovers == 0


def test_a_release_of_a_token_that_is_gone_is_no_error(a: Client, run: str) -> None:
    token = hold(a, run)
    a.ask(wire.Release(token=token))
    assert a.ask(wire.Release(token=token)) == wire.Released(held=False)
    assert a.ask(wire.Release(token=999)) == wire.Released(held=False)


def test_a_release_of_what_another_space_holds_is_refused_and_changes_nothing(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    assert h.session("c", space="other").ask(wire.Release(token=token)) == wire.Released(held=False)
    assert a.beat(token) == [True]
    assert a.ask(wire.OnceComplete(run=run, key="k", token=token, result="1")) == wire.OnceDone(result="1")


def test_a_lapse_a_death_and_their_holder_are_recorded_as_events(h: Harness, a: Client, run: str) -> None:
    hold(a, run, "lapses")
    h.pass_ms(LEASE_MS)
    hold(a, run, "dies")
    a.die()
    lost = h.rows("SELECT data FROM events WHERE type = 'lease.lost' ORDER BY event")
    assert ['"how":"lapsed"' in lost[0][0], '"how":"died"' in lost[1][0]] == [True, True]
    assert all('"worker":"worker-a"' in data and '"pid":100' in data for (data,) in lost)


def test_a_bye_gives_back_all_it_held_and_is_no_loss(h: Harness, a: Client, run: str) -> None:
    hold(a, run, "one")
    hold(a, run, "two")
    a.bye()
    b = h.session("b")
    granted = [b.ask(wire.OnceAcquire(run=run, key=key)) for key in ("one", "two")]
    assert [(each.attempt, each.takeovers) for each in granted] == [(1, 0), (1, 0)]
    assert not h.rows("SELECT event FROM events WHERE type = 'lease.lost'")


def test_the_answer_that_granted_a_lease_is_told_again_while_it_lives_and_kept_nowhere(
    h: Harness, a: Client, run: str
) -> None:
    granted = a.submit(wire.OnceAcquire(run=run, key="k"))
    assert h.value("SELECT count(*) FROM replies") == 0
    h.start()
    a.resume()
    assert granted.repeat().reply == granted.reply, "with the same secret"
    other = Request(a, granted.id, wire.OnceAcquire(run=run, key="other", again=True))
    a.open[granted.id] = other
    h.run(a.entry(other))
    assert other.reply.code == "IDEMPOTENCY_CONFLICT"
    a.ask(wire.Release(token=granted.reply.token))
    assert granted.repeat().reply.token > granted.reply.token, "an answer with a dead token is never given again"


def test_a_repeat_of_release_says_that_nothing_is_held(h: Harness, a: Client, run: str) -> None:
    """It is not kept: to release twice does no harm."""
    released = a.submit(wire.Release(token=hold(a, run)))
    assert released.reply == wire.Released(held=True)
    assert h.value("SELECT count(*) FROM replies") == 0
    assert released.repeat().reply == wire.Released(held=False)


def test_a_lease_that_ended_arms_no_alarm(h: Harness, a: Client, run: str) -> None:
    for _ in range(10):
        a.ask(wire.Release(token=hold(a, run)))
    assert h.core().next_lease() is None


def test_ended_leases_and_waits_do_not_pile_up_in_memory(h: Harness, a: Client, run: str) -> None:
    b = h.session("b")
    for number in range(1_500):
        token = hold(a, run, lease_ms=wire.LEASE_MS_MAX)
        b.submit(wire.OnceAcquire(run=run, key="k", wait_ms=3_600_000)).cancel()
        a.ask(wire.Release(token=token))
        h.core().next_lease()  # asked after each turn
        assert number < 10 or len(h.core().holds._lapses) <= 1_002
    assert len(h.core().lines._lates) <= 1_002


# ------------------------------------------------------------------ renew


@pytest.mark.parametrize("other", [wire.LEASE_MS_MIN, LEASE_MS, wire.LEASE_MS_MAX])
def test_renew_gives_a_lease_another_length_from_now_on(h: Harness, a: Client, run: str, other: int) -> None:
    token, secret = (granted := a.ask(wire.OnceAcquire(run=run, key="k", lease_ms=LEASE_MS))).token, granted.secret
    h.pass_ms(20_000)
    expires = h.clock.wall_ms() + other
    renew = wire.Renew(token=token, secret=secret, lease_ms=other)
    assert h.session("b").ask(renew) == wire.Renewed(lease_expires_ms=expires)
    h.pass_ms(other - 1)
    assert a.beat(token) == [True], "and a beat gives this length"
    h.check()
    h.pass_ms(other - 1)
    assert not a.told(wire.LeaseLost)
    h.pass_ms(1)
    assert [push.token for push in a.told(wire.LeaseLost)] == [token]
    assert a.refused("LEASE_LOST", wire.Renew(token=token, lease_ms=other))


def test_the_new_length_of_a_lease_outlives_a_restart(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    a.ask(wire.Renew(token=token, lease_ms=wire.LEASE_MS_MIN))
    h.start()
    a.resume()
    h.pass_ms(wire.LEASE_MS_MIN - 1)
    assert a.beat(token) == [True]
    h.pass_ms(wire.LEASE_MS_MIN)
    assert a.beat(token) == [False]


def test_a_renewal_whose_id_is_in_use_changes_nothing(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    kept = a.submit(wire.Renew(token=token, lease_ms=LEASE_MS, keep=True))
    again = Request(a, kept.id, wire.Renew(token=token, lease_ms=wire.LEASE_MS_MIN, keep=True))
    a.open[kept.id] = again
    h.run(a.entry(again))
    assert again.reply.code == "IDEMPOTENCY_CONFLICT"
    h.check()
    h.pass_ms(LEASE_MS - 1)
    assert token in h.held()


@pytest.mark.parametrize(("state", "code"), [("stopped", "SCOPE_CANCELLED"), ("expired", "DEADLINE_EXCEEDED")])
def test_a_hold_in_a_run_that_is_over_is_not_renewed(h: Harness, a: Client, state: str, code: str) -> None:
    deadline = h.clock.wall_ms() + 10_000 if state == "expired" else None
    run = a.ask(wire.RunsJoin(name="ends", deadline_ms=deadline)).run
    token = a.ask(wire.SlotsAcquire(run=run, pool="gpu", max=1)).token
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    (job,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    if state == "stopped":
        a.ask(wire.RunsEnd(run=run, state="stopped"))
    h.pass_ms(10_000)
    assert a.refused(code, wire.Renew(token=token, lease_ms=LEASE_MS)).run == run
    assert a.refused("LEASE_LOST", wire.Renew(token=job.token, lease_ms=LEASE_MS)).run is None
    h.pass_ms(20_000)
    assert not h.held(), "it was not renewed"


def test_a_job_whose_run_is_over_by_the_clock_alone_is_lost(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="ends", deadline_ms=h.clock.wall_ms() + 5)).run
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    (job,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    h.clock.pass_ms(5)
    a.refused("LEASE_LOST", wire.Renew(token=job.token, lease_ms=LEASE_MS))


def test_the_lengths_of_a_lease_that_is_renewed_often_do_not_pile_up(h: Harness, a: Client, run: str) -> None:
    token = hold(a, run)
    for number in range(1_500):
        a.ask(wire.Renew(token=token, lease_ms=LEASE_MS + number % 7))
        h.core().next_lease()  # asked after each turn
    assert len(h.core().holds._lapses) <= 1_003

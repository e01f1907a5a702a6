from __future__ import annotations

import pytest

from runstate import wire
from runstated.domain.waits import Settled
from runstated.engine.cache import Cache
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


def acquire(run: str, key: str = "k", **more: object) -> wire.OnceAcquire:
    return wire.OnceAcquire(run=run, key=key, **more)  # type: ignore[arg-type]


def complete(run: str, token: int, result: str = "1", key: str = "k") -> wire.OnceComplete:
    return wire.OnceComplete(run=run, key=key, token=token, result=result)


def fail(run: str, token: int, error: str = "E: no", attempts: int = 3, key: str = "k") -> wire.OnceFail:
    return wire.OnceFail(run=run, key=key, token=token, error=error, attempts=attempts)


def is_granted(reply: object, token: int, attempt: int) -> bool:
    return isinstance(reply, wire.OnceGranted) and (reply.token, reply.attempt) == (token, attempt)


def state(h: Harness) -> tuple[str, int, int]:
    """Of the only key: whether it is held, what is known of it on disk, else 0."""
    held = h.value("SELECT count(*) FROM leases WHERE kind = 'once'")
    rows = h.rows("SELECT state, failures, takeovers FROM once_keys") or [("open", 0, 0)]
    ((state, failures, takeovers),) = rows
    return ("held" if held else state), failures, takeovers


# ------------------------------------------------------------------ acquire


def test_acquire_of_an_open_key_is_granted_and_written_down_first(h: Harness, a: Client, run: str) -> None:
    assert is_granted(a.ask(acquire(run)), 1, 1)
    assert state(h) == ("held", 0, 0)


def test_acquire_waits_while_another_session_holds_the_key(a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    [parked] = b.told(wire.Parked)
    assert (parked.call, parked.ticket, parked.behind) == (waits.id, waits.ticket, (token,))


def test_acquire_waits_also_behind_its_own_session(a: Client, run: str) -> None:
    a.ask(acquire(run))
    a.waits(acquire(run))


def test_acquire_with_no_time_to_wait_says_held(a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    assert b.ask(acquire(run, wait_ms=0)) == wire.OnceHeld()


def test_acquire_says_held_exactly_when_its_time_is_over(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run, wait_ms=10_000))
    h.pass_ms(9_999)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply == wire.OnceHeld()
    a.beat(token)
    assert not h.core().lines.calls


def test_acquire_is_answered_late_only_once_though_it_was_looked_at_again_and_again(
    h: Harness, a: Client, b: Client, run: str
) -> None:
    a.ask(acquire(run))
    waits = b.waits(acquire(run, wait_ms=10_000))
    for _ in range(3):
        c = h.session("c")
        c.waits(acquire(run)).cancel()
        b.lose()
        b.resume()
    h.pass_ms(10_000)
    assert waits.replies == [wire.OnceHeld()]


def test_acquire_of_a_done_key_is_answered_with_its_result(a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    a.ask(complete(run, token, '{"x": 1}'))
    assert b.ask(acquire(run)) == wire.OnceDone(result='{"x": 1}')


def test_acquire_does_not_see_the_same_key_of_another_run(a: Client, run: str) -> None:
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(complete(run, a.ask(acquire(run)).token))
    assert isinstance(a.ask(acquire(other)), wire.OnceGranted)


def test_acquire_in_a_run_of_another_space_is_refused(h: Harness, run: str) -> None:
    h.session("c", space="other").refused("NOT_FOUND", acquire(run))


def test_acquire_in_an_unknown_run_is_refused(a: Client) -> None:
    a.refused("NOT_FOUND", acquire("r99-test"))


@pytest.mark.parametrize("ended", ["stopped", "finished"])
def test_acquire_in_an_ended_run_is_refused_even_if_the_key_is_done(a: Client, run: str, ended: str) -> None:
    a.ask(complete(run, a.ask(acquire(run)).token))
    a.ask(wire.RunsEnd(run=run, state=ended))  # type: ignore[arg-type]
    error = a.refused("SCOPE_CANCELLED", acquire(run))
    assert error.run == run
    assert ended in error.message


def test_acquire_after_the_deadline_is_refused_before_any_tick(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="short", deadline_ms=h.clock.wall_ms() + 5)).run
    h.clock.pass_ms(5)
    a.refused("DEADLINE_EXCEEDED", acquire(run))


def test_a_repeat_of_a_granted_acquire_gives_the_same_hold(a: Client, run: str) -> None:
    asked = a.submit(acquire(run))
    assert asked.repeat().reply == asked.reply, "with the same secret"


def test_a_repeat_of_an_acquire_that_waits_changes_nothing(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    again = waits.repeat()
    a.ask(complete(run, token))
    assert again.replies == [wire.OnceDone(result="1")]


def test_a_repeat_whose_lease_has_lapsed_asks_anew(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(acquire(run))
    h.pass_ms(LEASE_MS)
    assert is_granted(asked.repeat().reply, 2, 1)


def test_a_reply_is_kept_until_it_is_acknowledged(h: Harness, a: Client, run: str) -> None:
    asked = a.submit(fail(run, a.ask(acquire(run)).token))
    assert h.value("SELECT count(*) FROM replies") == 1
    asked.ack()
    assert h.value("SELECT count(*) FROM replies") == 0


def test_a_repeat_keeps_its_place_in_the_line_after_a_restart(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    first = b.waits(acquire(run))
    c = h.session("c")
    second = c.waits(acquire(run))
    h.start()
    for client in (a, b, c):
        client.resume()
    again = [second.repeat(ticket=second.ticket), first.repeat(ticket=first.ticket)]
    a.ask(wire.Release(token=token))
    assert [isinstance(request.reply, wire.OnceGranted) for request in again] == [False, True]


# ------------------------------------------------------------------ complete


def test_complete_answers_everybody_who_waits(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = [h.session(f"w{number}").waits(acquire(run)) for number in range(5)]
    assert a.ask(complete(run, token, '"done"')) == wire.OnceDone(result='"done"')
    assert [request.replies for request in waits] == [[wire.OnceDone(result='"done"')]] * 5
    assert h.events(run) == ["scope.created", "once.completed"]


def test_complete_by_the_same_token_again_is_no_second_outcome(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    a.ask(complete(run, token, "1"))
    assert a.ask(complete(run, token, "2")) == wire.OnceDone(result="1")
    assert h.events(run).count("once.completed") == 1


def test_complete_after_a_takeover_is_refused_and_changes_nothing(h: Harness, a: Client, b: Client, run: str) -> None:
    old = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    h.pass_ms(LEASE_MS)
    a.refused("LEASE_LOST", complete(run, old, '"old"'))
    new = waits.reply.token
    b.ask(complete(run, new, '"new"'))
    a.refused("LEASE_LOST", complete(run, old, '"old"'))
    assert a.ask(acquire(run)) == wire.OnceDone(result='"new"')


def test_complete_with_the_token_of_another_key_is_refused_and_both_stay_held(h: Harness, a: Client, run: str) -> None:
    one, two = a.ask(acquire(run, "one")).token, a.ask(acquire(run, "two")).token
    a.refused("VALIDATION_FAILED", complete(run, two, key="one"))
    a.refused("VALIDATION_FAILED", fail(run, two, key="one"))
    assert a.beat(one, two) == [True, True]


def test_complete_of_a_key_that_was_never_held_is_refused(a: Client, run: str) -> None:
    a.refused("LEASE_LOST", complete(run, 7))


def test_complete_in_an_ended_run_is_refused_and_gives_the_hold_back(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    a.refused("SCOPE_CANCELLED", complete(run, token))
    assert not h.held()
    assert not h.rows("SELECT token FROM leases")


def test_complete_from_another_space_is_refused_and_changes_nothing(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    thief = h.session("c", space="other")
    thief.refused("NOT_FOUND", complete(run, token))
    theirs = thief.ask(wire.RunsJoin(name="mine")).run
    thief.refused("LEASE_LOST", complete(theirs, token))
    thief.refused("LEASE_LOST", fail(theirs, token))
    assert a.beat(token) == [True]


@pytest.mark.parametrize("character", ["x", "ä", "€", "😀"])
def test_a_result_may_have_65536_bytes_of_utf8_and_no_more(a: Client, run: str, character: str) -> None:
    width = len(character.encode())
    limit = character * (65_536 // width) + "x" * (65_536 % width)
    token = a.ask(acquire(run)).token
    a.refused("VALIDATION_FAILED", complete(run, token, limit + "x"))
    assert a.beat(token) == [True]
    assert a.ask(complete(run, token, limit)) == wire.OnceDone(result=limit)


# ------------------------------------------------------------------ fail


def test_fail_opens_the_key_and_the_next_attempt_is_counted(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    assert a.ask(fail(run, token)) == wire.OnceFailCounted(attempts=1, failed=False)
    assert state(h) == ("open", 1, 0)
    assert is_granted(a.ask(acquire(run)), 2, 2)


def test_fail_hands_the_key_to_the_first_in_line(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    first, second = b.waits(acquire(run)), h.session("c").waits(acquire(run))
    a.ask(fail(run, token))
    assert is_granted(first.reply, 2, 2)
    assert second.reply is None


def test_fail_for_the_last_time_answers_everybody(h: Harness, a: Client, b: Client, run: str) -> None:
    for number in (1, 2):
        token = a.ask(acquire(run)).token
        assert a.ask(fail(run, token, f"E: {number}", 2)).attempts == number
    assert state(h) == ("failed", 2, 0)
    assert b.ask(acquire(run)) == wire.OnceFailed(attempts=2, error="E: 2")


def test_fail_for_good_reaches_those_who_wait(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    assert a.ask(fail(run, token, "E: x", 1)) == wire.OnceFailCounted(attempts=1, failed=True)
    assert waits.reply == wire.OnceFailed(attempts=1, error="E: x")
    assert h.events(run)[-1] == "once.failed"


def test_a_key_that_failed_keeps_the_traceback_of_its_last_failure(h: Harness, a: Client, b: Client, run: str) -> None:
    for attempt, text in ((1, "first"), (2, "second")):
        token = a.ask(acquire(run)).token
        waits = b.waits(acquire(run)) if attempt == 2 else None
        a.ask(wire.OnceFail(run=run, key="k", token=token, error="E: no", attempts=2, traceback=text))
    assert waits is not None
    assert waits.reply == a.ask(acquire(run)) == wire.OnceFailed(attempts=2, error="E: no", traceback="second")


def test_a_repeat_of_fail_counts_once(h: Harness, a: Client, run: str) -> None:
    failed = a.submit(fail(run, a.ask(acquire(run)).token))
    assert failed.repeat().reply == failed.reply
    assert state(h) == ("open", 1, 0)


def test_fail_that_wants_no_reply_may_be_sent_any_number_of_times(h: Harness, a: Client, run: str) -> None:
    for number in (1, 2):
        token = a.ask(acquire(run)).token
        request = Request(a, 0, fail(run, token))
        a.open[0] = request
        h.run(a.entry(request))
        assert request.reply == wire.OnceFailCounted(attempts=number, failed=False)
    assert h.value("SELECT count(*) FROM replies") == 0


def test_fail_after_a_takeover_is_refused(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    h.pass_ms(LEASE_MS)
    a.refused("LEASE_LOST", fail(run, token))
    assert state(h) == ("open", 0, 1)


def test_fail_in_an_ended_run_is_refused_and_gives_the_hold_back(h: Harness, a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    a.ask(wire.RunsEnd(run=run, state="finished"))
    a.refused("SCOPE_CANCELLED", fail(run, token))
    assert not h.held()


# ------------------------------------------------------------------ takeover


def test_a_lapse_hands_the_key_on_as_a_takeover_and_not_a_failure(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    waits = b.waits(acquire(run))
    h.pass_ms(LEASE_MS)
    assert is_granted(waits.reply, 2, 1)
    assert waits.reply.takeovers == 1
    assert state(h) == ("held", 0, 1)


def test_a_death_hands_the_key_on_at_once_as_a_takeover(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    waits = b.waits(acquire(run))
    a.die()
    assert is_granted(waits.reply, 2, 1)
    assert waits.reply.takeovers == 1
    assert state(h) == ("held", 0, 1)


def test_a_release_hands_the_key_on_and_counts_nothing(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    a.ask(wire.Release(token=token))
    assert is_granted(waits.reply, 2, 1)
    assert state(h) == ("held", 0, 0)


def test_a_waiting_session_that_dies_leaves_its_place_to_the_next(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    b.waits(acquire(run))
    second = h.session("c").waits(acquire(run))
    b.die()
    a.ask(wire.Release(token=token))
    assert isinstance(second.reply, wire.OnceGranted)


def test_a_cancelled_wait_gets_nothing_any_more(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    first, second = b.waits(acquire(run)), h.session("c").waits(acquire(run))
    first.cancel()
    a.ask(wire.Release(token=token))
    assert first.reply is None
    assert isinstance(second.reply, wire.OnceGranted)


def test_a_cancel_that_comes_after_the_grant_gives_the_key_back(h: Harness, a: Client, b: Client, run: str) -> None:
    granted = a.submit(acquire(run))
    waits = b.waits(acquire(run))
    granted.cancel()
    assert is_granted(waits.reply, 2, 1)
    assert state(h) == ("held", 0, 0)


def test_an_away_session_is_passed_over_and_keeps_its_place(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    first, second = b.waits(acquire(run)), h.session("c").waits(acquire(run))
    b.lose()
    a.ask(wire.Release(token=token))
    assert first.reply is None
    assert isinstance(second.reply, wire.OnceGranted)
    third = a.waits(acquire(run))
    b.resume()
    h.clients["c"].ask(wire.Release(token=second.reply.token))
    assert isinstance(first.reply, wire.OnceGranted)
    assert third.reply is None


def test_an_away_session_that_comes_back_to_an_open_key_gets_it(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(acquire(run))
    b.lose()
    a.ask(wire.Release(token=token))
    assert waits.reply is None
    b.resume()
    assert isinstance(waits.reply, wire.OnceGranted)


def test_a_call_from_inside_a_hold_goes_before_older_calls_from_outside(
    h: Harness, a: Client, b: Client, run: str
) -> None:
    token = a.ask(acquire(run)).token
    inner = b.ask(acquire(run, "inner")).token
    outside = h.session("c").waits(acquire(run))
    inside = b.waits(acquire(run, within=(inner,)))
    a.ask(wire.Release(token=token))
    assert isinstance(inside.reply, wire.OnceGranted)
    assert outside.reply is None


def test_a_token_that_nobody_holds_gives_no_precedence(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    first = h.session("c").waits(acquire(run))
    liar = b.waits(acquire(run, within=(12_345,)))
    a.ask(wire.Release(token=token))
    assert isinstance(first.reply, wire.OnceGranted)
    assert liar.reply is None


def test_a_key_asked_from_inside_its_own_function_is_refused(a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    error = a.refused("DEADLOCK", acquire(run, within=(token,)))
    assert "worker-a (pid 100) waits for once k" in error.message


# ------------------------------------------------------------------ the cache


def test_a_result_is_cached_with_its_runs_deadline_and_dropped_with_its_run(h: Harness, a: Client) -> None:
    deadline = h.clock.wall_ms() + 1_000
    run = a.ask(wire.RunsJoin(name="short", deadline_ms=deadline)).run
    a.ask(complete(run, a.ask(acquire(run)).token))
    settled = Settled("default", run, "k")
    assert h.cache.get(settled, deadline - 1) == wire.encode(wire.OnceDone(result="1"))
    assert h.cache.get(settled, deadline) is None
    assert h.cache.get(Settled("other", run, "k"), deadline - 1) is None
    a.ask(wire.RunsEnd(run=run, state="finished"))
    assert h.cache.get(settled, 0) is None


def test_a_result_that_was_read_from_disk_is_cached_again(h: Harness, a: Client, run: str) -> None:
    a.ask(complete(run, a.ask(acquire(run)).token))
    h.cache = Cache()
    h.start()
    a.resume()
    assert a.ask(acquire(run)) == wire.OnceDone(result="1")
    assert h.cache.get(Settled("default", run, "k"), 0) == wire.encode(wire.OnceDone(result="1"))


# ------------------------------------------------------------------ get


def get(run: str, key: str = "k", **more: object) -> wire.OnceGet:
    return wire.OnceGet(run=run, key=key, **more)  # type: ignore[arg-type]


def test_get_of_a_key_that_nobody_runs_answers_at_once_and_takes_nothing(h: Harness, a: Client, run: str) -> None:
    assert a.ask(get(run)) == wire.OnceOpen()
    assert not h.rows("SELECT key FROM once_keys") and not h.held()
    a.ask(fail(run, a.ask(acquire(run)).token))
    assert a.ask(get(run)) == wire.OnceOpen(attempts=1)
    assert a.ask(acquire(run)).attempt == 2, "the key is as open as before"


def test_get_of_a_key_that_has_ended_says_how(a: Client, run: str) -> None:
    a.ask(complete(run, a.ask(acquire(run, "done")).token, '"r"', "done"))
    a.ask(fail(run, a.ask(acquire(run, "failed")).token, "E: no", 1, "failed"))
    assert a.ask(get(run, "done")) == wire.OnceDone(result='"r"')
    assert a.ask(get(run, "failed")) == wire.OnceFailed(attempts=1, error="E: no")


@pytest.mark.parametrize("how", ["done", "failed", "open", "released", "died"])
def test_get_waits_while_the_key_is_held(h: Harness, a: Client, b: Client, run: str, how: str) -> None:
    token = a.ask(acquire(run)).token
    waits = b.waits(get(run))
    h.check()
    if how == "died":
        a.die()
    else:
        outcomes = {
            "done": complete(run, token, '"r"'),
            "failed": fail(run, token, attempts=1),
            "open": fail(run, token, attempts=3),
            "released": wire.Release(token=token),
        }
        a.ask(outcomes[how])
    expected = {
        "done": wire.OnceDone(result='"r"'),
        "failed": wire.OnceFailed(attempts=1, error="E: no"),
        "open": wire.OnceOpen(attempts=1),
    }
    assert waits.reply == expected.get(how, wire.OnceOpen())
    assert not h.held()
    h.check()


def test_get_says_when_its_wait_is_over_that_the_key_is_held(h: Harness, a: Client, b: Client, run: str) -> None:
    a.ask(fail(run, a.ask(acquire(run)).token))
    a.ask(acquire(run))
    assert b.ask(get(run, wait_ms=0)) == b.ask(acquire(run, wait_ms=0)) == wire.OnceHeld(attempts=1)
    waits = b.waits(get(run, wait_ms=1_000))
    h.pass_ms(1_000)
    assert waits.reply == wire.OnceHeld(attempts=1)


def test_get_does_not_hold_up_those_behind_it(h: Harness, a: Client, b: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    looks, wants, late = b.waits(get(run)), b.waits(acquire(run)), h.session("c").waits(get(run))
    a.ask(wire.Release(token=token))
    assert looks.reply == wire.OnceOpen()
    assert isinstance(wants.reply, wire.OnceGranted)
    assert late.reply is None, "it is held again before this one comes up"
    b.ask(complete(run, wants.reply.token))
    assert late.reply == wire.OnceDone(result="1")


def test_get_in_a_run_that_ends_is_refused(a: Client, b: Client, run: str) -> None:
    a.ask(acquire(run))
    waits = b.waits(get(run))
    a.ask(wire.RunsEnd(run=run, state="stopped"))
    assert (waits.reply.code, waits.reply.run) == ("SCOPE_CANCELLED", run)
    b.refused("SCOPE_CANCELLED", get(run))


def test_get_of_a_key_that_the_caller_holds_itself_is_a_deadlock(a: Client, run: str) -> None:
    token = a.ask(acquire(run)).token
    a.refused("DEADLOCK", get(run, within=(token,)))

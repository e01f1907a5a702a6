from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from runstate import wire
from runstated.domain.runs import RUNS
from runstated.engine import retention
from runstated.engine.entries import Tick
from tests.engines import life, play
from tests.harness import Client, Harness, check_resources, nothing

DAY_MS = 24 * 3_600_000
SOON_MS = 1_000  # for some steps


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    """An ended run with two jobs, one of them running, and two keys, one of them held (of which a lease says that)."""
    run = str(a.ask(wire.RunsJoin(name="job")).run)
    for key in "12":
        a.ask(wire.QueuesSend(run=run, queue="q", key=key, input="1", attempts=3))
    a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q", lease_ms=wire.LEASE_MS_MAX),)))
    token = a.ask(wire.OnceAcquire(run=run, key="done")).token
    a.ask(wire.OnceComplete(run=run, key="done", token=token, result="1"))
    a.ask(wire.OnceAcquire(run=run, key="held", lease_ms=wire.LEASE_MS_MAX))
    a.ask(wire.RunsEnd(run=run, state="finished"))
    return run


def left(h: Harness) -> tuple[int, int, int]:
    return tuple(h.value(f"SELECT count(*) FROM {table}") for table in ("jobs", "once_keys", "runs"))  # type: ignore[return-value]


def test_what_an_ended_run_leaves_is_kept_a_while_for_late_questions(h: Harness, run: str) -> None:
    h.pass_ms(retention.KEPT_MS - 1)
    assert left(h) == (2, 1, 1)


def test_what_an_ended_run_leaves_goes_after_that_while_and_the_counts_with_it(h: Harness, run: str) -> None:
    h.pass_ms(retention.KEPT_MS)
    assert left(h) == (0, 0, 1)
    assert h.counted() == {}


def test_a_late_question_after_that_is_not_found(h: Harness, a: Client, run: str) -> None:
    (job,) = h.rows("SELECT job FROM jobs WHERE state = 'running'")[0]
    token = h.value("SELECT token FROM leases WHERE kind = 'job'")
    h.pass_ms(retention.KEPT_MS)
    a.refused("NOT_FOUND", wire.QueuesResult(job=job))
    a.refused("NOT_FOUND", wire.QueuesComplete(job=job, token=token, result="1"))
    assert a.ask(wire.Release(token=token)) == wire.Released(held=False)


def test_the_run_itself_is_kept_for_days_and_goes_with_the_next_that_is_tidied(h: Harness, a: Client, run: str) -> None:
    h.pass_ms(retention.RUN_KEPT_MS)
    assert a.ask(wire.RunsGet(run=run)).state == "finished"
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(wire.RunsEnd(run=other, state="finished"))
    h.pass_ms(retention.KEPT_MS)
    a.refused("NOT_FOUND", wire.RunsGet(run=run))
    assert a.ask(wire.RunsGet(run=other)).state == "finished"


def test_a_living_run_keeps_everything(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="job")).run
    token = a.ask(wire.OnceAcquire(run=run, key="k")).token
    a.ask(wire.OnceComplete(run=run, key="k", token=token, result="1"))
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    h.pass_ms(30 * DAY_MS)
    assert left(h) == (1, 1, 1)


def test_tidying_goes_in_small_steps_until_all_is_gone(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="job")).run
    for number in range(retention.ROWS_IN_ONE_STEP + 1):
        a.ask(wire.QueuesSend(run=run, queue="q", key=str(number), input="1", attempts=3))
    a.ask(wire.RunsEnd(run=run, state="finished"))
    h.pass_ms(retention.KEPT_MS)
    assert left(h)[0] == 1
    assert h.retention.due_ms == h.clock.wall_ms() + retention.PAUSE_MS, "there is more to do"
    h.pass_ms(SOON_MS)
    assert left(h)[0] == 0
    assert h.value("SELECT tidied FROM runs") == 1


def test_many_small_runs_are_tidied_in_one_step(h: Harness, a: Client) -> None:
    """One for each `gather`: thousands may end in a minute."""
    many = retention.ROWS_IN_ONE_STEP // 4  # a job, and counts of two states
    for number in range(many):
        run = a.ask(wire.RunsJoin(name=str(number))).run
        a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
        a.ask(wire.RunsEnd(run=run, state="finished"))
    h.pass_ms(retention.KEPT_MS)
    assert h.value("SELECT count(*) FROM runs WHERE tidied = 1") == many
    assert left(h)[0] == 0


def test_what_is_held_in_an_ended_run_outlives_its_rows(h: Harness, a: Client, run: str) -> None:
    """A worker that goes on with a job of a run that is over holds its slots until it is done, whatever is on disk."""
    tokens = [token for (token,) in h.rows("SELECT token FROM leases")]
    while h.clock.wall_ms() < retention.RUN_KEPT_MS + 1_700_000_000_000:
        h.pass_ms(wire.LEASE_MS_MAX - 1)
        assert a.beat(*tokens) == [True, True]
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(wire.RunsEnd(run=other, state="finished"))
    for _ in range(3):
        h.pass_ms(retention.KEPT_MS // 3 + SOON_MS)
        a.beat(*tokens)
    assert left(h) == (0, 0, 2), "its row stays as long as something is held in it"
    h.start()
    a.resume()
    assert [a.ask(wire.Release(token=token)).held for token in tokens] == [True, True]
    a.refused("SCOPE_CANCELLED", wire.OnceAcquire(run=run, key="held"))


def test_a_run_stays_on_disk_as_long_as_something_is_held_below_it(
    h: Harness, a: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RUN_KEPT_MS", 0)
    top = a.ask(wire.RunsJoin(name="job")).run
    middle = a.ask(wire.RunsChild(parent=top, owned=False)).run
    below = a.ask(wire.RunsChild(parent=middle, owned=False)).run
    beside = a.ask(wire.RunsChild(parent=top, owned=False)).run
    token = a.ask(wire.OnceAcquire(run=below, key="k", lease_ms=wire.LEASE_MS_MAX)).token
    last = a.ask(wire.RunsChild(parent=top, owned=False)).run
    for run in (middle, beside, last):
        a.ask(wire.RunsEnd(run=run, state="stopped"))
        for _ in range(3):
            h.pass_ms(retention.KEPT_MS // 3 + SOON_MS)
            assert a.beat(token) == [True]
    assert h.rows("SELECT run, tidied FROM runs ORDER BY run") == [(top, 0), (middle, 1), (below, 1), (last, 1)]
    h.check()
    h.start()
    assert set(h.core().live(RUNS)) == {top, middle, below}


def test_an_old_run_in_which_something_is_held_holds_up_only_itself(
    h: Harness, a: Client, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RUN_KEPT_MS", 0)
    tokens = [token for (token,) in h.rows("SELECT token FROM leases")]
    others = [a.ask(wire.RunsJoin(name=name)).run for name in ("second", "third")]
    for other in others:
        h.pass_ms(SOON_MS)
        a.ask(wire.RunsEnd(run=other, state="finished"))
    h.pass_ms(retention.KEPT_MS - 3 * SOON_MS)
    a.beat(*tokens)
    monkeypatch.setattr(retention, "ROWS_IN_ONE_STEP", 1)
    h.pass_ms(5 * SOON_MS)
    assert h.rows("SELECT run FROM runs ORDER BY run") == [(run,), (others[1],)]


def test_old_events_go_by_their_number_in_steps(h: Harness) -> None:
    newest = retention.EVENTS_KEPT + 2 * retention.EVENTS_IN_ONE_STEP + 7
    h.connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :newest)"
        " INSERT INTO events SELECT i, 'default', 'r', '/r/', 't', :now, '{}' FROM n",
        {"newest": newest, "now": h.clock.wall_ms()},
    )
    h.connection.execute("INSERT INTO counters VALUES ('event', :newest)", {"newest": newest})
    h.start()
    h.pass_ms(SOON_MS)
    oldest, kept = h.rows("SELECT min(event), count(*) FROM events")[0]
    assert retention.EVENTS_KEPT <= kept < retention.EVENTS_KEPT + retention.EVENTS_IN_ONE_STEP
    assert oldest == newest - kept + 1
    assert h.spaces.numbers.oldest_event == oldest


def test_numbers_that_were_left_out_are_no_events(h: Harness, a: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the numbers go on far above those on disk."""
    monkeypatch.setattr(retention, "EVENTS_KEPT", 1_000)
    run = a.ask(wire.RunsJoin(name="job")).run
    h.connection.execute("UPDATE counters SET value = 1000000 WHERE counter = 'event'")
    h.start()
    a.resume()
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
    h.pass_ms(retention.LOOK_EACH_MS)
    assert h.events(run) == ["scope.created", "task.submitted"]
    assert len(a.ask(wire.EventsRead(run=run)).events) == 2


def test_a_daemon_in_which_nothing_becomes_due_keeps_its_events_bounded(
    h: Harness, a: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "EVENTS_KEPT", 1_000)
    run = a.ask(wire.RunsJoin(name="job")).run
    h.pass_ms(0)
    for number in range(2_600):
        a.ask(wire.QueuesSend(run=run, queue="q", key=str(number), input="1", attempts=3))
        h.tick_if_due()
        assert h.value("SELECT count(*) FROM events") <= 1_000 + retention.EVENTS_IN_ONE_STEP
    page = a.ask(wire.EventsRead(run=run, after=1))
    assert page.gap and page.events[0].event == h.value("SELECT min(event) FROM events")


def test_old_events_go_by_their_age_also_in_a_quiet_daemon(h: Harness, a: Client) -> None:
    run = a.ask(wire.RunsJoin(name="job")).run
    h.start()
    h.pass_ms(retention.EVENTS_KEPT_MS - 1)
    assert h.events(run) == ["scope.created"]
    h.pass_ms(1)
    assert h.events(run) == []
    assert h.spaces.numbers.oldest_event == 0
    a.resume()
    assert a.ask(wire.EventsRead(run=run)).events == ()


def test_the_first_event_that_is_kept_may_be_one_of_the_same_turn(h: Harness, a: Client) -> None:
    a.ask(wire.RunsJoin(name="old"))
    h.clock.pass_ms(retention.EVENTS_KEPT_MS)
    request = a.request(wire.RunsJoin(name="new"))
    h.run(a.entry(request), Tick())
    ((first,),) = h.rows("SELECT event FROM events")
    assert h.spaces.numbers.oldest_event == first == 2


def test_nothing_to_tidy_is_never_due(h: Harness) -> None:
    h.pass_ms(retention.LOOK_EACH_MS)  # the start of a new database has written something
    assert h.retention.due_ms is None
    h.session("a").bye()
    assert h.retention.due_ms == h.clock.wall_ms() + retention.LOOK_EACH_MS
    h.pass_ms(retention.LOOK_EACH_MS)
    assert h.retention.due_ms is None


def test_a_look_that_fails_has_changed_nothing_and_is_made_again(h: Harness, a: Client, run: str) -> None:
    def fail(sql: str) -> None:
        if "ledger" in sql or "FROM reservations" in sql:  # after the runs were looked at
            raise sqlite3.OperationalError("disk I/O error")

    h.connection.before = fail
    h.pass_ms(retention.KEPT_MS)
    h.connection.before = nothing
    assert left(h) == (2, 1, 1)
    h.pass_ms(retention.LOOK_EACH_MS + SOON_MS)
    assert left(h) == (0, 0, 1)


def test_the_engine_tidies_its_file(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = (await it.ask("a", wire.RunsJoin(name="job"))).run
            await it.ask("a", wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3))
            await it.ask("a", wire.RunsEnd(run=run, state="finished"))
            await it.pass_ms(retention.KEPT_MS - 1)
            assert it.engine.store.database.connection.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
            await it.pass_ms(1)
            assert it.engine.store.database.connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
            tidied = "SELECT tidied FROM runs"
            assert it.engine.store.database.connection.execute(tidied).fetchone() == (1,)

    play(story())


# ------------------------------------------------------------------ money


@pytest.fixture
def living(a: Client) -> str:
    a.ask(wire.BudgetsDeclare(budget="llm", limit_minor=1_000_000))
    return str(a.ask(wire.RunsJoin(name="living")).run)


def reserve(client: Client, run: str) -> str:
    return str(client.ask(wire.BudgetsReserve(run=run, budget="llm", amount_minor=10)).reservation)


def settle(reservation: str, key: str = "w", keep_rest: bool = False) -> wire.BudgetsSettle:
    return wire.BudgetsSettle(reservation=reservation, cost_minor=4, work_key=key, keep_rest=keep_rest)


def money(h: Harness) -> tuple[int, int]:
    """How many reservations and rows of the ledger there are, after the books were checked."""
    check_resources(h)
    return h.value("SELECT count(*) FROM reservations"), h.value("SELECT count(*) FROM ledger")


def test_reservations_that_ended_and_their_ledger_go_after_a_week_and_the_sums_stay(
    h: Harness, a: Client, living: str
) -> None:
    old = reserve(a, living)
    a.ask(settle(old))
    h.pass_ms(DAY_MS)
    kept = reserve(a, living)
    a.ask(settle(kept))
    h.pass_ms(retention.MONEY_KEPT_MS - DAY_MS - 1)
    assert a.ask(settle(old)).charged_minor == 4
    h.pass_ms(1)
    assert money(h) == (1, 3)
    a.refused("NOT_FOUND", settle(old))
    assert a.ask(settle(kept)).charged_minor == 4, "a repeat, which charges nothing"
    h.pass_ms(30 * DAY_MS)
    assert money(h) == (0, 0)
    seen = a.ask(wire.BudgetsGet(budget="llm"))
    assert (seen.spent_minor, seen.reserved_minor) == (8, 0)
    reserve(a, living)
    assert money(h) == (1, 1)


def test_a_reservation_that_was_charged_late_is_kept_with_all_its_rows(h: Harness, a: Client, living: str) -> None:
    late = reserve(a, living)
    a.ask(settle(late, "first", keep_rest=True))
    h.pass_ms(6 * DAY_MS)  # what was left of it is released meanwhile
    a.ask(settle(late, "second"))
    h.pass_ms(6 * DAY_MS)
    a.ask(wire.BudgetsRelease(reservation=late))
    for key in ("first", "second"):
        assert a.ask(settle(late, key)).charged_minor == 8
    h.pass_ms(2 * DAY_MS)
    assert money(h) == (0, 0)


def test_a_reservation_that_stays_holds_up_only_itself(h: Harness, a: Client, living: str) -> None:
    """Also of another budget and space, for as long as the calendar goes."""
    x = h.session("x", space="other")
    elsewhere = x.ask(wire.RunsJoin(name="r")).run
    x.ask(wire.BudgetsDeclare(budget="llm", limit_minor=100))
    stays = wire.BudgetsReserve(run=elsewhere, budget="llm", amount_minor=1, settle_by_ms=wire.LATEST_MS)
    for _ in range(retention.ROWS_IN_ONE_STEP + 1):
        x.ask(stays)
    for _ in range(3):
        a.ask(settle(reserve(a, living)))
    h.pass_ms(2 * retention.MONEY_KEPT_MS)
    assert money(h) == (100, 100)


def test_money_is_tidied_in_small_steps(h: Harness, a: Client, living: str) -> None:
    for _ in range(retention.ROWS_IN_ONE_STEP // 3):
        a.ask(settle(reserve(a, living)))
    long = reserve(a, living)
    for n in range(5):
        a.ask(wire.BudgetsSettle(reservation=long, cost_minor=1, work_key=str(n), keep_rest=True))
    a.ask(settle(long))
    before = sum(money(h))
    h.clock.pass_ms(retention.MONEY_KEPT_MS + DAY_MS)
    h.tick()
    assert 0 < before - sum(money(h)) <= retention.ROWS_IN_ONE_STEP
    h.pass_ms(SOON_MS)
    assert money(h) == (0, 0)


# ------------------------------------------------------------------ replies that are kept for a day


def keep(client: Client, many: int) -> None:
    for _ in range(many):
        client.ask(wire.RunsJoin(name="job", keep=True))


def test_a_reply_that_is_kept_goes_after_a_day(h: Harness, a: Client) -> None:
    keep(a, 3)
    a.bye()
    h.pass_ms(DAY_MS - 1)
    assert h.value("SELECT count(*) FROM replies") == 3
    h.pass_ms(1)
    assert h.value("SELECT count(*) FROM replies") == 0


@pytest.mark.parametrize(("of", "most"), [("REPLIES_KEPT", 150), ("REPLIES_KEPT_BYTES", 150 * 100)])
def test_the_oldest_replies_of_a_caller_go_when_it_has_too_many_and_others_keep_theirs(
    h: Harness, a: Client, monkeypatch: pytest.MonkeyPatch, of: str, most: int
) -> None:
    monkeypatch.setattr(retention, of, most)
    other = h.session("other")
    keep(other, 10)
    h.pass_ms(60_000)
    keep(a, 100)
    h.pass_ms(60_000)
    assert h.retention.keeps_for == {}
    keep(a, 100 if of == "REPLIES_KEPT" else 300)
    h.pass_ms(SOON_MS)
    kept = dict(h.rows("SELECT session, count(*) FROM replies GROUP BY session"))
    oldest = h.value("SELECT min(request) FROM replies WHERE session = 'a'")
    assert kept["other"] == 10
    assert kept["a"] == 150 if of == "REPLIES_KEPT" else kept["a"] < 300
    assert oldest == h.value("SELECT max(request) FROM replies WHERE session = 'a'") - kept["a"] + 1
    assert list(h.retention.keeps_for) == ["a"]
    assert h.retention.keeps_for["a"] == (60_000 if of == "REPLIES_KEPT" else 0), "as old as the oldest one that stays"


# ------------------------------------------------------------------ sets of needs


def test_sets_of_needs_go_when_no_queue_and_no_job_names_them(h: Harness, a: Client) -> None:
    a.ask(wire.SlotsDeclare(pool="gpu", max=10))
    first, second = (a.ask(wire.RunsJoin(name=name)).run for name in ("first", "second"))
    for units, run in ((1, first), (2, first), (2, second)):
        a.ask(wire.QueuesSend(run=run, queue="q", key=str(units), input="1", attempts=3, needs=gpu(units)))
    for units in (4, 3):
        a.ask(wire.QueuesDeclare(queue="q", needs=gpu(units)))
    wanted = "SELECT text FROM needs ORDER BY needs"
    assert [wanted_units(each) for (each,) in h.rows(wanted)] == [1, 2, 3]
    a.ask(wire.RunsEnd(run=first, state="finished"))
    h.pass_ms(retention.KEPT_MS)
    assert [wanted_units(each) for (each,) in h.rows(wanted)] == [2, 3]
    a.ask(wire.QueuesSend(run=second, queue="q", key="again", input="1", needs=gpu(1)))
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=second, queue="q", places=9, lease_ms=30_000),))
    assert [job.key for job in a.ask(admit).jobs] == ["2", "again"]


def gpu(units: int) -> wire.Needs:
    return wire.Needs(slots=(wire.UnitsNeeded(name="gpu", units=units),))


def wanted_units(text: str) -> int:
    return int(json.loads(text)["slots"][0][1])


# ------------------------------------------------------------------ a long life


def test_a_month_of_quiet_use_leaves_no_more_than_what_is_promised(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each day some programs come, work in the run that lives, in child runs and in runs of their own, and go."""
    monkeypatch.setattr(retention, "EVENTS_KEPT", 500)
    monkeypatch.setattr(retention, "EVENTS_IN_ONE_STEP", 100)
    owner = h.session("owner")
    owner.ask(wire.BudgetsDeclare(budget="llm", limit_minor=1_000_000))
    sizes = []
    for day in range(60):
        for program in range(2):
            a_day(h, f"{day}-{program}")
        h.pass_ms(DAY_MS)
        sizes.append({name: h.value(f"SELECT count(*) FROM {name}") for name in BOUNDED})
    assert sizes[-1] == sizes[29], "what a month has left is what two months leave"
    assert sizes[-1]["sessions"] == 1
    assert h.value("SELECT count(*) FROM once_keys") == 60 * 2, "a living run keeps its answers"


BOUNDED = ("sessions", "leases", "replies", "ledger", "reservations", "timers", "needs", "events", "runs")


def a_day(h: Harness, name: str) -> None:
    client = h.session(name)
    living = client.ask(wire.RunsJoin(name="living")).run
    own = client.ask(wire.RunsJoin(name=f"own {name}")).run
    child = client.ask(wire.RunsChild(parent=living)).run
    token = client.ask(wire.OnceAcquire(run=living, key=name)).token
    client.ask(wire.OnceComplete(run=living, key=name, token=token, result="1"))
    client.ask(wire.OnceAcquire(run=child, key="held to the end"))
    client.ask(wire.QueuesSend(run=own, queue="q", key="1", input="1", attempts=3, needs=a_slot(client)))
    (grant,) = client.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=own, queue="q"),))).jobs
    client.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1"))
    held = client.ask(wire.BudgetsReserve(run=own, budget="llm", amount_minor=2))
    client.ask(wire.BudgetsSettle(reservation=held.reservation, cost_minor=1, work_key="w"))
    client.ask(wire.TimersSleep(run=own, name="t", after_ms=0))
    client.ask(wire.RunsJoin(name="living", keep=True))
    client.ask(wire.RunsEnd(run=own, state="finished"))
    client.die()


def a_slot(client: Client) -> wire.Needs:
    client.ask(wire.SlotsDeclare(pool="gpu", max=5))
    return gpu(1)

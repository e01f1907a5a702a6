from __future__ import annotations

import pytest

from runstate import wire
from runstated.domain import tidy
from tests.harness import Client, Harness

DAY_MS = 24 * 3_600_000


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def run(a: Client) -> str:
    """An ended run with two jobs, one of them running, and two keys, one of them held."""
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
    h.pass_ms(tidy.KEPT_MS - 1)
    assert left(h) == (2, 2, 1)


def test_what_an_ended_run_leaves_goes_after_that_while_and_the_counts_with_it(h: Harness, run: str) -> None:
    h.pass_ms(tidy.KEPT_MS)
    assert left(h) == (0, 0, 1)
    assert h.counted() == {}


def test_a_late_question_after_that_is_not_found(h: Harness, a: Client, run: str) -> None:
    (job,) = h.rows("SELECT job FROM jobs WHERE state = 'running'")[0]
    token = h.value("SELECT token FROM leases WHERE kind = 'job'")
    h.pass_ms(tidy.KEPT_MS)
    a.refused("NOT_FOUND", wire.QueuesResult(job=job))
    a.refused("NOT_FOUND", wire.QueuesComplete(job=job, token=token, result="1"))
    assert a.ask(wire.Release(token=token)) == wire.Released(held=False)


def test_the_run_itself_is_kept_for_days_and_goes_with_the_next_that_is_tidied(h: Harness, a: Client, run: str) -> None:
    h.pass_ms(tidy.RUN_KEPT_MS)
    assert a.ask(wire.RunsGet(run=run)).state == "finished"
    other = a.ask(wire.RunsJoin(name="other")).run
    a.ask(wire.RunsEnd(run=other, state="finished"))
    h.pass_ms(tidy.KEPT_MS)
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
    for number in range(tidy.ROWS_IN_ONE_STEP + 1):
        a.ask(wire.QueuesSend(run=run, queue="q", key=str(number), input="1", attempts=3))
    a.ask(wire.RunsEnd(run=run, state="finished"))
    h.clock.pass_ms(tidy.KEPT_MS)
    h.tick()
    assert left(h)[0] == 1
    assert h.memory.due_ms is not None
    assert h.memory.due_ms <= h.clock.wall_ms(), "there is more to do at once"
    h.tick_if_due()
    assert left(h)[0] == 0


def test_old_events_go_by_their_number_in_steps(h: Harness) -> None:
    newest = tidy.EVENTS_KEPT + 2 * tidy.EVENTS_IN_ONE_STEP + 7
    h.connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :newest)"
        " INSERT INTO events SELECT i, 'r', 't', 0, '{}' FROM n",
        {"newest": newest},
    )
    h.pass_ms(0)
    oldest, left = h.rows("SELECT min(event), count(*) FROM events")[0]
    assert tidy.EVENTS_KEPT <= left < tidy.EVENTS_KEPT + tidy.EVENTS_IN_ONE_STEP
    assert oldest == newest - left + 1


def test_nothing_to_tidy_is_never_due(h: Harness) -> None:
    h.pass_ms(1)
    assert h.memory.due_ms is None

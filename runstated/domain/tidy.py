"""Tidying: what ended runs leave behind goes in small steps, so that the end of a run of 100,000 jobs holds up nobody.

A run's keys and jobs read through its state from the moment it ends; their rows may go at any later time. The run's own
row stays a while longer, so that late questions ("what became of my job?") get a true answer.
"""

from runstated.domain import barriers, once, queues, timers
from runstated.store.tx import Tx

ROWS_IN_ONE_STEP = 100  # some milliseconds
KEPT_MS = 10 * 60_000  # late questions about its jobs are answered until then
RUN_KEPT_MS = 7 * 24 * 3_600_000  # `status` on a run that has ended
MONEY_KEPT_MS = 7 * 24 * 3_600_000  # reservations that have ended, and the ledger, for whoever settles once more
EVENTS_KEPT = 200_000  # newest events of all runs together; about 60 MB
EVENTS_KEPT_MS = 30 * 24 * 3_600_000
EVENTS_IN_ONE_STEP = 200


def tick(tx: Tx) -> int | None:
    """One step; when to look again (at once, if there is more to do)."""
    again = [_ended_runs(tx), _old_money(tx), _old_events(tx)]
    times = [at for at in again if at is not None]
    return min(times) if times else None


def _ended_runs(tx: Tx) -> int | None:
    row = tx.one("SELECT run, ended_ms FROM runs WHERE state <> 'active' AND tidied = 0 ORDER BY ended_ms LIMIT 1")
    if row is None:
        return None
    run, ended_ms = row
    due: int = ended_ms + KEPT_MS
    if tx.now_ms < due:
        return due
    gone = any(noun.tidy(tx, run, ROWS_IN_ONE_STEP) for noun in (queues, once, timers, barriers))
    if not gone:
        tx.run("UPDATE runs SET tidied = 1 WHERE run = :run", run=run)
        tx.run(
            "DELETE FROM runs WHERE run IN (SELECT run FROM runs WHERE state <> 'active' AND tidied = 1"
            " AND ended_ms < :before AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.run = runs.run)"
            " ORDER BY ended_ms LIMIT :many)",
            before=tx.now_ms - RUN_KEPT_MS,
            many=ROWS_IN_ONE_STEP,
        )
    return tx.now_ms


def _old_money(tx: Tx) -> int | None:
    row = tx.one(
        "SELECT (SELECT ended_ms FROM reservations WHERE ended_ms IS NOT NULL ORDER BY ended_ms LIMIT 1)"
        " FROM reservations LIMIT 1"
    )
    if row is None:
        return None
    due: int = MONEY_KEPT_MS + (tx.now_ms if row[0] is None else row[0])
    if tx.now_ms < due:
        return due
    _remove_reservations(tx, tx.now_ms - MONEY_KEPT_MS, ROWS_IN_ONE_STEP)
    return tx.now_ms


def _remove_reservations(tx: Tx, before: int, many: int) -> None:
    """Removes reservations that have ended ``before``, with their rows of the ledger, at most ``many`` rows in all.

    A reservation stays with all its rows: a work key is known for as long as it. The sums are the budget's.
    """
    rows = tx.all(
        "SELECT reservation FROM reservations WHERE ended_ms <= :before ORDER BY ended_ms LIMIT :many",
        before=before,
        many=many,
    )
    gone = 0
    for (reservation,) in rows:
        gone += tx.run(
            "DELETE FROM ledger WHERE entry IN"
            " (SELECT entry FROM ledger WHERE reservation = :reservation ORDER BY entry LIMIT :many)",
            reservation=reservation,
            many=many - gone,
        )
        if gone >= many:
            break  # it may have more of them
        gone += tx.run("DELETE FROM reservations WHERE reservation = :reservation", reservation=reservation)


def _old_events(tx: Tx) -> int | None:
    oldest = tx.one("SELECT event, at_ms FROM events ORDER BY event LIMIT 1")
    newest = tx.one("SELECT event FROM events ORDER BY event DESC LIMIT 1")
    if oldest is None or newest is None:
        return None
    due: int = oldest[1] + EVENTS_KEPT_MS
    are_many = newest[0] - oldest[0] >= EVENTS_KEPT + EVENTS_IN_ONE_STEP
    if tx.now_ms < due and not are_many:
        return due
    tx.run(
        "DELETE FROM events WHERE event < :last AND at_ms <= :latest",
        last=min(oldest[0] + EVENTS_IN_ONE_STEP, newest[0] + 1),
        latest=tx.now_ms if are_many else tx.now_ms - EVENTS_KEPT_MS,
    )
    return tx.now_ms

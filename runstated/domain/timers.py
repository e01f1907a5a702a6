"""Timers: `sleep` by name. The first call with a name in a run fixes when it fires; a fired one lets everybody pass.

    (nothing) --sleep--> pending --its time--> fired (until the run ends)

Times are wall time: a laptop that was suspended past the moment wakes its sleepers on resume.
"""

from runstate import wire
from runstated.domain import runs
from runstated.store.tx import Conflict, Parked, Tx, ValidationFailed
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE timers (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    fire_ms BIGINT NOT NULL,
    fired INTEGER NOT NULL DEFAULT 0 CHECK (fired IN (0, 1)),
    PRIMARY KEY (run, name)
);
CREATE INDEX timers_due ON timers (fire_ms) WHERE fired = 0;
"""

# Somebody has gone on after it fired.
SCHEMA_ACKED = """
ALTER TABLE timers ADD COLUMN acked INTEGER NOT NULL DEFAULT 0;
"""

FIRED_IN_ONE_STEP = 500


def signal(run: str, name: str) -> Topic:
    return ("timer", run, name)


def sleep(tx: Tx, request: wire.TimersSleep) -> wire.TimerView | Parked:
    """Waits until the timer of that name fires. Later calls ignore their own duration."""
    run, name = request.run, request.name
    runs.active(tx, run)
    row = tx.one("SELECT fire_ms, fired, acked FROM timers WHERE run = :run AND name = :name", run=run, name=name)
    fire_ms, fired, acked = row or (_fire_ms(tx, request), 0, 0)
    if row is None:
        tx.run(
            "INSERT INTO timers (run, name, fire_ms) VALUES (:run, :name, :fire_ms)",
            run=run,
            name=name,
            fire_ms=fire_ms,
        )
    if not fired and fire_ms <= tx.now_ms:
        _fire(tx, run, name, fire_ms)  # also one that is due and that `tick` has not come to yet
        fired = 1
    view = wire.TimerView(fired=bool(fired), fire_ms=fire_ms, acked=bool(acked))
    if fired:
        return view
    tx.due(fire_ms)
    return Parked(lines=(), signals=(signal(run, name), runs.signal(run)), late=view)


def ack(tx: Tx, request: wire.TimersAck) -> wire.TimerView:
    """Somebody has gone on after it fired; the first says so, the others get Conflict."""
    runs.get(tx, request.run)
    row = tx.one(
        "UPDATE timers SET acked = 1 WHERE run = :run AND name = :name AND fired = 1 AND acked = 0 RETURNING fire_ms",
        run=request.run,
        name=request.name,
    )
    if row is None:
        raise Conflict(f"sleep {request.name} has not ended, or somebody has said so before")
    return wire.TimerView(fired=True, fire_ms=row[0], acked=True)


def tick(tx: Tx) -> int | None:
    """Fires what is due; when to look again."""
    rows = tx.all(
        "SELECT run, name, fire_ms FROM timers WHERE fired = 0 AND fire_ms <= :now ORDER BY fire_ms LIMIT :many",
        now=tx.now_ms,
        many=FIRED_IN_ONE_STEP,
    )
    for run, name, fire_ms in rows:
        _fire(tx, run, name, fire_ms)
    first = tx.one("SELECT fire_ms FROM timers WHERE fired = 0 ORDER BY fire_ms LIMIT 1")
    return first[0] if first else None


def tidy(tx: Tx, run: str, many: int) -> int:
    """Removes timers of an ended run, at most ``many``; how many went."""
    return tx.run(
        "DELETE FROM timers WHERE run = :run AND name IN"
        " (SELECT name FROM timers WHERE run = :run ORDER BY name LIMIT :many)",
        run=run,
        many=many,
    )


def _fire(tx: Tx, run: str, name: str, fire_ms: int) -> None:
    """Everybody passes from now on. In a run that is over nobody does, and nothing happens any more."""
    tx.run("UPDATE timers SET fired = 1 WHERE run = :run AND name = :name", run=run, name=name)
    if runs.refusal(runs.get_any(tx, run), tx.now_ms) is None:
        tx.answer(signal(run, name), wire.TimerView(fired=True, fire_ms=fire_ms))
        tx.emit("timer.fired", run, {"scopeId": run, "name": name})


def _fire_ms(tx: Tx, request: wire.TimersSleep) -> int:
    if (request.after_ms is None) == (request.at_ms is None):
        raise ValidationFailed("a timer needs either after_ms or at_ms")
    return tx.now_ms + request.after_ms if request.after_ms is not None else int(request.at_ms or 0)

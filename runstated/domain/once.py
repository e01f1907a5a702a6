"""Once: a key of a run is worked out once, and everybody gets its one result.

    open --acquire--> held --complete-------------------------> done     (until the run ends)
     ^                 |----fail, the last attempt allowed----> failed   (until the run ends)
     |                 +----fail, lapse, death, release--+
     +---------------------------------------------------+

The claim is written before the function runs. Crashes, lapses and interrupts are not failures: they are counted as
takeovers, for display. A held key is a line: its head gets the key when it opens. A result is a signal: it answers all
that wait. A done key remembers the token that finished it, so that a repeat of ``complete`` is no second outcome.
"""

from runstate import wire
from runstated.domain import leases, payloads, runs
from runstated.store.tx import Parked, Refusal, Row, Tx, ValidationFailed, must
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE once_keys (
    run TEXT NOT NULL,
    key TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'held', 'done', 'failed')),
    failures INTEGER NOT NULL DEFAULT 0,
    takeovers INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    error TEXT,
    token BIGINT,
    PRIMARY KEY (run, key),
    CHECK ((state = 'done') = (result IS NOT NULL)),
    CHECK (state <> 'failed' OR failures > 0)
);
"""

# Version 8: where the function has failed.
SCHEMA_TRACEBACK = """
ALTER TABLE once_keys ADD COLUMN traceback TEXT;
"""

KIND = "once"


def line(run: str, key: str) -> Topic:
    return leases.topic(KIND, key, run)


# ---------------------------------------------------------------------------------------------------- verbs


def acquire(tx: Tx, request: wire.OnceAcquire) -> wire.OnceGranted | wire.OnceDone | wire.OnceFailed | Parked:
    """The result, the final failure, or the right to run the function; waits while somebody else runs it."""
    run, key = request.run, request.key
    deadline_ms = runs.active(tx, run).deadline_ms
    state, failures, takeovers, result, error, traceback = _stored(tx, run, key)
    if state == "done":
        done = wire.OnceDone(result=result)
        tx.settled(run, key, deadline_ms, done)
        return done
    if state == "failed":
        return wire.OnceFailed(attempts=failures, error=error, traceback=traceback)
    place = line(run, key)
    if state == "held" or tx.ahead(place):
        return _wait(run, key)
    token, secret = leases.grant(tx, KIND, key, run, request.lease_ms)
    changed = tx.run(
        "INSERT INTO once_keys (run, key, state) VALUES (:run, :key, 'held')"
        " ON CONFLICT (run, key) DO UPDATE SET state = 'held' WHERE once_keys.state = 'open'",
        run=run,
        key=key,
    )
    must(changed == 1, "only an open key is granted")
    return wire.OnceGranted(token=token, attempt=failures + 1, takeovers=takeovers, secret=secret)


def look(tx: Tx, request: wire.OnceGet) -> wire.OnceOpen | wire.OnceHeld | wire.OnceDone | wire.OnceFailed | Parked:
    """How the key stands; waits in its line while it is held, and takes nothing when it comes up."""
    run, key = request.run, request.key
    runs.active(tx, run)
    state, failures, _, result, error, traceback = _stored(tx, run, key)
    if state == "done":
        return wire.OnceDone(result=result)
    if state == "failed":
        return wire.OnceFailed(attempts=failures, error=error, traceback=traceback)
    if state == "open":
        return wire.OnceOpen(attempts=failures)
    return _wait(run, key)


def complete(tx: Tx, request: wire.OnceComplete) -> wire.OnceDone | Refusal:
    """Records the result; a repeat by the token that did so is answered alike."""
    run, key = request.run, request.key
    payloads.check("result", request.result)
    found = runs.get(tx, run)
    over = runs.refusal(found, tx.now_ms)
    lease = _end(tx, request)
    if over is not None:
        return over
    if lease is None:
        row = tx.one("SELECT token, result FROM once_keys WHERE run = :run AND key = :key", run=run, key=key)
        if row is None or row[0] != request.token or row[1] is None:
            raise leases.LeaseGone(f"the hold on {key} is gone: somebody else may have taken it over")
        return wire.OnceDone(result=row[1])
    changed = tx.run(
        "UPDATE once_keys SET state = 'done', result = :result, token = :token"
        " WHERE run = :run AND key = :key AND state = 'held'",
        run=run,
        key=key,
        result=request.result,
        token=request.token,
    )
    must(changed == 1, "who holds the lease holds the key")
    done = wire.OnceDone(result=request.result)
    tx.answer(line(run, key), done)
    tx.settled(run, key, found.deadline_ms, done)
    _emit(tx, "once.completed", run, key)
    return done


def fail(tx: Tx, request: wire.OnceFail) -> wire.OnceFailCounted | Refusal:
    """Counts a failure. The next in line gets the key, or all get the error when it was the last attempt."""
    run, key = request.run, request.key
    over = runs.refusal(runs.get(tx, run), tx.now_ms)
    lease = _end(tx, request)
    if over is not None:
        return over
    if lease is None:
        raise leases.LeaseGone(f"the hold on {key} is gone: somebody else may have taken it over")
    row = tx.one(
        "UPDATE once_keys SET failures = failures + 1, error = :error, traceback = :traceback,"
        " state = CASE WHEN failures + 1 >= :attempts THEN 'failed' ELSE 'open' END"
        " WHERE run = :run AND key = :key AND state = 'held' RETURNING state, failures",
        run=run,
        key=key,
        error=request.error,
        traceback=request.traceback,
        attempts=request.attempts,
    )
    assert row is not None, "who holds the lease holds the key"
    state, failures = row
    if state == "failed":
        failed = wire.OnceFailed(attempts=failures, error=request.error, traceback=request.traceback)
        tx.answer(line(run, key), failed)
        _emit(tx, "once.failed", run, key, error=request.error, attempts=failures)
    else:
        tx.wake(line(run, key))
    return wire.OnceFailCounted(attempts=failures, failed=state == "failed")


# ---------------------------------------------------------------------------------------------------- leases


def gone(tx: Tx, lease: leases.Lease, how: str) -> None:
    """A hold ended without an outcome (``how``: lapsed, died, released): the key is open for the next in line."""
    takeovers = 0 if how == "released" else 1
    changed = tx.run(
        "UPDATE once_keys SET state = 'open', takeovers = takeovers + :more"
        " WHERE run = :run AND key = :key AND state = 'held'",
        run=lease.run,
        key=lease.subject,
        more=takeovers,
    )
    if changed:
        tx.wake(line(lease.run, lease.subject))


def tidy(tx: Tx, run: str, many: int) -> int:
    """Removes keys of an ended run, at most ``many``; how many went."""
    return tx.run(
        "DELETE FROM once_keys WHERE run = :run AND key IN"
        " (SELECT key FROM once_keys WHERE run = :run ORDER BY key LIMIT :many)",
        run=run,
        many=many,
    )


# ---------------------------------------------------------------------------------------------------- helpers


def _stored(tx: Tx, run: str, key: str) -> Row:
    """State, failures, takeovers, result, error and traceback of a key."""
    row = tx.one(
        "SELECT state, failures, takeovers, result, error, traceback FROM once_keys WHERE run = :run AND key = :key",
        run=run,
        key=key,
    )
    return row or ("open", 0, 0, None, None, None)


def _wait(run: str, key: str) -> Parked:
    def late(tx: Tx) -> wire.OnceHeld:
        row = tx.one("SELECT failures FROM once_keys WHERE run = :run AND key = :key", run=run, key=key)
        return wire.OnceHeld(attempts=row[0] if row else 0)

    place = line(run, key)
    return Parked(lines=(place,), signals=(place, runs.signal(run)), late=late)


def _end(tx: Tx, request: wire.OnceComplete | wire.OnceFail) -> leases.Lease | None:
    lease = leases.end(tx, request.token, request.secret)
    if lease is not None and (lease.kind, lease.run, lease.subject) != (KIND, request.run, request.key):
        raise ValidationFailed(f"the token {request.token} is not one of {request.key}")
    return lease


def _emit(tx: Tx, event: str, run: str, key: str, **more: object) -> None:
    tx.emit(event, run, {"scopeId": run, "key": key, **more})

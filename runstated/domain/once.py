"""Once: a key of a run is worked out once, and everybody gets its one result.

    open --acquire--> held --complete-------------------------> done     (until the run ends)
     ^                 |----fail, the last attempt allowed----> failed   (until the run ends)
     |                 +----fail, lapse, death, release--+
     +---------------------------------------------------+

A key is held while its lease exists; no column says so. It is in memory while it is held or waited for, or is open
after a failure; a result is answered from the engine's cache or read by its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runstate import wire
from runstated.domain import leases, payloads, runs
from runstated.domain.answers import Parked, Refusal, ValidationFailed
from runstated.domain.core import Core
from runstated.domain.holds import Lease, topic
from runstated.domain.tables import UNSTORED, Live, Table
from runstated.domain.waits import Topic

KIND = "once"


@dataclass(slots=True, eq=False)
class Key:
    """One key. ``state``: open, done or failed. ``token``: of the lease that has finished it. ``error``: of its last
    failure."""

    run: str
    key: str
    state: str = "open"
    failures: int = 0
    takeovers: int = 0
    result: str | None = None
    error: str | None = None
    traceback: str | None = None
    token: int | None = None
    lease: Lease | None = field(default=None, metadata=UNSTORED)


KEYS = Table("once_keys", Key, key=("run", "key"), live=Live("state", ("open",)), run="run")


def line(run: str, key: str) -> Topic:
    """Where those stand who want the key's result."""
    return topic(KIND, key, run)


# ---------------------------------------------------------------------------------------------------- verbs


def acquire(core: Core, request: wire.OnceAcquire) -> wire.OnceGranted | wire.OnceDone | wire.OnceFailed | Parked:
    """The result, the final failure, or the right to run the function; waits while somebody else runs it."""
    run = runs.active(core, request.run)
    key = _find(core, run, request.key)
    outcome = _outcome(key)
    if isinstance(outcome, wire.OnceDone):
        core.settle(run.run, request.key, run.deadline_ms, outcome)
    if outcome is not None:
        return outcome
    if (key is not None and key.lease is not None) or core.ahead(line(run.run, request.key)):
        return _wait(run.run, request.key)
    leases.check_room(core)
    key = key or Key(run.run, request.key)
    core.keep(KEYS, key)
    key.lease = leases.grant(core, KIND, key.key, run.run, request.lease_ms)
    return granted(core, key, key.lease)


def granted(core: Core, key: Key, lease: Lease) -> wire.OnceGranted:
    """What the holder of a key was told."""
    return wire.OnceGranted(
        token=lease.token, attempt=key.failures + 1, takeovers=key.takeovers, secret=leases.secret_of(core, lease)
    )


def look(core: Core, request: wire.OnceGet) -> wire.OnceOpen | wire.OnceHeld | wire.OnceDone | wire.OnceFailed | Parked:
    """How the key stands; waits in its line while it is held, and takes nothing when it comes up."""
    run = runs.active(core, request.run)
    key = _find(core, run, request.key)
    if key is None:
        return wire.OnceOpen()
    if key.lease is not None:
        return _wait(run.run, request.key)
    return _outcome(key) or wire.OnceOpen(attempts=key.failures)


def complete(core: Core, request: wire.OnceComplete) -> wire.OnceDone | Refusal:
    """Records the result; a repeat by the token that did so is answered alike."""
    payloads.check("result", request.result)
    run, key, lease = _held(core, request)
    over = runs.refusal(run, core.now_ms)
    if lease is None:
        if over is not None:
            raise over
        if key is None or key.state != "done" or key.token != request.token:
            raise _lost(request.key)
        return wire.OnceDone(result=key.result or "")
    _drop(core, key, lease)
    if over is not None:
        return over
    assert key is not None, "who holds the lease holds the key"
    key.state, key.result, key.token = "done", request.result, request.token
    core.put(KEYS, key)
    done = wire.OnceDone(result=request.result)
    core.answer(line(run.run, key.key), done)
    core.settle(run.run, key.key, run.deadline_ms, done)
    _emit(core, "once.completed", run, key.key)
    return done


def fail(core: Core, request: wire.OnceFail) -> wire.OnceFailCounted | Refusal:
    """Counts a failure. The next in line gets the key, or all get the error when it was the last attempt."""
    run, key, lease = _held(core, request)
    over = runs.refusal(run, core.now_ms)
    if lease is None:
        raise over or _lost(request.key)
    _drop(core, key, lease)
    if over is not None:
        return over
    assert key is not None, "who holds the lease holds the key"
    key.failures += 1
    key.error, key.traceback = request.error, request.traceback
    if key.failures >= request.attempts:
        key.state = "failed"
        failed = wire.OnceFailed(attempts=key.failures, error=request.error, traceback=request.traceback)
        core.answer(line(run.run, key.key), failed)
        _emit(core, "once.failed", run, key.key, error=request.error, attempts=key.failures)
    else:
        core.wake(line(run.run, key.key))
    core.put(KEYS, key)
    return wire.OnceFailCounted(attempts=key.failures, failed=key.state == "failed")


# ---------------------------------------------------------------------------------------------------- leases, memory


def gone(core: Core, lease: Lease, how: str) -> None:
    """A hold ended without an outcome (``how``: lapsed, died, released): the key is open for the next in line."""
    key = core.live(KEYS).get((lease.run, lease.subject))
    if key is None:
        return  # its run is over, and it has left memory
    key.lease = None
    if how != "released":
        key.takeovers += 1
        core.put(KEYS, key)
    elif not key.failures and not key.takeovers and not core.lines.is_awaited(line(key.run, key.key)):
        core.drop(KEYS, key)  # as if it had never been asked for
    core.wake(line(lease.run, lease.subject))


def load(core: Core) -> None:
    """After the objects were loaded: who holds what."""
    for lease in core.holds.of_token.values():
        if lease.kind == KIND and runs.in_memory(core, lease.run).state == "active":
            key = core.live(KEYS).get((lease.run, lease.subject)) or Key(lease.run, lease.subject)
            core.keep(KEYS, key)
            key.lease = lease


# ---------------------------------------------------------------------------------------------------- helpers


def _find(core: Core, run: runs.Run, name: str) -> Key | None:
    """The key, if it was ever asked for. Raises Missing."""
    key = core.live(KEYS).get((run.run, name))
    return key if key is not None or not run.has_rows else core.find(KEYS, (run.run, name))


def _outcome(key: Key | None) -> wire.OnceDone | wire.OnceFailed | None:
    if key is None or key.state == "open":
        return None
    if key.state == "done":
        return wire.OnceDone(result=key.result or "")
    return wire.OnceFailed(attempts=key.failures, error=key.error or "", traceback=key.traceback)


def _wait(run: str, name: str) -> Parked:
    def late(core: Core) -> wire.OnceHeld:
        key = core.live(KEYS).get((run, name))
        return wire.OnceHeld(attempts=key.failures if key else 0)

    place = line(run, name)
    return Parked(lines=(place,), signals=(place, runs.signal(run)), late=late)


def _held(core: Core, request: wire.OnceComplete | wire.OnceFail) -> tuple[runs.Run, Key | None, Lease | None]:
    """The run, the key and the caller's hold on it, each if there is one. Raises NotFound, Missing, and
    ValidationFailed for the token of something else."""
    run = runs.get(core, request.run)
    lease = leases.find(core, request.token, request.secret)
    if lease is not None and (lease.kind, lease.run, lease.subject) != (KIND, request.run, request.key):
        raise ValidationFailed(f"the token {request.token} is not one of {request.key}")
    if lease is not None or runs.refusal(run, core.now_ms) is not None:
        return run, core.live(KEYS).get((run.run, request.key)), lease
    return run, _find(core, run, request.key), None


def _drop(core: Core, key: Key | None, lease: Lease) -> None:
    leases.drop(core, lease)
    if key is not None:
        key.lease = None


def _lost(name: str) -> leases.LeaseGone:
    return leases.LeaseGone(f"the hold on {name} is gone: somebody else may have taken it over")


def _emit(core: Core, event: str, run: runs.Run, key: str, **more: object) -> None:
    core.emit(event, run.run, run.path, {"scopeId": run.run, "key": key, **more})

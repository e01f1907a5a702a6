"""Sessions: who uses the daemon, and what becomes of what they held when they are gone.

    hello --> open --bye | its process died | not resumed in time--> gone: all it held is handed on, in one step

A session is one process's connection with one configuration. Its row names the process, so that after a restart of
the daemon the holders that are gone can be told from those that will be back. This file stands above the nouns: it
alone knows which noun a kind of lease belongs to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runstate import wire
from runstated.domain import budgets, leases, once, queues, runs, slots
from runstated.store.tx import Access, Tx

SCHEMA = """
CREATE TABLE sessions (
    session TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    worker TEXT NOT NULL,
    process TEXT NOT NULL,
    pid INTEGER NOT NULL,
    command TEXT NOT NULL,
    opened_ms BIGINT NOT NULL
);
"""

# Version 3: who opened it (the id of the key, '' for the owner), and over what.
SCHEMA_3 = """
ALTER TABLE sessions ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN transport TEXT NOT NULL DEFAULT 'unix';
"""

# Version 8: names that sessions of different callers cannot share. Before, a session was called by its id, one over
# HTTP by digests of its caller and its label.
_NAME = (
    "transport || '/' || length(space) || ':' || space || '/' || key || '/'"
    " || CASE transport WHEN 'http' THEN substr(sessions.session, 31) ELSE sessions.session END"
)
SCHEMA_8 = f"""
UPDATE leases SET session = coalesce(
    (SELECT {_NAME} FROM sessions WHERE sessions.session = leases.session), session);
UPDATE runs SET owner = coalesce((SELECT {_NAME} FROM sessions WHERE sessions.session = runs.owner), owner);
UPDATE replies SET session = coalesce(
    (SELECT {_NAME} FROM sessions WHERE sessions.session = replies.session),
    (SELECT 'http/' || length(space) || ':' || space || '/' || key FROM sessions
        WHERE transport = 'http' AND substr(sessions.session, 1, 29) = replies.session LIMIT 1),
    session);
UPDATE sessions SET session = {_NAME};
"""

COLUMNS = "session, space, worker, process, pid, command, key, transport"

GONE: Mapping[str, Callable[[Tx, leases.Lease, str], None]] = {
    once.KIND: once.gone,
    queues.KIND: queues.gone,
    slots.KIND: slots.gone,
    budgets.KIND: budgets.gone,
}


@dataclass(frozen=True, slots=True)
class Session:
    """A row. ``session``: its name, see ``Access.session_name``. ``process``: see processes.Process.to_text; empty
    where the daemon cannot tell. ``key``: the id of the key it was opened with, empty for the owner. ``transport``:
    unix, tcp or http."""

    session: str
    space: str
    worker: str
    process: str
    pid: int
    command: str
    key: str = ""
    transport: str = "unix"

    @property
    def id(self) -> str:
        """What its client calls it."""
        return self.session[len(Access(self.space, key=self.key).session_name(self.transport, "")) :]


def open_session(tx: Tx, session: Session) -> None:
    """Writes the row; a session that comes back only changes its worker label."""
    tx.run(
        f"INSERT INTO sessions ({COLUMNS}, opened_ms)"
        " VALUES (:session, :space, :worker, :process, :pid, :command, :key, :transport, :now)"
        " ON CONFLICT (session) DO UPDATE SET worker = excluded.worker",
        session=session.session,
        space=session.space,
        worker=session.worker,
        process=session.process,
        pid=session.pid,
        command=session.command,
        key=session.key,
        transport=session.transport,
        now=tx.now_ms,
    )


def rejoin(tx: Tx, names: tuple[str, ...]) -> tuple[wire.RunEnded, ...]:
    """The session wants to hear of the end of these runs; those that are over already are told at once."""
    ended = []
    for name in names:
        row = tx.one(
            f"SELECT {runs.COLUMNS} FROM runs WHERE run = :run AND space = :space", run=name, space=tx.caller.space
        )
        run = runs.Run(*row) if row else None
        over = runs.refusal(run, tx.now_ms) if run else None
        if run is None:
            ended.append(wire.RunEnded(run=name, state="stopped", message=f"the run {name} is not known any more"))
        elif over is not None:
            state = runs.effective(run, tx.now_ms)
            ended.append(wire.RunEnded(run=name, state=state, message=str(over)))
        else:
            tx.subscribe(runs.signal(name))
    return tuple(ended)


def end(tx: Tx, session: str, how: str) -> None:
    """The session is gone (``how``: died, or released after an orderly end): all it held is handed on."""
    for lease in leases.of_session(tx, session):
        hand_on(tx, lease, how)
    runs.leave(tx, session)
    tx.run("DELETE FROM replies WHERE session = :session AND until_ms IS NULL", session=session)
    tx.run("DELETE FROM sessions WHERE session = :session", session=session)


def lapse(tx: Tx, token: int) -> None:
    """A lease has not been renewed in time: its holder is told that it has lost it."""
    row = tx.one(f"SELECT {leases.COLUMNS} FROM leases WHERE token = :token", token=token)
    if row is not None:
        lease = leases.Lease(*row)
        hand_on(tx, lease, "lapsed")
        tx.push(lease.session, wire.LeaseLost(token=token, reason="the lease was not renewed in time"))


def renew(tx: Tx, request: wire.Renew) -> wire.Renewed:
    """Renews one lease of the caller's. Of a job it is refused as gone when the run is over (a worker also serves child
    runs, and must not take the end of one for the end of its own); of anything else with the run's refusal."""
    lease = leases.find(tx, request.token, request.secret)
    if lease is None:
        raise leases.LeaseGone
    over = runs.refusal(runs.get(tx, lease.run), tx.now_ms)
    if over is not None:
        raise leases.LeaseGone if lease.kind == queues.KIND else over
    return wire.Renewed(lease_expires_ms=leases.renew(tx, request.token, request.lease_ms))


def release(tx: Tx, request: wire.Release) -> wire.Released:
    """Gives a hold back without an outcome; a token that is gone already, or is not the caller's, is no error."""
    lease = leases.end(tx, request.token, request.secret)
    if lease is not None:
        GONE[lease.kind](tx, lease, "released")
    return wire.Released(held=lease is not None)


def give_back(tx: Tx, session: str, request: int) -> None:
    """The caller of a request has gone: whatever the request was given and is still held goes back."""
    for lease in leases.of_request(tx, session, request):
        hand_on(tx, lease, "released")
    tx.run(
        "DELETE FROM replies WHERE session = :session AND request = :request AND until_ms IS NULL",
        session=session,
        request=request,
    )


def hand_on(tx: Tx, lease: leases.Lease, how: str) -> None:
    """Ends a hold without an outcome and lets its noun say what that means."""
    if leases.drop(tx, lease.token) is None:
        return
    GONE[lease.kind](tx, lease, how)
    if how != "released":
        _emit_lost(tx, lease, how)


def get_all(tx: Tx) -> list[Session]:
    """Every session there is (for the start of the daemon)."""
    return [Session(*row) for row in tx.all(f"SELECT {COLUMNS} FROM sessions")]


def _emit_lost(tx: Tx, lease: leases.Lease, how: str) -> None:
    row = tx.one("SELECT worker, pid FROM sessions WHERE session = :session", session=lease.session)
    worker, pid = row or ("", 0)
    data = {"scopeId": lease.run, "kind": lease.kind, "name": lease.subject, "worker": worker, "pid": pid, "how": how}
    tx.emit("lease.lost", lease.run, data)

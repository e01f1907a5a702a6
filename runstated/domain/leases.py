"""Leases: the one primitive. Somebody holds something, under a token, until they let go, die or fall silent.

    (nothing) --grant--> live --drop (completed, failed, released)--> gone
                          |  ^ beat (in memory)
                          +--lapse / death--> gone, and the noun says what that means for it

A token is a number from a counter, never given twice; it tells holds apart and proves nothing. A caller who ends or
renews a hold proves that it was given to them: their session holds it, or they show its secret, of which only a digest
is stored. Everything that ends a hold deletes its row by the token, and the proof, in one statement: zero rows means
"you lost it", never a second outcome. How long a lease still runs is kept in the daemon's
memory, on the lease clock; after a restart every lease gets its full length again.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from runstated.store.tx import Refusal, Row, Tx
from runstated.waits import Topic

SCHEMA = """
CREATE TABLE leases (
    token BIGINT NOT NULL PRIMARY KEY,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    run TEXT NOT NULL,
    session TEXT NOT NULL,
    request BIGINT NOT NULL,
    length_ms BIGINT NOT NULL CHECK (length_ms > 0),
    granted_ms BIGINT NOT NULL
);
CREATE INDEX leases_of_session ON leases (session, request);
"""

UNITS = """
CREATE TABLE units (
    token BIGINT NOT NULL,
    pool TEXT NOT NULL,
    units BIGINT NOT NULL CHECK (units > 0),
    PRIMARY KEY (token, pool)
);
CREATE INDEX units_of_pool ON units (pool);
"""

# Version 8: what is held in a run, and the units that are out of a pool, are found without a look at all others.
# The digest of a hold's secret: one of before has none, and no secret that is shown fits it.
SCHEMA_8 = """
CREATE INDEX leases_by_run ON leases (run);
DROP INDEX units_of_pool;
CREATE INDEX units_by_pool ON units (pool, units);
ALTER TABLE leases ADD COLUMN proof TEXT NOT NULL DEFAULT '';
"""

SHARED = frozenset(("slots", "budget"))  # kinds whose subject belongs to the space and not to a run

WITH_UNITS = frozenset(("slots", "job"))  # kinds under whose tokens units are held

IN_SPACE = "EXISTS (SELECT run FROM runs WHERE runs.run = leases.run AND runs.space = :space)"

# The parameters are those of ``proof``. A secret that is shown decides alone: sessions over HTTP are shared by label.
PROVED = "((:proof = '' AND session = :session) OR (:proof <> '' AND proof = :proof))"

COLUMNS = "token, kind, subject, run, session, request, length_ms, granted_ms"


class LeaseGone(Refusal):
    """The hold has ended."""

    code = "LEASE_LOST"
    says = "the hold is gone, or is another session's: it may have lapsed, and somebody else may have it now"


class Grant(NamedTuple):
    """A new hold: its number, and the 64 random bits (in hexadecimal digits) that prove it from another session."""

    token: int
    secret: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A row. ``subject``: what is held, in the noun's own words (a once key, a job id)."""

    token: int
    kind: str
    subject: str
    run: str
    session: str
    request: int
    length_ms: int
    granted_ms: int

    @property
    def topic(self) -> Topic:
        return topic(self.kind, self.subject, self.run)


def topic(kind: str, subject: str, run: str) -> Topic:
    """Where those stand who wait for what is held."""
    return (kind, "" if kind in SHARED else run, subject)


def proof(tx: Tx, secret: str) -> dict[str, str]:
    """The parameters of ``PROVED`` for the caller and the secret that it shows, if any. Digests are compared: how long
    that takes tells nothing of the secret."""
    return {"session": tx.caller.session, "proof": _digest(secret) if secret else ""}


def grant(tx: Tx, kind: str, subject: str, run: str, length_ms: int) -> Grant:
    """A new hold of the caller."""
    token, secret = tx.next("token"), tx.secret()
    session = tx.caller.session
    tx.run(
        f"INSERT INTO leases ({COLUMNS}, proof) VALUES"
        " (:token, :kind, :subject, :run, :session, :request, :length_ms, :granted_ms, :proof)",
        token=token,
        kind=kind,
        subject=subject,
        run=run,
        session=session,
        request=tx.caller.request_id,
        length_ms=length_ms,
        granted_ms=tx.now_ms,
        proof=_digest(secret),
    )
    tx.hold(token, session, length_ms, topic(kind, subject, run))
    return Grant(token, secret)


def drop(tx: Tx, token: int) -> Lease | None:
    """Ends the hold, whoever has it: for what the daemon does on its own. None when it is gone already."""
    return _ended(tx, tx.one(f"DELETE FROM leases WHERE token = :token RETURNING {COLUMNS}", token=token))


def end(tx: Tx, token: int, secret: str) -> Lease | None:
    """Ends a hold of the caller's; None when it is gone already, as one of another space or session is for them."""
    row = tx.one(
        f"DELETE FROM leases WHERE token = :token AND {IN_SPACE} AND {PROVED} RETURNING {COLUMNS}",
        token=token,
        space=tx.caller.space,
        **proof(tx, secret),
    )
    return _ended(tx, row)


def _ended(tx: Tx, row: Row | None) -> Lease | None:
    """What goes with a hold's row."""
    if row is None:
        return None
    lease = Lease(*row)
    token = lease.token
    tx.let_go(token)
    if lease.kind in WITH_UNITS:
        for (pool,) in tx.all("DELETE FROM units WHERE token = :token RETURNING pool", token=token):
            tx.wake(topic("slots", pool, ""))
    # Who ends a hold has had the answer that granted it; and an answer with a dead token must never be given again.
    # What names a reservation may: settling it a second time changes nothing, reserving a second time would.
    tx.run(
        "DELETE FROM replies WHERE session IN (:session, :caller) AND request = :request"
        " AND (until_ms IS NULL OR :again)",
        session=lease.session,
        caller=caller_of(lease.session),
        request=lease.request,
        again=lease.kind != "budget",
    )
    return lease


def caller_of(session: str) -> str:
    """Whose the replies are that are kept for a day: the sessions of one key over HTTP, one for each worker label, are
    those of one caller and share its request ids. See ``Access.session_name``."""
    return session.rpartition("/")[0] if session.startswith("http/") else session


def renew(tx: Tx, token: int, length_ms: int) -> int:
    """Gives a lease its full, perhaps another, length; when it lapses, as an estimate in wall time."""
    tx.run(
        "UPDATE leases SET length_ms = :length WHERE token = :token AND length_ms <> :length",
        token=token,
        length=length_ms,
    )
    tx.renew(token, length_ms)
    return tx.lease_epoch_ms + tx.lease_ms + length_ms


def find(tx: Tx, token: int, secret: str) -> Lease | None:
    """A live hold of the caller's."""
    row = tx.one(
        f"SELECT {COLUMNS} FROM leases WHERE token = :token AND {IN_SPACE} AND {PROVED}",
        token=token,
        space=tx.caller.space,
        **proof(tx, secret),
    )
    return Lease(*row) if row else None


def hold_units(tx: Tx, token: int, pool: str, units: int) -> None:
    """Units of a pool that go with a token."""
    tx.run("INSERT INTO units (token, pool, units) VALUES (:token, :pool, :units)", token=token, pool=pool, units=units)
    tx.hold_also(token, topic("slots", pool, ""))


def units_held(tx: Tx, pool: str) -> int:
    """How many units of a pool are out."""
    row = tx.one("SELECT coalesce(sum(units), 0) FROM units WHERE pool = :pool", pool=pool)
    return int(row[0]) if row else 0


def units_of(tx: Tx, pool: str) -> dict[int, int]:
    """The units of a pool that are out, by token."""
    return dict(tx.all("SELECT token, units FROM units WHERE pool = :pool", pool=pool))


def of_session(tx: Tx, session: str) -> list[Lease]:
    """What a session holds, oldest first."""
    rows = tx.all(f"SELECT {COLUMNS} FROM leases WHERE session = :session ORDER BY token", session=session)
    return [Lease(*row) for row in rows]


def of_request(tx: Tx, session: str, request: int) -> list[Lease]:
    """What one request of a session was given and still holds."""
    rows = tx.all(
        f"SELECT {COLUMNS} FROM leases WHERE session = :session AND request = :request ORDER BY token",
        session=session,
        request=request,
    )
    return [Lease(*row) for row in rows]


def all_units(tx: Tx) -> list[tuple[int, Topic]]:
    """Which units go with which token (for the start of the daemon)."""
    return [(token, topic("slots", pool, "")) for token, pool in tx.all("SELECT token, pool FROM units")]


def all_live(tx: Tx) -> list[Lease]:
    """Every hold there is (for the start of the daemon)."""
    return [Lease(*row) for row in tx.all(f"SELECT {COLUMNS} FROM leases ORDER BY token")]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

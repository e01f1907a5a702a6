"""Budgets: money, in whole minor units, shared by all runs of a space.

    reserve --> active --settle the whole or more-----------------------> settled
                  |  ^ settle a part, keep the rest
                  |----its process died, its lease lapsed: all of it is charged, until somebody says better
                  |----release, settle-by passed------------------------> released

What cannot be reserved is refused, never waited for. Each movement is a row of the ledger with the balance after it.
A cost above the reservation is charged as far as the budget reaches, and ``budget.overrun`` says what was left open.
Settling is idempotent by reservation and work key. What was spent is in the ledger; where nobody can know it any more,
the whole reservation is, and the event ``budget.assumed`` says so. Work that was done is paid, also after its run's end
and after its reservation was released: so a reservation keeps the session and the proof of its token, which outlive the
lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from runstate import wire
from runstated.domain import leases, runs
from runstated.store.tx import Conflict, NotFound, Refusal, Tx, ValidationFailed
from runstated.waits import WATCH, Topic

SCHEMA = """
CREATE TABLE budgets (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    currency TEXT NOT NULL,
    scale INTEGER NOT NULL CHECK (scale BETWEEN 0 AND 9),
    limit_minor BIGINT NOT NULL CHECK (limit_minor > 0),
    spent_minor BIGINT NOT NULL DEFAULT 0 CHECK (spent_minor >= 0),
    reserved_minor BIGINT NOT NULL DEFAULT 0 CHECK (reserved_minor >= 0),
    CHECK (spent_minor + reserved_minor <= limit_minor)
);
CREATE UNIQUE INDEX budgets_by_name ON budgets (space, name);
CREATE TABLE reservations (
    reservation TEXT NOT NULL PRIMARY KEY,
    budget TEXT NOT NULL,
    run TEXT NOT NULL,
    token BIGINT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'settled', 'released')),
    left_minor BIGINT NOT NULL CHECK (left_minor >= 0),
    charged_minor BIGINT NOT NULL DEFAULT 0 CHECK (charged_minor >= 0),
    settle_by_ms BIGINT NOT NULL,
    CHECK (state = 'active' OR left_minor = 0)
);
CREATE INDEX reservations_by_token ON reservations (token) WHERE state = 'active';
CREATE INDEX reservations_due ON reservations (settle_by_ms) WHERE state = 'active';
CREATE TABLE ledger (
    entry BIGINT NOT NULL PRIMARY KEY,
    budget TEXT NOT NULL,
    reservation TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('reserve', 'release', 'charge', 'overrun')),
    work_key TEXT,
    change_minor BIGINT NOT NULL,
    balance_minor BIGINT NOT NULL,
    at_ms BIGINT NOT NULL
);
CREATE UNIQUE INDEX ledger_by_work ON ledger (reservation, work_key) WHERE work_key IS NOT NULL;
"""

# Version 8: the reservations of one budget, latest first; whose a reservation is; how much it was, how much of what is
# charged was assumed, when it has ended.
SCHEMA_8 = """
CREATE INDEX reservations_of_budget ON reservations (budget, settle_by_ms);
ALTER TABLE reservations ADD COLUMN session TEXT NOT NULL DEFAULT '';
ALTER TABLE reservations ADD COLUMN proof TEXT NOT NULL DEFAULT '';
UPDATE reservations SET session = coalesce(
    (SELECT leases.session FROM leases WHERE leases.token = reservations.token), '');
ALTER TABLE reservations ADD COLUMN amount_minor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE reservations ADD COLUMN assumed_minor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE reservations ADD COLUMN ended_ms BIGINT;
DROP INDEX ledger_by_work;
CREATE UNIQUE INDEX ledger_of_reservation ON ledger (reservation, work_key);
UPDATE reservations SET amount_minor = coalesce((SELECT -change_minor FROM ledger
    WHERE ledger.reservation = reservations.reservation AND ledger.kind = 'reserve'), left_minor),
    ended_ms = CASE WHEN state <> 'active' THEN coalesce((SELECT max(at_ms) FROM ledger
    WHERE ledger.reservation = reservations.reservation), settle_by_ms) END;
CREATE INDEX reservations_ended ON reservations (ended_ms) WHERE ended_ms IS NOT NULL;
DROP INDEX reservations_by_token;
CREATE INDEX reservations_of_token ON reservations (token);
"""

KIND = "budget"
RELEASED_IN_ONE_STEP = 100

COLUMNS = "id, name, currency, scale, limit_minor, spent_minor, reserved_minor"
OF_RESERVATION = (
    "reservations.reservation, budget, run, token, state, left_minor, charged_minor, amount_minor, assumed_minor"
)


class InsufficientBudget(Refusal):
    """The budget cannot cover the reservation."""

    code = "INSUFFICIENT_BUDGET"


@dataclass(frozen=True, slots=True)
class Budget:
    """A row."""

    id: str
    name: str
    currency: str
    scale: int
    limit_minor: int
    spent_minor: int
    reserved_minor: int

    @property
    def available(self) -> int:
        return self.limit_minor - self.spent_minor - self.reserved_minor


@dataclass(frozen=True, slots=True)
class Reservation:
    """A row. ``left_minor``: what is still reserved, of ``amount_minor``; ``assumed_minor``: what was charged because
    nobody said what was spent."""

    reservation: str
    budget: str
    run: str
    token: int
    state: str
    left_minor: int
    charged_minor: int
    amount_minor: int
    assumed_minor: int


def line(budget: str) -> Topic:
    """Jobs that lack this budget stand here; they hold up nobody."""
    return (KIND, "", budget)


def watch(budget: str) -> Topic:
    """Jobs for which this budget has enough, and which lack something else."""
    return (WATCH, KIND, budget)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(tx: Tx, request: wire.BudgetsDeclare) -> wire.BudgetView:
    """Creates or verifies a budget; without a limit it must exist."""
    return _view(ensure(tx, request.budget, request.limit_minor, request.currency, request.scale))


def reserve(tx: Tx, request: wire.BudgetsReserve) -> wire.BudgetReserved | Refusal:
    """Holds an amount under a token. Refused when the budget cannot cover it; a budget declared on the way stays."""
    runs.active(tx, request.run)
    budget = ensure(tx, request.budget, request.limit_minor, request.currency, request.scale)
    if budget.available < request.amount_minor:
        return InsufficientBudget(
            f"budget {budget.name} has {budget.available} minor units of {budget.currency} left, which does not cover"
            f" {request.amount_minor}"
        )
    length_ms = wire.SETTLE_BY_MS if request.settle_by_ms is None else request.settle_by_ms - tx.now_ms
    if length_ms <= 0:
        raise ValidationFailed("the time by which to settle has passed already")
    token, secret = leases.grant(tx, KIND, budget.id, request.run, length_ms)
    reservation = hold(tx, budget, request.run, token, request.amount_minor, length_ms)
    return wire.BudgetReserved(token=token, reservation=reservation, scale=budget.scale, secret=secret)


def settle(tx: Tx, request: wire.BudgetsSettle) -> wire.BudgetSettled:
    """Charges a cost; a repeat with the same work key changes nothing."""
    found = _get(tx, request)
    done = tx.one(
        "SELECT change_minor FROM ledger WHERE reservation = :reservation AND work_key = :work_key",
        reservation=found.reservation,
        work_key=request.work_key,
    )
    if done is None:
        if not request.late:
            _check_active(found)
        if not request.overrun and request.cost_minor > found.left_minor:
            raise Conflict(f"{request.cost_minor} exceeds what is reserved: {found.left_minor} minor units")
        _take_back(tx, found)
        charge(tx, found, request.cost_minor, request.work_key)
    found = _get(tx, request)
    if not request.keep_rest and found.state == "active":
        release(tx, found)
    return _settled(tx, request)


def void(tx: Tx, request: wire.BudgetsRelease) -> wire.BudgetSettled:
    """Releases what is left of a reservation; a repeat changes nothing."""
    found = _get(tx, request)
    if not request.late:
        _check_active(found)
    if found.state == "active":
        release(tx, found)
    _take_back(tx, found)
    return _settled(tx, request)


def look(tx: Tx, request: wire.BudgetsGet) -> wire.BudgetView:
    """A budget: its limit, what is reserved and what is spent, and its newest reservations."""
    budget = find(tx, request.budget)
    rows = tx.all(
        "SELECT reservation, run, state, left_minor, charged_minor FROM reservations WHERE budget = :budget"
        " ORDER BY settle_by_ms DESC LIMIT :many",
        budget=budget.id,
        many=request.reservations,
    )
    reservations = tuple(
        wire.ReservationView(reservation=reservation, run=run, state=state, left_minor=left, charged_minor=charged)
        for reservation, run, state, left, charged in rows
    )
    return replace(_view(budget), reservations=reservations)


# ---------------------------------------------------------------------------------------------------- for queues


def find(tx: Tx, name: str) -> Budget:
    """The budget of that name. Raises NotFound."""
    row = tx.one(
        f"SELECT {COLUMNS} FROM budgets WHERE space = :space AND name = :name", space=tx.caller.space, name=name
    )
    if row is None:
        raise NotFound(f"budget {name} not found: declare it with limit, or with setup()")
    return Budget(*row)


def by_id(tx: Tx, budget: str) -> Budget:
    row = tx.one(f"SELECT {COLUMNS} FROM budgets WHERE id = :id", id=budget)
    assert row is not None, "budgets are never removed"
    return Budget(*row)


def hold(tx: Tx, budget: Budget, run: str, token: int, amount: int, length_ms: int = wire.SETTLE_BY_MS) -> str:
    """Reserves under a token that was granted; the reservation's id."""
    reservation = tx.new_id("b")
    tx.run(
        "INSERT INTO reservations"
        " (reservation, budget, run, token, state, left_minor, amount_minor, settle_by_ms, session, proof)"
        " SELECT :reservation, :budget, :run, token, 'active', :left, :left, :settle_by, session, proof"
        " FROM leases WHERE token = :token",
        reservation=reservation,
        budget=budget.id,
        run=run,
        token=token,
        left=amount,
        settle_by=tx.now_ms + length_ms,
    )
    _move(tx, budget.id, reservation, "reserve", reserved=amount)
    tx.due(tx.now_ms + length_ms)
    return reservation


def of_token(tx: Tx, token: int) -> list[Reservation]:
    """The active reservations under a token."""
    rows = tx.all(
        f"SELECT {OF_RESERVATION} FROM reservations WHERE token = :token AND state = 'active' ORDER BY reservation",
        token=token,
    )
    return [Reservation(*row) for row in rows]


def pay(tx: Tx, token: int, costs: Mapping[str, int]) -> None:
    """Charges what the work under a token has cost, by reservation; without a cost all that was reserved. Also where
    that was released meanwhile because the work took long."""
    rows = tx.all(
        f"SELECT {OF_RESERVATION} FROM reservations WHERE token = :token"
        " AND (state = 'active' OR (state = 'released' AND settle_by_ms <= :now)) ORDER BY reservation",
        token=token,
        now=tx.now_ms,
    )
    for row in rows:
        found = Reservation(*row)
        reserved = found.left_minor if found.state == "active" else found.amount_minor
        charge(tx, found, costs.get(found.reservation, reserved), f"job:{token}")
    for left in of_token(tx, token):
        release(tx, left)


def charge(tx: Tx, found: Reservation, cost: int, work_key: str) -> None:
    """Charges a cost against a reservation, then against what is available. A released one is charged all the same."""
    budget = by_id(tx, found.budget)
    reach = found.left_minor + budget.available
    charged = min(cost, reach)
    from_reserved = min(charged, found.left_minor)
    left = found.left_minor - from_reserved
    state = "active" if left else "settled"
    tx.run(
        "UPDATE reservations SET left_minor = :left, charged_minor = charged_minor + :charged, state = :state,"
        " ended_ms = CASE WHEN :state = 'active' THEN NULL ELSE :now END WHERE reservation = :reservation",
        reservation=found.reservation,
        left=left,
        charged=charged,
        state=state if found.state == "active" else "settled",
        now=tx.now_ms,
    )
    _move(tx, budget.id, found.reservation, "charge", spent=charged, reserved=-from_reserved, work_key=work_key)
    if charged < cost:
        tx.emit(
            "budget.overrun",
            found.run,
            {
                "scopeId": found.run,
                "budgetId": budget.id,
                "budget": budget.name,
                "reservationId": found.reservation,
                "amountMinor": str(cost),
                "chargedMinor": str(charged),
                "overrunMinor": str(cost - charged),
            },
        )


def release(tx: Tx, found: Reservation, event: str | None = None) -> None:
    """Gives what is left back to the budget; jobs that lacked it are looked at again."""
    tx.run(
        "UPDATE reservations SET left_minor = 0, ended_ms = :now,"
        " state = CASE WHEN charged_minor > 0 THEN 'settled' ELSE 'released' END"
        " WHERE reservation = :reservation AND state = 'active'",
        reservation=found.reservation,
        now=tx.now_ms,
    )
    _move(tx, found.budget, found.reservation, "release", reserved=-found.left_minor)
    tx.wake(line(found.budget))
    if event is not None:
        data = {"scopeId": found.run, "reservationId": found.reservation, "amountMinor": str(found.left_minor)}
        tx.emit("budget.released", found.run, {**data, "reason": event})


# ---------------------------------------------------------------------------------------------------- leases, time


def gone(tx: Tx, lease: leases.Lease, how: str) -> None:
    """The holder has let go: what its reservations still hold is free again. If it has gone without a word, what it
    has spent cannot be known any more. Callers of the HTTP API go like that when they like, and are released, as is
    what was reserved until a time of its own."""
    session = tx.one("SELECT transport FROM sessions WHERE session = :session", session=lease.session)
    has_own_time = how == "lapsed" and lease.kind == KIND and lease.length_ms != wire.SETTLE_BY_MS
    for found in of_token(tx, lease.token):
        if how == "released" or has_own_time or session == ("http",):
            release(tx, found, None if how == "released" else how)
        else:
            _assume(tx, found, how)


def _assume(tx: Tx, found: Reservation, reason: str) -> None:
    """Charges all that is left."""
    tx.run(
        "UPDATE reservations SET left_minor = 0, charged_minor = charged_minor + left_minor,"
        " assumed_minor = left_minor, state = 'settled', ended_ms = :now WHERE reservation = :reservation",
        reservation=found.reservation,
        now=tx.now_ms,
    )
    _move(tx, found.budget, found.reservation, "charge", spent=found.left_minor, reserved=-found.left_minor)
    budget = by_id(tx, found.budget)
    data = {"scopeId": found.run, "budgetId": budget.id, "budget": budget.name, "reservationId": found.reservation}
    tx.emit("budget.assumed", found.run, {**data, "chargedMinor": str(found.left_minor), "reason": reason})


def _take_back(tx: Tx, found: Reservation) -> None:
    """Somebody says after all what was spent: what was assumed is given back."""
    if found.assumed_minor:
        tx.run(
            "UPDATE reservations SET charged_minor = charged_minor - assumed_minor, assumed_minor = 0, ended_ms = :now,"
            " state = CASE WHEN charged_minor > assumed_minor THEN 'settled' ELSE 'released' END"
            " WHERE reservation = :reservation",
            reservation=found.reservation,
            now=tx.now_ms,
        )
        _move(tx, found.budget, found.reservation, "release", spent=-found.assumed_minor)
        tx.wake(line(found.budget))


def tick(tx: Tx) -> int | None:
    """Releases what was not settled in time; when to look again."""
    rows = tx.all(
        f"SELECT {OF_RESERVATION} FROM reservations"
        " WHERE state = 'active' AND settle_by_ms <= :now ORDER BY settle_by_ms LIMIT :many",
        now=tx.now_ms,
        many=RELEASED_IN_ONE_STEP,
    )
    for row in rows:
        release(tx, Reservation(*row), "settle_by")  # its lease stays: it ends with the settling or with its holder
    first = tx.one("SELECT settle_by_ms FROM reservations WHERE state = 'active' ORDER BY settle_by_ms LIMIT 1")
    return first[0] if first else None


# ---------------------------------------------------------------------------------------------------- helpers


def ensure(tx: Tx, name: str, limit_minor: int | None, currency: str | None, scale: int | None) -> Budget:
    """The budget, created if a limit is given. Raises NotFound, Conflict."""
    space = tx.caller.space
    row = tx.one(f"SELECT {COLUMNS} FROM budgets WHERE space = :space AND name = :name", space=space, name=name)
    if row is None and limit_minor is not None:
        tx.need("resource_config", f"create the budget {name}")
        tx.run(
            "INSERT INTO budgets (id, space, name, currency, scale, limit_minor)"
            " VALUES (:id, :space, :name, :currency, :scale, :limit_minor)",
            id=tx.new_id("m"),
            space=space,
            name=name,
            currency=currency or "USD",
            scale=2 if scale is None else scale,
            limit_minor=limit_minor,
        )
    budget = find(tx, name)
    if limit_minor is not None:
        wanted = (limit_minor, currency or "USD", 2 if scale is None else scale)
        if wanted != (budget.limit_minor, budget.currency, budget.scale):
            raise Conflict(
                f"budget {name} exists with {budget.limit_minor} minor units of {budget.currency} at scale"
                f" {budget.scale}, this process declares {wanted[0]} of {wanted[1]} at scale {wanted[2]}"
            )
    return budget


def _check_active(found: Reservation) -> None:
    if found.state != "active":
        raise Conflict(f"nothing is reserved under {found.reservation} any more: it is {found.state}")


def _get(tx: Tx, request: wire.BudgetsSettle | wire.BudgetsRelease) -> Reservation:
    """A reservation of the caller's. Raises NotFound."""
    row = tx.one(
        f"SELECT {OF_RESERVATION} FROM reservations"
        " JOIN budgets ON budgets.id = reservations.budget"
        f" WHERE reservations.reservation = :reservation AND budgets.space = :space AND {leases.PROVED}",
        reservation=request.reservation,
        space=tx.caller.space,
        **leases.proof(tx, request.secret),
    )
    if row is None:
        raise NotFound(f"reservation {request.reservation} not found among those of this session")
    return Reservation(*row)


def _let_go(tx: Tx, token: int) -> None:
    """With nothing left under it the lease of a direct reservation ends; a job's token lives on."""
    kind = tx.one("SELECT kind FROM leases WHERE token = :token", token=token)
    if kind is not None and kind[0] == KIND and not of_token(tx, token):
        leases.drop(tx, token)


def _settled(tx: Tx, request: wire.BudgetsSettle | wire.BudgetsRelease) -> wire.BudgetSettled:
    found = _get(tx, request)
    _let_go(tx, found.token)
    return wire.BudgetSettled(state=found.state, charged_minor=found.charged_minor, left_minor=found.left_minor)


def _move(
    tx: Tx, budget: str, reservation: str, kind: str, *, reserved: int = 0, spent: int = 0, work_key: str | None = None
) -> None:
    """One row of the ledger, and the sums it leads to."""
    row = tx.one(
        "UPDATE budgets SET reserved_minor = reserved_minor + :reserved, spent_minor = spent_minor + :spent"
        " WHERE id = :id RETURNING limit_minor - spent_minor - reserved_minor",
        id=budget,
        reserved=reserved,
        spent=spent,
    )
    assert row is not None, "budgets are never removed"
    if reserved + spent > 0:
        tx.wake(watch(budget))
    tx.run(
        "INSERT INTO ledger (entry, budget, reservation, kind, work_key, change_minor, balance_minor, at_ms)"
        " VALUES (:entry, :budget, :reservation, :kind, :work_key, :change, :balance, :now)",
        entry=tx.next("ledger"),
        budget=budget,
        reservation=reservation,
        kind=kind,
        work_key=work_key,
        change=-reserved - spent,
        balance=row[0],
        now=tx.now_ms,
    )


def _view(budget: Budget) -> wire.BudgetView:
    return wire.BudgetView(
        id=budget.id,
        budget=budget.name,
        currency=budget.currency,
        scale=budget.scale,
        limit_minor=budget.limit_minor,
        reserved_minor=budget.reserved_minor,
        spent_minor=budget.spent_minor,
    )

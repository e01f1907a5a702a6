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

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from runstate import wire
from runstated.domain import leases, runs
from runstated.domain.answers import Conflict, Listing, NotFound, Refusal, ValidationFailed, must
from runstated.domain.core import Core
from runstated.domain.holds import Lease
from runstated.domain.money import BUDGETS, LEDGER, RESERVATIONS, Budget, Entry, Reservation
from runstated.domain.waits import WATCH, Topic

KIND = "budget"
RELEASED_IN_ONE_STEP = 100
STALE_MAX = 64  # entries of the heap whose reservation is not active any more, beside those that are


class InsufficientBudget(Refusal):
    """The budget cannot cover the reservation."""

    code = "INSUFFICIENT_BUDGET"


@dataclass(slots=True)
class Money:
    """Budgets by name; reservations by token, and by the time until which they are to be settled."""

    of_name: dict[str, Budget] = field(default_factory=dict)
    of_token: dict[int, dict[str, Reservation]] = field(default_factory=dict)
    due: list[tuple[int, str]] = field(default_factory=list)  # heap of (settle by, reservation)


def line(budget: str) -> Topic:
    """Jobs that lack this budget stand here; they hold up nobody."""
    return (KIND, "", budget)


def watch(budget: str) -> Topic:
    """Jobs for which this budget has enough, and which lack something else."""
    return (WATCH, KIND, budget)


# ---------------------------------------------------------------------------------------------------- verbs


def declare(core: Core, request: wire.BudgetsDeclare) -> wire.BudgetView:
    """Creates or verifies a budget; without a limit it must exist."""
    budget = plan_ensure(core, request.budget, request.limit_minor, request.currency, request.scale)
    do_ensure(core, budget)
    return _view(budget)


def reserve(core: Core, request: wire.BudgetsReserve) -> wire.BudgetReserved | Refusal:
    """Holds an amount under a token. Refused when the budget cannot cover it; a budget declared on the way stays."""
    run = runs.active(core, request.run)
    budget = plan_ensure(core, request.budget, request.limit_minor, request.currency, request.scale)
    length_ms = wire.SETTLE_BY_MS if request.settle_by_ms is None else request.settle_by_ms - core.now_ms
    if budget.available < request.amount_minor:
        do_ensure(core, budget)
        return InsufficientBudget(
            f"budget {budget.name} has {budget.available} minor units of {budget.currency} left, which does not cover"
            f" {request.amount_minor}"
        )
    if length_ms <= 0:
        raise ValidationFailed("the time by which to settle has passed already")
    leases.check_room(core)
    do_ensure(core, budget)
    lease = leases.grant(core, KIND, budget.id, run.run, length_ms)
    hold(core, budget, lease, request.amount_minor, length_ms)
    return granted(core, lease)


def granted(core: Core, lease: Lease) -> wire.BudgetReserved:
    """What the holder of a direct reservation was told."""
    (reservation,) = core.index(Money).of_token[lease.token].values()
    budget = by_id(core, lease.subject)
    return wire.BudgetReserved(
        token=lease.token,
        reservation=reservation.reservation,
        scale=budget.scale,
        secret=leases.secret_of(core, lease),
    )


def settle(core: Core, request: wire.BudgetsSettle) -> wire.BudgetSettled:
    """Charges a cost; a repeat with the same work key changes nothing."""
    found = _get(core, request)
    if not _is_charged(core, found, request.work_key):
        if not request.late:
            _check_active(found)
        if not request.overrun and request.cost_minor > found.left_minor:
            raise Conflict(f"{request.cost_minor} exceeds what is reserved: {found.left_minor} minor units")
        _take_back(core, found)
        charge(core, found, request.cost_minor, request.work_key)
    if not request.keep_rest and found.state == "active":
        release(core, found)
    return _settled(core, found)


def void(core: Core, request: wire.BudgetsRelease) -> wire.BudgetSettled:
    """Releases what is left of a reservation; a repeat changes nothing."""
    found = _get(core, request)
    if not request.late:
        _check_active(found)
    if found.state == "active":
        release(core, found)
    _take_back(core, found)
    return _settled(core, found)


def look(core: Core, request: wire.BudgetsGet) -> wire.BudgetView | Listing:
    """A budget: its limit, what is reserved and what is spent, and its newest reservations."""
    budget = find(core, request.budget)
    view = _view(budget)  # as it is now: those that are listed may be younger, never older
    if not request.reservations:
        return view

    def then(newest: list[Reservation]) -> wire.BudgetView:
        views = (
            wire.ReservationView(
                reservation=each.reservation,
                run=each.run,
                state=each.state,
                left_minor=each.left_minor,
                charged_minor=each.charged_minor,
            )
            for each in newest
        )
        return replace(view, reservations=tuple(views))

    return Listing(
        RESERVATIONS, then, equals={"budget": budget.id}, order="settle_by_ms", newest=True, many=request.reservations
    )


# ---------------------------------------------------------------------------------------------------- for queues


def find(core: Core, name: str) -> Budget:
    """The budget of that name. Raises NotFound."""
    budget = core.index(Money).of_name.get(name)
    if budget is None:
        raise NotFound(f"budget {name} not found: declare it with limit, or with setup()")
    return budget


def by_id(core: Core, budget: str) -> Budget:
    """A budget that something refers to: none is ever removed."""
    return core.live(BUDGETS)[budget]


def hold(core: Core, budget: Budget, lease: Lease, amount: int, length_ms: int = wire.SETTLE_BY_MS) -> str:
    """Reserves under a lease; the reservation's id."""
    reservation = Reservation(
        core.new_id("b"),
        core.space,
        budget.id,
        lease.run,
        runs.in_memory(core, lease.run).path,
        lease.token,
        "active",
        amount,
        amount,
        core.now_ms + length_ms,
        lease.session,
        has_rows=False,
    )
    _put(core, reservation)
    _put_in(core, reservation)
    _move(core, reservation, "reserve", reserved=amount)
    core.due(reservation.settle_by_ms)
    return reservation.reservation


def of_token(core: Core, token: int) -> list[Reservation]:
    """The active reservations under a token."""
    found = core.index(Money).of_token.get(token, {})
    return [each for each in found.values() if each.state == "active"]


def pay(core: Core, lease: Lease, costs: Mapping[str, int]) -> None:
    """Charges what the work under a lease, which has ended, has cost, by reservation; without a cost all that was
    reserved. Also where that was released meanwhile because the work took long."""
    for found in list(core.index(Money).of_token.get(lease.token, {}).values()):
        if found.state == "active" or (found.state == "released" and found.settle_by_ms <= core.now_ms):
            reserved = found.left_minor if found.state == "active" else found.amount_minor
            charge(core, found, costs.get(found.reservation, reserved), f"job:{lease.token}")
    for left in of_token(core, lease.token):
        release(core, left)
    lease_ended(core, lease)


def charge(core: Core, found: Reservation, cost: int, work_key: str) -> None:
    """Charges a cost against a reservation, then against what is available. A released one is charged all the same."""
    budget = by_id(core, found.budget)
    charged = min(cost, found.left_minor + budget.available)
    from_reserved = min(charged, found.left_minor)
    found.left_minor -= from_reserved
    found.charged_minor += charged
    is_active = found.state == "active" and found.left_minor > 0
    found.state = "active" if is_active else "settled"
    found.ended_ms = None if is_active else core.now_ms
    found.works.add(work_key)
    _put(core, found)
    _move(core, found, "charge", spent=charged, reserved=-from_reserved, work_key=work_key)
    if charged < cost:
        data = {
            "scopeId": found.run,
            "budgetId": budget.id,
            "budget": budget.name,
            "reservationId": found.reservation,
            "amountMinor": str(cost),
            "chargedMinor": str(charged),
            "overrunMinor": str(cost - charged),
        }
        core.emit("budget.overrun", found.run, found.path, data)


def release(core: Core, found: Reservation, event: str | None = None) -> None:
    """Gives what is left back to the budget; jobs that lacked it are looked at again."""
    left, found.left_minor = found.left_minor, 0
    found.state = "settled" if found.charged_minor > 0 else "released"
    found.ended_ms = core.now_ms
    _put(core, found)
    _move(core, found, "release", reserved=-left)
    core.wake(line(found.budget))
    if event is not None:
        data = {"scopeId": found.run, "reservationId": found.reservation, "amountMinor": str(left)}
        core.emit("budget.released", found.run, found.path, {**data, "reason": event})


# ---------------------------------------------------------------------------------------------------- leases, time


def gone(core: Core, lease: Lease, how: str) -> None:
    """The holder has let go, and its lease has ended: what its reservations still hold is free again. If it has gone
    without a word, what it has spent cannot be known any more. Callers of the HTTP API go like that when they like, and
    are released, as is what was reserved until a time of its own."""
    is_http = lease.session.startswith("http/")
    has_own_time = how == "lapsed" and lease.kind == KIND and lease.length_ms != wire.SETTLE_BY_MS
    for found in of_token(core, lease.token):
        if how == "released" or has_own_time or is_http:
            release(core, found, None if how == "released" else how)
        else:
            _assume(core, found, how)
    lease_ended(core, lease)


def tick(core: Core) -> int | None:
    """Releases what was not settled in time; when to look again."""
    due = core.index(Money).due
    for _ in range(RELEASED_IN_ONE_STEP):
        if not due or due[0][0] > core.now_ms:
            break
        found = core.live(RESERVATIONS).get(heapq.heappop(due)[1])
        if found is not None and found.state == "active":
            release(core, found, "settle_by")  # its lease stays: it ends with the settling or with its holder
    while due and not _is_active(core, due[0][1]):
        heapq.heappop(due)
    return due[0][0] if due else None


def _queue(core: Core, found: Reservation) -> None:
    """It is to be settled by its time. The entries of those that were settled go when they come up, or are too many."""
    money = core.index(Money)
    heapq.heappush(money.due, (found.settle_by_ms, found.reservation))
    if len(money.due) > 2 * len(core.live(RESERVATIONS)) + STALE_MAX:
        money.due = [entry for entry in money.due if _is_active(core, entry[1])]
        heapq.heapify(money.due)


def load(core: Core) -> None:
    """After the objects were loaded: the look-up tables."""
    for budget in core.live(BUDGETS).values():
        core.index(Money).of_name[budget.name] = budget
    for reservation in core.live(RESERVATIONS).values():
        _put_in(core, reservation)


# ---------------------------------------------------------------------------------------------------- helpers


def plan_ensure(core: Core, name: str, limit_minor: int | None, currency: str | None, scale: int | None) -> Budget:
    """The budget, a new one if a limit is given and there is none. Raises NotFound, Forbidden, Conflict."""
    budget = core.index(Money).of_name.get(name)
    wanted = (limit_minor, currency or "USD", 2 if scale is None else scale)
    if budget is None and limit_minor is not None:
        core.need("resource_config", f"create the budget {name}")
        return Budget("", core.space, name, wanted[1], wanted[2], limit_minor)
    budget = find(core, name)
    if limit_minor is not None and wanted != (budget.limit_minor, budget.currency, budget.scale):
        raise Conflict(
            f"budget {name} exists with {budget.limit_minor} minor units of {budget.currency} at scale"
            f" {budget.scale}, this process declares {wanted[0]} of {wanted[1]} at scale {wanted[2]}"
        )
    return budget


def do_ensure(core: Core, budget: Budget) -> None:
    """Keeps a budget that is new."""
    if not budget.id:
        budget.id = core.new_id("m")
        core.put(BUDGETS, budget)
        core.index(Money).of_name[budget.name] = budget


def _put(core: Core, found: Reservation) -> None:
    """Notes it, held or not, as it is now."""
    found.is_held = int(found.state == "active" or found.token in core.holds.of_token)
    core.put(RESERVATIONS, found)
    if not found.is_held:
        of_token = core.index(Money).of_token.get(found.token, {})
        of_token.pop(found.reservation, None)
        if not of_token:
            core.index(Money).of_token.pop(found.token, None)


def _put_in(core: Core, found: Reservation) -> None:
    core.index(Money).of_token.setdefault(found.token, {})[found.reservation] = found
    _queue(core, found)


def lease_ended(core: Core, lease: Lease) -> None:
    """What was kept in memory for as long as the lease goes."""
    for found in list(core.index(Money).of_token.get(lease.token, {}).values()):
        if found.state != "active":
            _put(core, found)


def _is_active(core: Core, reservation: str) -> bool:
    found = core.live(RESERVATIONS).get(reservation)
    return found is not None and found.state == "active"


def _assume(core: Core, found: Reservation, reason: str) -> None:
    """Charges all that is left."""
    left, found.left_minor = found.left_minor, 0
    found.charged_minor += left
    found.assumed_minor = left
    found.state = "settled"
    found.ended_ms = core.now_ms
    _put(core, found)
    _move(core, found, "charge", spent=left, reserved=-left)
    budget = by_id(core, found.budget)
    data = {"scopeId": found.run, "budgetId": budget.id, "budget": budget.name, "reservationId": found.reservation}
    core.emit("budget.assumed", found.run, found.path, {**data, "chargedMinor": str(left), "reason": reason})


def _take_back(core: Core, found: Reservation) -> None:
    """Somebody says after all what was spent: what was assumed is given back."""
    if not found.assumed_minor:
        return
    assumed, found.assumed_minor = found.assumed_minor, 0
    found.charged_minor -= assumed
    found.state = "settled" if found.charged_minor else "released"
    found.ended_ms = core.now_ms
    _put(core, found)
    _move(core, found, "release", spent=-assumed)
    core.wake(line(found.budget))


def _check_active(found: Reservation) -> None:
    if found.state != "active":
        raise Conflict(f"nothing is reserved under {found.reservation} any more: it is {found.state}")


def _get(core: Core, request: wire.BudgetsSettle | wire.BudgetsRelease) -> Reservation:
    """A reservation of the caller's. Raises NotFound and Missing."""
    found = core.find(RESERVATIONS, request.reservation)
    is_own = found is not None and found.space == core.space
    if (
        found is None
        or not is_own
        or not leases.is_proved(core, found.token, found.session, found.proof, request.secret)
    ):
        raise NotFound(f"reservation {request.reservation} not found among those of this session")
    return found


def _is_charged(core: Core, found: Reservation, work_key: str) -> bool:
    """Whether the work was charged before. Raises Missing."""
    if work_key in found.works or not found.has_rows:
        return work_key in found.works
    return core.fetched(LEDGER, ("reservation", "work_key"), (found.reservation, work_key)) is not None


def _settled(core: Core, found: Reservation) -> wire.BudgetSettled:
    """How it stands. With nothing left under it the lease of a direct reservation ends; a job's token lives on."""
    lease = core.holds.of_token.get(found.token)
    if lease is not None and lease.kind == KIND and not of_token(core, found.token):
        leases.drop(core, lease)
        lease_ended(core, lease)
    return wire.BudgetSettled(state=found.state, charged_minor=found.charged_minor, left_minor=found.left_minor)


def _move(
    core: Core, found: Reservation, kind: str, *, reserved: int = 0, spent: int = 0, work_key: str | None = None
) -> None:
    """One row of the ledger, and the sums it leads to."""
    budget = by_id(core, found.budget)
    budget.reserved_minor += reserved
    budget.spent_minor += spent
    must(budget.reserved_minor >= 0 and budget.spent_minor >= 0 and budget.available >= 0, "looked at before")
    core.put(BUDGETS, budget)
    if reserved + spent > 0:
        core.wake(watch(budget.id))
    core.append(
        LEDGER,
        Entry(
            core.next("ledger"),
            core.space,
            budget.id,
            found.reservation,
            kind,
            work_key,
            -reserved - spent,
            budget.available,
            core.now_ms,
        ),
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

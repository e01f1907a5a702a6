"""Budgets and reservations."""

from __future__ import annotations

from runstate import wire
from runstated.http.call import Answer, Body, Call, endpoint
from runstated.http.errors import ApiError
from runstated.http.fields import Digits, Holder, Moment
from runstated.http.names import from_id, from_reservation, to_id, to_ms, to_reservation

RESERVATIONS_MAX = 1_000


class Sizes(Body, frozen=True):
    """Without a limit it must exist; another one than its own: CONFLICT."""

    limit_minor: Digits | None = None
    currency: wire.Currency | None = None
    scale: wire.Scale | None = None


class Create(Body, frozen=True):
    name: wire.Name
    limit_minor: Digits
    currency: wire.Currency
    scale: wire.Scale


class Reservation(Answer, frozen=True):
    """`state`: ACTIVE, SETTLED or RELEASED."""

    id: str
    scope_id: str
    state: str
    left_minor: str
    charged_minor: str


class Budget(Answer, frozen=True):
    """Amounts are digits of minor units."""

    id: str
    name: str
    currency: str
    scale: int
    limit_minor: str
    settled_minor: str
    reserved_minor: str
    remaining_minor: str
    reservations: tuple[Reservation, ...]


class Reserve(Body, frozen=True):
    scope_id: wire.Id
    amount_minor: Digits
    holder: Holder = ""
    settle_by: Moment | None = None


class Reserved(Answer, frozen=True):
    reservation_id: str
    reserved_minor: str
    state: str


class Settle(Body, frozen=True):
    reservation_id: wire.Id
    amount_minor: Digits
    work_key: wire.Key
    allow_overrun: bool = False


class Void(Body, frozen=True):
    reservation_id: wire.Id
    work_key: wire.Key = "void"


class Settled(Answer, frozen=True):
    """How the reservation stands: ACTIVE, SETTLED, VOIDED."""

    state: str
    charged_minor: str
    left_minor: str


def view(budget: wire.BudgetView) -> Budget:
    return Budget(
        id=to_id("b", budget.budget),
        name=budget.budget,
        currency=budget.currency,
        scale=budget.scale,
        limit_minor=str(budget.limit_minor),
        settled_minor=str(budget.spent_minor),
        reserved_minor=str(budget.reserved_minor),
        remaining_minor=str(budget.limit_minor - budget.spent_minor - budget.reserved_minor),
        reservations=tuple(
            Reservation(
                id=one.reservation,
                scope_id=one.run,
                state=one.state.upper(),
                left_minor=str(one.left_minor),
                charged_minor=str(one.charged_minor),
            )
            for one in budget.reservations
        ),
    )


@endpoint("PUT", "/budgets/by-name/{name}", Budget, Sizes)
@endpoint("POST", "/budgets", Budget, Create, status=201)
async def declare(call: Call) -> Budget:
    """Looks up, verifies or creates a budget."""
    body = call.body
    request = wire.BudgetsDeclare(
        budget=call.named(),
        limit_minor=None if body.limit_minor is None else amount("limitMinor", body.limit_minor),
        currency=body.currency,
        scale=body.scale,
    )
    return view(await call.ask(request))


@endpoint("GET", "/budgets/{budgetId}", Budget)
async def look(call: Call) -> Budget:
    """A budget with its newest reservations."""
    (name,) = from_id("b", "budget", call.path["budgetId"])
    return view(await call.ask(wire.BudgetsGet(budget=name, reservations=RESERVATIONS_MAX)))


@endpoint("POST", "/budgets/{budgetId}/reserve", Reserved, Reserve, status=201)
async def reserve(call: Call) -> Reserved:
    """Holds an amount until it is settled, voided, or its time to settle is over (an hour)."""
    body = call.body
    (name,) = from_id("b", "budget", call.path["budgetId"])
    request = wire.BudgetsReserve(
        run=body.scope_id,
        budget=name,
        amount_minor=amount("amountMinor", body.amount_minor),
        settle_by_ms=None if body.settle_by is None else to_ms("settleBy", body.settle_by),
    )
    reply = await call.ask(request, worker=body.holder)
    reservation = to_reservation(reply.reservation, reply.secret)
    return Reserved(reservation_id=reservation, reserved_minor=str(request.amount_minor), state="ACTIVE")


@endpoint("POST", "/budgets/{budgetId}/settle", Settled, Settle)
async def settle(call: Call) -> Settled:
    """Charges a cost and keeps the rest reserved; a repeat with the same `workKey` changes nothing."""
    body = call.body
    from_id("b", "budget", call.path["budgetId"])
    reservation, secret = from_reservation(body.reservation_id)
    reply = await call.ask(
        wire.BudgetsSettle(
            reservation=reservation,
            secret=secret,
            cost_minor=int(body.amount_minor),
            work_key=body.work_key,
            keep_rest=True,
            overrun=body.allow_overrun,
            late=False,
        )
    )
    return settled(reply)


@endpoint("POST", "/budgets/{budgetId}/void", Settled, Void)
async def void(call: Call) -> Settled:
    """Releases what is left of a reservation."""
    from_id("b", "budget", call.path["budgetId"])
    reservation, secret = from_reservation(call.body.reservation_id)
    return settled(await call.ask(wire.BudgetsRelease(reservation=reservation, secret=secret, late=False)))


def settled(reply: wire.BudgetSettled) -> Settled:
    state = {"released": "VOIDED"}.get(reply.state, reply.state.upper())
    return Settled(state=state, charged_minor=str(reply.charged_minor), left_minor=str(reply.left_minor))


def amount(field: str, digits: str) -> int:
    if int(digits) == 0:
        raise ApiError("VALIDATION_FAILED", f"{field} must be more than 0")
    return int(digits)

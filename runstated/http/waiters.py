"""Calls that wait in the line of a limit or of slots, and whose client asks from time to time how they stand.

    limits: WAITING --its units fit--> GRANTED              slots: WAITING --its turn--> SIGNALED --acquire--> CLAIMED
            WAITING --ttl--> EXPIRED                               SIGNALED --not claimed in 5 s--> EXPIRED
            WAITING --cancel, run over--> CANCELLED

A waiter is an ordinary parked call of the session of its worker; SIGNALED is its lease, of five seconds. One that is
not asked for in 5 s leaves the line: its client may have died, and must hold up nobody. Asked for again within a
minute, it has its old place. Waiters live in memory. Their ids say what they wait for: one that is not known (after a
restart) is asked for again under the same request id, which brings what it was given meanwhile, or puts it into its
line. So one that was GRANTED need not be remembered: its answer is kept on disk for a day.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runstate import wire
from runstated.domain.access import Access
from runstated.host.clock import Timer
from runstated.http.errors import OTHER_REQUEST, ApiError
from runstated.http.gateway import Door, Gateway, Pending, checked
from runstated.http.names import from_id, to_id

Wanted = wire.LimitsTake | wire.SlotsAcquire
Place = tuple[wire.Parked, int | None]  # in a line, and when the wait is over
CLAIM_MS = wire.LEASE_MS_MIN
UNREAD_MS = 5_000
REMEMBERED_MS = 60_000


def slots_wanted(run: str, pool: str, units: int) -> wire.SlotsAcquire:
    """The request of a waiter for slots: what it gets is promised for a while, to be claimed."""
    return wire.SlotsAcquire(run=run, pool=pool, units=units, lease_ms=CLAIM_MS)


def limit_wanted(run: str, limit: str, units: int, ttl_s: int) -> wire.LimitsTake:
    """The request of a waiter for a limit."""
    return wire.LimitsTake(run=run, limit=limit, units=units, wait_ms=ttl_s * 1000)


def _id_of(worker: str, request: Wanted, request_id: int) -> str:
    what = request.limit if isinstance(request, wire.LimitsTake) else request.pool
    numbers = (request.units, (request.wait_ms or 0) // 1000, request_id)
    return to_id("w", request.run, what, f"={worker}", *(f"{number:x}" for number in numbers))


def _of_id(name: str) -> tuple[str, Wanted, int]:
    """Worker, request and request id. Raises ApiError."""
    run, what, worker, *numbers = from_id("w", "waiter", name, 6)
    try:
        units, ttl_s, request_id = (int(number, 16) for number in numbers)
        request = limit_wanted(run, what, units, ttl_s) if ttl_s else slots_wanted(run, what, units)
        again = msgspec.structs.replace(request, keep=True, again=True)
        # As strict as with any other request: an id may be made up.
        found = msgspec.convert(msgspec.to_builtins(again), type(request))
        if not (worker.startswith("=") and 0 < request_id < 2**63):
            raise ValueError("no waiter has such an id")
    except (ValueError, msgspec.ValidationError) as error:
        raise ApiError("NOT_FOUND", f"waiter {name[:100]} not found") from error
    return worker[1:], found, request_id


def _ended(error: ApiError) -> str:
    """How a waiter stands that is no more."""
    return "CANCELLED" if error.code in ("SCOPE_CANCELLED", "DEADLINE_EXCEEDED") else "EXPIRED"


@dataclass(eq=False)
class Waiter:
    """One waiting call. ``token`` and ``secret``: of what it holds once it is signalled."""

    id: str
    access: Access
    door: Door
    pending: Pending
    until_ms: int | None  # on the lease clock
    run: str
    claim: str | None = None  # the Idempotency-Key of the call that has claimed it
    state: str = "WAITING"
    token: int = 0
    secret: str = ""
    timer: Timer | None = field(default=None)


class Waiters:
    """See the module."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiters: dict[tuple[Access, str], Waiter] = {}  # by the caller, too: an id proves nothing
        self._left: dict[tuple[Access, str], Place] = {}  # by those who are not asked for

    async def start(self, access: Access, worker: str, request: Wanted, request_id: int) -> Waiter:
        """Puts a call into its line; returns when it is known whether it has to wait. Raises its refusal."""
        name = _id_of(worker, request, request_id)
        waiter = self._waiters.get((access, name))
        if waiter is None:
            place, until_ms = self._left.pop((access, name), (None, self._until_ms(request)))
            if place is not None:
                left_ms = None if until_ms is None else max(1, until_ms - self._now_ms())
                again: dict[str, Any] = {"again": True, "ticket": place.ticket, "proof": place.proof}
                request = msgspec.structs.replace(request, wait_ms=left_ms, **again)
            door, pending = await self._gateway.start(access, worker, request, request_id)
            waiter = Waiter(name, access, door, pending, until_ms, request.run)
            self._waiters[access, name] = waiter
            pending.reply.add_done_callback(lambda reply: self._answered(waiter, reply))
            self._look_after(waiter)
        elif waiter.pending.request != request:
            raise ApiError("IDEMPOTENCY_CONFLICT", OTHER_REQUEST)
        await asyncio.wait((waiter.pending.reply, waiter.pending.parked), return_when=asyncio.FIRST_COMPLETED)
        if waiter.pending.reply.done():
            try:
                checked(waiter.pending.reply.result())
            except BaseException:
                self._waiters.pop((access, name), None)
                raise
            self._answered(waiter, waiter.pending.reply)
        return waiter

    async def state(self, access: Access, name: str) -> str:
        """How a waiter stands."""
        try:
            waiter = await self.find(access, name)
        except ApiError as error:
            return _ended(error)
        self._look_after(waiter)
        if waiter.state == "SIGNALED":
            view = await self._gateway.ask(access, "", wire.RunsGet(run=waiter.run))
            if isinstance(view, wire.RunView) and view.state != "active":
                return await self.cancel(access, name)
        return waiter.state

    async def find(self, access: Access, name: str) -> Waiter:
        """The waiter of that id. Raises ApiError for what cannot be one, or the refusal of what it waits for."""
        waiter = self._waiters.get((access, name))
        if waiter is None:
            waiter = await self.start(access, *_of_id(name))
        is_held = self._gateway.engine.lease(access.space, waiter.token) is not None
        if waiter.state == "SIGNALED" and not is_held:
            waiter.state = "EXPIRED"
        return waiter

    async def cancel(self, access: Access, name: str) -> str:
        """Its caller has given up; a grant that won the race stands, a promise goes to the next in line."""
        try:
            waiter = await self.find(access, name)
        except ApiError as error:
            return _ended(error)
        if waiter.state == "WAITING":
            waiter.state = "CANCELLED"
            self._gateway.cancel(waiter.door, waiter.pending)
            self._forget_later(waiter)
        elif waiter.state == "SIGNALED":
            waiter.state = "CANCELLED"
            await self._gateway.ask(access, "", wire.Release(token=waiter.token, secret=waiter.secret))
        return waiter.state

    def _answered(self, waiter: Waiter, reply: "asyncio.Future[wire.Reply]") -> None:
        if waiter.state != "WAITING":
            return
        got = None if reply.cancelled() or reply.exception() else reply.result()
        if isinstance(got, wire.LimitTaken):
            waiter.state = "GRANTED"
        elif isinstance(got, wire.SlotsGranted):
            waiter.state, waiter.token, waiter.secret = "SIGNALED", got.token, got.secret
        elif isinstance(got, wire.Error) and got.run is not None:
            waiter.state = "CANCELLED"
        else:
            waiter.state = "EXPIRED"
        if waiter.state == "GRANTED":
            self._waiters.pop((waiter.access, waiter.id), None)
        else:
            self._forget_later(waiter)

    def _look_after(self, waiter: Waiter) -> None:
        """Somebody has just asked for it."""
        if waiter.state == "WAITING":
            self._in(waiter, UNREAD_MS, self._unread)

    def _unread(self, waiter: Waiter) -> None:
        if waiter.state == "WAITING" and waiter.pending.parked.done():
            waiter.state = "EXPIRED"
            key = (waiter.access, waiter.id)
            left = self._left[key] = (waiter.pending.parked.result(), waiter.until_ms)
            self._waiters.pop(key, None)
            self._gateway.cancel(waiter.door, waiter.pending)
            waiter.timer = self._gateway.engine.after(REMEMBERED_MS, lambda: self._forget_place(key, left))

    def _forget_place(self, key: tuple[Access, str], left: Place) -> None:
        if self._left.get(key) is left:  # and not the one that it has left since
            del self._left[key]

    def _until_ms(self, request: Wanted) -> int | None:
        return None if request.wait_ms is None else self._now_ms() + request.wait_ms

    def _now_ms(self) -> int:
        return self._gateway.engine.clock.lease_ms()

    def _forget_later(self, waiter: Waiter) -> None:
        self._in(waiter, REMEMBERED_MS, lambda gone: self._waiters.pop((gone.access, gone.id), None))

    def _in(self, waiter: Waiter, ms: int, work: Callable[[Waiter], object]) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiter.timer = self._gateway.engine.after(ms, lambda: work(waiter))

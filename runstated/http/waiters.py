"""Calls that wait in the line of a limit or of slots, and whose client asks from time to time how they stand.

    limits: WAITING --its units fit--> GRANTED              slots: WAITING --its turn--> SIGNALED --acquire--> CLAIMED
            WAITING --ttl--> EXPIRED                               SIGNALED --not claimed in 10 s--> EXPIRED
            WAITING --cancel, run over--> CANCELLED                WAITING --not asked for in 30 s--> EXPIRED

A waiter is an ordinary parked call of the session of its worker; SIGNALED is its lease, of ten seconds. Waiters live in
memory: one that is not known (after a restart) has expired, and its client stands in line again.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from runstate import wire
from runstated.http.errors import OTHER_REQUEST, ApiError
from runstated.http.gateway import Door, Gateway, Pending, checked
from runstated.store.tx import Access

CLAIM_MS = 10_000
UNREAD_S = 30.0
REMEMBERED_S = 600.0


@dataclass(eq=False)
class Waiter:
    """One waiting call. ``token``: what it holds once it is signalled."""

    id: str
    space: str
    door: Door
    pending: Pending
    needs_reading: bool
    run: str
    claim: str | None = None  # the Idempotency-Key of the call that has claimed it
    state: str = "WAITING"
    token: int = 0
    timer: asyncio.TimerHandle | None = field(default=None)


class Waiters:
    """See the module."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiters: dict[str, Waiter] = {}

    async def start(
        self, access: Access, worker: str, run: str, request: wire.WaitingRequest[Any], request_id: int
    ) -> Waiter:
        """Puts a call into its line; returns when it is known whether it has to wait. Raises its refusal."""
        name = f"{run}_{request_id:x}"
        waiter = self._waiters.get(name)
        if waiter is None:
            door, pending = await self._gateway.start(access, worker, request, request_id)
            needs_reading = isinstance(request, wire.SlotsAcquire)
            waiter = self._waiters[name] = Waiter(name, access.space, door, pending, needs_reading, run)
            pending.reply.add_done_callback(lambda reply: self._answered(waiter, reply))
            self._look_after(waiter)
        elif waiter.pending.request != request:
            raise ApiError("IDEMPOTENCY_CONFLICT", OTHER_REQUEST)
        await asyncio.wait((waiter.pending.reply, waiter.pending.parked), return_when=asyncio.FIRST_COMPLETED)
        if waiter.pending.reply.done():
            try:
                checked(waiter.pending.reply.result())
            except BaseException:
                self._waiters.pop(name, None)
                raise
            self._answered(waiter, waiter.pending.reply)
        return waiter

    async def state(self, access: Access, name: str) -> str:
        """How a waiter stands. One that is not known has expired, or was cancelled if its run is over."""
        waiter = self.find(access, name)
        if waiter is not None and waiter.state != "SIGNALED":
            self._look_after(waiter)
            return waiter.state
        run = name.partition("_")[0] if waiter is None else waiter.run
        try:
            view = await self._gateway.ask(access, "", wire.RunsGet(run=run[:64] or "-"))
        except ApiError:
            return "EXPIRED"
        if not isinstance(view, wire.RunView) or view.state != "active":
            return "CANCELLED"
        return "EXPIRED" if waiter is None else waiter.state

    def find(self, access: Access, name: str) -> Waiter | None:
        waiter = self._waiters.get(name)
        if waiter is None or waiter.space != access.space:
            return None
        if waiter.state == "SIGNALED" and waiter.token not in self._gateway.engine.memory.holds:
            waiter.state = "EXPIRED"
        return waiter

    async def cancel(self, access: Access, name: str) -> str:
        """Its caller has given up; a grant that won the race stands, a promise goes to the next in line."""
        waiter = self.find(access, name)
        if waiter is None:
            return await self.state(access, name)
        if waiter.state == "WAITING":
            waiter.state = "CANCELLED"
            self._gateway.cancel(waiter.door, waiter.pending)
            self._forget_later(waiter)
        elif waiter.state == "SIGNALED":
            waiter.state = "CANCELLED"
            await self._gateway.ask(access, "", wire.Release(token=waiter.token))
        return waiter.state

    def _answered(self, waiter: Waiter, reply: "asyncio.Future[wire.Reply]") -> None:
        if waiter.state != "WAITING":
            return
        got = None if reply.cancelled() or reply.exception() else reply.result()
        if isinstance(got, wire.LimitTaken):
            waiter.state = "GRANTED"
        elif isinstance(got, wire.SlotsGranted):
            waiter.state, waiter.token = "SIGNALED", got.token
        elif isinstance(got, wire.Error) and got.run is not None:
            waiter.state = "CANCELLED"
        else:
            waiter.state = "EXPIRED"
        self._forget_later(waiter)

    def _look_after(self, waiter: Waiter) -> None:
        """Somebody has just asked for it."""
        if waiter.needs_reading and waiter.state == "WAITING":
            self._in(waiter, UNREAD_S, self._unread)

    def _unread(self, waiter: Waiter) -> None:
        if waiter.state == "WAITING":
            waiter.state = "EXPIRED"
            self._gateway.cancel(waiter.door, waiter.pending)
            self._forget_later(waiter)

    def _forget_later(self, waiter: Waiter) -> None:
        self._in(waiter, REMEMBERED_S, lambda gone: self._waiters.pop(gone.id, None))

    def _in(self, waiter: Waiter, seconds: float, work: Any) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiter.timer = asyncio.get_running_loop().call_later(seconds, work, waiter)

"""HTTP requests as sessions of the engine: one session for each key and worker label, open while it is used.

    first request of a label --> session open --no request for IDLE_MS--> away --holds nothing any more--> ended

An HTTP client has no connection whose end would tell of its death, so for its holds the leases decide. A request that
nobody waits for any more is cancelled, unless a repeat of it (the same Idempotency-Key) waits, too.
"""

import asyncio
import hashlib
import secrets
from typing import Any

from runstate import wire
from runstate.wire import PROTOCOL, PROTOCOL_MIN
from runstated.domain.access import Access
from runstated.domain.replies import caller_of
from runstated.engine.engine import Engine
from runstated.host.clock import Timer
from runstated.http.errors import OTHER_REQUEST, ApiError, NotReady, from_wire
from runstated.server.sessions import HelloRefused, Origin, Sessions

IDLE_MS = 60_000


class Pending:
    """A request that was handed to the engine. ``parked`` is set when it has to wait."""

    def __init__(self, request: wire.Request[Any]) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.reply: asyncio.Future[wire.Reply] = loop.create_future()
        self.parked: asyncio.Future[wire.Parked] = loop.create_future()
        self.users = 0
        self.reply.add_done_callback(_look_at)


class Door:
    """One open session, as far as the engine's outbox needs it."""

    def __init__(self, gateway: "Gateway", name: str) -> None:
        self.gateway = gateway
        self.name = name
        self.pending: dict[int, Pending] = {}
        self.timer: Timer | None = None
        self.opened: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()

    def send(self, request_id: int, body: bytes) -> None:
        """A reply, or a push (id 0), of which only "it has to wait" is of use here."""
        if request_id == 0:
            push = wire.decode_push(body)
            if isinstance(push, wire.Parked):
                waits = self.pending.get(push.call)
                if waits is not None and not waits.parked.done():
                    waits.parked.set_result(push)
            return
        found = self.pending.pop(request_id, None)
        if found is not None and not found.reply.done():
            reply = wire.decode_reply(body)
            found.reply.set_result(reply)
            if found.request.replayed and reply.kept and not found.request.keep:
                self.gateway.engine.acknowledge(self.name, (request_id,))  # nobody can repeat it
        self.rest()

    def end(self) -> None:
        """The session has been ended from inside: its key was revoked."""
        self.gateway.forget(self)
        self.fail(ApiError("UNAUTHENTICATED", "the key was revoked"))

    def fail(self, error: Exception) -> None:
        pending, self.pending = list(self.pending.values()), {}
        for each in pending:
            if not each.reply.done():
                each.reply.set_exception(error)

    def rest(self) -> None:
        """With nothing pending, the session is given up after a while."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.pending:
            self.timer = self.gateway.engine.after(IDLE_MS, lambda: self.gateway.leave(self))


class Gateway:
    """See the module. All methods belong to the loop's thread."""

    def __init__(self, engine: Engine, sessions: Sessions) -> None:
        self.engine = engine
        self._sessions = sessions
        self._doors: dict[str, Door] = {}
        self._closing = False

    async def ask(
        self, access: Access, worker: str, request: wire.Request[Any], request_id: int | None = None
    ) -> wire.Reply:
        """The reply. Raises ApiError and NotReady; cancelled, it cancels the request."""
        door, pending = await self.start(access, worker, request, request_id or new_request_id())
        pending.users += 1
        try:
            return checked(await asyncio.shield(pending.reply))
        finally:
            pending.users -= 1
            if not pending.users and not pending.reply.done():
                self.cancel(door, pending)

    async def start(
        self, access: Access, worker: str, request: wire.Request[Any], request_id: int
    ) -> tuple[Door, Pending]:
        """Hands a request to the engine; one that is pending under this id already is joined."""
        if self._closing:
            raise NotReady("the daemon is about to stop")
        if not self.engine.keyring.is_live(access.key):
            raise ApiError("UNAUTHENTICATED", f"the key {access.key} was revoked")
        door = await self._door(access, worker)
        pending = door.pending.get(request_id)
        if pending is None:
            pending = door.pending[request_id] = Pending(request)
            if door.timer is not None:
                door.timer.cancel()
            self.engine.ask(door.name, access, request_id, request)
        elif pending.request != request:
            raise ApiError("IDEMPOTENCY_CONFLICT", OTHER_REQUEST)
        return door, pending

    def cancel(self, door: Door, pending: Pending) -> None:
        """Nobody waits for it any more."""
        for request_id, each in list(door.pending.items()):
            if each is pending:
                del door.pending[request_id]
                self.engine.cancel(door.name, request_id)
        door.rest()

    def keeps_for_s(self, access: Access) -> int | None:
        """For how long answers to a key's calls are kept, when that is less than a day."""
        ms = self.engine.keeps_for.get(caller_of(access.session_name("http", "")))
        return None if ms is None else ms // 1000

    def leave(self, door: Door) -> None:
        """The session has been idle."""
        if not door.pending and self._doors.get(door.name) is door:
            self.forget(door)
            self._sessions.lost(door.name, door)

    def forget(self, door: Door) -> None:
        if self._doors.get(door.name) is door:
            del self._doors[door.name]
        if door.timer is not None:
            door.timer.cancel()

    def close(self) -> None:
        """The daemon is about to stop: clients are told to send the same again."""
        self._closing = True
        for door in list(self._doors.values()):
            self.forget(door)
            door.fail(NotReady("the daemon is about to stop"))

    async def _door(self, access: Access, worker: str) -> Door:
        # Two workers of one label share a session: it is the tokens that tell their holds apart.
        label = hashlib.sha256(worker.encode()).hexdigest()[:24]
        name = access.session_name("http", label)
        door = self._doors.get(name)
        if door is None:
            if self.engine.trouble is not None:  # the session would be opened only when the disk works again
                raise NotReady(f"writes fail: {self.engine.trouble}")
            door = self._doors[name] = Door(self, name)
            first = new_request_id()
            # Programs that do not say who they are show up in `status` as what they are.
            hello = wire.Hello(protocol=PROTOCOL, protocol_min=PROTOCOL_MIN, session=label, worker=worker or "http")
            welcome = door.pending[first] = Pending(hello)
            door.opened = welcome.reply
            try:
                self._sessions.hello(door, first, hello, Origin(0, None, None, "http"), access)
            except HelloRefused as refused:
                self.forget(door)
                raise ApiError(refused.code, str(refused)) from refused
        reply = await asyncio.shield(door.opened)
        if isinstance(reply, wire.Error):
            self.forget(door)
        checked(reply)
        return door


def checked(reply: wire.Reply) -> wire.Reply:
    """The reply, unless it is a refusal: that is raised."""
    if isinstance(reply, wire.Error):
        raise from_wire(reply)
    return reply


def new_request_id() -> int:
    return secrets.randbits(62) + 1


def request_id_of(idempotency_key: str, step: int) -> int:
    """The request id of the n-th request that a call makes of the engine: the same for each repeat of the call."""
    digest = hashlib.sha256(f"{step} {idempotency_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**62 + 1


def _look_at(reply: "asyncio.Future[wire.Reply]") -> None:
    """A failure that nobody fetches is no news."""
    if not reply.cancelled():
        reply.exception()

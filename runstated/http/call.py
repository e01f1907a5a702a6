"""One HTTP call and the table of endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from starlette.requests import Request

from runstate import wire
from runstated.domain.access import Access
from runstated.http.errors import ClientGone
from runstated.http.fields import name_in
from runstated.http.gateway import Gateway, new_request_id, request_id_of
from runstated.http.names import to_iso
from runstated.http.waiters import Waiters, Wanted


class Body(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What a client sends, as JSON or as a query. Unknown fields are ignored."""


class Answer(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What it gets."""


class Nothing(Body, frozen=True):
    """There is nothing to say: `{}` or no body at all."""


class Done(Answer, frozen=True):
    """It is done."""


@dataclass
class Call:
    """A call whose key is good and whose body has the right form."""

    gateway: Gateway
    waiters: Waiters
    access: Access
    request: Request
    path: dict[str, str]
    body: Any
    idempotency_key: str | None
    steps: int = field(default=0)

    async def ask(self, request: wire.Request[Any], worker: str = "") -> Any:
        """The reply of the engine. Raises ApiError, NotReady, and ClientGone when nobody waits for it any more."""
        request, request_id = self.prepare(request)
        asking = self.gateway.ask(self.access, worker, request, request_id)
        if not isinstance(request, wire.WaitingRequest) or request.wait_ms == 0:
            return await asking
        asked = asyncio.ensure_future(asking)
        gone = asyncio.ensure_future(_gone(self.request))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise ClientGone
        finally:
            gone.cancel()
            asked.cancel()

    def now_ms(self) -> int:
        """Wall time."""
        return self.gateway.engine.clock.wall_ms()

    def lease_ends(self, token: int) -> str:
        """When a hold lapses unless it is renewed, as the API spells it."""
        engine = self.gateway.engine
        hold = engine.lease(self.access.space, token)
        return to_iso(self.now_ms() if hold is None else engine.clock.lease_epoch_ms() + hold.expires)

    def steady_ms(self) -> int:
        return self.gateway.engine.clock.steady_ms()

    def named(self) -> str:
        """The name in the path or, where an endpoint has none there, in the body. Raises ApiError."""
        return name_in(self.path["name"]) if "name" in self.path else str(self.body.name)

    def own_name(self, kind: str) -> str:
        """A name for something that its caller has not named: the same for each repeat of this call."""
        key = self.idempotency_key
        return f"{kind}-{request_id_of(f'{self.access.key} {key}', 0) if key else new_request_id():x}"

    def prepare(self, request: wire.Request[Any]) -> tuple[wire.Request[Any], int]:
        """The request as a repeat of this call would send it again, and its id."""
        if self.request.method == "GET" or self.idempotency_key is None:
            return request, new_request_id()
        request_id = request_id_of(self.idempotency_key, self.steps)
        self.steps += 1
        return msgspec.structs.replace(request, keep=True, again=True), request_id

    def prepare_waiter(self, request: Wanted) -> tuple[Wanted, int]:
        """The same for a call that can be asked for by its id: its answer is kept also without an Idempotency-Key."""
        prepared, request_id = self.prepare(request)
        return msgspec.structs.replace(cast("Wanted", prepared), keep=True), request_id


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Endpoint:
    """A row of the table. ``path`` is below `/v1/spaces/{spaceId}`; ``answers``: the body by status of success (None:
    no body)."""

    method: str
    path: str
    body: type[Body]
    answers: dict[int, type[Answer] | None]
    handle: Callable[[Call], Awaitable[tuple[int, Answer | None]]]


TABLE: list[Endpoint] = []

Handler = Callable[[Call], Awaitable[Any]]


def endpoint(
    method: str, path: str, answer: type[Answer], body: type[Body] = Nothing, *, status: int = 200, empty: bool = False
) -> Callable[[Handler], Handler]:
    """Enters a function into the table. It returns the answer's body; None stands for 204, where that is allowed."""

    def enter(function: Handler) -> Handler:
        async def handle(call: Call) -> tuple[int, Answer | None]:
            found: Answer | None = await function(call)
            return (204 if found is None else status), found

        answers: dict[int, type[Answer] | None] = {status: answer, **({204: None} if empty else {})}
        handle.__doc__ = function.__doc__
        TABLE.append(Endpoint(method, path, body, answers, handle))
        return function

    return enter

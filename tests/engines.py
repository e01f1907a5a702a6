"""A real engine on a real file, without sockets: what comes out of it, and a clock that goes by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runstate import wire
from runstated.domain import sessions
from runstated.domain.access import Access
from runstated.engine.engine import Engine
from runstated.engine.entries import Away, Ended, Opened
from runstated.store.sqlite import Store
from tests.clock import ManualClock

PATIENCE_S = 30
_ids = itertools.count(1)  # of requests: a session that is back in a later life uses none of them twice


class Out:
    """Everything that the engine says, in order."""

    def __init__(self) -> None:
        self.replies: dict[tuple[str, int], list[wire.Reply]] = {}
        self.pushes: list[tuple[str, wire.Push]] = []
        self.order: list[tuple[str, int]] = []
        self._changed = asyncio.Event()

    def reply(self, session: str, request_id: int, body: bytes) -> None:
        self.replies.setdefault((session, request_id), []).append(wire.decode_reply(body))
        self.order.append((session, request_id))
        self._changed.set()

    def push(self, session: str, body: bytes) -> None:
        self.pushes.append((session, wire.decode_push(body)))
        self._changed.set()

    async def until(self, *keys: tuple[str, int]) -> None:
        async def wait() -> None:
            while not all(key in self.replies for key in keys):
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), PATIENCE_S)


class Life:
    """One life of a daemon, as far as the engine goes."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock
        self.out = Out()
        self.engine.outbox = self.out
        self._ids = _ids

    async def session(self, name: str, space: str = "default") -> None:
        row = sessions.Session(name, space, f"worker-{name}", "", 1, "python x")
        number = next(self._ids)
        self.engine.submit(Opened(row, number, (), wire.Welcome(protocol=1, version="test", pid=1)))
        self.engine.submit(Away(name, False))
        await self.out.until((name, number))

    def submit(self, session: str, request: wire.Request[Any], space: str = "default") -> tuple[str, int]:
        key = (session, next(self._ids))
        self.engine.ask(session, Access(space=space), key[1], request)
        return key

    async def ask(self, session: str, request: wire.Request[Any], space: str = "default") -> Any:
        return await self.answer(self.submit(session, request, space))

    async def answer(self, key: tuple[str, int]) -> Any:
        await self.out.until(key)
        (reply,) = self.out.replies[key]
        return reply

    async def again(self, key: tuple[str, int], request: wire.Request[Any]) -> Any:
        """Sends a request again under its id; the answer to that."""
        self.out.replies.pop(key, None)
        self.engine.ask(key[0], Access(), key[1], request)
        return await self.answer(key)

    async def run_id(self, session: str = "a", name: str = "job") -> str:
        return str((await self.ask(session, wire.RunsJoin(name=name))).run)

    def die(self, name: str) -> None:
        self.engine.submit(Ended(name, "died"), first=True)

    def told(self, session: str, kind: type) -> list[Any]:
        return [push for name, push in self.out.pushes if name == session and isinstance(push, kind)]

    async def pass_ms(self, ms: int) -> None:
        """Time passes, and what it causes is done."""
        self.clock.pass_ms(ms)
        for _ in range(4):
            await asyncio.sleep(0)
        await self.engine.settle()


@asynccontextmanager
async def life(path: Path, clock: ManualClock | None = None, sync: Any = "normal") -> AsyncIterator[Life]:
    """A daemon's engine from start to close."""
    store = await Store.open(path, sync)
    clock = clock or ManualClock()
    engine = Engine(store, clock)
    await engine.start()
    try:
        yield Life(engine, clock)
    finally:
        await engine.close()
        await store.close()


def play(story: Coroutine[Any, Any, None]) -> None:
    """Runs a story to its end; one that hangs fails."""
    asyncio.run(asyncio.wait_for(story, PATIENCE_S))

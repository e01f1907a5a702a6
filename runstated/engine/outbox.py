"""Where replies and pushes go: to the sessions, as long as these have a connection."""

from __future__ import annotations

import asyncio
from typing import Protocol

from runstated.domain.waits import CallKey

SLICE = 1_000  # replies sent in one turn of the loop, so that 10^5 waiters of one result do not hold up the rest


class Outbox(Protocol):
    """The sessions. What is for one that is away is dropped."""

    def reply(self, session: str, request_id: int, body: bytes) -> None: ...

    def push(self, session: str, body: bytes) -> None: ...


class Nobody:
    """Before anybody can be connected."""

    def reply(self, session: str, request_id: int, body: bytes) -> None:
        """Nobody hears it."""

    def push(self, session: str, body: bytes) -> None:
        """The same."""


def send(loop: asyncio.AbstractEventLoop, outbox: Outbox, calls: list[CallKey], body: bytes) -> None:
    """One answer to all of them."""
    for session, request_id in calls[:SLICE]:
        outbox.reply(session, request_id, body)
    if len(calls) > SLICE:
        loop.call_soon(send, loop, outbox, calls[SLICE:], body)

"""A harness whose disk fails now and then, with an engine and clients that do what they are to do then."""

from __future__ import annotations

import random
import sqlite3

import msgspec

from runstate import wire
from runstated.engine.entries import Ask, Entry, Lost, Reread
from tests.harness import Harness, Request

STATEMENTS_MAX = 40  # of a batch: the one that fails is among the first of so many
KINDS = ("transaction alive", "transaction gone", "after the commit")


class Flaky(Harness):
    """``share`` of the batches fail. Nothing is lost by that: what the daemon itself has to do is done again, and a
    request is sent again under its id."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.failures = 0
        self._rng = random.Random(seed)
        self._kind = ""
        self._left = 0  # statements until one fails; 0: none does
        self.connection.before, self.connection.after = self._before, self._after

    def _before(self, sql: str) -> None:
        if self._left and self._kind != "after the commit":
            self._left -= 1
            if not self._left:
                self._fail()

    def _after(self, sql: str) -> None:
        if self._left and self._kind == "after the commit" and sql == "COMMIT":
            self._left = 0
            self._fail()

    def _fail(self) -> None:
        self.failures += 1
        if self._kind == "transaction gone" and self.connection.in_transaction:
            sqlite3.Connection.execute(self.connection, "ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    def run(self, *entries: Entry) -> None:
        if self._rng.random() < self.share:
            self._kind, self._left = self._rng.choice(KINDS), self._rng.randint(1, STATEMENTS_MAX)
        try:
            super().run(*entries)
        except Lost as lost:
            doubt = [Reread()] if lost.index is None else []
            super().run(*doubt, *(_again(entry) for entry in entries))
        finally:
            self._left = 0

    def deliver(self) -> None:
        refused = [key for keys, reply in self.memory.replies if _is_refused(reply) for key in keys]
        self.memory.replies[:] = [(keys, reply) for keys, reply in self.memory.replies if not _is_refused(reply)]
        super().deliver()
        for session, request_id in refused:
            if session in self.clients:
                client = self.clients[session]
                asked = client.open[request_id]
                ticket = {"ticket": asked.ticket} if isinstance(asked.request, wire.WaitingRequest) else {}
                again = msgspec.structs.replace(asked.request, again=True, **ticket)
                self.run(client.entry(Request(client, request_id, again)))


def _is_refused(reply: wire.Reply) -> bool:
    return isinstance(reply, wire.Error) and reply.retryable


def _again(entry: Entry) -> Entry:
    if not isinstance(entry, Ask):
        return entry
    request = msgspec.structs.replace(entry.request, again=True)
    return Ask(entry.session, entry.access, entry.request_id, request, entry.ticket, entry.arrived)

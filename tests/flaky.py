"""A harness whose disk fails now and then: nothing of a batch is written, or all of it and only the answer is lost."""

from __future__ import annotations

import random
import sqlite3

from runstated.store.database import CommitFailed
from tests.harness import Harness

STATEMENTS_MAX = 12  # of a batch: the one that fails is among the first of so many
KINDS = ("transaction alive", "transaction gone", "after the commit")


class Flaky(Harness):
    """``share`` of the commits fail, and are tried again with all that is owed, as the engine does: nothing is said
    until that is written."""

    def __init__(self, seed: int, share: float) -> None:
        self._kind = ""
        self._left = 0  # statements until one fails; 0: none does
        self._rng = random.Random(seed)
        self.share = 0.0
        self.failures = 0
        super().__init__()
        self.share = share
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

    def commit(self) -> None:
        batch, known = self.turns.take_batch(), self.database.last_batch()
        if self._rng.random() < self.share:
            self._kind, self._left = self._rng.choice(KINDS), self._rng.randint(1, STATEMENTS_MAX)
        try:
            self.database.commit(batch)
        except CommitFailed as failed:
            assert failed.took_place is (self._kind == "after the commit")
            assert self.database.last_batch() == known + bool(failed.took_place)
            self._left = 0
            self.database.batch = self.database.last_batch()
            self.database.commit(batch)  # what is owed: to write it twice does no harm
        finally:
            self._left = 0

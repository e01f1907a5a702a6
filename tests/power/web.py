"""A client of the HTTP API: it takes once keys of its own, and what it was given survives a cut."""

from __future__ import annotations

import http.client
import json
import random
import time
from typing import Any

from tests.daemons import PATIENCE_S
from tests.power.book import Book, Hold
from tests.power.life import Life
from tests.power.machine import Machine
from tests.power.speaker import PAUSE_S, CutOff

HELD_MAX = 4


class Web(Life):
    """It has no session and no connection to lose: the token is all that proves a hold."""

    def __init__(self, name: str, machine: Machine, secret: str, book: Book, rng: random.Random) -> None:
        super().__init__(name, book)
        self.machine, self.rng = machine, rng
        self.count = 0
        self.headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        self.held: dict[str, tuple[str, Hold]] = {}  # by key: the token as text, the hold

    def _act(self) -> None:
        if len(self.held) < HELD_MAX and self.rng.random() < 0.7:
            self._acquire()
        elif self.held:
            self._complete(self.rng.choice(list(self.held)))

    def _come_back(self) -> None:
        """Nothing that it was given is lost."""
        for name, (token, _) in self.held.items():
            status, answer = self._call("/once/renew", key=name, token=token)
            if status != 200:
                self.book.blame(f"{name}, held over HTTP as {token}, is lost: {answer}")

    def _acquire(self) -> None:
        self.count += 1
        name = f"key-{self.name}-{self.book.boot}-{self.count}"
        key = self.book.key(name)
        key.hold = Hold(0, self.name, True, ending=True)  # if no answer comes, it may be held all the same
        status, answer = self._call("/once/acquire", key=name, holder=self.name, holderSession="s")
        if (status, answer.get("state")) != (200, "ACQUIRED"):
            self.book.blame(f"{name}: {status} {answer}")
            return
        hold = Hold(int(answer["token"].partition("-")[0]), self.name, True)
        self.book.give(key, name, hold)
        self.held[name] = answer["token"], hold

    def _complete(self, name: str) -> None:
        token, hold = self.held.pop(name)
        key, result = self.book.key(name), f"{self.book.boot}{self.count:05d}"
        key.offered.add(result)
        self.book.end(hold)
        status, answer = self._call("/once/complete", key=name, token=token, result=int(result))
        with self.book.lock:
            self.book.facts += 1
            key.done = result
        if status != 200:
            self.book.blame(f"{name}: {status} {answer}")

    def _call(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer. Raises CutOff."""
        text = json.dumps({"scopeId": self.book.run, **body})
        repeats = {**self.headers, "idempotency-key": f"{self.name}-{self.rng.getrandbits(64):x}"}
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.machine.http_port, timeout=PATIENCE_S)
            try:
                connection.request("POST", f"/v1/spaces/default{path}", text, repeats)
                response = connection.getresponse()
                status, answer = response.status, json.loads(response.read())
            except (OSError, http.client.HTTPException):
                raise CutOff from None
            finally:
                connection.close()
            if status != 503:
                return status, answer
            time.sleep(PAUSE_S)

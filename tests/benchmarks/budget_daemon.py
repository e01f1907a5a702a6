"""A daemon whose seams are timed from outside: budget.py starts it. The product has no timing code.

    python budget_daemon.py STATE_DIR

Answers each line on standard input with JSON: what each seam has taken since the last line, without the seams that it
called itself. A seam that moves has to be moved here, too: a name that is not there stops the start.
"""

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from runstate import wire
from runstated import main
from runstated.engine.engine import Engine
from runstated.engine.turns import Turns
from runstated.server.server import Connection
from runstated.store.database import Database

READ, DECODE, TAKE, VERB, LEAVE = "read", "decode", "take in", "verb", "engine"
WRITE, COMMIT, SYNC, ENCODE, SEND = "write rows", "commit, unsynced", "commit and fsync", "encode", "send"


class Seams:
    """Times by seam, each without what is inside of another. Commits may run on the writer's thread."""

    def __init__(self) -> None:
        self.open = threading.local()
        self.loop_thread = threading.get_ident()
        self.clear()

    def inner(self) -> list[list[int]]:
        """Wall and CPU of what was called from each open seam of this thread."""
        if not hasattr(self.open, "inner"):
            self.open.inner = []
        return self.open.inner

    def clear(self) -> None:
        self.counts: dict[str, int] = {}
        self.wall_ns: dict[str, int] = {}
        self.cpu_ns: dict[str, int] = {}
        self.sync_ns = 0  # in the open step of the loop
        self.longest_step_ns = 0

    def timed(self, name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            inner = self.inner()
            if not inner and threading.get_ident() == self.loop_thread:
                self.sync_ns = 0
            inner.append([0, 0])
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
                self._note(name if isinstance(name, str) else name(*arguments), taken)

        return timed

    def _note(self, name: str, taken: tuple[int, int]) -> None:
        inner = self.inner()
        inside = inner.pop()
        self.counts[name] = self.counts.get(name, 0) + 1
        self.wall_ns[name] = self.wall_ns.get(name, 0) + taken[0] - inside[0]
        self.cpu_ns[name] = self.cpu_ns.get(name, 0) + taken[1] - inside[1]
        if inner:
            inner[-1][0] += taken[0]
            inner[-1][1] += taken[1]
        if threading.get_ident() != self.loop_thread:
            return
        if name == SYNC:
            self.sync_ns += taken[0]
        if not inner:
            self.longest_step_ns = max(self.longest_step_ns, taken[0] - self.sync_ns)

    def told(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "wall_ns": self.wall_ns,
            "cpu_ns": self.cpu_ns,
            "longest_step_ns": self.longest_step_ns,
            "process_cpu_ns": time.process_time_ns(),
        }


class TimedConnection:
    """SQLite's connection, whose COMMIT is a seam."""

    def __init__(self, connection: Any, seams: Seams) -> None:
        self._connection = connection
        self._commit = seams.timed(lambda statement: SYNC if self.is_durable else COMMIT, connection.execute)
        self.is_durable = True

    def execute(self, statement: str, *arguments: Any) -> Any:
        return self._commit(statement) if statement == "COMMIT" else self._connection.execute(statement, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def wrap(seams: Seams) -> None:
    for owner, name, seam in (
        (Connection, "data_received", READ),
        (Connection, "_go_on", READ),
        (Connection, "send", SEND),
        (wire, "decode_request", DECODE),
        (wire, "encode", ENCODE),
        (Engine, "ask", TAKE),
        (Engine, "_turn", LEAVE),
        (Turns, "run", VERB),
    ):
        setattr(owner, name, seams.timed(seam, getattr(owner, name)))
    made, commit = Database.__init__, Database.commit

    def make(self: Database, connection: Any, **options: Any) -> None:
        made(self, TimedConnection(connection, seams), **options)

    def commit_timed(self: Database, batch: Any, *, durable: bool = True) -> None:
        self.connection.is_durable = durable  # type: ignore[attr-defined]
        commit(self, batch, durable=durable)

    Database.__init__ = make  # type: ignore[method-assign]
    Database.commit = seams.timed(WRITE, commit_timed)  # type: ignore[method-assign]


def answer_lines(seams: Seams) -> None:
    for _ in sys.stdin:
        print(json.dumps(seams.told()), flush=True)
        seams.clear()


def run(state_dir: str) -> None:
    seams = Seams()
    wrap(seams)
    threading.Thread(target=answer_lines, args=(seams,), daemon=True).start()
    sys.argv = ["runstated", "start", "--foreground", "--state-dir", state_dir]
    main.main()


if __name__ == "__main__":
    run(sys.argv[1])

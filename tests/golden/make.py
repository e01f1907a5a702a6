"""Makes the files in this directory that must load for ever. Run it once for a new version; never overwrite one that
has been released: `python -m tests.golden.make v2.db.gz frames.json` from the root of the repository."""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
import sys
import tempfile
from pathlib import Path

from runstate import framing, wire
from runstated.store.sqlite import Store
from tests.harness import Client, Harness
from tests.messages import ALL

HERE = Path(__file__).parent


def make_database(path: Path) -> None:
    """One of everything, in every state, in a file as the daemon leaves it."""
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory, "runstate.db")
        asyncio.run(_create(plain))
        _fill(plain)
        path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))


async def _create(path: Path) -> None:
    await (await Store.open(path)).close()


def _fill(path: Path) -> None:
    h = Harness(path)
    connection: sqlite3.Connection = h.connection
    a, b = h.session("unix/7:default//a"), h.session("unix/5:other//b", space="other")  # as Access.session_name says
    run = a.ask(wire.RunsJoin(name="job", deadline_ms=4_000_000_000_000)).run
    below = a.ask(wire.RunsChild(parent=run, name="below")).run
    over = a.ask(wire.RunsJoin(name="over")).run
    a.ask(wire.RunsEnd(run=over, state="finished"))
    b.ask(wire.RunsJoin(name="job"))
    for key in ("done", "failed", "open", "held"):
        token = a.ask(wire.OnceAcquire(run=run, key=key)).token
        if key == "done":
            a.ask(wire.OnceComplete(run=run, key=key, token=token, result='{"é": 1}'))
        elif key != "held":
            attempts = 1 if key == "failed" else 3
            a.ask(wire.OnceFail(run=run, key=key, token=token, error="E: no", attempts=attempts))
    for key in ("succeeded", "failed", "delayed", "running", "ready"):
        where = below if key == "running" else run
        a.ask(wire.QueuesSend(run=where, queue="q", key=key, input='"in"', attempts=3))
        if key == "ready":
            continue
        (grant,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
        if key == "succeeded":
            a.ask(wire.QueuesComplete(job=grant.job, token=grant.token, result='"out"'))
        elif key != "running":
            a.ask(wire.QueuesFail(job=grant.job, token=grant.token, error="E: no", retry=key == "delayed"))
    _fill_2(b)
    connection.execute("VACUUM")
    h.close()


def _fill_2(b: Client) -> None:
    """The nouns that came with version 2."""
    run = b.ask(wire.RunsJoin(name="job")).run
    b.ask(wire.SlotsAcquire(run=run, pool="gpu", units=2, max=3))
    b.ask(wire.LimitsTake(run=run, limit="api", max=2, per_seconds=86_400))
    b.ask(wire.BudgetsReserve(run=run, budget="llm", amount_minor=40, limit_minor=100))
    b.ask(wire.TimersSleep(run=run, name="fired", after_ms=0))
    b.submit(wire.TimersSleep(run=run, name="pending", after_ms=3_600_000))
    b.submit(wire.BarriersArrive(run=run, name="open", count=2, worker="w"))
    needs = wire.Needs(slots=(wire.UnitsNeeded(name="gpu"),), budgets=(wire.MoneyNeeded(name="llm", reserve_minor=5),))
    members = (wire.NewJob(key="one", input="1"), wire.NewJob(key="two", input="2"))
    b.ask(wire.GroupsSubmit(run=run, queue="g", members=members, attempts=3, needs=needs))
    b.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="g", places=2),)))


def make_frames(path: Path) -> None:
    """One frame of every message, as hexadecimal digits of the whole frame."""
    frames = {name: framing.pack(7, wire.encode(message)).hex() for name, message in ALL.items()}
    path.write_text(json.dumps(frames, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if (HERE / name).exists():
            sys.exit(f"{name} exists: files that were released stay as they are")
        (make_frames if name.endswith(".json") else make_database)(HERE / name)

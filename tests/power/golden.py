"""Databases of older daemons, as they were left after a clean stop. What is in them: tests/golden/make.py."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from pathlib import Path

from runstate.presence import LockInfo
from tests.power.machine import Machine

GOLDEN = Path(__file__).parents[1] / "golden"


def lay_down(directory: Path, version: str) -> None:
    """The database, and the lock file that names it, if daemons of that version did so."""
    database = directory / "runstate.db"
    database.write_bytes(gzip.decompress((GOLDEN / f"{version}.db.gz").read_bytes()))
    connection = sqlite3.connect(database)
    counters = dict(connection.execute("SELECT counter, value FROM counters"))
    connection.close()
    (number,) = (value for counter, value in counters.items() if counter.startswith("instance:"))
    if number > 1:
        belongings = LockInfo(database=f"{number:x}", batch=counters["batch"])
        (directory / "runstated.lock").write_bytes(belongings.encode())


def check_backup(machine: Machine, version: str) -> None:
    """A database that has been upgraded was saved before, whole. To be asked while the power is off."""
    number = int(version.removeprefix("v"))
    copy = machine.place / "golden-copy"
    machine.disk.save(copy)
    connection = sqlite3.connect(copy / "runstate.db")
    is_upgraded = connection.execute("PRAGMA user_version").fetchone()[0] != number
    connection.close()
    if is_upgraded:
        saved = sqlite3.connect(copy / f"runstate.db.{version}")
        assert saved.execute("PRAGMA user_version").fetchone() == (number,)
        assert saved.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        saved.close()
    shutil.rmtree(copy)


def check(machine: Machine) -> None:
    """What was recorded then is there."""
    speaker = machine.local("golden")
    speaker.connect()
    run = speaker.join("job")
    once = {key: speaker.call("once.get", run=run, key=key, wait_ms=0) for key in ("done", "failed", "open")}
    assert once["done"] == {"reply": "once.done", "result": '{"é": 1}'}
    assert (once["failed"]["reply"], once["failed"]["error"]) == ("once.failed", "E: no")
    assert once["open"] == {"reply": "once.open", "attempts": 1}
    states = {}
    for key in ("succeeded", "failed", "ready"):
        job = speaker.call("queues.send", run=run, queue="q", key=key, input="0")["job"]
        states[key] = speaker.call("queues.result", job=job, wait_ms=0)["state"]
    assert states == {key: key for key in states}
    speaker.call("bye")
    speaker.close()
    other = machine.local("golden", space="other")
    other.connect()
    run = other.join("job")
    assert other.call("budgets.get", budget="llm")["limit_minor"] == 100
    assert other.call("timers.sleep", run=run, name="fired", after_ms=10**9, wait_ms=0)["fired"]
    assert other.call("barriers.get", run=run, name="open")["arrivals"] == 1
    other.call("bye")
    other.close()

"""Going back to a backup: nothing is held in it, no number is given twice, nobody else's work is hit."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import runstated
from runstate import paths, wire
from runstated import restore, settings
from runstated.host import lockfile
from runstated.settings import Settings
from runstated.store import backup, schema
from runstated.store.backup import BackupError
from runstated.store.database import CommitFailed, Database
from tests.harness import Client, Harness

CALL = '{"n":1}'


class Place:
    """A state directory, with a daemon without sockets in it now and then."""

    def __init__(self, directory: Path) -> None:
        state = directory / "state"
        state.mkdir(mode=0o700)
        self.config: Settings = settings.load({"state_dir": str(state), "config": None}, {})
        self.saved = directory / "saved.db"

    def daemon(self) -> Harness:
        h = Harness(self.config.database)
        h.connection.execute("INSERT OR IGNORE INTO counters VALUES ('instance:test', 1)")
        return h

    def save(self) -> None:
        backup.save(self.config.database, self.saved, force=True)

    def go_back(self) -> restore.Restored:
        return restore.restore(self.config, self.saved)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def numbers(h: Harness) -> dict[str, int]:
    return dict(h.rows("SELECT counter, value FROM counters WHERE counter NOT LIKE 'instance:%'"))


def hold_everything(a: Client, run: str) -> dict[str, Any]:
    a.ask(wire.SlotsDeclare(pool="gpu", max=1))
    a.ask(wire.BudgetsDeclare(budget="usd", limit_minor=1_000))
    a.ask(wire.QueuesDeclare(queue="q", attempts=3))
    job = a.ask(wire.QueuesSend(run=run, queue="q", key="1", input=CALL, attempts=3)).job
    return {
        "once": a.ask(wire.OnceAcquire(run=run, key="k")),
        "slot": a.ask(wire.SlotsAcquire(run=run, pool="gpu")),
        "money": a.ask(wire.BudgetsReserve(run=run, budget="usd", amount_minor=400)),
        "job": a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(queue="q", run=run, places=1),))).jobs[0],
        "id": job,
    }


def test_all_that_was_held_is_given_back_as_if_all_had_died(place: Place) -> None:
    h = place.daemon()
    run = h.session("a").ask(wire.RunsJoin(name="x")).run
    held = hold_everything(h.clients["a"], run)
    place.save()
    h.close()
    done = place.go_back()
    assert (done.sessions, done.leases) == (1, 4)
    assert done.kept is not None
    assert done.kept.exists()
    h = place.daemon()
    b = h.session("b")
    assert b.ask(wire.RunsJoin(name="x")).run == run
    assert b.ask(wire.SlotsAcquire(run=run, pool="gpu", wait_ms=0)).token > restore.LIFT
    assert b.ask(wire.BudgetsGet(budget="usd")).reserved_minor == 0
    assert b.ask(wire.OnceAcquire(run=run, key="k")).attempt == 1
    (job,) = b.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(queue="q", run=run, places=1),))).jobs
    assert (job.job, job.attempt) == (held["id"], held["job"].attempt + 1)
    assert {"lease.lost", "budget.assumed"} <= set(h.events(run))
    h.check()
    h.close()


def test_who_holds_something_from_after_the_backup_hits_nobody(place: Place) -> None:
    """Its numbers would be given to others otherwise, and what it ends would be theirs."""
    h = place.daemon()
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="x")).run
    place.save()
    later = hold_everything(a, run)
    late_run = a.ask(wire.RunsJoin(name="late")).run
    before = numbers(h)
    h.close()
    place.go_back()
    h = place.daemon()
    a, b = h.session("a"), h.session("b")  # a's process lives on; it knows nothing
    now = hold_everything(b, run)
    given = numbers(h)
    assert [counter for counter in restore.COUNTERS if given[counter] <= before.get(counter, 0)] == []
    b_run = b.ask(wire.RunsJoin(name="late")).run
    assert b_run != late_run
    assert a.beat(*(later[name].token for name in ("once", "slot", "job"))) == [False] * 3
    done = wire.OnceComplete(run=run, key="k", token=later["once"].token, result="1")
    a.refused("LEASE_LOST", done)
    assert not a.ask(wire.Release(token=later["slot"].token)).held
    assert a.ask(wire.QueuesComplete(job=later["id"], token=later["job"].token, result="1")).code == "NOT_FOUND"
    a.refused("NOT_FOUND", wire.RunsGet(run=late_run))
    assert b.beat(*(now[name].token for name in ("once", "slot", "job"))) == [True] * 3
    h.check()
    h.close()


def test_a_second_restore_of_one_backup_gives_no_number_of_the_first_again(place: Place) -> None:
    h = place.daemon()
    h.session("a").ask(wire.RunsJoin(name="x"))
    place.save()
    h.close()
    given: list[str] = []
    for _ in range(3):
        place.go_back()
        h = place.daemon()
        given.append(h.session("a").ask(wire.RunsJoin(name="new")).run)
        h.close()
        for each in place.config.state_dir.glob("*-wal"):
            each.unlink()
        if len(given) == 1:
            place.config.database.rename(place.config.database.with_name("runstate.db.replaced-7"))
    assert len(set(given)) == 3


def test_events_of_the_backup_stay_and_are_read_in_one_page_with_the_next(place: Place) -> None:
    h = place.daemon()
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="x")).run
    kept = h.events(run)
    place.save()
    hold_everything(a, run)
    cursor = a.ask(wire.EventsRead(run=run)).cursor
    h.close()
    place.go_back()
    h = place.daemon()
    h.pass_ms(0)  # what is to be tidied is tidied
    b = h.session("b")
    hold_everything(b, run)
    page = b.ask(wire.EventsRead(run=run))
    types = [event.type for event in page.events]
    assert (types[: len(kept)], types[-1], page.more, page.gap) == (kept, "task.submitted", False, False)
    assert b.ask(wire.EventsRead(run=run, after=cursor)).gap, "what was read after the backup has not happened"
    h.close()


def test_a_key_that_was_revoked_after_the_backup_stays_revoked(place: Place) -> None:
    h = place.daemon()
    owner = h.session("a")
    key, other = (owner.ask(wire.KeysCreate(permissions=("work",))).id for _ in range(2))
    place.save()
    owner.ask(wire.KeysRevoke(key=key))
    h.close()
    place.go_back()
    h = place.daemon()
    assert h.rows("SELECT id FROM keys WHERE revoked_ms IS NULL") == [(other,)]
    h.close()


def test_a_backup_of_an_older_version_is_migrated(place: Place) -> None:
    connection = sqlite3.connect(place.saved, isolation_level=None)
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    for step in schema.STEPS[:2]:
        step(connection)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    assert place.go_back() == restore.Restored(0, 0, None)
    h = place.daemon()
    assert h.value("PRAGMA user_version") == schema.VERSION
    h.close()


def test_nothing_is_touched_while_a_daemon_runs_or_when_the_backup_is_bad(place: Place) -> None:
    h = place.daemon()
    h.session("a").ask(wire.RunsJoin(name="x"))
    h.close()
    before = place.config.database.read_bytes()
    place.saved.write_bytes(before[:-4096])
    for match in ("malformed|damaged", "not a database"):
        with pytest.raises((BackupError, sqlite3.DatabaseError), match=match):
            place.go_back()
        place.saved.write_text("This is no database. " * 1_000)
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        restore.restore(place.config, place.saved.with_name("none"))
    lock = lockfile.acquire(place.config.lock, lockfile.LockInfo(pid=1))
    with pytest.raises(lockfile.LockHeld):
        place.go_back()
    lock.release()
    assert place.config.database.read_bytes() == before
    names = {path.name for path in place.config.state_dir.iterdir()}
    assert names == {paths.DATABASE_NAME, paths.LOCK_NAME}


def test_a_disk_that_gets_full_in_the_middle_is_told_as_such(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    h = place.daemon()
    h.session("a")
    h.close()
    place.save()
    before = place.config.database.read_bytes()

    def is_full(*_: object) -> None:
        raise CommitFailed(sqlite3.OperationalError("database or disk is full"), False)

    monkeypatch.setattr(Database, "commit", is_full)
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        place.go_back()
    assert place.config.database.read_bytes() == before


def test_every_counter_is_lifted() -> None:
    """Whoever adds one adds it there."""
    used = set()
    for path in Path(runstated.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"(?:\.next|\.new_id)\(\"(\w+)\"", path.read_text()))
    assert used | {"epoch", "batch"} == set(restore.COUNTERS)

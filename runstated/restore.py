"""Going back to a backup: the daemon goes on from there, and nobody else does.

    FILE ──copied, checked, migrated──> a new database ──sessions and holds ended, counters lifted──> takes the place of
    the present one, which is kept

Who lives on with something from after the backup (a token, the id of a run or a job) must not meet a new one of that
number. So every counter goes on ``LIFT`` above the highest value that it is known to have had. The holders of tokens
from before it are told that they have lost them: their sessions have ended, as with the death of their processes.

The events of the backup are lifted with their counter: what reads and tidies them takes their numbers for dense, and a
cursor from before the restore is told that there is a gap.
"""

import logging
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import runstate
from runstate import presence
from runstated.domain.answers import Missing
from runstated.domain.numbers import Numbers
from runstated.domain.sessions import SESSIONS
from runstated.domain.waits import Opening
from runstated.engine.entries import Ended
from runstated.engine.spaces import Spaces
from runstated.engine.turns import Turns
from runstated.host import lockfile
from runstated.host.clock import Clock
from runstated.settings import Settings
from runstated.store import backup, files, schema
from runstated.store.backup import BackupError
from runstated.store.database import CommitFailed, Database

log = logging.getLogger(__name__)

LIFT = 2**32
# The daemon's starts are the upper bits of arrival numbers, which only order those who wait.
LIFTS = {"epoch": 2**12}
# Also of those of which the backup has had no number yet.
COUNTERS = ("token", "event", "ledger", "needs", "finish", files.BATCH, *"bjklmpr", *LIFTS)


@dataclass(frozen=True)
class Restored:
    """``kept``: where the database that was there is now, if there was one."""

    sessions: int
    leases: int
    kept: Path | None


def restore(config: Settings, file: Path) -> Restored:
    """Puts the copy of a backup in the place of the database.

    Raises BackupError, lockfile.LockHeld while a daemon runs, OSError, sqlite3.Error; then nothing has changed.
    """
    clock = Clock()
    info = presence.LockInfo(pid=os.getpid(), version=runstate.__version__, started=clock.wall_ms() / 1000)
    lock = lockfile.acquire(config.lock, info)
    try:
        with backup.part_of(config.database) as part:
            with backup.reading(file) as source:
                backup.copy(source, part)
            ended = _make_safe(part, clock, _known(config.database))
            now = files.read(part, with_log=False)
            lock.announce(lock.info.keeping(presence.LockInfo(database=now.id, batch=now.batch)))
            kept = files.put_aside(config.database, clock.wall_ms() // 1000)
            os.rename(part, config.database)
            backup.sync_directory(config.state_dir)
    finally:
        lock.release()
    return Restored(*ended, kept)


@dataclass
class _Known:
    """What is known of the time after the backup."""

    numbers: dict[str, int] = field(default_factory=dict)  # the highest of each counter
    revoked: set[str] = field(default_factory=set)  # keys


def _make_safe(path: Path, clock: Clock, known: _Known) -> tuple[int, int]:
    """Ends all sessions and holds of a database and lifts its numbers; how many of both there were."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        schema.migrate(connection)
        database = Database(connection)
        database.batch = database.last_batch()
        instance = schema.instance(connection) or ""
        spaces = Spaces(Numbers(instance), Opening(clock.lease_ms(), clock.wall_ms()))
        spaces.load(database)
        spaces.numbers.make_secrets()
        leases = sum(len(core.holds.of_token) for core in spaces)
        sessions = list(spaces.space_of)
        _end_all(spaces, database, clock, sessions)
        if any(core.live(SESSIONS) or core.holds.of_token for core in spaces):
            raise BackupError("the sessions and holds of the backup cannot be ended: it is damaged")
        _lift(connection, spaces.numbers, database.batch, known)
        connection.execute("BEGIN IMMEDIATE")
        files.give_id(connection, instance, int(files.make_id(), 16), again=True)  # it is not the one it was
        for key in known.revoked:
            revoke = "UPDATE keys SET revoked_ms = ? WHERE id = ? AND revoked_ms IS NULL"
            connection.execute(revoke, (clock.wall_ms(), key))
        connection.execute("COMMIT")
        return len(sessions), leases
    finally:
        connection.close()


def _end_all(spaces: Spaces, database: Database, clock: Clock, sessions: list[str]) -> None:
    """As when their processes die."""

    def fetch(missing: Missing) -> object:
        row = database.read(missing.table, missing.columns, missing.value)
        return None if row is None else missing.table.made(row)

    turns = Turns(spaces, clock, fetch)
    rest = [Ended(session, "died") for session in sessions]
    while rest:
        rest = rest[turns.run(rest) :]
        try:
            database.commit(turns.take_batch())
        except CommitFailed as failed:
            raise failed.cause from failed
        turns.durable()


def _lift(connection: sqlite3.Connection, numbers: Numbers, batch: int, known: _Known) -> None:
    """Each number goes on above the highest that it is known to have had; so do the events that are kept."""
    present = {**numbers.last, files.BATCH: batch}
    connection.execute("BEGIN IMMEDIATE")
    for counter in COUNTERS:
        now = present.get(counter, 0)
        lifted = max(now, known.numbers.get(counter, 0)) + LIFTS.get(counter, LIFT)
        if counter == "event":
            connection.execute("UPDATE events SET event = event + ?", (lifted - now,))
        connection.execute("INSERT OR REPLACE INTO counters (counter, value) VALUES (?, ?)", (counter, lifted))
    connection.execute("COMMIT")


def _known(database: Path) -> _Known:
    """What the databases say that are replaced or were: a second restore of one backup must not give the numbers of the
    first again, and a key that was revoked stays so. Those that cannot be read are passed over."""
    known = _Known()
    for path in (database, *database.parent.glob(f"{database.name}{files.KEPT}*")):
        if not path.exists() or path.name.endswith(("-wal", "-shm")):
            continue
        try:
            with backup.reading(path) as connection:
                for counter, value in connection.execute("SELECT counter, value FROM counters"):
                    known.numbers[counter] = max(value, known.numbers.get(counter, 0))
                known.revoked |= {
                    key for (key,) in connection.execute("SELECT id FROM keys WHERE revoked_ms IS NOT NULL")
                }
        except sqlite3.Error as error:
            log.info("the numbers of %s are not known: %s", path, error)
    return known

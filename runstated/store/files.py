"""Whether the database's files belong together: at start by what the lock file says of them, later by their inodes.

    runstate.db        the database; the row of its instance holds its id
    runstate.db-wal    what was committed since the last checkpoint: without it the database is silently an older one
    runstate.db-shm    the index of the log, shared by all connections

They are looked at with ``stat`` and through SQLite only: a process that closes a descriptor of a database loses all the
locks that SQLite has on it.
"""

import logging
import os
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from runstate.presence import LockInfo

log = logging.getLogger(__name__)

KEPT = ".replaced-"
BATCH = "batch"  # counter of the commits that changed something
DATABASE_MAGIC = b"SQLite format 3\0"
LOG_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")

GO_ON = (
    "Put the right one back, restore a backup with `runstated restore FILE`, or start with an empty database:"
    " `runstated start --new-database` (files that are in the way are kept under other names)"
)
GO_ON_WITHOUT = "Put the right one back, or use the database as it is: `runstated restore {}`".format


class FilesError(Exception):
    """A file is missing, empty or another's; the message says which, and how to start on purpose."""


@dataclass(frozen=True)
class Content:
    """What a database says of itself. ``id``: "" before it was given one. ``batch``: its last commit."""

    id: str
    batch: int


def log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def index_of(database: Path) -> Path:
    return database.with_name(database.name + "-shm")


def check(database: Path, known: LockInfo | None) -> tuple[int, bool]:
    """Compares the files with what the lock file says of them: the last batch that the database has without its log,
    and whether it has a log.

    Raises FilesError. Nothing is changed: a foreign log would be copied into the database by whoever opens both.
    """
    is_named = known is not None and known.database != "" and not known.fresh
    if not _size(database):
        # A daemon that died before the lock file named databases had one; a log without a database has lost it.
        if is_named or (known is not None and known.socket and not known.fresh) or _size(log_of(database)):
            raise FilesError(
                f"{_missing_or_empty(database)}, but runstated has kept its state there{_last(known)}. {GO_ON}"
            )
        return 0, False
    if known is None or not is_named:
        _check_unnamed(database, known)
        return 0, False
    return _check_named(database, known)


def _check_unnamed(database: Path, known: LockInfo | None) -> None:
    """The first start, one that was cut short, or the first one after a runstated whose lock file named no database."""
    try:
        found = read(database, with_log=_size(log_of(database)) > 0)
    except sqlite3.Error:
        return  # the store says what is wrong with it
    if found.id and (known is None or found.id != known.database):
        raise FilesError(
            f"the lock file beside {database} is missing, empty or another's: it says which database belongs here and"
            f" whether its log is complete. {GO_ON_WITHOUT(database)}"
        )


def _check_named(database: Path, known: LockInfo) -> tuple[int, bool]:
    wal = log_of(database)
    has_log = _is_log(wal)
    foreign = f"{database} is not the database that belongs here (id {known.database}). {GO_ON}"
    if not _is_database(database):
        raise FilesError(foreign)
    alone = found = None
    try:
        alone = read(database, with_log=False)
    except sqlite3.Error:
        pass  # all of it may be in the log, or a copy of the log into it was cut short
    if alone is not None and alone.id not in ("", known.database):
        raise FilesError(foreign)
    # More than we have ever copied from the log: another SQLite has copied all of it, as its last connection does.
    if known.wal and not has_log and (alone is None or alone.batch <= known.batch):
        what = f"{wal} is not the log of a database" if _size(wal) else _missing_or_empty(wal)
        raise FilesError(f"{what}: all that was recorded after batch {known.batch} is in it. {GO_ON_WITHOUT(database)}")
    try:
        found = read(database, with_log=has_log)
    except sqlite3.Error as error:
        raise FilesError(f"{database} cannot be read ({error}). {GO_ON}") from error
    if alone is not None and alone.id and (found.id != alone.id or found.batch < alone.batch):
        raise FilesError(f"{wal} is the log of another or an older database. {GO_ON_WITHOUT(database)}")
    if found.id != known.database:
        raise FilesError(foreign)
    if found.batch < known.batch:
        log.warning(
            "the database ends with batch %d, but batch %d was recorded: the end of its log is lost",
            found.batch,
            known.batch,
        )
    return (alone.batch if alone is not None else known.batch), has_log


def read(database: Path, *, with_log: bool) -> Content:
    """What the file says of itself, with or without what is only in its log. Makes and changes nothing.

    Raises sqlite3.Error.
    """
    how = "mode=ro" if with_log else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"file:{quote(os.fsencode(database))}?{how}", uri=True)
    try:
        rows = dict(
            connection.execute(
                "SELECT counter, value FROM counters WHERE counter = :batch OR counter LIKE 'instance:%'",
                {"batch": BATCH},
            )
        )
    finally:
        connection.close()
    batch = rows.pop(BATCH, 0)
    return Content(to_text(next(iter(rows.values()), 0)), batch)


def to_text(number: int) -> str:
    """The id of a database as text; "" for a file from before databases had one."""
    return f"{number:x}" if number > 1 else ""


def make_id() -> str:
    """An id for a new database."""
    return to_text(2**52 + secrets.randbits(52))


def give_id(connection: sqlite3.Connection, instance: str, number: int, *, again: bool) -> str:
    """The id of a database, given to one that has none (``again``: to any) in the transaction that is open."""
    counter = f"instance:{instance}"
    row = connection.execute("SELECT value FROM counters WHERE counter = :counter", {"counter": counter}).fetchone()
    known = to_text(row[0]) if row else ""
    if known and not again:
        return known
    connection.execute(
        "INSERT INTO counters (counter, value) VALUES (:counter, :value)"
        " ON CONFLICT (counter) DO UPDATE SET value = excluded.value",
        {"counter": counter, "value": number},
    )
    return to_text(number)


def put_aside(database: Path, second: int) -> Path | None:
    """Gives a database other names, which tell the second; its own, None where there was nothing. The database goes
    first: without it, nobody takes what is left for a whole one."""
    kept = database.with_name(f"{database.name}{KEPT}{second}")
    while kept.exists() or log_of(kept).exists():
        second += 1
        kept = database.with_name(f"{database.name}{KEPT}{second}")
    found = False
    for source, target in ((database, kept), (log_of(database), log_of(kept)), (index_of(database), index_of(kept))):
        if source.exists():
            source.rename(target)
            found = True
    return kept if found else None


class Files:
    """The files of an open database, as they were when it was opened. ``is_log_empty``: we ourselves have emptied the
    log."""

    def __init__(self, database: Path) -> None:
        self.database = database
        # As texts: they are looked at before each batch is acknowledged, where paths would cost twice the time.
        names = map(os.fspath, (database, log_of(database), index_of(database)))
        self._known = {name: _identity(name) for name in names}
        self._name = os.fspath(database)
        self._size = _size(database)
        self._copying = 0
        self.is_log_empty = False
        self._log_name = os.fspath(log_of(database))

    def sync_log(self) -> None:
        """Makes sure that the log survives a power cut from here on, if not all that is in it."""
        for path in (log_of(self.database), self.database.parent):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def copying(self, is_on: bool) -> None:
        """A checkpoint begins or ends: only then the database itself changes its size."""
        self._copying += 1 if is_on else -1
        self._size = _size(self.database)

    def lost(self) -> str | None:
        """What became of them, if they are not where and what they were."""
        for name, known in self._known.items():
            try:
                found = os.stat(name)
            except (FileNotFoundError, NotADirectoryError):
                return f"{name} was removed or moved"
            except OSError:
                continue  # the disk, or what is above it: nobody has taken the file away
            if (found.st_dev, found.st_ino) != known:
                return f"{name} was replaced"
            if not found.st_size and not (name == self._log_name and self.is_log_empty):
                return f"{name} was emptied"
            if name == self._name and self._is_cut(found.st_size):
                return f"{name} was cut off"
        return None

    def _is_cut(self, size: int) -> bool:
        return not size or (size < self._size and not self._copying)

    def is_only_log_lost(self) -> bool:
        """Whether all that was committed can still be copied into the database: it is there, and our log, though its
        name is gone, is open."""
        wal = log_of(self.database)
        is_emptied = _identity(wal) == self._known[self._log_name] and not _size(wal) and not self.is_log_empty
        is_there = _identity(self._name) == self._known[self._name] and not self._is_cut(_size(self.database))
        return is_there and not is_emptied


def _is_log(path: Path) -> bool:
    """Whether there is a log that SQLite would read: it takes any other for an empty one."""
    return _beginning(path)[:4] in LOG_MAGIC


def _is_database(path: Path) -> bool:
    """Whether SQLite has written it. To be asked before SQLite has opened it: see the module."""
    return _beginning(path) == DATABASE_MAGIC


def _beginning(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(len(DATABASE_MAGIC))
    except OSError:
        return b""


def _missing_or_empty(path: Path) -> str:
    return f"{path} is {'empty' if path.exists() else 'missing'}"


def _last(known: LockInfo | None) -> str:
    return f" (database {known.database})" if known is not None and known.database else ""


def _identity(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

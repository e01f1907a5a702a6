"""What an error of SQLite's means: the disk (it may pass), what is stored, or a fault of ours."""

from __future__ import annotations

import sqlite3

# Primary result codes; Python names them, and tells which one an error has, from 3.11 on.
NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, BUSY, LOCKED, NOTADB = 7, 8, 10, 11, 13, 14, 5, 6, 26
OF_THE_DISK = frozenset((NOMEM, READONLY, IOERR, FULL, CANTOPEN, BUSY, LOCKED))
UNDECODABLE = "Could not decode to UTF-8"  # sqlite3's own words
NOT_OF_THE_DISK = (UNDECODABLE, "no such ", "near ", "incomplete input", "too many SQL variables")  # without a code


def is_trouble(error: Exception) -> bool:
    """Whether the disk (or another process's lock on the file) refused, and it may work again."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return not str(error).startswith(NOT_OF_THE_DISK) if code is None else code & 0xFF in OF_THE_DISK


def is_full(error: Exception) -> bool:
    """Whether the disk has no room."""
    return "disk is full" in str(error)


def is_damage(error: Exception) -> bool:
    """Whether what is stored cannot be read."""
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (CORRUPT, NOTADB) or str(error).startswith(UNDECODABLE) or "malformed" in str(error)

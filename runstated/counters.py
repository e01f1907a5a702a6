"""Counters: numbers that are never given twice, since each is on disk before anybody hears of it."""

import sqlite3

from runstated.lines import Memory


def write(connection: sqlite3.Connection, memory: Memory) -> None:
    """Writes those that were used, in the transaction that used them."""
    for counter in memory.counters_changed:
        connection.execute(
            "INSERT INTO counters (counter, value) VALUES (:counter, :value)"
            " ON CONFLICT (counter) DO UPDATE SET value = excluded.value",
            {"counter": counter, "value": memory.counters[counter]},
        )

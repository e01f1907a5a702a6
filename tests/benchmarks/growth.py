"""Rates with much in the database, beside an empty one, in turns; memory and start with what is alive."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from statistics import median

import processes
from figures import Figures, measured_in_turns
from processes import Daemon, load
from speed import Bench, crews
from wires import Filler

RUN = "benchmark"  # that of load.py: what is filled in is where the load works
KINDS = {"once-fresh": 4, "slots": 2, "job-cycle": 1}  # each with so many processes
SEED = 20  # things that a client makes before they are copied


def finished(bench: Bench) -> dict[str, Figures]:
    count = int(1_000_000 * bench.scale)

    def fill(served: Daemon) -> None:
        _by_client(served, lambda filler: filler.finished_jobs(SEED))
        _copied(served, count, _copy_jobs)

    with processes.daemon(bench.directory / "state-finished") as served:
        fill(served)
        served.start()
        rates = _beside_empty(bench, served)
        memory = Figures(ours=[processes.resident_mb(served.pid)])
    return {"growth-finished": rates, "rss-finished": memory}


def waiting(bench: Bench) -> dict[str, Figures]:
    """They wait in the very queue that is worked on."""
    count = int(100_000 * bench.scale)
    with processes.daemon(bench.directory / "state-waiting") as served:
        _by_client(served, lambda filler: filler.waiting_jobs(count, "cycle"))
        served.stop()
        started = Figures(ours=[served.start()], note=f"{count} live rows")
        memory = Figures(ours=[processes.resident_mb(served.pid)])
        rates = _beside_empty(bench, served)
    return {"growth-waiting": rates, "rss-waiting": memory, "start-waiting": started}


def ended_runs(bench: Bench) -> dict[str, Figures]:
    count = int(100_000 * bench.scale)
    with processes.daemon(bench.directory / "state-ended") as served:
        _by_client(served, lambda filler: filler.ended_runs(SEED))
        _copied(served, count, _copy_runs)
        served.start()
        return {"growth-ended-runs": _beside_empty(bench, served)}


def limits(bench: Bench) -> dict[str, Figures]:
    return {"growth-limits": _filled_by_client(bench, lambda filler: filler.limits(int(10_000 * bench.scale)))}


def child_runs(bench: Bench) -> dict[str, Figures]:
    """Below the run in which the load works."""
    return {"growth-child-runs": _filled_by_client(bench, lambda filler: filler.child_runs(int(10_000 * bench.scale)))}


def _filled_by_client(bench: Bench, fill: Callable[[Filler], None]) -> Figures:
    with processes.daemon(bench.directory / "state-filled") as served:
        _by_client(served, fill)
        figures = _beside_empty(bench, served)
    for path in sorted(served.state_dir.iterdir()):
        path.unlink()
    return figures


def _by_client(served: Daemon, fill: Callable[[Filler], None]) -> None:
    filler = Filler(served.socket, RUN)
    fill(filler)
    filler.client.close()


# ---------------------------------------------------------------------------------------------------- rates


def _beside_empty(bench: Bench, full: Daemon) -> Figures:
    """The rates of each round as shares of those of an empty database: of the kind of load that has suffered most."""
    work: dict[str, Callable[[], float]] = {}
    with crews() as add:
        for kind, count in KINDS.items():
            for name, served in (("empty", bench.daemon), ("full", full)):
                crew = add(load(kind, served.socket, count))
                work[f"{kind} {name}"] = lambda crew=crew: crew.rate(bench.seconds / 2)
        samples = measured_in_turns(work, bench.rounds)
    shares = {
        kind: [full / empty for full, empty in zip(samples[f"{kind} full"], samples[f"{kind} empty"], strict=True)]
        for kind in KINDS
    }
    worst = min(shares.values(), key=median)
    return Figures(ours=worst, note=", ".join(f"{kind} {median(share):.2f}" for kind, share in shares.items()))


# ---------------------------------------------------------------------------------------------------- copies


def _copied(served: Daemon, count: int, copy: Callable[[sqlite3.Connection, int], None]) -> None:
    """Stops the daemon and copies what a client has made, row by row: the daemon finds what it would have written."""
    served.stop()
    connection = sqlite3.connect(served.state_dir / "runstate.db")
    with connection:
        copy(connection, count)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _copy_jobs(connection: sqlite3.Connection, count: int) -> None:
    new = {"job": "'j' || (1000000000 + i) || '-copy'", "key": "'copy-' || i", "finish": f"{SEED} + i"}
    _copy(connection, "jobs", "state = 'succeeded'", new, count)
    counted = {"jobs": f"jobs + {count}", "finish": f"finish + {count}"}
    _change(connection, "job_counts", "state = 'succeeded'", counted)
    _change(connection, "counters", "counter = 'finish'", {"value": f"value + {count}"})


def _copy_runs(connection: sqlite3.Connection, count: int) -> None:
    run = "'r' || (1000000000 + i) || '-copy'"
    new = {"run": run, "path": f"'/' || {run} || '/'", "name": "'copy-' || i"}
    _copy(connection, "runs", "state = 'finished'", new, count)


def _copy(connection: sqlite3.Connection, table: str, where: str, new: dict[str, str], count: int) -> None:
    """``count`` copies of one row, of which some columns are given by expressions of ``i``."""
    columns = _columns(connection, table)
    values = ", ".join(new.get(column, column) for column in columns)
    connection.execute(
        f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
        f" INSERT INTO {table} ({', '.join(columns)})"
        f" SELECT {values} FROM n, (SELECT * FROM {table} WHERE {where} LIMIT 1)"
    )


def _change(connection: sqlite3.Connection, table: str, where: str, new: dict[str, str]) -> None:
    columns = _columns(connection, table)
    changes = ", ".join(f"{column} = {value}" for column, value in new.items() if column in columns)
    connection.execute(f"UPDATE {table} SET {changes} WHERE {where}")


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]

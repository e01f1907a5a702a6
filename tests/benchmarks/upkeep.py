"""What is paid while nobody calls: death, idleness, start, import, memory, and the leases of many."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path
from statistics import median

import processes
from figures import Figures
from processes import HERE, Process
from speed import Bench

IDLE_S = 31.0
LEASE_MS = 30_000
HOLDERS = 4  # processes of the clients that hold leases


def deaths(bench: Bench) -> dict[str, Figures]:
    """kill -9 of a holder to the start of the next one: milliseconds; the figure of a round is its worst."""
    worst, all_of_them = [], []
    command = [sys.executable, str(HERE / "load.py"), "holder", bench.daemon.socket, "deaths"]
    log = bench.directory / "deaths.log"  # each says that it takes over
    holder, next_one = _first_of(processes.start(command, log), processes.start(command, log))
    for _ in range(bench.rounds):
        taken = []
        for _ in range(bench.deaths):
            time.sleep(0.05)
            killed = time.monotonic_ns()
            holder.kill()
            taken.append((int(processes.hear(next_one)) - killed) / 1e6)
            processes.end(holder)
            holder, next_one = next_one, _waiting(command, log)
        worst.append(max(taken))
        all_of_them += taken
    for process in (holder, next_one):
        process.kill()
        processes.end(process)
    return {"death": Figures(ours=worst, note=f"p50 {median(all_of_them):.1f} ms of {len(all_of_them)} deaths")}


def _first_of(one: Process, other: Process) -> tuple[Process, Process]:
    """The one that runs the function, and the one that waits."""
    for process in (one, other):
        processes.hear_ready(process)
    ready, _, _ = select.select([one.stdout, other.stdout], [], [], processes.PATIENCE_S)
    first, second = (one, other) if one.stdout in ready else (other, one)
    processes.hear(first)
    return first, second


def _waiting(command: list[str], log: Path) -> Process:
    """One more that waits; a takeover by a newcomer would measure its start."""
    process = processes.start(command, log)
    processes.hear_ready(process)
    time.sleep(0.1)
    return process


def idle(bench: Bench) -> dict[str, Figures]:
    """A daemon of its own that nobody speaks to."""
    with processes.daemon(bench.directory / "state-idle") as served:
        pid, seconds = served.pid, IDLE_S if bench.scale == 1 else 1.0
        time.sleep(1)
        before, cpu = processes.switches(pid), processes.cpu_s(pid)
        time.sleep(seconds)
        wakes = (processes.switches(pid) - before) * 30 / seconds
        note = f"{(processes.cpu_s(pid) - cpu) / seconds * 100:.3f} % of a core; a timer may count 2: wait and wake"
        return {
            "idle": Figures(ours=[wakes], note=note),
            "rss-idle": Figures(ours=[processes.resident_mb(pid)]),
        }


def starts(bench: Bench) -> dict[str, Figures]:
    """Each warm: a first round is not counted. The floor is a Python that does nothing."""
    served = processes.Daemon(bench.directory / "state-starts")
    where = {"RUNSTATED_STATE_DIR": str(served.state_dir)}
    times: dict[str, list[float]] = {"floor": [], "start": [], "status": [], "import": []}
    for n in range(bench.rounds + 1):
        taken = {
            "floor": processes.timed_ms([sys.executable, "-c", "pass"]),
            "start": served.start(),
            "status": processes.timed_ms([sys.executable, "-m", "runstate_cli", "status"], **where),
            "import": processes.timed_ms([sys.executable, "-c", "import runstate"]),
        }
        served.stop()
        if n:
            for name, value in taken.items():
                times[name].append(value)
    floor = times.pop("floor")
    times["import"] = [max(0.0, taken - base) for taken, base in zip(times["import"], floor, strict=True)]
    return {name: Figures(ours=samples, floor=floor) for name, samples in times.items()}


def leases(bench: Bench) -> dict[str, Figures]:
    """Clients that hold a lease of 30 s each and beat as our client does: percent of a core that the daemon takes."""
    count, seconds = int(1_000 * max(bench.scale, 0.1)), 20.0 if bench.scale == 1 else 1.0
    with processes.daemon(bench.directory / "state-leases") as served:
        command = [sys.executable, HERE / "load.py", "leases", served.socket, f"{count // HOLDERS}:{seconds + 5}"]
        holders = [processes.start(command) for _ in range(HOLDERS)]
        for holder in holders:
            processes.hear_ready(holder)
        time.sleep(1)
        shares = []
        for _ in range(bench.rounds):
            before, began = processes.cpu_s(served.pid), time.monotonic()
            time.sleep(seconds / bench.rounds)
            shares.append((processes.cpu_s(served.pid) - before) / (time.monotonic() - began) * 100)
        for holder in holders:
            processes.end(holder)
    return {"leases": Figures(ours=shares, note=f"{count} clients, {os.cpu_count()} cores")}

"""The daemon's own budget: microseconds a request, by what it does with them.

    python tests/benchmarks/budget.py [--quick] [--load NAME]...

The daemon is ours, wrapped from outside by budget_daemon.py. Wall time, since the fsync is waited for; in brackets CPU.
A timer costs some 0.5 us a seam, which is in the seam around it: look at shares and at before and after.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import processes
from processes import HERE, Crew, Process, load

# In the order in which a request comes by; "rest" is the loop itself, the sockets' reads, and the timers.
SEAMS = ("read", "decode", "take in", "verb", "engine", "write rows", "commit, unsynced", "commit and fsync")
OUT = ("encode", "send")
LOADS = {  # kind: processes, and requests of a cycle
    "once-fresh": (8, 2),
    "once-done": (8, 1),
    "slots": (4, 2),
    "job-cycle": (2, 3),
    "send": (2, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--load", action="append", choices=LOADS, metavar="NAME")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 5.0
    with tempfile.TemporaryDirectory(prefix="runstated-benchmark-") as directory:
        state = Path(directory) / "state"
        daemon = processes.start([sys.executable, HERE / "budget_daemon.py", state], Path(directory) / "log")
        try:
            socket = state / "runstated.sock"
            processes.wait_for(socket.exists, "the daemon")
            for kind in options.load or LOADS:
                _show(kind, *_measured(daemon, kind, str(socket), seconds))
        finally:
            processes.end(daemon)


def _measured(daemon: Process, kind: str, socket: str, seconds: float) -> tuple[dict, dict, float]:
    """What the daemon tells before and after a load, and how many requests came between."""
    count, each = LOADS[kind]
    crew = load(kind, socket, count, RUNSTATE_CACHE="0")
    try:
        crew.rate(seconds / 5)  # warm
        time.sleep(0.1)
        before = _told(daemon)
        requests = _cycles(crew, seconds) * each
        return before, _told(daemon), requests
    finally:
        crew.stop()


def _told(daemon: Process) -> dict:
    processes.say(daemon, "tell")
    return json.loads(processes.hear(daemon))


def _cycles(crew: Crew, seconds: float) -> int:
    return sum(answer["cycles"] for answer in crew.ask(f"cycles {seconds}"))


def _show(kind: str, before: dict, after: dict, requests: float) -> None:
    cpu_us = (after["process_cpu_ns"] - before["process_cpu_ns"]) / 1000 / requests
    turns = after["counts"].get("verb", 0)
    commits = after["counts"].get("write rows", 0)
    print(f"\n{kind}: {requests:.0f} requests in {turns} turns and {commits} commits; us a request, wall (CPU)")
    timed_us = 0.0
    for seam in (*SEAMS, *OUT):
        wall, cpu = (after[what].get(seam, 0) / 1000 / requests for what in ("wall_ns", "cpu_ns"))
        timed_us += cpu
        print(f"    {seam:18} {wall:8.1f} ({cpu:.1f})")
    print(f"    {'rest':18} {'':8} ({cpu_us - timed_us:.1f})")
    print(f"    {'CPU in all':18} {'':8} ({cpu_us:.1f})")
    print(f"    longest step of the loop without its fsync: {after['longest_step_ns'] / 1e6:.2f} ms", flush=True)


if __name__ == "__main__":
    main()

"""Prints the speed table: ours beside the floor and the peers, medians of interleaved rounds, goals met or missed.

    python tests/benchmarks/table.py [--quick] [--row NAME]... [--keep NAME] [--no-peers]

Measures the runstated that this Python has. Look at ratios: absolute figures differ from machine to machine.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

import floors
import peer_servers as peers
import processes
import rows
from figures import OPEN, Figures, Goal
from rows import ROWS, Row
from speed import Bench


def main(names: Sequence[str] = ()) -> None:
    """Measures and shows rows: those that the command line names, else ``names``, else all."""
    options = _options()
    chosen = options.row or names
    wanted = [row for row in ROWS if not chosen or row.name in chosen]
    began = time.time()
    if options.peers and (missing := peers.missing_packages()):
        print(f"some peers are left out; to have them: apt-get install {' '.join(missing)}")
    found: dict[str, Figures] = {}
    with _bench(options) as bench:
        machine = [_machine(bench)]
        for row in wanted:
            if row.name not in found:
                found |= row.measure(bench)
            _show(row, found[row.name])
        machine.append(_machine(bench))
    print(f"\n{time.time() - began:.0f} s")
    if options.keep:
        _keep(options.keep, {row.name: found[row.name] for row in wanted}, machine)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds, small databases: does it run?")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--keep", metavar="NAME", help="write the figures to kept/NAME.json")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    return parser.parse_args()


@contextlib.contextmanager
def _bench(options: argparse.Namespace) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runstated-benchmark-")))
        echo = stack.enter_context(processes.echo_server(directory))
        served = stack.enter_context(processes.daemon(directory / "state"))
        bench = Bench(directory, echo, served, peers.Servers(directory, stack), with_peers=options.peers)
        if options.quick:
            bench.make_quick()
        yield bench


def _machine(bench: Bench) -> dict[str, float]:
    """How the machine does now: figures of a busy one mean little. Shown before and after."""
    commits, client = floors.Commits(bench.directory), floors.EchoClient(bench.echo)
    found = {
        "load": round(os.getloadavg()[0], 2),
        "echo_ms": round(_p50(client.echo), 3),
        "commit_ms": round(_p50(commits.commit), 3),
    }
    shown = "load {load}, an echo takes {echo_ms} ms, a commit with fsync {commit_ms} ms (p50)"
    print(f"\nthe machine: {shown.format(**found)}", flush=True)
    return found


def _p50(work: Callable[[], object]) -> float:
    times = []
    for _ in range(100):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    return median(times)


# ---------------------------------------------------------------------------------------------------- showing


def _show(row: Row, figures: Figures) -> None:
    print(f"\n{row.name:15} {row.what}", flush=True)
    if not figures.ours:
        print(f"{'':15} ours: {figures.absent.get('ours', 'nothing was measured')}")
        return
    ours = median(figures.ours)
    print(f"{'':15} {'ours':20} {_shown(figures.ours, row.unit)}   on disk: {row.fsyncs or '-'}")
    if figures.floor:
        print(
            f"{'':15} {'floor':20} {_shown(figures.floor, row.unit)}   ours is {ours / median(figures.floor):.3f} of it"
        )
    for name, samples in sorted(figures.peers.items(), key=lambda item: -median(item[1])):
        peer = peers.BY_NAME[name]
        facts = f"fsync {peer.fsyncs}" + (f", keeps results: {peer.keeps}" if peer.keeps else "")
        print(f"{'':15} {name:20} {_shown(samples, row.unit)}   ours is {ours / median(samples):.2f} of it; {facts}")
    for name, why in figures.absent.items():
        print(f"{'':15} {name:20} {why}")
    if figures.note:
        print(f"{'':15} {figures.note}")
    for word, goal in (("target", row.target), ("stretch", row.stretch)):
        if goal is not None:
            print(f"{'':15} {word:20} {goal.text}: {_verdict(goal, figures)}")


def _shown(samples: list[float], unit: str) -> str:
    digits = 0 if median(samples) >= 100 else 2
    low, high = min(samples), max(samples)
    return f"{median(samples):10,.{digits}f} {unit:3} ({low:,.{digits}f} to {high:,.{digits}f})"


def _verdict(goal: Goal, figures: Figures) -> str:
    verdict = goal.reached(figures)
    return "nothing to compare with" if verdict == OPEN else verdict


def _keep(name: str, found: dict[str, Figures], machine: list[dict[str, float]]) -> None:
    """Adds to what is kept under the name: rows can be measured one by one."""
    rows.KEPT.mkdir(exist_ok=True)
    path = rows.KEPT / f"{name}.json"
    about = {
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine, before and after": machine,
    }
    before = {row: figures.stored() for row, figures in rows.kept(name).items()}
    stored = before | {row: figures.stored() for row, figures in found.items()}
    path.write_text(json.dumps({"about": about, "rows": stored}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Rates and waits of what people call: once, slots, jobs. Each function measures one group of rows in turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import peer_servers as peers
import processes
from figures import Figures, measured_in_turns
from peer_servers import Peer
from processes import Crew, load


@dataclass
class Bench:
    """What the measurements share: a daemon, an echo server, the servers of the peers, and how long to measure."""

    directory: Path
    echo: str
    daemon: processes.Daemon
    servers: peers.Servers
    rounds: int = 5
    seconds: float = 1.0
    jobs: int = 2_000
    trips: int = 100
    turns: int = 40
    deaths: int = 10
    scale: float = 1.0  # of what databases are filled with
    with_peers: bool = True

    def make_quick(self) -> None:
        self.rounds, self.seconds, self.scale = 2, 0.2, 0.01
        self.jobs, self.trips, self.turns, self.deaths = 200, 20, 10, 2


NOT_YET = "not there yet"


def client_has(word: str) -> bool:
    """Whether the client's source speaks of something: rows of features that are still being built ask for it."""
    spec = importlib.util.find_spec("runstate")
    place = Path(spec.origin).parent
    return any(word in path.read_text() for path in place.glob("*.py") if path.name != "wire.py")


# ---------------------------------------------------------------------------------------------------- once


def once_fresh(bench: Bench) -> dict[str, Figures]:
    return {"once-fresh": _beside_echo(bench, "echo2", "once-fresh", 8)}


def once_done(bench: Bench) -> dict[str, Figures]:
    """RUNSTATE_CACHE=0: asked from the daemon each time."""
    return {
        f"once-done-{count}": _beside_echo(bench, "echo", "once-done", count, RUNSTATE_CACHE="0") for count in (1, 8)
    }


def once_known(bench: Bench) -> dict[str, Figures]:
    if not client_has("RUNSTATE_CACHE"):
        return {"once-known": Figures(absent={"ours": NOT_YET})}
    return {"once-known": _beside_echo(bench, "echo", "once-known", 8)}


def _beside_echo(bench: Bench, floor: str, ours: str, count: int, **environment: str) -> Figures:
    with crews() as add:
        base = add(load(floor, bench.echo, count))
        mine = add(load(ours, bench.daemon.socket, count, **environment))
        work = {"floor": lambda: base.rate(bench.seconds), "ours": lambda: mine.rate(bench.seconds)}
        return Figures(**measured_in_turns(work, bench.rounds))


@contextlib.contextmanager
def crews() -> Iterator[Callable[[Crew], Crew]]:
    """Stops every crew that was added."""
    with contextlib.ExitStack() as stack:

        def add(crew: Crew) -> Crew:
            stack.callback(crew.stop)
            return crew

        yield add


# ---------------------------------------------------------------------------------------------------- slots, turns


def slots(bench: Bench) -> dict[str, Figures]:
    """Four processes that want the same unit; the echo floor is two requests, entering and leaving."""
    with crews() as add:
        base = add(load("echo2", bench.echo, 4))
        mine = add(load("slots", bench.daemon.socket, 4))
        work = {"floor": lambda: base.rate(bench.seconds), "ours": lambda: mine.rate(bench.seconds)}
        others, absent = _peer_crews(bench, peers.LOCKS, add, 4)
        work |= {name: lambda crew=crew: crew.rate(bench.seconds) for name, crew in others.items()}
        return {"slots": _figures(measured_in_turns(work, bench.rounds), absent)}


def hand_overs(bench: Bench) -> dict[str, Figures]:
    """From the release of one process to the return of the next one's call, p50 of each round."""
    with crews() as add:
        mine = add(load("slots", bench.daemon.socket, 2))
        base = add(load("fsync", f"{bench.directory} {bench.echo}"))
        work = {"floor": lambda: _trips(base, bench.turns), "ours": lambda: _passed(mine, bench.turns)}
        others, absent = _peer_crews(bench, peers.HAND_OVERS, add, 2)
        work |= {name: lambda crew=crew: _passed(crew, bench.turns) for name, crew in others.items()}
        return {"slot-hand-over": _figures(measured_in_turns(work, bench.rounds), absent)}


def waiters(bench: Bench) -> dict[str, Figures]:
    """From the end of a function or handler to the return of who waits for its result, in another process."""
    with crews() as add:
        add(load("work-slow", bench.daemon.socket))
        base = add(load("fsync", f"{bench.directory} {bench.echo}"))
        once = add(load("once-waiter", bench.daemon.socket, 2))
        job = add(load("job-waiter", bench.daemon.socket))
        work = {
            "floor": lambda: _trips(base, bench.turns),
            "once": lambda: _once_waited(once, bench.turns),
            "job": lambda: _job_waited(job, bench.turns),
        }
        samples = measured_in_turns(work, bench.rounds)
    return {f"{kind}-waiter": Figures(ours=samples[kind], floor=samples["floor"]) for kind in ("once", "job")}


def _passed(crew: Crew, turns: int) -> float:
    """Two processes take turns: the milliseconds between the end of one's turn and the beginning of the other's."""
    answers = crew.ask(f"turns {turns}")
    all_turns = sorted((begun, ended, who) for who, answer in enumerate(answers) for begun, ended in answer)
    gaps = [(next_one[0] - this[1]) / 1e6 for this, next_one in itertools.pairwise(all_turns) if this[2] != next_one[2]]
    return median(gaps)


def _once_waited(crew: Crew, turns: int) -> float:
    one, other = crew.ask(f"turns {turns}")
    waits = []
    for first, second in zip(one, other, strict=True):
        runner, waiter = (first, second) if first[0] is not None else (second, first)
        waits.append((waiter[1] - runner[0]) / 1e6)
    return median(waits)


def _job_waited(crew: Crew, turns: int) -> float:
    return median((returned - ended) / 1e6 for ended, returned in crew.ask(f"turns {turns}")[0])


def _trips(crew: Crew, count: int) -> float:
    """The median of a round, in milliseconds."""
    return median(crew.ask(f"trips {count}")[0])


# ---------------------------------------------------------------------------------------------------- jobs


def jobs(bench: Bench) -> dict[str, Figures]:
    """Jobs a second from the first submission to the last result, and one job's round trip; two workers everywhere."""
    rates, trips, absent = {}, {}, {}
    with contextlib.ExitStack() as stack:
        work = {f"ours {kind}": _our_jobs(bench, kind, stack) for kind in ("work-async", "work")}
        if bench.with_peers:
            for peer in peers.QUEUES:
                try:
                    work[peer.name] = _peer_jobs(bench, peer, stack)
                except (LookupError, RuntimeError) as error:
                    absent[peer.name] = str(error)
        for _ in range(bench.rounds):
            for name, (rate, trip) in work.items():
                rates.setdefault(name, []).append(rate())
                trips.setdefault(name, []).append(trip())
    ahead = (
        {"ours": NOT_YET} if not client_has("ahead=") else {"ours": "see jobs-plain: workers take ahead by themselves"}
    )
    return {
        "jobs-async": _of_jobs(rates, "ours work-async", absent),
        "jobs-plain": _of_jobs(rates, "ours work", absent),
        "jobs-ahead": Figures(absent=ahead),
        "job-trip": _of_jobs(trips, "ours work", absent),
    }


def _our_jobs(bench: Bench, kind: str, stack: contextlib.ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
    """A daemon for each kind of worker: they would take one another's jobs."""
    served = stack.enter_context(processes.daemon(bench.directory / f"state-{kind}"))
    workers = load(kind, served.socket, peers.WORKERS)
    stack.callback(workers.stop)
    producer = load("jobs", served.socket)
    stack.callback(producer.stop)
    producer.ask("trips 20")
    return _job_rate(producer, bench.jobs), lambda: _trips(producer, bench.trips)


def _peer_jobs(
    bench: Bench, peer: Peer, stack: contextlib.ExitStack
) -> tuple[Callable[[], float], Callable[[], float]]:
    stack.enter_context(peers.workers(peer, bench.servers))
    producer = peers.crew(peer, bench.servers)
    stack.callback(producer.stop)
    producer.ask("trips 20")  # its workers are up
    return _job_rate(producer, bench.jobs), lambda: _trips(producer, bench.trips)


def _job_rate(producer: Crew, count: int) -> Callable[[], float]:
    return lambda: count / producer.ask(f"jobs {count}")[0]["seconds"]


def _of_jobs(samples: dict[str, list[float]], ours: str, absent: dict[str, str]) -> Figures:
    others = {name: taken for name, taken in samples.items() if not name.startswith("ours")}
    return Figures(ours=samples[ours], peers=others, absent=dict(absent))


def sends(bench: Bench) -> dict[str, Figures]:
    """Submissions alone, in jobs a second."""
    found = {"send": _beside_echo(bench, "echo", "send", 1)}
    with crews() as add:
        try:
            many = add(load("send-many", bench.daemon.socket))
        except RuntimeError:
            return {**found, "send-many": Figures(absent={"ours": NOT_YET})}
        work = {"ours": lambda: many.rate(bench.seconds) * 1000}
        return {**found, "send-many": Figures(**measured_in_turns(work, bench.rounds))}


# ---------------------------------------------------------------------------------------------------- peers


def _peer_crews(bench: Bench, wanted: tuple[Peer, ...], add: Callable, count: int) -> tuple[dict, dict]:
    """The crews of those that are here, and why others are not."""
    there, absent = {}, {}
    for peer in wanted if bench.with_peers else ():
        try:
            there[peer.name] = add(peers.crew(peer, bench.servers, count))
        except (LookupError, RuntimeError) as error:
            absent[peer.name] = str(error)
    return there, absent


def _figures(samples: dict[str, list[float]], absent: dict[str, str]) -> Figures:
    floor, ours = samples.pop("floor"), samples.pop("ours")
    return Figures(ours=ours, floor=floor, peers=samples, absent=absent)

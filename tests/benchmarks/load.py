"""One process of load in our own environment: a kind of work, done when a line on standard input says so.

    python load.py KIND ADDRESS TAG

It prints "ready", then answers each line with one line of JSON:

    cycles SECONDS     {"cycles", "seconds"}: the work in a loop for so long
    jobs COUNT         {"seconds"}: COUNT jobs from the first submission to the last result
    trips COUNT        [ms, ...]: one unit of work after the other
    turns COUNT        [[begun, ended], ...] in ns: one's turns in what two processes pass to and fro
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import floors
import wires

import runstate
from runstate import wire

PAUSE_S = 0.005  # of a holder, until the other one certainly waits
LEASE_MS = 30_000
GATHERED = 100  # jobs of one gather: the most that there may be

Work = Callable[[int], object]


# ---------------------------------------------------------------------------------------------------- kinds of cycles


def echo(address: str, tag: str) -> Work:
    client = floors.EchoClient(address)
    return lambda n: client.echo()


def echo2(address: str, tag: str) -> Work:
    client = floors.EchoClient(address)
    return lambda n: (client.echo(), client.echo())


def fsync(address: str, tag: str) -> Work:
    """A commit, then an echo: what a durable answer costs at least. The address is "DIRECTORY ECHO"."""
    directory, socket = address.split()
    commits, client = floors.Commits(Path(directory)), floors.EchoClient(socket)

    def commit(n: int) -> float:
        time.sleep(2 * PAUSE_S)  # after a pause everything is slower than in a loop
        began = time.perf_counter()
        commits.commit()
        client.echo()
        return (time.perf_counter() - began) * 1000

    return commit


def once_fresh(address: str, tag: str) -> Work:
    @runstate.once
    def fresh(name: str, number: int) -> int:
        return number

    fresh(tag, -1)
    return lambda n: fresh(tag, n)


def once_done(address: str, tag: str) -> Work:
    """Asked from the daemon each time, also where the client could know."""

    @runstate.once
    def settled(name: str) -> int:
        return 1

    settled("x")
    return lambda n: settled("x")


def slots(address: str, tag: str) -> Work:
    pool = runstate.slots("pool", max=1)

    def enter(n: int) -> None:
        with pool:
            pass

    return enter


def send(address: str, tag: str) -> Work:
    queue = runstate.queue(f"sent-{tag}", attempts=1)
    return lambda n: queue.send({"n": n})


def send_many(address: str, tag: str) -> Work:
    """A thousand jobs a cycle."""
    queue = runstate.queue(f"many-{tag}", attempts=1)
    if not hasattr(queue, "send_many"):
        raise SystemExit("not there yet")
    return lambda n: queue.send_many([{"n": n * 1000 + k} for k in range(1000)])


def jobs(address: str, tag: str) -> Work:
    """A job's round trip. Its workers are ``work``, ``work-async`` and ``work-ahead``."""
    queue = runstate.queue("jobs", attempts=5)
    return lambda n: queue({"tag": tag, "n": n})


def job_cycle(address: str, tag: str) -> Work:
    """Submit, admit and complete one job over the bare wire: what the daemon does for a job, and little else."""
    client = wires.WireClient(address)
    run = client.ask(wire.RunsJoin(name="benchmark")).run
    client.ask(wire.QueuesDeclare(queue="cycle", attempts=5))
    source = (wire.AdmitFrom(run=run, queue="cycle"),)

    def cycle(n: int) -> None:
        client.ask(wire.QueuesSend(run=run, queue="cycle", key=f"{tag}-{n}", input="1"))
        (job,) = client.ask(wire.QueuesAdmit(queues=source)).jobs
        client.ask(wire.QueuesComplete(job=job.job, token=job.token, result="1"))

    return cycle


CYCLES = {
    "echo": echo,
    "echo2": echo2,
    "fsync": fsync,
    "once-fresh": once_fresh,
    "once-done": once_done,
    "once-known": once_done,
    "slots": slots,
    "send": send,
    "send-many": send_many,
    "jobs": jobs,
    "job-cycle": job_cycle,
}


# ---------------------------------------------------------------------------------------------------- turns of two


def slot_turns(count: int) -> list:
    """When this process had entered, and when it began to leave."""
    pool, turns = runstate.slots("turns", max=1), []
    for _ in range(count):
        with pool:
            begun = time.monotonic_ns()
            time.sleep(PAUSE_S)
            turns.append([begun, time.monotonic_ns()])
    return turns


def once_turns(count: int) -> list:
    """When the function ended in this process (None: in the other one), and when its caller had the result."""
    ended: list[int] = []

    @runstate.once
    def slow(number: int) -> int:
        time.sleep(2 * PAUSE_S)
        ended.append(time.monotonic_ns())
        return number

    turns, base = [], _round()
    for n in range(count):
        ended.clear()
        slow(base + n)
        turns.append([ended[0] if ended else None, time.monotonic_ns()])
    return turns


_rounds = 0


def _round() -> int:
    """A number that both processes come to, since both are told the same."""
    global _rounds
    _rounds += 1
    return _rounds * 1_000_000


def job_turns(count: int) -> list:
    """When the handler ended, in the worker, and when the waiter had the result."""
    queue, base, turns = runstate.queue("slow-jobs", attempts=1), _round(), []
    for n in range(count):
        ended = queue({"n": base + n})["ended"]
        turns.append([ended, time.monotonic_ns()])
    return turns


TURNS = {"slots": slot_turns, "once-waiter": once_turns, "job-waiter": job_turns}


# ---------------------------------------------------------------------------------------------------- workers


def serve(kind: str) -> None:
    """A worker until the end of the process."""
    if kind == "work-async":

        @runstate.queue("jobs", attempts=5, concurrency=16)
        async def handle(input: dict) -> dict:
            return input
    elif kind == "work-slow":

        @runstate.queue("slow-jobs", attempts=1)
        def slow(input: dict) -> dict:
            time.sleep(2 * PAUSE_S)
            return {"ended": time.monotonic_ns()}
    else:

        @runstate.queue("jobs", attempts=5)
        def work(input: dict) -> dict:
            return input

    print("ready", flush=True)
    runstate.serve()


def hold(tag: str) -> None:
    """Runs a function that never ends as soon as nobody else does, and says when it began."""

    @runstate.once(attempts=100)
    def work(name: str) -> None:
        print(time.monotonic_ns(), flush=True)
        time.sleep(600)

    print("ready", flush=True)
    work(tag)


# ---------------------------------------------------------------------------------------------------- the loop


def cycles(work: Work, seconds: float, first: int) -> dict[str, float]:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work(first + count)
        count += 1
    return {"cycles": count, "seconds": time.perf_counter() - began}


def trips(work: Work, count: int, first: int) -> list[float]:
    """Milliseconds of each; work that times itself returns them."""
    times = []
    for n in range(count):
        began = time.perf_counter()
        own = work(first + n)
        taken = (time.perf_counter() - began) * 1000
        times.append(own if isinstance(own, float) else taken)
    return times


def many_jobs(count: int, first: int, tag: str) -> dict[str, float]:
    """Submits jobs, then asks for each result."""
    queue = runstate.queue("jobs", attempts=5)
    inputs = [{"tag": tag, "n": first + n} for n in range(count)]
    began = time.perf_counter()
    sent = queue.send_many(inputs) if hasattr(queue, "send_many") else [queue.send(input) for input in inputs]
    for job, input in zip(sent, inputs, strict=True):
        assert job.result() == input
    return {"seconds": time.perf_counter() - began}


def gathered_jobs(count: int, first: int, tag: str) -> dict[str, float]:
    """Submits jobs in gathers of a hundred, two at a time, so that the workers never wait for the producer."""
    queue = runstate.queue("jobs", attempts=5)
    parts = [
        [{"tag": tag, "n": n} for n in range(at, min(at + GATHERED, first + count))]
        for at in range(first, first + count, GATHERED)
    ]

    async def one_after_the_other(mine: list) -> None:
        for part in mine:
            assert len(await queue.agather(part)) == len(part)

    async def all_of_them() -> None:
        await asyncio.gather(*(one_after_the_other(parts[n::2]) for n in range(2)))

    began = time.perf_counter()
    asyncio.run(all_of_them())
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    kind, address, tag = sys.argv[1:4]
    if kind not in ("echo", "echo2", "fsync"):
        runstate.configure(base_url=f"unix://{address}", run="benchmark")
    if kind.startswith("work"):
        serve(kind)
    elif kind == "holder":
        hold(tag)
    elif kind == "leases":
        count, seconds = tag.split(":")
        wires.hold_leases(address, int(count), LEASE_MS, float(seconds))
    else:
        answer_lines(kind, address, tag)


def answer_lines(kind: str, address: str, tag: str) -> None:
    work = CYCLES[kind](address, tag) if kind in CYCLES else lambda n: None
    first = 0
    print("ready", flush=True)
    for line in sys.stdin:
        told, amount = line.split()
        first += 1_000_000
        if told == "cycles":
            answer: object = cycles(work, float(amount), first)
        elif told == "trips":
            answer = trips(work, int(amount), first)
        elif told == "turns":
            answer = TURNS[kind](int(amount))
        else:
            answer = {"jobs": many_jobs, "gathered": gathered_jobs}[told](int(amount), first, tag)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

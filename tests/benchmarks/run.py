"""Prints the rows of the speed table: ours beside the floor, measured in turns, as ratios of one run.

    python tests/benchmarks/run.py [--quick] [--million]

Ratios, because absolute figures differ from machine to machine; interleaved, because they differ from minute to minute.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import floors  # noqa: E402

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, seconds = (3, 0.5) if quick else (8, 1.0)
    with tempfile.TemporaryDirectory() as name, _echo_server(Path(name)) as echo, _daemon(Path(name)) as daemon:
        directory = Path(name)
        print(f"{'what':58} {'floor':>12} {'ours':>12} {'ratio':>7}  target")
        _throughput("once already done, 1 process", "echo", "once-done", 1, rounds, seconds, echo, daemon, ">= 0.55")
        _throughput("once already done, 8 processes", "echo", "once-done", 8, rounds, seconds, echo, daemon, ">= 0.40")
        _throughput(
            "fresh once (2 echoes = 1), 8 processes", "echo2", "once-fresh", 8, rounds, seconds, echo, daemon, ">= 0.10"
        )
        _waits(directory, echo, daemon, 50 if quick else 200)
        _takeovers(daemon, 20 if quick else 100)
        _starts(directory, 5 if quick else 15)
        _idle(daemon, 35.0)
        if "--million" in sys.argv:
            _memory(daemon)


# ---------------------------------------------------------------------------------------------------- throughput


def _throughput(
    what: str, floor: str, ours: str, count: int, rounds: int, seconds: float, echo: str, daemon: str, target: str
) -> None:
    pairs = []
    for n in range(rounds):
        pairs.append((_load(floor, count, seconds, echo, f"{n}"), _load(ours, count, seconds, daemon, f"{n}")))
    ratio = statistics.median(mine / base for base, mine in pairs)
    _row(what, statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs), ratio, target, "/s")


def _load(kind: str, count: int, seconds: float, address: str, tag: str) -> float:
    """Cycles per second of ``count`` processes together."""
    command = [sys.executable, str(HERE / "load.py"), kind, str(seconds), address]
    processes = [
        subprocess.Popen(
            [*command, f"{tag}-{n}-{os.getpid()}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
        )
        for n in range(count)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    return sum(result["cycles"] / result["seconds"] for result in results)


# ---------------------------------------------------------------------------------------------------- waits


WAITER = """
import sys, time, runstate
runstate.configure(base_url="unix://" + sys.argv[1], run="waits")
q = runstate.queue("waits", attempts=1)
for line in sys.stdin:
    job = q.send({"n": line})
    print(job.id, flush=True)
    job.result()
    print(time.monotonic_ns(), flush=True)
"""

FINISHER = """
import sys, time, runstate
from runstate import wire
client = runstate.Runstate(base_url="unix://" + sys.argv[1], run="waits")
run = client.run_id()
connection = client._connection()
for line in sys.stdin:
    answer = connection.call(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="waits"),)))
    jobs = answer.reply.jobs
    time.sleep(0.01)
    print(time.monotonic_ns(), flush=True)
    connection.call(wire.QueuesComplete(job=jobs[0].job, token=jobs[0].token, result="1"))
"""


def _waits(directory: Path, echo: str, daemon: str, rounds: int) -> None:
    """From the request that ends a wait to the waiter's return, in another process. The floor is measured in turns with
    it, after a pause of the same length: after a pause everything is slower than in a loop."""
    waiter, finisher = (_python(source, daemon) for source in (WAITER, FINISHER))
    commits, client = floors.Commits(directory), floors.EchoClient(echo)
    taken, base = [], []
    for n in range(rounds):
        time.sleep(0.01)
        began = time.perf_counter()
        commits.commit()
        client.echo()
        base.append((time.perf_counter() - began) * 1000)
        _say(waiter, str(n))
        _hear(waiter)
        _say(finisher, "go")
        asked = int(_hear(finisher))
        taken.append((int(_hear(waiter)) - asked) / 1e6)
    for process in (waiter, finisher):
        process.communicate()
    floor = statistics.median(base)
    median = statistics.median(taken)
    print(
        f"{'a wait that ends, to its return (fsync + round trip), p50':58} {floor:9.2f} ms {median:9.2f} ms {'':>7}",
        end="",
    )
    print(f"  < 1 ms above: {median - floor:+.2f} ms")


HOLDER = """
import sys, time, runstate
runstate.configure(base_url="unix://" + sys.argv[1], run=sys.argv[2])
@runstate.once(attempts=100)
def work():
    print(time.monotonic_ns(), flush=True)
    time.sleep(600)
work()
"""


def _takeovers(daemon: str, rounds: int) -> None:
    """kill -9 of a holder to the start of the next one."""
    run = f"takeovers-{os.getpid()}"
    line = [_python(HOLDER, daemon, run) for _ in range(2)]
    holder, next_one = line if _first(line) == 0 else line[::-1]
    taken = []
    for _ in range(rounds):
        began = time.monotonic_ns()
        holder.send_signal(signal.SIGKILL)
        taken.append((int(_hear(next_one)) - began) / 1e6)
        holder.communicate()
        holder, next_one = next_one, _python(HOLDER, daemon, run)
        time.sleep(0.3)  # until it stands in line; a takeover by a newcomer would measure its start
    for process in (holder, next_one):
        process.kill()
        process.communicate()
    taken.sort()
    print(f"{'kill -9 of a holder to the next start':58} {'':>12} p50 {taken[len(taken) // 2]:5.1f} ms {'':>6}", end="")
    print(f"  p99 < 100 ms: {taken[min(len(taken) - 1, int(len(taken) * 0.99))]:.1f} ms, worst {taken[-1]:.1f} ms")


def _first(processes: list["subprocess.Popen[bytes]"]) -> int:
    import select

    streams = [process.stdout for process in processes]
    ready, _, _ = select.select(streams, [], [], 30)
    ready[0].readline()  # type: ignore[union-attr]
    return streams.index(ready[0])


# ---------------------------------------------------------------------------------------------------- starts, idle


def _starts(directory: Path, rounds: int) -> None:
    """`runstated start` to ready, `runstate status`, `import runstate`, each warm."""
    state = directory / "starts"
    environment = {**ENVIRONMENT, "RUNSTATED_STATE_DIR": str(state)}
    commands = {
        "`runstated start` to ready": ([sys.executable, "-m", "runstated", "start"], "< 400 ms"),
        "`runstate status`": ([sys.executable, "-m", "runstate_cli", "status"], "< 250 ms"),
        "`import runstate`": ([sys.executable, "-c", "import runstate"], "< 80 ms"),
    }
    times: dict[str, list[float]] = {what: [] for what in commands}
    bare: list[float] = []
    for _ in range(rounds):
        bare.append(_timed([sys.executable, "-c", "pass"], environment))
        for what, (command, _) in commands.items():
            times[what].append(_timed(command, environment))
        _timed([sys.executable, "-m", "runstated", "stop"], environment)
    base = statistics.median(bare)
    for what, (_, target) in commands.items():
        median = statistics.median(times[what])
        own = median - base if "import" in what else median
        print(f"{what:58} {base:9.0f} ms {own:9.0f} ms {'':>7}  {target}")


def _timed(command: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return (time.perf_counter() - began) * 1000


def _idle(daemon: str, seconds: float) -> None:
    """Voluntary context switches of the daemon's threads while nothing happens, and its memory."""
    pid = _daemon_pid(daemon)
    before = _switches(pid)
    time.sleep(seconds)
    wakes = (_switches(pid) - before) * 30 / seconds
    print(f"{'idle: wake-ups in 30 s':58} {'':>12} {wakes:12.1f} {'':>7}  <= 1 (a timer may count 2: wait and wake)")
    print(f"{'resident memory':58} {'':>12} {_resident_mb(pid):9.1f} MB {'':>7}  < 60 MB")


def _memory(daemon: str) -> None:
    """Resident memory after 10^3 and after 10^6 finished jobs (takes a good while)."""
    from runstate import Runstate, wire

    client = Runstate(base_url=f"unix://{daemon}", run="memory")
    run, connection, done = client.run_id(), client._connection(), 0
    for goal in (1_000, 1_000_000):
        while done < goal:
            for n in range(done, done + 200):
                connection.call(wire.QueuesSend(run=run, queue="memory", key=f"k{n}", input="1", attempts=1))
            left = 200
            while left:
                admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="memory", places=left),))
                answer = connection.call(admit)
                for job in answer.reply.jobs:
                    connection.call(wire.QueuesComplete(job=job.job, token=job.token, result="1"))
                    left -= 1
            done += 200
        print(f"{f'resident memory after {goal} jobs':58} {'':>12} {_resident_mb(_daemon_pid(daemon)):9.1f} MB")


def _switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _daemon_pid(daemon: str) -> int:
    return int(json.loads((Path(daemon).parent / "runstated.lock").read_text())["pid"])


# ---------------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def _echo_server(directory: Path) -> Iterator[str]:
    path = str(directory / "echo.sock")
    process = subprocess.Popen([sys.executable, str(HERE / "floors.py"), path], stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield path
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _daemon(directory: Path) -> Iterator[str]:
    state = directory / "state"
    command = [sys.executable, "-m", "runstated"]
    options = ["--state-dir", str(state)]
    subprocess.run([*command, "start", *options], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        yield str(state / "runstated.sock")
    finally:
        subprocess.run([*command, "stop", *options], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)


def _python(source: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    )


def _say(process: "subprocess.Popen[bytes]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _row(what: str, floor: float, ours: float, ratio: float, target: str, unit: str) -> None:
    print(f"{what:58} {floor:10.0f}{unit} {ours:10.0f}{unit} {ratio:7.2f}  {target}", flush=True)


if __name__ == "__main__":
    main()

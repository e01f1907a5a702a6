"""One process of load, told what to do on the command line; says how it went as one JSON line.

    python load.py KIND SECONDS ADDRESS TAG

It prints "ready", waits for a line on its standard input, works for so long, and prints its result.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import floors

import runstate


def _cycles(work: Callable[[int], object], seconds: float) -> dict[str, float]:
    ends, count, began = time.perf_counter() + seconds, 0, time.perf_counter()
    while time.perf_counter() < ends:
        work(count)
        count += 1
    return {"cycles": count, "seconds": time.perf_counter() - began}


def _prepare(kind: str, address: str, tag: str) -> Callable[[int], object]:
    if kind == "echo":
        client = floors.EchoClient(address)
        return lambda n: client.echo()
    if kind == "echo2":
        client = floors.EchoClient(address)
        return lambda n: (client.echo(), client.echo())
    runstate.configure(base_url=f"unix://{address}", run="benchmark")

    @runstate.once
    def settled(name: str) -> int:
        return 1

    @runstate.once
    def fresh(name: str, number: int) -> int:
        return number

    if kind == "once-done":
        settled("x")
        return lambda n: settled("x")
    if kind == "once-fresh":
        fresh(tag, -1)
        return lambda n: fresh(tag, n)
    raise SystemExit(f"unknown kind {kind}")


def main() -> None:
    kind, seconds, address, tag = sys.argv[1:5]
    work = _prepare(kind, address, tag)
    for n in range(100):
        work(-n - 2)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_cycles(work, float(seconds))), flush=True)


if __name__ == "__main__":
    main()

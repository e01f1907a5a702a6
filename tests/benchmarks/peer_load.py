"""One process of a peer: load or a worker, in the environment of the peers. Knows nothing of us.

    python peer_load.py KIND ADDRESS TAG

It prints "ready" and answers lines as load.py does; a kind that begins with "work-" is a worker until it is ended.
ADDRESS: a socket, a directory or a file, as the peer needs it.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

PAUSE_S = 0.005
LOOK_S = 0.002  # between two looks for a result, where a peer cannot wait for it
LONG_S = 60
SWEEP_S = 2.5  # saq's workers sweep at their start, and abort jobs that come then

Work = Callable[[int], object]


# ---------------------------------------------------------------------------------------------------- locks


def _redis(address: str):
    import redis

    return redis.Redis(unix_socket_path=address)


def setnx(address: str, tag: str) -> Work:
    """The least that a lock on Redis is: it cannot wait, it looks again."""
    server = _redis(address)

    def enter(n: int) -> None:
        while not server.set("lock", tag, nx=True, px=30_000):
            pass
        server.delete("lock")

    return enter


def redis_lock(address: str, tag: str) -> Work:
    lock = _redis(address).lock("lock-object", timeout=30, sleep=0.0005)

    def enter(n: int) -> None:
        with lock:
            pass

    return enter


def blpop_turns(address: str, count: int) -> list:
    """A token in a list: who takes it has it. The first of the two puts it there."""
    server, turns = _redis(address), []
    if server.set("token-there", 1, nx=True):
        server.rpush("token", "t")
    for _ in range(count):
        server.blpop(["token"], LONG_S)
        begun = time.monotonic_ns()
        time.sleep(PAUSE_S)
        turns.append([begun, time.monotonic_ns()])
        server.rpush("token", "t")
    return turns


# ---------------------------------------------------------------------------------------------------- queues


class Saq:
    def __init__(self, address: str) -> None:
        from redis.asyncio import Redis
        from saq.queue.redis import RedisQueue

        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.queue = RedisQueue(Redis(unix_socket_path=address), name="jobs")
        self.loop.run_until_complete(self.queue.connect())
        time.sleep(SWEEP_S)

    def work(self) -> None:
        from saq import Worker

        async def handle(context: dict, *, n: int) -> dict:
            return {"n": n}

        handle.__name__ = handle.__qualname__ = "handle"
        worker = Worker(self.queue, functions=[("handle", handle)], concurrency=10)
        self.loop.run_until_complete(worker.start())

    def trip(self, n: int) -> None:
        answer = self.loop.run_until_complete(self.queue.apply("handle", n=n, timeout=LONG_S, poll_interval=0.005))
        assert answer == {"n": n}

    def many(self, first: int, count: int) -> None:
        inputs = [{"n": n} for n in range(first, first + count)]
        answers = self.loop.run_until_complete(self.queue.map("handle", inputs, timeout=LONG_S, poll_interval=0.02))
        assert answers == inputs


class Dramatiq:
    def __init__(self, address: str) -> None:
        import peer_dramatiq

        self.handle = peer_dramatiq.handle

    def trip(self, n: int) -> None:
        assert self.handle.send(n).get_result(block=True, timeout=LONG_S * 1000) == {"n": n}

    def many(self, first: int, count: int) -> None:
        sent = [self.handle.send(n) for n in range(first, first + count)]
        for n, message in enumerate(sent, first):
            assert message.get_result(block=True, timeout=LONG_S * 1000) == {"n": n}


class Huey:
    """On Redis results are waited for; on SQLite both sides look every few milliseconds."""

    def __init__(self, address: str) -> None:
        from huey import RedisHuey, SqliteHuey

        self.on_redis = address.endswith(".sock")
        if self.on_redis:
            self.huey = RedisHuey("jobs", url=f"unix://{address}", notify_result=True)
        else:
            self.huey = SqliteHuey("jobs", filename=address, fsync=True)
        self.handle = self.huey.task(name="handle")(lambda n: {"n": n})

    def work(self) -> None:
        patience = {} if self.on_redis else {"initial_delay": LOOK_S, "max_delay": LOOK_S}
        self.huey.create_consumer(workers=1, worker_type="thread", periodic=False, **patience).run()

    def _result(self, sent) -> dict:
        if self.on_redis:
            return sent.get(blocking=True, timeout=LONG_S, backoff=1, max_delay=0.01)
        while (answer := sent.get()) is None:
            time.sleep(LOOK_S)
        return answer

    def trip(self, n: int) -> None:
        assert self._result(self.handle(n)) == {"n": n}

    def many(self, first: int, count: int) -> None:
        sent = [self.handle(n) for n in range(first, first + count)]
        for n, one in enumerate(sent, first):
            assert self._result(one) == {"n": n}


class PgQueuer:
    """Keeps no results: what is waited for is that the job has ended."""

    def __init__(self, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.address = address
        self.watcher = None

    async def _driver(self):
        import asyncpg
        from pgqueuer.db import AsyncpgDriver

        return AsyncpgDriver(await asyncpg.connect(host=self.address, user="postgres", database="postgres"))

    def work(self) -> None:
        async def serve() -> None:
            from pgqueuer import PgQueuer as Worker

            worker = Worker(await self._driver())

            @worker.entrypoint("handle")
            async def handle(job) -> None:
                json.loads(job.payload)

            await worker.run(batch_size=10)

        self.loop.run_until_complete(serve())

    async def _run(self, inputs: list[int]) -> None:
        from datetime import timedelta

        from pgqueuer.core.completion import CompletionWatcher
        from pgqueuer.queries import Queries

        if self.watcher is None:
            self.queries = Queries(await self._driver())
            driver = await self._driver()
            self.watcher = CompletionWatcher(driver, queries=Queries(driver), debounce=timedelta(milliseconds=2))
            await self.watcher.__aenter__()
        count = len(inputs)
        ids = await self.queries.enqueue(["handle"] * count, [b"%d" % n for n in inputs], [0] * count)
        ends = await asyncio.gather(*[self.watcher.wait_for(id) for id in ids])
        assert all(end == "successful" for end in ends)

    def trip(self, n: int) -> None:
        self.loop.run_until_complete(self._run([n]))

    def many(self, first: int, count: int) -> None:
        self.loop.run_until_complete(self._run(list(range(first, first + count))))


class Beanstalkd:
    """Has no results either; the worker puts one into a tube of the producer's, as people do."""

    def __init__(self, address: str) -> None:
        import greenstalk

        self.client = greenstalk.Client(address, use="jobs", watch="results")
        self.worker = greenstalk.Client(address, use="results", watch="jobs")

    def work(self) -> None:
        while True:
            job = self.worker.reserve()
            self.worker.put(job.body)
            self.worker.delete(job)

    def _take(self) -> int:
        job = self.client.reserve(timeout=LONG_S)
        self.client.delete(job)
        return json.loads(job.body)["n"]

    def trip(self, n: int) -> None:
        self.many(n, 1)

    def many(self, first: int, count: int) -> None:
        for n in range(first, first + count):
            self.client.put(json.dumps({"n": n}))
        assert {self._take() for _ in range(count)} == set(range(first, first + count))


QUEUES = {"saq": Saq, "dramatiq": Dramatiq, "huey": Huey, "pgqueuer": PgQueuer, "beanstalkd": Beanstalkd}
CYCLES = {"setnx": setnx, "redis-lock": redis_lock}


# ---------------------------------------------------------------------------------------------------- the loop


def cycles(work: Work, seconds: float) -> dict[str, float]:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work(count)
        count += 1
    return {"cycles": count, "seconds": time.perf_counter() - began}


def trips(queue, count: int, first: int) -> list[float]:
    times = []
    for n in range(first, first + count):
        began = time.perf_counter()
        queue.trip(n)
        times.append((time.perf_counter() - began) * 1000)
    return times


def many_jobs(queue, count: int, first: int) -> dict[str, float]:
    began = time.perf_counter()
    queue.many(first, count)
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    kind, address, tag = sys.argv[1:4]
    if kind.startswith("work-"):
        queue = QUEUES[kind.removeprefix("work-")](address)
        print("ready", flush=True)
        queue.work()
        return
    queue = QUEUES[kind](address) if kind in QUEUES else None
    work = CYCLES[kind](address, tag) if kind in CYCLES else None
    first = 0
    print("ready", flush=True)
    for line in sys.stdin:
        told, amount = line.split()
        first += 1_000_000
        if told == "cycles":
            answer: object = cycles(work, float(amount))
        elif told == "turns":
            answer = blpop_turns(address, int(amount))
        else:
            answer = {"jobs": many_jobs, "trips": trips}[told](queue, int(amount), first)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

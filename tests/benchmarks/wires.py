"""A client of the bare wire: many requests in one go. It fills databases, and stands for clients that cost nothing."""

from __future__ import annotations

import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from runstate import framing, wire

PART = 250  # requests in one go
PLACES = 1_000  # jobs of one admission: the most that the wire allows


class WireClient:
    """One connection with a session of its own. Leases need ``beat``."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.splitter = framing.Splitter()
        self.numbers = itertools.count(1)
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            protocol_min=wire.PROTOCOL_MIN,
            session=uuid.uuid4().hex,
            worker="benchmark",
            pid=os.getpid(),
        )
        self.ask(hello)

    def ask(self, request: wire.Request) -> wire.Reply:
        return self.ask_all([request])[0]

    def ask_all(self, requests: Sequence[wire.Request]) -> list[wire.Reply]:
        """The replies in the order of the requests. Raises RuntimeError for a refusal."""
        asked = [next(self.numbers) for _ in requests]
        frames = zip(asked, requests, strict=True)
        self.socket.sendall(b"".join(framing.pack(number, wire.encode(request)) for number, request in frames))
        replies: dict[int, wire.Reply] = {}
        while len(replies) < len(asked):
            data = self.socket.recv(1 << 20)
            if not data:
                raise RuntimeError("the daemon closed the connection")
            replies |= {number: wire.decode_reply(body) for number, body in self.splitter.feed(data) if number}
        answers = [replies[number] for number in asked]
        for answer in answers:
            if isinstance(answer, wire.Error):
                raise RuntimeError(f"{answer.code}: {answer.message}")
        self._acknowledge([number for number in asked if replies[number].kept])
        return answers

    def _acknowledge(self, calls: list[int]) -> None:
        for part in _parts(calls, wire.LISTED_MAX):
            self.socket.sendall(framing.pack(0, wire.encode(wire.Ack(calls=tuple(part)))))

    def beat(self, tokens: Sequence[int]) -> None:
        self.ask(wire.Beat(tokens=tuple(tokens)))

    def close(self) -> None:
        self.ask(wire.Bye())
        self.socket.close()


class Filler:
    """Puts many things into a daemon, as clients would."""

    def __init__(self, path: str, run: str) -> None:
        self.client = WireClient(path)
        self.run = self.client.ask(wire.RunsJoin(name=run)).run

    def waiting_jobs(self, count: int, queue: str = "cycle") -> None:
        self.client.ask(wire.QueuesDeclare(queue=queue, attempts=5))
        for part in _parts(range(count), PLACES):
            self.client.ask_all(list(self._sends(queue, part)))

    def _sends(self, queue: str, numbers: Sequence[int]) -> Iterator[wire.Request]:
        """In few requests where the wire knows how."""
        if not hasattr(wire, "QueuesSendMany"):
            for n in numbers:
                yield wire.QueuesSend(run=self.run, queue=queue, key=f"filled-{n}", input=f'{{"n":{n}}}')
            return
        for part in _parts(numbers, wire.SENT_MAX):
            members = tuple(wire.NewJob(key=f"filled-{n}", input=f'{{"n":{n}}}') for n in part)
            yield wire.QueuesSendMany(run=self.run, queue=queue, members=members)

    def finished_jobs(self, count: int, queue: str = "finished") -> None:
        self.client.ask(wire.QueuesDeclare(queue=queue, attempts=5))
        for part in _parts(range(count), PLACES):
            self.client.ask_all(list(self._sends(queue, part)))
            left = len(part)
            while left:
                source = wire.AdmitFrom(run=self.run, queue=queue, places=left)
                granted = self.client.ask(wire.QueuesAdmit(queues=(source,))).jobs
                done = [wire.QueuesComplete(job=job.job, token=job.token, result=job.input) for job in granted]
                self.client.ask_all(done)
                left -= len(granted)

    def ended_runs(self, count: int) -> None:
        for part in _parts(range(count), PART):
            runs = self.client.ask_all([wire.RunsJoin(name=f"ended-{n}") for n in part])
            self.client.ask_all([wire.RunsEnd(run=run.run, state="finished") for run in runs])

    def limits(self, count: int) -> None:
        for part in _parts(range(count), PART):
            self.client.ask_all([wire.LimitsDeclare(limit=f"limit-{n}", max=10, per_seconds=60) for n in part])

    def child_runs(self, count: int) -> None:
        for part in _parts(range(count), PART):
            self.client.ask_all([wire.RunsChild(parent=self.run, name=f"child-{n}", owned=False) for n in part])


def _parts(things: Iterable, size: int) -> Iterator[list]:
    things = iter(things)
    while part := list(itertools.islice(things, size)):
        yield part


# ---------------------------------------------------------------------------------------------------- leases


def hold_leases(path: str, count: int, lease_ms: int, seconds: float) -> None:
    """``count`` clients that hold one unit of slots each and beat at a third of the lease, for so long."""
    clients = [WireClient(path) for _ in range(count)]
    run = clients[0].ask(wire.RunsJoin(name="leases")).run
    tokens = []
    for client in clients:
        granted = client.ask(wire.SlotsAcquire(run=run, pool="leases", max=1_000_000, lease_ms=lease_ms))
        tokens.append(granted.token)
    print("ready", flush=True)
    began, gap_s = time.monotonic(), lease_ms / 3_000 / count
    for n in itertools.count():
        due = began + n * gap_s  # evenly spread, as those of clients that came one by one
        if due - began > seconds:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        clients[n % count].beat(tokens[n % count : n % count + 1])

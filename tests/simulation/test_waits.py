"""No wait without somebody who can end it, from a seed: programs that nest holds and wait for jobs from inside of them.

What is true is found out by trying it. A copy of the world goes on by itself: whoever does not wait gives back all it
holds, workers do what jobs there are, time passes; whoever is answered gives back what it holds a second later. Whoever
waits then still waits for ever: that must be nobody. And where a wait was refused as a deadlock, the same request, made
in a copy where nobody looks for deadlocks, must not be answered with what it asks for.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from runstate import wire
from runstated.domain import nouns
from runstated.engine import circles
from runstated.engine.circles import MAY_STICK, REACT_MS
from runstated.engine.entries import Nested
from runstated.engine.turns import Turns
from tests.harness import Client, Harness, Request

SEEDS = (*range(5), 26, 28, 32, 50)  # the latter fail where lines, changes of needs or time-outs are not looked at
STEPS = 120
LOOK_EACH = 15  # steps
POOLS = {"one": 1, "two": 2, "three": 3}
LEASE_MS = 600_000
QUIET_MS = 35_000  # longer than any time-out and any pause of a job
ENDS_MS = 1_000_000


@dataclass
class Flow:
    """A task of a program: what it holds, innermost last, and what it waits for. ``of``: the flow that has started
    it; ``awaited``: whether that one waits for its end."""

    client: Client
    stack: list[tuple[str, int, str]] = field(default_factory=list)  # kind, token, run or job
    waiting: Request | None = None
    of: Flow | None = None
    awaited: bool = False
    answered_ms: int = 0  # in a copy: when it may give back what it holds

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for _, token, _ in self.stack)

    def inside(self) -> dict[str, Any]:
        if self.of is None:
            return {"within": self.tokens}
        name = "within" if self.awaited else "inherited"
        around = self.of.tokens
        return (
            {"within": (*around, *self.tokens), "inherited": ()}
            if name == "within"
            else {
                "within": self.tokens,
                "inherited": around,
            }
        )


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.h = Harness()
        self.numbers = count(1)
        self.flows: list[Flow] = []
        self.away: set[str] = set()
        self.log: list[str] = []
        self.refused = 0
        self.keeper = self.h.session("keeper")
        self.root = self.keeper.ask(wire.RunsJoin(name="root")).run
        self.runs = [self.root, self.keeper.ask(wire.RunsChild(parent=self.root)).run]
        for name, most in POOLS.items():
            self.keeper.ask(wire.SlotsDeclare(pool=name, max=most))
        self.keeper.ask(wire.LimitsDeclare(limit="api", max=2, per_seconds=10))
        self.keeper.ask(wire.BudgetsDeclare(budget="money", limit_minor=50))
        for queue in ("own", "declared"):
            self.keeper.ask(wire.QueuesDeclare(queue=queue, attempts=100))
        for _ in range(6):
            self.new_program()

    def new_program(self) -> None:
        client = self.h.session(f"s{next(self.numbers)}")
        main = Flow(client)
        self.flows += [main, Flow(client, of=main)]

    def close(self) -> None:
        self.h.close()

    # ------------------------------------------------------------------ what a flow asks for

    def needs(self) -> wire.Needs:
        rng = self.rng
        names = rng.sample(sorted(POOLS), rng.choice((0, 1, 1, 1, 2)))
        return wire.Needs(
            slots=tuple(wire.UnitsNeeded(name=name, units=rng.randint(1, POOLS[name])) for name in names),
            limits=(wire.UnitsNeeded(name="api"),) if rng.random() < 0.3 else (),
            budgets=(wire.MoneyNeeded(name="money", reserve_minor=20),) if rng.random() < 0.2 else (),
        )

    def request(self, flow: Flow) -> wire.Request[Any]:
        rng, run = self.rng, self.rng.choice(self.runs)
        wait: dict[str, Any] = {"wait_ms": rng.choice((None, None, None, 4_000, 30_000)), **flow.inside()}
        kind = rng.randrange(20)
        if kind <= 3:
            return wire.OnceAcquire(run=self.root, key=f"k{rng.randrange(3)}", lease_ms=LEASE_MS, **wait)
        if kind <= 7:
            pool = rng.choice(sorted(POOLS))
            units = rng.randint(1, POOLS[pool])
            return wire.SlotsAcquire(run=self.root, pool=pool, units=units, lease_ms=LEASE_MS, **wait)
        if kind == 8:
            return wire.LimitsTake(run=self.root, limit="api", units=rng.randint(1, 2), **wait)
        if kind <= 11:
            queue = rng.choice(("own", "declared"))
            needs = self.needs() if queue == "own" else None
            return wire.QueuesSend(run=run, queue=queue, key=str(next(self.numbers)), input="1", needs=needs)
        unfinished = [job for (job,) in self.h.rows("SELECT job FROM jobs WHERE finish IS NULL ORDER BY age")]
        if kind <= 14 and unfinished:
            return wire.QueuesResult(job=rng.choice(unfinished), **wait)
        if kind == 15:
            members = tuple(wire.NewJob(key=str(next(self.numbers)), input="1") for _ in range(rng.randint(1, 3)))
            return wire.GroupsSubmit(run=run, queue="own", members=members, needs=self.needs())
        if kind == 16:
            return wire.QueuesDeclare(queue="declared", needs=self.needs())
        if flow.tokens or flow.of is not None:
            return wire.OnceGet(run=self.root, key=f"k{rng.randrange(4)}", **wait)
        sources = tuple(
            wire.AdmitFrom(run=run, queue=queue, lease_ms=LEASE_MS, below=rng.random() < 0.5)
            for queue in rng.sample(("own", "declared"), rng.randint(1, 2))
        )
        return wire.QueuesAdmit(queues=sources, **wait)

    def ask(self, flow: Flow, request: wire.Request[Any]) -> None:
        self.log.append(f"{flow.client.name}: {request}")
        before = Copy(self) if isinstance(request, MAY_STICK) and self.h.core().lines._inside else None
        flow.waiting = flow.client.submit(request)
        reply = flow.waiting.reply
        if before is not None and isinstance(reply, wire.Error) and reply.code == "DEADLOCK":
            before.check_is_in_vain(self.flows.index(flow), request, reply.message)
        self.settle()

    def settle(self) -> None:
        for flow in self.flows:
            if flow.waiting is not None and flow.waiting.replies:
                asked, flow.waiting = flow.waiting, None
                self.answered(flow, asked.request, asked.reply)

    def answered(self, flow: Flow, asked: Any, reply: Any) -> None:
        if isinstance(reply, wire.Error):
            assert reply.code == "DEADLOCK", (asked, reply)
            assert reply.message.startswith("deadlock: worker-s"), reply
            self.refused += 1
            self.log.append(f"{flow.client.name} {reply.message}")
            self.unwind(flow)
        elif isinstance(reply, wire.OnceGranted):
            flow.stack.append(("once", reply.token, asked.key))
        elif isinstance(reply, wire.SlotsGranted):
            flow.stack.append(("slots", reply.token, ""))
        elif isinstance(reply, wire.JobsGranted):
            flow.stack += [("job", grant.token, grant.job) for grant in reply.jobs]
        elif isinstance(reply, wire.GroupView):
            self.ask(flow, wire.GroupsEnded(run=reply.run, wait_ms=None, **flow.inside()))

    def let_go(self, flow: Flow, how: float = 0.9) -> None:
        kind, token, name = flow.stack.pop()
        if kind == "once" and how < 0.3:
            flow.client.ask(wire.OnceFail(run=self.root, key=name, token=token, error="E: x", attempts=100))
        elif kind == "job" and how < 0.5:
            flow.client.ask(wire.QueuesFail(job=name, token=token, error="E: x"))
        elif kind == "job" and how < 0.8:
            self.complete(flow.client, name, token)
        else:
            flow.client.ask(wire.Release(token=token))
        self.settle()

    def complete(self, client: Client, job: str, token: int) -> None:
        reserved = self.h.rows("SELECT reservation FROM reservations WHERE token = :token", token=token)
        costs = {reservation: 0 for (reservation,) in reserved}
        client.ask(wire.QueuesComplete(job=job, token=token, result="1", costs=costs))

    def unwind(self, flow: Flow) -> None:
        while flow.stack:
            self.let_go(flow)

    def side_of(self, flow: Flow) -> Flow:
        return next(each for each in self.flows if each.of is flow)

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        here = [flow for flow in self.flows if flow.client.name not in self.away]
        if not here or self.rng.random() < 0.15:
            self.fault(self.rng.choice(self.flows))
        else:
            self.act(self.rng.choice(here))
        self.settle()
        self.h.check()

    def act(self, flow: Flow) -> None:
        rng = self.rng
        main = flow.of or flow
        if flow.waiting is not None:
            if flow.of is not None and rng.random() < 0.3 and main.waiting is None:
                self.await_or_not(flow)
            elif rng.random() < 0.1:
                flow.waiting.cancel()
                flow.waiting = None
        elif flow.of is None and self.side_of(flow).awaited and self.side_of(flow).waiting is not None:
            pass  # it awaits its task
        elif flow.stack and (len(flow.stack) >= 3 or rng.random() < 0.25):
            self.let_go(flow, rng.random())
        elif flow.of is None or main.stack:
            self.ask(flow, self.request(flow))

    def await_or_not(self, side: Flow) -> None:
        assert side.waiting is not None
        side.awaited = not side.awaited
        self.log.append(f"{side.client.name} awaited: {side.awaited}")
        self.h.run(Nested(side.client.name, wire.Nested(call=side.waiting.id, **side.inside())))

    def fault(self, flow: Flow) -> None:
        rng, name = self.rng, flow.client.name
        what = rng.randrange(8)
        if what <= 4:
            self.pass_ms(rng.choice((300, 1_000, 4_000)))
        elif what == 5 and name in self.away:
            self.log.append(f"{name} is back")
            self.away.discard(name)
            flow.client.resume()
        elif what == 6 and name not in self.away:
            self.log.append(f"{name} is away")
            self.away.add(name)
            flow.client.lose()
        elif what == 7:
            self.log.append(f"{name} dies")
            self.away.discard(name)
            self.flows = [each for each in self.flows if each.client is not flow.client]
            flow.client.die()
            self.new_program()

    def pass_ms(self, ms: int) -> None:
        self.h.pass_ms(ms)
        for flow in self.flows:
            flow.client.beat(*flow.tokens)
        self.settle()


class Copy(World):
    """A world that goes on by itself."""

    def __init__(self, world: World) -> None:
        h = Harness()
        world.h.connection.backup(h.connection)
        locks = {id(value): threading.Lock() for value in vars(world.h.clock).values() if hasattr(value, "acquire")}
        h.clock = copy.deepcopy(world.h.clock, dict(locks))
        h.start()
        h.spaces = copy.deepcopy(world.h.spaces, {id(table): table for table in nouns.TABLES})
        h.turns = Turns(h.spaces, h.clock, h.fetch)
        h._tickets = world.h._tickets
        for name, client in world.h.clients.items():
            h.clients[name] = Client(h, name, client.access)
            h.clients[name]._next = client._next
        self.h, self.root, self.away = h, world.root, set()
        self.log, self.refused, self.numbers = [], 0, count(10**6)
        self.flows = []
        copies: dict[int, Flow] = {}
        for flow in world.flows:
            client = h.clients[flow.client.name]
            twin = Flow(client, list(flow.stack), None, copies.get(id(flow.of)), flow.awaited)
            if flow.waiting is not None:
                twin.waiting = client.open[flow.waiting.id] = Request(client, flow.waiting.id, flow.waiting.request)
            copies[id(flow)] = twin
            self.flows.append(twin)
        self.was_away = [h.clients[name] for name in world.away if name in h.clients]

    def answered(self, flow: Flow, asked: Any, reply: Any) -> None:
        flow.answered_ms = self.h.clock.steady_ms() + REACT_MS
        super().answered(flow, asked, reply)

    def go_on(self) -> None:
        """Until nothing changes any more."""
        for client in self.was_away:
            client.resume()
        self.worker = self.h.session("outside")
        self.admits: dict[str, Request] = {}
        quiet_since = self.h.clock.steady_ms()
        ends = quiet_since + ENDS_MS
        while self.h.clock.steady_ms() < quiet_since + QUIET_MS:
            if self.one_second():
                quiet_since = self.h.clock.steady_ms()
            assert quiet_since < ends, "something goes on and on"

    def one_second(self) -> bool:
        """Whether anything has happened."""
        happened = False
        for flow in self.flows:
            side = next((each for each in self.flows if each.of is flow), None)
            is_blocked = flow.waiting is not None or (side is not None and side.awaited and side.waiting is not None)
            if flow.stack and not is_blocked and flow.answered_ms <= self.h.clock.steady_ms():
                happened = True
                self.unwind(flow)
        for queue in ("own", "declared"):
            wanted = wire.AdmitFrom(run=self.root, queue=queue, places=10, lease_ms=LEASE_MS)
            asked = self.admits.get(queue) or self.worker.submit(wire.QueuesAdmit(queues=(wanted,)))
            self.admits[queue] = asked
            if asked.reply is not None:
                happened = True
                del self.admits[queue]
                for grant in asked.reply.jobs:
                    self.complete(self.worker, grant.job, grant.token)
        waiting = [flow.waiting for flow in self.flows]
        self.pass_ms(1_000)
        return happened or waiting != [flow.waiting for flow in self.flows]

    def check_nobody_waits_for_ever(self) -> None:
        self.go_on()
        stuck = [flow.waiting.request for flow in self.flows if flow.waiting is not None]
        stuck = [request for request in stuck if isinstance(request, MAY_STICK) and request.wait_ms is None]
        self.close()
        assert not stuck, f"they wait for ever: {stuck}"

    def check_is_in_vain(self, number: int, request: wire.Request[Any], message: str) -> None:
        flow = self.flows[number]
        with nobody_looks():
            asked = flow.waiting = flow.client.submit(request)
            self.go_on()
        self.close()
        in_vain = (type(None), wire.OnceHeld, wire.SlotsBusy)
        is_late = isinstance(asked.reply, wire.JobView) and asked.reply.state in ("ready", "delayed", "running")
        is_late = is_late or (isinstance(asked.reply, wire.GroupEnded) and not asked.reply.jobs)
        assert isinstance(asked.reply, in_vain) or is_late, f"refused ({message}), but it would end: {asked.reply}"


@contextmanager
def nobody_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(circles, "closed_by", lambda *_: None)
        patch.setattr(circles, "standing", lambda *_: None)
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_waits_for_ever_and_only_waits_without_end_are_refused(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    try:
        for number in range(STEPS):
            world.step()
            if number % LOOK_EACH == LOOK_EACH - 1:
                Copy(world).check_nobody_waits_for_ever()
        print(f"{world.refused} refused")
    except BaseException:
        print("\n".join(world.log))
        raise
    finally:
        world.close()

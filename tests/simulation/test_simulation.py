"""All nouns at once, from a seed: small programs that nest holds, workers, watchers; crashes, cut lines, clocks that
jump, daemons that start anew. After every step what must be true is compared with what the programs were told.

A program is a session with a stack of holds and at most one call that waits. When all faults are over, every program
only lets go of what it has; then all must come to an end: no deadlock, nobody starved, nothing left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from runstate import wire
from tests.flaky import Flaky
from tests.harness import Client, Request

SEEDS = range(20)
STEPS = 250
PROGRAMS = 7
POOLS = {"gpu": 2, "disk": 3}
LIMITS = {"fast": (3, 10), "slow": (2, 3_600)}
BUDGET = 600
ATTEMPTS = 4
QUEUES = ("plain", "needy", "mixed")
HOUR_MS = 3_600_000
LEASE_MS = 20_000
ROUNDS_MAX = 5_000  # of letting go; each is eight seconds: all may wait, one after the other, for two units an hour


@dataclass
class Hold:
    """What a program believes to hold."""

    kind: str  # once, slots, job, budget
    name: str
    token: int
    run: str
    units: int = 1
    reservations: tuple[str, ...] = ()


@dataclass
class Program:
    client: Client
    stack: list[Hold] = field(default_factory=list)
    waiting: Request | None = None
    last: Request | None = None  # the last that was answered
    hangs: bool = False  # beats no more

    @property
    def within(self) -> tuple[int, ...]:
        return tuple(hold.token for hold in self.stack)


class World:
    def __init__(self, seed: int, faults: float = 0) -> None:
        self.rng = random.Random(seed)
        self.h = Flaky(seed, faults)
        self.numbers = count(1)
        self.programs: list[Program] = []
        self.away: list[Program] = []
        self.taken: dict[str, list[tuple[int, int]]] = {name: [] for name in LIMITS}  # steady time, units
        self.forward = 0  # how often the wall clock was put forward
        self.charged: dict[str, int] = {}  # by reservation, as the programs were told
        self.done: dict[str, str] = {}  # job -> the result that was accepted
        self.results: dict[str, str] = {}  # once key in its run -> result
        self.events: list[int] = []
        self.keeper = self.h.session("keeper")
        self.root = self.keeper.ask(wire.RunsJoin(name="root")).run
        self.runs = [self.root]
        for name, most in POOLS.items():
            self.keeper.ask(wire.SlotsDeclare(pool=name, max=most))
        for name, (most, per_seconds) in LIMITS.items():
            self.keeper.ask(wire.LimitsDeclare(limit=name, max=most, per_seconds=per_seconds))
        self.keeper.ask(wire.BudgetsDeclare(budget="money", limit_minor=BUDGET))
        for queue in QUEUES:
            self.keeper.ask(wire.QueuesDeclare(queue=queue, attempts=ATTEMPTS))
        for _ in range(PROGRAMS):
            self.new_program()

    def new_program(self) -> None:
        self.programs.append(Program(self.h.session(f"s{next(self.numbers)}")))

    # ------------------------------------------------------------------ what a program asks for

    def run(self) -> str:
        return self.rng.choice(self.runs)

    def needs(self) -> wire.Needs:
        rng = self.rng
        return wire.Needs(
            slots=tuple(wire.UnitsNeeded(name=name, units=rng.randint(1, 2)) for name in POOLS if rng.random() < 0.5),
            limits=tuple(wire.UnitsNeeded(name=name) for name in LIMITS if rng.random() < 0.3),
            budgets=(wire.MoneyNeeded(name="money", reserve_minor=rng.choice((5, 20))),) if rng.random() < 0.4 else (),
        )

    def request(self, program: Program) -> wire.Request[Any]:
        rng, run, within = self.rng, self.run(), program.within
        wait_ms = rng.choice((None, None, 0, 7_000))
        kind = rng.randrange(15)
        if kind <= 2:
            key = f"{rng.randrange(3)}/{run}"
            return wire.OnceAcquire(run=run, key=key, lease_ms=LEASE_MS, within=within, wait_ms=wait_ms)
        if kind <= 5:
            pool = rng.choice(tuple(POOLS))
            units = rng.randint(1, 2)
            return wire.SlotsAcquire(run=run, pool=pool, units=units, lease_ms=LEASE_MS, within=within, wait_ms=wait_ms)
        if kind <= 7:
            limit = rng.choice(tuple(LIMITS))
            return wire.LimitsTake(run=run, limit=limit, units=rng.randint(1, 2), within=within, wait_ms=wait_ms)
        if kind == 8:
            return wire.BudgetsReserve(run=run, budget="money", amount_minor=rng.choice((1, 10, 40)))
        if kind <= 10:
            return self.send(run)
        if kind == 11 and not within:
            queue = rng.choice(QUEUES)
            needs = self.needs() if queue != "plain" and rng.random() < 0.3 else None
            return wire.QueuesDeclare(queue=queue, needs=needs)
        if kind == 12:
            if rng.random() < 0.5:
                return wire.TimersSleep(
                    run=run, name=str(rng.randrange(4)), after_ms=rng.choice((1_000, 9_000)), within=within
                )
            worker, number = program.client.name, rng.randint(0, 3)
            return wire.BarriersArrive(run=run, name=str(number), count=2 + number % 2, worker=worker, wait_ms=7_000)
        if kind == 13 and not within:
            members = tuple(wire.NewJob(key=str(rng.randrange(3)), input="1") for _ in range(3))
            return wire.GroupsSubmit(run=run, queue=rng.choice(QUEUES), members=members)
        queues = tuple(
            wire.AdmitFrom(run=run, queue=queue, lease_ms=LEASE_MS, places=1)
            for queue in rng.sample(QUEUES, rng.randint(1, 3))
        )
        return wire.QueuesAdmit(queues=queues[: 1 + 2 * (not within)], wait_ms=9_000 if within else wait_ms)

    def send(self, run: str) -> wire.QueuesSend:
        queue = self.rng.choice(QUEUES)
        explicit = queue == "mixed" and self.rng.random() < 0.6
        key = str(self.rng.randrange(60))
        return wire.QueuesSend(run=run, queue=queue, key=key, input="1", needs=self.needs() if explicit else None)

    # ------------------------------------------------------------------ what it is told

    def ask(self, program: Program, request: wire.Request[Any]) -> None:
        assert program.waiting is None
        program.waiting = program.client.submit(request)
        self.settle()

    def settle(self) -> None:
        """Every program reads what has come: first what it lost, then its answer."""
        for program in self.programs:
            lost = {push.token for push in program.client.told(wire.LeaseLost)}
            program.stack = [hold for hold in program.stack if hold.token not in lost]
        for program in self.programs:
            waiting = program.waiting
            if waiting is not None and waiting.replies:
                program.waiting, program.last = None, waiting
                self.answered(program, waiting.request, waiting.reply)

    def answered(self, program: Program, asked: Any, reply: Any) -> None:
        stack = program.stack
        if isinstance(reply, wire.Error):
            assert reply.code in (
                "SCOPE_CANCELLED",
                "DEADLINE_EXCEEDED",
                "INSUFFICIENT_BUDGET",
                "DEADLOCK",
                "CONFLICT",
                "NOT_FOUND",
            ), reply
            assert reply.code != "CONFLICT" and reply.code != "NOT_FOUND", (asked, reply)
            if reply.code == "DEADLOCK":
                self.unwind(program)
        elif isinstance(reply, wire.OnceGranted):
            stack.append(Hold("once", asked.key, reply.token, asked.run))
        elif isinstance(reply, wire.OnceDone):
            assert reply.result == self.results[asked.key], "one result for all"
        elif isinstance(reply, wire.SlotsGranted):
            stack.append(Hold("slots", asked.pool, reply.token, asked.run, asked.units))
        elif isinstance(reply, wire.LimitTaken):
            self.taken[asked.limit].append((self.h.clock.steady_ms(), asked.units))
        elif isinstance(reply, wire.BudgetReserved):
            stack.append(Hold("budget", "money", reply.token, asked.run, reservations=(reply.reservation,)))
        elif isinstance(reply, wire.JobsGranted):
            for grant in reply.jobs:
                assert grant.job not in self.done, "done already"
                stack.append(Hold("job", grant.job, grant.token, grant.run, reservations=grant.reservations))
        elif isinstance(reply, wire.GroupView):
            program.waiting = program.client.submit(wire.GroupsEnded(run=reply.run, wait_ms=15_000))
            self.settle()

    def unwind(self, program: Program) -> None:
        while program.stack:
            self.let_go(program)

    def let_go(self, program: Program) -> None:
        """Ends the innermost hold in one of the ways there are."""
        hold, rng, client = program.stack.pop(), self.rng, program.client
        how = rng.random()
        if hold.kind == "budget":
            (reservation,) = hold.reservations
            if how < 0.3:
                self.told_charged(reservation, client.ask(wire.BudgetsRelease(reservation=reservation)))
            else:
                settle = wire.BudgetsSettle(
                    reservation=reservation, cost_minor=rng.choice((0, 1, 5, 60)), work_key="w", keep_rest=how > 0.9
                )
                self.told_charged(reservation, client.ask(settle))
                if settle.keep_rest:
                    self.told_charged(reservation, client.ask(settle))
                    client.ask(wire.Release(token=hold.token))
        elif hold.kind == "once" and how < 0.7:
            said = client.ask(wire.OnceComplete(run=hold.run, key=hold.name, token=hold.token, result=str(hold.token)))
            if isinstance(said, wire.OnceDone):
                self.results[hold.name] = said.result
        elif hold.kind == "job" and how < 0.8:
            self.end_job(client, hold, fails=how < 0.2)
        else:
            assert client.ask(wire.Release(token=hold.token)).held
        self.settle()

    def end_job(self, client: Client, hold: Hold, fails: bool) -> None:
        if fails:
            client.ask(wire.QueuesFail(job=hold.name, token=hold.token, error="E: x"))
            return
        costs = {name: self.rng.choice((0, 3, 50)) for name in hold.reservations if self.rng.random() < 0.7}
        said = client.ask(wire.QueuesComplete(job=hold.name, token=hold.token, result=str(hold.token), costs=costs))
        if isinstance(said, wire.JobView):
            assert hold.name not in self.done, "two results"
            self.done[hold.name] = said.result or ""
        for name in hold.reservations:  # it is paid, also where the result does not count any more
            (charged,) = self.h.rows("SELECT charged_minor FROM reservations WHERE reservation = :r", r=name)[0]
            assert charged == costs.get(name, charged) or charged < costs[name]
            self.charged[name] = charged

    def told_charged(self, reservation: str, said: wire.BudgetSettled) -> None:
        self.charged[reservation] = said.charged_minor

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        here = [program for program in self.programs if program not in self.away]
        program = self.rng.choice(here) if here else None
        if self.rng.random() < 0.22:
            self.fault(program)
        elif program is not None:
            self.act(program)
        self.check()

    def act(self, program: Program) -> None:
        rng = self.rng
        if program.waiting is not None:
            if rng.random() < 0.15:
                program.waiting.cancel()
                program.waiting = None
        elif program.stack and (len(program.stack) >= 3 or rng.random() < 0.5):
            self.let_go(program)
        else:
            self.ask(program, self.request(program))
        self.settle()

    def fault(self, program: Program | None) -> None:
        rng = self.rng
        what = rng.randrange(15)
        if what <= 5:
            self.pass_ms(rng.choice((100, 1_000, 4_000, 11_000)))
        elif what == 6 and program is not None:
            self.die(program, bye=rng.random() < 0.3)
        elif what == 7 and program is not None:
            program.client.lose()
            self.away.append(program)
        elif what == 8 and self.away:
            self.come_back(rng.choice(self.away))
        elif what == 9:
            self.jump(rng.choice((-1, 1)) * rng.choice((1_500, HOUR_MS, 3 * HOUR_MS)))
        elif what == 10:
            self.forward += 1
            self.h.suspend(8 * HOUR_MS)
        elif what == 11:
            self.h.stall(30_000, arrived=self.beat)
        elif what == 12:
            self.restart()
        elif what == 13 and program is not None:
            self.child_runs(program)
        elif what == 14 and program is not None:
            program.hangs = not program.hangs
            self.repeat(program)
        self.settle()

    def beat(self) -> None:
        for program in self.programs:
            if not program.hangs and program not in self.away:
                tokens = [hold.token for hold in program.stack]
                assert program.client.beat(*tokens) == [True] * len(tokens), "a hold is gone and nobody was told"

    def pass_ms(self, ms: int) -> None:
        for _ in range(max(1, ms // 4_000)):
            self.settle()
            self.beat()
            self.h.pass_ms(min(ms, 4_000))
        self.settle()

    def jump(self, ms: int) -> None:
        self.forward += ms > 0
        self.h.clock.jump_wall(ms)
        self.h.tick()

    def die(self, program: Program, *, bye: bool) -> None:
        program.client.bye() if bye else program.client.die()
        del self.h.clients[program.client.name]
        self.programs.remove(program)
        if program in self.away:
            self.away.remove(program)
        self.new_program()

    def come_back(self, program: Program) -> None:
        self.away.remove(program)
        program.client.resume()
        self.reissue(program)

    def reissue(self, program: Program) -> None:
        if program.waiting is not None and not program.waiting.replies:
            program.waiting = program.waiting.repeat()

    def repeat(self, program: Program) -> None:
        """A reply that got lost: the repeat is answered alike, if what it granted is still held."""
        last = program.last
        tokens = [hold.token for hold in program.stack]
        if program.waiting is None and last is not None and program in self.programs:
            reply = last.reply
            if (
                isinstance(reply, wire.SlotsGranted | wire.OnceGranted | wire.BudgetReserved) and reply.token in tokens
            ) or isinstance(reply, wire.LimitTaken | wire.GroupView):
                assert last.repeat().reply == reply

    def restart(self) -> None:
        """The daemon starts anew; some of its sessions do not live to see it."""
        self.h.start()
        for program in list(self.programs):
            if self.rng.random() < 0.1:
                self.die(program, bye=False)
        self.away = [program for program in self.programs if self.rng.random() < 0.1]
        self.keeper.resume()
        back = [program for program in self.programs if program not in self.away]
        for program in back:
            program.client.resume()
        waiting = [program for program in back if program.waiting is not None]
        for program in sorted(waiting, key=lambda program: program.waiting.ticket if program.waiting else 0):
            self.reissue(program)
        self.h.tick_if_due()

    def child_runs(self, program: Program) -> None:
        rng = self.rng
        if len(self.runs) > 1 and rng.random() < 0.5:
            run = self.runs.pop(rng.randrange(1, len(self.runs)))
            self.keeper.ask(wire.RunsEnd(run=run, state=rng.choice(("stopped", "finished"))))
        elif len(self.runs) < 4:
            deadline = self.h.clock.wall_ms() + 30_000 if rng.random() < 0.3 else None
            made = program.client.submit(wire.RunsChild(parent=self.run(), deadline_ms=deadline))
            if isinstance(made.reply, wire.RunView):
                self.runs.append(made.reply.run)

    # ------------------------------------------------------------------ what is always so

    def check(self) -> None:
        self.h.check()
        keys = [hold.name for hold in self.holds() if hold.kind == "once"]
        jobs = [hold.name for hold in self.holds() if hold.kind == "job"]
        assert len(keys) == len(set(keys)), "two hold one key"
        assert len(jobs) == len(set(jobs)), "two hold one job"
        for pool, most in POOLS.items():
            assert sum(hold.units for hold in self.holds() if hold.name == pool) <= most, "too many inside"
        for limit, (most, per_seconds) in LIMITS.items():
            self.check_limit(self.taken[limit], most, per_seconds * 1_000)
        self.read_events()
        self.check_money()

    def holds(self) -> Iterator[Hold]:
        """What programs hold and were not told to have lost."""
        return (hold for program in self.programs for hold in program.stack)

    def check_limit(self, taken: list[tuple[int, int]], most: int, per_ms: int) -> None:
        """Fixed windows: in any span of one window's length at most two of them were open, and one more for each time
        the wall clock was put forward."""
        if taken:
            last = taken[-1][0]
            assert sum(units for at, units in taken if at > last - per_ms) <= most * (2 + self.forward)

    def check_money(self) -> None:
        spent, reserved = self.h.rows("SELECT spent_minor, reserved_minor FROM budgets")[0]
        assert spent == sum(self.charged.values())
        assert spent + reserved <= BUDGET

    def read_events(self) -> None:
        page = self.keeper.ask(wire.EventsRead(run=self.root, after=self.events[-1] if self.events else 0, limit=500))
        assert not page.gap
        self.events += [event.event for event in page.events]
        for event in page.events:
            if event.type == "budget.assumed":  # nobody was told: this is how one knows
                reservation = event.data["reservationId"]
                self.charged[reservation] = self.charged.get(reservation, 0) + int(event.data["chargedMinor"])
        assert self.events == sorted(set(self.events))

    # ------------------------------------------------------------------ the end

    def come_to_an_end(self) -> None:
        """No more faults; programs only let go. Everybody who waits for something that others hold gets it."""
        for program in list(self.away):
            self.come_back(program)
        for program in self.programs:
            program.hangs = False
        for _ in range(ROUNDS_MAX):
            self.settle()
            for program in self.programs:
                if program.waiting is None:
                    self.unwind(program)
            busy = [program for program in self.programs if program.stack or self.waits_for_others(program)]
            self.check()
            if not busy:
                break
            self.pass_ms(10_000)
        assert not busy, f"stuck: {[(program.waiting and program.waiting.request, program.stack) for program in busy]}"
        self.keeper.ask(wire.RunsEnd(run=self.root, state="finished"))
        self.settle()
        assert not [program for program in self.programs if program.waiting is not None]
        assert not self.h.core().lines.calls
        assert self.h.value("SELECT count(*) FROM leases") == 0
        assert self.h.rows("SELECT reserved_minor FROM budgets") == [(0,)]

    @staticmethod
    def waits_for_others(program: Program) -> bool:
        """Work may never come to a worker; everything else comes when all let go."""
        return program.waiting is not None and not isinstance(program.waiting.request, wire.QueuesAdmit)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_spent_is_in_the_ledger_or_an_event_tells_of_it_whatever_the_disk_does(seed: int) -> None:
    """The same with a disk that fails in one of ten batches."""
    print(f"seed {seed}")
    world = World(seed, faults=0.1)
    try:
        for _ in range(STEPS // 2):
            world.step()
        world.come_to_an_end()
        assert world.h.failures
    finally:
        world.h.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_nothing_is_held_twice_lost_or_waited_for_in_vain(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    try:
        for _ in range(STEPS):
            world.step()
        world.come_to_an_end()
    finally:
        world.h.close()

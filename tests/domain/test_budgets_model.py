"""Budgets against a plain model: to the unit, whatever becomes of those who reserve."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runstate import wire
from tests.harness import Client, Harness

NAMES = ("a", "b", "c")
LIMIT = 100


@dataclass
class Reservation:
    client: str
    token: int
    secret: str
    left: int
    settle_by: int
    charged: int = 0
    assumed: int = 0
    state: str = "active"
    keys: set[str] = field(default_factory=set)

    def assume(self) -> None:
        """Its holder died."""
        if self.state == "active":
            self.charged, self.assumed, self.left, self.state = self.charged + self.left, self.left, 0, "settled"

    def take_back(self) -> None:
        if self.assumed:
            self.charged, self.assumed = self.charged - self.assumed, 0
            self.state = "settled" if self.charged else "released"

    def end(self) -> None:
        if self.state == "active":
            self.left, self.state = 0, "settled" if self.charged else "released"


class BudgetsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.h = Harness()
        self.known: dict[str, Reservation] = {}
        self.overrun = 0
        self.number = 0
        self.keeper = self.h.session("keeper")
        self.keeper.ask(wire.BudgetsDeclare(budget="llm", limit_minor=LIMIT))
        self.keeper.ask(wire.QueuesDeclare(queue="q", attempts=100))
        self.run = self.keeper.ask(wire.RunsJoin(name="job")).run
        for name in NAMES:
            self.h.session(name)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.close()

    @property
    def spent(self) -> int:
        return sum(each.charged for each in self.known.values())

    @property
    def reserved(self) -> int:
        return sum(each.left for each in self.known.values())

    def charge(self, held: Reservation, cost: int, key: str) -> None:
        """What is left of the reservation, then what is left of the budget."""
        if key in held.keys:
            return
        held.keys.add(key)
        held.take_back()
        charged = min(cost, held.left + LIMIT - self.spent - self.reserved)
        self.overrun += charged < cost
        held.left -= min(charged, held.left)
        held.charged += charged
        if held.state != "active" or not held.left:
            held.state = "settled"

    # ------------------------------------------------------------------ rules

    @rule(name=st.sampled_from(NAMES), amount=st.sampled_from((1, 10, 30, 60, 101)))
    def reserve(self, name: str, amount: int) -> None:
        asked = self.h.clients[name].submit(wire.BudgetsReserve(run=self.run, budget="llm", amount_minor=amount))
        if amount > LIMIT - self.spent - self.reserved:
            assert asked.reply.code == "INSUFFICIENT_BUDGET"
            return
        assert asked.repeat().reply == asked.reply
        until = self.h.clock.wall_ms() + wire.SETTLE_BY_MS
        self.known[asked.reply.reservation] = Reservation(name, asked.reply.token, asked.reply.secret, amount, until)

    @rule(name=st.sampled_from(NAMES), amount=st.sampled_from((5, 40)), cost=st.sampled_from((None, 0, 5, 70)))
    def a_job_is_done(self, name: str, amount: int, cost: int | None) -> None:
        self.number += 1
        needs = wire.Needs(budgets=(wire.MoneyNeeded(name="llm", reserve_minor=amount),))
        queue = f"q{self.number}"
        self.keeper.ask(
            wire.QueuesSend(run=self.run, queue=queue, key=str(self.number), input="1", attempts=1, needs=needs)
        )
        wanted = wire.AdmitFrom(run=self.run, queue=queue)
        jobs = self.h.clients[name].ask(wire.QueuesAdmit(queues=(wanted,), wait_ms=0)).jobs
        if amount > LIMIT - self.spent - self.reserved:
            assert not jobs
            return
        (grant,) = jobs
        (reservation,) = grant.reservations
        until = self.h.clock.wall_ms() + wire.SETTLE_BY_MS
        held = self.known[reservation] = Reservation(name, grant.token, grant.secret, amount, until)
        costs = {} if cost is None else {reservation: cost}
        self.h.clients[name].ask(wire.QueuesComplete(job=grant.job, token=grant.token, result="1", costs=costs))
        self.charge(held, amount if cost is None else cost, f"job:{grant.token}")
        held.end()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), cost=st.integers(0, 70), key=st.sampled_from("xy"), keep_rest=st.booleans())
    def settle(self, data: st.DataObject, cost: int, key: str, keep_rest: bool) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.known)))
        held = self.known[reservation]
        request = wire.BudgetsSettle(
            reservation=reservation, secret=held.secret, cost_minor=cost, work_key=key, keep_rest=keep_rest
        )
        unproved = msgspec.structs.replace(request, secret="")
        self.keeper.refused("NOT_FOUND", unproved)
        said = self.keeper.ask(request)
        self.charge(held, cost, key)
        if not keep_rest:
            held.end()
        assert said == wire.BudgetSettled(state=held.state, charged_minor=held.charged, left_minor=held.left)
        assert self.keeper.ask(request) == said

    @precondition(lambda self: self.known)
    @rule(data=st.data(), by_token=st.booleans())
    def release(self, data: st.DataObject, by_token: bool) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.known)))
        held = self.known[reservation]
        if by_token:
            self.h.clients[held.client].submit(wire.Release(token=held.token))
        else:
            self.keeper.ask(wire.BudgetsRelease(reservation=reservation, secret=held.secret))
            held.take_back()
        held.end()

    @rule(name=st.sampled_from(NAMES), bye=st.booleans())
    def session_ends(self, name: str, bye: bool) -> None:
        client: Client = self.h.clients[name]
        client.bye() if bye else client.die()
        for held in self.known.values():
            if held.client == name:
                held.end() if bye else held.assume()
        self.h.session(name)

    @rule(ms=st.sampled_from((1_000, 1_000_000, 1_800_000, 3_600_000)), suspended=st.booleans())
    def time_passes(self, ms: int, suspended: bool) -> None:
        self.h.suspend(ms) if suspended else self.h.stall(ms, arrived=self.beat)
        self.beat()
        for held in self.known.values():
            if held.settle_by <= self.h.clock.wall_ms():
                held.end()

    def beat(self) -> None:
        for name in NAMES:
            self.h.clients[name].beat(*self.h.held())

    # ------------------------------------------------------------------ what is always so

    @invariant()
    def the_books_are_as_the_model_says(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.check()
        seen = self.keeper.ask(wire.BudgetsGet(budget="llm"))
        assert (seen.reserved_minor, seen.spent_minor) == (self.reserved, self.spent)
        assert self.reserved + self.spent <= LIMIT
        rows = self.h.rows("SELECT reservation, state, left_minor, charged_minor FROM reservations")
        assert {row[0]: row[1:] for row in rows} == {
            name: (held.state, held.left, held.charged) for name, held in self.known.items()
        }
        assert self.h.value("SELECT count(*) FROM events WHERE type = 'budget.overrun'") == self.overrun


BudgetsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestBudgets = BudgetsMachine.TestCase

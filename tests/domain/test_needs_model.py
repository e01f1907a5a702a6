"""Slots, limits and what jobs need of both, against a plain model: who holds what, what each window has given away.

That nobody waits beside what they could have is checked by the harness, in one pass by age over all that wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runstate import wire
from tests.harness import Client, Harness, Request

NAMES = ("a", "b", "c", "d")
POOLS = {"gpu": 2, "disk": 3}
LIMITS = {"fast": (2, 10), "twin": (2, 10), "slow": (3, 60)}
NEEDS = st.builds(
    lambda gpu, disk, fast, twin, slow: wire.Needs(
        slots=tuple(wire.UnitsNeeded(name=n, units=u) for n, u in (("gpu", gpu), ("disk", disk)) if u),
        limits=tuple(
            wire.UnitsNeeded(name=n, units=u) for n, u in (("fast", fast), ("twin", twin), ("slow", slow)) if u
        ),
    ),
    *(st.sampled_from((0, 0, 1, 2)) for _ in range(5)),
)


@dataclass
class Held:
    client: str
    request: int
    units: dict[str, int]  # of pools
    expires: int
    length: int
    job: str = ""


@dataclass
class Window:
    began_ms: int = 0
    opened: int = 0  # on the lease clock
    used: int = 0


@dataclass
class Model:
    holds: dict[int, Held] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=lambda: {name: Window() for name in LIMITS})
    ready: dict[str, wire.Needs | None] = field(default_factory=dict)  # jobs, by id
    declared: wire.Needs = field(default_factory=wire.Needs)
    away: set[str] = field(default_factory=set)


class NeedsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.h = Harness()
        self.model = Model()
        self.open: list[Request] = []
        self.answered: list[Request] = []
        self.number = 0
        self.keeper = self.h.session("keeper")
        self.run = self.keeper.ask(wire.RunsJoin(name="job")).run
        self.inside = self.keeper.ask(wire.OnceAcquire(run=self.run, key="k", lease_ms=wire.LEASE_MS_MAX)).token
        for pool, most in POOLS.items():
            self.keeper.ask(wire.SlotsDeclare(pool=pool, max=most))
        for limit, (most, per_seconds) in LIMITS.items():
            self.keeper.ask(wire.LimitsDeclare(limit=limit, max=most, per_seconds=per_seconds))
        self.keeper.ask(wire.QueuesDeclare(queue="q", attempts=100))
        for name in NAMES:
            self.h.session(name)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.close()

    def here(self, name: str) -> Client | None:
        return self.h.clients[name] if name not in self.model.away else None

    # ------------------------------------------------------------------ expectations

    def look(self) -> None:
        for request in list(self.open):
            reply, asked = request.reply, request.request
            if reply is None:
                continue
            self.open.remove(request)
            self.answered.append(request)
            if isinstance(reply, wire.SlotsGranted):
                assert isinstance(asked, wire.SlotsAcquire)
                self.hold(request, reply.token, {asked.pool: asked.units}, asked.lease_ms)
            elif isinstance(reply, wire.LimitTaken):
                assert isinstance(asked, wire.LimitsTake)
                self.spend(asked.limit, asked.units)
            elif isinstance(reply, wire.JobsGranted):
                for grant in reply.jobs:
                    own = self.model.ready.pop(grant.job)
                    needs = self.model.declared if own is None else own
                    for need in needs.limits:
                        self.spend(need.name, need.units)
                    self.hold(request, grant.token, {need.name: need.units for need in needs.slots}, 5_000, grant.job)
                    self.own = {**getattr(self, "own", {}), grant.job: own}

    def hold(self, request: Request, token: int, units: dict[str, int], length: int, job: str = "") -> None:
        until = self.h.held().get(token, 0)
        self.model.holds[token] = Held(request.client.name, request.id, units, until, length, job)

    def spend(self, limit: str, units: int) -> None:
        """A window begins later than the one before or, if the wall clock went back, a window of steady time after."""
        name, window = self.h.rows("SELECT id, window_ms FROM limits WHERE name = :n", n=limit)[0]
        opened = self.h.opened(name)
        last, (most, per_seconds) = self.model.windows[limit], LIMITS[limit]
        if (window, opened) != (last.began_ms, last.opened):
            assert window > last.began_ms or opened >= last.opened + per_seconds * 1_000
            assert window >= last.began_ms and window % (per_seconds * 1_000) == 0
            self.model.windows[limit] = last = Window(window, opened)
        last.used += units
        assert last.used <= most

    def lost(self, token: int) -> None:
        held = self.model.holds.pop(token)
        if held.job:
            self.model.ready[held.job] = self.own[held.job]

    def submit(self, client: Client, request: wire.Request[object]) -> None:
        self.open.append(client.submit(request))
        self.look()

    # ------------------------------------------------------------------ rules

    @rule(
        name=st.sampled_from(NAMES),
        pool=st.sampled_from(sorted(POOLS)),
        units=st.integers(1, 2),
        wait_ms=st.sampled_from((None, None, 0, 3_000)),
        nested=st.booleans(),
    )
    def acquire(self, name: str, pool: str, units: int, wait_ms: int | None, nested: bool) -> None:
        client = self.here(name)
        if client is not None:
            within = (self.inside,) if nested else ()
            self.submit(
                client,
                wire.SlotsAcquire(run=self.run, pool=pool, units=units, wait_ms=wait_ms, within=within, lease_ms=5_000),
            )

    @rule(
        name=st.sampled_from(NAMES),
        limit=st.sampled_from(sorted(LIMITS)),
        units=st.integers(1, 2),
        wait_ms=st.sampled_from((None, None, 0, 3_000)),
        nested=st.booleans(),
    )
    def take(self, name: str, limit: str, units: int, wait_ms: int | None, nested: bool) -> None:
        client = self.here(name)
        if client is not None:
            within = (self.inside,) if nested else ()
            self.submit(client, wire.LimitsTake(run=self.run, limit=limit, units=units, wait_ms=wait_ms, within=within))

    @rule(needs=st.one_of(st.none(), NEEDS))
    def send(self, needs: wire.Needs | None) -> None:
        self.number += 1
        sent = self.keeper.request(
            wire.QueuesSend(run=self.run, queue="q", key=str(self.number), input="1", needs=needs)
        )
        # The job may be started in the step of its sending: the model has to know it before it looks.
        self.h.run(self.keeper.entry(sent))
        self.model.ready[sent.reply.job] = needs
        self.look()

    @rule(needs=NEEDS)
    def declare(self, needs: wire.Needs) -> None:
        self.model.declared = needs
        self.keeper.ask(wire.QueuesDeclare(queue="q", needs=needs))
        self.look()

    @rule(name=st.sampled_from(NAMES), places=st.integers(1, 3), wait_ms=st.sampled_from((None, None, 0, 3_000)))
    def admit(self, name: str, places: int, wait_ms: int | None) -> None:
        client = self.here(name)
        if client is not None:
            wanted = wire.AdmitFrom(run=self.run, queue="q", places=places, lease_ms=5_000)
            self.submit(client, wire.QueuesAdmit(queues=(wanted,), wait_ms=wait_ms))

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data(), completes=st.booleans())
    def let_go(self, data: st.DataObject, completes: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.model.holds)))
        held = self.model.holds[token]
        client = self.here(held.client)
        if client is None:
            return
        if held.job and completes:
            client.ask(wire.QueuesComplete(job=held.job, token=token, result="1"))
            del self.model.holds[token]
        else:
            assert client.ask(wire.Release(token=token)).held
            self.lost(token)
        self.look()

    @precondition(lambda self: self.open or self.answered)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([*self.open[-3:], *self.answered[-3:]]))
        if self.here(request.client.name) is None or request.client.open.get(request.id) is not request:
            return
        request.cancel()
        for known in (self.open, self.answered):
            if request in known:
                known.remove(request)
        for token, held in list(self.model.holds.items()):
            if (held.client, held.request) == (request.client.name, request.id):
                self.lost(token)
        self.look()

    @rule(name=st.sampled_from(NAMES))
    def beat(self, name: str) -> None:
        client = self.here(name)
        if client is not None:
            tokens = [token for token, held in self.model.holds.items() if held.client == name]
            assert client.beat(*tokens) == [True] * len(tokens)
            for token in tokens:
                self.model.holds[token].expires = self.h.clock.lease_ms() + self.model.holds[token].length

    @rule(ms=st.sampled_from((1, 1_000, 3_000, 5_000, 10_000)))
    def time_passes(self, ms: int) -> None:
        end = self.h.clock.steady_ms() + ms
        while self.h.clock.steady_ms() < end:
            due = self.h._due_in_ms()
            left = end - self.h.clock.steady_ms()
            self.h.pass_ms(left if due is None else max(1, min(left, due)))
            self.lapses()

    def lapses(self) -> None:
        for token, held in list(self.model.holds.items()):
            if held.expires <= self.h.clock.lease_ms():
                self.lost(token)
        self.look()

    @rule(ms=st.sampled_from((-3_600_000, -15_000, 15_000, 3_600_000)))
    def wall_clock_is_set(self, ms: int) -> None:
        self.h.clock.jump_wall(ms)
        self.h.tick()  # every armed alarm rings
        self.h.tick_if_due()
        self.look()

    @rule(name=st.sampled_from(NAMES))
    def connection_is_lost_or_back(self, name: str) -> None:
        if self.here(name) is None:
            self.model.away.discard(name)
            self.h.clients[name].resume()
        else:
            self.h.clients[name].lose()
            self.model.away.add(name)
        self.look()

    @rule(name=st.sampled_from(NAMES))
    def process_dies(self, name: str) -> None:
        self.open = [request for request in self.open if request.client.name != name]
        self.answered = [request for request in self.answered if request.client.name != name]
        self.h.clients[name].die()
        self.model.away.discard(name)
        for token, held in list(self.model.holds.items()):
            if held.client == name:
                self.lost(token)
        self.look()
        self.h.session(name)

    # ------------------------------------------------------------------ what is always so

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.check()
        self.keeper.beat(self.inside)
        for pool, most in POOLS.items():
            out = sum(held.units.get(pool, 0) for held in self.model.holds.values())
            assert self.keeper.ask(wire.SlotsGet(pool=pool)).used == out <= most
        holds = {token: expires for token, expires in self.h.held().items() if token != self.inside}
        assert holds == {token: held.expires for token, held in self.model.holds.items()}
        ready = {job for (job,) in self.h.rows("SELECT job FROM jobs WHERE state = 'ready'")}
        assert ready == set(self.model.ready)


NeedsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestNeeds = NeedsMachine.TestCase

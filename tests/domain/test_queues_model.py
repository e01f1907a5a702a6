"""Queues against a plain model. Who gets a job may vary; that it is theirs, counted right and handed on may not."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runstate import wire
from runstated.domain import jobs
from tests.harness import Client, Harness, Request

NAMES = ("a", "b", "c")
QUEUES = ("q", "p")
ATTEMPTS = {"q": 3, "p": 1}
RUNS = ("root", "left", "right", "leaf")
BELOW = {
    "root": ("root", "left", "right", "leaf"),
    "left": ("left", "leaf"),
    "right": ("right",),
    "leaf": ("leaf",),
}


@dataclass
class Job:
    job: str
    run: str  # its id
    queue: str
    age: int
    state: str = "ready"
    attempt: int = 0
    due_ms: int = 0
    result: str | None = None
    reason: str | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Jobs of one request are as old as each other, and start in the order of their ids."""
        return self.age, int(self.job[1:].partition("-")[0])


@dataclass
class Held:
    client: str
    job: Job
    expires: int
    length: int
    request: int


@dataclass
class Model:
    jobs: dict[str, Job] = field(default_factory=dict)
    holds: dict[int, Held] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)  # ids of the runs that have ended
    away: set[str] = field(default_factory=set)


class QueuesMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.h = Harness()
        self.model = Model()
        self.admits: list[Request] = []  # asked, not yet looked at or still waiting
        self.answered: list[Request] = []
        self.results: list[tuple[Request, Job]] = []
        self.runs: dict[str, str] = {}
        self.number = 0
        self.keeper = self.h.session("keeper")
        self.new_runs()
        for name in NAMES:
            self.h.session(name)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.close()

    def new_runs(self) -> None:
        self.number += 1
        root = self.keeper.ask(wire.RunsJoin(name=f"n{self.number}")).run
        left, right = (self.keeper.ask(wire.RunsChild(parent=root)).run for _ in range(2))
        leaf = self.keeper.ask(wire.RunsChild(parent=left)).run
        self.runs = {"root": root, "left": left, "right": right, "leaf": leaf}

    def here(self, name: str) -> Client | None:
        return self.h.clients[name] if name not in self.model.away else None

    def below(self, run: str) -> set[str]:
        return {self.runs[name] for top, names in BELOW.items() if self.runs[top] == run for name in names}

    # ------------------------------------------------------------------ expectations

    def look(self, *, in_order: bool = True) -> None:
        """Reads the replies that have come and moves the model along."""
        for request in list(self.admits):
            reply = request.reply
            if reply is None:
                continue
            self.admits.remove(request)
            self.answered.append(request)
            asked = request.request
            assert isinstance(asked, wire.QueuesAdmit)
            if isinstance(reply, wire.Error):
                assert reply.code == "SCOPE_CANCELLED"
                assert any(wanted.run in self.model.over for wanted in asked.queues)
                continue
            for grant in reply.jobs:
                self.started(request, asked.queues[grant.source], grant)
            if in_order:
                self.check_oldest_first(asked, reply.jobs)

    def started(self, request: Request, wanted: wire.AdmitFrom, grant: wire.JobGrant) -> None:
        job = self.model.jobs[grant.job]
        assert job.state == "ready", f"{job} was given away"
        assert (job.queue, job.run, job.attempt + 1) == (wanted.queue, grant.run, grant.attempt)
        assert job.run in self.below(wanted.run) and job.run not in self.model.over
        if grant.ahead:
            job.state = "reserved"
        else:
            job.state, job.attempt, job.reason = "running", grant.attempt, None
        assert grant.token not in self.model.holds
        until = self.h.held().get(grant.token, 0)
        self.model.holds[grant.token] = Held(request.client.name, job, until, wanted.lease_ms, request.id)

    def check_oldest_first(self, asked: wire.QueuesAdmit, grants: tuple[wire.JobGrant, ...]) -> None:
        for source, wanted in enumerate(asked.queues):
            ages = [self.model.jobs[grant.job].place for grant in grants if grant.source == source]
            assert ages == sorted(ages)
            assert sum(not grant.ahead for grant in grants if grant.source == source) <= wanted.places
            assert len(ages) <= wanted.places + wanted.ahead
            left = [
                job.place
                for job in self.model.jobs.values()
                if job.state == "ready"
                and job.queue == wanted.queue
                and job.run in self.below(wanted.run)
                and job.run not in self.model.over
            ]
            assert not ages or not left or max(ages) < min(left)

    def lost(self, token: int, reason: str | None) -> None:
        """A delivery has ended without an outcome: ``reason`` if it counts, None if it was given back."""
        job = self.model.holds.pop(token).job
        if job.run in self.model.over:
            return
        if job.state == "reserved":
            job.state = "ready"
        elif reason is not None and job.attempt >= ATTEMPTS[job.queue]:
            job.state, job.reason = "failed", reason
        else:
            job.state, job.reason = "ready", reason
            job.attempt -= reason is None

    # ------------------------------------------------------------------ rules

    @rule(run=st.sampled_from(RUNS), queue=st.sampled_from(QUEUES), key=st.integers(0, 3))
    def send(self, run: str, queue: str, key: int) -> None:
        run_id = self.runs[run]
        view = self.keeper.ask(
            wire.QueuesSend(run=run_id, queue=queue, key=str(key), input="1", attempts=ATTEMPTS[queue])
        )
        if run_id in self.model.over:
            assert view.code == "SCOPE_CANCELLED"
            return
        job = self.model.jobs.get(view.job)
        if job is None:
            job = self.model.jobs[view.job] = Job(view.job, run_id, queue, self.h._tickets)
        assert (view.state, view.result) == (jobs.shown_state(job.state), job.result)
        self.look()

    @rule(run=st.sampled_from(RUNS), first=st.integers(4, 12))
    def send_many(self, run: str, first: int) -> None:
        """Four jobs at once, some of which may be there."""
        members = tuple(wire.NewJob(key=str(first + n), input="1") for n in range(4))
        run_id = self.runs[run]
        reply = self.keeper.ask(wire.QueuesSendMany(run=run_id, queue="q", members=members, attempts=ATTEMPTS["q"]))
        if run_id in self.model.over:
            assert reply.code == "SCOPE_CANCELLED"
            return
        for name in reply.jobs:
            if name not in self.model.jobs:
                self.model.jobs[name] = Job(name, run_id, "q", self.h._tickets)
        self.look()

    @rule(
        name=st.sampled_from(NAMES),
        run=st.sampled_from(("root", *RUNS)),
        chosen=st.sampled_from((("q",), ("p",), ("q", "p"), ("p", "q"))),
        places=st.integers(0, 3),
        wait_ms=st.sampled_from((None, None, 0, 3_000)),
        lease_ms=st.sampled_from((5_000, 30_000)),
        ahead=st.sampled_from((0, 3)),
    )
    def admit(
        self, name: str, run: str, chosen: tuple[str, ...], places: int, wait_ms: int | None, lease_ms: int, ahead: int
    ) -> None:
        client = self.here(name)
        if client is not None:
            entries = tuple(
                wire.AdmitFrom(run=self.runs[run], queue=queue, places=places, lease_ms=lease_ms, ahead=ahead)
                for queue in chosen
            )
            self.admits.append(client.submit(wire.QueuesAdmit(queues=entries, wait_ms=wait_ms)))
            self.look()

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data(), how=st.sampled_from(("complete", "complete", "fail", "fail for good", "release")))
    def end(self, data: st.DataObject, how: str) -> None:
        token = data.draw(st.sampled_from(sorted(self.model.holds)))
        held = self.model.holds[token]
        job = held.job
        client = self.here(held.client)
        if client is None:
            return
        if how == "release":
            client.ask(wire.Release(token=token))
            self.lost(token, None)
            self.look()
            return
        complete = wire.QueuesComplete(job=job.job, token=token, result=str(token))
        fail = wire.QueuesFail(job=job.job, token=token, error="E: x", retry=how == "fail")
        request = client.submit(complete if how == "complete" else fail)
        del self.model.holds[token]
        if job.state == "reserved" and job.run not in self.model.over:
            job.state, job.attempt = "running", job.attempt + 1
        if job.run in self.model.over:
            assert request.reply.code == "LEASE_LOST"
            return
        if how == "complete":
            job.state, job.result, job.reason = "succeeded", str(token), None
        elif how == "fail" and job.attempt < ATTEMPTS[job.queue]:
            job.state, job.reason = "delayed", "handler_error: E: x"
            job.due_ms = self.h.clock.wall_ms() + jobs.backoff_ms(job.job, job.attempt)
        else:
            job.state, job.reason = "failed", "handler_error: E: x"
        assert (request.reply.state, request.reply.result) == (job.state, job.result)
        assert request.repeat().reply == request.reply
        self.look()

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Jobs that were taken ahead, and others, which changes nothing."""
        tokens = data.draw(st.lists(st.sampled_from(sorted(self.model.holds)), max_size=3))
        client = self.here(self.model.holds[tokens[0]].client) if tokens else None
        if client is None:
            return
        assert client.ask(wire.QueuesStarted(tokens=tuple(tokens))) == wire.Ok()
        for token in tokens:
            held = self.model.holds[token]
            is_own = held.client == client.name and held.job.run not in self.model.over
            if is_own and held.job.state == "reserved":
                held.job.state, held.job.attempt, held.job.reason = "running", held.job.attempt + 1, None

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), token=st.integers(1, 40), fails=st.booleans())
    def end_with_a_dead_token(self, data: st.DataObject, token: int, fails: bool) -> None:
        job = self.model.jobs[data.draw(st.sampled_from(sorted(self.model.jobs)))]
        if token in self.model.holds or job.result == str(token):
            return
        if fails:
            self.keeper.refused("LEASE_LOST", wire.QueuesFail(job=job.job, token=token, error="E"))
        else:
            self.keeper.refused("LEASE_LOST", wire.QueuesComplete(job=job.job, token=token, result="late"))

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def wait_for_a_result(self, data: st.DataObject, name: str) -> None:
        job = self.model.jobs[data.draw(st.sampled_from(sorted(self.model.jobs)))]
        client = self.here(name)
        if client is not None:
            self.results.append((client.submit(wire.QueuesResult(job=job.job)), job))

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def repeat_an_admit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.answered[-6:]))
        client = self.here(request.client.name)
        if client is None or client.open.get(request.id) is not request or isinstance(request.reply, wire.Error):
            return
        tokens = [grant.token for grant in request.reply.jobs]
        if tokens and all(token in self.model.holds for token in tokens):
            self.answered.remove(request)
            again = request.repeat()
            assert again.reply == request.reply
            self.answered.append(again)

    @rule(data=st.data())
    def cancel_an_admit(self, data: st.DataObject) -> None:
        requests = [*self.answered[-3:], *self.admits[-3:]]
        if not requests:
            return
        request = data.draw(st.sampled_from(requests))
        client = self.here(request.client.name)
        if client is None or client.open.get(request.id) is not request:
            return
        request.cancel()
        for known in (self.answered, self.admits):
            if request in known:
                known.remove(request)
        for token, held in list(self.model.holds.items()):
            if (held.client, held.request) == (client.name, request.id):
                self.lost(token, None)
        self.look()

    @rule(name=st.sampled_from(NAMES), part=st.integers(0, 2))
    def beat(self, name: str, part: int) -> None:
        client = self.here(name)
        if client is not None:
            tokens = [token for token, held in self.model.holds.items() if held.client == name][part:]
            assert client.beat(*tokens) == [True] * len(tokens)
            for token in tokens:
                self.model.holds[token].expires = self.h.clock.lease_ms() + self.model.holds[token].length

    @rule(
        ms=st.sampled_from((1, 400, 800, 3_000, 5_000, 31_000)), how=st.sampled_from(("pass", "pass", "sleep", "stall"))
    )
    def time_passes(self, ms: int, how: str) -> None:
        if how == "sleep":
            self.h.suspend(ms)
            self.due()
        elif how == "stall":
            self.h.stall(ms)
            self.due()
        else:
            end = self.h.clock.steady_ms() + ms
            while self.h.clock.steady_ms() < end:
                due = self.h._due_in_ms()
                left = end - self.h.clock.steady_ms()
                self.h.pass_ms(left if due is None else max(1, min(left, due)))
                self.due()

    def due(self) -> None:
        for token, held in list(self.model.holds.items()):
            if held.expires <= self.h.clock.lease_ms():
                self.lost(token, "lease_expired")
        for job in self.model.jobs.values():
            if job.state == "delayed" and job.due_ms <= self.h.clock.wall_ms():
                job.state = "ready"
        self.look(in_order=False)

    @rule(name=st.sampled_from(NAMES))
    def connection_is_lost_or_back(self, name: str) -> None:
        if self.here(name) is None:
            self.model.away.discard(name)
            self.h.clients[name].resume()
            self.look()
        else:
            self.h.clients[name].lose()
            self.model.away.add(name)

    @rule(name=st.sampled_from(NAMES), bye=st.booleans())
    def session_ends(self, name: str, bye: bool) -> None:
        client = self.h.clients[name]
        self.admits = [request for request in self.admits if request.client is not client]
        self.answered = [request for request in self.answered if request.client is not client]
        self.results = [(request, job) for request, job in self.results if request.client is not client]
        client.bye() if bye else client.die()
        self.model.away.discard(name)
        for token, held in list(self.model.holds.items()):
            if held.client == name:
                self.lost(token, None if bye else "worker_died")
        self.look()
        self.h.session(name)

    @rule(run=st.sampled_from(("left", "left", "right", "leaf", "root")), seldom=st.integers(0, 3))
    def run_ends(self, run: str, seldom: int) -> None:
        if seldom:
            return
        self.keeper.ask(wire.RunsEnd(run=self.runs[run], state="stopped"))
        self.model.over |= self.below(self.runs[run])
        self.look()
        if run == "root":
            self.new_runs()

    # ------------------------------------------------------------------ what is always so

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.check()
        reason = "CASE WHEN state = 'running' THEN NULL ELSE reason END"  # then it is that of the delivery before
        rows = self.h.rows(f"SELECT job, state, attempt, result, {reason} FROM jobs")
        assert {row[0]: row[1:] for row in rows} == {
            job.job: (job.state, job.attempt, job.result, job.reason) for job in self.model.jobs.values()
        }
        assert self.h.held() == {token: held.expires for token, held in self.model.holds.items()}
        for request, job in self.results:
            ended = job.state in ("succeeded", "failed")
            if request.reply is not None:
                state = job.state if ended else "cancelled"
                assert (request.reply.state, request.reply.result) == (state, job.result)
            elif self.here(request.client.name) is not None:  # who is away is told of the end of a run when it is back
                assert not ended and job.run not in self.model.over, f"{request.request} was not answered"


QueuesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestQueues = QueuesMachine.TestCase

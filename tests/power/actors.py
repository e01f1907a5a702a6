"""Clients that do everything at random, and write into the book what they were told."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.power.book import (
    NEEDED_UNITS,
    RESERVED_MINOR,
    SLOTS,
    UNITS_MAX,
    WINDOW_S,
    Book,
    Hold,
    Job,
    Reservation,
    Timer,
)
from tests.power.life import Life
from tests.power.speaker import Message, Refused, Speaker

WAIT_MS = 50
ATTEMPTS = 100
BARRIER = 2**40  # never reached
QUEUES = ("plain", "dear")


def window() -> int:
    """The limit's window by the wall clock."""
    return int(time.time() // WINDOW_S)


def declare(speaker: Speaker, budget: str) -> None:
    """What the actors use; a budget for each boot."""
    speaker.call("limits.declare", limit="day", max=UNITS_MAX, per_seconds=WINDOW_S)
    speaker.call("slots.declare", pool="pool", max=SLOTS)
    speaker.call("budgets.declare", budget=budget, limit_minor=UNITS_MAX, currency="USD", scale=2)
    speaker.call("queues.declare", queue="plain", attempts=ATTEMPTS)
    needs = {
        "limits": [{"name": "day", "units": NEEDED_UNITS}],
        "budgets": [{"name": budget, "reserve_minor": RESERVED_MINOR}],
    }
    speaker.call("queues.declare", queue="dear", attempts=ATTEMPTS, needs=needs)


class Actor(Life):
    """One session over the wire."""

    def __init__(self, name: str, speaker: Speaker, book: Book, rng: random.Random, payload: int) -> None:
        super().__init__(name, book)
        self.speaker, self.rng = speaker, rng
        self.payload = payload  # bytes of the larger results and inputs
        self.is_remote = name.startswith("far")
        self.key = ""
        self.count = 0
        self.cursor = 0
        self.holds: dict[int, Callable[[], None]] = {}  # by token: what ends it
        self.kept: tuple[int, Message, Message] | None = None  # the last request to be kept: its id, itself, its answer
        self.finish: Callable[[Message], object] | None = None  # what the open request's answer means

    def close(self) -> None:
        self.speaker.close()

    def _come_back(self) -> None:
        """Nothing that it was given is lost, and its open request gets its answer."""
        welcome = self.speaker.connect()
        if not welcome.get("resumed"):
            self.book.blame(f"{self.name}: the session was forgotten")
        held = list(self.holds)
        self.speaker.post("beat", tokens=held)
        if self.speaker.open is not None:
            self._answered(self.speaker.repeat)
        self.speaker.call("beat", tokens=list(self.holds))
        for token in self.speaker.lost:
            if token in held:
                self.book.blame(f"{self.name}: hold {token} ({self.book.tokens[token]}) is lost")
        self.speaker.lost.clear()
        if self.kept is not None:
            number, request, answer = self.kept
            found = self.speaker.ask_again(number, request)
            if found != answer:
                self.book.blame(f"{self.name}: the answer to {request} was {answer} and is {found}")

    # ---- requests

    def _ask(self, means: Callable[[Message], object], verb: str, **fields: object) -> None:
        """Sends a request; ``means`` writes its answer into the book, also when it comes after the cut."""
        self.finish = means
        self._answered(lambda: self.speaker.call(verb, **fields))

    def _answered(self, ask: Callable[[], Message]) -> None:
        try:
            reply = ask()
        except Refused:
            self.finish = None
            raise
        assert self.finish is not None
        self.finish(reply)
        self.finish = None

    def _act(self) -> None:
        if self.holds and (len(self.holds) > 4 or self.rng.random() < 0.5):
            self.holds.pop(self.rng.choice(list(self.holds)))()
            return
        choices = (
            (self._acquire, 6),
            (self._send, 5),
            (self._admit, 5),
            (self._take, 3),
            (self._slots, 3),
            (self._reserve, 3),
            (self._timer, 2),
            (self._ack_timer, 1),
            (self._arrive, 2),
            (self._follow, 2),
            (self._child, 1),
            (self._group, 1),
            (self._look, 2),
        )
        act = self.rng.choices([act for act, _ in choices], [weight for _, weight in choices])[0]
        act()

    def _new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.name}-{self.book.boot}-{self.count}"

    def _text(self) -> str:
        size = self.payload if self.rng.random() < 0.3 else 10
        self.count += 1
        return '"' + f"{self.name}/{self.book.boot}/{self.count}/".ljust(size, "x") + '"'

    def _hold(self, token: int) -> Hold:
        return Hold(token, self.name, self.is_remote)

    def _release(self, hold: Hold) -> None:
        self.book.end(hold)
        self._ask(lambda reply: None, "leases.release", token=hold.token)

    # ---- once

    def _acquire(self) -> None:
        name = f"key-{self.book.boot}-{self.rng.randrange(30)}" if self.rng.random() < 0.5 else self._new("key")
        key = self.book.key(name)

        def means(reply: Message) -> None:
            if reply["reply"] == "once.granted":
                hold = self._hold(reply["token"])
                self.book.give(key, name, hold)
                self.holds[hold.token] = lambda: self._finish_key(name, hold)
            elif reply["reply"] == "once.done":
                self._key_done(name, reply)

        self._ask(means, "once.acquire", run=self.book.run, key=name, wait_ms=self.rng.choice((0, WAIT_MS)))

    def _key_done(self, name: str, reply: Message) -> None:
        key = self.book.key(name)
        with self.book.lock:
            self.book.facts += 1
            if reply["result"] not in key.offered or key.done not in (None, reply["result"]):
                self.book.blame(f"{name} has the result {reply['result'][:50]}, after {key.done and key.done[:50]}")
            key.done = reply["result"]

    def _finish_key(self, name: str, hold: Hold) -> None:
        key, dice = self.book.key(name), self.rng.random()
        if dice < 0.2:
            self._release(hold)
            return
        fields = {"run": self.book.run, "key": name, "token": hold.token}
        if dice < 0.7:
            result = self._text()
            key.offered.add(result)
            self.book.end(hold)
            self._ask(lambda reply: self._key_done(name, reply), "once.complete", **fields, result=result)
            return

        def failed(reply: Message) -> None:
            with self.book.lock:
                self.book.facts += 1
                key.fails_told = max(key.fails_told, reply["attempts"])

        self.book.end(hold)
        with self.book.lock:
            key.fails_sent += 1
        self._ask(failed, "once.fail", **fields, error="E: no", attempts=ATTEMPTS)

    # ---- jobs

    def _send(self) -> None:
        queue, name = self.rng.choice(QUEUES), self._new("job")
        fields = {"run": self.book.run, "queue": queue, "key": name, "input": self._text()}
        self._ask(lambda reply: self._know_job(reply["job"], name, queue), "queues.send", **fields)

    def _know_job(self, id: str, name: str, queue: str) -> Job:
        with self.book.lock:
            self.book.id(id, name)
            if id not in self.book.jobs:
                self.book.jobs[id] = Job(name, self.book.boot, queue == "dear")
            return self.book.jobs[id]

    def _admit(self) -> None:
        queue, places = self.rng.choice(QUEUES), self.rng.randint(1, 3)
        run = self.book.run
        now = window()
        if queue == "dear":
            self.book.add(self.book.units_sent, now, places * NEEDED_UNITS)

        def means(reply: Message) -> None:
            given = reply.get("jobs", [])
            for each in given:
                self._given(each, queue)
            if queue == "dear" and now == window():
                with self.book.lock:
                    self.book.units_told[now] += len(given) * NEEDED_UNITS
                    self.book.units_sent[now] -= (places - len(given)) * NEEDED_UNITS

        wanted = [{"run": run, "queue": queue, "places": places}]
        self._ask(means, "queues.admit", queues=wanted, wait_ms=self.rng.choice((0, WAIT_MS)))

    def _given(self, given: Message, queue: str) -> None:
        with self.book.lock:
            job = self._know_job(given["job"], given["key"], queue)
            hold = self._hold(given["token"])
            self.book.give(job, job.name, hold)
            self.book.deliver(job, given["attempt"], is_remote=self.is_remote)
            money = None
            for reservation in given.get("reservations", []):
                self.book.id(reservation, f"{job.name}, attempt {given['attempt']}, token {hold.token}")
                money = Reservation(self.book.budget, RESERVED_MINOR, self.is_remote)
                self.book.reservations[reservation] = money
        self.holds[hold.token] = lambda: self._finish_job(given, job, hold, money)

    def _finish_job(self, given: Message, job: Job, hold: Hold, money: Reservation | None) -> None:
        dice = self.rng.random()
        if money is not None:
            money.offered = 0  # whatever becomes of it, not simply all of it
        self.book.end(hold)
        if dice < 0.2:
            job.attempt = min(job.attempt, given["attempt"] - 1)  # it is not counted
            self._ask(lambda reply: None, "leases.release", token=hold.token)
        elif dice < 0.85:
            self._complete(given, job, hold, money)
        else:
            fields = {"job": given["job"], "token": hold.token, "error": "E: no"}
            self._ask(lambda reply: None, "queues.fail", **fields)

    def _complete(self, given: Message, job: Job, hold: Hold, money: Reservation | None) -> None:
        result = self._text()
        job.offered.add(result)
        costs = {id: self.rng.randint(0, RESERVED_MINOR) for id in given.get("reservations", [])}

        def means(reply: Message) -> None:
            with self.book.lock:
                self.book.facts += 1
                if (reply["state"], reply["result"]) != ("succeeded", result):
                    self.book.blame(f"{job.name} was completed with {result[:50]}, the answer was {reply}")
                job.done = result
                if money is not None:
                    money.charged = sum(costs.values())

        fields = {"job": given["job"], "token": hold.token, "result": result, "costs": costs}
        self._ask(means, "queues.complete", **fields)

    def _group(self) -> None:
        members = [{"key": self._new("member"), "input": self._text()} for _ in range(3)]

        def means(reply: Message) -> None:
            self.book.id(reply["run"], members[0]["key"] + "'s group")
            self.book.groups.add(reply["run"])
            for id, member in zip(reply["jobs"], members, strict=True):
                self._know_job(id, member["key"], "plain")

        self._ask(means, "groups.submit", run=self.book.run, queue="plain", members=members, owned=False)

    # ---- resources

    def _take(self) -> None:
        units, now = self.rng.randint(1, 3), window()
        self.book.add(self.book.units_sent, now, units)
        fields = {"run": self.book.run, "limit": "day", "units": units, "keep": self.rng.random() < 0.5}

        def means(reply: Message) -> None:
            with self.book.lock:
                self.book.facts += 1
                if now == window():
                    self.book.units_told[now] += units
            if fields["keep"]:
                self.kept = (self.speaker.answered, {"verb": "limits.take", **fields}, reply)

        self._ask(means, "limits.take", **fields)

    def _slots(self) -> None:
        units = self.rng.randint(1, 2)

        def means(reply: Message) -> None:
            if reply["reply"] == "slots.granted":
                hold = self._hold(reply["token"])
                self.book.give_slots(hold, units)
                self.holds[hold.token] = lambda: self._release(hold)

        fields = {"run": self.book.run, "pool": "pool", "units": units, "wait_ms": self.rng.choice((0, WAIT_MS))}
        self._ask(means, "slots.acquire", **fields)

    def _look(self) -> None:
        """What a reader was shown must be there afterwards, too."""
        look = self.rng.choice((self._look_at_limit, self._look_at_key, self._look_at_job))
        look()

    def _look_at_limit(self) -> None:
        now = window()

        def means(reply: Message) -> None:
            with self.book.lock:
                if now == window():
                    self.book.units_seen[now] = max(self.book.units_seen[now], reply.get("used", 0))

        self._ask(means, "limits.get", limit="day")

    def _look_at_key(self) -> None:
        with self.book.lock:
            open_keys = [name for name, key in self.book.keys.items() if key.done is None]
        if open_keys:
            name = self.rng.choice(open_keys)
            self._ask(lambda reply: self._see_key(name, reply), "once.get", run=self.book.run, key=name, wait_ms=0)

    def _look_at_job(self) -> None:
        with self.book.lock:
            running = [id for id, job in self.book.jobs.items() if job.hold is not None and not job.hold.ending]
        if running:
            id = self.rng.choice(running)
            self._ask(lambda reply: self.book.see(self.book.jobs[id], reply), "queues.result", job=id, wait_ms=0)

    def _see_key(self, name: str, reply: Message) -> None:
        if reply["reply"] == "once.done":
            self._key_done(name, reply)
        else:
            with self.book.lock:
                key = self.book.key(name)
                key.fails_told = max(key.fails_told, reply.get("attempts", 0))

    def _reserve(self) -> None:
        amount, budget = self.rng.randint(1, 100), self.book.budget

        def means(reply: Message) -> None:
            id = reply["reservation"]
            self.book.token(reply["token"], f"reservation {id}")
            self.book.id(id, f"reservation with token {reply['token']}")
            money = self.book.reservations[id] = Reservation(budget, amount, self.is_remote)
            self.holds[reply["token"]] = lambda: self._settle(id, money)

        self._ask(means, "budgets.reserve", run=self.book.run, budget=budget, amount_minor=amount)

    def _settle(self, id: str, money: Reservation) -> None:
        cost = self.rng.randint(0, money.amount)
        money.offered = cost

        def means(reply: Message) -> None:
            with self.book.lock:
                self.book.facts += 1
                money.charged = cost
                if (reply["state"], reply["charged_minor"]) not in (("settled", cost), ("released", 0)):
                    self.book.blame(f"reservation {id} was settled with {cost}, the answer was {reply}")

        if self.rng.random() < 0.3:
            cost = money.offered = 0
            self._ask(means, "budgets.release", reservation=id)
        else:
            self._ask(means, "budgets.settle", reservation=id, cost_minor=cost, work_key=self._new("work"))

    # ---- timers, barriers, events, runs

    def _timer(self) -> None:
        name, after_ms = self._new("timer"), self.rng.choice((0, 100, 3_600_000))

        def means(reply: Message) -> None:
            self.book.facts += 1
            self.book.timers[name] = Timer(reply["fire_ms"], reply["fired"])

        self._ask(means, "timers.sleep", run=self.book.run, name=name, after_ms=after_ms, wait_ms=0)

    def _ack_timer(self) -> None:
        with self.book.lock:
            fired = [name for name, timer in self.book.timers.items() if timer.fired and not timer.acks_sent]
            if not fired:
                return
            name = self.rng.choice(fired)
            timer = self.book.timers[name]
            timer.acks_sent += 1

        def means(reply: Message) -> None:
            with self.book.lock:
                if timer.acked:
                    self.book.blame(f"{name} was acknowledged twice")
                timer.acked = True

        self._ask(means, "timers.ack", run=self.book.run, name=name)

    def _arrive(self) -> None:
        name = f"barrier-{self.book.boot}"
        self.book.add(self.book.barriers_sent, name, 1)

        def means(reply: Message) -> None:
            with self.book.lock:
                self.book.barriers_told[name] = max(self.book.barriers_told[name], reply["arrivals"])

        fields = {"run": self.book.run, "name": name, "count": BARRIER, "worker": self._new("w"), "wait_ms": 0}
        self._ask(means, "barriers.arrive", **fields)

    def _follow(self) -> None:
        def means(reply: Message) -> None:
            for event in reply.get("events", []):
                self.book.event(event)
            self.cursor = reply.get("cursor", self.cursor)

        self._ask(means, "events.read", run=self.book.run, after=self.cursor, limit=100)

    def _child(self) -> None:
        run, state = "", self.rng.choice(("stopped", "finished"))
        with self.book.lock:
            active = [run for run, state in self.book.runs.items() if state == "active"]
            if active and self.rng.random() < 0.5:
                run = self.rng.choice(active)
                self.book.runs[run] = "ending"

        def means(reply: Message) -> None:
            self.book.id(reply["run"], self._new("run") if not run else self.book.ids[run])
            self.book.runs[reply["run"]] = reply["state"]

        if run:
            self._ask(means, "runs.end", run=run, state=state)
        else:
            self._ask(means, "runs.child", parent=self.book.run, name=self._new("child"), owned=False)

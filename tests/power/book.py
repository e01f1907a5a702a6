"""What the clients were told, and what may be true besides: the history that must survive a power cut.

A fact is written down when its reply has arrived. What was *offered* (a request was sent) may have happened or not,
until its reply says so. What can be judged at once, whatever the order in which threads read their replies, is judged
here (no number twice, no hold beside another); the rest is compared with the daemon after each cut, in checks.py.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

SLOTS = 3  # units of the pool
UNITS_MAX = 2**50  # of the limit and the budgets: they are never exhausted
WINDOW_S = 86_400
NEEDED_UNITS = 2  # of the limit, for each delivery of a job of the queue `dear`
RESERVED_MINOR = 7  # the same, of the boot's budget


@dataclass
class Hold:
    """A hold that was given. ``ending``: an outcome or a release was sent, so it may be gone."""

    token: int
    who: str
    is_remote: bool
    ending: bool = False


@dataclass
class Key:
    """A once key. ``offered``: results that somebody may have recorded."""

    offered: set[str] = field(default_factory=set)
    done: str | None = None
    fails_sent: int = 0
    fails_told: int = 0
    hold: Hold | None = None
    last_token: int = 0


@dataclass
class Job:
    """A job. ``attempt``: the last delivery that was told with the promise to be remembered."""

    name: str
    boot: int  # when it was first told
    is_dear: bool = False
    offered: set[str] = field(default_factory=set)
    done: str | None = None
    attempt: int = 0
    hold: Hold | None = None
    last_token: int = 0


@dataclass
class Reservation:
    """Money. ``charged``: what it must have cost in the end; None: that is open."""

    budget: str
    amount: int
    is_remote: bool
    offered: int | None = None  # a settlement that was sent
    charged: int | None = None


@dataclass
class Timer:
    """A timer. ``acks``: sent, and answered."""

    fire_ms: int
    fired: bool = False
    acks_sent: int = 0
    acked: bool = False


class Book:
    """See the module. Every method may be called by several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wrong: list[str] = []
        self.given = threading.Event()  # somebody was given a hold, or shown one; whoever waits for it clears it
        self.boot = 0
        self.budget = ""  # the one that is used
        self.window = 0  # of the limit, when the boot began
        self.run = ""
        self.tokens: dict[int, str] = {}
        self.ids: dict[str, str] = {}
        self.keys: dict[str, Key] = {}
        self.jobs: dict[str, Job] = {}
        self.timers: dict[str, Timer] = {}
        self.reservations: dict[str, Reservation] = {}
        self.runs: dict[str, str] = {}  # id -> state
        self.groups: set[str] = set()  # their runs
        self.barriers_sent: defaultdict[str, int] = defaultdict(int)
        self.barriers_told: defaultdict[str, int] = defaultdict(int)
        self.events: dict[int, tuple[str, int]] = {}
        self.slots: dict[int, tuple[Hold, int]] = {}  # by token
        self.units_told: defaultdict[int, int] = defaultdict(int)  # by window
        self.units_seen: defaultdict[int, int] = defaultdict(int)
        self.units_sent: defaultdict[int, int] = defaultdict(int)
        self.facts = 0

    def blame(self, what: str) -> None:
        self.wrong.append(f"boot {self.boot}: {what}")

    def key(self, name: str) -> Key:
        with self.lock:
            return self.keys.setdefault(name, Key())

    def add(self, counts: dict[T, int], name: T, count: int) -> None:
        """Counts what is about to be sent."""
        with self.lock:
            counts[name] += count

    # ---- numbers

    def token(self, token: int, what: str) -> None:
        """A token was given."""
        with self.lock:
            self.facts += 1
            if token in self.tokens:
                self.blame(f"token {token} was given for {self.tokens[token]} and for {what}")
            self.tokens[token] = what
            self.given.set()

    def id(self, id: str, what: str) -> None:
        """An id was told: always of the same thing."""
        with self.lock:
            self.facts += 1
            if self.ids.setdefault(id, what) != what:
                self.blame(f"id {id} was given to {self.ids[id]} and to {what}")

    def event(self, event: dict[str, Any]) -> None:
        """An event was shown."""
        with self.lock:
            content = (event["type"], event["at_ms"])
            if self.events.setdefault(event["event"], content) != content:
                self.blame(f"event {event['event']} was {self.events[event['event']]} and is {content}")

    # ---- holds

    def give(self, thing: Key | Job, name: str, hold: Hold) -> None:
        """A key or a job was given to somebody."""
        with self.lock:
            self.token(hold.token, name)
            other = thing.hold
            if other is not None and not other.ending:
                self.blame(f"{name} was given to {hold.who}, but {other.who} holds it")
            if thing.done is not None:
                self.blame(f"{name} was given to {hold.who}, but was done")
            if hold.token <= thing.last_token:
                self.blame(f"{name} was given under {hold.token}, and before under {thing.last_token}")
            thing.hold, thing.last_token = hold, hold.token

    def give_slots(self, hold: Hold, units: int) -> None:
        with self.lock:
            self.token(hold.token, "slots")
            self.slots[hold.token] = hold, units
            used = sum(units for other, units in self.slots.values() if not other.ending)
            if used > SLOTS:
                self.blame(f"{used} slots of {SLOTS} are out")

    def end(self, hold: Hold) -> None:
        """Its outcome, or its release, is about to be sent."""
        with self.lock:
            hold.ending = True

    def deliver(self, job: Job, attempt: int, *, is_remote: bool) -> None:
        """A delivery was told. It is remembered across a cut, but for a relaxed one: of a job that needs nothing and
        is no older than the boot, told to a process that the cut ends, too."""
        with self.lock:
            if attempt <= job.attempt:
                self.blame(f"{job.name} has attempt {attempt} again, {job.attempt} was told")
            if is_remote or job.is_dear or job.boot < self.boot:
                job.attempt = attempt

    def see(self, job: Job, reply: dict[str, Any]) -> None:
        """A reader was shown a job: a delivery that it saw is remembered, even if its grant need not be."""
        with self.lock:
            if job.hold is not None and not job.hold.ending:  # else it may be given back by now, which is not counted
                job.attempt = max(job.attempt, reply.get("attempt", 0))
                self.given.set()

    def lose_power(self) -> None:
        """All local processes are gone, and what they held; what they had sent may have happened."""
        with self.lock:
            things: list[Key | Job] = [*self.keys.values(), *self.jobs.values()]
            for thing in things:
                if thing.hold is not None and not thing.hold.is_remote:
                    thing.hold = None
            self.slots = {token: held for token, held in self.slots.items() if held[0].is_remote}
            for reservation in self.reservations.values():
                self._charge(reservation)

    @staticmethod
    def _charge(reservation: Reservation) -> None:
        # Who is gone without a word is charged all that it had reserved; who had sent its cost, that or all of it.
        if not reservation.is_remote and reservation.charged is None and reservation.offered is None:
            reservation.charged = reservation.amount

"""Whether the daemon still knows, after a cut, what its clients were told before."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.power.actors import window
from tests.power.book import Book, Job, Key
from tests.power.speaker import Refused, Speaker

SAMPLE = 60  # facts of a kind from before the last boot, beside all of it


class Checks:
    """Everything that was told in the last boot, and a sample of what was told before."""

    def __init__(self, book: Book, speaker: Speaker, rng: random.Random) -> None:
        self.book, self.speaker, self.rng = book, speaker, rng
        self.recent = f"-{book.boot - 1}-"

    def run(self) -> None:
        """The book's ``wrong`` has what is not as it was told."""
        for check in (
            self._keys,
            self._jobs,
            self._timers,
            self._money,
            self._runs,
            self._barriers,
            self._units,
            self._slots,
            self._events,
        ):
            try:
                check()
            except Refused as error:
                self.book.blame(f"{check.__name__}: {error}")

    def _some(self, names: list[str], named: Callable[[str], str] = str) -> list[str]:
        recent = [name for name in names if self.recent in named(name)]
        older = [name for name in names if self.recent not in named(name)]
        return recent + self.rng.sample(older, min(SAMPLE, len(older)))

    def _expect(self, is_right: bool, what: str, found: object) -> None:
        if not is_right:
            self.book.blame(f"{what}; now: {str(found)[:300]}")

    # ---- keys and jobs

    def _keys(self) -> None:
        for name in self._some(list(self.book.keys)):
            self._key(name, self.book.keys[name])

    def _key(self, name: str, key: Key) -> None:
        found = self.speaker.call("once.get", run=self.book.run, key=name, wait_ms=0)
        kind = found["reply"]
        if key.done is not None:
            self._expect(found.get("result") == key.done, f"{name} was done with {key.done[:50]}", found)
        elif kind == "once.done":
            self._expect(found["result"] in key.offered, f"{name}: nobody has offered its result", found)
        else:
            attempts = found.get("attempts", 0)
            told, sent = key.fails_told, key.fails_sent
            self._expect(told <= attempts <= sent, f"{name} has failed {told} times, at most {sent}", found)
            is_held = key.hold is not None and not key.hold.ending
            may_be_held = key.hold is not None
            self._expect(kind == "once.held" if is_held else kind == "once.open" or may_be_held, f"{name} {key}", found)
        if key.hold is not None and not key.hold.ending:
            found = self.speaker.call("once.acquire", run=self.book.run, key=name, wait_ms=0)
            self._expect(found["reply"] == "once.held", f"{name} is held by {key.hold}", found)

    def _jobs(self) -> None:
        for id in self._some(list(self.book.jobs), lambda id: self.book.jobs[id].name):
            self._job(id, self.book.jobs[id])

    def _job(self, id: str, job: Job) -> None:
        try:
            found = self.speaker.call("queues.result", job=id, wait_ms=0)
        except Refused as error:
            self.book.blame(f"job {id} ({job.name}) was sent: {error}")
            return
        if job.done is not None:
            self._expect(found.get("result") == job.done, f"{job.name} was completed with {job.done[:50]}", found)
        elif found["state"] == "succeeded":
            self._expect(found["result"] in job.offered, f"{job.name}: nobody has offered its result", found)
        elif job.hold is not None and not job.hold.ending:
            self._expect(found["state"] == "running", f"{job.name} is held by {job.hold}", found)
        elif job.hold is None:
            self._expect(found["state"] in ("ready", "delayed"), f"{job.name} has no holder", found)
        self._expect(found.get("attempt", 0) >= job.attempt, f"{job.name} was delivered {job.attempt} times", found)

    # ---- timers, runs, barriers

    def _timers(self) -> None:
        for name in self._some(list(self.book.timers)):
            timer = self.book.timers[name]
            fields = {"run": self.book.run, "name": name, "after_ms": 10**9, "wait_ms": 0}
            found = self.speaker.call("timers.sleep", **fields)
            self._expect(found["fire_ms"] == timer.fire_ms and found["fired"] >= timer.fired, f"{name}: {timer}", found)
            self._expect(timer.acks_sent > 0 or not found.get("acked"), f"{name}: nobody has acknowledged it", found)
            if timer.acked:
                try:
                    self._expect(
                        False, f"{name} was acknowledged", self.speaker.call("timers.ack", run=self.book.run, name=name)
                    )
                except Refused as error:
                    self._expect(error.code == "CONFLICT", f"{name} was acknowledged", error)

    def _runs(self) -> None:
        for id, state in [*self.book.runs.items(), *((group, "active") for group in self.book.groups)]:
            try:
                found = self.speaker.call("runs.get", run=id)["state"]
            except Refused as error:
                found = str(error)
            self._expect(state in (found, "ending"), f"run {id} was {state}", found)

    def _barriers(self) -> None:
        for name, told in self.book.barriers_told.items():
            found = self.speaker.call("barriers.get", run=self.book.run, name=name)["arrivals"]
            sent = self.book.barriers_sent[name]
            self._expect(told <= found <= sent, f"{name}: {told} have arrived, at most {sent}", found)

    # ---- resources

    def _units(self) -> None:
        now = window()
        used = self.speaker.call("limits.get", limit="day").get("used", 0)
        if now == window() and self.book.window == now:  # a request at midnight may have been served on either side
            told = max(self.book.units_told[now], self.book.units_seen[now])
            sent = self.book.units_sent[now]
            self._expect(told <= used <= sent, f"{told} units were taken, at most {sent}", used)

    def _slots(self) -> None:
        held = {token: units for token, (hold, units) in self.book.slots.items() if not hold.ending}
        used = self.speaker.call("slots.get", pool="pool").get("used", 0)
        may_be = sum(units for _, units in self.book.slots.values())
        self._expect(sum(held.values()) <= used <= may_be, f"slots are held: {self.book.slots}", used)

    def _money(self) -> None:
        for budget in sorted({money.budget for money in self.book.reservations.values()})[-2:]:
            found = self.speaker.call("budgets.get", budget=budget, reservations=1_000)
            views = {view["reservation"]: view for view in found.get("reservations", [])}
            for id, money in self.book.reservations.items():
                if money.budget == budget and (id in views or len(views) < 1_000):
                    self._reservation(id, views.get(id))
            if len(views) < 1_000:
                charged = sum(view["charged_minor"] for view in views.values())
                left = sum(view["left_minor"] for view in views.values())
                sums = found.get("spent_minor", 0), found.get("reserved_minor", 0)
                self._expect(sums == (charged, left), f"{budget}: {charged} was charged, {left} is reserved", sums)

    def _reservation(self, id: str, view: dict[str, object] | None) -> None:
        money = self.book.reservations[id]
        if view is None:
            self.book.blame(f"reservation {id} is gone: {money}")
        elif money.charged is not None:
            right = (view["charged_minor"], view["left_minor"]) == (money.charged, 0)
            self._expect(right, f"reservation {id}: {money}", view)
        elif money.offered is None:
            self._expect(view["state"] == "active", f"reservation {id}: {money}", view)

    # ---- events

    def _events(self) -> None:
        """From a place at random: what was shown is there, once; numbers that were given are not given again."""
        known = sorted(self.book.events)
        if not known:
            return
        cursor = self.rng.choice(known[-2_000:]) - 1
        found: set[int] = set()
        more = True
        while more:
            page = self.speaker.call("events.read", run=self.book.run, after=cursor, limit=500)
            for event in page.get("events", []):
                self.book.event(event)
                found.add(event["event"])
            self._expect(not page.get("gap"), "the events have a gap", cursor)
            more = page.get("more", False) and page["cursor"] > cursor
            cursor = page.get("cursor", cursor)
            start = min(found, default=cursor)
        missing = [number for number in known if number >= start and number not in found]
        self._expect(not missing, f"{len(missing)} events were shown", missing[:10])

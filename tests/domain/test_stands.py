"""Nobody starves: a job that needs units of several limits starts, while others take units of each limit steadily.

The model is one sentence: the oldest job starts when the last of the windows that it lacks opens, or its slots are
free, whichever is later. That all who may pass it do, by exactly what is not set aside, the harness checks after each
step, in one pass by age over all that wait.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from runstate import wire
from tests.harness import Client, Harness, Request

STEP_MS = 500
WINDOWS = (2, 3, 6)  # seconds; 6 s also end where the others do


@dataclass
class Scene:
    """Limits with these windows, all used up, and takers who take each of them again and again."""

    h: Harness
    per_seconds: tuple[int, ...]
    most: tuple[int, ...]
    open: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = self.h.session("taker")
        self.run = str(self.client.ask(wire.RunsJoin(name="run")).run)
        self.client.ask(wire.SlotsDeclare(pool="gpu", max=2))
        self.client.ask(wire.QueuesDeclare(queue="q", attempts=9))
        for name, most, per_seconds in zip(self.names, self.most, self.per_seconds, strict=True):
            self.client.ask(wire.LimitsDeclare(limit=name, max=most, per_seconds=per_seconds))
            self.client.ask(wire.LimitsTake(run=self.run, limit=name, units=most))

    @property
    def names(self) -> list[str]:
        return [f"l{n}" for n in range(len(self.per_seconds))]

    def taker(self, name: str, units: int) -> None:
        self.open.append(self.client.submit(wire.LimitsTake(run=self.run, limit=name, units=units)))

    def take_again(self) -> None:
        """Whoever got something wants it again, until all wait."""
        while done := [request for request in self.open if request.reply is not None]:
            for request in done:
                assert request.reply == wire.LimitTaken()
                self.open.remove(request)
                asked = request.request
                assert isinstance(asked, wire.LimitsTake)
                self.taker(asked.limit, asked.units)

    def send(self, worker: Client, units: tuple[int, ...], slots: int, key: str = "old") -> Request:
        """A job that needs so many units of each limit, and a worker who waits for it."""
        limits = [wire.UnitsNeeded(name=name, units=n) for name, n in zip(self.names, units, strict=True) if n]
        pools = (wire.UnitsNeeded(name="gpu", units=slots),) if slots else ()
        needs = wire.Needs(limits=tuple(limits), slots=pools)
        self.client.ask(wire.QueuesSend(run=self.run, queue="q", key=key, input="1", needs=needs))
        return worker.submit(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=self.run, queue="q"),)))

    def last_opens_ms(self) -> int:
        """When, on the wall, the last of the present windows ends."""
        now = self.h.clock.wall_ms()
        return max(now - now % (per * 1_000) + per * 1_000 for per in self.per_seconds)

    def step(self) -> None:
        self.h.pass_ms(STEP_MS)
        self.take_again()


def combinations() -> list[tuple[int, ...]]:
    pairs = list(itertools.product(WINDOWS, repeat=2))
    triples = list(itertools.combinations_with_replacement(WINDOWS, 3))
    return [*pairs, *triples, *(triple[::-1] for triple in triples if len(set(triple)) == 3)]


@pytest.mark.parametrize("per_seconds", combinations(), ids=str)
@pytest.mark.parametrize("slots", [0, 2])
def test_the_oldest_starts_when_the_last_window_that_it_lacks_opens(
    h: Harness, per_seconds: tuple[int, ...], slots: int
) -> None:
    for needed, offset_ms in itertools.product((1, 2), (0, 2_500)):
        h = Harness()
        h.pass_ms(6_000 - h.clock.wall_ms() % 6_000 + offset_ms)
        scene = Scene(h, per_seconds, (2,) * len(per_seconds))
        waits = scene.send(h.session("worker"), (needed,) * len(per_seconds), slots)
        for name, units in itertools.product(scene.names, (1, 2)):
            scene.taker(name, units)
        starts_ms = scene.last_opens_ms()
        while h.clock.wall_ms() < starts_ms:
            assert waits.reply is None
            scene.step()
        h.check()
        assert waits.reply is not None, f"{per_seconds}, {needed} of each: not started when the last window opened"
        h.close()


@pytest.mark.parametrize("seed", [*range(30), 259])  # 259: a window whose name is ahead of the wall
def test_nobody_starves_whatever_the_clock_does(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    h = Harness()
    h.pass_ms(rng.randrange(6_000))
    per_seconds = rng.choice(combinations())
    scene = Scene(h, per_seconds, tuple(rng.randint(1, 4) for _ in per_seconds))
    older = rng.choice((0, 1))
    for name, most in zip(scene.names, scene.most, strict=True):
        for _ in range(older):
            scene.taker(name, rng.randint(1, most))
    held = h.session("holder").ask(wire.SlotsAcquire(run=scene.run, pool="gpu", lease_ms=wire.LEASE_MS_MAX)).token
    slots = rng.choice((0, 1, 2))
    waits = scene.send(h.session("worker"), tuple(rng.randint(1, most) for most in scene.most), slots)
    for name, most in zip(scene.names, scene.most, strict=True):
        for _ in range(2):
            scene.taker(name, rng.randint(1, most))
    for n in range(2):  # younger ones, which want the same and less
        units = tuple(rng.randint(0, most) for most in scene.most)
        scene.send(h.session(f"younger {n}"), units, rng.choice((0, 1)), key=str(n))
    changed_ms = h.clock.steady_ms()  # when a clock was set, or slots were given back, last
    for number in range(24):
        scene.step()
        if number < 12 and rng.random() < 0.2:
            h.clock.jump_wall(rng.choice((-3_600_000, -7_000, -2_000, 1_000, 2_000, 9_000)))
            h.tick()  # the alarm of whoever waits rings
            scene.take_again()
            changed_ms = h.clock.steady_ms()
        if number == 12:
            h.clients["holder"].ask(wire.Release(token=held))
            changed_ms = h.clock.steady_ms()
        h.check()
    bound_ms = (1 + older) * max(per_seconds) * 1_000
    while waits.reply is None:
        assert h.clock.steady_ms() < changed_ms + bound_ms + STEP_MS, "not started"
        scene.step()
        h.check()
    h.close()


def test_what_is_set_aside_for_a_job_is_what_it_needs_and_ends_with_the_window(h: Harness) -> None:
    """A window of 6 s of which it has units, and one of 4 s that it lacks: until that opens, and not longer."""
    h.pass_ms(12_000 - h.clock.wall_ms() % 12_000)
    scene = Scene(h, (6, 4), (3, 1))
    h.pass_ms(6_000)  # 6: the first limit is free, the second one used up by what comes now
    scene.client.ask(wire.LimitsTake(run=scene.run, limit="l1"))
    waits = scene.send(h.session("worker"), (2, 1), 0)
    take = wire.LimitsTake(run=scene.run, limit="l0", wait_ms=0)
    assert scene.client.ask(take) == wire.LimitTaken()
    assert scene.client.ask(take) == wire.LimitBusy(), "two are set aside"
    h.pass_ms(1_999)
    assert waits.reply is None
    h.pass_ms(1)
    assert waits.reply is not None
    h.pass_ms(4_000)
    assert [scene.client.ask(take) for _ in range(4)] == [wire.LimitTaken()] * 3 + [wire.LimitBusy()]

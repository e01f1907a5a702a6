"""The power fails under load, and what the clients were told before is there after it.

Not collected with the other tests, see conftest.py: `pytest -s tests/power`. How many cuts of each kind there are, and
with which seed, is said by POWER_CUTS and POWER_SEED; both are printed, and what each cut did. The seed gives the same
clients and the same luck; when exactly the power fails depends on the machine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.power import golden
from tests.power.actors import Actor, declare, window
from tests.power.book import Book
from tests.power.checks import Checks
from tests.power.disk import LUCKS, Cut
from tests.power.life import Life
from tests.power.machine import Machine
from tests.power.speaker import Speaker
from tests.power.web import Web

CUTS = int(os.environ.get("POWER_CUTS", 5))
SEED = int(os.environ.get("POWER_SEED", random.randrange(10**6)))
NEAR, FAR = 4, 2  # clients that the cut ends, and clients elsewhere, beside one over HTTP
SHORTEST_S, LONGEST_S = 0.2, 1.2  # of load before a cut
SLOW_MS = (0, 0, 3, 25)  # what a sync takes more: the engine waits for slow ones elsewhere
GRANT_S = 5  # in which somebody should be given a hold
CHECKPOINT_S = 10  # in which there should be one; the cut comes without it, else

pytestmark = pytest.mark.timeout(60 + 20 * CUTS)


class World:
    """A machine, its clients, and what they were told."""

    def __init__(self, machine: Machine, seed: str, payload: int = 100) -> None:
        self.machine, self.payload = machine, payload
        self.rng = random.Random(seed)
        self.book = Book()
        self.far: list[Life] = []
        self.near: list[Actor] = []
        self.busy: list[Life] = []

    def boot(self, fail: str = "") -> int:
        """Switches the machine on; the far clients come back, and all that was told is compared. How many records the
        disk's log has when the daemon listens."""
        self.machine.start(fail, slow_ms=self.rng.choice(SLOW_MS))
        steps = self.machine.disk.records_so_far()
        self.book.boot = self.machine.boot
        self._return(self.far)
        speaker = self.machine.local("check")
        speaker.connect()
        self.book.run = self.book.run or speaker.join("main")
        self.book.id(speaker.join("main"), "main")
        if not self.far:
            secret = speaker.call("keys.create", permissions=["work", "usage", "resource_config"])["secret"]
            self.far = [self._actor(f"far{n}", secret) for n in range(FAR)]
            self.far.append(Web("web", self.machine, secret, self.book, random.Random(self.rng.random())))
        if self.book.tokens:
            Checks(self.book, speaker, self.rng).run()
        budget = f"budget-{self.book.boot:04d}"
        declare(speaker, budget)
        self.book.budget = budget
        self.book.window = window()
        speaker.close()
        assert not self.book.wrong, "\n".join(self.book.wrong)
        return steps

    def kill_daemon(self) -> None:
        """Another daemon takes over while the power stays on: all that was told is there, to local processes, too."""
        self.machine.start_again()
        for actor in self.busy:
            actor.join()
        self._return(self.busy)
        speaker = self.machine.local("check")
        speaker.connect()
        Checks(self.book, speaker, self.rng).run()
        speaker.close()
        assert not self.book.wrong, "\n".join(self.book.wrong)

    @staticmethod
    def _return(actors: Sequence[Life]) -> None:
        for actor in actors:
            actor.come_back()
        for actor in actors:
            actor.join()

    def break_start(self, steps: int) -> None:
        """Switches it on, and the power fails at one of so many steps."""
        self.machine.start(end=self.rng.randint(0, steps))
        self.cut()

    def local(self, name: str) -> Speaker:
        """A session of this machine, in the run."""
        speaker = self.machine.local(name)
        speaker.connect()
        speaker.join("main")
        return speaker

    def _actor(self, name: str, secret: str = "") -> Actor:
        speaker = self.machine.remote(name, secret) if secret else self.machine.local(name)
        speaker.connect()
        speaker.join("main")
        return Actor(name, speaker, self.book, random.Random(self.rng.random()), self.payload)

    def work(self) -> None:
        """Load, for a moment."""
        self._go()
        time.sleep(self.rng.uniform(SHORTEST_S, LONGEST_S))

    def work_until_checkpoint(self) -> None:
        """Load, until a moment after the log begins to be copied into the database."""
        self._go()
        before = self.machine.database_changed_ns()
        deadline = time.monotonic() + CHECKPOINT_S
        while self.machine.database_changed_ns() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(self.rng.choice((0, 0.005, 0.05, 0.5)) * self.rng.random())

    def work_until_grant(self) -> None:
        """Little load, until somebody was just given a hold: then only what that reply itself waits for is synced."""
        if self.busy:
            for actor in self.busy:
                actor.go()
        else:
            self._go()
        for actor in self.busy:
            actor.pause_s = 0.05
        time.sleep(self.rng.uniform(0, LONGEST_S))
        self.book.given.clear()
        self.book.given.wait(GRANT_S)

    def _go(self) -> None:
        self.near = [self._actor(f"near{n}") for n in range(NEAR)]
        self.machine.disk.arm()
        self.busy = [*self.near, *self.far]
        for actor in self.busy:
            actor.go()

    def cut(self, lucks: tuple[float, ...] = LUCKS) -> Cut:
        """The power fails. What was on its way to the clients arrives."""
        cut = self.machine.cut(self.rng, lucks)
        for actor in self.busy:
            actor.join()
        for actor in self.near:
            actor.close()
        self.near, self.busy = [], []
        self.book.lose_power()
        print(f"  boot {self.machine.boot}: {self.book.facts} facts; {cut}", flush=True)
        assert not self.book.wrong, "\n".join(self.book.wrong)
        return cut

    def close(self) -> None:
        self.machine.close()
        for actor in (*self.near, *self.far):
            actor.close()


@pytest.fixture
def world(tmp_path: Path, library: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    print(f"\n{request.node.name}: POWER_CUTS={CUTS} POWER_SEED={SEED}", flush=True)
    place = World(Machine(tmp_path, library), f"{SEED} {request.node.name}")
    yield place
    place.close()


def test_the_power_fails_under_load(world: World) -> None:
    for _ in range(CUTS):
        world.boot()
        world.work()
        world.cut()
    world.boot()


def test_the_power_fails_right_after_a_grant(world: World) -> None:
    """Of those to local processes, none of which survives, some need not be on disk."""
    for _ in range(CUTS):
        fails = (f"~-wal:1:{world.rng.randint(1, 3)}", f"-wal:{world.rng.randint(1, 20)}:1")
        world.boot(world.rng.choice(("", "", "", *fails)))
        world.work_until_grant()
        world.cut(lucks=(0.0, 0.5))
    world.boot()


def test_what_a_reader_is_shown_is_on_disk(world: World) -> None:
    """A grant need not be; but once another session was shown it, there is no way back."""
    for number in range(CUTS):
        world.boot()
        worker, reader = world.local("worker"), world.local("reader")
        queue = {"run": world.book.run, "queue": f"shown-{number}"}
        job = worker.call("queues.send", **queue, key="1", input="1", attempts=2)["job"]
        worker.call("queues.admit", queues=[queue])
        assert reader.call("queues.result", job=job, wait_ms=0)["attempt"] == 1
        world.cut(lucks=(0.0,))
        worker.close()
        reader.close()
        world.boot()
        reader = world.local("reader")
        found = reader.call("queues.result", job=job, wait_ms=0)
        assert (found["state"], found["attempt"]) == ("ready", 1), found
        reader.close()
        world.cut()


def test_the_daemon_is_killed_and_then_the_power_fails(world: World) -> None:
    """What was written and not synced survives the first, and may be lost with the second."""
    for _ in range(CUTS):
        world.boot()
        world.work_until_grant()
        world.kill_daemon()
        if world.rng.random() < 0.7:
            world.work_until_grant()
        world.cut(lucks=(0.0, 0.5))
    world.boot()


def test_the_power_fails_again_while_the_daemon_starts(world: World) -> None:
    """At any step of recovering: the second cut comes at a record of the log at random."""
    for _ in range(CUTS):
        steps = world.boot()
        world.work()
        world.cut()
        world.break_start(steps)
    world.boot()


def test_a_sync_of_the_log_fails_and_then_the_power(world: World) -> None:
    for _ in range(CUTS):
        world.boot(f"-wal:{world.rng.randint(1, 200)}:{world.rng.choice((1, 1, 2, 5))}")
        world.work()
        world.cut()
    world.boot()


def test_the_power_fails_while_the_log_is_copied(world: World) -> None:
    """The load is heavy enough for checkpoints. In half of them the sync of the
    database fails, once or from then on."""
    world.payload = 60_000
    for _ in range(CUTS):
        world.boot(world.rng.choice(("", "runstate.db:1:1", "runstate.db:1:1000", "~-wal:1:1")))
        world.work_until_checkpoint()
        world.cut()
    world.boot()


def test_the_power_fails_around_a_clean_stop(world: World) -> None:
    """While the daemon ends, and after that: it has not promised more to the disk than is there."""
    for _ in range(CUTS):
        world.boot()
        world.work()
        world.machine.stop(world.rng.choice((0.01, 0.1, 10)))
        world.cut()
    world.boot()


def test_the_power_fails_at_the_first_start(tmp_path: Path, library: Path) -> None:
    """The directory is empty, or has what a start left that was cut short; then it is a start like any other."""
    steps = 100
    print(f"\nfirst start: POWER_CUTS={CUTS} POWER_SEED={SEED}")
    for number in range(CUTS):
        place = tmp_path / str(number)
        place.mkdir()
        world = World(Machine(place, library), f"{SEED} {number}")
        try:
            world.break_start(steps)
            steps = world.boot()
            world.work()
            world.cut()
            world.boot()
        finally:
            world.close()


@pytest.mark.parametrize("version", ["v2", "v7", "v8"])
def test_the_power_fails_during_an_upgrade(tmp_path: Path, library: Path, version: str) -> None:
    """Of a database that an older daemon has left; perhaps more than once."""
    steps = 300
    print(f"\nupgrade from {version}: POWER_CUTS={CUTS} POWER_SEED={SEED}")
    for number in range(max(1, CUTS // 5)):
        place = tmp_path / str(number)
        place.mkdir()
        world = World(Machine(place, library), f"{SEED} {version} {number}")
        golden.lay_down(world.machine.home.state_dir, version)
        try:
            for _ in range(world.rng.randint(1, 3)):
                world.break_start(steps)
                golden.check_backup(world.machine, version)
            steps = world.boot()
            golden.check(world.machine)
            world.work()
            world.cut()
            golden.check_backup(world.machine, version)
            world.boot()
            golden.check(world.machine)
        finally:
            world.close()


def test_a_daemon_that_does_not_wait_for_the_disk_is_found_out(world: World) -> None:
    """The other tests are good for something: of a daemon whose replies do not wait for the disk they say so, in a few
    cuts, as with one in four of them all survives."""
    world.machine.options = ["--sync", "normal"]
    with pytest.raises(AssertionError, match="boot"):
        for _ in range(20):
            world.boot()
            world.work()
            world.cut()

"""The lines, from seeds: a noun made for this test, whose wants are like those of limits and slots to come.

The reference is one greedy pass over all that wait, by age. The lines must come to the same by looking only at those
whom a change concerns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.domain import nouns, sessions
from runstated.domain.access import Access
from runstated.domain.answers import Parked
from runstated.domain.core import Core
from runstated.domain.holds import STALE_MAX as LAPSES_STALE_MAX
from runstated.domain.holds import Holds, Lease
from runstated.domain.lines import STALE_MAX, Lines
from runstated.domain.waits import Call, Opening, Topic
from runstated.engine.entries import Ask, Away, Cancelled, Ended, Opened, Tick
from tests.harness import Harness, check_lines

LIMITS = ("budget-like", "fast", "slow")
POOLS = ("gpu", "disk")
SIZE = {"budget-like": 5, "fast": 4, "slow": 2, "gpu": 3, "disk": 2}
SEEDS = range(50)
STEPS = 60


class Take(wire.WaitingRequest[wire.Ok], tag="test.take", kw_only=True, frozen=True):
    """Takes all of ``limits`` and ``slots`` in one step, or nothing."""

    limits: dict[str, int] = msgspec.field(default_factory=dict)
    slots: dict[str, int] = msgspec.field(default_factory=dict)


@dataclass
class Units:
    """What is free of everything, and the verb that takes it."""

    free: dict[str, int] = field(default_factory=lambda: dict(SIZE))
    taken: list[tuple[str, int]] = field(default_factory=list)  # who was served, in order
    fails: bool = False

    def take(self, core: Core, request: Take) -> wire.Ok | Parked:
        lacking = self.lacking(core, request.limits)
        if lacking:
            return Parked(lines=lacking, signals=(), late=wire.OnceHeld())
        lacking = self.lacking(core, request.slots)
        if lacking:
            held_up = tuple(line(name) for name in sorted(request.limits))
            return Parked(lines=held_up + lacking, signals=(), late=wire.OnceHeld(), aside=True)
        if self.fails:
            raise RuntimeError("a verb that fails before it has changed anything")
        self.move({**request.limits, **request.slots}, -1)
        self.taken.append((core.caller.session, core.caller.request_id))
        # Who goes before others takes what was set aside for them: they are to look again what they lack.
        for name in (*request.limits, *request.slots):
            core.wake(line(name))
        return wire.Ok()

    def lacking(self, core: Core, wants: dict[str, int]) -> tuple[Topic, ...]:
        names = [name for name in sorted(wants) if self.free[name] < wants[name] or self.ahead(core, line(name))]
        return tuple(line(name) for name in names)

    @staticmethod
    def ahead(core: Core, line: Topic) -> bool:
        caller = core.caller
        mine = (caller.rank, caller.ticket, (caller.session, caller.request_id))
        older = [call for call in core.calls() if line in call.lines and call.place < mine]
        assert core.ahead(line) == any(not call.away for call in older)
        return core.ahead(line)

    def move(self, wants: dict[str, int], sign: int) -> None:
        for name, units in wants.items():
            self.free[name] += sign * units
            assert 0 <= self.free[name] <= SIZE[name]


class Give(wire.Request[wire.Ok], tag="test.give", kw_only=True, frozen=True):
    """Gives units back."""

    units: dict[str, int] = msgspec.field(default_factory=dict)


def line(name: str) -> Topic:
    return ("test", name)


@dataclass
class Waiting:
    """A call, as far as the reference needs it."""

    key: tuple[str, int]
    place: Any
    request: Take
    away: bool
    lines: tuple[Topic, ...]


def greedy(units: dict[str, int], calls: list[Waiting]) -> set[tuple[str, int]]:
    """Who could go on if all were looked at again, by age. A call holds up only lines in which it stands, and of those
    only what it would still stand in."""
    free, blocked = dict(units), set()
    served = set()

    def lacking(wants: dict[str, int]) -> set[str]:
        return {name for name, many in wants.items() if free[name] < many or name in blocked}

    for call in sorted(calls, key=lambda call: call.place):
        if call.away:
            continue
        stands = lacking(call.request.limits)
        if not stands:
            stands = lacking(call.request.slots)
            stands |= set(call.request.limits) if stands else set()
        if not stands:
            served.add(call.key)
            for name, many in {**call.request.limits, **call.request.slots}.items():
                free[name] -= many
        blocked |= {name for name in stands if line(name) in call.lines}
    return served


class World:
    """A daemon whose only noun is the one above."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units = Units()
        monkeypatch.setattr(nouns, "VERBS", {**nouns.VERBS, Take: self.units.take, Give: self.give})
        self.h = Harness()
        self.lines: Lines = self.h.core().lines
        self.held: dict[tuple[str, int], dict[str, int]] = {}
        self.numbers = iter(range(1, 100_000))
        self.replies: dict[tuple[str, int], list[wire.Reply]] = {}
        self.session_number = 0
        self.sessions: list[str] = []
        for _ in range(5):
            self.new_session()

    def give(self, core: Core, request: Give) -> wire.Ok:
        self.units.move(request.units, 1)
        for name in request.units:
            core.wake(line(name))
        return wire.Ok()

    def new_session(self) -> None:
        self.session_number += 1
        name = f"s{self.session_number}"
        row = sessions.Session(name, "default", name, "", 1, "")
        self.run(Opened(row, 0, (), wire.Welcome(protocol=1, version="", pid=1)))
        self.sessions.append(name)

    def run(self, *entries: Any) -> None:
        rest = list(entries)
        while rest:
            rest = rest[self.h.turns.run(rest) :]
            self.h.commit()
            for keys, reply in self.h.turns.durable().replies:
                for key in keys:
                    self.replies.setdefault(key, []).append(reply)

    def ask(self, session: str, request: wire.Request[Any]) -> tuple[str, int]:
        number = next(self.numbers)
        self.run(Ask(session, Access(), number, request, number, self.h.clock.lease_ms()))
        return (session, number)

    def hold(self, session: str) -> int:
        """The token of something that the session holds."""
        keeper = self.h.session("keeper")
        run = keeper.ask(wire.RunsJoin(name="r")).run
        (granted,) = self.replies[self.ask(session, wire.OnceAcquire(run=run, key="k"))]
        assert isinstance(granted, wire.OnceGranted)
        return granted.token


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.h.close()


def random_take(rng: random.Random, within: tuple[int, ...]) -> Take:
    limits = {name: rng.randint(1, SIZE[name]) for name in LIMITS if rng.random() < 0.4}
    slots = {name: rng.randint(1, SIZE[name]) for name in POOLS if rng.random() < 0.5}
    if not limits and not slots:
        slots = {"gpu": 1}
    return Take(limits=limits, slots=slots, wait_ms=rng.choice([None, None, 50]), within=within)


class Story:
    """Random steps, each compared with the reference."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.away: set[str] = set()
        self.served = 0
        keeper = world.h.session("keeper")
        run = keeper.ask(wire.RunsJoin(name="r")).run
        self.token = keeper.ask(wire.OnceAcquire(run=run, key="k", lease_ms=600_000)).token

    def waiting(self) -> dict[tuple[str, int], Waiting]:
        calls = self.world.lines.calls.values()
        return {call.key: Waiting(call.key, call.place, call.request, call.away, call.lines) for call in calls}  # type: ignore[arg-type]

    def step(self) -> None:
        world, rng = self.world, self.rng
        calls = self.waiting()
        here = [name for name in world.sessions if name not in self.away]
        acts = ["take"] * 5 + ["give"] * 4 + ["cancel", "die", "away", "back", "back", "late", "fault"]
        act = rng.choice(acts)
        if act in ("take", "fault") and here:
            request = random_take(rng, (self.token,) if rng.random() < 0.2 else ())
            world.units.fails = act == "fault"
            key = world.ask(rng.choice(here), request)
            world.units.fails = False
            call = Waiting(key, (0 if request.within else 1, key[1], key), request, False, ())
            calls[key] = call
            failed = [other for other in calls if isinstance(world.replies.get(other, [None])[0], wire.Error)]
            assert not failed or act == "fault"
            calls = {other: call for other, call in calls.items() if other not in failed}
        elif act == "give" and world.held:
            units = world.held.pop(rng.choice(sorted(world.held)))
            world.ask("keeper", Give(units=units))
        elif act == "cancel" and calls:
            key = rng.choice(sorted(calls))
            del calls[key]
            world.run(Cancelled(*key))
        elif act == "die":
            name = rng.choice(world.sessions)
            world.sessions.remove(name)
            self.away.discard(name)
            world.run(Ended(name, "died"))
            world.new_session()
            calls = {key: call for key, call in calls.items() if key[0] != name}
        elif act == "away" and here:
            self.away.add(rng.choice(here))
            world.run(*(Away(name, True) for name in self.away))
        elif act == "back" and self.away:
            name = rng.choice(sorted(self.away))
            self.away.remove(name)
            world.run(Away(name, False))
        elif act == "late":
            world.h.clock.pass_ms(rng.choice([10, 60]))
            late = [call.key for call in world.lines.calls.values() if (call.until or 1e20) <= world.h.clock.lease_ms()]
            world.run(Tick())
            assert all(world.replies[key] == [wire.OnceHeld()] for key in late)
            calls = {key: call for key, call in calls.items() if key not in late}
        self.check(act, calls)

    def check(self, act: str, calls: dict[tuple[str, int], Waiting]) -> None:
        world = self.world
        served = world.units.taken[self.served :]
        self.served = len(world.units.taken)
        for key in served:
            assert world.replies[key] == [wire.Ok()]
            world.held[key] = {**calls[key].request.limits, **calls[key].request.slots}
        check_lines(world.h.core())
        left = self.waiting()
        assert set(left) == set(calls) - set(served)
        # nobody sleeps beside what they could have
        could_go_on = greedy(world.units.free, list(left.values()))
        assert not could_go_on, f"after {act}: {could_go_on} of {left}, with {world.units.free} free"
        total = dict(world.units.free)
        for units in world.held.values():
            total = {name: many + units.get(name, 0) for name, many in total.items()}
        assert total == SIZE


@pytest.mark.parametrize("seed", SEEDS)
def test_lines_serve_as_one_pass_by_age_over_all_that_wait_would(world: World, seed: int) -> None:
    print(f"seed {seed}")
    story = Story(world, seed)
    for _ in range(STEPS):
        story.step()


def test_what_lacks_a_limit_holds_up_that_limit_only(world: World) -> None:
    a, b, c, d = world.sessions[:4]
    world.ask(a, Take(limits={"slow": 2}))
    waits = world.ask(b, Take(limits={"slow": 1, "fast": 1}, slots={"gpu": 3}))
    behind = world.ask(c, Take(limits={"slow": 1}))
    beside = world.ask(d, Take(limits={"fast": 4}, slots={"gpu": 3}))
    assert world.units.taken[-1] == beside
    assert {key: set(call.lines) for key, call in world.lines.calls.items()} == {
        waits: {line("slow")},
        behind: {line("slow")},
    }


def test_what_has_its_units_and_lacks_slots_has_them_set_aside(world: World) -> None:
    a, b, c = world.sessions[:3]
    world.ask(a, Take(slots={"gpu": 3}))
    waits = world.ask(b, Take(limits={"fast": 2}, slots={"gpu": 1}))
    behind = world.ask(c, Take(limits={"fast": 1}))
    assert set(world.lines.calls[waits].lines) == {line("fast"), line("gpu")}
    assert behind in world.lines.calls, "two of four units are set aside, and who is older goes first"
    world.run(Cancelled(*waits))
    assert world.units.taken[-1] == behind


def test_a_call_that_stands_in_several_lines_may_leave_one_of_them(world: World) -> None:
    a, b, c, d = world.sessions[:4]
    world.ask(a, Take(slots={"gpu": 2, "disk": 2}))
    waits = world.ask(b, Take(slots={"gpu": 2, "disk": 1}))
    small = world.ask(c, Take(slots={"gpu": 1}))
    assert small in world.lines.calls
    token = world.hold(d)
    world.ask("keeper", Give(units={"gpu": 2}))
    assert set(world.lines.calls[waits].lines) == {line("disk")}, "it has its gpus and lacks a disk"
    assert world.units.taken[-1] == small, "who lacks only disks holds up only disks"
    inner = world.ask(d, Take(slots={"gpu": 2}, within=(token,)))
    assert world.units.taken[-1] == inner


def test_the_head_of_a_line_that_goes_away_is_passed_over_at_once(world: World) -> None:
    a, b, c = world.sessions[:3]
    world.ask(a, Take(slots={"gpu": 1}))
    big = world.ask(b, Take(slots={"gpu": 3}))
    small = world.ask(c, Take(slots={"gpu": 2}))
    assert small in world.lines.calls
    world.run(Away(b, True))
    assert world.units.taken[-1] == small
    assert big in world.lines.calls, "it keeps its place"


def test_who_is_overtaken_by_a_session_that_is_back_holds_up_other_lines_no_more(world: World) -> None:
    a, b, c, d = world.sessions[:4]
    world.ask(a, Take(limits={"fast": 1}, slots={"gpu": 2}))
    world.ask(b, Take(limits={"fast": 4}))
    world.run(Away(b, True))
    aside = world.ask(c, Take(limits={"fast": 2}, slots={"gpu": 2}))
    small = world.ask(d, Take(slots={"gpu": 1}))
    assert set(world.lines.calls[aside].lines) == {line("fast"), line("gpu")}
    assert small in world.lines.calls
    world.run(Away(b, False))
    assert set(world.lines.calls[aside].lines) == {line("fast")}
    assert world.units.taken[-1] == small


def test_who_is_overtaken_by_an_older_call_from_another_line_holds_up_other_lines_no_more(world: World) -> None:
    a, b, c, d = world.sessions[:4]
    token = world.hold(a)
    world.ask(a, Take(limits={"slow": 2}, slots={"gpu": 2}))
    older = world.ask(b, Take(limits={"slow": 2, "fast": 3}))
    aside = world.ask(c, Take(limits={"fast": 2}, slots={"gpu": 2}))
    small = world.ask(d, Take(slots={"gpu": 1}))
    world.ask(a, Take(limits={"fast": 2}, within=(token,)))
    assert set(world.lines.calls[older].lines) == {line("slow")}
    assert set(world.lines.calls[aside].lines) == {line("fast"), line("gpu")}
    world.ask(a, Give(units={"slow": 2}))
    assert set(world.lines.calls[older].lines) == {line("fast")}
    assert set(world.lines.calls[aside].lines) == {line("fast")}
    assert world.units.taken[-1] == small


def test_a_call_of_a_session_that_is_away_already_is_passed_over_too(world: World) -> None:
    a, b, c = world.sessions[:3]
    first = world.ask(a, Take(slots={"gpu": 3}))
    world.run(Away(b, True))
    away = world.ask(b, Take(slots={"gpu": 3}))
    small = world.ask(c, Take(slots={"gpu": 1}))
    world.run(Ended(first[0], "died"))
    world.ask(c, Give(units={"gpu": 3}))
    assert world.units.taken[-1] == small
    assert away in world.lines.calls


# ------------------------------------------------------------------ the indexes


@pytest.mark.parametrize("seed", SEEDS)
def test_the_indexes_say_what_the_calls_and_leases_say_after_any_change(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    core = Core("default", Harness().spaces.numbers, Opening(0, 0))
    for pool in POOLS_OF_LEASES:
        pool.used = 0
    for name in "abc":
        core.lines.open(name)
    for now_ms in range(0, 400, 2):
        change(rng, core.lines, core.holds, now_ms)
        check_lines(core)
        check_holds(core.holds)


TOPICS: tuple[Topic, ...] = (("once", "r", "x"), ("once", "r", "y"), ("queue", "r", "q"), ("run", "r"))


@dataclass
class Pool:
    """What units are taken of."""

    id: str
    used: int = 0


POOLS_OF_LEASES = (Pool("p1"), Pool("p2"))


def check_holds(holds: Holds) -> None:
    """Who holds what, told from the leases anew."""
    live = list(holds.of_token.values())
    for session in "abc":
        assert set(holds.of_session(session)) == {lease for lease in live if lease.session == session}
        assert holds.number_of_session(session) == len(holds.of_session(session))
        for request in range(1, 7):
            assert set(holds.of_request(session, request)) == {
                lease for lease in live if (lease.session, lease.request) == (session, request)
            }
    for run in ("r", "r2"):
        assert set(holds.of_run(run)) == {lease for lease in live if lease.run == run}
        assert holds.is_any_in_run(run) == bool(holds.of_run(run))
    for topic in {topic for lease in live for topic in lease.topics} | set(TOPICS):
        assert set(holds.of_topic(topic)) == {lease for lease in live if topic in lease.topics}
        assert holds.is_held(topic) == bool(holds.of_topic(topic))
    for pool in POOLS_OF_LEASES:
        assert pool.used == sum(units for lease in live for each, units in lease.taken if each is pool)
    lapses = set(holds._lapses)
    assert all(any(token == lease.token and at <= lease.expires for at, token in lapses) for lease in live)


def new_call(rng: random.Random, session: str, request_id: int, within: tuple[int, ...] = ()) -> Call:
    return Call(
        session=session,
        access=Access(),
        request_id=request_id,
        request=wire.OnceAcquire(run="r", key="x", within=within),
        rank=rng.randint(0, 1),
        ticket=rng.randint(1, 20),
        since_ms=0,
        until=rng.choice([None, rng.randint(1, 100)]),
        late=wire.OnceHeld(),
        lines=tuple(rng.sample(TOPICS, rng.randint(0, 2))),
        ages={topic: rng.randint(1, 20) for topic in TOPICS if rng.random() < 0.3},
        aside=rng.random() < 0.3,
        signals=tuple(rng.sample(TOPICS, rng.randint(0, 2))),
    )


def change(rng: random.Random, lines: Lines, holds: Holds, now_ms: int) -> None:
    session = rng.choice("abc")
    act = rng.randrange(12)
    if act <= 3 and session in lines.sessions:
        lines.park(new_call(rng, session, rng.randint(1, 6), tuple(rng.sample(range(1, 8), rng.randint(0, 2)))))
    elif act == 4:
        lines.leave((session, rng.randint(1, 6)))
    elif act == 5:
        lines.set_away(session, rng.random() < 0.5)
    elif act == 6:
        push = rng.choice([None, wire.RunEnded(run="r", state="stopped", message="")])
        lines.answer(rng.choice(TOPICS), wire.Ok(), push)
    elif act == 7 and session in lines.sessions:
        lines.subscribe(rng.choice(TOPICS), session)
    elif act == 8:
        lines.close(session)
    elif act == 9:
        lines.open(session)
    else:
        change_hold(rng, session, holds, now_ms)


def change_hold(rng: random.Random, session: str, holds: Holds, now_ms: int) -> None:
    token = rng.randint(1, 7)
    lease = holds.of_token.get(token)
    if lease is None:
        kind, run = rng.choice((("once", "r"), ("job", "r2"), ("slots", "r")))
        subject = rng.choice("xy") if kind == "once" else "p1"
        lease = Lease(token, "default", kind, subject, run, session, rng.randint(1, 6), 50, 0)
        holds.add(lease, now_ms)
        for pool in rng.sample(POOLS_OF_LEASES, rng.randint(0, 2) if kind == "job" else int(kind == "slots")):
            holds.add_units(lease, pool, rng.randint(1, 3))
    elif rng.random() < 0.5:
        holds.drop(lease)
    elif rng.random() < 0.5:
        assert holds.beat(session, token, now_ms) == (lease.session == session)
    else:
        holds.renew(lease, rng.randint(1, 100), now_ms)


# ------------------------------------------------------------------ time


def lease_of(token: int, length_ms: int = 50) -> Lease:
    return Lease(token, "default", "once", "x", "r", "s", 1, length_ms, 0)


def test_what_has_ended_rings_nobody() -> None:
    core = Core("default", Harness().spaces.numbers, Opening(0, 0))
    core.lines.open("s")
    lease = lease_of(1)
    core.holds.add(lease, 0)
    call = new_call(random.Random(0), "s", 1)
    call.until = 30
    core.lines.park(call)
    assert core.next_lease() == 30
    core.lines.leave(call.key)
    assert core.next_lease() == 50
    core.holds.drop(lease)
    assert core.next_lease() is None


def test_heaps_are_cleared_of_what_has_ended() -> None:
    holds = Holds()
    first = lease_of(0, 1)
    holds.add(first, 0)
    for token in range(1, 3 * LAPSES_STALE_MAX):
        lease = lease_of(token)
        holds.add(lease, 0)
        holds.drop(lease)
        assert holds.next_lapse() == 1
    assert len(holds._lapses) <= LAPSES_STALE_MAX + 3


def test_waits_that_have_ended_do_not_pile_up() -> None:
    lines = Lines()
    lines.open("s")
    stays = new_call(random.Random(0), "s", 0)
    stays.until = 1
    lines.park(stays)
    for number in range(1, 3 * STALE_MAX):
        call = new_call(random.Random(0), "s", number)
        call.until = 50
        lines.park(call)
        lines.leave(call.key)
        assert lines.next_late() == 1
    assert len(lines._lates) <= STALE_MAX + 3


def test_a_wait_comes_up_once_however_often_it_was_parked_anew() -> None:
    rng = random.Random(0)
    lines = Lines()
    lines.open("s")
    for _ in range(3):
        call = new_call(rng, "s", 1)
        call.until = 30
        lines.park(call)
    assert lines.late(29) == []
    assert lines.late(30) == [call]


def test_position_is_the_place_in_the_line_where_it_is_furthest_back(world: World) -> None:
    a, b, c = world.sessions[:3]
    world.ask(a, Take(slots={"gpu": 3, "disk": 2}))
    world.ask(b, Take(slots={"gpu": 3}))
    last = world.ask(c, Take(slots={"gpu": 1, "disk": 1}))
    assert world.lines.position(world.lines.calls[last]) == 1


def test_the_test_noun_is_a_wire_request() -> None:
    assert msgspec.structs.fields(Take)[-1].name == "slots"
